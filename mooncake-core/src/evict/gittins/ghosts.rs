//! Ghosts: what is remembered of objects that were evicted.

/// Ghosts in a set: two cache lines.
const WAYS: usize = 16;

/// Ghosts that are remembered for each object that a policy holds.
const PER_OBJECT: usize = 4;

/// Number of ghosts that the smallest table is made for.
const FEWEST: usize = 96;

/// Bits of the code of the number of uses of a ghost.
const USES_BITS: u32 = 3;

/// Bits of the time of a ghost.
const TIME_BITS: u32 = u32::BITS - USES_BITS;

/// Number of units of time in which as many objects are used as memory holds.
const UNITS_PER_LIFE: u64 = 4096;

/// Number of uses that each code of uses stands for.
const USES: [u8; 8] = [1, 2, 3, 4, 5, 7, 9, u8::MAX];

/// Object that was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GhostEntry {
    /// Number of the last use.
    pub(super) used: u64,
    /// Number of uses, saturating.
    pub(super) uses: u8,
}

/// Ghosts of keys that belong together, the latest first. The fingerprints fill a cache line, so
/// that a search reads no more.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Set {
    /// Fingerprint of each key, 0 for none.
    prints: [u32; WAYS],
    /// Time of the last use in units, above the code of the number of uses.
    times_and_uses: [u32; WAYS],
}

impl Set {
    /// Returns the position of a fingerprint. The comparisons do not depend on each other.
    fn find(&self, print: u32) -> Option<usize> {
        let bits = self.prints.iter().zip(0..).fold(0, |bits, (other, at)| {
            let bit = if *other == print { 1u32 << at } else { 0 };
            bits | bit
        });
        (bits != 0).then(|| bits.trailing_zeros() as usize)
    }
}

/// Table of ghosts that drops the earliest ones. Two objects may share a fingerprint, and a full
/// set drops a ghost early. Both are rare, and cost only a wrong guess about one object.
#[derive(Debug)]
pub(super) struct Ghosts {
    sets: Vec<Set>,
    /// A unit of time is 2^`unit` uses.
    unit: u32,
}

impl Ghosts {
    pub(super) fn new() -> Self {
        Self { sets: Vec::new(), unit: 0 }
    }

    /// Remembers an object. `held` is the number of objects that the policy holds, `life` that of
    /// all policies together.
    pub(super) fn remember(&mut self, print: u32, entry: GhostEntry, held: usize, life: u64, now: u64) {
        let limit = (held * PER_OBJECT).max(FEWEST);
        // Growth in steps of an eighth takes a constant time for each ghost.
        if limit * 6 > self.sets.len() * WAYS * 5 {
            self.grow(limit, life, now);
        }
        self.put(print, entry);
    }

    /// Returns whether an object is remembered.
    pub(super) fn contains(&self, print: u32) -> bool {
        self.sets.get(self.index(print)).is_some_and(|set| set.find(print).is_some())
    }

    /// Returns an object that is remembered.
    pub(super) fn get(&self, print: u32, now: u64) -> Option<GhostEntry> {
        let set = self.sets.get(self.index(print))?;
        Some(self.unpack(set.times_and_uses[set.find(print)?], now))
    }

    /// Returns an object that is remembered, and forgets it.
    pub(super) fn take(&mut self, print: u32, now: u64) -> Option<GhostEntry> {
        let index = self.index(print);
        let set = self.sets.get_mut(index)?;
        let at = set.find(print)?;
        set.prints[at] = 0;
        let time_and_uses = set.times_and_uses[at];
        Some(self.unpack(time_and_uses, now))
    }

    fn index(&self, print: u32) -> usize {
        ((u64::from(print) * self.sets.len() as u64) >> 32) as usize
    }

    /// Adds a ghost to its set, in which the latest comes first.
    fn put(&mut self, print: u32, entry: GhostEntry) {
        let code = USES.iter().rposition(|&uses| uses <= entry.uses).unwrap_or(0) as u32;
        let time = (entry.used >> self.unit) as u32 & ((1 << TIME_BITS) - 1);
        let index = self.index(print);
        let Some(set) = self.sets.get_mut(index) else { return };
        let replaced = set.find(print).or_else(|| set.find(0)).unwrap_or(WAYS - 1);
        set.prints.copy_within(..replaced, 1);
        set.times_and_uses.copy_within(..replaced, 1);
        (set.prints[0], set.times_and_uses[0]) = (print, time << USES_BITS | code);
    }

    fn unpack(&self, time_and_uses: u32, now: u64) -> GhostEntry {
        let now = now >> self.unit;
        let age = (now as u32).wrapping_sub(time_and_uses >> USES_BITS) & ((1 << TIME_BITS) - 1);
        let used = now.saturating_sub(age.into()) << self.unit;
        GhostEntry { used, uses: USES[(time_and_uses & ((1 << USES_BITS) - 1)) as usize] }
    }

    /// Makes the table large enough for `limit` ghosts and a third more, so that few sets overflow.
    fn grow(&mut self, limit: usize, life: u64, now: u64) {
        let sets = (limit * 4 / 3).div_ceil(WAYS);
        let unit = (life / UNITS_PER_LIFE).max(1).ilog2();
        let grown = Self { sets: vec![Set::default(); sets], unit };
        let old = std::mem::replace(self, grown);
        let earliest_first = |set: &Set| set.prints.into_iter().zip(set.times_and_uses).rev();
        for (print, time_and_uses) in
            old.sets.iter().flat_map(earliest_first).filter(|(print, _)| *print != 0)
        {
            self.put(print, old.unpack(time_and_uses, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::ghost::fingerprint;

    fn entry(used: u64) -> GhostEntry {
        GhostEntry { used, uses: 1 }
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn remembers_four_for_each_object() {
        let mut ghosts = Ghosts::new();
        (0..50_000).for_each(|n| ghosts.remember(fingerprint(n), entry(n), 1000, 1000, n));
        assert!(ghosts.sets.len() * size_of::<Set>() <= 1000 * 43 + size_of::<Set>());
        let older = (0..30_000).filter(|&n| ghosts.contains(fingerprint(n))).count();
        assert_eq!(older, 0);
        let remembered =
            (46_000..50_000).filter(|&n| ghosts.take(fingerprint(n), 50_000) == Some(entry(n))).count();
        assert!(remembered >= 3800, "{remembered}");
        assert!((46_000..50_000).all(|n| !ghosts.contains(fingerprint(n))));
    }

    #[test]
    fn growing_keeps_what_it_holds() {
        let mut ghosts = Ghosts::new();
        (0..10).for_each(|n| ghosts.remember(fingerprint(n), entry(n << 20), 1, 1, n << 20));
        ghosts.remember(fingerprint(10), entry(10 << 20), 100_000, 1 << 22, 10 << 20);
        let now = 10 << 20;
        assert!((0..=10).all(|n| ghosts.take(fingerprint(n), now) == Some(entry(n << 20))));
    }

    #[test]
    fn uses_and_times_are_approximate() {
        let mut ghosts = Ghosts::new();
        let life = 1 << 30;
        for (uses, stored) in [(1, 1), (4, 4), (6, 5), (8, 7), (9, 9), (200, 9), (255, 255)] {
            let used = u64::from(uses) * 1_000_003;
            ghosts.remember(uses.into(), GhostEntry { used, uses }, 10, life, 1 << 29);
            let found = ghosts.take(uses.into(), 1 << 31).unwrap();
            assert_eq!(found.uses, stored);
            assert!(found.used <= used && used - found.used < life / UNITS_PER_LIFE);
        }
        assert_eq!(ghosts.take(1, 0), None);
    }
}
