//! Environment variables of this project, and those of Mooncake C++ that it does not read, with
//! reasons.
//!
//! No other file of the crate reads the environment. `docs/environment.md` is generated from this
//! file.

use std::fmt::Write;
use std::ops::RangeInclusive;
use std::time::Duration;

use mooncake_core::memory::HugePages;

use mooncake_core::Result;
use mooncake_engine::environment::VARIABLES;
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_metadata::DirectoryOptions;
use mooncake_transport::engine::HandshakePort;

use super::flag::Flag;
use super::flags::{GROUPS, flags};
use super::settings::Settings;
use super::values::{bytes, nearest, switch};
use mooncake_client::{ClientConfig, HotCacheConfig, MAX_TIMEOUT, OffloadConfig, SegmentFile};

/// Prefix of the variables of flags.
const PREFIX: &str = "MC_MASTER_";

impl Settings {
    /// Applies the environment of this process.
    pub fn read_environment(&mut self) {
        self.read_environment_of(&process_variables());
    }

    /// Applies a list of names and values, as [`Settings::read_environment`].
    fn read_environment_of(&mut self, variables: &[(String, String)]) {
        // An empty variable counts as unset.
        let of = |name: &str| {
            variables.iter().find(|(known, value)| known == name && !value.is_empty()).map(|(_, value)| value)
        };
        for flag in flags() {
            let own = flag.variable();
            // The variable of this project is specific, so it overrides those of Mooncake C++.
            let named = flag.variables.iter().rev().map(|name| (*name).to_owned()).chain([own]);
            for name in named {
                if let Some(value) = of(&name) {
                    self.environment(flag, name, value);
                }
            }
        }
        let known = || flags().map(Flag::variable);
        for (name, _) in variables.iter().filter(|(name, _)| name.starts_with(PREFIX)) {
            if !known().any(|flag| flag == *name) {
                let known: Vec<String> = known().collect();
                let hint = nearest(name, known.iter().map(String::as_str))
                    .map_or(String::new(), |known| format!("; did you mean {known}?"));
                self.note(format!("{name} in the environment sets nothing{hint}"));
            }
        }
    }
}

/// Returns the variables of this process that are UTF-8.
#[allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]
fn process_variables() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Settings of a client program from the environment.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientEnvironment {
    /// Page size of the client's memory.
    pub huge_pages: HugePages,
    /// Range of ports for the name of the client.
    pub ports: RangeInclusive<u16>,
    /// Checksums of stored values, which readers verify.
    pub checksum: bool,
    /// File that holds the segment.
    pub segment_file: Option<SegmentFile>,
    /// Permission for a segment larger than the available memory.
    pub allow_overcommit: bool,
    /// Restriction to TCP.
    pub force_tcp: bool,
    /// Log levels.
    pub log: Option<String>,
    /// Counting of metrics.
    pub metrics: bool,
    /// Time between two summaries of the metrics in the log; zero for none.
    pub metrics_interval: Duration,
    /// Label `cluster_id` of the metrics; empty for none.
    pub cluster_id: String,
    /// Plain copies between clients of one process, without a transport.
    pub copy_in_process: bool,
    /// NUMA node of the client's memory.
    pub numa_node: Option<u32>,
    /// Timeout of a call, if set.
    pub timeout: Option<Duration>,
    /// Timeout of connecting to the master, if set.
    pub connect_timeout: Option<Duration>,
    /// Preference for replicas on faster transports.
    pub score_replicas: bool,
    /// Configuration of the hot cache.
    pub hot_cache: HotCacheConfig,
    /// Configuration of the disk, for [`offload`](Self::offload).
    pub disk: OffloadConfig,
}

impl ClientEnvironment {
    /// Reads the environment of this process.
    pub fn read() -> Self {
        Self::of(&process_variables())
    }

