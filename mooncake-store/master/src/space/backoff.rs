//! Backoff of eviction after a pass in which every object was refused.

use super::gap_searches::GapSearches;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Default)]
pub(crate) struct EvictionBackoff {
    pub(crate) paused_until: AtomicU64,
    pub(crate) searches: GapSearches,
}

impl EvictionBackoff {
    /// Ends the backoff: an object became readable or space became free, so eviction may succeed.
    pub(crate) fn end_backoff(&self) {
        if self.paused_until.load(Relaxed) != 0 {
            self.paused_until.store(0, Relaxed);
        }
    }
}
