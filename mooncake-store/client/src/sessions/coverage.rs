//! Ranges of an object that have been written.

use std::ops::Range;

/// Set of bytes, as sorted ranges that neither overlap nor touch.
#[derive(Debug, Default)]
pub(super) struct Coverage(Vec<Range<u64>>);

impl Coverage {
    /// Returns whether no byte is covered.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a range. An empty range changes nothing.
    pub(super) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|known| known.end < range.start);
        let end = self.0.partition_point(|known| known.start <= range.end);
        let mut joined = range;
        if let (Some(low), Some(high)) = (self.0.get(first), self.0[..end].last())
            && first < end
        {
            joined = joined.start.min(low.start)..joined.end.max(high.end);
        }
        self.0.splice(first..end, [joined]);
    }

    /// Returns the first range of `0..len` that is not covered.
    pub(super) fn first_gap(&self, len: u64) -> Option<Range<u64>> {
        let (start, next) = match self.0.first() {
            Some(first) if first.start == 0 => (first.end, self.0.get(1)),
            first => (0, first),
        };
        let end = next.map_or(len, |next| next.start.min(len));
        (start < end).then_some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The oracle has one flag for each byte.
        #[test]
        fn gaps_agree_with_flags_per_byte(
            ranges in prop::collection::vec((0..40u64, 0..12u64), 0..24),
            len in 0..48u64,
        ) {
            let (mut coverage, mut flags) = (Coverage::default(), [false; 64]);
            for (start, count) in ranges {
                coverage.add(start..start + count);
                flags[start as usize..(start + count) as usize].fill(true);
                let within = &flags[..len as usize];
                let expected = within.iter().position(|written| !written).map(|start| {
                    let gap = within[start..].iter().take_while(|written| !**written).count();
                    start as u64..(start + gap) as u64
                });
                prop_assert_eq!(coverage.first_gap(len), expected);
                prop_assert_eq!(coverage.is_empty(), !flags.contains(&true));
                let apart = coverage.0.windows(2).all(|pair| pair[0].end < pair[1].start);
                prop_assert!(apart && coverage.0.iter().all(|range| !range.is_empty()));
            }
        }
    }
}