    fn of(variables: &[(String, String)]) -> Self {
        let of = |name: &str| {
            variables.iter().find(|(known, value)| known == name && !value.is_empty()).map(|(_, value)| value)
        };
        let on = |name| of(name).is_some_and(|value| switch(value) != Ok(false));
        let millis = |name| {
            let number = of(name).and_then(|value| value.parse().ok()).filter(|number| *number > 0);
            number.map(Duration::from_millis)
        };
        let size = |name, otherwise| of(name).and_then(|value| bytes(value).ok()).unwrap_or(otherwise);
        let port = |name, otherwise| of(name).and_then(|value| value.parse().ok()).unwrap_or(otherwise);
        let large =
            of("MC_STORE_HUGEPAGE_SIZE").and_then(|size| bytes(size).ok()).is_some_and(|size| size > 2 << 20);
        let (first, last) =
            (port("MC_STORE_CLIENT_MIN_PORT", 12300), port("MC_STORE_CLIENT_MAX_PORT", 14300));
        // Without the ephemeral ports of Linux.
        let usable = first <= last && ((1024 <= first && last <= 32767) || 61000 <= first);
        Self {
            huge_pages: match (on("MC_STORE_USE_HUGEPAGE"), large) {
                (false, _) => HugePages::Off,
                (true, false) => HugePages::Size2M,
                (true, true) => HugePages::Size1G,
            },
            ports: if usable { first..=last } else { 12300..=14300 },
            checksum: on("MOONCAKE_STORE_CHECKSUM"),
            segment_file: of("MOONCAKE_STORE_SEGMENT_FILE").map(|path| {
                let file = SegmentFile::new(path);
                let index = of("MOONCAKE_STORE_SEGMENT_INDEX").map_or(file.index, |index| index.into());
                SegmentFile { path: file.path, index }
            }),
            allow_overcommit: on("MOONCAKE_ALLOW_OVERCOMMIT"),
            force_tcp: on("MC_FORCE_TCP"),
            log: of("RUST_LOG").cloned(),
            metrics: of("MC_STORE_CLIENT_METRIC").is_none_or(|value| switch(value) != Ok(false)),
            metrics_interval: Duration::from_secs(
                of("MC_STORE_CLIENT_METRIC_INTERVAL").and_then(|value| value.parse().ok()).unwrap_or(0),
            ),
            cluster_id: of("MC_STORE_CLUSTER_ID").cloned().unwrap_or_default(),
            copy_in_process: of("MC_STORE_MEMCPY").is_none_or(|value| switch(value) != Ok(false)),
            numa_node: of("MC_STORE_NUMA_SOCKET_ID").and_then(|value| value.parse().ok()),
            timeout: millis("MC_RPC_TIMEOUT_MS").map(|limit| limit.min(MAX_TIMEOUT)),
            connect_timeout: millis("MC_RPC_CONNECT_TIMEOUT_MS"),
            score_replicas: on("MC_STORE_REPLICA_SCORING"),
            hot_cache: HotCacheConfig {
                bytes: size("MC_STORE_LOCAL_HOT_CACHE_SIZE", 0),
                longest: size("MC_STORE_LOCAL_HOT_BLOCK_SIZE", 16 << 20),
                admission: of("MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD")
                    .and_then(|value| value.parse().ok())
                    .unwrap_or(2),
            },
            disk: disk(&of),
        }
    }

    /// Returns the configuration of a disk in `path`, for
    /// [`ClientConfig::offload`](mooncake_client::ClientConfig::offload).
    ///
    /// An empty `path` selects the folder of the environment.
    pub fn offload(&self, path: &str) -> OffloadConfig {
        let mut disk = self.disk.clone();
        if !path.is_empty() {
            disk.path = path.into();
        }
        disk
    }

