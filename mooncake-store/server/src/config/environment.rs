//! The environment: what is read of it, and what the existing system reads and this one does not, with the reason.
//!
//! This is the only file of the crate that reads the environment; `docs/environment.md` is made from it.

use std::fmt::Write;
use std::ops::RangeInclusive;
use std::time::Duration;

use mooncake_core::memory::HugePages;

use mooncake_core::Result;
use mooncake_engine::environment::VARIABLES;
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_transport::directory::DirectoryOptions;
use mooncake_transport::engine::HandshakePort;

use super::flag::Flag;
use super::flags::{GROUPS, flags};
use super::settings::Settings;
use super::values::{bytes, nearest, switch};
use mooncake_client::{ClientConfig, HotCacheConfig, MAX_TIMEOUT, OffloadConfig, SegmentFile};

/// What every variable of a flag of the master begins with.
const PREFIX: &str = "MC_MASTER_";

impl Settings {
    /// Takes the values of the process's environment.
    pub fn read_environment(&mut self) {
        self.read_environment_of(&process_variables());
    }

    /// As [`Settings::read_environment`], of a list of names and values.
    fn read_environment_of(&mut self, variables: &[(String, String)]) {
        // An empty variable is one that is not set.
        let of = |name: &str| {
            variables.iter().find(|(known, value)| known == name && !value.is_empty()).map(|(_, value)| value)
        };
        for flag in flags() {
            let own = flag.variable();
            // Ours says exactly what it means, so it goes before those of the existing system.
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

/// The variables of this process that are text.
#[allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]
fn process_variables() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// What a client's program takes from the environment.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientEnvironment {
    /// Pages of its memory.
    pub huge_pages: HugePages,
    /// Ports its name draws from.
    pub ports: RangeInclusive<u16>,
    /// Values are stored with a checksum and compared with it.
    pub checksum: bool,
    /// A file whose memory is the segment.
    pub segment_file: Option<SegmentFile>,
    /// More memory may be offered than is available.
    pub allow_overcommit: bool,
    /// Every wire but TCP is left alone.
    pub force_tcp: bool,
    /// Levels of the log.
    pub log: Option<String>,
    /// What is done is counted.
    pub metrics: bool,
    /// Time between two summaries of that in the log; zero for none.
    pub metrics_interval: Duration,
    /// A label of its metrics; empty for none.
    pub cluster_id: String,
    /// Bytes between members in one process are copied and take no wire.
    pub copy_in_process: bool,
    /// Its memory is on this NUMA node.
    pub numa_node: Option<u32>,
    /// Longest time of a call, where it is said.
    pub timeout: Option<Duration>,
    /// Longest time of joining, where it is said.
    pub connect_timeout: Option<Duration>,
    /// Replicas on faster wires are read first.
    pub score_replicas: bool,
    /// What is kept of what is read from other members.
    pub hot_cache: HotCacheConfig,
    /// Its disk, if it is told to have one: see [`offload`](Self::offload).
    pub disk: OffloadConfig,
}

impl ClientEnvironment {
    /// That of this process.
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
        // Without those that Linux gives to whoever connects.
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

    /// A disk in that directory, or in the one the environment names where it is empty: for
    /// [`ClientConfig::offload`](mooncake_client::ClientConfig::offload).
    pub fn offload(&self, path: &str) -> OffloadConfig {
        let mut disk = self.disk.clone();
        if !path.is_empty() {
            disk.path = path.into();
        }
        disk
    }

    /// The wires of a protocol, with its devices (commas between them; all when empty or `auto-discovery`) and what the environment says of
    /// wires: for [`ClientBuilder::wires`](mooncake_client::ClientBuilder::wires).
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a protocol that is not built in.
    pub fn wires(protocol: &str, devices: &str) -> Result<TransportOptions> {
        let engine = TransferEngine::builder().environment().protocol(protocol).devices(devices);
        engine.transport_options()
    }

    /// How a member with that directory finds others and where it answers, as the environment says: for
    /// [`ClientConfig::directory`](mooncake_client::ClientConfig::directory) and [`ClientConfig::handshake`](mooncake_client::ClientConfig::handshake).
    pub fn meeting(metadata: &str) -> (DirectoryOptions, HandshakePort) {
        // Any name: who is found at a handshake port has one.
        TransferEngine::builder().environment().metadata(metadata).name("member").meeting()
    }

    /// Sets what it says of a client.
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

/// What is said of a disk. What makes no sense is not heard.
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

/// What `mooncake` reads: name, default, effect.
const TOOL: &[(&str, &str, &str)] = &[
    ("MOONCAKE_MASTER", "127.0.0.1:50051", "Address of the master"),
    ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE", "Where members find each other"),
    ("MOONCAKE_TENANT_ID", "default", "Tenant"),
    ("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1", "Name that others know this process by"),
    ("RUST_LOG", "error", "What is logged, to standard error"),
    ("MC_STORE_USE_HUGEPAGE", "", "`doctor`: huge pages must be there, unless 0, false, no or off"),
];

/// What `mooncake` takes for a setting that its command line leaves open.
#[cfg(feature = "cli")]
pub(crate) fn tool_default(name: &str) -> String {
    let set = process_variables().into_iter().find(|(known, value)| known == name && !value.is_empty());
    let default = || TOOL.iter().find(|(known, ..)| *known == name).map_or("", |(_, default, _)| default);
    set.map_or_else(|| default().to_owned(), |(_, value)| value)
}

/// What the Python package reads, and of that, what `mooncake_client` reads, too.
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

/// What the Python package reads: name, default, effect.
const PYTHON: &[(&str, &str, &str)] = &[
    ("MC_STORE_CLIENT_MIN_PORT", "12300", "First port that clients draw from"),
    ("MC_STORE_CLIENT_MAX_PORT", "14300", "Last port that clients draw from"),
    ("MC_STORE_USE_HUGEPAGE", "", "Memory of huge pages, unless 0, false, no or off"),
    ("MC_STORE_HUGEPAGE_SIZE", "2MB", "Their size"),
    (
        "MOONCAKE_STORE_CHECKSUM",
        "",
        "Values are stored with a checksum and compared with it, unless 0, false, no or off",
    ),
    (
        "MOONCAKE_STORE_SEGMENT_FILE",
        "",
        "A file on tmpfs or hugetlbfs that the segment is memory of: its objects outlive the process (`docs/ha.md`)",
    ),
    ("MOONCAKE_STORE_SEGMENT_INDEX", "", "Where it is written down what lies there; beside the file"),
    (
        "MOONCAKE_ALLOW_OVERCOMMIT",
        "",
        "Offer more memory than the host and the control groups of the process have, unless 0, false, no or off",
    ),
    (
        "MC_STORE_CLIENT_METRIC",
        "1",
        "What a store does is counted (`docs/metrics.md`), unless 0, false, no or off",
    ),
    ("MC_STORE_CLIENT_METRIC_INTERVAL", "0", "Seconds between two summaries of that in the log; 0 for none"),
    ("MC_STORE_CLUSTER_ID", "", "Label `cluster_id` of these metrics"),
    (
        "MC_STORE_MEMCPY",
        "",
        "Bytes between members in one process are copied and take no wire, unless 0, false, no or off",
    ),
    ("MC_STORE_NUMA_SOCKET_ID", "", "NUMA node of its memory"),
    (
        "MC_STORE_REPLICA_SCORING",
        "",
        "Of replicas on other hosts those on RDMA are read first, then those on TCP, unless 0, false, no or off",
    ),
    (
        "MC_RPC_TIMEOUT_MS",
        "",
        "Longest time of one call, 25000 at most; by itself 20000, of `mooncake_client` 5000",
    ),
    ("MC_RPC_CONNECT_TIMEOUT_MS", "10000", "Longest time of joining"),
    (
        "MC_STORE_LOCAL_HOT_CACHE_SIZE",
        "0",
        "Memory for values that are often read from other members (`docs/hot-cache.md`); 0 for none",
    ),
    ("MC_STORE_LOCAL_HOT_BLOCK_SIZE", "16777216", "Longest value that is kept there"),
    ("MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD", "2", "A value is kept there once it was read so often lately"),
    ("MC_LOG_LEVEL", "WARNING", "What the native part logs, and an engine in a C program"),
    (
        "MOONCAKE_CONFIG_PATH",
        "",
        "JSON file with a store's settings; the variables below are not looked at then",
    ),
    ("MOONCAKE_MASTER", "", "Address of the master"),
    ("MOONCAKE_LOCAL_HOSTNAME", "localhost", "Name that others know this process by"),
    ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE", "Where members find each other"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "3355443200", "Bytes offered to the cluster"),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", "1073741824", "Bytes of the local buffer"),
    ("MOONCAKE_PROTOCOL", "tcp", "Wire"),
    ("MOONCAKE_DEVICE", "", "Devices of that wire"),
    ("MOONCAKE_TENANT_ID", "default", "Tenant"),
    ("MOONCAKE_OFFLOAD_ENABLED", "false", "Keep objects on an SSD"),
    (
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
        "/data/file_storage",
        "Folder on it (`docs/disk.md`); it is made if need be, and belongs to one client at a time",
    ),
    (
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES",
        "2199023255552",
        "Most bytes taken there, and never more than 90 % of what the file system has",
    ),
    ("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "0", "The same: the smaller of the two counts; 0 for none"),
    ("MOONCAKE_BUCKET_MAX_TOTAL_SIZE", "0", "Older name of that"),
    ("MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT", "10000000", "Most objects there"),
    (
        "MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION",
        "true",
        "Whether it is emptied down to the low watermark when it is filled above the high one",
    ),
    ("MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO", "0.9", "The high one"),
    ("MOONCAKE_DISK_EVICTION_HIGH_WATERMARK_RATIO", "0.9", "Older name of that"),
    ("MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.8", "The low one"),
    ("MOONCAKE_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.8", "Older name of that"),
    (
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS",
        "10",
        "Most seconds between two questions to the master about what is to be written",
    ),
    (
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
        "1342177280",
        "Memory through which others read from the disk; it is taken as it is used",
    ),
    ("MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS", "5000", "How long they may read there, in milliseconds"),
    (
        "MOONCAKE_OFFLOAD_USE_URING",
        "",
        "io_uring where the kernel allows it, unless 0, false, no or off: then threads",
    ),
    ("MOONCAKE_USE_URING", "", "Older name of that"),
    ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "false", "Serve HTTP beside the store"),
    ("MOONCAKE_CLIENT_HTTP_PORT", "9300", "At this port"),
];

/// Variables of the existing system that are not read, with one reason for all of them.
struct Unread {
    names: &'static [&'static str],
    reason: &'static str,
}

const fn unread(names: &'static [&'static str], reason: &'static str) -> Unread {
    Unread { names, reason }
}

