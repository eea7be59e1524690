//! Time and utilisation of the allocators beside the bin scheme of Mooncake C++, all in one run.
//!
//! Work: fill the segment to the first refusal, then release a random tenth and fill up again, 400
//! times. Only the calls are timed. The allocators take turns, and the fastest turn counts, because
//! other work on the machine only adds time. "bins" is the scheme behind the allocator interface.
//! "bare bins" omits the lookup by offset, which its caller would have to do.

#![allow(clippy::print_stdout)]

use mooncake_benches::bin_scheme::{self, BinAllocator, BinScheme};
use mooncake_core::alloc::{BestFit, Extent, SegmentAllocator, Tlsf};
use mooncake_core::clock::{Clock, Rng, SystemClock};

const GIB: u64 = 1 << 30;
const KIB: u64 = 1 << 10;

/// Length of the next allocation: random, or by its number.
type Sizes = fn(&mut Rng, usize) -> u64;

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let (rounds, turns) = if quick { (40, 1) } else { (400, 7) };
    let works: [(&str, u64, Sizes); 6] = [
        ("64 KiB, 1 GiB", GIB, |_, _| 64 * KIB),
        ("512 KiB + 17 B, 1 GiB", GIB, |_, _| 512 * KIB + 17),
        ("1 KiB..1 MiB, 1 GiB", GIB, |rng, _| rng.range(KIB..1024 * KIB + 1)),
        ("1 KiB..1 MiB, 16 GiB", 16 * GIB, |rng, _| rng.range(KIB..1024 * KIB + 1)),
        ("KV pair, 4 GiB", 4 * GIB, |_, turn| [3_120_000, 643_000][turn % 2]),
        ("KV pair, 64 GiB", 64 * GIB, |_, turn| [3_120_000, 643_000][turn % 2]),
    ];
    println!(
        "ns per allocate + release, time relative to the bin scheme, utilisation at refusal: mean (worst), of the worst turn"
    );
    println!("{:<22} {:<10} {:>14} {:>8} {:>18}", "work", "allocator", "ns", "ratio", "utilisation");
    for (name, capacity, size) in works {
        let clock = SystemClock::new();
        let mut runs: [Vec<Outcome>; 4] = Default::default();
        for turn in 0..turns {
            let work = Work { clock: &clock, capacity, size, rounds, seed: 42 + turn };
            runs[0].push(work.run(&mut Ours(BinAllocator::new(capacity, &()))));
            runs[1].push(work.run(&mut BinScheme::new(capacity)));
            runs[2].push(work.run(&mut Ours(Tlsf::new(capacity, &Default::default()))));
            runs[3].push(work.run(&mut Ours(BestFit::new(capacity, &()))));
        }
        let base = least(&runs[0], |run| run.allocate + run.release);
        for (allocator, runs) in ["bins", "bare bins", "tlsf", "best fit"].iter().zip(&runs) {
            let (allocate, release) = (least(runs, |run| run.allocate), least(runs, |run| run.release));
            let ratio = least(runs, |run| run.allocate + run.release) / base;
            let (mean, worst) = (least(runs, |run| run.mean), least(runs, |run| run.worst));
            println!(
                "{name:<22} {allocator:<10} {allocate:>6.1} + {release:>5.1} {ratio:>8.2} {mean:>9.4} ({worst:.4})"
            );
        }
    }
}

fn least<T>(runs: &[T], value: impl Fn(&T) -> f64) -> f64 {
    runs.iter().map(value).fold(f64::INFINITY, f64::min)
}

/// Common interface of the allocators and the bin scheme.
trait Subject {
    type Handle;
    fn take(&mut self, len: u64) -> Option<Self::Handle>;
    fn give(&mut self, handle: Self::Handle);
}

/// Allocator of this project.
struct Ours<A>(A);

impl<A: SegmentAllocator> Subject for Ours<A> {
    type Handle = Extent;

    fn take(&mut self, len: u64) -> Option<Extent> {
        self.0.allocate(len, 1).ok()
    }

    fn give(&mut self, extent: Extent) {
        self.0.release(extent);
    }
}

impl Subject for BinScheme {
    type Handle = bin_scheme::Handle;

    fn take(&mut self, len: u64) -> Option<Self::Handle> {
        self.allocate(len)
    }

    fn give(&mut self, handle: Self::Handle) {
        self.release(handle);
    }
}

struct Work<'a> {
    clock: &'a SystemClock,
    capacity: u64,
    size: fn(&mut Rng, usize) -> u64,
    rounds: usize,
    seed: u64,
}

struct Outcome {
    allocate: f64,
    release: f64,
    mean: f64,
    worst: f64,
}

impl Work<'_> {
    fn run<S: Subject>(&self, subject: &mut S) -> Outcome {
        let mut rng = Rng::seeded(self.seed);
        let mut live: Vec<(S::Handle, u64)> = Vec::new();
        let mut leaving = Vec::new();
        let (mut used, mut turn) = (0, 0);
        let (mut allocate, mut release) = (Spent::default(), Spent::default());
        let mut seen = Vec::new();
        for round in 0..=self.rounds {
            // Sizes are drawn beforehand, so that only the allocation is timed.
            let room = self.capacity - used;
            let (mut drawn, mut sizes) = (0, Vec::new());
            while drawn <= room {
                sizes.push((self.size)(&mut rng, turn));
                turn += 1;
                drawn += sizes[sizes.len() - 1];
            }
            live.reserve(sizes.len());
            let held = live.len();
            let start = self.clock.now();
            for &len in &sizes {
                let Some(handle) = subject.take(len) else { break };
                live.push((handle, len));
            }
            let spent = self.clock.now().since(start);
            let taken = live.len() - held;
            used += sizes[..taken].iter().sum::<u64>();
            seen.push(used as f64 / self.capacity as f64);
            if round != 0 {
                allocate.add(spent, taken);
            }
            for _ in 0..live.len() / 10 {
                let (handle, len) = live.swap_remove(rng.below(live.len() as u64) as usize);
                leaving.push(handle);
                used -= len;
            }
            let leaving_count = leaving.len();
            let start = self.clock.now();
            leaving.drain(..).for_each(|handle| subject.give(handle));
            release.add(self.clock.now().since(start), leaving_count);
        }
        let mean = seen.iter().sum::<f64>() / seen.len() as f64;
        let worst = seen.iter().copied().fold(1.0, f64::min);
        Outcome { allocate: allocate.each(), release: release.each(), mean, worst }
    }
}

#[derive(Default)]
struct Spent {
    ns: f64,
    calls: usize,
}

impl Spent {
    fn add(&mut self, span: std::time::Duration, calls: usize) {
        self.ns += span.as_nanos() as f64;
        self.calls += calls;
    }

    fn each(&self) -> f64 {
        self.ns / self.calls.max(1) as f64
    }
}
