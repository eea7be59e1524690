//! Values of objects: hazards from counts, and the Gittins index from hazards.

use super::ages::{BUCKETS, bucket_of_middles, middle, width};
use super::class::{CLASSES, LEVELS, level};

/// Uses by age since the previous use of the same key. Counts are halved from time to time, exactly
/// in binary fractions.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Counts {
    /// Uses at an age in each bucket.
    pub(super) reused: [f32; BUCKETS],
    /// Uses after which the key stayed unused until the lower end of each bucket.
    pub(super) reached: [f32; BUCKETS],
}

impl Counts {
    pub(super) const ZERO: Self = Self { reused: [0.0; BUCKETS], reached: [0.0; BUCKETS] };

    fn add(&mut self, other: &Self) {
        self.reused.iter_mut().zip(&other.reused).for_each(|(sum, count)| *sum += count);
        self.reached.iter_mut().zip(&other.reached).for_each(|(sum, count)| *sum += count);
    }

    pub(super) fn halve(&mut self) {
        self.reused.iter_mut().chain(&mut self.reached).for_each(|count| *count /= 2.0);
    }
}

/// Weight, in uses, of the curve that a finer one starts from.
const BASE_WEIGHT: f64 = 100.0;

/// Weight, in uses, of the assumption that a class is reused as often as its base.
const FACTOR_WEIGHT: f64 = 10.0;

/// Reuses and uses in each bucket that are assumed before anything was counted: a tenth for each
/// doubling, which makes the policy LRU.
const ASSUMED: (f64, f64) = (2.0, 20.0);

/// Chance of a reuse in each bucket, given that the bucket was reached.
pub(super) type Hazards = [f64; BUCKETS];

fn hazards_of_all(all: &Counts) -> Hazards {
    std::array::from_fn(|b| {
        let (reused, reached) = (f64::from(all.reused[b]), f64::from(all.reached[b]));
        ((reused + ASSUMED.0) / (reached + ASSUMED.1)).min(1.0)
    })
}

/// Returns the hazards of a part of the uses: those of `base` times a factor, as far as the counts
/// of the part do not tell better.
fn refine(base: &Hazards, part: &Counts) -> Hazards {
    let reused: f64 = part.reused.iter().map(|&count| f64::from(count)).sum();
    let expected: f64 = part.reached.iter().zip(base).map(|(&count, base)| f64::from(count) * base).sum();
    let factor = (FACTOR_WEIGHT + reused) / (FACTOR_WEIGHT + expected);
    std::array::from_fn(|b| {
        let (reused, reached) = (f64::from(part.reused[b]), f64::from(part.reached[b]));
        ((reused + BASE_WEIGHT * (factor * base[b]).min(1.0)) / (reached + BASE_WEIGHT)).min(1.0)
    })
}

/// Returns the Gittins index at the lower end of each bucket: the largest number of hits per unit
/// of time that an object is worth if it is kept until some later age.
///
/// The index of a bucket is the best over itself alone, and over itself and the best span after it
/// if that span is worth more. So the spans are merged from the last one backwards.
pub(super) fn gittins_index(hazards: &Hazards) -> [f32; BUCKETS] {
    let mut index = [0.0; BUCKETS];
    let (mut spans, mut count) = ([Span::default(); BUCKETS], 0);
    for (b, hazard) in hazards.iter().enumerate().rev() {
        let time = width(b) as f64 * (1.0 - hazard / 2.0);
        let mut span = Span { hits: *hazard, time, survival: 1.0 - hazard };
        // Compares the quotients of hits and time without a division.
        while let Some(next) =
            spans[..count].last().filter(|next| next.hits * span.time > span.hits * next.time)
        {
            span.hits += span.survival * next.hits;
            span.time += span.survival * next.time;
            span.survival *= next.survival;
            count -= 1;
        }
        index[b] = (span.hits / span.time) as f32;
        spans[count] = span;
        count += 1;
    }
    index
}

/// Span of ages, seen from its beginning.
#[derive(Clone, Copy, Default)]
struct Span {
    /// Chance of a reuse within the span.
    hits: f64,
    /// Time that the object is expected to stay unused within it.
    time: f64,
    /// Chance of no reuse within it.
    survival: f64,
}

/// Share of the least other value below which an object at a young end is taken.
pub(super) const YOUNG_MARGIN: f32 = 0.98;

/// Factor for least values, because interpolation may round.
const ROUNDED: f32 = 0.999;

/// First bucket that is not fresh.
const FRESH_BUCKETS: usize = 4;

/// Age in uses from which an object is not fresh.
pub(super) const FRESH: u64 = middle(FRESH_BUCKETS);

