//! Memory of the program that is not registered (any more) and that transfers may still use.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{UNUSED_WITHIN, UnusedSignal};

/// Memory of the program that is not registered (any more) and that transfers may still use.
#[derive(Debug, Default)]
pub struct Leaving(Mutex<Vec<LeavingRegion>>);

#[derive(Debug)]
struct LeavingRegion {
    /// First address of a region that was registered.
    start: Option<u64>,
    signal: Arc<UnusedSignal>,
}

impl Leaving {
    /// Adds memory until its signal is set: a region that was registered, with its first address,
    /// or memory that was never registered.
    pub(super) fn add(&self, start: Option<u64>, signal: Arc<UnusedSignal>) {
        let mut leaving = self.0.lock();
        if leaving.len() == leaving.capacity() {
            // Unused memory is removed before the list grows, so that an addition takes constant
            // time on average.
            leaving.retain(|region| !region.signal.is_set());
        }
        leaving.push(LeavingRegion { start, signal });
    }

    /// Returns the signals of the regions that were registered at an address.
    pub(super) fn signals_at(&self, start: u64) -> Vec<Arc<UnusedSignal>> {
        let leaving = self.0.lock();
        let at_start = leaving.iter().filter(|region| region.start == Some(start) && !region.signal.is_set());
        at_start.map(|region| region.signal.clone()).collect()
    }

    /// Waits for the transfers that use this memory, up to [`UNUSED_WITHIN`] for each region.
    pub async fn wait(&self) {
        let all: Vec<_> = self.0.lock().iter().map(|region| region.signal.clone()).collect();
        for signal in all {
            signal.within(UNUSED_WITHIN).await;
        }
        self.0.lock().retain(|region| !region.signal.is_set());
    }

    /// Returns whether no transfer uses this memory any more.
    pub fn is_empty(&self) -> bool {
        let mut leaving = self.0.lock();
        leaving.retain(|region| !region.signal.is_set());
        leaving.is_empty()
    }
}
