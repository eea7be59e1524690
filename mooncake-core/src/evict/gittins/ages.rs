//! Buckets of ages: one for the youngest, then one for each doubling.

/// Number of buckets. The last one begins at 2^40 uses.
pub(super) const BUCKETS: usize = 36;

/// Age in uses at which the second bucket begins, as a power of two.
const FIRST: usize = 6;

/// Returns the bucket of an age.
pub(super) fn bucket(age: u64) -> usize {
    let youngest = (1 << FIRST) - 1;
    ((age | youngest).ilog2() as usize + 1 - FIRST).min(BUCKETS - 1)
}

/// Returns the age at which a bucket begins.
pub(super) const fn lower_end(bucket: usize) -> u64 {
    if bucket == 0 { 0 } else { 1 << (bucket + FIRST - 1) }
}

/// Returns the number of ages in a bucket. The last one has no upper end, and counts like the
/// doubling that it begins.
pub(super) const fn width(bucket: usize) -> u64 {
    if bucket == 0 { 1 << FIRST } else { lower_end(bucket) }
}

/// Returns the age in the middle of a bucket.
pub(super) const fn middle(bucket: usize) -> u64 {
    lower_end(bucket) + width(bucket) / 2
}

/// Returns the last bucket whose middle an age has reached; the first one if there is none.
pub(super) fn bucket_of_middles(age: u64) -> usize {
    // From the second one on, the middles are 1, 2, 4, .. times the same age.
    let steps = age / middle(1);
    (steps.saturating_mul(2) | 1).ilog2().min(BUCKETS as u32 - 1) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_age_is_in_its_bucket() {
        assert_eq!((bucket(0), bucket(63), bucket(64), bucket(127), bucket(128)), (0, 0, 1, 1, 2));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        for at in 1..BUCKETS {
            assert_eq!((bucket(lower_end(at) - 1), bucket(lower_end(at))), (at - 1, at));
            assert_eq!(lower_end(at - 1) + width(at - 1), lower_end(at));
            assert_eq!(bucket(middle(at)), at);
            assert_eq!((bucket_of_middles(middle(at) - 1), bucket_of_middles(middle(at))), (at - 1, at));
        }
        assert_eq!((bucket_of_middles(0), bucket_of_middles(u64::MAX)), (0, BUCKETS - 1));
        assert_eq!(lower_end(BUCKETS - 1), 1 << 40);
    }
}
