//! `cargo xtask nightly`: what is random, slow, privileged, or from other projects. Each part runs
//! alone and to its end; a table shows the outcomes.
#![allow(clippy::disallowed_methods, reason = "a task runner measures real time and draws a seed")]

use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::run::{Result, command, root, step, target_dir};
use crate::suite::NO_REPEATS;

/// A part: its name, and the words of the task.
type Part = (&'static str, &'static [&'static str]);

/// Parts in the order of a whole run: short ones and frequent failures first.
const PARTS: &[Part] = &[
    ("header", &["header", "--check"]),
    ("seeds", &["test"]),
    ("interleavings", &["interleavings", "60"]),
    ("edges", &["edges"]),
    ("old-memory", &["old-memory"]),
    ("torture", &["torture", "--seconds", "60"]),
    ("torture-masters", &["torture", "--seconds", "60", "--restarts"]),
    ("load", &["load"]),
    ("hostile", &["hostile"]),
    ("examples", &["examples"]),
    ("gpu-fake", &["gpu-test", "--fake"]),
    ("features", &["features", "--sets"]),
    ("memcheck", &["memcheck"]),
    ("miri", &["miri"]),
    ("fuzz", &["fuzz", "20"]),
    ("mixed", &["mixed"]),
    ("interop", &["interop", "--check"]),
    ("network", &["network"]),
    ("rdma", &["rdma-test"]),
    ("gate", &["gate"]),
    ("torch", &["torch"]),
    ("soak", &["soak", "--seconds", "600"]),
    ("counts", &["bench", "--peer"]),
];
/// Last lines of a failed part that are shown.
const SHOWN_LINES: usize = 60;

/// Outcome of a part.
struct Outcome {
    name: &'static str,
    took: Duration,
    passed: u64,
    failed: u64,
    is_green: bool,
    log: PathBuf,
}

/// Runs the parts that words name, or all of them, and prints the table.
///
/// # Errors
/// Returns the names of the parts that failed, after all of them have run.
pub(crate) fn run(words: &[&str]) -> Result {
    if let Some(unknown) = words.iter().find(|word| !PARTS.iter().any(|(name, _)| name == *word)) {
        let names: Vec<_> = PARTS.iter().map(|(name, _)| *name).collect();
        return Err(format!(
            "cannot run nightly: no such part. part={unknown}; choose from {}",
            names.join(", ")
        ));
    }
    let seed = std::env::var("MOONCAKE_TEST_SEED").unwrap_or_else(|_| draw().to_string());
    println!("seed {seed}");
    let mut outcomes = Vec::new();
    for (name, task) in PARTS.iter().filter(|(name, _)| words.is_empty() || words.contains(name)) {
        step(name);
        let outcome = one(name, task, &seed)?;
        println!("{}", outcome.line(&seed));
        if !outcome.is_green {
            let said = outcome.said();
            let lines: Vec<&str> = said.trim_end().lines().collect();
            println!("{}", lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n"));
        }
        outcomes.push(outcome);
    }
    println!("\n{:<16} {:>8} {:>8} {:>8}  seed", "part", "seconds", "passed", "failed");
    outcomes.iter().for_each(|outcome| println!("{}", outcome.line(&seed)));
    let red: Vec<_> = outcomes.iter().filter(|outcome| !outcome.is_green).collect();
    let Some(first) = red.first() else { return Ok(()) };
    let names: Vec<_> = red.iter().map(|outcome| outcome.name).collect();
    Err(format!(
        "{} of {} parts failed: {}. The output is in {}\nrepeat: MOONCAKE_TEST_SEED={seed} cargo xtask nightly {}",
        red.len(),
        outcomes.len(),
        names.join(", "),
        first.log.parent().unwrap_or(&first.log).display(),
        names.join(" ")
    ))
}

/// Runs one part to its end, with its output in a file.
fn one(name: &'static str, task: &[&str], seed: &str) -> Result<Outcome> {
    let folder = target_dir().join("nightly");
    let fault = |error: std::io::Error| format!("cannot run {name}: {error}");
    std::fs::create_dir_all(&folder).map_err(fault)?;
    let log = folder.join(format!("{name}.log"));
    let output = File::create(&log).map_err(fault)?;
    let errors = output.try_clone().map_err(fault)?;
    let program = std::env::current_exe().map_err(fault)?.to_string_lossy().into_owned();
    let manifest = root().join("xtask").to_string_lossy().into_owned();
    let begun = Instant::now();
    let mut child = command(&program, task)
        .env("CARGO_MANIFEST_DIR", &manifest)
        .env("MOONCAKE_TEST_SEED", seed)
        .env("PROPTEST_RNG_SEED", seed)
        .env("PROPTEST_CASES", "256")
        .env("TEST_SEED", seed)
        .env(NO_REPEATS, "1")
        .env("MOONCAKE_TEST_EFFORT", "full")
        .start(output.into(), errors.into())
        .map_err(fault)?;
    let status = child.wait().map_err(fault)?;
    let took = begun.elapsed();
    let (passed, failed) = counts(&String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()));
    Ok(Outcome { name, took, passed, failed, is_green: status.success(), log })
}

impl Outcome {
    fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    fn line(&self, seed: &str) -> String {
        let Self { name, took, passed, failed, is_green, .. } = self;
        let verdict = if *is_green { "" } else { "  FAILED" };
        format!("{name:<16} {:>8} {passed:>8} {failed:>8}  {seed}{verdict}", took.as_secs())
    }
}

/// Returns the passed and failed checks that an output counts: those of test programs, of pytest,
/// and lines that begin with `ok ` or `FAILED `.
fn counts(said: &str) -> (u64, u64) {
    let (mut passed, mut failed) = (0, 0);
    for line in said.lines() {
        let words: Vec<&str> = line.split([' ', ';', ',', '=']).filter(|word| !word.is_empty()).collect();
        let before = |word: &str| {
            let at = words.iter().position(|one| *one == word)?;
            words.get(at.checked_sub(1)?)?.parse::<u64>().ok()
        };
        let (good, bad) = (before("passed"), before("failed"));
        if good.is_some() || bad.is_some() {
            passed += good.unwrap_or(0);
            failed += bad.unwrap_or(0);
        } else if line.starts_with("ok ") {
            passed += 1;
        } else if line.starts_with("FAILED ") {
            failed += 1;
        }
    }
    (passed, failed)
}

/// Returns a new seed below 2^32, a number that every kind of test accepts.
fn draw() -> u64 {
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish() >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_counted_in_every_form() {
        let said = "test result: ok. 3 passed; 1 failed; 2 ignored; 0 measured\n\
            == 7 passed, 2 failed in 3.1s ==\nok J: a::b (0.1 s)\nFAILED J: c\nnothing passed\n";
        assert_eq!(counts(said), (3 + 7 + 1, 1 + 2 + 1));
    }

    #[test]
    fn parts_have_names_of_their_own() {
        for (at, (name, task)) in PARTS.iter().enumerate() {
            assert!(!task.is_empty() && PARTS[..at].iter().all(|(other, _)| other != name), "{name}");
        }
    }

    #[test]
    fn an_unknown_part_is_refused_by_name() {
        assert!(run(&["tortoise"]).unwrap_err().contains("part=tortoise"));
    }
}
