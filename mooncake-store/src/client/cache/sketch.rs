//! How often a key was asked for lately, in little memory.

/// Counters in a row; a power of two.
const WIDTH: usize = 1 << 16;
const ROWS: usize = 4;
/// After so many additions every counter is halved, so that what was asked for long ago counts less and less.
const AGES_AFTER: usize = WIDTH * 8;

/// A count-min sketch: its answer is never too low (but for ageing), and seldom too high.
pub(super) struct Sketch {
    counts: Vec<u8>,
    added: usize,
}

impl Sketch {
    pub(super) fn new() -> Self {
        Self { counts: vec![0; WIDTH * ROWS], added: 0 }
    }

    /// Counts a key by its hash; how often it was, with this time.
    pub(super) fn add(&mut self, hash: u64) -> u8 {
        self.added += 1;
        if self.added >= AGES_AFTER {
            self.added = 0;
            self.counts.iter_mut().for_each(|count| *count /= 2);
        }
        let step = hash >> 32 | 1;
        let at = |row: u64| {
            let column = hash.wrapping_add(row.wrapping_mul(step)) as usize % WIDTH;
            row as usize * WIDTH + column
        };
        let places: [usize; ROWS] = [at(0), at(1), at(2), at(3)];
        let least = places.iter().map(|&place| self.counts[place]).min().unwrap_or(0);
        let now = least.saturating_add(1);
        for place in places {
            self.counts[place] = self.counts[place].max(now);
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::clock::Rng;

    #[test]
    fn counts_are_seldom_too_high_and_fade() {
        let (mut sketch, mut rng) = (Sketch::new(), Rng::seeded(1));
        let hot = rng.next_u64();
        for times in 1..=3 {
            assert_eq!(sketch.add(hot), times);
        }
        let high = (0..10_000).filter(|_| sketch.add(rng.next_u64()) > 1).count();
        assert!(high < 100, "{high} of 10000 keys that came once");
        assert_eq!(sketch.add(hot), 4);
        for _ in 0..AGES_AFTER {
            sketch.add(rng.next_u64());
        }
        let left = (0..20).filter(|_| sketch.add(rng.next_u64()) > 16).count();
        assert_eq!(left, 0, "old keys do not fill it for good");
    }
}