    /// Returns the transports of `protocol`, with settings from the environment, for
    /// [`ClientBuilder::transports`](mooncake_client::ClientBuilder::transports).
    ///
    /// `devices` has commas between names; empty or `auto-discovery` selects all.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a protocol that is not built in.
    pub fn wires(protocol: &str, devices: &str) -> Result<TransportOptions> {
        let engine = TransferEngine::builder().environment().protocol(protocol).devices(devices);
        engine.transport_options()
    }

    /// Returns the metadata service and the handshake port of a client from the environment, for
    /// [`ClientConfig::directory`](mooncake_client::ClientConfig::directory) and
    /// [`ClientConfig::handshake`](mooncake_client::ClientConfig::handshake).
    pub fn meeting(metadata: &str) -> (DirectoryOptions, HandshakePort) {
        // The builder needs a name; its value does not matter here.
        TransferEngine::builder().environment().metadata(metadata).name("member").meeting()
    }

    /// Applies the settings to `config`.
    pub fn apply(&self, config: &mut ClientConfig) {
        config.ports = self.ports.clone();
        config.checksum = self.checksum;
        config.segment_file.clone_from(&self.segment_file);
        config.allow_overcommit = self.allow_overcommit;
        config.share_memory = !self.force_tcp;
        config.memory.huge_pages = self.huge_pages;
        config.metrics = self.metrics;
        config.metrics_interval = self.metrics_interval;
        config.cluster_id.clone_from(&self.cluster_id);
        config.copy_in_process = self.copy_in_process;
        config.memory.numa_node = self.numa_node;
        config.timeout = self.timeout.unwrap_or(config.timeout);
        config.connect_timeout = self.connect_timeout.unwrap_or(config.connect_timeout);
        config.score_replicas = self.score_replicas;
        config.hot_cache = self.hot_cache;
    }
}

/// Returns the configuration of a disk. Invalid values are ignored.
fn disk<'v>(of: &impl Fn(&str) -> Option<&'v String>) -> OffloadConfig {
    let default = OffloadConfig::new("/data/file_storage");
    let variable = |name: &str| of(&format!("MOONCAKE_OFFLOAD_{name}"));
    let older = |name: &str| variable(name).or_else(|| of(&format!("MOONCAKE_{name}")));
    let count = |name, otherwise: u64| {
        let said = older(name).and_then(|value| value.parse().ok());
        said.filter(|count| *count > 0).unwrap_or(otherwise)
    };
    let ratio = |name| older(name).and_then(|value| value.parse().ok()).filter(|r| 0.0 < *r && *r <= 1.0);
    let (high, low) = default.watermarks.unwrap_or((0.9, 0.8));
    let said = (
        ratio("DISK_EVICTION_HIGH_WATERMARK_RATIO").unwrap_or(high),
        ratio("DISK_EVICTION_LOW_WATERMARK_RATIO").unwrap_or(low),
    );
    let off = |name| older(name).is_some_and(|value| switch(value) == Ok(false));
    let trims = !off("ENABLE_DISK_WATERMARK_EVICTION");
    OffloadConfig {
        path: variable("FILE_STORAGE_PATH").map_or_else(|| default.path.clone(), Into::into),
        capacity: count("TOTAL_SIZE_LIMIT_BYTES", default.capacity)
            .min(count("BUCKET_MAX_TOTAL_SIZE", u64::MAX)),
        max_objects: usize::try_from(count("TOTAL_KEYS_LIMIT", default.max_objects as u64))
            .unwrap_or(usize::MAX),
        buffer: count("LOCAL_BUFFER_SIZE_BYTES", default.buffer),
        lend: Duration::from_millis(count("CLIENT_BUFFER_GC_TTL_MS", 5000)),
        interval: Duration::from_secs(count("HEARTBEAT_INTERVAL_SECONDS", 10)),
        watermarks: trims.then_some(if said.1 <= said.0 { said } else { (high, low) }),
        threads: off("USE_URING"),
        ..default
    }
}