/// Those whose subject this system has or will have.
const LATER: &[Unread] = &[unread(
    &[
        "MC_FORCE_MUSA",
        "WITH_NVIDIA_PEERMEM",
        "MC_STORE_PIN_MEMORY_MAX_BYTES",
        "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES",
    ],
    "of GPUs, those of NVIDIA's driver are served, through page-locked memory of its own",
)];

/// Those that have no meaning here.
const NEVER: &[Unread] = &[
    unread(&["MOONCAKE_AWS_*"], "snapshots lie in a folder"),
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
        "objects lie on the disk in a layout of our own (`docs/disk.md`), which has nothing of this to set",
    ),
    unread(
        &["MC_STORE_LOCAL_HOT_CACHE_USE_SHM"],
        "what `mooncake_client` keeps is copied once, by itself, into the memory that a light client shares with it",
    ),
    unread(
        &["MC_STORE_CLIENT_SETUP_RETRIES"],
        "the port that is drawn is taken at once, and joining is tried again until its time is up (MC_RPC_CONNECT_TIMEOUT_MS)",
    ),
    unread(
        &[
            "MC_NUM_CQ_PER_CTX",
            "MC_NUM_COMP_CHANNELS_PER_CTX",
            "MC_WORKERS_PER_CTX",
            "MC_MAX_SGE",
            "MC_MAX_INLINE",
        ],
        "an RDMA device has one completion queue and one thread, which sleeps when nothing completes; callers post themselves; a request is one range, sent from where it lies",
    ),
    unread(
        &["MC_PATH_ROUNDROBIN", "MC_ENABLE_DEST_DEVICE_AFFINITY"],
        "equal ways take turns always, and devices of one name go together where they are no farther",
    ),
    unread(&["MC_MS_AUTO_DISC"], "devices are looked for where none is named, and only there"),
    unread(
        &["MC_LOG_RDMA_SLICE_AFFINITY", "MC_TRACK_RDMA_POSTED_SLICES"],
        "they watch the existing system's own scheduling of slices",
    ),
    unread(
        &["MC_MLX5_QP_UDP_SPORTS", "MC_MLX5_QP_LAG_PORT_BALANCE"],
        "queue pairs are made by the calls that every vendor's devices have, and mlx5's own library is not used",
    ),
    unread(&["MC_ENDPOINT_STORE_TYPE"], "RDMA connections give way in one order, SIEVE"),
    unread(
        &["MC_ENABLE_PARALLEL_REG_MR", "MC_MAX_CONCURRENT_REG_MR"],
        "memory is registered with all devices at once, always",
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
        "notifications go over the handshake port, whatever the wire",
    ),
    unread(
        &["MC_RPC_CLIENT_IO_THREADS", "MC_STORE_RPC_CLIENT_IO_THREADS", "MC_TE_RPC_CLIENT_IO_THREADS"],
        "calls run on the tasks of their callers; there are no I/O threads to count",
    ),
    unread(&["MC_RPC_PROTOCOL"], "calls to a master go over TCP"),
    unread(
        &["MC_MMAP_ARENA_POOL_SIZE", "MC_DISABLE_MMAP_ARENA"],
        "each segment and buffer is one mapping of its own; there is no arena",
    ),
    unread(
        &["MC_YLT_LOG_LEVEL", "MC_LOG_DIR"],
        "one log for everything, set by RUST_LOG or the flags of the program, in Python and C by MC_LOG_LEVEL",
    ),
    unread(
        &["MC_USE_TENT", "MC_USE_TEV1", "MC_TENT_CONF"],
        "there is one transfer engine, not two generations to choose from",
    ),
    unread(
        &[
            "MC_HANDSHAKE_LISTEN_BACKLOG",
            "MC_TCP_SLICE_SIZE",
            "MC_TCP_ENABLE_CONNECTION_POOL",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER",
            "MC_TCP_ADMISSION_TIMEOUT_MS",
        ],
        "connections are kept and requests queue on them, with no second queue before the first; a socket is given all that it takes",
    ),
    unread(&["MC_METADATA_SERVER"], "the existing system documents it and does not read it either"),
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
        "NVMe over Fabrics and NVMe key-value devices are out of scope",
    ),
    unread(
        &["MOONCAKE_ENABLE_DFS", "MOONCAKE_DFS_*", "MOONCAKE_DISTRIBUTED_*"],
        "a distributed file system as a tier is out of scope",
    ),
    unread(
        &[
            "MC_EFA_NIC_SELECTION",
            "MC_EFA_CQ_THREADS",
            "MC_MIN_REG_SIZE",
            "MC_CXL_DEV_PATH",
            "MC_CXL_DEV_SIZE",
        ],
        "wires of special builds (EFA, Barex, CXL) that are out of scope",
    ),
];

