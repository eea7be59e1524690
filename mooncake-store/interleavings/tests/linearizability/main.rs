//! Random calls from two or three threads, in random orders of their locks and atomics, compared
//! with a sequential model of each key.
//!
//! A run has up to three masters, one after the other, with or without a snapshot. Owners of
//! segments expire, return late, and announce what they hold. Two calls at once may have any
//! results that one of their two orders explains; so may the items of a batch, the walk of a
//! snapshot and that of a removal of all, each for itself.
//!
//! Every run draws new seeds. `MOONCAKE_INTERLEAVINGS_SEED=<seed>` repeats the run of one seed, and
//! `MOONCAKE_INTERLEAVINGS_SECONDS=<n>` runs new seeds for that time.
#![allow(clippy::disallowed_methods, reason = "settings of the test, and its real time")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "seeds are the result")]
#![cfg(feature = "testkit")]

mod model;
mod program;
mod schedule;
mod search;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mooncake_core::fault_injection;
use mooncake_core::testkit::test_seed;
use shuttle::{Config, FailurePersistence, Runner};

use program::Program;
use schedule::Order;
use search::{Event, is_linearizable};
use world::World;

/// Number of seeds of one run.
const SEEDS: u64 = 300;
/// Number of seeds within which each planted bug must be found.
const SEEDS_FOR_A_BUG: u64 = 2000;

fn program_of(seed: u64) -> Program {
    Program::random(seed, planted_bug().as_deref())
}

/// Runs the program of a seed. Returns the events of each key.
fn run(seed: u64) -> (Program, Vec<Vec<Event>>) {
    let program = program_of(seed);
    let events = Arc::new(Mutex::new(Vec::new()));
    let mut config = Config::new();
    config.failure_persistence = FailurePersistence::None;
    config.stack_size = 1 << 20;
    config.silence_warnings = true;
    let (of_run, found) = (program.clone(), events.clone());
    Runner::new(Order::new(seed), config).run(move || {
        let world = Arc::new(World::new(&of_run, seed));
        world.run(&of_run);
        *found.lock().unwrap() = world.events();
    });
    let events = std::mem::take(&mut *events.lock().unwrap());
    (program, events)
}

/// Runs the program of a seed and checks its results.
///
/// # Errors
/// The events of a key that no order of its calls explains.
fn check(seed: u64) -> Result<(), String> {
    let (program, keys) = run(seed);
    for (key, events) in keys.iter().enumerate() {
        if !is_linearizable(events) {
            let mut events = events.clone();
            events.sort_by_key(|event| event.begin);
            let lines: Vec<_> = events
                .iter()
                .map(|event| format!("{:4}..{:4} {:?}", event.begin, event.end, event.step))
                .collect();
            return Err(format!(
                "no order of the calls explains the results of key {key}:\n{}\n{program:?}",
                lines.join("\n")
            ));
        }
    }
    Ok(())
}

fn planted_bug() -> Option<String> {
    std::env::var(fault_injection::VARIABLE).ok()
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn calls_at_once_have_the_results_of_one_order() {
    let named = setting("MOONCAKE_INTERLEAVINGS_SEED");
    let first = named.unwrap_or_else(test_seed);
    let time = setting("MOONCAKE_INTERLEAVINGS_SECONDS").map(Duration::from_secs);
    let is_planted = planted_bug().is_some();
    let most = match (named, time) {
        (Some(_), _) => 1,
        (None, Some(_)) => u64::MAX,
        (None, None) if is_planted => SEEDS_FOR_A_BUG,
        (None, None) => SEEDS,
    };
    println!("seeds from {first}");
    let begun = Instant::now();
    let mut count = 0;
    while count < most && time.is_none_or(|time| begun.elapsed() < time) {
        let seed = first.wrapping_add(count);
        count += 1;
        let outcome = catch_unwind(AssertUnwindSafe(|| check(seed)));
        let repeat = format!("seed number {count}; repeat with MOONCAKE_INTERLEAVINGS_SEED={seed}");
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(why)) => panic!("{why}\n{repeat}"),
            Err(panic) => {
                eprintln!("a call panicked, or none could go on: {repeat}\n{:?}", program_of(seed));
                resume_unwind(panic);
            }
        }
    }
    println!("{count} seeds in {:.1} s", begun.elapsed().as_secs_f32());
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let first = test_seed();
    for seed in first..first + 20 {
        let text = |(_, events)| format!("{events:?}");
        assert_eq!(text(run(seed)), text(run(seed)), "MOONCAKE_INTERLEAVINGS_SEED={seed}");
    }
}
