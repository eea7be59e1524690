//! Frequencies of recent events, in little memory.

const ROWS: usize = 4;

/// Count-min sketch with conservative updates. Apart from ageing, its counts are never too low, and
/// seldom too high.
#[derive(Debug)]
pub struct Sketch {
    /// Counters, row by row.
    counts: Box<[u8]>,
    width: usize,
    added: usize,
    fades_after: usize,
}

impl Sketch {
    /// Creates a sketch with four rows of `width` one-byte counters, rounded up to a power of two.
    /// Every `fades_after` additions halve all counters, so that older events count less and less.
    pub fn new(width: usize, fades_after: usize) -> Self {
        let width = width.next_power_of_two();
        Self { counts: vec![0; width * ROWS].into(), width, added: 0, fades_after }
    }

    /// Counts an event with that hash. Returns the number of recent ones, this one included, up to
    /// 255.
    pub fn add(&mut self, hash: u64) -> u8 {
        self.added += 1;
        if self.added >= self.fades_after {
            self.added = 0;
            self.counts.iter_mut().for_each(|count| *count /= 2);
        }
        let now = self.count(hash).saturating_add(1);
        for place in self.places(hash) {
            self.counts[place] = self.counts[place].max(now);
        }
        now
    }

    /// Returns the number of recent events with that hash.
    pub fn count(&self, hash: u64) -> u8 {
        self.places(hash).into_iter().map(|place| self.counts[place]).min().unwrap_or(0)
    }

    /// Returns the index of the counter of a hash in each row.
    fn places(&self, hash: u64) -> [usize; ROWS] {
        let step = hash >> 32 | 1;
        std::array::from_fn(|row| {
            let column = hash.wrapping_add((row as u64).wrapping_mul(step)) as usize & (self.width - 1);
            row * self.width + column
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Rng;

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn counts_are_seldom_too_high_and_fade() {
        let fades_after = if cfg!(miri) { 1 << 10 } else { 1 << 19 };
        let (mut sketch, mut rng) = (Sketch::new(1 << 16, fades_after), Rng::seeded(1));
        let hot = rng.next_u64();
        for times in 1..=3 {
            assert_eq!((sketch.add(hot), sketch.count(hot)), (times, times));
        }
        let seldom = fades_after / 52;
        let high = (0..seldom).filter(|_| sketch.add(rng.next_u64()) > 1).count();
        assert!(high <= seldom / 100, "{high} of {seldom} keys seen once");
        assert_eq!(sketch.add(hot), 4);
        for _ in 0..fades_after {
            sketch.add(rng.next_u64());
        }
        let left = (0..20).filter(|_| sketch.add(rng.next_u64()) > 16).count();
        assert_eq!(left, 0, "old keys do not fill the sketch for ever");
    }

    #[test]
    fn counts_stop_at_the_highest() {
        let mut sketch = Sketch::new(16, usize::MAX);
        let last = (0..400).map(|_| sketch.add(7)).last();
        assert_eq!(last, Some(u8::MAX));
    }
}