/// Variables of the CLI `mooncake`: name, default, effect.
const TOOL: &[(&str, &str, &str)] = &[
    ("MOONCAKE_MASTER", "127.0.0.1:50051", "Address of the master"),
    ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE", "Metadata service: `P2PHANDSHAKE` or a URL"),
    ("MOONCAKE_TENANT_ID", "default", "Tenant"),
    ("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1", "Name or address of this process for other nodes"),
    ("RUST_LOG", "error", "Log levels; the log goes to standard error"),
    ("MC_STORE_USE_HUGEPAGE", "", "`doctor`: check for reserved huge pages, unless 0, false, no or off"),
];

/// Returns the default of a setting of the CLI `mooncake`, from the environment or the table.
#[cfg(feature = "cli")]
pub(crate) fn tool_default(name: &str) -> String {
    let set = process_variables().into_iter().find(|(known, value)| known == name && !value.is_empty());
    let default = || TOOL.iter().find(|(known, ..)| *known == name).map_or("", |(_, default, _)| default);
    set.map_or_else(|| default().to_owned(), |(_, value)| value)
}

/// Variables of the Python package that `mooncake_client` reads, too.
const CLIENT: &[&str] = &[
    "MC_STORE_CLIENT_MIN_PORT",
    "MC_STORE_CLIENT_MAX_PORT",
    "MC_STORE_USE_HUGEPAGE",
    "MC_STORE_HUGEPAGE_SIZE",
    "MC_FORCE_TCP",
    "MOONCAKE_STORE_CHECKSUM",
    "MOONCAKE_STORE_SEGMENT_FILE",
    "MOONCAKE_STORE_SEGMENT_INDEX",
    "MOONCAKE_ALLOW_OVERCOMMIT",
    "MC_STORE_CLIENT_METRIC",
    "MC_STORE_CLIENT_METRIC_INTERVAL",
    "MC_STORE_CLUSTER_ID",
    "MC_STORE_MEMCPY",
    "MC_STORE_NUMA_SOCKET_ID",
    "MC_STORE_REPLICA_SCORING",
    "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES",
    "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE",
    "MOONCAKE_BUCKET_MAX_TOTAL_SIZE",
    "MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT",
    "MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION",
    "MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO",
    "MOONCAKE_DISK_EVICTION_HIGH_WATERMARK_RATIO",
    "MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO",
    "MOONCAKE_DISK_EVICTION_LOW_WATERMARK_RATIO",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
    "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS",
    "MOONCAKE_OFFLOAD_USE_URING",
    "MOONCAKE_USE_URING",
    "MC_RPC_TIMEOUT_MS",
    "MC_RPC_CONNECT_TIMEOUT_MS",
    "MC_STORE_LOCAL_HOT_CACHE_SIZE",
    "MC_STORE_LOCAL_HOT_BLOCK_SIZE",
    "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD",
];

