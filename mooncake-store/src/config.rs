//! What a master process can be told: one table of flags, their defaults, and what each does.
//!
//! This file is the only one of the crate that reads the environment.

use std::time::Duration;

use mooncake_core::alloc::BuiltinAllocatorConfig;
use mooncake_core::evict::BuiltinPolicyConfig;
use mooncake_core::{Error, Result};

use crate::master::MasterOptions;

/// Everything `mooncake_master` can be told.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterConfig {
    /// Address to answer calls at (`0.0.0.0`).
    pub rpc_address: String,
    /// Its port (50051); 0 takes a free one.
    pub rpc_port: u16,
    /// Threads that answer calls; 0 is one per core, at most 16.
    pub rpc_threads: usize,
    /// A connection on which nothing moves for this long is closed; never, if absent.
    pub rpc_idle: Option<Duration>,
    /// Address of the admin server, with metrics (`0.0.0.0`).
    pub metrics_host: String,
    /// Its port (9003); 0 takes a free one.
    pub metrics_port: u16,
    /// Whether a line of figures is logged every 10 s.
    pub metric_reporting: bool,
    /// The embedded metadata server, if there is to be one.
    pub metadata: Option<MetadataServerConfig>,
    /// How the master behaves.
    pub options: MasterOptions,
    /// How space inside a segment is found.
    pub allocator: BuiltinAllocatorConfig,
    /// What goes first when memory runs out.
    pub eviction: BuiltinPolicyConfig,
    /// Name of the cluster, in logs.
    pub cluster_id: String,
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`, and everything above it (`info`).
    pub log_level: &'static str,
}

/// The embedded HTTP metadata server.
#[derive(Clone, Debug, PartialEq)]
pub struct MetadataServerConfig {
    /// Address to listen at (`0.0.0.0`).
    pub host: String,
    /// Its port (8080); 0 takes a free one.
    pub port: u16,
    /// Whether the entries of a client that was silent too long are removed.
    pub clean_up: bool,
    /// The cluster in their keys (`MC_METADATA_CLUSTER_ID`), empty for none.
    pub cluster_id: String,
}

impl Default for MasterConfig {
    fn default() -> Self {
        Self {
            rpc_address: "0.0.0.0".into(),
            rpc_port: 50051,
            rpc_threads: 0,
            rpc_idle: None,
            metrics_host: "0.0.0.0".into(),
            metrics_port: 9003,
            metric_reporting: true,
            metadata: None,
            options: MasterOptions::default(),
            allocator: BuiltinAllocatorConfig::default(),
            eviction: BuiltinPolicyConfig::default(),
            cluster_id: "mooncake_cluster".into(),
            log_level: "info",
        }
    }
}

impl Default for MetadataServerConfig {
    fn default() -> Self {
        Self { host: "0.0.0.0".into(), port: 8080, clean_up: false, cluster_id: String::new() }
    }
}

impl MasterConfig {
    /// The configuration of these flags, by name and value; what is not named has its default.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the flag: an unknown one (with the nearest known name), a value that does not parse, one that
    /// contradicts another, or one that asks for something not built yet.
    pub fn from_flags<'a>(flags: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut draft = Draft::default();
        for (name, value) in flags {
            let flag = FLAGS.iter().find(|flag| flag.name == name).ok_or_else(|| unknown(name))?;
            (flag.set)(&mut draft, value)
                .map_err(|why| Error::invalid(format!("--{name}={value}: {why}")))?;
        }
        draft.finish()
    }

    /// Threads to answer calls with.
    pub fn worker_threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.rpc_threads == 0 { cores.min(16) } else { self.rpc_threads }
    }

    /// What is logged, for `tracing_subscriber`: `RUST_LOG`, or else [`MasterConfig::log_level`].
    pub fn log_filter(&self) -> String {
        env("RUST_LOG").unwrap_or_else(|| self.log_level.into())
    }
}

/// One flag of `mooncake_master`.
#[derive(Debug)]
pub struct Flag {
    /// Its name, without dashes.
    pub name: &'static str,
    /// Its default, as it would be written.
    pub default: &'static str,
    /// What it does, in a line.
    pub help: &'static str,
    set: fn(&mut Draft, &str) -> Result<(), String>,
}

impl Flag {
    /// Whether it is a switch: may stand without a value, and be turned off as `--no<name>`.
    pub fn is_switch(&self) -> bool {
        matches!(self.default, "true" | "false")
    }
}

/// Flags as they come in, before they are put together.
#[derive(Default)]
struct Draft {
    config: MasterConfig,
    metadata: MetadataServerConfig,
    metadata_enabled: bool,
    port_alias: Option<u16>,
    port_given: bool,
    max_threads: usize,
}

impl Draft {
    fn finish(self) -> Result<MasterConfig> {
        let mut config = self.config;
        if let Some(port) = self.port_alias
            && !self.port_given
        {
            config.rpc_port = port;
        }
        if config.rpc_threads == 0 {
            config.rpc_threads = self.max_threads;
        }
        if self.metadata.clean_up && !self.metadata_enabled {
            return Err(Error::invalid(
                "--enable_metadata_cleanup_on_timeout needs --enable_http_metadata_server",
            ));
        }
        let cluster_id = env("MC_METADATA_CLUSTER_ID").unwrap_or_default();
        config.metadata =
            self.metadata_enabled.then_some(MetadataServerConfig { cluster_id, ..self.metadata });
        config.options.check()?;
        Ok(config)
    }
}

#[allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]
fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Assigns a parsed value to a place in the draft.
macro_rules! set {
    ($($place:ident).+ = $parse:expr) => {
        |draft, text| {
            draft.$($place).+ = $parse(text)?;
            Ok(())
        }
    };
}

macro_rules! flags {
    ($($name:ident = $default:literal, $help:literal, $set:expr;)*) => {
        /// Every flag, in the order they are shown.
        pub static FLAGS: &[Flag] = &[$(Flag { name: stringify!($name), default: $default, help: $help, set: $set },)*];
    };
}

flags! {
    rpc_port = "50051", "Port to answer calls at; auto takes a free one, 0 means the default", |draft, text| {
        draft.config.rpc_port = match text { "auto" => 0, "0" => 50051, text => number(text)? };
        draft.port_given = true;
        Ok(())
    };
    port = "50051", "Old name of rpc_port", |draft, text| {
        draft.port_alias = Some(number(text)?);
        Ok(())
    };
    rpc_address = "0.0.0.0", "Address to answer calls at", set!(config.rpc_address = text);
    rpc_thread_num = "0", "Threads that answer calls; 0 for one per core, at most 16", set!(config.rpc_threads = number);
    max_threads = "16", "Old bound on rpc_thread_num", |draft, text| {
        draft.max_threads = match number(text)? { 16 => 0, threads => threads };
        Ok(())
    };
    rpc_conn_timeout_seconds = "0", "Close a connection on which nothing moves for this long; 0 for never", |draft, text| {
        draft.config.rpc_idle = Some(seconds(text)?).filter(|idle| !idle.is_zero());
        Ok(())
    };
    rpc_enable_tcp_no_delay = "true", "Send small answers at once; cannot be turned off", |_, text| only(text, "true");
    metrics_host = "0.0.0.0", "Address of the admin server", set!(config.metrics_host = text);
    metrics_port = "9003", "Port of the admin server", set!(config.metrics_port = number);
    enable_metric_reporting = "true", "Log a line of figures every 10 s", set!(config.metric_reporting = switch);
    enable_http_metadata_server = "false", "Serve the transfer engine's metadata over HTTP", set!(metadata_enabled = switch);
    http_metadata_server_host = "0.0.0.0", "Address of the metadata server", set!(metadata.host = text);
    http_metadata_server_port = "8080", "Port of the metadata server", set!(metadata.port = number);
    enable_metadata_cleanup_on_timeout = "false", "Remove the metadata of a client that was silent too long", set!(metadata.clean_up = switch);
    cluster_id = "mooncake_cluster", "Name of the cluster", |draft, text| {
        let fine = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if text.is_empty() || text.len() > 128 || !text.chars().all(fine) {
            return Err("must be 1 to 128 of A-Z a-z 0-9 _ . -".into());
        }
        draft.config.cluster_id = text.into();
        Ok(())
    };
    default_kv_lease_ttl = "10000ms", "How long a reader may rely on an answer (ms, or with unit: ms s m h)", set!(config.options.lease_ttl = millis);
    default_kv_soft_pin_ttl = "1800000ms", "How long a soft pin lasts when the put does not say", set!(config.options.soft_pin_ttl = millis);
    max_kv_soft_pin_ttl = "86400000ms", "Longest soft pin a put may ask for", set!(config.options.max_soft_pin_ttl = millis);
    allow_evict_soft_pinned_objects = "true", "Evict soft-pinned objects when nothing else is left", set!(config.options.evict_soft_pinned = switch);
    eviction_ratio = "0.05", "How far below the watermark the background may evict", set!(config.options.eviction_ratio = ratio);
    eviction_high_watermark_ratio = "0.9", "Evict in the background above this part of the capacity", set!(config.options.high_watermark = ratio);
    eviction_policy = "lru", "What goes first: lru, fifo, s3fifo", |draft, text| {
        draft.config.eviction.kind = text.parse().map_err(said)?;
        Ok(())
    };
    memory_allocator = "offset", "How space is found: offset, best_fit", |draft, text| {
        if text == "cachelib" {
            return Err("this allocator is not supported; the default needs none of its settings".into());
        }
        draft.config.allocator.kind = text.parse().map_err(said)?;
        Ok(())
    };
    allocation_strategy = "random", "Where new objects go: random, free_ratio_first", |draft, text| {
        if matches!(text, "ssd_free_ratio_first" | "cxl" | "local_first") {
            return Err(NOT_YET.into());
        }
        draft.config.options.placement = text.parse().map_err(said)?;
        Ok(())
    };
    client_ttl = "10", "Seconds of silence after which a client is gone", set!(config.options.client_ttl = seconds);
    put_start_discard_timeout_sec = "30", "After this long a write in progress may be taken over", set!(config.options.put_discard = seconds);
    put_start_release_timeout_sec = "600", "How long a write grant is valid", set!(config.options.put_release = seconds);
    revoked_write_rest = "10000ms", "How long the space of a revoked write rests", set!(config.options.revoke_rest = millis);
    remount_rest = "auto", "How long after its start a master places nothing in segments of the one before it; auto: as long as a lease or a write in progress may last", |draft, text| {
        draft.config.options.remount_rest = if text == "auto" { None } else { Some(millis(text)?) };
        Ok(())
    };
    directory_shards = "64", "Locks the directory is spread over, a power of two", set!(config.options.shards = number);

    minloglevel = "0", "Least that is logged: 0 info, 1 warnings, 2 errors", |draft, text| {
        draft.config.log_level = match number(text)? { 0 => "info", 1 => "warn", 2u8.. => "error" };
        Ok(())
    };
    v = "0", "Log more: 1 debug, 2 everything", |draft, text| {
        draft.config.log_level = match number(text)? { 0 => draft.config.log_level, 1 => "debug", 2u8.. => "trace" };
        Ok(())
    };
    logtostderr = "true", "Log to standard error; there is no other place", |_, text| only(text, "true");
    log_dir = "", "Log to files", |_, text| only(text, "");

    config_path = "", "Configuration file", |_, text| only(text, "");
    rpc_interface = "", "Network interface to answer calls at", |_, text| only(text, "");
    root_fs_dir = "", "Directory of the file tier", |_, text| only(text, "");
    enable_cxl = "false", "CXL memory", |_, text| only(text, "false");
    enable_offload = "false", "SSD tier", |_, text| only(text, "false");
    offload_on_evict = "false", "SSD tier", |_, text| only(text, "false");
    offload_force_evict = "false", "SSD tier", |_, text| only(text, "false");
    promotion_on_hit = "false", "SSD tier", |_, text| only(text, "false");
    dynamic_replication_mode = "off", "More replicas of hot keys", |_, text| only(text, "off");
    enable_ha = "false", "Several masters", |_, text| only(text, "false");
    enable_oplog = "false", "Several masters", |_, text| only(text, "false");
    etcd_endpoints = "", "Several masters", |_, text| only(text, "");
    ha_backend_connstring = "", "Several masters", |_, text| only(text, "");
    enable_multi_tenants = "false", "Tenants with quotas", |_, text| only(text, "false");
    enable_snapshot = "false", "Snapshots of the metadata", |_, text| only(text, "false");
    enable_snapshot_restore = "false", "Snapshots of the metadata", |_, text| only(text, "false");
    enable_kv_events = "false", "Publish events", |_, text| only(text, "false");
}

const NOT_YET: &str = "not supported yet";

/// A flag of something that is not built: only its default is taken.
fn only(text: &str, default: &str) -> Result<(), String> {
    let same = text == default || (switch(default).is_ok() && switch(text) == switch(default));
    if same { Ok(()) } else { Err(format!("{NOT_YET}; leave it out (its only value is {default:?})")) }
}

fn text(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("must not be empty".into()) } else { Ok(text.into()) }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(said)
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "1" | "yes" | "y" | "on" => Ok(true),
        "false" | "f" | "0" | "no" | "n" | "off" => Ok(false),
        _ => Err("must be true or false".into()),
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("must be a number between 0 and 1".into()),
    }
}

fn millis(text: &str) -> Result<Duration, String> {
    duration(text, "ms")
}

fn seconds(text: &str) -> Result<Duration, String> {
    duration(text, "s")
}

/// A whole number with a unit, or in the unit given.
fn duration(text: &str, unit: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, given) = text.split_at(digits);
    let factor = match if given.is_empty() { unit } else { given } {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("must be a whole number with ms, s, m or h".into()),
    };
    let count: u64 = count.parse().map_err(|_| "must be a whole number with ms, s, m or h".to_owned())?;
    count.checked_mul(factor).map(Duration::from_millis).ok_or_else(|| "is too long".into())
}

fn unknown(name: &str) -> Error {
    let nearest = FLAGS.iter().map(|flag| (distance(name, flag.name), flag.name)).min();
    let hint = match nearest {
        Some((distance, known)) if distance <= 2 + name.len() / 4 => format!("; did you mean --{known}?"),
        _ => "; --help lists all".into(),
    };
    Error::invalid(format!("unknown flag --{name}{hint}"))
}

/// Letters to change, add or leave out.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (corner + usize::from(x != y)).min(above + 1).min(row[j] + 1);
            corner = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(name: &str, value: &str) -> String {
        MasterConfig::from_flags([(name, value)]).unwrap_err().message().to_owned()
    }

    #[test]
    fn every_default_in_the_table_is_the_default() {
        let all = FLAGS.iter().map(|flag| (flag.name, flag.default));
        assert_eq!(MasterConfig::from_flags(all).unwrap(), MasterConfig::default());
        assert_eq!(MasterConfig::from_flags([]).unwrap(), MasterConfig::default());
    }

    #[test]
    fn durations_have_units() {
        let ttl =
            |text| MasterConfig::from_flags([("default_kv_lease_ttl", text)]).unwrap().options.lease_ttl;
        assert_eq!(ttl("5000"), Duration::from_secs(5));
        assert_eq!(ttl("250ms"), Duration::from_millis(250));
        assert_eq!(ttl("5s"), Duration::from_secs(5));
        assert_eq!(ttl("3m"), Duration::from_secs(180));
        assert_eq!(ttl("1h"), Duration::from_secs(3600));
        let silence = MasterConfig::from_flags([("client_ttl", "4")]).unwrap().options.client_ttl;
        assert_eq!(silence, Duration::from_secs(4));
        for bad in ["", "s", "1.5s", "-1", "5 s", "5d", "99999999999999999999", "9999999999999999h"] {
            assert!(error("default_kv_lease_ttl", bad).contains("--default_kv_lease_ttl"), "{bad}");
        }
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (name, value, says) in [
            ("eviction_ratio", "1.5", "between 0 and 1"),
            ("eviction_high_watermark_ratio", "nan", "between 0 and 1"),
            ("allocation_strategy", "Random", "unknown placement"),
            ("allocation_strategy", "cxl", "not supported yet"),
            ("memory_allocator", "cachelib", "not supported"),
            ("memory_allocator", "slab", "unknown allocator"),
            ("eviction_policy", "arc", "unknown"),
            ("put_start_release_timeout_sec", "30", "put_start_discard_timeout_sec"),
            ("default_kv_soft_pin_ttl", "25h", "max_kv_soft_pin_ttl"),
            ("rpc_port", "65536", "too large"),
            ("rpc_enable_tcp_no_delay", "false", "not supported yet"),
            ("enable_ha", "true", "not supported yet"),
            ("config_path", "x.yaml", "not supported yet"),
            ("cluster_id", "a b", "A-Z"),
            ("metrics_host", "", "empty"),
            ("enable_metric_reporting", "maybe", "true or false"),
            ("enable_metadata_cleanup_on_timeout", "true", "enable_http_metadata_server"),
        ] {
            assert!(error(name, value).contains(says), "{name}: {}", error(name, value));
        }
    }

    #[test]
    fn unknown_flags_come_with_a_suggestion() {
        assert_eq!(error("rpc_prot", "1"), "unknown flag --rpc_prot; did you mean --rpc_port?");
        assert_eq!(
            error("evict_policy", "lru"),
            "unknown flag --evict_policy; did you mean --eviction_policy?"
        );
        assert_eq!(error("xyzzy", "1"), "unknown flag --xyzzy; --help lists all");
    }

    #[test]
    fn log_levels() {
        let level = |flags: &[(&'static str, &'static str)]| {
            MasterConfig::from_flags(flags.iter().copied()).unwrap().log_level
        };
        assert_eq!(level(&[]), "info");
        assert_eq!(level(&[("minloglevel", "1")]), "warn");
        assert_eq!(level(&[("v", "1"), ("logtostderr", "1")]), "debug");
    }

    #[test]
    fn the_old_port_yields_to_the_new() {
        let port = |flags: &[(&str, &str)]| MasterConfig::from_flags(flags.iter().copied()).unwrap().rpc_port;
        assert_eq!(port(&[("port", "1")]), 1);
        assert_eq!(port(&[("rpc_port", "2"), ("port", "1")]), 2);
        assert_eq!(port(&[("rpc_port", "0")]), 50051);
        assert_eq!(port(&[("rpc_port", "auto")]), 0);
    }
}
