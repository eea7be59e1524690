//! Environment variables of Mooncake C++'s transfer engine, for
//! [`TransferEngineBuilder::environment`] and [`log_level`].

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use mooncake_core::settings::values::{
    LONGEST_TIME, Parsed, any, bytes_within, millis_within, number, optional, seconds_within, switch,
    unless_off, within,
};
use mooncake_core::settings::{Environment, Setting, apply};
use mooncake_core::{set, settings};
use mooncake_transport::config::{Framing, RdmaConfig, TcpConfig};
use mooncake_transport::net::DEFAULT_PORTS;
use mooncake_transport::topology::Discovery;

use crate::engine::TransferEngineBuilder;
use crate::summary::log_filter;

/// Ports that the kernel uses for outgoing connections.
const OUTGOING: RangeInclusive<u16> = 32768..=60999;

/// Every variable of the engine.
pub const VARIABLES: &[Setting<TransferEngineBuilder>] = settings! {
    /// Timeout of a transfer in seconds, at least 5, plus a nanosecond per byte
    MC_TRANSFER_TIMEOUT: "30"
        => set!(|engine, text| engine.timeout = seconds_within(text, 0, LONGEST_TIME.as_secs())?.max(Duration::from_secs(5))),
    /// Maximum timeout of a transfer in seconds (1 to 65535), whatever its size
    MC_SLICE_TIMEOUT: "" => set!(|engine, text| engine.max_timeout = Some(seconds_within(text, 1, 65535)?)),
    /// Limit of the bytes that incomplete requests and unread responses take at all ports of the
    /// process, at least 1MB; 256MB without it, or a 16th of the memory if that is less
    MC_CONNECTION_BYTES: ""
        => set!(|engine, text| engine.connection_bytes = Some(connection_bytes(text)?)),
    /// Use the port in the name of the engine as handshake port (random without one), and its host
    /// as published address, unless off
    MC_LEGACY_RPC_PORT_BINDING: "" => set!(port_of_name = unless_off),
    /// Address of this host at which every port of an engine or a client listens; 0.0.0.0 or :: for
    /// all; if empty, loopback for a loopback name, else all
    MC_BIND_ADDRESS: "" => set!(bind_address = any),
    /// Published address; with P2PHANDSHAKE the address in the name of the engine is used. Ports
    /// listen at `MC_BIND_ADDRESS`
    MC_TCP_BIND_ADDRESS: "first address of an active interface"
        => set!(|engine, text| engine.published_host = Some(address(text)?)),
    /// Use IPv6 for the handshake port and the published address, unless off
    MC_USE_IPV6: "" => set!(handshake.ipv6 = unless_off),
    /// Handshake port of a peer whose name has none
    MC_HANDSHAKE_PORT: "12001"
        => set!(|engine, text| engine.handshake.limits.default_port = within(text, 1, 65535)?),
    /// First port of the range for handshake and data ports; at least 1024, not 32768 to 60999, not
    /// above the last
    MC_MIN_RPC_PORT | MC_MIN_PRC_PORT: "15000"
        => set!(|engine, text| engine.ports.0 = Some(listening(text)?)),
    /// Last port of the range for handshake and data ports
    MC_MAX_RPC_PORT | MC_MAX_PRC_PORT: "17000"
        => set!(|engine, text| engine.ports.1 = Some(listening(text)?)),
    /// Timeout of a connection to a handshake port in seconds (1 to 3599)
    MC_HANDSHAKE_CONNECT_TIMEOUT: "5"
        => set!(|engine, text| engine.handshake.limits.connect_timeout = seconds_within(text, 1, 3599)?),
    /// Maximum size of a handshake message in bytes (1048576 to 134217728)
    MC_HANDSHAKE_MAX_LENGTH: "1048576"
        => set!(|engine, text| engine.handshake.limits.max_len = bytes_within(text, 1 << 20, 128 << 20)?),
    /// Cluster id in the keys of a metadata service that several clusters share
    MC_METADATA_CLUSTER_ID: "" => set!(options.cluster_id = any),
    /// User of the metadata service in Redis
    MC_REDIS_USERNAME: "" => set!(options.redis.username = any),
    /// Password of the metadata service in Redis
    MC_REDIS_PASSWORD: "" => set!(options.redis.password = any),
    /// Database number in Redis (0 to 255)
    MC_REDIS_DB_INDEX: "0" => set!(options.redis.database = number),
    /// Token of the metadata service over HTTP
    MC_METADATA_HTTP_TOKEN: "" => set!(options.token = any),
    /// Look up a segment each time it is opened, not once, unless off
    MC_DISABLE_METACACHE: "" => set!(|engine, text| engine.cache_descriptors = !unless_off(text)?),
    /// Seconds between two refreshes of all opened segments; 0 for none
    MC_TE_METADATA_REFRESH_INTERVAL_SECONDS: "0"
        => set!(|engine, text| engine.refresh = Some(seconds_within(text, 0, u32::MAX.into())?).filter(|time| !time.is_zero())),
    /// Use TCP only, unless off
    MC_FORCE_TCP: "" => set!(force_tcp = unless_off),
    /// Use RDMA, and fail without it, unless off; `MC_FORCE_TCP` takes precedence
    MC_FORCE_HCA: "" => set!(force_rdma = unless_off),
    /// Use NVLink for every protocol, also to other hosts of the NVLink fabric, unless off
    MC_FORCE_MNNVL: "" => set!(gpu.force = unless_off),
    /// Use NVLink within hosts only, by CUDA IPC; the protocol in descriptors is `nvlink_intra`
    MC_INTRANODE_NVLINK | MC_INTRA_NVLINK: "" => set!(gpu.intra_node = unless_off),
    /// Use CUDA IPC where memory could be opened to the fabric
    MC_USE_NVLINK_IPC: "" => set!(gpu.ipc = unless_off),
    /// File with the distances of devices and memory, in place of discovery
    MC_CUSTOM_TOPO_JSON: "" => set!(topology_file = optional),
    /// RDMA devices to use, with commas between them; all if empty
    MC_TE_FILTERS | MC_MS_FILTERS: ""
        => set!(|engine, text| engine.discovery = std::mem::take(&mut engine.discovery).only(text.split(','))),
    /// RDMA devices not to use
    MC_TE_FILTERS_EXCLUDE: ""
        => set!(|engine, text| engine.discovery = std::mem::take(&mut engine.discovery).without(text.split(','))),
    /// Log metrics periodically
    MC_TE_METRIC: "" => set!(summary = switch),
    /// Seconds between two lines of metrics (1 to 86400)
    MC_TE_METRIC_INTERVAL_SECONDS: "5"
        => set!(|engine, text| engine.summary_interval = seconds_within(text, 1, 86400)?),
    /// 1: use the older framing without acknowledgements
    MC_TCP_PROTO: ""
        => set!(|engine, text| tcp(engine).framing = if text == "1" { Framing::Plain } else { Framing::Acknowledged }),
    /// Seconds without a byte of the response after which a peer has failed
    MC_TCP_STATUS_TIMEOUT_SEC: "30"
        => set!(|engine, text| tcp(engine).response_timeout = seconds_within(text, 1, 86400)?),
    /// Seconds that a peer may pause inside a request
    MC_TCP_PROGRESS_TIMEOUT_SEC: "30"
        => set!(|engine, text| tcp(engine).progress_timeout = seconds_within(text, 1, 86400)?),
    /// Maximum number of connections to one peer (1 to 16)
    MC_TCP_LANES_PER_PEER | MC_TCP_MAX_CONNECTIONS_PER_PEER: "4"
        => set!(|engine, text| tcp(engine).connections = within(text, 1, 16)?),
    /// Maximum number of queued transfers per connection (1 to 16777216); more are refused
    MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER: "16777216"
        => set!(|engine, text| tcp(engine).max_queued = within(text, 1, 1 << 24)?),
    /// GID index of the RDMA port (0 to 255); -1 selects one
    MC_GID_INDEX | NCCL_IB_GID_INDEX: "-1"
        => set!(|engine, text| rdma(engine).gid_index = u8::try_from(within::<i16>(text, -1, 255)?).ok()),
    /// Number of other addresses to try (0 to 16) if the selected one has no path
    MC_AUTO_GID_MAX_RETRIES: "2" => set!(|engine, text| rdma(engine).gid_retries = within(text, 0, 16)?),
    /// Port (1 to 255) of each RDMA device
    MC_IB_PORT: "1" => set!(|engine, text| rdma(engine).port = within(text, 1, 255)?),
    /// Largest RDMA packet in bytes (512, 1024, 2048 or 4096), limited by the port
    MC_MTU: "4096" => set!(|engine, text| rdma(engine).mtu = mtu(text)?),
    /// Index of the partition key
    MC_PKEY_INDEX: "0" => set!(|engine, text| rdma(engine).pkey_index = number(text)?),
    /// Traffic class (0 to 255) of RDMA packets; -1 is 0
    MC_IB_TC: "-1"
        => set!(|engine, text| rdma(engine).traffic_class = u8::try_from(within::<i16>(text, -1, 255)?).unwrap_or(0)),
    /// Service level (0 to 15) of RDMA packets; -1 is 0
    MC_IB_SL: "-1"
        => set!(|engine, text| rdma(engine).service_level = u8::try_from(within::<i16>(text, -1, 15)?).unwrap_or(0)),
    /// Queue pairs of a connection (1 to 255); peers must have as many
    MC_NUM_QP_PER_EP: "2" => set!(|engine, text| rdma(engine).pairs = within(text, 1, 255)?),
    /// Requests in a queue pair (1 to 65535), limited by the device
    MC_MAX_WR: "256" => set!(|engine, text| rdma(engine).requests = within(text, 1, 65535)?),
    /// Requests in flight on an RDMA device (1 to 4194304), limited by its completion queue
    MC_MAX_CQE_PER_CTX: "4096" => set!(|engine, text| rdma(engine).completions = within(text, 1, 4 << 20)?),
    /// Connections of an RDMA device (1 to 65536), limited by the device; the least recently used
    /// one is evicted
    MC_MAX_EP_PER_CTX: "65536" => set!(|engine, text| rdma(engine).max_endpoints = within(text, 1, 65536)?),
    /// Size of an RDMA message in bytes (1 to 1 GiB); a remainder of up to a quarter joins the
    /// previous message
    MC_SLICE_SIZE: "65536" => set!(|engine, text| {
        let rdma = rdma(engine);
        rdma.slice_bytes = bytes_within(text, 1, 1 << 30)?;
        rdma.fragment_bytes = rdma.slice_bytes / 4;
    }),
    /// Divisor of the message size that gives the largest joined remainder (1 to 65535)
    MC_FRAGMENT_RATIO: "4" => set!(|engine, text| {
        let rdma = rdma(engine);
        rdma.fragment_bytes = rdma.slice_bytes / within(text, 1, 65535)?;
    }),
    /// Retries of a message that an RDMA device has given up, on the same or another path (1 to
    /// 127)
    MC_RETRY_CNT: "9" => set!(|engine, text| rdma(engine).attempts = within(text, 1, 127)?),
    /// Seconds that a failed path rests while there is another (1 to 3599)
    MC_RDMA_RAIL_PAUSE_SECONDS: "30" => set!(|engine, text| rdma(engine).rail_pause = seconds_within(text, 1, 3599)?),
    /// Milliseconds without a new attempt on a path whose connection failed (0 to 600000); requests
    /// for it fail at once
    MC_CONN_PAUSE_TTL_MS: "0"
        => set!(|engine, text| rdma(engine).connect_pause = millis_within(text, 0, 600_000)?),
    /// Use `MC_NIC_PEER_AFFINITY`, unless off
    MC_ENABLE_HCA_PEER_AFFINITY: "" => set!(|engine, text| engine.partners.0 = unless_off(text)?),
    /// Preferred remote devices, `local=remote,remote;local=remote`; without an entry, the device
    /// of the same name
    MC_NIC_PEER_AFFINITY: "" => set!(|engine, text| engine.partners.1 = partners(text)?),
    /// Allow relaxed ordering where devices support it; 0 forbids it (1 and 2 are equal here)
    MC_IB_PCI_RELAXED_ORDERING: "1"
        => set!(|engine, text| rdma(engine).relaxed_ordering = within(text, 0, 2)? != 0),
    /// Maximum size of one registration in bytes (at least 4096), limited by the device; longer
    /// memory is registered in parts
    MC_MAX_MR_SIZE: "1099511627776"
        => set!(|engine, text| rdma(engine).region_bytes = bytes_within(text, 4096, u64::MAX)?),
    /// Address of the handshake port for RDMA peers, if it differs from the published one
    MC_RDMA_BIND_ADDRESS: "" => set!(|engine, text| rdma(engine).server_name = address(text)?),
};

