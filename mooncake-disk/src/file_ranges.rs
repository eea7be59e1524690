//! Address ranges that stand for ranges of files. `F` is the type of the files.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex, RwLock};

/// Next address of files that are not mapped. No processor has memory there.
static NEXT: AtomicU64 = AtomicU64::new(1 << 60);

/// Ranges of one node. They do not overlap.
#[derive(Debug)]
pub(crate) struct RangeTable<F> {
    by_addr: RwLock<BTreeMap<u64, Arc<FileRange<F>>>>,
}

/// Range of addresses that stands for a range of a file.
#[derive(Debug)]
pub(crate) struct FileRange<F> {
    addr: u64,
    len: u64,
    file: Arc<F>,
    /// Offset of the first byte in the file.
    offset: u64,
    users: Mutex<usize>,
    idle: Condvar,
}

/// Registration of a range. Its drop waits for the operations on the range.
#[derive(Debug)]
pub(crate) struct RangeRegistration<F> {
    ranges: Arc<RangeTable<F>>,
    range: Arc<FileRange<F>>,
}

/// Use of a range by one operation.
#[derive(Debug)]
pub(crate) struct RangeUse<F>(Arc<FileRange<F>>);

impl<F> Default for RangeTable<F> {
    fn default() -> Self {
        Self { by_addr: RwLock::default() }
    }
}

impl<F> RangeTable<F> {
    pub(crate) fn register(
        self: &Arc<Self>,
        addr: u64,
        len: u64,
        file: Arc<F>,
        offset: u64,
    ) -> Result<RangeRegistration<F>> {
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(Error::invalid(format!(
                "cannot open range to peers: invalid range. address={addr:#x} len={len}"
            )));
        }
        let mut by_addr = self.by_addr.write();
        if let Some((other, range)) = by_addr.range(..addr + len).next_back()
            && other + range.len > addr
        {
            return Err(Error::invalid(format!(
                "cannot open range to peers: {len} bytes at {addr:#x} overlap the {} bytes at {other:#x}",
                range.len
            )));
        }
        let (users, idle) = Default::default();
        let range = Arc::new(FileRange { addr, len, file, offset, users, idle });
        by_addr.insert(addr, range.clone());
        Ok(RangeRegistration { ranges: self.clone(), range })
    }

    /// Registers a range like [`register`](Self::register), at the next free addresses.
    pub(crate) fn register_anywhere(
        self: &Arc<Self>,
        len: u64,
        file: Arc<F>,
    ) -> Result<RangeRegistration<F>> {
        // A gap between ranges, so that an operation that runs over an end does not find the next
        // range.
        let step = len.saturating_add(1 << 20).next_multiple_of(1 << 20);
        self.register(NEXT.fetch_add(step, Ordering::Relaxed), len, file, 0)
    }

    /// Returns the file range of `[addr, addr + len)`, held until the use is dropped.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Result<(RangeUse<F>, u64)> {
        if len == 0 {
            return Err(Error::invalid(format!("invalid transfer: no bytes. address={addr:#x}")));
        }
        let Some(end) = addr.checked_add(len) else {
            return Err(Error::invalid(format!(
                "invalid transfer: range overflows. address={addr:#x} len={len}"
            )));
        };
        let by_addr = self.by_addr.read();
        let range = by_addr.range(..=addr).next_back().map(|(_, range)| range);
        let range = range.filter(|range| end <= range.addr + range.len).ok_or_else(|| {
            Error::invalid(format!("{len} bytes at {addr:#x} do not lie in one open range of a file"))
        })?;
        // Counted under the lock of the table, so that closing the range sees it.
        Ok((RangeUse::new(range.clone()), range.offset + (addr - range.addr)))
    }
}

impl<F> RangeUse<F> {
    fn new(range: Arc<FileRange<F>>) -> Self {
        *range.users.lock() += 1;
        Self(range)
    }

    pub(crate) fn file(&self) -> &Arc<F> {
        &self.0.file
    }
}

impl<F> Clone for RangeUse<F> {
    fn clone(&self) -> Self {
        Self::new(self.0.clone())
    }
}

impl<F> Drop for RangeUse<F> {
    fn drop(&mut self) {
        let mut users = self.0.users.lock();
        *users -= 1;
        if *users == 0 {
            self.0.idle.notify_all();
        }
    }
}

impl<F> RangeRegistration<F> {
    /// Returns the address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.range.addr
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.range.len
    }

    pub(crate) fn file(&self) -> &F {
        &self.range.file
    }
}

impl<F> Drop for RangeRegistration<F> {
    fn drop(&mut self) {
        self.ranges.by_addr.write().remove(&self.range.addr);
        let mut users = self.range.users.lock();
        while *users != 0 {
            self.range.idle.wait(&mut users);
        }
    }
}