/// Variables of the Python package: name, default, effect.
const PYTHON: &[(&str, &str, &str)] = &[
    ("MC_STORE_CLIENT_MIN_PORT", "12300", "First port of the range for client names"),
    ("MC_STORE_CLIENT_MAX_PORT", "14300", "Last port of the range for client names"),
    ("MC_STORE_USE_HUGEPAGE", "", "Use huge pages for memory, unless 0, false, no or off"),
    ("MC_STORE_HUGEPAGE_SIZE", "2MB", "Size of a huge page"),
    ("MOONCAKE_STORE_CHECKSUM", "", "Store values with a checksum and verify it, unless 0, false, no or off"),
    (
        "MOONCAKE_STORE_SEGMENT_FILE",
        "",
        "File on tmpfs or hugetlbfs that holds the segment, so that objects outlive the process (`docs/ha.md`)",
    ),
    ("MOONCAKE_STORE_SEGMENT_INDEX", "", "Index of the segment file; beside the file if empty"),
    (
        "MOONCAKE_ALLOW_OVERCOMMIT",
        "",
        "Accept a segment larger than the memory of the host and its control groups, unless 0, false, no or off",
    ),
    (
        "MC_STORE_CLIENT_METRIC",
        "1",
        "Count metrics of a store (`docs/metrics.md`), unless 0, false, no or off",
    ),
    (
        "MC_STORE_CLIENT_METRIC_INTERVAL",
        "0",
        "Seconds between two summaries of the metrics in the log; 0 for none",
    ),
    ("MC_STORE_CLUSTER_ID", "", "Label `cluster_id` of the metrics, and cluster id for masters in etcd"),
    (
        "MC_STORE_MEMCPY",
        "",
        "Copy bytes between clients of one process without a transport, unless 0, false, no or off",
    ),
    ("MC_STORE_NUMA_SOCKET_ID", "", "NUMA node of the memory"),
    (
        "MC_STORE_REPLICA_SCORING",
        "",
        "Read remote replicas on RDMA before those on TCP, unless 0, false, no or off",
    ),
    (
        "MC_RPC_TIMEOUT_MS",
        "",
        "Timeout of one call in milliseconds, at most 25000; default 20000, for `mooncake_client` 5000",
    ),
    ("MC_RPC_CONNECT_TIMEOUT_MS", "10000", "Timeout of connecting to the master in milliseconds"),
    ("MC_STORE_LOCAL_HOT_CACHE_SIZE", "0", "Bytes of the hot cache (`docs/hot-cache.md`); 0 for none"),
    ("MC_STORE_LOCAL_HOT_BLOCK_SIZE", "16777216", "Longest value in the hot cache, in bytes"),
    (
        "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD",
        "2",
        "Recent remote reads of a value before it enters the hot cache",
    ),
    ("MC_LOG_LEVEL", "WARNING", "Log level of the native library, and of an engine in a C program"),
    (
        "MOONCAKE_CONFIG_PATH",
        "",
        "JSON file with the settings of a store; the variables below are then ignored",
    ),
    ("MOONCAKE_MASTER", "", "Address of the master"),
    ("MOONCAKE_LOCAL_HOSTNAME", "localhost", "Name or address of this process for other nodes"),
    ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE", "Metadata service: `P2PHANDSHAKE` or a URL"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "3355443200", "Bytes that the store contributes to the cluster"),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", "1073741824", "Bytes of the local buffer"),
    ("MOONCAKE_PROTOCOL", "tcp", "Protocol"),
    ("MOONCAKE_DEVICE", "", "RDMA devices, with commas between them"),
    ("MOONCAKE_TENANT_ID", "default", "Tenant"),
    ("MOONCAKE_OFFLOAD_ENABLED", "false", "Keep objects on a disk"),
    (
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
        "/data/file_storage",
        "Folder on the disk (`docs/disk.md`); created if missing, and used by one client at a time",
    ),
    (
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES",
        "2199023255552",
        "Maximum bytes on the disk, at most 90 % of the file system",
    ),
    (
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE",
        "0",
        "A second limit in bytes; the smaller limit counts; 0 for none",
    ),
    ("MOONCAKE_BUCKET_MAX_TOTAL_SIZE", "0", "Older name of the variable above"),
    ("MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT", "10000000", "Maximum number of objects on the disk"),
    (
        "MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION",
        "true",
        "Evict from the disk down to the low watermark when the high one is exceeded",
    ),
    ("MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO", "0.9", "High watermark of the disk"),
    ("MOONCAKE_DISK_EVICTION_HIGH_WATERMARK_RATIO", "0.9", "Older name of the variable above"),
    ("MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.8", "Low watermark of the disk"),
    ("MOONCAKE_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.8", "Older name of the variable above"),
    (
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS",
        "10",
        "Maximum seconds between two requests to the master for disk work",
    ),
    (
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
        "1342177280",
        "Bytes of the buffer through which other nodes read from the disk; allocated on use",
    ),
    ("MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS", "5000", "Milliseconds of a loan to a reader"),
    (
        "MOONCAKE_OFFLOAD_USE_URING",
        "",
        "Use io_uring where the kernel allows it, unless 0, false, no or off; otherwise threads",
    ),
    ("MOONCAKE_USE_URING", "", "Older name of the variable above"),
    ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "false", "Serve health and metrics of the store over HTTP"),
    ("MOONCAKE_CLIENT_HTTP_PORT", "9300", "Port of these endpoints"),
];

