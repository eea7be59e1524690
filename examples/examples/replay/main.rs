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
//! policy of the master finds at each size in `--blocks`, beside exact LRU.
//!
//! With `--disk-blocks` the clients also keep that many blocks on disks. `--beside-memory` replays
//! once without disks and once with them, and compares: the hit rate must be within a hundredth of
//! that of an unbounded cache, and the slowest hundredth of memory hits at most 1.3 times as slow.
//!
//! The exit status is 0 only if all bytes were right, every failure was a miss, and no operation
//! took longer than `--limit`. With `--policies`, it is 0 if the default policy is nowhere behind
//! exact LRU by more than a hundredth.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints to its terminal")]

mod coordinator;
mod policies;
mod report;
mod roles;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mooncake_core::evict::PolicyKind;

/// Replays a trace against a master and clients in separate processes, checking every byte.
#[derive(Clone, Debug, Parser)]
#[command(name = "replay")]
pub(crate) struct Args {
    /// Trace in the FAST'25 format, one JSON request per line; generated from --seed when absent.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Requests to replay: all of a trace file, 2000 of a generated one.
    #[arg(long)]
    requests: Option<usize>,
    /// Seed of a generated trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Bytes per block of 512 tokens.
    #[arg(long, default_value = "64KiB", value_parser = size)]
    block_bytes: u64,
    /// Memory of all clients together.
    #[arg(long, default_value = "640MiB", value_parser = size)]
    capacity: u64,
    /// Number of client processes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    processes: u16,
    /// Requests in flight in each client process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    inflight: u16,
    /// Eviction policy of the master: fifo, lru, s3fifo or tenure.
    #[arg(long, default_value_t = PolicyKind::default())]
    policy: PolicyKind,
    /// Compare the eviction policies with exact LRU, within this process, in seconds.
    #[arg(long)]
    policies: bool,
    /// With --policies: sizes of memory, in blocks.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 5_000, 10_000, 30_000])]
    blocks: Vec<u64>,
    /// Copies of every block.
    #[arg(long, default_value_t = 1)]
    replicas: u64,
    /// Fill level at which the master starts to evict, 0 to 1.
    #[arg(long, default_value_t = 1.0)]
    watermark: f64,
    /// Lease in milliseconds, instead of 10 s scaled by the expected speed-up.
    #[arg(long)]
    lease_ms: Option<u64>,
    /// Kill -9 one client after this many requests, or this share of them (`20%`).
    #[arg(long)]
    kill_one_after: Option<String>,
    /// Only transport between the processes: tcp, shm, or rdma (feature transport-rdma). TCP with
    /// shared memory when absent.
    #[arg(long)]
    protocol: Option<String>,
    /// Replay at the times of the trace, so many times as fast. As fast as possible when absent.
    #[arg(long)]
    speed: Option<f64>,
    /// Blocks that the disks of the clients hold together; no disks when absent.
    #[arg(long)]
    disk_blocks: Option<u64>,
    /// Folder for the files of the disks, which are removed at the end; the folder for temporary
    /// files when absent.
    #[arg(long, requires = "disk_blocks")]
    disk_in: Option<PathBuf>,
    /// Write objects to disk when they are evicted, instead of after each put.
    #[arg(long, requires = "disk_blocks")]
    offload_on_evict: bool,
    /// Replay without disks first, and compare.
    #[arg(long, requires = "disk_blocks")]
    beside_memory: bool,
    /// Maximum duration of an operation, in seconds; clients time out after three quarters of it,
    /// and 24 s at most.
    #[arg(long, default_value_t = 2.0)]
    limit: f64,
    #[command(flatten)]
    role: roles::RoleArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    let outcome = match args.role.role() {
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

/// Parses `65536`, `64KiB`, `640MB`. Units are powers of 1024, as in the settings of Mooncake C++.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("unknown unit `{unit}`; use KiB, MiB, GiB")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{text}` is not a number of bytes"))?;
    number.checked_mul(1 << shift).filter(|&n| n > 0).ok_or_else(|| format!("`{text}` is out of range"))
}