/// Returns the log filter of a program, for `tracing_subscriber::EnvFilter`: the level of
/// `MC_LOG_LEVEL` (`TRACE`, `DEBUG`, `INFO`, `WARNING` or `ERROR`; warnings without it), and the
/// summaries of `MC_TE_METRIC`.
pub fn log_level() -> String {
    level_of(Environment::of_process().get("MC_LOG_LEVEL").unwrap_or_default())
}

/// Returns a warning if `MC_LOG_LEVEL` names no level, for the log that the variable configures.
pub fn unknown_log_level() -> Option<String> {
    unknown_level(Environment::of_process().get("MC_LOG_LEVEL")?)
}

fn unknown_level(text: &str) -> Option<String> {
    let is_known = parse_level(text).is_some()
        || ["", "warn", "warning"].iter().any(|level| text.eq_ignore_ascii_case(level));
    (!is_known).then(|| {
        format!("MC_LOG_LEVEL={text} is ignored: must be TRACE, DEBUG, INFO, WARNING or ERROR; using WARNING")
    })
}

fn parse_level(text: &str) -> Option<&'static str> {
    ["trace", "debug", "info", "error"].into_iter().find(|level| text.eq_ignore_ascii_case(level))
}

fn level_of(text: &str) -> String {
    log_filter(parse_level(text).unwrap_or("warn"))
}

