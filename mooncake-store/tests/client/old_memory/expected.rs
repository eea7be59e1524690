//! Values that reads may return.

use std::collections::HashMap;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_store::client::PutOutcome;

use super::Seen;

/// Byte of all free memory, which no value contains.
pub(super) const MARKER: u8 = 0xa5;
/// Number of random bytes from which values are cut.
const POOL: usize = 256 << 10;

/// Number of a tenant, and of a key of the tenant.
pub(super) type Key = (usize, u64);

pub(super) fn name(key: Key) -> String {
    format!("object {}", key.1)
}

/// Random bytes without the marker.
pub(super) struct Values(Bytes);

impl Values {
    pub(super) fn new(seed: u64) -> Self {
        let mut bytes = vec![0; POOL];
        Rng::seeded(seed).fill(&mut bytes);
        bytes.iter_mut().filter(|byte| **byte == MARKER).for_each(|byte| *byte = !MARKER);
        Self(bytes.into())
    }

    /// Returns a value, which differs from others if it is not very short.
    pub(super) fn next(&self, rng: &mut Rng, len: usize) -> Bytes {
        let start = rng.below((POOL - len) as u64) as usize;
        self.0.slice(start..start + len)
    }
}

/// Values that each key may have. There are several after calls whose outcome is unknown.
#[derive(Default)]
pub(super) struct Expected(HashMap<Key, Vec<Bytes>>);

impl Expected {
    /// Records the outcome of a put or an upsert; `None` for a dropped call.
    pub(super) fn record(
        &mut self,
        key: Key,
        value: &Bytes,
        outcome: Option<&mooncake_core::Result<PutOutcome>>,
        seen: &mut Seen,
    ) {
        let values = self.0.entry(key).or_default();
        match outcome {
            Some(Ok(PutOutcome::Stored)) => {
                seen.stored += 1;
                values.clear();
                values.push(value.clone());
            }
            Some(Ok(PutOutcome::Existed)) => {}
            Some(Err(_)) => {
                seen.failed += 1;
                values.push(value.clone());
            }
            None => {
                seen.dropped += 1;
                values.push(value.clone());
            }
        }
    }

    /// Returns the length of the last value of a key.
    pub(super) fn len(&self, key: Key) -> Option<usize> {
        self.0.get(&key)?.last().map(Bytes::len)
    }

    /// Records that a key has this value, and no other.
    pub(super) fn set(&mut self, key: Key, value: Bytes) {
        self.0.insert(key, vec![value]);
    }

    /// Records that a key has no value.
    pub(super) fn remove(&mut self, key: Key) {
        self.0.remove(&key);
    }

    /// Checks bytes that were read from an offset of the object. `whole` if they are all of its
    /// bytes.
    pub(super) fn check(&self, key: Key, offset: usize, got: &[u8], whole: bool) -> Result<(), String> {
        if let Some(at) = got.iter().position(|byte| *byte == MARKER).filter(|_| got.contains(&MARKER)) {
            return Err(format!(
                "byte {} of {key:?} is old memory; {} bytes were read",
                offset + at,
                got.len()
            ));
        }
        let is_value = |value: &Bytes| {
            value.get(offset..offset + got.len()) == Some(got) && (!whole || value.len() == got.len())
        };
        let values = self.0.get(&key).map_or(&[][..], Vec::as_slice);
        if values.iter().any(is_value) {
            return Ok(());
        }
        Err(format!(
            "{} bytes from {offset} of {key:?} are those of no write; {} values are possible",
            got.len(),
            values.len()
        ))
    }
}
