//! Arguments of a replay, and of the processes that it starts.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use mooncake_core::evict::PolicyKind;
use mooncake_core::testkit::workloads::{WORKLOADS, Workload};

/// Replays a trace against a master and clients in separate processes, checking every byte.
#[derive(Clone, Debug, Parser)]
#[command(name = "replay")]
pub(crate) struct Args {
    /// Trace with one JSON request per line, as those of FAST'25; generated from --seed when absent.
    #[arg(long)]
    pub(crate) trace: Option<PathBuf>,
    /// Field of a request that lists its blocks from the first on, as numbers or texts.
    #[arg(long, default_value = "hash_ids", requires = "trace")]
    pub(crate) field: String,
    /// Generate a made workload instead: uniform, zipf-0.8, zipf-1.0, scans, moving, loop,
    /// chain-loop, documents or conversations.
    #[arg(long, conflicts_with = "trace", value_parser = workload)]
    pub(crate) workload: Option<Workload>,
    /// Requests to replay: all of a trace file or workload, 2000 of a generated trace.
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
    /// Compare the eviction policies within this process, in seconds.
    #[arg(long)]
    pub(crate) policies: bool,
    /// With --policies: compare orders for the hot cache of a client instead.
    #[arg(long, requires = "policies")]
    pub(crate) hot_cache: bool,
    /// With --policies: leave out the table of the master.
    #[arg(long, requires = "policies")]
    pub(crate) simulation_only: bool,
    /// With --policies: largest number of keys of a request that `gittins` gets in one call.
    #[arg(long, requires = "policies", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) call_keys: Option<u32>,
    /// With --call-keys: link the calls of a request.
    #[arg(long, requires = "call_keys")]
    pub(crate) link_calls: bool,
    /// With --policies: draw the simulated hit ratios over the memory into this SVG file.
    #[arg(long, requires = "policies")]
    pub(crate) svg: Option<PathBuf>,
    /// Sizes of memory in blocks. With --policies, those of the tables. Otherwise instead of
    /// --capacity: the cluster replays the trace with each, and must find within a hundredth what a
    /// master alone finds.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
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
    /// Start another client with the same memory in place of the killed one.
    #[arg(long, requires = "kill_one_after")]
    pub(crate) replace_killed: bool,
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
    /// Milliseconds after which the master gives up a silent client.
    #[arg(long, hide = true, default_value_t = 10_000)]
    pub(crate) silence_ms: u64,
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

fn workload(name: &str) -> Result<Workload, String> {
    let names = || WORKLOADS.iter().map(|workload| workload.name).collect::<Vec<_>>().join(", ");
    Workload::named(name).ok_or_else(|| format!("unknown workload `{name}`; use one of {}", names()))
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
