//! Runs every target, or the one that the third argument names, on a stable compiler: each corpus
//! file, then mutations of the corpus for a number of seconds. The second argument is the seed,
//! which is new without it, and printed.
//!
//! Finds panics, runs of over a second, and allocations out of proportion to the input. A failing
//! input is written beside the corpus, and its path is printed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::Clock;
use mooncake_core::clock::{Moment, Rng, SystemClock};
use mooncake_fuzz::TARGETS;

/// Largest single allocation since the last reset.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct SizeRecorder;

// SAFETY: the system allocator does all the work; this only records the sizes.
unsafe impl GlobalAlloc for SizeRecorder {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: passed on unchanged.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: passed on unchanged.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: SizeRecorder = SizeRecorder;

fn main() -> ExitCode {
    let seconds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(20);
    let given = std::env::args().nth(2).and_then(|s| s.parse().ok());
    let seed = given.unwrap_or_else(|| Rng::from_os().next_u64());
    println!("seed {seed}");
    let only = std::env::args().nth(3);
    let chosen = |name: &str| only.as_ref().is_none_or(|only| only == name);
    std::panic::set_hook(Box::new(|_| {}));
    let (mut passed, mut bad) = (0, 0);
    for (name, target) in TARGETS.iter().filter(|(name, _)| chosen(name)) {
        match check(name, *target, Duration::from_secs(seconds), seed) {
            Ok(runs) => {
                println!("{name:<16} {runs} inputs");
                passed += 1;
            }
            Err(error) => {
                println!("{name:<16} FAILED: {error}");
                bad += 1;
            }
        }
    }
    println!("{passed} passed, {bad} failed");
    if bad == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn check(name: &str, target: fn(&[u8]), span: Duration, seed: u64) -> Result<u64, String> {
    let clock = SystemClock::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let corpus = read_corpus(&folder)?;
    let mut runs = 0;
    for input in &corpus {
        one(&clock, &folder, target, input)?;
        runs += 1;
    }
    let mut rng = Rng::seeded(seed);
    let end = clock.now().after(span);
    while clock.now() < end {
        let input = mutate(&corpus, &mut rng);
        one(&clock, &folder, target, &input)?;
        runs += 1;
    }
    Ok(runs)
}

fn one(clock: &SystemClock, folder: &Path, target: fn(&[u8]), input: &[u8]) -> Result<(), String> {
    LARGEST.store(0, Ordering::Relaxed);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // Other processes may have delayed a run. A slow input is slow each time.
        (0..3).all(|_| {
            let before: Moment = clock.now();
            target(input);
            clock.now().since(before) > Duration::from_secs(1)
        })
    }));
    let largest = LARGEST.load(Ordering::Relaxed);
    let what = if outcome.is_err() {
        "panic".to_owned()
    } else if matches!(outcome, Ok(true)) {
        "took over a second".to_owned()
    } else if largest > (1 << 18) + 64 * input.len() {
        format!("allocated {largest} bytes at once")
    } else {
        return Ok(());
    };
    let path: PathBuf = folder.join(format!("crash-{}", input.len()));
    let _ = std::fs::create_dir_all(folder);
    let _ = std::fs::write(&path, input);
    Err(format!("{what}; the input is in {}", path.display()))
}

fn read_corpus(folder: &Path) -> Result<Vec<Vec<u8>>, String> {
    let listing = std::fs::read_dir(folder)
        .map_err(|e| format!("cannot read the corpus in {}: {e}", folder.display()))?;
    let mut paths: Vec<PathBuf> = listing.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let files = paths.iter().map(|path| std::fs::read(path).map_err(|e| e.to_string()));
    files.collect()
}

/// Returns a corpus input with a few bytes changed, cut, doubled or spliced, or with numbers at
/// their limits.
fn mutate(corpus: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let pick =
        |rng: &mut Rng| corpus.get(rng.below(corpus.len() as u64) as usize).cloned().unwrap_or_default();
    let mut input = pick(rng);
    for _ in 0..=rng.below(4) {
        let at = rng.below(input.len() as u64 + 1) as usize;
        match rng.below(7) {
            0 => input.truncate(at),
            1 => input.insert(at, rng.next_u64() as u8),
            2 => {
                let other = pick(rng);
                let from = rng.below(other.len() as u64 + 1) as usize;
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            3 => {
                let limits =
                    [0, 1, 0x7f, 0x80, 0xff, 0xffff, u64::from(u32::MAX), 1 << 31, 1 << 63, u64::MAX];
                let number = limits[rng.below(limits.len() as u64) as usize].to_le_bytes();
                let end = (at + 8).min(input.len());
                let width = end - at;
                input[at..end].copy_from_slice(&number[..width]);
            }
            4 => {
                let tail = input[at..].to_vec();
                input.extend(tail);
                input.truncate(1 << 16);
            }
            _ if at < input.len() => input[at] ^= 1 << rng.below(8),
            _ => {}
        }
    }
    input
}
