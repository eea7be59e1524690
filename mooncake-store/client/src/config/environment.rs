//! Settings of a client from the environment: those of `mooncake_client` and of stores of the
//! Python package and the C interface.

use mooncake_core::memory::HugePages;
use mooncake_core::settings::values::{
    LARGEST_COUNT, LONGEST_TIME, Parsed, any, bytes, millis, number, optional, seconds, seconds_within,
    unless_off, within,
};
use mooncake_core::settings::{Environment, Setting, apply};
use mooncake_core::{Result, set, settings};
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_metadata::DirectoryOptions;
use mooncake_transport::LoopbackNet;
use mooncake_transport::engine::HandshakePort;

use std::path::PathBuf;
use std::time::Duration;

use super::{ClientConfig, MAX_TIMEOUT, OffloadConfig, RPC_ONLY, SegmentFile, is_root_of_files};

/// Shortest loan of the buffer of a disk that a variable can set.
const SHORTEST_LOAN: Duration = Duration::from_secs(1);

/// Settings of a client program from the environment.
#[derive(Clone, Debug)]
pub struct ClientEnvironment {
    /// Settings of the client.
    pub config: ClientConfig,
    /// Settings of a disk, for [`offload`](Self::offload).
    pub disk: OffloadConfig,
    /// Log levels.
    pub log: Option<String>,
    /// Start of a master inside the process of a store, for tests of programs.
    pub embedded_master: bool,
    dependent: DependentSettings,
}

/// Values whose meaning depends on other variables.
#[derive(Clone, Debug)]
struct DependentSettings {
    use_huge_pages: bool,
    huge_page_bytes: u64,
    first_port: u16,
    last_port: u16,
    segment_index: Option<PathBuf>,
    second_capacity: u64,
    evict_by_watermark: bool,
    high_watermark: f64,
    low_watermark: f64,
}

