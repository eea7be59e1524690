//! Arguments of a replay, and of the processes that it starts.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use mooncake_core::evict::PolicyKind;
use mooncake_core::testkit::workloads::{WORKLOADS, Workload};

use crate::row::{TimeUnit, TraceFormat};
use crate::sessions::TurnBlocks;

/// Maximum number of blocks of a memory or a disk.
const MAX_BLOCKS: u64 = 1 << 26;
/// Maximum number of tokens of a block.
const MAX_BLOCK_TOKENS: i64 = 1 << 20;

/// Replays a trace against a master and clients in separate processes, checking every byte.
#[derive(Clone, Debug, Parser)]
#[command(name = "replay")]
pub(crate) struct Args {
    /// Trace with one JSON request per line, like those of FAST'25, of qwen-bailian or of aiperf;
    /// gzip and Zstandard are decompressed. Generated when absent.
    #[arg(long)]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) trace_options: TraceOptions,
    /// Generate a made workload instead: uniform, zipf-0.8, zipf-1.0, scans, moving, loop,
    /// chain-loop, documents or conversations.
    #[arg(long, conflicts_with = "trace", value_parser = workload)]
    pub(crate) workload: Option<Workload>,
    /// Requests to replay: all of a trace file or workload, 2000 of a generated trace.
    #[arg(long, value_parser = at_least_one)]
    pub(crate) requests: Option<usize>,
    /// Seed of a generated trace.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Bytes per block.
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
    #[arg(
        long,
        conflicts_with_all = ["kill_one_after", "speed", "protocol", "disk_blocks", "capacity"]
    )]
    pub(crate) policies: bool,
    /// With --policies: compare orders for the hot cache of a client instead.
    #[arg(long, requires = "policies", conflicts_with_all = ["svg", "simulation_only", "call_keys"])]
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
    #[arg(
        long,
        value_delimiter = ',',
        conflicts_with = "capacity",
        value_parser = clap::value_parser!(u64).range(1..=MAX_BLOCKS)
    )]
    pub(crate) blocks: Vec<u64>,
    /// Copies of every block.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(crate) replicas: u64,
    /// Fill level at which the master starts to evict, 0 to 1.
    #[arg(long, default_value_t = 1.0, value_parser = fill_level)]
    pub(crate) watermark: f64,
    /// Lease in milliseconds, instead of 10 s scaled by the expected speed-up.
    #[arg(long)]
    pub(crate) lease_ms: Option<u64>,
    /// Kill -9 one client after this many requests, or this share of them (`20%`).
    #[arg(long)]
    pub(crate) kill_one_after: Option<KillPoint>,
    /// Start another client with the same memory in place of the killed one.
    #[arg(long, requires = "kill_one_after")]
    pub(crate) replace_killed: bool,
    /// Only transport between the processes: tcp, shm, or rdma (feature transport-rdma). TCP with
    /// shared memory when absent.
    #[arg(long)]
    pub(crate) protocol: Option<String>,
    /// Replay at the times of the trace, so many times as fast. When absent: as fast as possible,
    /// and 60 times as fast with --blocks.
    #[arg(long, value_parser = speed)]
    pub(crate) speed: Option<f64>,
    /// Blocks that the disks of the clients hold together; no disks when absent.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MAX_BLOCKS))]
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
    #[arg(long, default_value_t = 2.0, value_parser = limit)]
    pub(crate) limit: f64,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// Meaning of the rows of a trace file.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TraceOptions {
    /// Field of a request that lists its blocks from the first on, as numbers or texts.
    #[arg(long, default_value = "hash_ids", requires = "trace")]
    pub(crate) field: String,
    /// Format of all rows. When absent: recognised by their fields.
    #[arg(long, value_enum, requires = "trace")]
    pub(crate) format: Option<TraceFormat>,
    /// Unit of the times. When absent: that of the format.
    #[arg(long, value_enum, requires = "trace")]
    pub(crate) time_unit: Option<TimeUnit>,
    /// Tokens per block. When absent: those of the format.
    #[arg(
        long,
        requires = "trace",
        value_parser = clap::value_parser!(u32).range(1..=MAX_BLOCK_TOKENS)
    )]
    pub(crate) block_tokens: Option<u32>,
    /// Blocks that the turns of a session list. When absent: likely ones, with a warning.
    #[arg(long, value_enum, requires = "trace")]
    pub(crate) turns: Option<TurnBlocks>,
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

/// Number of requests after which a client is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum KillPoint {
    Requests(usize),
    /// Share of all requests in percent.
    Percent(f64),
}

impl FromStr for KillPoint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let point = match text.strip_suffix('%') {
            Some(share) => share.parse().ok().filter(|s| (0.0..=100.0).contains(s)).map(Self::Percent),
            None => text.parse().ok().map(Self::Requests),
        };
        point.ok_or("expected a number of requests, or a share such as 20%")
    }
}

