//! Conformance suite of [`SegmentAllocator`]: one case per sentence of its contract, and random
//! steps beside an oracle.
//!
//! [`allocator_conformance!`](crate::allocator_conformance) turns it into tests of your allocator:
//!
//! ```
//! #[cfg(test)]
//! mod tests {
//!     use mooncake_core::alloc::BestFit; // yours
//!
//!     mooncake_core::allocator_conformance!(BestFit);
//! }
//! ```
//!
//! An allocator may refuse a request although a range is long enough (fragmentation, which is
//! measured elsewhere), but it must keep the promise of `largest_free`. The contract does not say
//! whether `release` panics when the extent is not live; [`refuses_a_second_release`] checks it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::alloc::{AllocError, Extent, SegmentAllocator};
use crate::clock::Rng;

/// Generates the tests of a [`SegmentAllocator`]: `allocator_conformance!(MyAllocator)` or, with
/// options, `allocator_conformance!(module_name, MyAllocator, config)`.
#[macro_export]
macro_rules! allocator_conformance {
    ($allocator:ty) => {
        $crate::allocator_conformance!(
            allocator_conformance,
            $allocator,
            <<$allocator as $crate::alloc::SegmentAllocator>::Config as ::core::default::Default>::default()
        );
    };
    ($module:ident, $allocator:ty, $config:expr) => {
        #[cfg(test)]
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            $crate::allocator_conformance!(@cases $allocator, $config;
                live_extents_never_overlap, live_extents_lie_inside, an_extent_is_as_requested,
                releasing_all_makes_one_free_range, used_is_the_sum_of_live_lengths,
                the_same_calls_give_the_same_offsets, bad_requests_are_refused, a_full_segment_refuses,
                largest_free_can_be_allocated, reserve_takes_exactly_the_range, reserve_refuses_ranges_that_are_not_free,
                a_layout_can_be_rebuilt, a_segment_may_be_empty_or_huge, random_steps_agree_with_the_oracle);
        }
    };
    (@cases $allocator:ty, $config:expr; $($case:ident),*) => {$(
        #[test]
        fn $case() {
            $crate::testkit::alloc::$case::<$allocator>(&$config);
        }
    )*};
}

/// Call of an allocator, meaningful in any state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllocStep {
    /// `allocate(len, 1 << align_log2)`.
    Allocate {
        /// Requested bytes.
        len: u64,
        /// Power of two of the alignment.
        align_log2: u32,
    },
    /// `allocate(largest_free() + more, 1)`.
    AllocateLargest {
        /// Bytes beyond the promised length; 0 must succeed.
        more: u64,
    },
    /// Releases the live extent of this number, in order of offset, modulo their count.
    Release(usize),
    /// Reserves any range, free or not.
    Reserve(Extent),
    /// Reserves a part of the free range of this number (counted as in `Release`).
    ReserveFree {
        /// Number of the free range.
        range: usize,
        /// Bytes skipped at its start, modulo its length.
        skip: u64,
        /// Bytes reserved, at most the rest of the range.
        len: u64,
    },
}

/// Returns a strategy of random steps for a segment of `capacity` bytes.
pub fn alloc_steps(capacity: u64, max_steps: usize) -> impl Strategy<Value = Vec<AllocStep>> {
    let len = prop_oneof![8 => 1..=(capacity / 16).max(1), 2 => 1..=capacity.max(1), 1 => 0..=64u64];
    let align_log2 = prop_oneof![4 => Just(0u32), 1 => 0..=12u32, 1 => 0..=63u32];
    let step = prop_oneof![
        8 => (len.clone(), align_log2).prop_map(|(len, align_log2)| AllocStep::Allocate { len, align_log2 }),
        1 => prop_oneof![Just(0u64), 0..=3u64].prop_map(|more| AllocStep::AllocateLargest { more }),
        7 => any::<usize>().prop_map(AllocStep::Release),
        1 => (0..=capacity, len.clone()).prop_map(|(offset, len)| AllocStep::Reserve(Extent { offset, len })),
        2 => (any::<usize>(), 0..=capacity, len)
            .prop_map(|(range, skip, len)| AllocStep::ReserveFree { range, skip, len }),
    ];
    proptest::collection::vec(step, 0..=max_steps)
}

