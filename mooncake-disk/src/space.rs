//! Which addresses are which bytes of which file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::file::BlockFile;

/// Addresses of files that are not mapped: no processor has memory there.
static NEXT: AtomicU64 = AtomicU64::new(1 << 60);

/// The ranges of one node. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Spaces {
    by_addr: RwLock<BTreeMap<u64, Arc<Space>>>,
}

/// A range of addresses that stands for a range of a file.
#[derive(Debug)]
pub(crate) struct Space {
    addr: u64,
    len: u64,
    file: Arc<BlockFile>,
    /// Where in the file the first byte lies.
    offset: u64,
    users: Mutex<usize>,
    idle: Condvar,
}

/// Keeps a range listed; when it goes, it waits for the operations on it.
#[derive(Debug)]
pub(crate) struct Listed {
    spaces: Arc<Spaces>,
    space: Arc<Space>,
}

/// One operation's hold on a range.
#[derive(Debug)]
pub(crate) struct Use(Arc<Space>);

impl Spaces {
    pub(crate) fn list(
        self: &Arc<Self>,
        addr: u64,
        len: u64,
        file: Arc<BlockFile>,
        offset: u64,
    ) -> Result<Listed> {
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(Error::invalid(format!("{len} bytes at {addr:#x} cannot be opened to peers")));
        }
        let mut by_addr = self.by_addr.write();
        if let Some((other, space)) = by_addr.range(..addr + len).next_back()
            && other + space.len > addr
        {
            return Err(Error::invalid(format!(
                "{len} bytes at {addr:#x} overlap the {} bytes at {other:#x}",
                space.len
            )));
        }
        let (users, idle) = Default::default();
        let space = Arc::new(Space { addr, len, file, offset, users, idle });
        by_addr.insert(addr, space.clone());
        Ok(Listed { spaces: self.clone(), space })
    }

    /// As [`list`](Self::list), at addresses of our choice.
    pub(crate) fn list_anywhere(self: &Arc<Self>, len: u64, file: Arc<BlockFile>) -> Result<Listed> {
        // A gap, so that no operation that runs over an end finds the next range.
        let step = len.saturating_add(1 << 20).next_multiple_of(1 << 20);
        self.list(NEXT.fetch_add(step, Ordering::Relaxed), len, file, 0)
    }

    /// Where in which file `[addr, addr + len)` lies, held until the use is dropped.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Result<(Use, u64)> {
        if len == 0 {
            return Err(Error::invalid(format!("a transfer of zero bytes at {addr:#x}")));
        }
        let Some(end) = addr.checked_add(len) else {
            return Err(Error::invalid(format!("{len} bytes from {addr:#x} overflow")));
        };
        let by_addr = self.by_addr.read();
        let space = by_addr.range(..=addr).next_back().map(|(_, space)| space);
        let space = space.filter(|space| end <= space.addr + space.len).ok_or_else(|| {
            Error::invalid(format!("{len} bytes at {addr:#x} do not lie in one open range of a file"))
        })?;
        // Under the table's lock, so that closing sees it.
        Ok((Use::new(space.clone()), space.offset + (addr - space.addr)))
    }
}

impl Use {
    fn new(space: Arc<Space>) -> Self {
        *space.users.lock() += 1;
        Self(space)
    }

    pub(crate) fn file(&self) -> &Arc<BlockFile> {
        &self.0.file
    }
}

impl Clone for Use {
    fn clone(&self) -> Self {
        Self::new(self.0.clone())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut users = self.0.users.lock();
        *users -= 1;
        if *users == 0 {
            self.0.idle.notify_all();
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.spaces.by_addr.write().remove(&self.space.addr);
        let mut users = self.space.users.lock();
        while *users != 0 {
            self.space.idle.wait(&mut users);
        }
    }
}

/// How [`DiskTransport::open`](crate::DiskTransport::open) opens a file.
#[derive(Clone, Debug)]
pub struct OpenSegment {
    /// A file, made if need be, or a block device.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// The file grows as it is written, through the page cache, and `len` is only its limit.
    pub grows: bool,
}

/// A file as a segment: addresses from [`addr`](Self::addr) on are its bytes from 0 on. Closes on drop.
#[derive(Debug)]
pub struct DiskSegment {
    pub(crate) listed: Listed,
}

impl DiskSegment {
    /// Address of the first byte.
    pub fn addr(&self) -> u64 {
        self.listed.space.addr
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> u64 {
        self.listed.space.len
    }

    /// Whether the page cache is gone past.
    pub fn is_direct(&self) -> bool {
        self.listed.space.file.align() != 1
    }
}
