//! Lifetimes: values that end by themselves, after a time or after a read.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::hints::PutHints;
use mooncake_protocol::wire::StoredLifetime;

use super::misses::MissCause;

/// Lifetime of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lifetime {
    /// Time of the end; the largest moment for none. After the last read, the end of its lease.
    pub(crate) until: Moment,
    pub(crate) ends_at_read: bool,
    /// True if a read has ended the value.
    pub(crate) was_read: bool,
}

/// Time that never comes.
const NEVER: Moment = Moment(u64::MAX);

impl Lifetime {
    /// Returns the lifetime of a value that becomes readable now; `None` if it does not end by
    /// itself.
    pub(crate) fn begin(hints: &PutHints, now: Moment) -> Option<Self> {
        let until = hints.ttl_ms.map_or(NEVER, |ttl| now.after(Duration::from_millis(ttl)));
        hints.limit_lifetime().then_some(Self {
            until,
            ends_at_read: hints.delete_after_read,
            was_read: false,
        })
    }

    /// Returns why the value has ended; `None` if it has not.
    pub(crate) fn end(&self, now: Moment) -> Option<MissCause> {
        if self.was_read {
            Some(MissCause::DeletedAfterRead)
        } else {
            (self.until <= now).then_some(MissCause::Expired)
        }
    }

    /// Returns the lifetime for the next master. `wall_ms` is the date of `now`.
    pub(crate) fn to_stored(self, now: Moment, wall_ms: u64) -> StoredLifetime {
        if self.was_read {
            return StoredLifetime { ends_ms: 1, ends_at_read: true };
        }
        let left = || u64::try_from(self.until.since(now).as_millis()).unwrap_or(u64::MAX);
        let ends_ms = if self.until == NEVER { 0 } else { wall_ms.saturating_add(left()).max(1) };
        StoredLifetime { ends_ms, ends_at_read: self.ends_at_read }
    }

    /// Returns a lifetime that began under an earlier master. `wall_ms` is the date of `now`.
    pub(crate) fn from_stored(stored: StoredLifetime, now: Moment, wall_ms: u64) -> Self {
        let left = Duration::from_millis(stored.ends_ms.saturating_sub(wall_ms));
        let until = if stored.ends_ms == 0 { NEVER } else { now.after(left) };
        Self { until, ends_at_read: stored.ends_at_read, was_read: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(count: u64) -> Moment {
        Moment(0).after(Duration::from_millis(count))
    }

    #[test]
    fn a_lifetime_goes_on_under_the_next_master() {
        let hints = PutHints { ttl_ms: Some(500), ..PutHints::default() };
        let first = Lifetime::begin(&hints, ms(100)).unwrap();
        assert_eq!((first.end(ms(599)), first.end(ms(600))), (None, Some(MissCause::Expired)));
        let stored = first.to_stored(ms(200), 1_000_000);
        assert_eq!(stored, StoredLifetime { ends_ms: 1_000_400, ends_at_read: false });
        // The next master counts from another origin, and begins 300 ms later.
        let next = Lifetime::from_stored(stored, ms(7), 1_000_300);
        assert_eq!((next.end(ms(106)), next.end(ms(107))), (None, Some(MissCause::Expired)));
        assert!(Lifetime::from_stored(stored, ms(7), 1_000_400).end(ms(7)).is_some());
        let ended = first.to_stored(ms(900), 0);
        assert!(Lifetime::from_stored(ended, ms(7), 1).end(ms(7)).is_some());
    }

    #[test]
    fn a_value_that_ends_at_a_read_has_no_other_end() {
        assert_eq!(Lifetime::begin(&PutHints::default(), ms(1)), None);
        let hints = PutHints { delete_after_read: true, ..PutHints::default() };
        let first = Lifetime::begin(&hints, ms(1)).unwrap();
        assert_eq!(first.end(Moment(u64::MAX - 1)), None);
        let next = Lifetime::from_stored(first.to_stored(ms(5), 77), ms(9), 99);
        assert_eq!(next, first);
        let read = Lifetime { was_read: true, ..next };
        assert_eq!(read.end(ms(9)), Some(MissCause::DeletedAfterRead));
        let next = Lifetime::from_stored(read.to_stored(ms(9), 5000), ms(10), 5001);
        assert!(next.end(ms(10)).is_some(), "the next master does not bring it back");
    }
}
