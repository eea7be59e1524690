//! Command line of `mooncake`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand};

use mooncake_core::settings;
use mooncake_core::settings::Effect::Read;
use mooncake_core::settings::values::bytes;
use mooncake_core::settings::{Environment, Setting};

/// Environment variables of the CLI `mooncake`.
pub const VARIABLES: &[Setting<()>] = settings! {
    /// Address of the master
    MOONCAKE_MASTER: "127.0.0.1:50051" => Read,
    /// Metadata service: `P2PHANDSHAKE` or a URL
    MOONCAKE_TE_META_DATA_SERVER: "P2PHANDSHAKE" => Read,
    /// Tenant
    MOONCAKE_TENANT_ID: "default" => Read,
    /// Name or address of this process for other nodes
    MOONCAKE_LOCAL_HOSTNAME: "127.0.0.1" => Read,
    /// Log levels; the log goes to standard error
    RUST_LOG: "error" => Read,
    /// `doctor`: check for reserved huge pages, unless 0, false, no or off
    MC_STORE_USE_HUGEPAGE: "" => Read,
};

/// Returns the value of a variable, or its default.
pub(super) fn default_of(name: &str) -> String {
    let default = || VARIABLES.iter().find(|variable| variable.name == name).map(|found| found.default);
    let environment = Environment::of_process();
    environment.get(name).or_else(default).unwrap_or_default().to_owned()
}

/// Operates a Mooncake cluster: shows its state, reads and writes objects, measures it, and
/// diagnoses it.
#[derive(Clone, Debug, Parser)]
#[command(name = "mooncake", version, subcommand_required = true, arg_required_else_help = true)]
#[command(
    after_help = "Examples:\n  mooncake status\n  mooncake put config.json < config.json\n  mooncake get config.json | jq .\n  mooncake top --once\n  mooncake --master 10.0.0.1:50051 doctor\n  mooncake --master etcd://10.0.0.2:2379 status"
)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) to: To,
    #[command(subcommand)]
    pub(super) task: Task,
}

/// Options that select the cluster.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Cluster")]
pub(super) struct To {
    /// RPC address of the master, or etcd://HOST:PORT[,HOST:PORT..] to find the leader [environment: MOONCAKE_MASTER]
    #[arg(long, global = true, value_name = "ADDRESS", default_value_t = default_of("MOONCAKE_MASTER"))]
    pub(super) master: String,
    /// Cluster id for --master etcd://.. [default: mooncake_cluster]
    #[arg(long, global = true, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub(super) cluster: String,
    /// Admin address of the master [default: the master's host, port 9003]
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub(super) admin: Option<String>,
    /// P2PHANDSHAKE, or the URL of the metadata server [environment: MOONCAKE_TE_META_DATA_SERVER]
    #[arg(long, global = true, value_name = "URL", default_value_t = default_of("MOONCAKE_TE_META_DATA_SERVER"))]
    pub(super) metadata: String,
    /// Tenant [environment: MOONCAKE_TENANT_ID]
    #[arg(long, global = true, default_value_t = default_of("MOONCAKE_TENANT_ID"))]
    pub(super) tenant: String,
    /// Name or address of this process for other nodes [environment: MOONCAKE_LOCAL_HOSTNAME]
    #[arg(long, global = true, value_name = "HOST", default_value_t = default_of("MOONCAKE_LOCAL_HOSTNAME"))]
    pub(super) hostname: String,
    /// Timeout of an operation in seconds, at most 25
    #[arg(long, global = true, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(super) timeout: Duration,
    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
}

#[derive(Clone, Debug, Subcommand)]
pub(super) enum Task {
    /// Cluster: show the master, its segments and their use
    Status,
    /// Cluster: show status and activity, refreshed periodically
    Top(Top),
    /// Cluster: show how often objects would be found with less or more memory
    Curve,
    /// Cluster: diagnose the setup and print fixes
    Doctor(Doctor),
    /// Cluster: measure puts and gets of keys under `mooncake-bench/`; the keys are removed at the
    /// end
    Bench(Bench),
    /// Objects: list keys
    Ls(Ls),
    /// Objects: write the value of a key to a file or to standard output
    Get(Get),
    /// Objects: store a file or standard input under a key
    Put(Put),
    /// Objects: remove keys
    Rm(Rm),
    /// Objects: bring objects that are only on disks of clients back to memory, if memory has space
    Prefetch(PrefetchKeys),
    /// Objects: tell whether a key can be read, and why not
    Explain(Explain),
    /// Files: distribute large files from node to node, without a master (P2P Store)
    #[command(subcommand)]
    P2p(P2p),
    /// Traces: write what clients look up as a trace for `replay`
    #[command(subcommand)]
    Trace(Trace),
}

