//! [`KeySample`]: a share of the keys of a cache.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::ghost::fingerprint;

/// Largest logarithm of a sample.
const MAX_SHIFT: u32 = 31;

/// Sample of the keys of a cache, by the hashes of the keys: one key in a power of two. A smaller
/// sample is a part of each larger one.
#[derive(Debug, Default)]
pub struct KeySample {
    /// Logarithm to base 2 of the number of keys of which one is in the sample.
    shift: AtomicU32,
}

impl KeySample {
    /// Creates a sample of all keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether the key with this hash is in the sample.
    pub fn contains(&self, key_hash: u64) -> bool {
        is_in_sample(fingerprint(key_hash), self.shift())
    }

    /// Returns the logarithm to base 2 of the number of keys of which one is in the sample.
    pub fn shift(&self) -> u32 {
        self.shift.load(Relaxed)
    }

    /// Changes the size of the sample; see [`shift`](Self::shift).
    pub fn set_shift(&self, shift: u32) {
        self.shift.store(shift.min(MAX_SHIFT), Relaxed);
    }
}

/// Returns whether the key with this fingerprint is in a sample of one key in 2^`shift`.
pub(super) fn is_in_sample(print: u32, shift: u32) -> bool {
    print & ((1 << shift) - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn a_sample_holds_its_share_and_smaller_samples() {
        let sample = KeySample::new();
        let hashes: Vec<u64> = (1..=4096u64).map(|n| n.wrapping_mul(0xd6e8_feb8_6659_fd93)).collect();
        let mut before: Vec<u64> = hashes.clone();
        for shift in [0, 1, 3, 5] {
            sample.set_shift(shift);
            let held: Vec<u64> = hashes.iter().copied().filter(|hash| sample.contains(*hash)).collect();
            assert!(
                held.len().abs_diff(4096 >> shift) <= (4096 >> shift) / 4,
                "{} of 4096 at {shift}",
                held.len()
            );
            assert!(held.iter().all(|hash| before.contains(hash)));
            before = held;
        }
        sample.set_shift(99);
        assert_eq!(sample.shift(), MAX_SHIFT);
    }
}