/// Allocator beside a map of its expected content. Every call is checked. A violation panics with
/// the broken sentence of the contract.
#[derive(Debug)]
pub struct Checked<A> {
    allocator: A,
    capacity: u64,
    /// Lengths of live ranges, by offset.
    live: BTreeMap<u64, u64>,
}

impl<A: SegmentAllocator> Checked<A> {
    /// Creates an allocator over `capacity` bytes.
    pub fn new(capacity: u64, config: &A::Config) -> Self {
        let checked = Self { allocator: A::new(capacity, config), capacity, live: BTreeMap::new() };
        checked.check_statistics();
        checked
    }

    /// Performs one step. Returns the offset of the allocated extent, if any, for comparison.
    pub fn step(&mut self, step: &AllocStep) -> Option<u64> {
        match *step {
            AllocStep::Allocate { len, align_log2 } => self.allocate(len, 1 << align_log2),
            AllocStep::AllocateLargest { more } => {
                self.allocate(self.allocator.largest_free().saturating_add(more), 1)
            }
            AllocStep::Release(pick) => {
                let extents = self.live();
                if !extents.is_empty() {
                    self.release(extents[pick % extents.len()]);
                }
                return None;
            }
            AllocStep::Reserve(extent) => self.reserve(extent),
            AllocStep::ReserveFree { range, skip, len } => {
                let free = self.free();
                if free.is_empty() {
                    return None;
                }
                let range = free[range % free.len()];
                let skip = skip % range.len;
                self.reserve(Extent { offset: range.offset + skip, len: len.min(range.len - skip) })
            }
        }
        .ok()
        .map(|extent| extent.offset)
    }

    /// Calls `allocate` and checks the result.
    pub fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        let promised = self.allocator.largest_free();
        let result = self.allocator.allocate(len, align);
        match result {
            Ok(extent) => {
                assert_eq!(extent.len, len, "an extent has exactly the length asked for");
                assert_eq!(extent.offset % align, 0, "an offset is a multiple of the alignment");
                let end = extent.end().filter(|&end| end <= self.capacity);
                assert!(end.is_some(), "an extent lies inside the segment: {extent:?} of {}", self.capacity);
                assert!(
                    self.is_free(extent),
                    "live extents never overlap: {extent:?} with one of {:?}",
                    self.live()
                );
                self.live.insert(extent.offset, extent.len);
            }
            Err(error) if len == 0 || !align.is_power_of_two() => {
                assert_eq!(error, AllocError::Invalid, "length 0 and odd alignments are Invalid");
            }
            Err(error) if len > self.capacity => {
                assert_eq!(error, AllocError::TooLarge, "a length that can never fit is TooLarge");
            }
            Err(error) => {
                assert_eq!(error, AllocError::Full, "a length that could fit later is Full");
                assert!(
                    align != 1 || len > promised,
                    "{len} bytes were refused, largest_free was {promised}"
                );
            }
        }
        self.check_statistics();
        result
    }

    /// Calls `release` and checks the effect.
    pub fn release(&mut self, extent: Extent) {
        assert_eq!(self.live.remove(&extent.offset), Some(extent.len), "the case releases a live extent");
        self.allocator.release(extent);
        self.check_statistics();
    }

    /// Calls `reserve` and checks the result.
    pub fn reserve(&mut self, extent: Extent) -> Result<Extent, AllocError> {
        let expected = match extent.end() {
            _ if extent.len == 0 => Err(AllocError::Invalid),
            Some(end) if end <= self.capacity && self.is_free(extent) => Ok(extent),
            _ => Err(AllocError::Occupied),
        };
        let result = self.allocator.reserve(extent).map(|()| extent);
        assert_eq!(result, expected, "reserve takes a range exactly when it is wholly free: {extent:?}");
        if expected.is_ok() {
            self.live.insert(extent.offset, extent.len);
        }
        self.check_statistics();
        result
    }

    /// Returns the live extents by offset.
    pub fn live(&self) -> Vec<Extent> {
        self.live.iter().map(|(&offset, &len)| Extent { offset, len }).collect()
    }

    /// Returns the free ranges by offset.
    pub fn free(&self) -> Vec<Extent> {
        let starts = std::iter::once(0).chain(self.live.iter().map(|(offset, len)| offset + len));
        let ends = self.live.keys().copied().chain(std::iter::once(self.capacity));
        let gaps = starts.zip(ends).map(|(start, end)| Extent { offset: start, len: end - start });
        gaps.filter(|gap| gap.len != 0).collect()
    }

    /// Returns the allocator, for what the checks do not cover.
    pub fn allocator(&self) -> &A {
        &self.allocator
    }

    /// Releases everything and checks that the whole segment is one free range.
    pub fn finish(mut self) {
        let mut rng = Rng::seeded(self.live.len() as u64);
        let mut live = self.live();
        while !live.is_empty() {
            self.release(live.swap_remove(rng.below(live.len() as u64) as usize));
        }
        assert_eq!(self.allocator.used(), 0, "used is 0 when nothing is live");
        if self.capacity != 0 {
            let whole = self.allocate(self.capacity, 1);
            assert!(
                whole.is_ok(),
                "releasing every extent makes the whole capacity one free range: {whole:?}"
            );
        }
    }

    fn is_free(&self, extent: Extent) -> bool {
        let before =
            self.live.range(..extent.offset).next_back().is_none_or(|(o, len)| o + len <= extent.offset);
        let after = self.live.range(extent.offset..).next();
        before && after.is_none_or(|(&next, _)| extent.end().is_some_and(|end| end <= next))
    }

    fn check_statistics(&self) {
        assert_eq!(self.allocator.capacity(), self.capacity, "capacity is the one it was created with");
        assert_eq!(
            self.allocator.used(),
            self.live.values().sum::<u64>(),
            "used is the sum of the live lengths"
        );
        let longest = self.free().iter().map(|gap| gap.len).max().unwrap_or(0);
        let promised = self.allocator.largest_free();
        assert!(
            promised <= longest,
            "largest_free never exceeds the longest free range: {promised} of {longest}"
        );
        assert!(promised != 0 || longest == 0, "largest_free is 0 only when nothing is free");
    }
}

