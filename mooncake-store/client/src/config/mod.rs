//! Settings of a client.

mod address_policy;
mod environment;
mod hot_cache;
mod offload;
mod prefetch;
mod segment_file;

pub use self::address_policy::AddressPolicy;
pub use self::environment::ClientEnvironment;
pub use self::hot_cache::HotCacheConfig;
pub use self::offload::{DiskFaults, OffloadConfig};
pub use self::prefetch::PrefetchConfig;
pub use self::segment_file::SegmentFile;

use std::ops::RangeInclusive;
use std::path::{Component, PathBuf};
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::host_port;
use mooncake_core::memory::HostMemoryOptions;
use mooncake_core::web_origin::AllowedHosts;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_metadata::DirectoryOptions;
use mooncake_transport::engine::HandshakePort;
use mooncake_transport::private_files::FileMode;

use mooncake_protocol::api::DEFAULT_TENANT;

/// Protocol of clients that call the master and transfer nothing, as in Mooncake C++.
pub const RPC_ONLY: &str = "rpc_only";
/// Smallest segment or local buffer in bytes. Zero is allowed, too, and means none.
pub(crate) const MIN_BUFFER: u64 = 1024;
/// Largest local buffer, in bytes.
pub(crate) const MAX_LOCAL_BUFFER: u64 = 1 << 40;
/// Default size of a segment or local buffer in bytes.
pub(crate) const DEFAULT_BUFFER: u64 = 16 << 20;

