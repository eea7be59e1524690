//! Classes of objects, by facts that are known when they are used.

use crate::evict::chain::Place;

/// Number of classes: 16 of objects used once, and 30 of objects used again.
pub(super) const CLASSES: usize = ONCE + (LEVELS - 1) * BANDS * 2;

/// Number of levels: one, two, three, four, five to eight, and more uses.
pub(super) const LEVELS: usize = 6;

/// Classes of objects used once: eight sizes of batches, for chains that go on or not.
const ONCE: usize = 16;

/// Times since the previous use: up to half of the memory, up to twice the memory, longer.
const BANDS: usize = 3;

/// Returns the class of a use. `uses` counts it, `gap` is the time since the previous one, and
/// `held` the number of objects that fit into memory.
pub(super) fn class(uses: u8, gap: u64, held: u64, place: &Place) -> u8 {
    // Free of branches: they would be foreseen wrongly, and then wait for the state of the object,
    // which is rarely in a cache of the processor.
    let once = place.fresh.max(1).ilog2().min(7) as usize;
    let band = usize::from(gap > held / 2) + usize::from(gap > held.saturating_mul(2));
    let of_uses = FIRST_OF_USES[usize::from(uses.min(9))] + band;
    let class = std::hint::select_unpredictable(uses <= 1, once, of_uses);
    (class * 2 + usize::from(place.goes_on)) as u8
}

/// First class of each number of uses up to nine, of chains that do not go on, halved.
const FIRST_OF_USES: [usize; 10] = {
    let (mut first, mut uses) = ([0; 10], 2);
    while uses < first.len() {
        first[uses] = ONCE / 2 + (level_of_uses(uses as u8) - 1) * BANDS;
        uses += 1;
    }
    first
};

/// Returns the level of a class.
pub(super) fn level(class: usize) -> usize {
    if class < ONCE { 0 } else { 1 + (class - ONCE) / (BANDS * 2) }
}

const fn level_of_uses(uses: u8) -> usize {
    match uses {
        0 => 0,
        1..=4 => uses as usize - 1,
        5..=8 => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_numbered_without_gaps() {
        let mut seen = [false; CLASSES];
        for uses in 1..=20 {
            for gap in [50, 150, 500] {
                for fresh in [0, 1, 2, 4, 8, 16, 32, 64, 128, 9999] {
                    for goes_on in [false, true] {
                        let place = Place { fresh, goes_on, ..Place::default() };
                        let class = usize::from(class(uses, gap, 100, &place));
                        seen[class] = true;
                        assert_eq!(level(class), level_of_uses(uses));
                    }
                }
            }
        }
        assert_eq!(seen, [true; CLASSES]);
        let of = |uses, gap, fresh| class(uses, gap, 100, &Place { fresh, ..Place::default() });
        assert_eq!((of(1, 0, 1), of(1, 0, 3), of(1, 0, 4), of(1, 0, 128)), (0, 2, 4, 14));
        assert_eq!((of(2, 50, 0), of(2, 51, 0), of(2, 201, 0), of(3, 0, 0)), (16, 18, 20, 22));
        assert_eq!(of(9, 0, 0), of(255, 0, 0));
    }
}
