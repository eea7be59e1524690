//! Encoding of the counts of a [`Learner`].
//!
//! The bytes are a name with a version, the numbers of classes and buckets as one byte each, and
//! the counts of each class as little-endian floats.

use super::ages::BUCKETS;
use super::class::CLASSES;
use super::learner::Learner;
use super::values::Counts;
use crate::evict::learned::Learned;
use crate::{Error, ErrorCode, Result};

/// First bytes, with the version of the classes, the buckets, and the rest.
const MAGIC: &[u8; 8] = b"gittins1";

/// Numbers of classes and buckets.
const SHAPE: [u8; 2] = [CLASSES as u8, BUCKETS as u8];

/// Largest count. Counts are halved long before they reach it.
const MAX_COUNT: f32 = 1e9;

type Classes = Box<[Counts; CLASSES]>;

impl Learned for Learner {
    fn uses(&self) -> u64 {
        self.counts().iter().map(|counts| f64::from(counts.reached[0])).sum::<f64>() as u64
    }

    fn save(&self) -> Vec<u8> {
        encode(&self.counts())
    }

    fn load(&self, bytes: &[u8]) -> Result<()> {
        self.replace_counts(decode(bytes)?);
        Ok(())
    }
}

fn encode(classes: &[Counts; CLASSES]) -> Vec<u8> {
    let counts = classes.iter().flat_map(|counts| counts.reused.iter().chain(&counts.reached));
    let counts = counts.flat_map(|count| count.to_le_bytes());
    MAGIC.iter().copied().chain(SHAPE).chain(counts).collect()
}

fn decode(bytes: &[u8]) -> Result<Classes> {
    let refuse = |why: &str| {
        let text = format!("cannot read the learned values of gittins: {why}. bytes={}", bytes.len());
        Err(Error::new(ErrorCode::PersistentFail, text))
    };
    let Some(rest) = bytes.strip_prefix(MAGIC).and_then(|rest| rest.strip_prefix(&SHAPE)) else {
        return refuse("they are of another version");
    };
    let (floats, after) = rest.as_chunks::<4>();
    if floats.len() != CLASSES * BUCKETS * 2 || !after.is_empty() {
        return refuse("they are cut off or too long");
    }
    let floats: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    // Comparisons with a NaN are false.
    if !floats.iter().all(|count| (0.0..=MAX_COUNT).contains(count)) {
        return refuse("a count is out of range");
    }
    let mut classes = Box::new([Counts::ZERO; CLASSES]);
    for (counts, floats) in classes.iter_mut().zip(floats.chunks(BUCKETS * 2)) {
        counts.reused.copy_from_slice(&floats[..BUCKETS]);
        counts.reached.copy_from_slice(&floats[BUCKETS..]);
    }
    Ok(classes)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    /// Returns a learner that has seen a loop over a hundred keys.
    fn learned() -> Learner {
        let learner = Learner::new();
        (0..2000).for_each(|number| learner.record_one(1 + (number % 100) as u32, number, 7));
        learner
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn counts_survive_with_the_values() {
        let (before, after) = (learned(), Learner::new());
        assert_eq!((before.uses(), after.uses()), (2000, 0));
        after.load(&before.save()).unwrap();
        assert_eq!((after.uses(), after.save()), (2000, before.save()));
        // The values of both, once those of the first one have been computed.
        let (mut values, mut edition) = (before.values(), 0);
        before.refresh(&mut values, &mut edition, 1 << 20);
        assert_eq!(after.values(), values);
        assert!(!Arc::ptr_eq(&after.values(), &Learner::new().values()));
        let mut edition = 0;
        after.refresh(&mut values, &mut edition, 0);
        assert_eq!(edition, 1, "policies notice the new values");
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn other_bytes_are_refused_and_change_nothing() {
        let (learner, whole) = (learned(), learned().save());
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            bytes
        };
        let (longer, nan) = ([&whole[..], &[0]].concat(), [&whole[..10], &[0xff; 4], &whole[14..]].concat());
        for (bytes, why) in [
            (&b""[..], "another version"),
            (&with(7, b'2')[..], "another version"),
            (&with(8, 45)[..], "another version"),
            (&whole[..whole.len() - 1], "cut off"),
            (&longer[..], "too long"),
            (&nan[..], "out of range"),
            (&with(13, 0x80 | 0x3f)[..], "out of range"),
        ] {
            let error = learner.load(bytes).unwrap_err();
            assert!(error.message().contains(why), "{error}");
            assert_eq!(learner.save(), whole);
        }
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn bytes_of_any_kind_are_read_or_refused(
            changes in proptest::collection::vec((10usize..13_258, any::<u8>()), 0..20),
        ) {
            let (learner, mut bytes) = (Learner::new(), learned().save());
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if learner.load(&bytes).is_ok() {
                prop_assert_eq!(learner.save(), bytes);
            }
        }
    }
}
