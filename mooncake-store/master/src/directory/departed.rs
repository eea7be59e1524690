//! Objects that have left the directory, and why.

use crate::model::misses::MissCause;

/// Departures in a set: one cache line.
const WAYS: usize = 16;

/// Departures that are remembered for each object of a shard.
const PER_OBJECT: usize = 4;

/// Number of departures that the smallest table is made for.
const FEWEST: usize = 256;

/// Bits of the number of a cause.
const CAUSE_BITS: u32 = 4;

/// Fingerprint of a key above the number of a cause; 0 for none.
type Departure = u32;

/// Departures of keys that belong together, the latest first.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Set([Departure; WAYS]);

/// Table of departures that drops the earliest ones of each set. Two keys may share a fingerprint,
/// which costs only a wrong cause.
#[derive(Default)]
pub(crate) struct Departed {
    sets: Vec<Set>,
}

fn print(hash: u64) -> u32 {
    (hash as u32) << CAUSE_BITS
}

impl Departed {
    /// Remembers why an object has left a shard that holds `held` others.
    pub(crate) fn remember(&mut self, hash: u64, cause: MissCause, held: usize) {
        let number = cause as u32;
        debug_assert!((1..1 << CAUSE_BITS).contains(&number), "{cause:?} is not a departure");
        let limit = held.saturating_mul(PER_OBJECT).max(FEWEST);
        // Growth in steps of an eighth takes a constant time for each departure.
        if limit.saturating_mul(8) > self.sets.len() * WAYS * 9 || self.sets.is_empty() {
            self.grow(limit);
        }
        self.put(print(hash) | number);
    }

    /// Returns why the object with a hash has left.
    pub(crate) fn cause(&self, hash: u64) -> MissCause {
        let print = print(hash);
        let found = self.sets.get(self.index(print)).and_then(|set| set.0.iter().find(is_of(print)));
        found.map_or(MissCause::Unknown, |departure| MissCause::ALL[number(*departure)])
    }

    fn index(&self, print: u32) -> usize {
        ((u64::from(print) * self.sets.len() as u64) >> 32) as usize
    }

    fn put(&mut self, departure: Departure) {
        let index = self.index(departure & !number_mask());
        let Some(Set(set)) = self.sets.get_mut(index) else { return };
        let print = departure & !number_mask();
        let place = set.iter().position(|other| is_of(print)(&other) || *other == 0).unwrap_or(WAYS - 1);
        set.copy_within(..place, 1);
        set[0] = departure;
    }

    fn grow(&mut self, limit: usize) {
        let grown = vec![Set::default(); limit.div_ceil(WAYS)];
        let old = std::mem::replace(&mut self.sets, grown);
        let latest_last = old.iter().flat_map(|set| set.0.iter().rev());
        latest_last.filter(|departure| **departure != 0).for_each(|departure| self.put(*departure));
    }
}

fn number_mask() -> u32 {
    (1 << CAUSE_BITS) - 1
}

/// Returns the number of the cause of a departure.
fn number(departure: Departure) -> usize {
    (departure & number_mask()) as usize
}

/// Returns a predicate for the departure of the key with a fingerprint.
fn is_of(print: u32) -> impl Fn(&&Departure) -> bool {
    move |departure| **departure != 0 && **departure & !number_mask() == print
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> u64 {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }

    #[test]
    fn the_latest_cause_counts() {
        let mut departed = Departed::default();
        assert_eq!(departed.cause(hash(1)), MissCause::Unknown);
        for cause in MissCause::ALL.into_iter().filter(|cause| (1..8).contains(&(*cause as u32))) {
            departed.remember(hash(1), cause, 0);
            assert_eq!((departed.cause(hash(1)), departed.cause(hash(2))), (cause, MissCause::Unknown));
        }
        assert_eq!(departed.sets[departed.index(print(hash(1)))].0.iter().filter(|it| **it != 0).count(), 1);
        // A fingerprint of 0 is one like any other.
        departed.remember(0, MissCause::Removed, 0);
        assert_eq!(departed.cause(0), MissCause::Removed);
    }

    #[test]
    fn remembers_four_for_each_object_and_growing_keeps_them() {
        let mut departed = Departed::default();
        for number in 0..20_000 {
            departed.remember(hash(number), MissCause::Evicted, 1000);
        }
        assert!(departed.sets.len() * size_of::<Set>() <= 1000 * 16 + 64, "{}", departed.sets.len());
        let known = |departed: &Departed, range: std::ops::Range<u64>| {
            range.filter(|number| departed.cause(hash(*number)) == MissCause::Evicted).count()
        };
        let (recent, older) = (known(&departed, 18_000..20_000), known(&departed, 0..10_000));
        assert!(recent > 1900 && older < 500, "{recent} of 2000, {older} of those that should be forgotten");
        departed.remember(hash(20_000), MissCause::Evicted, 10_000);
        assert!(known(&departed, 18_000..20_001) > recent, "{recent}");
    }
}
