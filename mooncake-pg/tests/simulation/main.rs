//! Coordinator and agents in simulated time, over connections that break, stall and overtake each
//! other, with processes that die, stop and return.
//!
//! `SIMULATION_SEEDS=COUNT` or `FIRST..END` selects the seeds, `SIMULATION_TRACE=1` prints the
//! events of each one. A failure names its seed. The search for planted bugs begins at `FIRST`.
#![allow(clippy::print_stdout, reason = "traces of failed seeds")]

mod app;
mod checks;
mod faults;
mod network;
mod process;
mod world;

use std::ops::Range;

use mooncake_pg::planted::{Bug, Planted};

use crate::world::{Simulation, TRACE};

/// Seeds of a run without an argument. Debug builds are ten times slower.
const SEEDS: u64 = 4000;

#[allow(clippy::disallowed_methods, reason = "arguments come from the environment")]
fn argument(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn seeds() -> Range<u64> {
    let Some(text) = argument("SIMULATION_SEEDS") else {
        let first = mooncake_core::testkit::test_seed();
        return first..first + SEEDS;
    };
    let number = |text: &str| text.parse().expect("a number or a range of seeds");
    text.split_once("..").map_or_else(|| 0..number(&text), |(first, end)| number(first)..number(end))
}

fn run(seed: u64, bug: Option<Bug>) -> Result<(), String> {
    Simulation::new(seed, Planted::new(bug)).run()
}

#[test]
fn membership_survives_faults() {
    TRACE.store(argument("SIMULATION_TRACE").is_some(), std::sync::atomic::Ordering::Relaxed);
    let seeds = seeds();
    let count = seeds.end - seeds.start;
    let next = std::sync::atomic::AtomicU64::new(seeds.start);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count as usize).max(1);
    let failure = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        if seed >= seeds.end {
                            return None;
                        }
                        if let Err(reason) = run(seed, None) {
                            next.store(seeds.end, std::sync::atomic::Ordering::Relaxed);
                            return Some((seed, reason));
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().filter_map(|worker| worker.join().expect("a panic names its seed")).min()
    });
    if let Some((seed, reason)) = failure {
        panic!("seed {seed}: {reason}\nSIMULATION_SEEDS={seed}..{} SIMULATION_TRACE=1 repeats it", seed + 1);
    }
}

/// Every planted bug is found within this number of seeds.
const FOUND_WITHIN: u64 = 3000;

#[test]
fn planted_bugs_are_found() {
    let only = argument("SIMULATION_BUG");
    let first = argument("SIMULATION_SEEDS").map_or(0, |_| seeds().start);
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        if only.as_ref().is_some_and(|only| *only != format!("{bug:?}")) {
            continue;
        }
        let found = (first..first + FOUND_WITHIN).find_map(|seed| Some((seed, run(seed, Some(bug)).err()?)));
        match found {
            Some((seed, reason)) => println!("{bug:?}: {} seeds, {seed}: {reason}", seed - first + 1),
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found within {FOUND_WITHIN} seeds: {missed:?}");
}