const MIB: u64 = 1 << 20;

/// Fills a segment with extents of mixed sizes and releases some, which leaves holes.
fn mixed<A: SegmentAllocator>(config: &A::Config, seed: u64) -> Checked<A> {
    let mut rng = Rng::seeded(seed);
    let mut checked = Checked::new(MIB, config);
    for _ in 0..4 {
        while checked.allocate(rng.range(1..MIB / 64), 1).is_ok() {}
        for extent in checked.live() {
            if rng.below(3) == 0 {
                checked.release(extent);
            }
        }
    }
    checked
}

/// Checks that live extents never overlap.
pub fn live_extents_never_overlap<A: SegmentAllocator>(config: &A::Config) {
    let checked = mixed::<A>(config, 1);
    for pair in checked.live().windows(2) {
        assert!(pair[0].end() <= Some(pair[1].offset), "live extents never overlap: {pair:?}");
    }
}

/// Checks that live extents lie inside `0..capacity`.
pub fn live_extents_lie_inside<A: SegmentAllocator>(config: &A::Config) {
    for capacity in [1, 2, 63, 64, 65, 4095, 4097, 1_000_003] {
        let mut checked = Checked::<A>::new(capacity, config);
        while checked.allocate(capacity.div_ceil(10), 1).is_ok() {}
        assert!(!checked.live().is_empty(), "a tenth of a free segment can be allocated");
        checked.finish();
    }
}

/// Checks that an extent has exactly the requested length and an offset that is a multiple of
/// `align`.
pub fn an_extent_is_as_requested<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = Checked::<A>::new(MIB, config);
    for align in (0..20).map(|bit| 1 << bit) {
        for len in [1, 17, 4096, 4097] {
            if let Ok(extent) = checked.allocate(len, align) {
                checked.allocate(3, 1).ok();
                checked.release(extent);
            }
        }
    }
    checked.finish();
    // Offset 0 is a multiple of everything.
    let mut checked = Checked::<A>::new(100, config);
    assert_eq!(checked.allocate(100, 1 << 63).map(|extent| extent.offset), Ok(0));
}

/// Checks that releasing every extent, in any order, makes the whole capacity one free range again.
pub fn releasing_all_makes_one_free_range<A: SegmentAllocator>(config: &A::Config) {
    (2..6).for_each(|seed| mixed::<A>(config, seed).finish());
    for backwards in [false, true] {
        let mut checked = Checked::<A>::new(MIB, config);
        while checked.allocate(5000, 1).is_ok() {}
        let mut live = checked.live();
        if backwards {
            live.reverse();
        }
        live.into_iter().for_each(|extent| checked.release(extent));
        checked.finish();
    }
}

