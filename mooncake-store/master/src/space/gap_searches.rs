//! Results of recent searches for contiguous space.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::Moment;

use crate::sync::Mutex;

/// Minimum time between a search that failed and the next one. It is longer if the search took
/// longer.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Time after a successful search during which more gaps of the size are expected.
const LIKELY_FOR: Duration = Duration::from_secs(1);

/// Expectation for a put that finds no gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GapOutlook {
    /// No search is known.
    Unknown,
    /// A gap of the size could be made a moment ago.
    Likely,
    /// The last search failed.
    Doubtful,
    /// The last search has just failed, or one is about to begin.
    Suspended,
}

/// Results of searches by the segment that the puts were bound to; `None` stands for any segment.
#[derive(Default)]
pub(crate) struct GapSearches(Mutex<HashMap<Option<Box<str>>, LastSearch>>);

#[derive(Default)]
struct LastSearch {
    /// Length of the largest put that waits for a search; 0 for none.
    requested: u64,
    /// Length for which there was a gap, and the time until which that is believed.
    found: (u64, Moment),
    /// Length for which there was no gap, and the time until which there is no new search.
    failed: Option<(u64, Moment)>,
}

impl GapSearches {
    /// Returns the expectation for a put of `len` bytes.
    pub(crate) fn outlook(&self, only: Option<&str>, len: u64, now: Moment) -> GapOutlook {
        let searches = self.0.lock();
        let Some(last) = searches.get(&only.map(Box::from)) else { return GapOutlook::Unknown };
        match last.failed.filter(|(least, _)| *least <= len) {
            Some((_, until)) if now < until => GapOutlook::Suspended,
            _ if last.requested >= len.max(1) => GapOutlook::Suspended,
            Some(_) => GapOutlook::Doubtful,
            None if len <= last.found.0 && now < last.found.1 => GapOutlook::Likely,
            None => GapOutlook::Unknown,
        }
    }

    /// Requests a search by the tick.
    pub(crate) fn request(&self, only: Option<&str>, len: u64) {
        let mut searches = self.0.lock();
        let last = searches.entry(only.map(Box::from)).or_default();
        last.requested = last.requested.max(len.max(1));
    }

    /// Returns the requested searches: the segment and the length of each. The caller records the
    /// results.
    pub(crate) fn requested(&self) -> Vec<(Option<Box<str>>, u64)> {
        let searches = self.0.lock();
        let requested = searches.iter().filter(|(_, last)| last.requested > 0);
        requested.map(|(only, last)| (only.clone(), last.requested)).collect()
    }

    /// Records that there is a gap.
    pub(crate) fn record_success(&self, only: Option<&str>, len: u64, now: Moment) {
        self.record(only, len, now, |last| {
            last.found = (len, now.after(LIKELY_FOR));
            last.failed = last.failed.filter(|(least, _)| len < *least);
        });
    }

    /// Records that a search from `begun` to `now` found no gap.
    pub(crate) fn record_failure(&self, only: Option<&str>, len: u64, begun: Moment, now: Moment) {
        let until = now.after(RETRY_AFTER.max(now.since(begun)));
        self.record(only, len, now, |last| {
            let least =
                last.failed.filter(|(_, until)| now < *until).map_or(len, |(least, _)| least.min(len));
            last.failed = Some((least, until));
            last.found.0 = last.found.0.min(len.saturating_sub(1));
        });
    }

    fn record(&self, only: Option<&str>, len: u64, now: Moment, note: impl FnOnce(&mut LastSearch)) {
        let mut searches = self.0.lock();
        // Forget segments that may be gone.
        searches.retain(|only, last| {
            let late = last.found.1.max(last.failed.map_or(Moment(0), |(_, until)| until));
            only.is_none() || last.requested > 0 || now < late
        });
        let last = searches.entry(only.map(Box::from)).or_default();
        if last.requested <= len.max(1) {
            last.requested = 0;
        }
        note(last);
    }
}
