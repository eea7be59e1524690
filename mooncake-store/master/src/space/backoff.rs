//! Backoff of eviction after a search in which every object was refused.

use std::time::Duration;

use mooncake_core::clock::Moment;

use super::gap_searches::GapSearches;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Time without further searches after every object was refused.
const PAUSE: Duration = Duration::from_millis(10);

/// Searches for victims that have a backoff of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// Search of the background, which leaves looked-up objects.
    Background,
    /// Search of a put, which takes every object that the background takes, and more.
    Put,
}

#[derive(Default)]
pub(crate) struct EvictionBackoff {
    /// End of the pause of the background.
    background_until: AtomicU64,
    /// End of the pause of puts.
    puts_until: AtomicU64,
    pub(crate) searches: GapSearches,
}

impl EvictionBackoff {
    /// Returns whether a search would begin too early.
    pub(crate) fn is_paused(&self, search: Search, now: Moment) -> bool {
        // The background takes fewer objects than a put.
        let puts_until = self.puts_until.load(Relaxed);
        match search {
            Search::Put => puts_until > now.0,
            Search::Background => puts_until.max(self.background_until.load(Relaxed)) > now.0,
        }
    }

    /// Begins the backoff: the search found no object that may be evicted.
    pub(crate) fn begin(&self, search: Search, now: Moment) {
        // A put may find objects that the background leaves.
        let until = match search {
            Search::Background => &self.background_until,
            Search::Put => &self.puts_until,
        };
        until.store(now.after(PAUSE).0, Relaxed);
    }

    /// Ends the backoff: an object became readable or space became free, so eviction may succeed.
    pub(crate) fn end_backoff(&self) {
        for until in [&self.background_until, &self.puts_until] {
            if until.load(Relaxed) != 0 {
                until.store(0, Relaxed);
            }
        }
    }
}