impl TransferEngineBuilder {
    /// Applies the environment of this process. It overrides earlier settings, and later settings
    /// override it. An invalid value is logged and ignored.
    ///
    /// Variables of transports apply to those selected by name, not to
    /// [`transports`](Self::transports).
    pub fn environment(self) -> Self {
        self.environment_of(&Environment::of_process())
    }

    /// Applies an environment, as [`environment`](Self::environment).
    pub fn environment_of(mut self, environment: &Environment) -> Self {
        for ignored in apply(VARIABLES, &mut self, environment) {
            tracing::warn!("{ignored}");
        }
        self
    }

    /// Returns the discovery of devices, and the file that replaces it, if there is one.
    pub fn topology_source(self) -> (Discovery, Option<PathBuf>) {
        (self.discovery, self.topology_file)
    }

    /// Returns the ports to choose from, if valid ones are set.
    pub(crate) fn drawn_ports(&self) -> Option<RangeInclusive<u16>> {
        let (first, last) = match self.ports {
            (None, None) => return None,
            (first, last) => (first.unwrap_or(*DEFAULT_PORTS.start()), last.unwrap_or(*DEFAULT_PORTS.end())),
        };
        if first > last {
            tracing::warn!("ports {first} to {last} are ignored: the first is above the last");
            return None;
        }
        Some(first..=last)
    }
}

