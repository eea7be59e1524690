//! Promised memory: mappings whose pages the kernel allocates at their first use. Until then the
//! kernel counts them as free, so that a check of free memory would grant the same memory twice.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use super::page::page_size;

/// Mappings of this process, by address.
static PROMISED: Mutex<BTreeMap<usize, Promised>> = Mutex::new(BTreeMap::new());

/// Number of the next mapping.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Promised memory of a mapping.
#[derive(Clone, Copy, Debug)]
struct Promised {
    len: usize,
    /// Number of the mapping. Another one may have its address later.
    number: u64,
    /// Bytes whose pages are not allocated, at most: pages are only added.
    missing: u64,
}

/// Number of pages about which the kernel is asked at once.
const PAGES: usize = 16 << 10;

/// Entry of a mapping, which ends with this value.
#[derive(Debug)]
pub(super) struct Promise {
    addr: usize,
}

impl Promise {
    /// Lists a mapping. The value is dropped before the mapping goes.
    pub(super) fn new(ptr: NonNull<u8>, len: usize) -> Self {
        let addr = ptr.as_ptr().addr();
        let number = NEXT.fetch_add(1, Relaxed);
        PROMISED.lock().insert(addr, Promised { len, number, missing: len as u64 });
        Self { addr }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        PROMISED.lock().remove(&self.addr);
    }
}

/// Returns the bytes of the listed mappings whose pages are not allocated, at most: as of the last
/// count.
pub(super) fn missing_bytes_at_most() -> u64 {
    PROMISED.lock().values().fold(0, |sum, one| sum.saturating_add(one.missing))
}

/// Counts the bytes of the listed mappings whose pages are not allocated. This takes a millisecond
/// or two for each gibibyte.
pub(super) fn count_missing_bytes() -> u64 {
    // Not under the lock: a fork meanwhile would leave it locked in the child. A mapping that goes
    // meanwhile has no pages, or those of another mapping.
    let listed: Vec<(usize, Promised)> = PROMISED.lock().iter().map(|(addr, one)| (*addr, *one)).collect();
    for (addr, counted) in listed {
        let missing = missing_in(addr, counted.len);
        if let Some(one) = PROMISED.lock().get_mut(&addr).filter(|one| one.number == counted.number) {
            one.missing = one.missing.min(missing);
        }
    }
    missing_bytes_at_most()
}

fn missing_in(addr: usize, len: usize) -> u64 {
    if cfg!(miri) {
        return 0;
    }
    let page = page_size();
    let mut states = vec![0_u8; PAGES];
    let mut missing = 0;
    for start in (0..len).step_by(PAGES * page) {
        let part = (PAGES * page).min(len - start);
        let states = &mut states[..part.div_ceil(page)];
        let at = std::ptr::with_exposed_provenance_mut(addr + start);
        // SAFETY: the array has an entry for each page of the part. The kernel refuses addresses
        // that are not mapped.
        if unsafe { libc::mincore(at, part, states.as_mut_ptr().cast()) } == 0 {
            missing += states.iter().filter(|state| **state & 1 == 0).count() as u64 * page as u64;
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{HostMemory, HostMemoryOptions, MemorySource};

    /// Returns the missing bytes of one mapping.
    fn missing_of(memory: &HostMemory) -> Option<u64> {
        let addr = memory.span().ptr.as_ptr().addr();
        let one = PROMISED.lock().get(&addr).copied()?;
        assert!(one.missing >= missing_in(addr, one.len));
        Some(missing_in(addr, one.len))
    }

    #[test]
    #[cfg_attr(miri, ignore = "no such call there")]
    fn pages_are_promised_until_they_are_written() {
        const LEN: usize = 80 << 20;
        let shared = HostMemoryOptions { shared: Some("promised".into()), ..HostMemoryOptions::default() };
        for options in [HostMemoryOptions::default(), shared] {
            let memory = HostMemory::with(LEN, &options).unwrap();
            let before = missing_of(&memory).unwrap();
            assert_eq!(before, LEN as u64, "{options:?}");
            // SAFETY: the range is that of the memory, which has no other user.
            unsafe { memory.span().ptr.as_ptr().add(1 << 20).write_bytes(7, 32 << 20) };
            // Huge pages may take a little more.
            let after = missing_of(&memory).unwrap();
            assert!((44 << 20..=48 << 20).contains(&after), "{after} {options:?}");
            assert!(count_missing_bytes() >= after);
            let Ok((memory, hole)) = memory.relocate() else { continue };
            assert!((44 << 20..=48 << 20).contains(&missing_of(&memory).unwrap()), "{options:?}");
            drop(hole);
            let addr = memory.span().ptr.as_ptr().addr();
            drop(memory);
            assert!(!PROMISED.lock().contains_key(&addr));
        }
    }
}