/// Value of each class at each age.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Values {
    classes: [[f32; BUCKETS]; CLASSES],
    /// First bucket of each class whose value is above an earlier one by the margin; beyond the
    /// last one if there is none.
    rises_at: [u8; CLASSES],
    /// Least value of each class up to each bucket.
    least: [[f32; BUCKETS]; CLASSES],
    /// Value that no fresh object has less than.
    least_of_fresh: f32,
}

/// Inverse of the distance from the middle of each bucket to that of the next.
const INVERSES: [f32; BUCKETS] = {
    let (mut inverses, mut at) = ([0.0; BUCKETS], 0);
    while at + 1 < BUCKETS {
        inverses[at] = 1.0 / (middle(at + 1) - middle(at)) as f32;
        at += 1;
    }
    inverses
};

impl Values {
    /// Computes the values from the counts of each class.
    pub(super) fn compute(classes: &[Counts; CLASSES]) -> Self {
        let mut levels = [Counts::ZERO; LEVELS];
        let mut all = Counts::ZERO;
        for (class, counts) in classes.iter().enumerate() {
            levels[level(class)].add(counts);
            all.add(counts);
        }
        let of_all = hazards_of_all(&all);
        let of_levels = levels.map(|counts| refine(&of_all, &counts));
        let value = |class| gittins_index(&refine(&of_levels[level(class)], &classes[class]));
        Self::new(std::array::from_fn(value))
    }

    fn new(classes: [[f32; BUCKETS]; CLASSES]) -> Self {
        let rises_at = std::array::from_fn(|class| {
            let mut least = f32::INFINITY;
            let rises = |value: &f32| {
                least = least.min(*value);
                least < value * YOUNG_MARGIN
            };
            classes[class].iter().position(rises).unwrap_or(BUCKETS + 1) as u8
        });
        let least = classes.map(|values| {
            let mut least = f32::INFINITY;
            values.map(|value| {
                least = least.min(value);
                least
            })
        });
        let fresh = |values: &[f32; BUCKETS]| values[FRESH_BUCKETS];
        let least_of_fresh = least.iter().map(fresh).fold(f32::INFINITY, f32::min) * ROUNDED;
        Self { classes, rises_at, least, least_of_fresh }
    }

    /// Returns a value that no object has less than, up to the age [`FRESH`].
    pub(super) fn least_of_fresh(&self) -> f32 {
        self.least_of_fresh
    }

    /// Returns whether an object of this class at an age may be worth more than a younger one by
    /// the margin.
    pub(super) fn rises_before(&self, class: u8, age: AgePoint) -> bool {
        age.lower + 1 >= usize::from(self.rises_at[usize::from(class)])
    }

    /// Returns a value that no object of this class up to an age has less than.
    pub(super) fn least_before(&self, class: u8, age: AgePoint) -> f32 {
        self.least[usize::from(class)][(age.lower + 1).min(BUCKETS - 1)] * ROUNDED
    }

    /// Returns the value of an object of this class at an age: positive, and interpolated between
    /// the middles of the buckets.
    pub(super) fn at(&self, class: u8, age: AgePoint) -> f32 {
        let values = &self.classes[usize::from(class)];
        let upper = (age.lower + 1).min(BUCKETS - 1);
        values[age.lower] + (values[upper] - values[age.lower]) * age.part
    }
}

/// Age at which an object has been unused, between the middles of two buckets.
#[derive(Clone, Copy, Debug)]
pub(super) struct AgePoint {
    /// Last bucket whose middle was reached; the first one if there is none.
    lower: usize,
    /// Part of the way to the middle of the next one.
    part: f32,
}

impl From<u64> for AgePoint {
    fn from(age: u64) -> Self {
        let lower = bucket_of_middles(age);
        // The conversion of a signed number takes one instruction.
        let beyond = age.saturating_sub(MIDDLES[lower]) as i64;
        Self { lower, part: beyond as f32 * INVERSES[lower] }
    }
}