impl ClientEnvironment {
    /// All variables of a client, except those that a [`TransferEngine`] reads.
    pub const VARIABLES: &'static [Setting<Self>] = settings! {
        /// Log levels of `mooncake_client`; the flag `--log` takes precedence
        RUST_LOG: "info" => set!(log = optional),
        /// Address of this host at which every port of a client listens; 0.0.0.0 or :: for all; if
        /// empty, loopback for a loopback name, else all; the flag `--bind_address` takes
        /// precedence
        MC_BIND_ADDRESS: "" => set!(config.bind_address = any),
        /// Names, with commas between them, by which pages in browsers may call the HTTP endpoints
        /// of a client; `*.name` for all below a name
        MC_ALLOWED_HOSTS: "" => set!(config.allowed_hosts = number),
        /// First port of the range for client names
        MC_STORE_CLIENT_MIN_PORT: "12300" => set!(dependent.first_port = number),
        /// Last port of the range for client names
        MC_STORE_CLIENT_MAX_PORT: "14300" => set!(dependent.last_port = number),
        /// Use huge pages for memory, unless off
        MC_STORE_USE_HUGEPAGE: "" => set!(dependent.use_huge_pages = unless_off),
        /// Size of a huge page
        MC_STORE_HUGEPAGE_SIZE: "2MB" => set!(dependent.huge_page_bytes = bytes),
        /// Use TCP between clients of one host, and share no memory, unless off
        MC_FORCE_TCP: "" => set!(|client, text| client.config.share_memory = !unless_off(text)?),
        /// Store values with a checksum and verify it, unless off
        MOONCAKE_STORE_CHECKSUM: "" => set!(config.checksum = unless_off),
        /// File on tmpfs or hugetlbfs that holds the segment, so that objects outlive the process
        /// (`docs/ha.md`)
        MOONCAKE_STORE_SEGMENT_FILE: ""
            => set!(|client, path| client.config.segment_file = Some(SegmentFile::new(path))),
        /// Index of the segment file; beside the file if empty
        MOONCAKE_STORE_SEGMENT_INDEX: "" => set!(dependent.segment_index = optional),
        /// Folders below which a master may name the folder for shared files, with commas or colons
        /// between (`docs/disk.md`)
        MOONCAKE_FS_ROOTS: "" => set!(config.fs_roots = roots),
        /// Permissions of shared files, in octal (`docs/disk.md`)
        MOONCAKE_FILE_MODE: "640" => set!(config.file_mode = number),
        /// Accept a segment larger than the memory of the host and its control groups, unless off
        MOONCAKE_ALLOW_OVERCOMMIT: "" => set!(config.allow_overcommit = unless_off),
        /// Count metrics of a store (`docs/metrics.md`), unless off
        MC_STORE_CLIENT_METRIC: "1" => set!(config.metrics = unless_off),
        /// Seconds between two summaries of the metrics in the log; 0 for none
        MC_STORE_CLIENT_METRIC_INTERVAL: "0"
            => set!(|client, text| client.config.metrics_interval = seconds(text)?),
        /// Label `cluster_id` of the metrics, and cluster id for masters in etcd
        MC_STORE_CLUSTER_ID: "" => set!(config.cluster_id = any),
        /// Consequence of an own address that does not lead to this client, as the master finds
        /// after a mount: off, warn or refuse
        MOONCAKE_ADDRESS_CHECK: "warn" => set!(config.address_check = number),
        /// Copy bytes between clients of one process without a transport, unless off
        MC_STORE_MEMCPY: "" => set!(config.copy_in_process = unless_off),
        /// NUMA node of the memory
        MC_STORE_NUMA_SOCKET_ID: ""
            => set!(|client, text| client.config.memory.numa_node = Some(number(text)?)),
        /// Read remote replicas on RDMA before those on TCP, unless off
        MC_STORE_REPLICA_SCORING: "" => set!(config.score_replicas = unless_off),
        /// Timeout of one call in milliseconds, at most 25000; default 20000, for `mooncake_client`
        /// 5000
        MC_RPC_TIMEOUT_MS: ""
            => set!(|client, text| client.config.timeout = positive_millis(text)?.min(MAX_TIMEOUT)),
        /// Timeout of connecting to the master in milliseconds
        MC_RPC_CONNECT_TIMEOUT_MS: "10000" => set!(config.connect_timeout = positive_millis),
        /// Bytes of the hot cache (`docs/hot-cache.md`); 0 for none
        MC_STORE_LOCAL_HOT_CACHE_SIZE: "0" => set!(config.hot_cache.bytes = bytes),
        /// Longest value in the hot cache, in bytes
        MC_STORE_LOCAL_HOT_BLOCK_SIZE: "16777216" => set!(config.hot_cache.longest = bytes),
        /// Recent remote reads of a value before it enters the hot cache
        MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD: "2" => set!(config.hot_cache.admission = number),
        /// Folder on the disk (`docs/disk.md`); created if missing; of several clients, each uses a
        /// folder of its own below it
        MOONCAKE_OFFLOAD_FILE_STORAGE_PATH: "/data/file_storage" => set!(disk.path = any),
        /// Maximum bytes of one client on the disk, at most 90 % of the file system
        MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES: "2199023255552" => set!(disk.capacity = positive),
        /// A second limit in bytes; the smaller limit counts; 0 for none
        MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE | MOONCAKE_BUCKET_MAX_TOTAL_SIZE: "0"
            => set!(|client, text| client.dependent.second_capacity = bytes(text)?),
        /// Maximum number of objects on the disk
        MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT: "10000000"
            => set!(|client, text| client.disk.max_objects = within(text, 1, LARGEST_COUNT)?),
        /// Evict from the disk down to the low watermark when the high one is exceeded
        MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION: "true"
            => set!(dependent.evict_by_watermark = unless_off),
        /// High watermark of the disk
        MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO | MOONCAKE_DISK_EVICTION_HIGH_WATERMARK_RATIO: "0.9"
            => set!(dependent.high_watermark = watermark),
        /// Low watermark of the disk
        MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO | MOONCAKE_DISK_EVICTION_LOW_WATERMARK_RATIO: "0.8"
            => set!(dependent.low_watermark = watermark),
        /// Eviction policy of the disk: gittins, tenure, lru, fifo, s3fifo
        MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY | MOONCAKE_BUCKET_EVICTION_POLICY: "gittins"
            => set!(disk.eviction = number),
        /// Maximum seconds between two requests to the master for disk work
        MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS: "10"
            => set!(|client, text| client.disk.interval = seconds_within(text, 1, LONGEST_TIME.as_secs())?),
        /// Bytes of the buffer through which other nodes read from the disk; allocated on use, and
        /// more for a longer object
        MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES: "1342177280" => set!(disk.buffer = positive),
        /// Milliseconds of a loan to a reader, at least 1000
        MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS: "5000" => set!(disk.lend = positive_millis),
        /// Let existence checks with `ExistOptions` prefetch objects from disks (`docs/disk.md`),
        /// unless off
        MOONCAKE_ENABLE_SSD_PREFETCH: "" => set!(config.prefetch.on_exist = unless_off),
        /// Seconds without prefetches from the own disk after memory had no space; 0 for none
        MOONCAKE_SSD_PREFETCH_COOLDOWN_SEC: "5" => set!(config.prefetch.cooldown = seconds),
        /// Seconds in which an object is prefetched once at most; 0 for no limit
        MOONCAKE_SSD_PREFETCH_DEDUP_TTL_SEC: "30" => set!(config.prefetch.dedup = seconds),
        /// Start a master inside the process of a Python store, for tests; the address of the
        /// master is ignored then (`docs/python.md`), unless off
        MOONCAKE_ENABLE_EMBEDDED_MASTER: "" => set!(embedded_master = unless_off),
        /// Use io_uring where the kernel allows it, unless off; otherwise threads
        MOONCAKE_OFFLOAD_USE_URING | MOONCAKE_USE_URING: ""
            => set!(|client, text| client.disk.threads = !unless_off(text)?),
    };

    /// Parses a list of folders for [`ClientConfig::fs_roots`], with commas or colons between.
    ///
    /// # Errors
    /// The reason why a folder is refused.
    pub fn fs_roots(text: &str) -> Parsed<Vec<PathBuf>> {
        roots(text)
    }

    /// Reads the environment of this process.
    pub fn read() -> Self {
        Self::over(ClientConfig::default())
    }

    /// Reads the environment of this process, which overrides `config`. Without a variable for it,
    /// a segment must fit into the available memory.
    pub fn over(config: ClientConfig) -> Self {
        Self::of(config, &Environment::of_process())
    }

    /// Applies an environment to `config`. Invalid values are ignored.
    fn of(config: ClientConfig, environment: &Environment) -> Self {
        let disk = OffloadConfig::new("/data/file_storage");
        let (high, low) = disk.watermarks.unwrap_or((0.9, 0.8));
        let mut read = Self {
            dependent: DependentSettings {
                use_huge_pages: false,
                huge_page_bytes: 2 << 20,
                first_port: *config.ports.start(),
                last_port: *config.ports.end(),
                segment_index: None,
                second_capacity: 0,
                evict_by_watermark: true,
                high_watermark: high,
                low_watermark: low,
            },
            config: ClientConfig { allow_overcommit: false, ..config },
            disk,
            log: None,
            embedded_master: false,
        };
        for ignored in apply(Self::VARIABLES, &mut read, environment) {
            tracing::warn!("{ignored}");
        }
        read.combine((high, low));
        read
    }

    /// Applies the values that depend on each other.
    fn combine(&mut self, watermarks: (f64, f64)) {
        let Self { config, disk, dependent, .. } = self;
        if dependent.use_huge_pages {
            let large = dependent.huge_page_bytes > 2 << 20;
            config.memory.huge_pages = if large { HugePages::Size1G } else { HugePages::Size2M };
        }
        let (first, last) = (dependent.first_port, dependent.last_port);
        // Without the ephemeral ports of Linux.
        if first <= last && ((1024 <= first && last <= 32767) || 61000 <= first) {
            config.ports = first..=last;
        } else {
            tracing::warn!(
                "MC_STORE_CLIENT_MIN_PORT={first} and MC_STORE_CLIENT_MAX_PORT={last} are \
                 ignored: the first must not be above the last, and both must be from 1024 to \
                 32767, or from 61000 on"
            );
        }
        if let (Some(file), Some(index)) = (&mut config.segment_file, dependent.segment_index.take()) {
            file.index = index;
        }
        if disk.lend < SHORTEST_LOAN {
            tracing::warn!(
                "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS={} is too short for readers to fetch a value; {} ms count",
                disk.lend.as_millis(),
                SHORTEST_LOAN.as_millis()
            );
            disk.lend = SHORTEST_LOAN;
        }
        if dependent.second_capacity > 0 {
            disk.capacity = disk.capacity.min(dependent.second_capacity);
        }
        let ratios = (dependent.high_watermark, dependent.low_watermark);
        let ratios = if ratios.1 <= ratios.0 { ratios } else { watermarks };
        disk.watermarks = dependent.evict_by_watermark.then_some(ratios);
    }

    /// Returns the configuration of a disk in `path`, for [`ClientConfig::offload`].
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
    /// [`ClientBuilder::transports`](crate::ClientBuilder::transports).
    ///
    /// `devices` has commas between names; empty or `auto-discovery` selects all. The protocol
    /// [`RPC_ONLY`] has no transport out of the process, whatever the environment says.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a protocol that is not built in.
    pub fn transports(protocol: &str, devices: &str) -> Result<TransportOptions> {
        if protocol == RPC_ONLY {
            return Ok(TransportOptions::in_process(LoopbackNet::new()));
        }
        let engine = TransferEngine::builder().environment().protocol(protocol).devices(devices);
        engine.transport_options()
    }

    /// Returns the metadata service and the handshake port of a client from the environment, for
    /// [`ClientConfig::directory`] and [`ClientConfig::handshake`].
    pub fn meeting(metadata: &str) -> (DirectoryOptions, HandshakePort) {
        // The builder needs a name; its value does not matter here.
        TransferEngine::builder().environment().metadata(metadata).name("member").meeting()
    }
}

