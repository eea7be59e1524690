//! Arguments of a replay, and of the processes that it starts.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use mooncake_core::evict::PolicyKind;

/// Replays a trace against a master and clients in separate processes, checking every byte.
#[derive(Clone, Debug, Parser)]
#[command(name = "replay")]
pub(crate) struct Args {
    /// Trace in the FAST'25 format, one JSON request per line; generated from --seed when absent.
    #[arg(long)]
    pub(crate) trace: Option<PathBuf>,
    /// Requests to replay: all of a trace file, 2000 of a generated one.
    #[arg(long)]
    pub(crate) requests: Option<usize>,
    /// Seed of a generated trace.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Bytes per block of 512 tokens.
    #[arg(long, default_value = "64KiB", value_parser = size)]
    pub(crate) block_bytes: u64,
    /// Memory of all clients together.
    #[arg(long, default_value = "640MiB", value_parser = size)]
    pub(crate) capacity: u64,
    /// Number of client processes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) processes: u16,
    /// Requests in flight in each client process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) inflight: u16,
    /// Eviction policy of the master: fifo, lru, s3fifo, tenure or gittins.
    #[arg(long, default_value_t = PolicyKind::default())]
    pub(crate) policy: PolicyKind,
    /// Compare the eviction policies with exact LRU, within this process, in seconds.
    #[arg(long)]
    pub(crate) policies: bool,
    /// With --policies: sizes of memory, in blocks.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 5_000, 10_000, 30_000])]
    pub(crate) blocks: Vec<u64>,
    /// Copies of every block.
    #[arg(long, default_value_t = 1)]
    pub(crate) replicas: u64,
    /// Fill level at which the master starts to evict, 0 to 1.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) watermark: f64,
    /// Lease in milliseconds, instead of 10 s scaled by the expected speed-up.
    #[arg(long)]
    pub(crate) lease_ms: Option<u64>,
    /// Kill -9 one client after this many requests, or this share of them (`20%`).
    #[arg(long)]
    pub(crate) kill_one_after: Option<String>,
    /// Only transport between the processes: tcp, shm, or rdma (feature transport-rdma). TCP with
    /// shared memory when absent.
    #[arg(long)]
    pub(crate) protocol: Option<String>,
    /// Replay at the times of the trace, so many times as fast. As fast as possible when absent.
    #[arg(long)]
    pub(crate) speed: Option<f64>,
    /// Blocks that the disks of the clients hold together; no disks when absent.
    #[arg(long)]
    pub(crate) disk_blocks: Option<u64>,
    /// Folder for the files of the disks, which are removed at the end; the folder for temporary
    /// files when absent.
    #[arg(long, requires = "disk_blocks")]
    pub(crate) disk_in: Option<PathBuf>,
    /// Write objects to disk when they are evicted, instead of after each put.
    #[arg(long, requires = "disk_blocks")]
    pub(crate) offload_on_evict: bool,
    /// Replay without disks first, and compare.
    #[arg(long, requires = "disk_blocks")]
    pub(crate) beside_memory: bool,
    /// Maximum duration of an operation, in seconds; clients time out after three quarters of it,
    /// and 24 s at most.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) limit: f64,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// Arguments from the coordinator to a process that it starts.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RoleArgs {
    /// Role of this process; set by replay for the processes it starts.
    #[arg(long, hide = true)]
    pub(crate) role: Option<Role>,
    /// Address of the master, for a client.
    #[arg(long, hide = true, default_value = "")]
    pub(crate) master_at: String,
    /// Disk of a client, if it has one.
    #[arg(long, hide = true)]
    pub(crate) disk_at: Option<PathBuf>,
}

/// Role of a process.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Role {
    Master,
    Client,
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