/// Age in the middle of each bucket.
const MIDDLES: [u64; BUCKETS] = {
    let (mut middles, mut at) = ([0; BUCKETS], 0);
    while at < BUCKETS {
        middles[at] = middle(at);
        at += 1;
    }
    middles
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Computes the index from its definition: over all ages at which an object may be given up,
    /// the expected hits by the expected time, from the chances of each outcome.
    fn by_brute_force(hazards: &Hazards, from: usize) -> f64 {
        let until = |last: usize| {
            let (mut hits, mut time) = (0.0, 0.0);
            for end in from..=last + 1 {
                // The object is reused in bucket `end`, or in none up to `last`.
                let survives: f64 = (from..end.min(last + 1)).map(|b| 1.0 - hazards[b]).product();
                let full: f64 = (from..end.min(last + 1)).map(|b| width(b) as f64).sum();
                if end <= last {
                    hits += survives * hazards[end];
                    time += survives * hazards[end] * (full + width(end) as f64 / 2.0);
                } else {
                    time += survives * full;
                }
            }
            hits / time
        };
        (from..BUCKETS).map(until).fold(0.0, f64::max)
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn the_index_is_the_best_over_all_stopping_ages(
            hazards in proptest::collection::vec(prop_oneof![Just(0.0), 0.0..0.3f64, 0.0..=1.0f64], BUCKETS)
        ) {
            let hazards: Hazards = hazards.try_into().unwrap();
            for (from, index) in gittins_index(&hazards).into_iter().enumerate() {
                let expected = by_brute_force(&hazards, from);
                prop_assert!((f64::from(index) - expected).abs() <= 1e-6 * expected, "{from} {index} {expected}");
            }
        }

        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn values_are_positive_whatever_was_counted(
            counts in proptest::collection::vec((0u32..100_000, 0u32..100_000), CLASSES * BUCKETS),
            age in any::<u64>(),
        ) {
            let mut classes = [Counts::ZERO; CLASSES];
            for (at, (reused, reached)) in counts.into_iter().enumerate() {
                classes[at / BUCKETS].reused[at % BUCKETS] = reused as f32;
                classes[at / BUCKETS].reached[at % BUCKETS] = reached as f32;
            }
            let values = Values::compute(&classes);
            for class in 0..CLASSES as u8 {
                let value = values.at(class, age.into());
                prop_assert!(value.is_finite() && value > 0.0, "{value}");
            }
        }
    }

    /// At first the longest unused object has the least value, whatever its class.
    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn values_begin_as_those_of_lru() {
        let values = Values::compute(&[Counts::ZERO; CLASSES]);
        let ages = [0, 31, 32, 63, 64, 95, 96, 100, 1000, 5000, 1 << 30, 1 << 41];
        for pair in ages.windows(2) {
            for classes in [[0, 45], [45, 0], [7, 7]] {
                let [young, old] = [0, 1].map(|at| values.at(classes[at], pair[at].into()));
                assert!(old <= young && (old < young || pair[1] <= 96), "{pair:?} {young} {old}");
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn values_are_interpolated() {
        let mut classes = [[0.0; BUCKETS]; CLASSES];
        classes[3] = std::array::from_fn(|b| b as f32);
        let values = Values::new(classes);
        assert_eq!(
            (
                values.at(3, AgePoint::from(0)),
                values.at(3, AgePoint::from(32)),
                values.at(3, AgePoint::from(64)),
                values.at(3, AgePoint::from(96))
            ),
            (0.0, 0.0, 0.5, 1.0)
        );
        assert_eq!(
            (
                values.at(3, AgePoint::from(144)),
                values.at(3, AgePoint::from(192)),
                values.at(3, AgePoint::from(u64::MAX))
            ),
            (1.5, 2.0, 35.0)
        );
    }

    /// A young object is looked for only where it can be worth less than the oldest one.
    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn rises_are_known() {
        let mut classes = [[1.0; BUCKETS]; CLASSES];
        classes[1] = std::array::from_fn(|b| 1.0 / (b + 1) as f32);
        classes[2] = std::array::from_fn(|b| if b < 5 { 1.0 } else { 1.03 });
        let values = Values::new(classes);
        for age in [0, 31, 200, 1 << 20, u64::MAX] {
            assert!(!values.rises_before(0, age.into()) && !values.rises_before(1, age.into()));
            let younger = (0..age.min(10_000)).step_by(7).map(|age| values.at(2, AgePoint::from(age)));
            let least = younger.fold(f32::INFINITY, f32::min);
            assert!(
                values.rises_before(2, age.into())
                    || least >= values.at(2, AgePoint::from(age)) * YOUNG_MARGIN,
                "{age}"
            );
            assert_eq!(values.rises_before(2, age.into()), age >= middle(4));
        }
    }

    /// A class that is often reused after a pause is worth more just before it.
    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn a_loop_has_its_largest_value_before_it_comes_round() {
        let mut classes = [Counts::ZERO; CLASSES];
        classes[20].reached[..8].fill(10_000.0);
        classes[20].reused[7] = 10_000.0;
        let values = Values::compute(&classes);
        assert!(values.at(20, AgePoint::from(4000)) > 1.5 * values.at(20, AgePoint::from(100)));
    }
}
