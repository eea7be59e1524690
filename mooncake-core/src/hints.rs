//! Hints of a put: what a writer knows about its objects and the master cannot see.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::ids::ObjectKey;

/// Longest time to live.
pub const MAX_TIME_TO_LIVE: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Part of a chain that is of use if not all of its blocks stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum KeepPart {
    /// The eviction policy decides.
    #[default]
    Any = 0,
    /// The front is of use, and stays as long as possible: later blocks are evicted first.
    Front = 1,
    /// Only the whole chain is of use: its blocks are evicted together.
    Whole = 2,
}

impl KeepPart {
    /// Returns the part of a number.
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Any,
            1 => Self::Front,
            2 => Self::Whole,
            _ => return None,
        })
    }
}

/// Hints of a put. The default has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutHints {
    /// Key of the block before the first key of the call.
    pub parent: Option<Vec<u8>>,
    /// Number of blocks of the chain before the first key of the call.
    pub position: Option<u64>,
    /// Part of the chain that is of use.
    pub keep: KeepPart,
    /// Time in milliseconds after which the objects cannot be read any more.
    pub ttl_ms: Option<u64>,
    /// True if the first read of each object is the last one.
    pub delete_after_read: bool,
}

impl PutHints {
    /// Returns whether there are no hints.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether the objects end by themselves: after a time or after a read.
    pub fn limit_lifetime(&self) -> bool {
        self.ttl_ms.is_some() || self.delete_after_read
    }

    /// Returns the hints about each object itself: those without the place of the call in its
    /// chain.
    #[must_use]
    pub fn of_object(&self) -> Self {
        let Self { keep, ttl_ms, delete_after_read, .. } = *self;
        Self { parent: None, position: None, keep, ttl_ms, delete_after_read }
    }

    /// Checks that the hints are within their limits.
    ///
    /// # Errors
    /// `INVALID_PARAMS`.
    pub fn check(&self) -> Result<()> {
        if let Some(parent) = &self.parent {
            ObjectKey::check(parent).map_err(|error| Error::from(error).context("parent_key"))?;
        }
        let longest = MAX_TIME_TO_LIVE.as_millis();
        match self.ttl_ms {
            Some(ttl) if ttl == 0 || u128::from(ttl) > longest => Err(Error::invalid(format!(
                "cannot put object: ttl_ms must be from 1 to {longest}. ttl_ms={ttl}"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the hints for the keys of a call after the first `count`, of which `last` is the
    /// last.
    #[must_use]
    pub fn after_keys(&self, count: usize, last: &[u8]) -> Self {
        let is_whole = self.keep == KeepPart::Whole;
        let has_chain = is_whole || self.parent.is_some() || self.position.is_some();
        let position = self.position.map(|position| position.saturating_add(count as u64));
        let parent = if has_chain { Some(last.to_vec()) } else { None };
        Self { parent, position, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_hints() {
        let hints = |parent: Option<&[u8]>, ttl_ms| PutHints {
            parent: parent.map(<[u8]>::to_vec),
            ttl_ms,
            ..PutHints::default()
        };
        assert!(hints(None, None).is_empty() && hints(None, None).check().is_ok());
        assert!(hints(Some(b"k"), Some(1)).check().is_ok());
        let longest = MAX_TIME_TO_LIVE.as_millis() as u64;
        assert!(hints(None, Some(longest)).check().is_ok());
        for bad in [hints(None, Some(0)), hints(None, Some(longest + 1)), hints(Some(b""), None)] {
            assert_eq!(bad.check().unwrap_err().code(), crate::ErrorCode::InvalidParams, "{bad:?}");
        }
        for number in 0..=3 {
            assert_eq!(KeepPart::from_number(number).map(|part| part as u8), (number < 3).then_some(number));
        }
    }

    #[test]
    fn hints_of_later_keys_name_the_key_before_them() {
        let hints = PutHints { position: Some(4), ttl_ms: Some(9), ..PutHints::default() };
        let later = PutHints { parent: Some(b"b".to_vec()), position: Some(6), ..hints };
        assert_eq!(hints.after_keys(2, b"b"), later);
        let without = PutHints { delete_after_read: true, ..PutHints::default() };
        assert_eq!(without.after_keys(2, b"b"), without);
        let whole = PutHints { keep: KeepPart::Whole, ..PutHints::default() };
        let later = PutHints { parent: Some(b"b".to_vec()), ..whole.clone() };
        assert_eq!(whole.after_keys(2, b"b"), later, "the later keys belong to the group of the first");
        assert_eq!(later.of_object(), whole);
    }
}