/// Variables of Mooncake C++ that are not read, with one reason for all of them.
struct Unread {
    names: &'static [&'static str],
    reason: &'static str,
}

const fn unread(names: &'static [&'static str], reason: &'static str) -> Unread {
    Unread { names, reason }
}

/// Unread variables whose subject this project has or will have.
const LATER: &[Unread] = &[unread(
    &[
        "MC_FORCE_MUSA",
        "WITH_NVIDIA_PEERMEM",
        "MC_STORE_PIN_MEMORY_MAX_BYTES",
        "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES",
    ],
    "only GPUs of NVIDIA's driver are supported, through page-locked buffers of this project",
)];

/// Unread variables without meaning in this project.
const NEVER: &[Unread] = &[
    unread(&["MOONCAKE_AWS_*"], "snapshots are stored in a folder or in RocksDB"),
    unread(
        &[
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR",
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT",
            "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY",
            "MOONCAKE_BUCKET_EVICTION_POLICY",
            "MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES",
            "MOONCAKE_OFFLOAD_BUCKET_DISK_SCAN_CACHE_MS",
            "MOONCAKE_OFFLOAD_FSDIR",
            "MOONCAKE_OFFLOAD_ENABLE_EVICTION",
            "ENABLE_EVICTION",
            "MOONCAKE_OFFSET_*",
            "MOONCAKE_OFFLOAD_SCANMETA_ITERATOR_KEYS_LIMIT",
            "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_INTERVAL_SECONDS",
        ],
        "the layout on disk (`docs/disk.md`) has no such setting",
    ),
    unread(
        &["MC_STORE_LOCAL_HOT_CACHE_USE_SHM"],
        "`mooncake_client` copies a cached value once, into the memory that a shared client shares with it",
    ),
    unread(
        &["MC_STORE_CLIENT_SETUP_RETRIES"],
        "the port is bound at once, and connecting is retried until MC_RPC_CONNECT_TIMEOUT_MS",
    ),
    unread(
        &[
            "MC_NUM_CQ_PER_CTX",
            "MC_NUM_COMP_CHANNELS_PER_CTX",
            "MC_WORKERS_PER_CTX",
            "MC_MAX_SGE",
            "MC_MAX_INLINE",
        ],
        "an RDMA device has one completion queue and one thread, which sleeps when nothing completes; callers post requests themselves; a request is one range, sent without a copy",
    ),
    unread(
        &["MC_PATH_ROUNDROBIN", "MC_ENABLE_DEST_DEVICE_AFFINITY"],
        "equal paths always take turns, and devices of one name are paired where no other is nearer",
    ),
    unread(&["MC_MS_AUTO_DISC"], "devices are discovered if none is named"),
    unread(
        &["MC_LOG_RDMA_SLICE_AFFINITY", "MC_TRACK_RDMA_POSTED_SLICES"],
        "they observe the slice scheduler of Mooncake C++",
    ),
    unread(
        &["MC_MLX5_QP_UDP_SPORTS", "MC_MLX5_QP_LAG_PORT_BALANCE"],
        "queue pairs use the verbs of every vendor; the library of mlx5 is not used",
    ),
    unread(&["MC_ENDPOINT_STORE_TYPE"], "RDMA connections are always evicted by SIEVE"),
    unread(
        &["MC_ENABLE_PARALLEL_REG_MR", "MC_MAX_CONCURRENT_REG_MR"],
        "memory is always registered with all devices at once",
    ),
    unread(
        &[
            "MC_RDMA_NOTIFY_ENABLED",
            "MC_RDMA_NOTIFY_RECV_COUNT",
            "MC_RDMA_NOTIFY_BUFFER_SIZE",
            "MC_RDMA_NOTIFY_MAX_PENDING_SENDS",
            "MC_RDMA_NOTIFY_OOB_FALLBACK",
            "MC_RDMA_NOTIFY_CONNECT_TIMEOUT_MS",
            "MC_USE_RDMA_TWOSIDED",
        ],
        "notifications use the handshake port with every transport",
    ),
    unread(
        &["MC_RPC_CLIENT_IO_THREADS", "MC_STORE_RPC_CLIENT_IO_THREADS", "MC_TE_RPC_CLIENT_IO_THREADS"],
        "RPCs run on the tasks of their callers; there are no I/O threads",
    ),
    unread(&["MC_RPC_PROTOCOL"], "RPCs use TCP"),
    unread(
        &["MC_MMAP_ARENA_POOL_SIZE", "MC_DISABLE_MMAP_ARENA"],
        "each segment and buffer is a mapping of its own; there is no arena",
    ),
    unread(
        &["MC_YLT_LOG_LEVEL", "MC_LOG_DIR"],
        "there is one log, set by RUST_LOG or the flags of the program, in Python and C by MC_LOG_LEVEL",
    ),
    unread(&["MC_USE_TENT", "MC_USE_TEV1", "MC_TENT_CONF"], "there is one transfer engine"),
    unread(
        &[
            "MC_HANDSHAKE_LISTEN_BACKLOG",
            "MC_TCP_SLICE_SIZE",
            "MC_TCP_ENABLE_CONNECTION_POOL",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER",
            "MC_TCP_ADMISSION_TIMEOUT_MS",
        ],
        "connections are kept, and requests queue on them; there is no second queue",
    ),
    unread(&["MC_METADATA_SERVER"], "Mooncake C++ documents it and does not read it either"),
    unread(
        &[
            "MC_NOF_WORKERS",
            "MC_NOF_SUBMIT_CHUNK_BYTES",
            "MC_NOF_INFLIGHT_BYTES_LIMIT",
            "MC_NOF_TRTYPE",
            "MC_NOF_DEBUG",
            "MC_NOF_DEBUG_INTERVAL_MS",
            "MOONCAKE_NVME_KV_*",
        ],
        "NVMe over Fabrics and NVMe key-value devices are not supported",
    ),
    unread(
        &["MOONCAKE_ENABLE_DFS", "MOONCAKE_DFS_*", "MOONCAKE_DISTRIBUTED_*"],
        "a distributed file system as a tier is not supported",
    ),
    unread(
        &[
            "MC_EFA_NIC_SELECTION",
            "MC_EFA_CQ_THREADS",
            "MC_MIN_REG_SIZE",
            "MC_CXL_DEV_PATH",
            "MC_CXL_DEV_SIZE",
        ],
        "transports of special builds (EFA, Barex, CXL) are not supported",
    ),
];