/// Settings of a client. Every field has a default that works on one host.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Name of this client in the cluster, `host` or `host:port`. Without a port, the client takes
    /// one of [`ports`](Self::ports).
    pub local_hostname: String,
    /// `P2PHANDSHAKE` (clients find each other at their handshake ports) or the URL of a metadata
    /// service.
    pub metadata: String,
    /// Further options of the metadata service: key prefix and Redis credentials.
    pub directory: DirectoryOptions,
    /// Host and port at which this client accepts handshakes. [`advertise`](Self::advertise) takes
    /// precedence over the host.
    pub handshake: HandshakePort,
    /// Transport of the segment (`tcp`, ..). Empty: the first transport that is built in.
    /// [`RPC_ONLY`]: none.
    pub protocol: String,
    /// Address at which other clients reach this client. `None`: the address is detected.
    pub advertise: Option<std::net::IpAddr>,
    /// Consequence of an address that does not lead to this client (`Warn`).
    pub address_check: AddressPolicy,
    /// Address of this host at which every port of this client listens, its disk and its HTTP
    /// endpoints included. Empty: loopback if the published host is loopback, else every address.
    /// `0.0.0.0` or `::`: every address.
    pub bind_address: String,
    /// Names by which pages in browsers may call the HTTP endpoints of this client.
    pub allowed_hosts: AllowedHosts,
    /// Size of the segment that the client offers, in bytes. Zero: the client offers no memory.
    pub segment: u64,
    /// Size of the registered memory through which values in other memory are copied, in bytes.
    /// With zero, only registered memory can be the source of a put or the target of a read.
    pub local_buffer: u64,
    /// Allocation options of the segment and the local buffer.
    pub memory: HostMemoryOptions,
    /// Permission for a segment that is larger than the available memory. Available memory is the
    /// minimum of `MemAvailable` of the host and the free parts of the limits of the control groups
    /// of the process.
    ///
    /// Pages are allocated at the first write. A segment that is too large is therefore noticed
    /// only when the kernel ends the process. True by default. `mooncake_client` and the Python
    /// package set false unless they are configured otherwise.
    pub allow_overcommit: bool,
    /// Direct copies between clients of one process, without a transport.
    pub copy_in_process: bool,
    /// Storage of a checksum with every value. The checksum is CRC-64/ECMA-182, and the master
    /// keeps it. A read of a whole value compares the value with its checksum. Writer and reader
    /// each make one pass over the bytes.
    pub checksum: bool,
    /// Use of memory that this client shares with clients on the same host. Bytes between them are
    /// copied once. Other clients are reached by a transport.
    pub share_memory: bool,
    /// Survival of objects in memory that this client allocated, across a restart of the master.
    /// The client announces the objects to the new master.
    ///
    /// An object that was stored within the last three seconds may be missing. An object that was
    /// removed in that time may be present again. The client reads the bytes of long-lived objects
    /// once, in at most a tenth of the time of one core. A master of Mooncake C++ and an embedded
    /// master do not support this.
    pub outlive_master: bool,
    /// File on tmpfs or hugetlbfs whose memory is the segment. `None` by default: the segment is
    /// memory of the process.
    ///
    /// Objects in a file survive the end of the process. A new process must use the same file and
    /// the same [`segment`](Self::segment) size. The process must start within the time to live of
    /// clients. Objects stored within the last two or three seconds may be missing. Other clients
    /// on this host reach these objects over the transport, not in shared memory.
    ///
    /// A file requires [`outlive_master`](Self::outlive_master) and a master of this project. It
    /// cannot be combined with [`offload`](Self::offload).
    pub segment_file: Option<SegmentFile>,
    /// Counting of the operations of the client (`ClientStatus::metrics`, the endpoints of the
    /// feature `http`). The cost is a few additions per call.
    pub metrics: bool,
    /// Time between two summaries of the metrics in the log. Zero: no summaries.
    pub metrics_interval: Duration,
    /// Label `cluster_id` of the metrics of the client. Empty: no label.
    pub cluster_id: String,
    /// Preference for replicas with faster transports, among replicas on other hosts. Such replicas
    /// are then read first, and do not alternate with slower ones.
    pub score_replicas: bool,
    /// Memory for values that are often read from other clients. None by default.
    ///
    /// With a master of this project, a cached value is always the value that the response of the
    /// master describes. A master of Mooncake C++ does not distinguish values. A value that another
    /// client overwrites in place may then be read in its old state, unless values have checksums.
    pub hot_cache: HotCacheConfig,
    /// Disk for objects for which memory has no space. `None` by default. The disk requires the
    /// feature `disk` and a master with `--enable_offload`.
    pub offload: Option<OffloadConfig>,
    /// Prefetches of objects from disks to memory.
    pub prefetch: PrefetchConfig,
    /// Folders below which a master may name the folder for shared files (`--root_fs_dir`). Without
    /// them, the folder of the master or its parent must have a file `.mooncake-root`, or the
    /// folder must belong to this user and have the layout of earlier files.
    pub fs_roots: Vec<PathBuf>,
    /// Permissions of the shared files that this client writes (0640). Their folders get the same,
    /// and search for readers.
    pub file_mode: FileMode,
    /// Tenant of every key.
    pub tenant: String,
    /// Longest time of one operation, independent of other operations. The time includes RPCs to
    /// the master, connecting, transfers and retries.
    pub timeout: Duration,
    /// Longest time for which a put requests space again while the cluster is full, within
    /// [`timeout`](Self::timeout). Space becomes free when leases expire, other clients remove
    /// objects, or new clients offer memory. Zero: a single request.
    pub space_timeout: Duration,
    /// Longest time of [`connect`](super::ClientBuilder::connect).
    pub connect_timeout: Duration,
    /// Time for which a client that could not be reached is not tried again.
    pub peer_cooldown: Duration,
    /// Time between two heartbeats to the master.
    pub ping_interval: Duration,
    /// Ports to choose from if [`local_hostname`](Self::local_hostname) has none.
    pub ports: RangeInclusive<u16>,
    /// Clock of leases, deadlines and cooldowns.
    pub clock: SharedClock,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            local_hostname: "127.0.0.1".into(),
            metadata: "P2PHANDSHAKE".into(),
            directory: DirectoryOptions::default(),
            handshake: HandshakePort::default(),
            protocol: String::new(),
            advertise: None,
            address_check: AddressPolicy::default(),
            bind_address: String::new(),
            allowed_hosts: AllowedHosts::default(),
            segment: DEFAULT_BUFFER,
            local_buffer: DEFAULT_BUFFER,
            memory: HostMemoryOptions::default(),
            allow_overcommit: true,
            copy_in_process: true,
            share_memory: true,
            checksum: false,
            outlive_master: true,
            segment_file: None,
            metrics: true,
            metrics_interval: Duration::ZERO,
            cluster_id: String::new(),
            score_replicas: false,
            hot_cache: HotCacheConfig::default(),
            offload: None,
            prefetch: PrefetchConfig::default(),
            fs_roots: Vec::new(),
            file_mode: FileMode::GROUP_READ,
            tenant: DEFAULT_TENANT.into(),
            timeout: Duration::from_secs(5),
            space_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            peer_cooldown: Duration::from_secs(1),
            ping_interval: Duration::from_secs(1),
            ports: 12300..=14300,
            clock: SystemClock::shared(),
        }
    }
}