/// Parses a list of roots of shared files.
fn roots(text: &str) -> Parsed<Vec<PathBuf>> {
    let roots = text.split([',', ':']).map(str::trim).filter(|root| !root.is_empty());
    let root = |root: &str| match is_root_of_files(root.as_ref()) {
        true => Ok(PathBuf::from(root)),
        false => Err(format!("{root} is not an absolute path below / without `..`")),
    };
    roots.map(root).collect()
}

fn positive(text: &str) -> Parsed<u64> {
    let size = bytes(text)?;
    if size == 0 { Err("must not be 0".into()) } else { Ok(size) }
}

fn positive_millis(text: &str) -> Parsed<Duration> {
    let time = millis(text)?;
    if time.is_zero() { Err("must not be 0".into()) } else { Ok(time) }
}

fn watermark(text: &str) -> Parsed<f64> {
    match number(text) {
        Ok(ratio) if 0.0 < ratio && ratio <= 1.0 => Ok(ratio),
        _ => Err("must be a number above 0, at most 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::clock::ManualClock;
    use mooncake_core::evict::PolicyKind;

    use super::*;
    use crate::config::HotCacheConfig;

    fn of(variables: &[(&str, &str)]) -> ClientEnvironment {
        ClientEnvironment::of(ClientConfig::default(), &variables.iter().copied().collect())
    }

    #[test]
    fn variables_set_the_client() {
        let nothing = of(&[]).config;
        assert_eq!(
            (nothing.memory.huge_pages, nothing.ports, nothing.checksum),
            (HugePages::Off, 12300..=14300, false)
        );
        assert!(nothing.share_memory && !nothing.allow_overcommit && nothing.segment_file.is_none());
        let large = of(&[("MC_STORE_USE_HUGEPAGE", "1"), ("MC_STORE_HUGEPAGE_SIZE", "1GB")]).config;
        assert_eq!(large.memory.huge_pages, HugePages::Size1G);
        let set = of(&[
            ("MC_STORE_CLIENT_MIN_PORT", "2000"),
            ("MC_STORE_CLIENT_MAX_PORT", "2001"),
            ("MOONCAKE_STORE_CHECKSUM", "yes"),
            ("MC_FORCE_TCP", "no"),
            ("MC_STORE_USE_HUGEPAGE", "on"),
        ])
        .config;
        assert_eq!((set.ports, set.checksum, set.share_memory), (2000..=2001, true, true));
        assert_eq!(set.memory.huge_pages, HugePages::Size2M);
        assert!(!of(&[("MC_FORCE_TCP", "1")]).config.share_memory);
        assert!(of(&[("MOONCAKE_ALLOW_OVERCOMMIT", "1")]).config.allow_overcommit);
        assert!(nothing.metrics && nothing.metrics_interval.is_zero() && nothing.cluster_id.is_empty());
        assert_eq!((nothing.copy_in_process, nothing.memory.numa_node), (true, None));
        let tuned = of(&[
            ("MC_STORE_MEMCPY", "0"),
            ("MC_STORE_NUMA_SOCKET_ID", "1"),
            ("MC_STORE_REPLICA_SCORING", "1"),
            ("MC_RPC_TIMEOUT_MS", "30000"),
            ("MC_RPC_CONNECT_TIMEOUT_MS", "1500"),
        ])
        .config;
        tuned.validate().unwrap();
        assert_eq!(
            (tuned.copy_in_process, tuned.memory.numa_node, tuned.score_replicas),
            (false, Some(1), true)
        );
        assert_eq!((tuned.timeout.as_secs(), tuned.connect_timeout.as_millis()), (25, 1500));
        let senseless = &[("MC_RPC_TIMEOUT_MS", "0"), ("MC_RPC_CONNECT_TIMEOUT_MS", "soon")];
        let unchanged = ClientEnvironment::of(tuned, &senseless.iter().copied().collect()).config;
        assert_eq!((unchanged.timeout.as_secs(), unchanged.connect_timeout.as_millis()), (25, 1500));
        let counted = of(&[
            ("MC_STORE_CLIENT_METRIC", "0"),
            ("MC_STORE_CLIENT_METRIC_INTERVAL", "7"),
            ("MC_STORE_CLUSTER_ID", "c"),
        ])
        .config;
        assert_eq!(
            (counted.metrics, counted.metrics_interval.as_secs(), &*counted.cluster_id),
            (false, 7, "c")
        );
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused_by_name() {
        let is_number = |setting: &&Setting<ClientEnvironment>| {
            setting.name != "MC_STORE_CLIENT_METRIC" && bytes(setting.default).is_ok()
        };
        let all = ClientEnvironment::VARIABLES.iter().filter(is_number);
        for (variable, value) in all.flat_map(|variable| {
            ["-1", "18446744073709551615", "99999999999999999999999999", "1e400", "nan"]
                .map(|value| (variable, value))
        }) {
            let mut read = of(&[]);
            let ignored = apply(
                ClientEnvironment::VARIABLES,
                &mut read,
                &[(variable.name, value)].into_iter().collect(),
            );
            assert!(ignored.len() == 1 && ignored[0].contains(variable.name), "{}={value}", variable.name);
        }
    }

    #[test]
    fn ports_that_the_kernel_uses_are_ignored() {
        for (first, last, drawn) in [
            ("61000", "61010", 61000..=61010),
            ("1024", "32767", 1024..=32767),
            ("40000", "40010", 12300..=14300),
            ("32000", "33000", 12300..=14300),
            ("60999", "61010", 12300..=14300),
            ("1000", "2000", 12300..=14300),
            ("2001", "2000", 12300..=14300),
            ("70000", "soon", 12300..=14300),
        ] {
            let set = of(&[("MC_STORE_CLIENT_MIN_PORT", first), ("MC_STORE_CLIENT_MAX_PORT", last)]);
            assert_eq!(set.config.ports, drawn, "{first} to {last}");
        }
    }

    #[test]
    fn variables_set_the_cache_the_file_and_the_disk() {
        let cached = of(&[
            ("MC_STORE_LOCAL_HOT_CACHE_SIZE", "64MB"),
            ("MC_STORE_LOCAL_HOT_BLOCK_SIZE", "1048576"),
            ("MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD", "3"),
        ]);
        let HotCacheConfig { bytes, longest, admission } = cached.config.hot_cache;
        assert_eq!((bytes, longest, admission), (64 << 20, 1 << 20, 3));
        assert_eq!(of(&[]).config.hot_cache, HotCacheConfig::default());
        let file =
            |more: &[_]| of(&[&[("MOONCAKE_STORE_SEGMENT_FILE", "/f")], more].concat()).config.segment_file;
        assert_eq!(file(&[]), Some(SegmentFile::new("/f")));
        let index = file(&[("MOONCAKE_STORE_SEGMENT_INDEX", "/i")]).unwrap().index;
        assert_eq!(index, PathBuf::from("/i"));
        assert_eq!(of(&[]).offload("/x"), OffloadConfig::new("/x"));
        let disk = of(&[
            ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/ssd"),
            ("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "4096000"),
            ("MOONCAKE_BUCKET_MAX_TOTAL_SIZE", "2048000"),
            ("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1"),
            ("MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO", "0.5"),
            ("MOONCAKE_USE_URING", "false"),
            ("MOONCAKE_BUCKET_EVICTION_POLICY", "lru"),
            ("MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT", "none"),
        ]);
        let expected = OffloadConfig {
            capacity: 2_048_000,
            interval: Duration::from_secs(1),
            watermarks: Some((0.9, 0.5)),
            eviction: PolicyKind::Lru,
            threads: true,
            ..OffloadConfig::new("/ssd")
        };
        assert_eq!((disk.offload(""), disk.offload("/y").path), (expected, "/y".into()));
        for (millis, counts) in [("1", 1000), ("999", 1000), ("1000", 1000), ("1001", 1001), ("0", 5000)] {
            let disk = of(&[("MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS", millis)]).disk;
            assert_eq!(disk.lend, Duration::from_millis(counts), "{millis}");
        }
        let untrimmed = of(&[("MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION", "false")]);
        assert_eq!(untrimmed.offload("").watermarks, None);
    }

    #[test]
    fn defaults_in_the_table_are_the_defaults() {
        let config = ClientConfig { clock: std::sync::Arc::new(ManualClock::new()), ..Default::default() };
        let shown = |variables: Environment| {
            let read = ClientEnvironment::of(config.clone(), &variables);
            format!("{:?} {:?} {:?}", read.config, read.disk, read.dependent)
        };
        let table = ClientEnvironment::VARIABLES.iter().map(|variable| (variable.name, variable.default));
        assert_eq!(shown(table.collect()), shown(Environment::default()));
    }
}