#[derive(Clone, Debug, Subcommand)]
pub(super) enum Trace {
    /// Record until an interrupt. The master needs --enable_kv_events and
    /// --kv_events_emit_look_ups=true
    Record(TraceRecord),
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct TraceRecord {
    /// Endpoint of the events [default: the master's host, port 5557]
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) events: Option<String>,
    /// File to write; standard output if absent
    #[arg(long, short)]
    pub(super) output: Option<PathBuf>,
    /// Number of tokens of a block, for the lengths of the rows
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) block_tokens: u64,
    /// End after this number of requests
    #[arg(long, value_name = "COUNT")]
    pub(super) requests: Option<u64>,
    /// Seconds in which equal look-ups count as one request
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub(super) repeat_window: Duration,
}

#[derive(Clone, Debug, Subcommand)]
pub(super) enum P2p {
    /// Serve a file until an interrupt
    Seed(P2pSeed),
    /// Read an object into a file
    Get(P2pGet),
    /// List objects
    Ls(P2pLs),
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct P2pSeed {
    /// File to serve; its bytes are copied to memory
    pub(super) file: PathBuf,
    /// Name of the object [default: the name of the file]
    #[arg(long)]
    pub(super) name: Option<String>,
    /// Maximum size of a shard in bytes, which divides 4 GiB (1M, 64M, 1G, ..)
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = bytes)]
    pub(super) shard_size: u64,
    /// Replace another object of the same name
    #[arg(long)]
    pub(super) replace: bool,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct P2pGet {
    /// Name of the object
    pub(super) name: String,
    /// File to write; `FILE.part` holds the shards until all have arrived
    pub(super) file: PathBuf,
    /// Serve the object afterwards, until an interrupt
    #[arg(long)]
    pub(super) serve: bool,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct P2pLs {
    /// Prefix of the names to list
    #[arg(default_value = "")]
    pub(super) prefix: String,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Top {
    /// Print once, as plain text
    #[arg(long)]
    pub(super) once: bool,
    /// Seconds between two refreshes
    #[arg(long, default_value = "1", value_parser = seconds)]
    pub(super) interval: Duration,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Doctor {
    /// Check this host only, without a cluster
    #[arg(long)]
    pub(super) local: bool,
    /// Compare the keys that two processes stored for one prompt: two files with a key in each
    /// line, as `ls` prints them
    #[arg(long, num_args = 2, value_names = ["FIRST", "SECOND"], conflicts_with = "local")]
    pub(super) keys: Vec<PathBuf>,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Bench {
    /// Size of a value in bytes (4096, 64K, 1M, ..)
    #[arg(long, default_value = "1M", value_parser = bytes)]
    pub(super) size: u64,
    /// Number of objects to put and get
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(super) count: u32,
    /// Number of concurrent operations
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) concurrency: u16,
    /// Run even if the cluster evicts objects of its users
    #[arg(long)]
    pub(super) evict: bool,
    /// Bytes that this process contributes to the cluster during the run
    #[arg(long, default_value = "0", value_parser = bytes)]
    pub(super) segment: u64,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Ls {
    /// Prefix of the keys to list
    #[arg(default_value = "")]
    pub(super) prefix: String,
    /// Show sizes and replicas, too
    #[arg(long, short)]
    pub(super) long: bool,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Get {
    /// Key of the object
    pub(super) key: String,
    /// File to write; standard output if absent or `-`. A terminal receives text only
    #[arg(long, short)]
    pub(super) output: Option<PathBuf>,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Put {
    /// Key of the object
    pub(super) key: String,
    /// File to store; standard input if absent or `-`
    pub(super) file: Option<PathBuf>,
    /// Replace an existing value
    #[arg(long)]
    pub(super) replace: bool,
    /// Number of replicas
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(super) replicas: u64,
}

#[derive(Clone, Debug, ClapArgs)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["keys", "matching", "all"]))]
pub(super) struct Rm {
    /// Keys to remove
    pub(super) keys: Vec<String>,
    /// Remove all keys that match this regular expression
    #[arg(long, value_name = "PATTERN")]
    pub(super) matching: Option<String>,
    /// Remove all keys
    #[arg(long)]
    pub(super) all: bool,
    /// Remove objects with a lease, too
    #[arg(long)]
    pub(super) force: bool,
    /// Remove all keys (--all) without asking
    #[arg(long, short)]
    pub(super) yes: bool,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct PrefetchKeys {
    /// Keys of the objects
    #[arg(required = true, value_name = "KEY")]
    pub(super) keys: Vec<String>,
}

#[derive(Clone, Debug, ClapArgs)]
pub(super) struct Explain {
    /// Key of the object
    pub(super) key: String,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(0.05..=25.0).contains(&seconds) {
        return Err(format!("{seconds} s: give 0.05 to 25"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_holds_together() {
        Args::command().debug_assert();
        assert_eq!(bytes("64K"), Ok(65536));
        assert!(bytes("1X").is_err() && bytes("99999999999999999999").is_err());
        assert!(seconds("26").is_err() && seconds("nan").is_err());
    }
}
