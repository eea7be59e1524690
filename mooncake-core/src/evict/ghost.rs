//! Fingerprints of recently evicted objects.

/// Entries in a set: one cache line.
const WAYS: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Fingerprint of the object, 0 for none.
    print: u32,
    /// Time of insertion.
    at: u32,
}

type Set = [Entry; WAYS];

/// Table of fingerprints that drops the oldest. Two objects may share a fingerprint, and a full set
/// drops its oldest entry early. Both are rare, and cost only a wrong guess about one object.
#[derive(Debug)]
pub(super) struct Ghost {
    sets: Vec<Set>,
}

/// Returns the 32-bit fingerprint of an object, never 0.
pub(super) fn fingerprint(key_hash: u64) -> u32 {
    ((key_hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32).max(1)
}

impl Ghost {
    pub(super) fn new() -> Self {
        Self { sets: vec![Set::default(); 8] }
    }

    /// Remembers an object evicted at `at`, besides at least about `limit` others.
    pub(super) fn remember(&mut self, print: u32, at: u32, limit: usize) {
        if limit > self.sets.len() * WAYS / 2 {
            self.grow(limit, at);
        }
        self.put(Entry { print, at }, at);
    }

    /// Returns when the object was evicted, if remembered, and forgets it.
    pub(super) fn recall(&mut self, print: u32) -> Option<u32> {
        let entry = self.set(print).iter_mut().find(|entry| entry.print == print)?;
        Some(std::mem::take(entry).at)
    }

    fn put(&mut self, new: Entry, now: u32) {
        let set = self.set(new.print);
        let age = |entry: &&mut Entry| match entry.print {
            print if print == new.print => (2, 0),
            0 => (1, 0),
            _ => (0, now.wrapping_sub(entry.at)),
        };
        if let Some(place) = set.iter_mut().max_by_key(age) {
            *place = new;
        }
    }

    fn set(&mut self, print: u32) -> &mut Set {
        // The low bits are the same for all keys of a sample.
        let index = (u64::from(print) * self.sets.len() as u64) >> 32;
        &mut self.sets[index as usize]
    }

    /// Grows the table so that it is half full at most, and few sets overflow.
    fn grow(&mut self, limit: usize, now: u32) {
        let sets = (limit * 2).div_ceil(WAYS).next_power_of_two().min(1 << 30);
        if sets <= self.sets.len() {
            return;
        }
        let old = std::mem::replace(&mut self.sets, vec![Set::default(); sets]);
        old.into_iter().flatten().filter(|entry| entry.print != 0).for_each(|entry| self.put(entry, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn remembers_about_the_limit() {
        let mut ghost = Ghost::new();
        (0..10_000).for_each(|n| ghost.remember(fingerprint(n.into()), n, 100));
        assert!((0..9_000).all(|n| ghost.recall(fingerprint(n)).is_none()), "the table holds few others");
        let recalled = (9_900..10_000).filter(|&n| ghost.recall(fingerprint(n.into())) == Some(n)).count();
        assert!(recalled >= 95, "{recalled}");
        assert!(
            (9_900..10_000).all(|n| ghost.recall(fingerprint(n)).is_none()),
            "an object is recalled only once"
        );
    }

    #[test]
    fn growing_keeps_what_it_holds() {
        let mut ghost = Ghost::new();
        (0..10).for_each(|n| ghost.remember(fingerprint(n.into()), n, 16));
        (10..20).for_each(|n| ghost.remember(fingerprint(n.into()), n, 10_000));
        assert!((0..20).all(|n| ghost.recall(fingerprint(n.into())) == Some(n)));
    }
}
