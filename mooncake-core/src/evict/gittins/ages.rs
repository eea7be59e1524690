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
pub(super) fn lower_end(bucket: usize) -> u64 {
    if bucket == 0 { 0 } else { 1 << (bucket + FIRST - 1) }
}

/// Returns the number of ages in a bucket. The last one has no upper end, and counts like the
/// doubling that it begins.
pub(super) fn width(bucket: usize) -> u64 {
    lower_end(bucket).max(1 << FIRST)
}

/// Returns the age in the middle of a bucket.
pub(super) fn middle(bucket: usize) -> u64 {
    lower_end(bucket) + width(bucket) / 2
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
        }
        assert_eq!(lower_end(BUCKETS - 1), 1 << 40);
    }
}
