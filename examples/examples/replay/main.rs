//! Replays a trace of LLM requests against a real cluster and checks every byte of every hit.
//!
//! ```sh
//! cargo run --release -p mooncake-examples --example replay -- \
//!     --trace conversation_trace.jsonl --capacity 640MiB --processes 3
//! ```
//!
//! Starts a master and `--processes` clients, each a process of its own, on loopback. A request of
//! the trace becomes: match the longest cached prefix, get those blocks, put the rest. The bytes of
//! a block follow from its id, so any wrong byte is found. Without `--trace`, it generates a trace
//! of the same shape from `--seed`.
//!
//! With `--policies` it starts no process: it prints the share of the blocks that each eviction
//! policy finds at each size in `--blocks`, beside Belady's bound, by exact simulation and through
//! a master. `--svg` draws the simulated ones. The trace may be a made workload (`--workload`).
//!
//! A trace file has one JSON object per line, and may be compressed (gzip, Zstandard). The formats
//! of FAST'25, of `qwen-bailian` and of sessions (aiperf, Dynamo) are recognised by their fields;
//! the first lines of the report state the format, the unit of the times and the tokens per block.
//! Other JSON lines that list blocks are read, too (`--field`).
//!
//! With `--blocks` alone the cluster replays the trace with each size of memory, and must find what
//! a master alone finds, within a hundredth. `--kill-one-after 20% --replace-killed` kills one
//! client on the way, and starts another one; the master alone loses one, too.
//!
//! With `--disk-blocks` the clients also keep that many blocks on disks. `--beside-memory` replays
//! once without disks and once with them, and compares: the hit rate must be within a hundredth of
//! that of an unbounded cache, and the slowest hundredth of memory hits at most 1.3 times as slow.
//!
//! The exit status is 0 only if all bytes were right, every failure was a miss, and no operation
//! took longer than `--limit`. Blocks of a killed client are misses if they have no other copy.
//! With `--policies`, it is 0 if the default policy is nowhere behind exact LRU by more than a
//! hundredth.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints to its terminal")]

mod args;
mod coordinator;
mod hot_cache;
mod lines;
mod master;
mod policies;
mod reader;
mod report;
mod roles;
mod row;
mod sessions;
#[cfg(test)]
mod shapes;
mod svg;
mod table;
mod trace;

use std::process::ExitCode;

use args::Args;
use clap::Parser;

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    let outcome = match args.role.role {
        Some(role) => role.run(&args).map(|()| true),
        None if args.policies => coordinator::load(&args).and_then(|trace| policies::compare(&args, &trace)),
        None => coordinator::run(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(error) => {
            eprintln!("replay: {error}");
            ExitCode::FAILURE
        }
    }
}