/// Returns `docs/environment.md`.
pub fn environment_document() -> String {
    let mut text = String::from(
        "# Environment variables\n\n\
         Generated from `mooncake-store/server/src/config/environment.rs` by\n\
         `cargo xtask docs`; do not edit. An empty variable counts as unset.\n\n\
         ```sh\n\
         mooncake_master --print_config    # each value of the master and its origin\n\
         ```\n\n\
         ## Read by the master\n\n\
         `mooncake_master` reads a variable for each of its flags. The command line takes\n\
         precedence over the environment, the environment over the configuration file. The master\n\
         warns about unknown variables that begin with `MC_MASTER_`. The Rust libraries read the\n\
         environment only on request.\n\n\
         | variable | flag | default | effect |\n|---|---|---|---|\n",
    );
    for flag in flags() {
        let names = std::iter::once(flag.variable()).chain(flag.variables.iter().map(|name| (*name).into()));
        let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
        let _ = writeln!(
            text,
            "| {} | `--{}` | {} | {} |",
            names.join(", "),
            flag.name,
            code(flag.default),
            effect(flag)
        );
    }
    text.push_str(
        "\n## Read by the transfer engine\n\n\
         A transfer engine reads these variables with `TransferEngineBuilder::environment`.\n\
         Engines of the C interface, of the Python package and of `transfer_engine_bench` do.\n\
         Stores of the Python package and `mooncake_client` read those about TCP, RDMA and the\n\
         choice of a transport. Older names follow the newer ones.\n\n\
         | variable | default | effect |\n|---|---|---|\n",
    );
    for variable in VARIABLES {
        let names: Vec<String> = variable.names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(text, "| {} | {} | {} |", names.join(", "), code(variable.default), variable.effect);
    }
    text.push_str("\n## Read by the CLI `mooncake`\n\n| variable | default | effect |\n|---|---|---|\n");
    for (name, default, effect) in TOOL {
        let _ = writeln!(text, "| `{name}` | {} | {effect} |", code(default));
    }
    text.push_str(
        "\n## Read by the Python package\n\n\
         `mooncake_client` reads `RUST_LOG` and the variables with \"yes\".\n\n\
         | variable | default | `mooncake_client` | effect |\n|---|---|---|---|\n",
    );
    for (name, default, effect) in PYTHON {
        let client = if CLIENT.contains(name) { "yes" } else { "" };
        let _ = writeln!(text, "| `{name}` | {} | {client} | {effect} |", code(default));
    }
    for (title, variables) in [
        ("Variables of Mooncake C++ that are not read yet", LATER),
        ("Variables of Mooncake C++ without meaning here", NEVER),
    ] {
        let _ = write!(text, "\n## {title}\n\n| variables | why |\n|---|---|\n");
        for unread in variables {
            let names: Vec<String> = unread.names.iter().map(|name| format!("`{name}`")).collect();
            let _ = writeln!(text, "| {} | {} |", names.join(", "), unread.reason);
        }
    }
    text
}

