//! Memory that was offered to peers and no longer is. Peers may use its addresses for a while.

use std::ops::Range;

use mooncake_core::clock::Moment;
use mooncake_core::memory::MemorySpan;
use parking_lot::Mutex;

/// Address ranges, with the time until which peers may use them.
#[derive(Debug, Default)]
pub(super) struct RetiredSpans(Mutex<Vec<(Moment, Range<u64>)>>);

impl RetiredSpans {
    /// Adds a range, and drops those whose time is over.
    pub(super) fn add(&self, addresses: Range<u64>, until: Moment, now: Moment) {
        let mut list = self.0.lock();
        list.retain(|(until, _)| *until > now);
        list.push((until, addresses));
    }

    /// Returns whether peers may use an address of the range.
    pub(super) fn overlap(&self, addresses: &Range<u64>, now: Moment) -> bool {
        let list = self.0.lock();
        list.iter().any(|(until, of)| *until > now && of.start < addresses.end && addresses.start < of.end)
    }
}

/// Returns the addresses of a span.
pub(super) fn addresses(span: MemorySpan) -> Range<u64> {
    span.addr()..span.addr().saturating_add(span.len as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retired_addresses_are_known_for_a_time() {
        let spans = RetiredSpans::default();
        spans.add(100..200, Moment(10), Moment(0));
        for (addresses, overlap) in [(0..100, false), (0..101, true), (199..300, true), (200..300, false)] {
            assert_eq!(spans.overlap(&addresses, Moment(9)), overlap, "{addresses:?}");
        }
        assert!(!spans.overlap(&(0..300), Moment(10)));
        spans.add(300..400, Moment(20), Moment(10));
        assert_eq!(spans.0.lock().len(), 1, "an entry that has ended is dropped");
    }
}
