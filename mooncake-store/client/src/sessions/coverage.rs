//! Ranges of an object that have been written.

use std::collections::BTreeMap;
use std::ops::Range;

/// Set of bytes, as ranges that neither overlap nor touch. Maps the start of each range to its end.
#[derive(Debug, Default)]
pub(super) struct Coverage(BTreeMap<u64, u64>);

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
        let Range { mut start, mut end } = range;
        // Only the last range that begins before the end can still overlap or touch the new one.
        while let Some((&low, &high)) = self.0.range(..=end).next_back()
            && high >= start
        {
            self.0.remove(&low);
            (start, end) = (start.min(low), end.max(high));
        }
        self.0.insert(start, end);
    }

    /// Returns the first range of `0..len` that is not covered.
    pub(super) fn first_gap(&self, len: u64) -> Option<Range<u64>> {
        let mut known = self.0.iter().map(|(start, end)| *start..*end);
        let (start, next) = match known.next() {
            Some(first) if first.start == 0 => (first.end, known.next()),
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
                let apart = coverage.0.iter().zip(coverage.0.iter().skip(1)).all(|(low, high)| low.1 < high.0);
                prop_assert!(apart && coverage.0.iter().all(|(start, end)| start < end));
            }
        }
    }
}