/// Returns `docs/flags.md`.
pub fn flags_document() -> String {
    let mut text = String::from(
        "# Flags of `mooncake_master`\n\n\
         Generated from `mooncake-store/server/src/config/flags.rs` by `cargo xtask docs`;\n\
         do not edit.\n\n\
         ```sh\n\
         mooncake_master --rpc_port=50051 --print_config    # each value and its origin\n\
         ```\n\n\
         Each flag is also a key of a configuration file (`--config_path=master.yaml`, `.yml`,\n\
         `.json` or `.toml`: one flat map). In capitals after `MC_MASTER_` it is an environment\n\
         variable ([environment.md](environment.md)). Command line > environment > file >\n\
         default.\n\n\
         Flags of missing features are known. A switch is accepted at its default and refused\n\
         otherwise. Other settings are accepted without effect, and the master notes that at the\n\
         start.\n",
    );
    for group in GROUPS {
        let _ = write!(text, "\n## {}\n\n| flag | default | effect |\n|---|---|---|\n", group.name);
        for flag in group.flags {
            let names: Vec<String> = flag.names().map(|name| format!("`--{name}`")).collect();
            let _ = writeln!(
                text,
                "| {} | {} | {} |",
                names.join(", formerly "),
                code(flag.default),
                effect(flag)
            );
        }
    }
    text
}

fn code(value: &str) -> String {
    if value.is_empty() { String::new() } else { format!("`{value}`") }
}

fn effect(flag: &Flag) -> String {
    match flag.remark() {
        None => flag.help.into(),
        Some(remark) => format!("{} ({remark})", flag.help),
    }
}

#[cfg(test)]
mod tests;