impl KillPoint {
    /// Returns the number of requests of so many.
    ///
    /// # Errors
    ///
    /// If there are too few requests.
    pub(crate) fn of(self, total: usize) -> Result<usize, String> {
        match self {
            Self::Percent(share) => Ok((total as f64 * share / 100.0) as usize),
            Self::Requests(at) if at < total => Ok(at),
            Self::Requests(at) => Err(format!(
                "cannot kill a client: the trace ends before. kill_one_after={at} requests={total}"
            )),
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "expected a number from 1 on".into())
}

fn fill_level(text: &str) -> Result<f64, String> {
    number(text, |level| level > 0.0 && level <= 1.0, "a fill level above 0 and up to 1")
}

fn speed(text: &str) -> Result<f64, String> {
    number(text, |speed| (0.001..=1e9).contains(&speed), "a factor from 0.001 to 1e9")
}

fn limit(text: &str) -> Result<f64, String> {
    number(text, |limit| (0.001..=1e6).contains(&limit), "seconds from 0.001 to 1e6")
}

fn number(text: &str, is_valid: fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number| is_valid(*number)).ok_or_else(|| format!("expected {expected}"))
}

fn workload(name: &str) -> Result<Workload, String> {
    let names = || WORKLOADS.iter().map(|workload| workload.name).collect::<Vec<_>>().join(", ");
    Workload::by_name(name).ok_or_else(|| format!("unknown workload `{name}`; use one of {}", names()))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, String> {
        let words = std::iter::once("replay").chain(line.split_whitespace());
        Args::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_are_parsed() {
        let args = parse("--policies --blocks 10,500 --workload loop --svg a.svg --call-keys 8 --link-calls");
        let args = args.unwrap();
        assert_eq!((args.blocks, args.call_keys, args.link_calls), (vec![10, 500], Some(8), true));
        assert_eq!(args.workload.map(|workload| workload.name), Some("loop"));
        let args = parse("--kill-one-after 20% --replace-killed --block-bytes 4KiB --limit 1.5").unwrap();
        assert_eq!((args.kill_one_after, args.block_bytes), (Some(KillPoint::Percent(20.0)), 4096));
        assert_eq!(parse("--kill-one-after 7").unwrap().kill_one_after, Some(KillPoint::Requests(7)));
        assert_eq!(KillPoint::Percent(20.0).of(1501), Ok(300));
        assert_eq!(KillPoint::Requests(7).of(8), Ok(7));
        let late = "cannot kill a client: the trace ends before. kill_one_after=7 requests=7";
        assert_eq!(KillPoint::Requests(7).of(7), Err(late.into()));
    }

    #[test]
    fn senseless_arguments_are_errors() {
        for (line, reason) in [
            ("--blocks 0", "0 is not in 1..="),
            ("--blocks 1,,2", "cannot parse integer from empty string"),
            ("--blocks 9 --capacity 1MiB", "cannot be used with '--capacity"),
            ("--requests 0", "expected a number from 1 on"),
            ("--workload zipf", "unknown workload `zipf`; use one of uniform, zipf-0.8"),
            ("--workload loop --trace a.jsonl", "cannot be used with '--trace"),
            ("--field blocks", "--trace <TRACE>"),
            ("--format fast25", "--trace <TRACE>"),
            ("--trace a --format csv", "[possible values: fast25, qwen-bailian, sessions, blocks]"),
            ("--trace a --time-unit us", "[possible values: ms, s]"),
            ("--trace a --block-tokens 0", "0 is not in 1..="),
            ("--trace a --turns some", "[possible values: new, all]"),
            ("--policy best", "invalid value 'best' for '--policy"),
            ("--svg a.svg", "--policies"),
            ("--policies --hot-cache --svg a.svg", "cannot be used with '--svg"),
            ("--policies --link-calls", "--call-keys"),
            ("--policies --call-keys 0", "0 is not in 1.."),
            ("--policies --kill-one-after 20%", "cannot be used with '--kill-one-after"),
            ("--kill-one-after 120%", "expected a number of requests, or a share such as 20%"),
            ("--kill-one-after -1", "unexpected argument '-1'"),
            ("--replace-killed", "--kill-one-after"),
            ("--replicas 0", "0 is not in 1..="),
            ("--processes 65", "65 is not in 1..="),
            ("--watermark 0", "expected a fill level above 0 and up to 1"),
            ("--watermark NaN", "expected a fill level"),
            ("--speed 0", "expected a factor from 0.001 to 1e9"),
            ("--limit inf", "expected seconds from 0.001 to 1e6"),
            ("--block-bytes 0", "`0` is out of range"),
            ("--block-bytes 9999999999TB", "`9999999999TB` is out of range"),
            ("--block-bytes 5miles", "unknown unit `miles`; use KiB, MiB, GiB"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