fn rdma(engine: &mut TransferEngineBuilder) -> &mut RdmaConfig {
    engine.rdma.get_or_insert_default()
}

fn tcp(engine: &mut TransferEngineBuilder) -> &mut TcpConfig {
    engine.tcp.get_or_insert_default()
}

fn partners(text: &str) -> Parsed<Vec<(String, Vec<String>)>> {
    let entries = text.split(';').map(str::trim).filter(|entry| !entry.is_empty());
    let entry = |entry: &str| {
        let (local, remote) = entry.split_once('=')?;
        let remote = remote.split(',').map(str::trim).filter(|name| !name.is_empty());
        let remote: Vec<String> = remote.map(str::to_owned).collect();
        (!local.trim().is_empty() && !remote.is_empty()).then(|| (local.trim().to_owned(), remote))
    };
    let syntax_error = |text: &str| format!("{text:?} is not `ours=theirs,theirs`");
    entries.map(|text| entry(text).ok_or_else(|| syntax_error(text))).collect()
}

fn connection_bytes(text: &str) -> Parsed<u64> {
    bytes_within(text, 1 << 20, u64::MAX)
}

fn address(text: &str) -> Parsed<String> {
    number::<IpAddr>(text).map(|address| address.to_string())
}

fn mtu(text: &str) -> Parsed<u32> {
    let bytes = number(text)?;
    if ![512, 1024, 2048, 4096].contains(&bytes) {
        return Err(format!("{bytes} is not 512, 1024, 2048 or 4096"));
    }
    Ok(bytes)
}

fn listening(text: &str) -> Parsed<u16> {
    let port = within(text, 1024, 65535)?;
    if OUTGOING.contains(&port) {
        return Err(format!("{port} is one of the ports that outgoing connections get"));
    }
    Ok(port)
}

#[cfg(test)]
mod tests;