impl ClientConfig {
    /// Returns whether the client calls the master only.
    pub(crate) fn is_rpc_only(&self) -> bool {
        self.protocol == RPC_ONLY
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` with the name of the first invalid setting. Returns `NOT_SUPPORTED`
    /// for [`offload`](Self::offload) in a build without the feature `disk`.
    pub fn validate(&self) -> Result<()> {
        if host_port::split(&self.local_hostname).0.is_empty() {
            return Err(Error::invalid(format!(
                "local_hostname {:?} has no host; give `host` or `host:port`",
                self.local_hostname
            )));
        }
        if self.is_rpc_only() && (self.segment, self.local_buffer) != (0, 0) {
            return Err(Error::invalid(format!(
                "protocol {RPC_ONLY} has no memory. segment={} local_buffer={}; set both to 0",
                self.segment, self.local_buffer
            )));
        }
        if self.is_rpc_only() && self.offload.is_some() {
            return Err(Error::invalid(format!("offload: protocol {RPC_ONLY} has no disk")));
        }
        buffer_size("segment", self.segment, u64::MAX)?;
        buffer_size("local_buffer", self.local_buffer, MAX_LOCAL_BUFFER)?;
        buffer_size("hot_cache", self.hot_cache.bytes, MAX_LOCAL_BUFFER)?;
        if let Some(offload) = &self.offload {
            offload.validate()?;
            if !cfg!(feature = "disk") {
                let text = "offload: this build has no disks; it is made with the feature `disk`";
                return Err(Error::new(ErrorCode::NotSupported, text));
            }
        }
        if let Some(root) = self.fs_roots.iter().find(|root| !is_root_of_files(root)) {
            return Err(Error::invalid(format!(
                "cannot use fs_roots: a root must be an absolute path below / without `..`. root={}",
                root.display()
            )));
        }
        if self.segment_file.is_some()
            && (self.segment == 0 || !self.outlive_master || self.offload.is_some())
        {
            return Err(Error::invalid("segment_file: wants a segment, outlive_master, and no offload"));
        }
        for (name, value) in [
            ("timeout", self.timeout),
            ("connect_timeout", self.connect_timeout),
            ("ping_interval", self.ping_interval),
        ] {
            if value.is_zero() {
                return Err(Error::invalid(format!("{name} must be more than zero")));
            }
        }
        if self.timeout > MAX_TIMEOUT {
            return Err(Error::invalid(format!(
                "timeout {:?} is too long: after 30 s the master lets another client write \
                 a key whose write has not \
                 ended, so an operation ends within {MAX_TIMEOUT:?}",
                self.timeout
            )));
        }
        if self.ports.is_empty() || *self.ports.start() == 0 {
            return Err(Error::invalid(format!("port range {:?} is empty or starts at 0", self.ports)));
        }
        if self.tenant.is_empty() {
            return Err(Error::invalid("tenant must not be empty"));
        }
        Ok(())
    }
}

/// Returns whether a path may be in [`ClientConfig::fs_roots`].
pub(crate) fn is_root_of_files(path: &std::path::Path) -> bool {
    path.is_absolute()
        && path.file_name().is_some()
        && path.components().all(|part| part != Component::ParentDir)
}

/// Longest [`ClientConfig::timeout`]. No write is posted or ends later than this after its request
/// for space. Another client can write the key after 30 s. The space can be reused after 600 s.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(25);

fn buffer_size(name: &str, bytes: u64, max: u64) -> Result<()> {
    if bytes != 0 && !(MIN_BUFFER..=max).contains(&bytes) {
        return Err(Error::invalid(format!(
            "{name} of {bytes} bytes: give 0 for none, or {MIN_BUFFER} to {max}"
        )));
    }
    if usize::try_from(bytes).is_err() {
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("{name} of {bytes} bytes is not addressable"),
        ));
    }
    Ok(())
}

/// Returns the name by which the master knows a host: the name without its port. The result is
/// empty for names that mean the local host on every machine.
pub fn host_id(local_hostname: &str) -> &str {
    match host_port::split(local_hostname).0 {
        "localhost" | "127.0.0.1" | "0.0.0.0" | "::1" | "::" => "",
        host => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_names_identify_no_host() {
        assert_eq!(host_id("node:7"), "node");
        for local in ["localhost", "127.0.0.1:5", "[::1]:5", "0.0.0.0:1", "[::]:2"] {
            assert_eq!(host_id(local), "", "{local}");
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let good = ClientConfig::default();
        good.validate().unwrap();
        let cases: [(ClientConfig, &str); 9] = [
            (
                ClientConfig {
                    hot_cache: HotCacheConfig { bytes: 7, ..HotCacheConfig::default() },
                    ..good.clone()
                },
                "hot_cache",
            ),
            (ClientConfig { segment: 1, ..good.clone() }, "segment"),
            (ClientConfig { local_buffer: 1023, ..good.clone() }, "local_buffer"),
            (ClientConfig { local_buffer: MAX_LOCAL_BUFFER + 1, ..good.clone() }, "local_buffer"),
            (ClientConfig { timeout: Duration::ZERO, ..good.clone() }, "timeout"),
            (ClientConfig { timeout: Duration::from_secs(30), ..good.clone() }, "too long"),
            (ClientConfig { local_hostname: ":7".into(), ..good.clone() }, "no host"),
            (ClientConfig { ports: 0..=9, ..good.clone() }, "port range"),
            (ClientConfig { tenant: String::new(), ..good.clone() }, "tenant"),
        ];
        for (config, word) in cases {
            let error = config.validate().unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidParams);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