/// Checks that `used` is the sum of the live lengths.
pub fn used_is_the_sum_of_live_lengths<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = Checked::<A>::new(10_000, config);
    let (a, b) =
        (checked.allocate(1, 1).expect("enough space"), checked.allocate(1025, 512).expect("enough space"));
    assert_eq!(checked.allocator().used(), 1026, "used counts the requested bytes");
    checked.release(a);
    assert_eq!(checked.allocator().used(), 1025, "used goes down by the released length");
    checked.release(b);
    assert_eq!(checked.allocator().used(), 0, "used is 0 when nothing is live");
}

/// Checks that the same calls give the same offsets.
pub fn the_same_calls_give_the_same_offsets<A: SegmentAllocator>(config: &A::Config) {
    let (a, b) = (mixed::<A>(config, 7), mixed::<A>(config, 7));
    assert_eq!(a.live(), b.live(), "the same calls give the same offsets");
}

/// Checks that length 0 and alignments other than powers of two are `Invalid`, and that more than
/// the capacity is `TooLarge`.
pub fn bad_requests_are_refused<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = Checked::<A>::new(MIB, config);
    for (len, align) in [(0, 1), (0, 0), (1, 0), (1, 3), (5, u64::MAX), (0, 1 << 63)] {
        assert_eq!(checked.allocate(len, align), Err(AllocError::Invalid), "{len} bytes at {align}");
    }
    for len in [MIB + 1, 1 << 63, u64::MAX] {
        for align in [1, 4096, 1 << 63] {
            assert_eq!(checked.allocate(len, align), Err(AllocError::TooLarge), "{len} bytes at {align}");
        }
    }
    checked.finish();
}

/// Checks that a full segment refuses with `Full`, and accepts again after a release.
pub fn a_full_segment_refuses<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = Checked::<A>::new(MIB, config);
    let whole = checked.allocate(MIB, 1).expect("a free segment can be allocated whole");
    for (len, align) in [(1, 1), (MIB, 1), (1, 4096), (100, 1 << 63)] {
        assert_eq!(checked.allocate(len, align), Err(AllocError::Full), "{len} bytes at {align}");
    }
    assert_eq!(checked.allocator().largest_free(), 0);
    checked.release(whole);
    assert_eq!(checked.allocate(MIB, 1), Ok(whole));
}

/// Checks that `largest_free` bytes can be allocated.
pub fn largest_free_can_be_allocated<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = mixed::<A>(config, 8);
    let mut last = u64::MAX;
    while checked.allocator().largest_free() != 0 {
        let largest = checked.allocator().largest_free();
        assert!(largest <= last, "an allocation does not raise largest_free");
        last = largest;
        checked.allocate(largest, 1).expect("largest_free bytes can be allocated");
    }
    assert_eq!(checked.allocator().used(), MIB, "a segment can be filled to the last byte");
    checked.finish();
}

/// Checks that `reserve` takes exactly the given range.
pub fn reserve_takes_exactly_the_range<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = Checked::<A>::new(1000, config);
    for (offset, len) in [(0, 1), (999, 1), (500, 7), (507, 3), (490, 10), (1, 489)] {
        assert!(checked.reserve(Extent { offset, len }).is_ok(), "{len} bytes at {offset} are free");
    }
    assert_eq!(checked.allocate(490, 1), Err(AllocError::Full));
    assert_eq!(checked.allocate(489, 1), Ok(Extent { offset: 510, len: 489 }), "the rest stays free");
    checked.finish();
}

/// Checks that `reserve` refuses ranges that are not wholly free or lie outside, and then changes
/// nothing.
pub fn reserve_refuses_ranges_that_are_not_free<A: SegmentAllocator>(config: &A::Config) {
    let mut checked = Checked::<A>::new(1000, config);
    checked.reserve(Extent { offset: 100, len: 100 }).expect("free");
    for (offset, len) in [(100, 100), (50, 51), (199, 1), (0, 1000), (120, 5), (50, 200)] {
        let refused = checked.reserve(Extent { offset, len });
        assert_eq!(refused, Err(AllocError::Occupied), "{len} bytes at {offset} are not free");
    }
    for (offset, len) in
        [(1000, 1), (999, 2), (0, 1001), (u64::MAX, 1), (u64::MAX, u64::MAX), (500, u64::MAX)]
    {
        let refused = checked.reserve(Extent { offset, len });
        assert_eq!(refused, Err(AllocError::Occupied), "{len} bytes at {offset} lie outside");
    }
    assert_eq!(checked.reserve(Extent { offset: 5, len: 0 }), Err(AllocError::Invalid), "no bytes");
    checked.finish();
}

