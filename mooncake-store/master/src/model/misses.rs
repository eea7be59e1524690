//! Misses by cause.

use std::cell::Cell;

/// Reason why a request could not use an object that it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MissCause {
    /// The object was never stored, or its end is forgotten.
    Unknown,
    /// The object was evicted.
    Evicted,
    /// The object was evicted because another object of its group was.
    EvictedWithGroup,
    /// The object was evicted, and was not used since its soft pin had ended.
    PinEnded,
    /// A client removed the object.
    Removed,
    /// Every replica was in memory or on a disk that its client withdrew, or lost by expiry.
    OwnerLost,
    /// The last write of the object was revoked, was not ended in time, or found no space.
    PutFailed,
    /// The last write of the object was refused for the quota of its tenant.
    OverQuota,
    /// The time to live of the object was over.
    Expired,
    /// The object was deleted after its first read, as its writer had asked for.
    DeletedAfterRead,
    /// The object can be read, but an earlier key of the same request cannot.
    BehindGap,
    /// The object is there, but has no replica that can be read: it is being written, or its owner
    /// is gone.
    Unreadable,
}

impl MissCause {
    /// Causes, in the order of their numbers.
    pub const ALL: [Self; 12] = [
        Self::Unknown,
        Self::Evicted,
        Self::EvictedWithGroup,
        Self::PinEnded,
        Self::Removed,
        Self::OwnerLost,
        Self::PutFailed,
        Self::OverQuota,
        Self::Expired,
        Self::DeletedAfterRead,
        Self::BehindGap,
        Self::Unreadable,
    ];

    /// Returns the name of the cause, as metrics and endpoints show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Evicted => "evicted",
            Self::EvictedWithGroup => "evicted_with_group",
            Self::PinEnded => "pin_ended",
            Self::Removed => "removed",
            Self::OwnerLost => "owner_lost",
            Self::PutFailed => "put_failed",
            Self::OverQuota => "over_quota",
            Self::Expired => "expired",
            Self::DeletedAfterRead => "deleted_after_read",
            Self::BehindGap => "behind_gap",
            Self::Unreadable => "unreadable",
        }
    }

    /// Returns the cause of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| cause.name() == name)
    }

    /// Returns the cause in words: the end of a sentence about an object.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Unknown => "it was never stored, or too long ago to be remembered",
            Self::Evicted => "it was evicted to make space",
            Self::EvictedWithGroup => "it was evicted together with another object of its group",
            Self::PinEnded => "it was evicted after its soft pin had ended",
            Self::Removed => "a client removed it",
            Self::OwnerLost => "every client that held it has left or expired",
            Self::PutFailed => "its last write was revoked, was not ended in time, or found no space",
            Self::OverQuota => "its last write exceeded the quota of its tenant",
            Self::Expired => "its time to live is over",
            Self::DeletedAfterRead => "it was deleted after its first read, as its writer asked",
            Self::BehindGap => "it can be read, but an earlier key of the request cannot",
            Self::Unreadable => "it is being written, or the client that holds it does not respond",
        }
    }
}

/// Number of misses by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissCounts([u64; MissCause::ALL.len()]);

impl MissCounts {
    /// Returns the number of misses with a cause.
    pub fn of(&self, cause: MissCause) -> u64 {
        self.0[cause as usize]
    }

    /// Returns the number of all misses.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Returns each cause with its number of misses.
    pub fn iter(&self) -> impl Iterator<Item = (MissCause, u64)> {
        MissCause::ALL.into_iter().zip(self.0)
    }

    /// Adds misses with a cause.
    pub(crate) fn add(&mut self, cause: MissCause, count: u64) {
        let sum = &mut self.0[cause as usize];
        *sum = sum.saturating_add(count);
    }

    /// Adds the misses of another count.
    pub(crate) fn add_all(&mut self, other: &Self) {
        other.iter().for_each(|(cause, count)| self.add(cause, count));
    }
}

/// Misses of one call, for its tenant.
#[derive(Default)]
pub(crate) struct CallMisses([Cell<u32>; MissCause::ALL.len()]);

impl CallMisses {
    /// Adds a miss.
    pub(crate) fn add(&self, why: MissCause) {
        let count = &self.0[why as usize];
        count.set(count.get().saturating_add(1));
    }

    /// Returns the misses, and forgets them.
    pub(crate) fn take(&self) -> MissCounts {
        let mut counts = MissCounts::default();
        for (cause, count) in MissCause::ALL.into_iter().zip(&self.0) {
            counts.add(cause, count.take().into());
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_by_number_and_name() {
        let mut counts = MissCounts::default();
        for (number, cause) in MissCause::ALL.into_iter().enumerate() {
            assert_eq!((cause as usize, MissCause::from_name(cause.name())), (number, Some(cause)));
            counts.add(cause, number as u64);
        }
        assert!(counts.iter().all(|(cause, count)| count == cause as u64 && counts.of(cause) == count));
        assert_eq!((counts.total(), MissCause::from_name("other")), (66, None));
        counts.add_all(&counts.clone());
        assert_eq!(counts.total(), 132);
    }
}
