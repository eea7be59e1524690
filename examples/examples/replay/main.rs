//! Replays a trace of LLM requests against a real cluster and checks every byte of every hit.
//!
//! ```sh
//! cargo run --release -p mooncake-examples --example replay -- --trace conversation_trace.jsonl --capacity 640MiB --processes 3
//! ```
//!
//! Starts a master and `--processes` clients, each a process of its own, on loopback. A request of the trace
//! becomes: match the longest cached prefix, get those blocks, put the rest. A block's bytes follow from its id, so
//! a wrong byte anywhere is found. Without `--trace` it makes a trace of the same shape from `--seed`.
//! With `--policies` it starts no process: it prints what share of the blocks each eviction policy of the master finds at
//! each size in `--blocks`, beside exact LRU.
//! With `--disk-blocks` the clients keep that many blocks on disks, too; `--beside-memory` replays once without them and once with them, and holds
//! the second to the first: the hit rate within a hundredth of an endless cache's, and the slowest hundredth of memory's hits at most 1.3 times as slow.
//! Exit status: 0 only when nothing was wrong, nothing failed other than as a miss, and nothing took longer than `--limit`; with
//! `--policies`, when the default policy is nowhere behind exact LRU by more than a hundredth.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks to its terminal")]

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
    /// Trace in the FAST'25 format, one JSON request a line; made from --seed when absent.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Requests to replay: all of a trace file, 2000 of a made one.
    #[arg(long)]
    requests: Option<usize>,
    /// Seed of a made trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Bytes per block of 512 tokens.
    #[arg(long, default_value = "64KiB", value_parser = size)]
    block_bytes: u64,
    /// Memory of all clients together.
    #[arg(long, default_value = "640MiB", value_parser = size)]
    capacity: u64,
    /// Client processes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    processes: u16,
    /// Requests in flight in each client process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    inflight: u16,
    /// What the master evicts first: fifo, lru, s3fifo or tenure.
    #[arg(long, default_value_t = PolicyKind::default())]
    policy: PolicyKind,
    /// Compare the eviction policies with exact LRU in process, in seconds.
    #[arg(long)]
    policies: bool,
    /// With --policies: memory, in blocks.
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
    /// Wire between the processes, with none beside it: tcp, shm, or rdma (feature transport-rdma). TCP with shared memory when absent.
    #[arg(long)]
    protocol: Option<String>,
    /// Requests come as the trace says, so many times as fast; as fast as they are served when absent.
    #[arg(long)]
    speed: Option<f64>,
    /// Blocks that the clients' disks hold together; none when absent.
    #[arg(long)]
    disk_blocks: Option<u64>,
    /// Folder for the disks' files, which are removed at the end; one for temporary files when absent.
    #[arg(long, requires = "disk_blocks")]
    disk_in: Option<PathBuf>,
    /// Write to disk what is about to leave memory, instead of what was just put.
    #[arg(long, requires = "disk_blocks")]
    offload_on_evict: bool,
    /// Replay without disks first, and compare.
    #[arg(long, requires = "disk_blocks")]
    beside_memory: bool,
    /// Longest that an operation may take, in seconds; clients give up after three quarters of it, and 24 s at most.
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

/// `65536`, `64KiB`, `640MB`: units are powers of 1024, as in the existing system's settings.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("`{unit}` is no unit of bytes; use KiB, MiB, GiB")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{text}` is not a number of bytes"))?;
    number.checked_mul(1 << shift).filter(|&n| n > 0).ok_or_else(|| format!("`{text}` is out of range"))
}