/// Checks that the extents of one allocator can be reserved in another, in any order, and that
/// later calls work.
pub fn a_layout_can_be_rebuilt<A: SegmentAllocator>(config: &A::Config) {
    let old = mixed::<A>(config, 9);
    let (mut new, mut rng) = (Checked::<A>::new(MIB, config), Rng::seeded(10));
    let mut layout = old.live();
    while !layout.is_empty() {
        let extent = layout.swap_remove(rng.below(layout.len() as u64) as usize);
        new.reserve(extent).expect("extents of one segment do not overlap");
    }
    assert_eq!(new.live(), old.live());
    assert_eq!(new.allocator().used(), old.allocator().used());
    while new.allocator().largest_free() != 0 {
        new.allocate(new.allocator().largest_free(), 1).expect("largest_free bytes can be allocated");
    }
    assert_eq!(new.allocator().used(), MIB, "all free space can be allocated");
    new.finish();
}

/// Checks that a capacity of zero and the largest capacity of 64 bits both work.
pub fn a_segment_may_be_empty_or_huge<A: SegmentAllocator>(config: &A::Config) {
    let mut empty = Checked::<A>::new(0, config);
    assert_eq!(empty.allocate(1, 1), Err(AllocError::TooLarge));
    assert_eq!(empty.reserve(Extent { offset: 0, len: 1 }), Err(AllocError::Occupied));
    empty.finish();

    let mut huge = Checked::<A>::new(u64::MAX, config);
    huge.reserve(Extent { offset: u64::MAX - 10, len: 10 }).expect("free");
    huge.allocate(17, 1 << 62).expect("enough space");
    huge.allocate(1 << 40, 1 << 40).expect("enough space");
    huge.allocate((1 << 62) - 1, 1).expect("enough space");
    huge.allocate(u64::MAX, 1 << 63).expect_err("no space");
    huge.finish();
}

/// Checks random steps one by one beside the oracle, twice with the same outcome, and releases
/// everything.
pub fn random_steps_agree_with_the_oracle<A: SegmentAllocator>(config: &A::Config) {
    let capacities = prop_oneof![1..=300u64, 1..=100_000u64, Just(1 << 16), Just(u64::MAX / 2)];
    let cases = capacities.prop_flat_map(|capacity| (Just(capacity), alloc_steps(capacity, 120)));
    let run = |capacity, steps: &[AllocStep]| {
        let mut checked = Checked::<A>::new(capacity, config);
        let offsets: Vec<_> = steps.iter().map(|step| checked.step(step)).collect();
        checked.finish();
        offsets
    };
    let result =
        TestRunner::new(Config { failure_persistence: None, ..Config::default() }).run(&cases, |case| {
            let (capacity, steps) = case;
            prop_assert_eq!(
                run(capacity, &steps),
                run(capacity, &steps),
                "the same calls give the same offsets"
            );
            Ok(())
        });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Checks that releasing an extent that is not live panics: an extent released twice, a part of
/// one, one never allocated. The contract allows this check, but does not require it.
pub fn refuses_a_second_release<A: SegmentAllocator>(config: &A::Config) {
    let mut allocator = A::new(1000, config);
    let a = allocator.allocate(100, 1).expect("enough space");
    let b = allocator.allocate(100, 1).expect("enough space");
    allocator.release(a);
    let wrong = [
        a,
        Extent { len: 99, ..b },
        Extent { offset: b.offset + 1, len: 99 },
        Extent { offset: 999, len: 1 },
    ];
    for extent in wrong {
        let outcome = catch_unwind(AssertUnwindSafe(|| allocator.release(extent)));
        assert!(outcome.is_err(), "{extent:?} is not live, but its release succeeded");
        assert_eq!(allocator.used(), 100, "a refused release changes nothing");
    }
    allocator.release(b);
    assert_eq!(allocator.allocate(1000, 1).map(|whole| whole.offset), Ok(0));
}
