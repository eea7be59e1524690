//! Address ranges that may overlap, each with a value.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Table of address ranges. A range that is added twice is in the table twice.
#[derive(Debug)]
pub(crate) struct Overlapping<V> {
    ranges: BTreeMap<Key, Entry<V>>,
    /// Number of ranges added so far.
    added: u64,
}

/// Position of a range: by its start, then the longest first, then the oldest first. The last range
/// at a start is thus the shortest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    start: u64,
    len: Reverse<u64>,
    number: u64,
}

impl Key {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.len.0)
    }

    fn first_at(start: u64) -> Self {
        Self { start, len: Reverse(u64::MAX), number: 0 }
    }

    fn last_at(start: u64) -> Self {
        Self { start, len: Reverse(0), number: u64::MAX }
    }
}

#[derive(Debug)]
struct Entry<V> {
    /// Largest end of this range and of all ranges before it, so that a search knows when to stop.
    max_end: u64,
    value: V,
}

impl<V> Default for Overlapping<V> {
    fn default() -> Self {
        Self { ranges: BTreeMap::new(), added: 0 }
    }
}

impl<V> Overlapping<V> {
    /// Adds a range.
    pub(crate) fn add(&mut self, start: u64, len: u64, value: V) {
        let key = Key { start, len: Reverse(len), number: self.added };
        self.added += 1;
        let max_end = self.max_end_before(key).max(key.end());
        self.ranges.insert(key, Entry { max_end, value });
        self.update_max_end(key, max_end);
    }

    /// Returns the first address and the value of a range that contains these bytes. Of several it
    /// is the one with the last start; of those with equal starts the shortest; of equal ranges the
    /// newest.
    pub(crate) fn find(&self, address: u64, len: u64) -> Option<(u64, &V)> {
        let end = address.checked_add(len)?;
        for (key, entry) in self.ranges.range(..=Key::last_at(address)).rev() {
            if key.end() >= end {
                return Some((key.start, &entry.value));
            }
            if entry.max_end < end {
                return None;
            }
        }
        None
    }

    /// Returns the largest end of the ranges that contain the byte at an address.
    pub(crate) fn end_from(&self, address: u64) -> Option<u64> {
        let (_, previous) = self.ranges.range(..=Key::last_at(address)).next_back()?;
        Some(previous.max_end).filter(|end| *end > address)
    }

    /// Returns the number of ranges with this start.
    pub(crate) fn count_at(&self, start: u64) -> usize {
        self.ranges.range(Key::first_at(start)..=Key::last_at(start)).count()
    }

    /// Removes a range with this start: of several the shortest, so that no byte of another one
    /// leaves the table; of equal ranges the newest. Returns its value.
    pub(crate) fn remove_at(&mut self, start: u64) -> Option<V> {
        let (key, _) = self.ranges.range(Key::first_at(start)..=Key::last_at(start)).next_back()?;
        let key = *key;
        let entry = self.ranges.remove(&key)?;
        let max_end = self.max_end_before(key);
        self.update_max_end(key, max_end);
        Some(entry.value)
    }

    /// Returns the starts and values of all ranges.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &V)> {
        self.ranges.iter().map(|(key, entry)| (key.start, &entry.value))
    }

    /// Removes all ranges and returns their values.
    pub(crate) fn take_all(&mut self) -> Vec<V> {
        std::mem::take(&mut self.ranges).into_values().map(|entry| entry.value).collect()
    }

    fn max_end_before(&self, key: Key) -> u64 {
        self.ranges.range(..key).next_back().map_or(0, |(_, previous)| previous.max_end)
    }

    /// Updates `max_end` of the ranges after `key`, up to which it is `max_end`.
    fn update_max_end(&mut self, key: Key, mut max_end: u64) {
        for (following, entry) in self.ranges.range_mut((Bound::Excluded(key), Bound::Unbounded)) {
            max_end = max_end.max(following.end());
            if entry.max_end == max_end {
                break;
            }
            entry.max_end = max_end;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Range, and its number as value.
    type TestRange = (u64, u64, usize);

    /// Range that a search prefers: last start, then shortest, then newest.
    fn preferred(ranges: impl Iterator<Item = TestRange>) -> Option<TestRange> {
        ranges.max_by_key(|(start, len, number)| (*start, Reverse(*len), *number))
    }

    proptest! {
        #[test]
        fn agrees_with_a_list(
            steps in proptest::collection::vec((0..3u8, 0..40u64, 1..30u64), 1..80),
            queries in proptest::collection::vec((0..80u64, 1..20u64), 20),
        ) {
            let (mut table, mut list) = (Overlapping::default(), Vec::<TestRange>::new());
            for (number, (step, start, len)) in steps.into_iter().enumerate() {
                if step > 0 {
                    table.add(start, len, number);
                    list.push((start, len, number));
                } else {
                    let expected = preferred(list.iter().copied().filter(|range| range.0 == start));
                    prop_assert_eq!(table.remove_at(start), expected.map(|(.., number)| number));
                    list.retain(|range| Some(*range) != expected);
                }
                let mut max_end = 0;
                for (key, entry) in &table.ranges {
                    max_end = max_end.max(key.end());
                    prop_assert_eq!(entry.max_end, max_end);
                }
                for &(address, len) in &queries {
                    let contains_query = |range: &TestRange| range.0 <= address && address + len <= range.0 + range.1;
                    let expected = preferred(list.iter().copied().filter(contains_query));
                    let found = table.find(address, len).map(|(start, number)| (start, *number));
                    prop_assert_eq!(found, expected.map(|(start, _, number)| (start, number)));
                    let ends = list.iter().filter(|range| range.0 <= address && address < range.0 + range.1);
                    let end = ends.map(|range| range.0 + range.1).max();
                    prop_assert_eq!(table.end_from(address), end);
                    let count = list.iter().filter(|range| range.0 == address).count();
                    prop_assert_eq!(table.count_at(address), count);
                }
            }
            prop_assert_eq!(table.iter().count(), list.len());
            prop_assert_eq!(table.take_all().len(), list.len());
            prop_assert!(table.find(0, 1).is_none());
        }
    }

    #[test]
    fn addresses_that_overflow_are_in_no_range() {
        let mut table = Overlapping::default();
        table.add(u64::MAX - 10, 10, ());
        assert!(table.find(u64::MAX - 10, 10).is_some());
        assert!(table.find(u64::MAX - 1, 2).is_none() && table.find(u64::MAX, u64::MAX).is_none());
    }
}