/// `docs/environment.md`.
pub fn environment_document() -> String {
    let mut text = String::from(
        "# Environment\n\n\
         Made from `mooncake-store/server/src/config/environment.rs` by `cargo xtask docs`; a test compares the two. An empty variable is \
         one that is not set.\n\n\
         ## What is read\n\n\
         `mooncake_master` reads a variable for each of its flags. The command line goes before the environment, the environment \
         before the configuration file; `mooncake_master --print_config` shows each value and who set it. A variable that \
         begins with `MC_MASTER_` and is not in the table is warned of at the start. The Rust libraries read no environment unless they are told to.\n\n\
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
        "\nA transfer engine reads these when it is told to (`TransferEngineBuilder::environment`): those of the C interface, of the Python \
         package and of `transfer_engine_bench` are. Stores of the Python package and `mooncake_client` take from them what they say of \
         wires: TCP, RDMA, and which of them. Older names stand behind the newer ones.\n\n| variable | default | effect |\n|---|---|---|\n",
    );
    for variable in VARIABLES {
        let names: Vec<String> = variable.names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(text, "| {} | {} | {} |", names.join(", "), code(variable.default), variable.effect);
    }
    text.push_str("\n`mooncake` reads these.\n\n| variable | default | effect |\n|---|---|---|\n");
    for (name, default, effect) in TOOL {
        let _ = writeln!(text, "| `{name}` | {} | {effect} |", code(default));
    }
    let client: Vec<String> = CLIENT.iter().map(|name| format!("`{name}`")).collect();
    let _ = write!(
        text,
        "\nThe Python package reads these, and `mooncake_client` of them {}, and `RUST_LOG`.\n\n| variable | default | effect |\n|---|---|---|\n",
        client.join(", ")
    );
    for (name, default, effect) in PYTHON {
        let _ = writeln!(text, "| `{name}` | {} | {effect} |", code(default));
    }
    for (title, variables) in [
        ("Variables of the existing system that are not read yet", LATER),
        ("Variables of the existing system that mean nothing here", NEVER),
    ] {
        let _ = write!(text, "\n## {title}\n\n| variables | why |\n|---|---|\n");
        for unread in variables {
            let names: Vec<String> = unread.names.iter().map(|name| format!("`{name}`")).collect();
            let _ = writeln!(text, "| {} | {} |", names.join(", "), unread.reason);
        }
    }
    text
}

/// `docs/flags.md`.
pub fn flags_document() -> String {
    let mut text = String::from(
        "# Flags of `mooncake_master`\n\n\
         Made from `mooncake-store/server/src/config/flags.rs` by `cargo xtask docs`; a test compares the two. Each is also a key of a \
         configuration file (`--config_path=master.yaml`, `.yml`, `.json` or `.toml`: one flat map) and, in capitals after \
         `MC_MASTER_`, a variable of the environment ([environment.md](environment.md)). Command line > environment > file > default; \
         `--print_config` shows what came of it.\n\n\
         Flags of something that is not built are known: a switch is taken at its off value and refused otherwise, \
         a knob of it is taken and has no effect, which is said at the start.\n",
    );
    for group in GROUPS {
        let _ = write!(text, "\n## {}\n\n| flag | default | effect |\n|---|---|---|\n", group.name);
        for flag in group.flags {
            let names: Vec<String> = flag.names().map(|name| format!("`--{name}`")).collect();
            let _ =
                writeln!(text, "| {} | {} | {} |", names.join(", older: "), code(flag.default), effect(flag));
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
