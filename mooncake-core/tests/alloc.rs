//! Tests of the allocators of this crate: they pass the public suite and waste as little as
//! promised, and the suite finds planted bugs.

// Miri would take hours, and there is no unsafe code here to check.
#![cfg(not(miri))]

use std::panic::catch_unwind;

use mooncake_core::alloc::{
    AllocError, AllocatorKind, BestFit, BuiltinAllocator, Extent, SegmentAllocator, Tlsf, TlsfConfig,
};
use mooncake_core::clock::Rng;
use mooncake_core::{allocator_conformance, testkit};

allocator_conformance!(tlsf, Tlsf, TlsfConfig::default());
allocator_conformance!(tlsf_that_hardly_looks, Tlsf, TlsfConfig { scan: 0 });
allocator_conformance!(best_fit, BestFit, ());
allocator_conformance!(builtin_tlsf, BuiltinAllocator, AllocatorKind::Tlsf.into());
allocator_conformance!(builtin_best_fit, BuiltinAllocator, AllocatorKind::BestFit.into());

#[test]
fn a_second_release_panics() {
    testkit::alloc::refuses_a_second_release::<Tlsf>(&TlsfConfig::default());
    testkit::alloc::refuses_a_second_release::<BestFit>(&());
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Allocates until the first refusal.
fn fill<A: SegmentAllocator>(allocator: &mut A, live: &mut Vec<Extent>, mut len: impl FnMut() -> u64) {
    loop {
        match allocator.allocate(len(), 1) {
            Ok(extent) => live.push(extent),
            Err(error) => return assert_eq!(error, AllocError::Full),
        }
    }
}

fn release_a_tenth<A: SegmentAllocator>(allocator: &mut A, live: &mut Vec<Extent>, rng: &mut Rng) {
    for _ in 0..live.len() / 10 {
        allocator.release(live.swap_remove(rng.below(live.len() as u64) as usize));
    }
}

fn utilisation<A: SegmentAllocator>(allocator: &A) -> f64 {
    allocator.used() as f64 / allocator.capacity() as f64
}

/// Checks every uniform size: nothing is wasted except the rest at the end, at first and after any
/// churn.
fn uniform_sizes<A: SegmentAllocator>(config: &A::Config) {
    let mut rng = Rng::seeded(1);
    let powers = (0..24).map(|bit| 1 << bit);
    let near = powers.flat_map(|size: u64| [size - 1, size, size + 1, size + 17, size + size / 8 + 1]);
    let sizes: Vec<u64> =
        near.chain((0..20).map(|_| rng.range(1..8 * MIB))).filter(|&size| size != 0).collect();
    for size in sizes {
        // The capacity is not a multiple of the size, and a prime for most sizes.
        let capacity = (size * 1500 + 997).min(GIB);
        let mut allocator = A::new(capacity, config);
        let mut live = Vec::new();
        for _ in 0..5 {
            fill(&mut allocator, &mut live, || size);
            assert_eq!(live.len() as u64, capacity / size, "as many of {size} bytes as fit in {capacity}");
            release_a_tenth(&mut allocator, &mut live, &mut rng);
        }
        let wasted = (capacity % size) as f64 / capacity as f64;
        assert!(wasted <= 0.01, "{size} in {capacity}: the case allows less than 0.99");
    }
}

#[test]
fn uniform_sizes_waste_nothing() {
    uniform_sizes::<Tlsf>(&TlsfConfig::default());
    uniform_sizes::<BestFit>(&());
}

#[test]
fn a_gibibyte_of_just_more_than_a_power_of_two() {
    for size in [4 * KIB + 17, 64 * KIB + 17, 512 * KIB + 17, MIB + 17, 4 * MIB + 17] {
        let mut allocator = Tlsf::new(GIB, &TlsfConfig::default());
        fill(&mut allocator, &mut Vec::new(), || size);
        assert!(utilisation(&allocator) >= 0.99, "{size}: {}", utilisation(&allocator));
    }
}

/// Returns mean and worst utilisation at the first refusal, 1 KiB to 1 MiB in 1 GiB, over 400 times
/// a tenth released.
fn random_sizes<A: SegmentAllocator>(config: &A::Config, seed: u64) -> (f64, f64) {
    let mut rng = Rng::seeded(seed);
    let mut allocator = A::new(GIB, config);
    let (mut live, mut seen) = (Vec::new(), Vec::new());
    for _ in 0..400 {
        fill(&mut allocator, &mut live, || rng.range(KIB..MIB + 1));
        seen.push(utilisation(&allocator));
        release_a_tenth(&mut allocator, &mut live, &mut rng);
    }
    (seen.iter().sum::<f64>() / 400.0, seen.iter().copied().fold(1.0, f64::min))
}

#[test]
fn random_sizes_waste_little() {
    for seed in 1..=3 {
        let (mean, worst) = random_sizes::<Tlsf>(&TlsfConfig::default(), seed);
        assert!(mean >= 0.97, "seed {seed}: {mean} on average");
        assert!(worst >= 0.93, "seed {seed}: {worst} at worst");
    }
    let (mean, worst) = random_sizes::<BestFit>(&(), 1);
    assert!(mean >= 0.975 && worst >= 0.94, "best fit: {mean} on average, {worst} at worst");
}

/// Sizes of a key and its value cache, 3.12 MB and 643 kB.
#[test]
fn pairs_of_sizes_waste_little() {
    let mut rng = Rng::seeded(2);
    let mut allocator = Tlsf::new(4 * GIB, &TlsfConfig::default());
    let (mut live, mut turn) = (Vec::new(), 0);
    for _ in 0..200 {
        fill(&mut allocator, &mut live, || {
            turn += 1;
            [3_120_000, 643_000][turn % 2]
        });
        assert!(utilisation(&allocator) >= 0.97, "{}", utilisation(&allocator));
        release_a_tenth(&mut allocator, &mut live, &mut rng);
    }
}

#[test]
fn tlsf_reports_the_largest_free_range_exactly() {
    let mut rng = Rng::seeded(4);
    let mut allocator = Tlsf::new(64 * MIB, &TlsfConfig::default());
    let mut live = Vec::new();
    for _ in 0..200 {
        fill(&mut allocator, &mut live, || rng.range(KIB..MIB));
        release_a_tenth(&mut allocator, &mut live, &mut rng);
        let largest = allocator.largest_free();
        assert_eq!(allocator.allocate(largest + 1, 1), Err(AllocError::Full));
        let extent = allocator.allocate(largest, 1).expect("largest_free bytes can be allocated");
        allocator.release(extent);
    }
}

/// Reserves as many extents as a segment has objects, as a restarted master does.
#[test]
fn a_large_layout_is_rebuilt_quickly() {
    let (count, mut rng) = (60_000u64, Rng::seeded(5));
    let mut allocator = Tlsf::new(count * 4096, &TlsfConfig::default());
    let mut order: Vec<u64> = (0..count).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, rng.below(at as u64 + 1) as usize);
    }
    // One call may look at all free blocks, not each of them.
    for number in order.into_iter().filter(|number| number % 8 != 0) {
        allocator.reserve(Extent { offset: number * 4096, len: 4096 }).expect("free");
    }
    assert_eq!(allocator.used(), count / 8 * 7 * 4096);
    assert_eq!(allocator.allocate(4097, 1), Err(AllocError::Full));
    assert!(allocator.allocate(4096, 4096).is_ok());
}

