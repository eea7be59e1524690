//! Results of recent searches for contiguous space.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::Moment;
use parking_lot::Mutex;

/// After a search in failed, nobody searches for this long, or for as long as it took.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// After a search that found a gap, more of the size are believed in for this long.
const LIKELY_FOR: Duration = Duration::from_secs(1);

/// What there is to expect for a put that finds no gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GapOutlook {
    /// Nobody has looked.
    Unknown,
    /// Gaps of the size could be made a moment ago.
    Likely,
    /// None could, the last time.
    Doubtful,
    /// None could a moment ago, or somebody is about to look.
    Suspended,
}

/// What searches came to, by the segment that puts were bound to; under `None` for those that may go anywhere.
#[derive(Default)]
pub(crate) struct GapSearches(Mutex<HashMap<Option<Box<str>>, LastSearch>>);

#[derive(Default)]
struct LastSearch {
    /// Length of the largest put that waits for the tick to search, 0 for none.
    requested: u64,
    /// Length that there was a gap for, and until when that is believed.
    found: (u64, Moment),
    /// Length that there was none for, and until when nobody looks again.
    failed: Option<(u64, Moment)>,
}

impl GapSearches {
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

    /// The tick is to look.
    pub(crate) fn request(&self, only: Option<&str>, len: u64) {
        let mut searches = self.0.lock();
        let last = searches.entry(only.map(Box::from)).or_default();
        last.requested = last.requested.max(len.max(1));
    }

    /// Where the tick is to look, and for what. It says what it found.
    pub(crate) fn requested(&self) -> Vec<(Option<Box<str>>, u64)> {
        let searches = self.0.lock();
        let requested = searches.iter().filter(|(_, last)| last.requested > 0);
        requested.map(|(only, last)| (only.clone(), last.requested)).collect()
    }

    /// There is a gap now.
    pub(crate) fn record_success(&self, only: Option<&str>, len: u64, now: Moment) {
        self.record(only, len, now, |last| {
            last.found = (len, now.after(LIKELY_FOR));
            last.failed = last.failed.filter(|(least, _)| len < *least);
        });
    }

    /// None can be made, as a search from `begun` to `now` has shown.
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
        // Segments come and go.
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
