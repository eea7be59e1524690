//! Promised memory: mappings whose pages the kernel allocates at their first use. Until then the
//! kernel counts them as free, so that a check of free memory would grant the same memory twice.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use parking_lot::Mutex;

use super::page::page_size;

/// Mappings of this process: addresses and lengths in bytes.
static PROMISED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

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
        PROMISED.lock().insert(addr, len);
        Self { addr }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        PROMISED.lock().remove(&self.addr);
    }
}

/// Returns the bytes of the listed mappings whose pages are not allocated.
pub(super) fn missing_bytes() -> u64 {
    // The lock keeps the mappings in place.
    let promised = PROMISED.lock();
    promised.iter().map(|(addr, len)| missing_in(*addr, *len)).fold(0, u64::saturating_add)
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
        let len = PROMISED.lock().get(&addr).copied()?;
        Some(missing_in(addr, len))
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
            let Ok((memory, hole)) = memory.relocate() else { continue };
            assert!((44 << 20..=48 << 20).contains(&missing_of(&memory).unwrap()), "{options:?}");
            drop(hole);
            let addr = memory.span().ptr.as_ptr().addr();
            drop(memory);
            assert!(!PROMISED.lock().contains_key(&addr));
        }
    }
}
