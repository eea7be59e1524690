//! What was evicted lately, by fingerprint.

/// Entries in a set: one cache line.
const WAYS: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// 0 for none.
    print: u32,
    /// Which eviction put it here.
    at: u32,
}

type Set = [Entry; WAYS];

/// A table of fingerprints that forgets by age. Two objects may share a fingerprint, and a full set drops its
/// oldest entry early: both are rare, and all they cost is a wrong guess about one object.
#[derive(Debug)]
pub(super) struct Ghost {
    sets: Vec<Set>,
    /// Evictions so far.
    now: u32,
}

/// 32 bits to know an object by; never 0.
pub(super) fn fingerprint(key_hash: u64) -> u32 {
    ((key_hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32).max(1)
}

impl Ghost {
    pub(super) fn new() -> Self {
        Self { sets: vec![Set::default(); 8], now: 0 }
    }

    /// Remembers an evicted object among the last `limit`.
    pub(super) fn remember(&mut self, print: u32, limit: usize) {
        if limit > self.sets.len() * WAYS / 2 {
            self.grow(limit);
        }
        self.now = self.now.wrapping_add(1);
        self.put(Entry { print, at: self.now });
    }

    /// Whether the object is among the last `limit` evicted; it is forgotten then.
    pub(super) fn recall(&mut self, print: u32, limit: usize) -> bool {
        let now = self.now;
        let set = self.set(print);
        let Some(entry) = set.iter_mut().find(|entry| entry.print == print) else { return false };
        let at = std::mem::take(entry).at;
        (now.wrapping_sub(at) as usize) < limit
    }

    fn put(&mut self, new: Entry) {
        let now = self.now;
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
        let mask = self.sets.len() - 1;
        &mut self.sets[print as usize & mask]
    }

    /// Half full at most, so that few sets overflow.
    fn grow(&mut self, limit: usize) {
        let sets = (limit * 2).div_ceil(WAYS).next_power_of_two().min(1 << 30);
        if sets <= self.sets.len() {
            return;
        }
        let old = std::mem::replace(&mut self.sets, vec![Set::default(); sets]);
        old.into_iter().flatten().filter(|entry| entry.print != 0).for_each(|entry| self.put(entry));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_about_the_limit() {
        let mut ghost = Ghost::new();
        for n in 0..1000 {
            ghost.remember(fingerprint(n), 100);
        }
        assert!((0..900).all(|n| !ghost.recall(fingerprint(n), 100)));
        let kept = (900..1000).filter(|&n| ghost.recall(fingerprint(n), 100)).count();
        assert!(kept >= 95, "{kept}");
        assert!((900..1000).all(|n| !ghost.recall(fingerprint(n), 100)), "recalled once only");
    }

    #[test]
    fn growing_keeps_what_it_holds() {
        let mut ghost = Ghost::new();
        (0..10).for_each(|n| ghost.remember(fingerprint(n), 16));
        (10..20).for_each(|n| ghost.remember(fingerprint(n), 10_000));
        assert!((0..20).all(|n| ghost.recall(fingerprint(n), 10_000)));
    }
}
