//! Results of recent searches for contiguous space.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::Moment;
use parking_lot::Mutex;

/// After a search in vain, nobody searches for this long, or for as long as it took.
const FUTILE: Duration = Duration::from_millis(100);

/// After a search that found a gap, more of the size are believed in for this long.
const BELIEVED: Duration = Duration::from_secs(1);

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
    Barred,
}

/// What searches came to, by the segment that puts were bound to; under `None` for those that may go anywhere.
#[derive(Default)]
pub(crate) struct GapSearches(Mutex<HashMap<Option<Box<str>>, LastSearch>>);

#[derive(Default)]
struct LastSearch {
    /// Length of the largest put that waits for the tick to search, 0 for none.
    wanted: u64,
    /// Length that there was a gap for, and until when that is believed.
    found: (u64, Moment),
    /// Length that there was none for, and until when nobody looks again.
    vain: Option<(u64, Moment)>,
}

impl GapSearches {
    pub(crate) fn outlook(&self, only: Option<&str>, len: u64, now: Moment) -> GapOutlook {
        let searches = self.0.lock();
        let Some(last) = searches.get(&only.map(Box::from)) else { return GapOutlook::Unknown };
        match last.vain.filter(|(least, _)| *least <= len) {
            Some((_, until)) if now < until => GapOutlook::Barred,
            _ if last.wanted >= len.max(1) => GapOutlook::Barred,
            Some(_) => GapOutlook::Doubtful,
            None if len <= last.found.0 && now < last.found.1 => GapOutlook::Likely,
            None => GapOutlook::Unknown,
        }
    }

    /// The tick is to look.
    pub(crate) fn want(&self, only: Option<&str>, len: u64) {
        let mut searches = self.0.lock();
        let last = searches.entry(only.map(Box::from)).or_default();
        last.wanted = last.wanted.max(len.max(1));
    }

    /// Where the tick is to look, and for what. It says what it found.
    pub(crate) fn wanted(&self) -> Vec<(Option<Box<str>>, u64)> {
        let searches = self.0.lock();
        let wanted = searches.iter().filter(|(_, last)| last.wanted > 0);
        wanted.map(|(only, last)| (only.clone(), last.wanted)).collect()
    }

    /// There is a gap now.
    pub(crate) fn found(&self, only: Option<&str>, len: u64, now: Moment) {
        self.note(only, len, now, |last| {
            last.found = (len, now.after(BELIEVED));
            last.vain = last.vain.filter(|(least, _)| len < *least);
        });
    }

    /// None can be made, as a search from `begun` to `now` has shown.
    pub(crate) fn in_vain(&self, only: Option<&str>, len: u64, begun: Moment, now: Moment) {
        let until = now.after(FUTILE.max(now.since(begun)));
        self.note(only, len, now, |last| {
            let least = last.vain.filter(|(_, until)| now < *until).map_or(len, |(least, _)| least.min(len));
            last.vain = Some((least, until));
            last.found.0 = last.found.0.min(len.saturating_sub(1));
        });
    }

    fn note(&self, only: Option<&str>, len: u64, now: Moment, note: impl FnOnce(&mut LastSearch)) {
        let mut searches = self.0.lock();
        // Segments come and go.
        searches.retain(|only, last| {
            let late = last.found.1.max(last.vain.map_or(Moment(0), |(_, until)| until));
            only.is_none() || last.wanted > 0 || now < late
        });
        let last = searches.entry(only.map(Box::from)).or_default();
        if last.wanted <= len.max(1) {
            last.wanted = 0;
        }
        note(last);
    }
}