/// Best-fit allocator with one bug.
struct Buggy<const BUG: u8> {
    inner: BestFit,
    calls: u64,
}

const BUGS: [(&str, fn()); 7] = [
    ("hands out a byte twice", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<0>>(&())),
    ("does not merge", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<1>>(&())),
    ("rounds lengths up", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<2>>(&())),
    ("ignores alignment", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<3>>(&())),
    ("promises too much", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<4>>(&())),
    ("reserves what is taken", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<5>>(&())),
    ("goes past the end", || testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<6>>(&())),
];

impl<const BUG: u8> SegmentAllocator for Buggy<BUG> {
    type Config = ();

    fn new(capacity: u64, (): &()) -> Self {
        let capacity = if BUG == 6 { capacity + 1 } else { capacity };
        Self { inner: BestFit::new(capacity, &()), calls: 0 }
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        self.calls += 1;
        match BUG {
            // Now and then the allocator takes one byte less than it returns.
            0 if self.calls.is_multiple_of(5) && len > 1 => {
                self.inner.allocate(len - 1, align).map(|extent| Extent { len, ..extent })
            }
            2 => self.inner.allocate(len.next_multiple_of(8), align),
            3 => self.inner.allocate(len, 1),
            _ => self.inner.allocate(len, align),
        }
    }

    fn release(&mut self, extent: Extent) {
        // The last byte of an extent that does not end at the end of the segment is never freed.
        let lost =
            u64::from(BUG == 1 && extent.len > 1 && extent.offset + extent.len < self.inner.capacity());
        if lost == 1 {
            self.inner.release(extent);
            self.inner
                .reserve(Extent { offset: extent.offset + extent.len - 1, len: 1 })
                .expect("just released");
        } else {
            self.inner.release(extent);
        }
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        let result = self.inner.reserve(extent);
        if BUG == 5 && result == Err(AllocError::Occupied) { Ok(()) } else { result }
    }

    fn capacity(&self) -> u64 {
        self.inner.capacity() - u64::from(BUG == 6)
    }

    fn used(&self) -> u64 {
        self.inner.used()
    }

    fn largest_free(&self) -> u64 {
        let largest = self.inner.largest_free();
        match BUG {
            4 => largest.next_power_of_two(),
            6 => largest.min(self.capacity() - self.used()),
            _ => largest,
        }
    }
}

#[test]
fn the_suite_finds_planted_bugs() {
    testkit::alloc::random_steps_agree_with_the_oracle::<Buggy<255>>(&());
    for (bug, suite) in BUGS {
        assert!(catch_unwind(suite).is_err(), "the suite does not notice an allocator that {bug}");
    }
}
