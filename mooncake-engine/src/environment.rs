//! Environment variables of Mooncake C++'s transfer engine. No other file of the crate reads the
//! environment, and this one only for [`TransferEngineBuilder::environment`] and [`log_level`].

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_transport::config::{Framing, RdmaConfig, TcpConfig};
use mooncake_transport::net::DEFAULT_PORTS;

use crate::engine::TransferEngineBuilder;
use crate::summary::log_filter;

/// Ports that the kernel uses for outgoing connections.
const OUTGOING: RangeInclusive<u16> = 32768..=60999;

/// Variable with all its names.
pub struct Variable {
    /// Name, and older names. The first one that is set is used.
    pub names: &'static [&'static str],
    /// Default value.
    pub default: &'static str,
    /// Effect, in a sentence.
    pub effect: &'static str,
    set: fn(&mut TransferEngineBuilder, &str) -> Result<(), String>,
}

impl fmt::Debug for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names[0])
    }
}

const fn variable(
    names: &'static [&'static str],
    default: &'static str,
    effect: &'static str,
    set: fn(&mut TransferEngineBuilder, &str) -> Result<(), String>,
) -> Variable {
    Variable { names, default, effect, set }
}

/// Every variable of the engine.
pub const VARIABLES: &[Variable] = &[
    variable(
        &["MC_TRANSFER_TIMEOUT"],
        "30",
        "Timeout of a transfer in seconds, at least 5, plus a nanosecond per byte",
        |engine, text| {
            let seconds: u64 = parse(text)?;
            engine.timeout = Duration::from_secs(seconds.max(5));
            Ok(())
        },
    ),
    variable(
        &["MC_SLICE_TIMEOUT"],
        "",
        "Maximum timeout of a transfer in seconds (1 to 65535), whatever its size",
        |engine, text| {
            engine.longest = Some(Duration::from_secs(within(text, 1, 65535)?));
            Ok(())
        },
    ),
    variable(
        &["MC_LEGACY_RPC_PORT_BINDING"],
        "",
        "Use the port in the name of the engine as handshake port (random without one), and its host as published address",
        |engine, _| {
            engine.port_of_name = true;
            Ok(())
        },
    ),
    variable(
        &["MC_TCP_BIND_ADDRESS"],
        "first address of an active interface",
        "Published address; with P2PHANDSHAKE the address in the name of the engine is used; ports listen on all addresses",
        |engine, text| {
            let address: std::net::IpAddr = parse(text)?;
            engine.told = Some(address.to_string());
            Ok(())
        },
    ),
    variable(
        &["MC_USE_IPV6"],
        "",
        "Use IPv6 for the handshake port and the published address",
        |engine, _| {
            engine.ipv6 = true;
            Ok(())
        },
    ),
    variable(
        &["MC_HANDSHAKE_PORT"],
        "12001",
        "Handshake port of a peer whose name has none",
        |engine, text| {
            engine.handshake.limits.default_port = within(text, 1, 65535)?;
            Ok(())
        },
    ),
    variable(
        &["MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT"],
        "15000",
        "First port of the range for handshake and data ports; at least 1024, not 32768 to 60999, not above the last",
        |engine, text| {
            engine.ports.0 = Some(listening(text)?);
            Ok(())
        },
    ),
    variable(
        &["MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT"],
        "17000",
        "Last port of the range for handshake and data ports",
        |engine, text| {
            engine.ports.1 = Some(listening(text)?);
            Ok(())
        },
    ),
    variable(
        &["MC_HANDSHAKE_CONNECT_TIMEOUT"],
        "5",
        "Timeout of a connection to a handshake port in seconds (1 to 3599)",
        |engine, text| {
            engine.handshake.limits.connect_timeout = Duration::from_secs(within(text, 1, 3599)?);
            Ok(())
        },
    ),
    variable(
        &["MC_HANDSHAKE_MAX_LENGTH"],
        "1048576",
        "Maximum size of a handshake message in bytes (1048576 to 134217728)",
        |engine, text| {
            let bytes: u64 = within(text, 1 << 20, 128 << 20)?;
            engine.handshake.limits.max_len = usize::try_from(bytes).map_err(|e| e.to_string())?;
            Ok(())
        },
    ),
    variable(
        &["MC_METADATA_CLUSTER_ID"],
        "",
        "Cluster id in the keys of a metadata service that several clusters share",
        |engine, text| {
            engine.options.cluster_id = text.into();
            Ok(())
        },
    ),
    variable(&["MC_REDIS_USERNAME"], "", "User of the metadata service in Redis", |engine, text| {
        engine.options.redis.username = text.into();
        Ok(())
    }),
    variable(&["MC_REDIS_PASSWORD"], "", "Password of the metadata service in Redis", |engine, text| {
        engine.options.redis.password = text.into();
        Ok(())
    }),
    variable(&["MC_REDIS_DB_INDEX"], "0", "Database number in Redis (0 to 255)", |engine, text| {
        engine.options.redis.database = parse(text)?;
        Ok(())
    }),
    variable(
        &["MC_DISABLE_METACACHE"],
        "",
        "Look up a segment each time it is opened, not once",
        |engine, _| {
            engine.caches = false;
            Ok(())
        },
    ),
    variable(
        &["MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"],
        "0",
        "Seconds between two refreshes of all opened segments; 0 for none",
        |engine, text| {
            let seconds: u32 = parse(text)?;
            engine.refresh = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            Ok(())
        },
    ),
    variable(&["MC_FORCE_TCP"], "", "Use TCP only, unless 0, false, no or off", |engine, text| {
        engine.force_tcp = !is_off(text);
        Ok(())
    }),
    variable(
        &["MC_FORCE_HCA"],
        "",
        "Use RDMA, and fail without it, unless 0, false, no or off; `MC_FORCE_TCP` takes precedence",
        |engine, text| {
            engine.force_rdma = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_FORCE_MNNVL"],
        "",
        "Use NVLink for every protocol, also to other hosts of the NVLink fabric, unless 0, false, no or off",
        |engine, text| {
            engine.gpu.force = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK"],
        "",
        "Use NVLink within hosts only, by CUDA IPC; the protocol in descriptors is `nvlink_intra`",
        |engine, text| {
            engine.gpu.intra_node = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_USE_NVLINK_IPC"],
        "",
        "Use CUDA IPC where memory could be opened to the fabric",
        |engine, text| {
            engine.gpu.ipc = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_CUSTOM_TOPO_JSON"],
        "",
        "File with the distances of devices and memory, in place of discovery",
        |engine, text| {
            engine.topology_file = Some(text.into());
            Ok(())
        },
    ),
    variable(
        &["MC_TE_FILTERS", "MC_MS_FILTERS"],
        "",
        "RDMA devices to use, with commas between them; all if empty",
        |engine, text| {
            engine.discovery = std::mem::take(&mut engine.discovery).only(text.split(','));
            Ok(())
        },
    ),
    variable(&["MC_TE_FILTERS_EXCLUDE"], "", "RDMA devices not to use", |engine, text| {
        engine.discovery = std::mem::take(&mut engine.discovery).without(text.split(','));
        Ok(())
    }),
    variable(&["MC_TE_METRIC"], "", "Log metrics periodically: 1, true, yes or on", |engine, text| {
        engine.summary = ["1", "true", "yes", "on"].iter().any(|on| text.eq_ignore_ascii_case(on));
        Ok(())
    }),
    variable(
        &["MC_TE_METRIC_INTERVAL_SECONDS"],
        "5",
        "Seconds between two lines of metrics (1 to 86400)",
        |engine, text| {
            engine.summary_interval = Duration::from_secs(within(text, 1, 86400)?);
            Ok(())
        },
    ),
    variable(&["MC_TCP_PROTO"], "", "1: use the older framing without acknowledgements", |engine, text| {
        tcp(engine).framing = if text == "1" { Framing::Plain } else { Framing::Acknowledged };
        Ok(())
    }),
    variable(
        &["MC_TCP_STATUS_TIMEOUT_SEC"],
        "30",
        "Seconds without a byte of the response after which a peer has failed",
        |engine, text| {
            tcp(engine).answer_timeout = Duration::from_secs(within(text, 1, 86400)?);
            Ok(())
        },
    ),
    variable(
        &["MC_TCP_PROGRESS_TIMEOUT_SEC"],
        "30",
        "Seconds that a peer may pause inside a request",
        |engine, text| {
            tcp(engine).progress_timeout = Duration::from_secs(within(text, 1, 86400)?);
            Ok(())
        },
    ),
    variable(
        &["MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER"],
        "4",
        "Maximum number of connections to one peer (1 to 16)",
        |engine, text| {
            tcp(engine).connections = within(text, 1, 16)?;
            Ok(())
        },
    ),
    variable(
        &["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"],
        "65536",
        "Maximum number of queued transfers per connection (1 to 65536); more are refused",
        |engine, text| {
            tcp(engine).max_queued = within(text, 1, 65536)?;
            Ok(())
        },
    ),
    variable(
        &["MC_GID_INDEX", "NCCL_IB_GID_INDEX"],
        "-1",
        "GID index of the RDMA port (0 to 255); -1 selects one",
        |engine, text| {
            let index: i16 = within(text, -1, 255)?;
            rdma(engine).gid_index = u8::try_from(index).ok();
            Ok(())
        },
    ),
    variable(
        &["MC_AUTO_GID_MAX_RETRIES"],
        "2",
        "Number of other addresses to try (0 to 16) if the selected one has no path",
        |engine, text| {
            rdma(engine).gid_retries = within(text, 0, 16)?;
            Ok(())
        },
    ),
    variable(&["MC_IB_PORT"], "1", "Port (1 to 255) of each RDMA device", |engine, text| {
        rdma(engine).port = within(text, 1, 255)?;
        Ok(())
    }),
    variable(
        &["MC_MTU"],
        "4096",
        "Largest RDMA packet in bytes (512, 1024, 2048 or 4096), limited by the port",
        |engine, text| {
            let bytes: u32 = parse(text)?;
            if ![512, 1024, 2048, 4096].contains(&bytes) {
                return Err(format!("{bytes} is not 512, 1024, 2048 or 4096"));
            }
            rdma(engine).mtu = bytes;
            Ok(())
        },
    ),
    variable(&["MC_PKEY_INDEX"], "0", "Index of the partition key", |engine, text| {
        rdma(engine).pkey_index = parse(text)?;
        Ok(())
    }),
    variable(&["MC_IB_TC"], "-1", "Traffic class (0 to 255) of RDMA packets; -1 is 0", |engine, text| {
        let class: i16 = within(text, -1, 255)?;
        rdma(engine).traffic_class = u8::try_from(class).unwrap_or(0);
        Ok(())
    }),
    variable(&["MC_IB_SL"], "-1", "Service level (0 to 15) of RDMA packets; -1 is 0", |engine, text| {
        let level: i16 = within(text, -1, 15)?;
        rdma(engine).service_level = u8::try_from(level).unwrap_or(0);
        Ok(())
    }),
    variable(
        &["MC_NUM_QP_PER_EP"],
        "2",
        "Queue pairs of a connection (1 to 255); peers must have as many",
        |engine, text| {
            rdma(engine).pairs = within(text, 1, 255)?;
            Ok(())
        },
    ),
    variable(
        &["MC_MAX_WR"],
        "256",
        "Requests in a queue pair (1 to 65535), limited by the device",
        |engine, text| {
            rdma(engine).requests = within(text, 1, 65535)?;
            Ok(())
        },
    ),
    variable(
        &["MC_MAX_CQE_PER_CTX"],
        "4096",
        "Requests in flight on an RDMA device (1 to 4194304), limited by its completion queue",
        |engine, text| {
            rdma(engine).completions = within(text, 1, 4 << 20)?;
            Ok(())
        },
    ),
    variable(
        &["MC_MAX_EP_PER_CTX"],
        "65536",
        "Connections of an RDMA device (1 to 65536), limited by the device; the least recently used one is evicted",
        |engine, text| {
            rdma(engine).max_endpoints = within(text, 1, 65536)?;
            Ok(())
        },
    ),
    variable(
        &["MC_SLICE_SIZE"],
        "65536",
        "Size of an RDMA message in bytes (1 to 1 GiB); a remainder of up to a quarter joins the previous message",
        |engine, text| {
            let rdma = rdma(engine);
            rdma.slice_bytes = within(text, 1, 1 << 30)?;
            rdma.fragment_bytes = rdma.slice_bytes / 4;
            Ok(())
        },
    ),
    variable(
        &["MC_FRAGMENT_RATIO"],
        "4",
        "Divisor of the message size that gives the largest joined remainder (1 to 65535)",
        |engine, text| {
            let rdma = rdma(engine);
            rdma.fragment_bytes = rdma.slice_bytes / within(text, 1, 65535)?;
            Ok(())
        },
    ),
    variable(
        &["MC_RETRY_CNT"],
        "9",
        "Retries of a message that an RDMA device has given up, on the same or another path (1 to 127)",
        |engine, text| {
            rdma(engine).attempts = within(text, 1, 127)?;
            Ok(())
        },
    ),
    variable(
        &["MC_RDMA_RAIL_PAUSE_SECONDS"],
        "30",
        "Seconds that a failed path rests while there is another (1 to 3599)",
        |engine, text| {
            rdma(engine).rail_pause = Duration::from_secs(within(text, 1, 3599)?);
            Ok(())
        },
    ),
    variable(
        &["MC_CONN_PAUSE_TTL_MS"],
        "0",
        "Milliseconds without a new attempt on a path whose connection failed (0 to 600000); requests for it fail at once",
        |engine, text| {
            rdma(engine).connect_pause = Duration::from_millis(within(text, 0, 600_000)?);
            Ok(())
        },
    ),
    variable(
        &["MC_ENABLE_HCA_PEER_AFFINITY"],
        "",
        "Use `MC_NIC_PEER_AFFINITY`, unless 0, false, no or off",
        |engine, text| {
            engine.partners.0 = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_NIC_PEER_AFFINITY"],
        "",
        "Preferred remote devices, `local=remote,remote;local=remote`; without an entry, the device of the same name",
        |engine, text| {
            engine.partners.1 = partners(text)?;
            Ok(())
        },
    ),
    variable(
        &["MC_IB_PCI_RELAXED_ORDERING"],
        "1",
        "Allow relaxed ordering where devices support it; 0 forbids it (1 and 2 are equal here)",
        |engine, text| {
            rdma(engine).relaxed_ordering = within(text, 0, 2)? != 0;
            Ok(())
        },
    ),
    variable(
        &["MC_MAX_MR_SIZE"],
        "1099511627776",
        "Maximum size of one registration in bytes (at least 4096), limited by the device; longer memory is registered in parts",
        |engine, text| {
            rdma(engine).region_bytes = within(text, 4096, u64::MAX)?;
            Ok(())
        },
    ),
    variable(
        &["MC_RDMA_BIND_ADDRESS"],
        "",
        "Address of the handshake port for RDMA peers, if it differs from the published one",
        |engine, text| {
            let address: std::net::IpAddr = parse(text)?;
            rdma(engine).server_name = address.to_string();
            Ok(())
        },
    ),
];

/// Returns the log filter of a program, for `tracing_subscriber::EnvFilter`: the level of
/// `MC_LOG_LEVEL` (`TRACE`, `DEBUG`, `INFO`, `WARNING` or `ERROR`; warnings without it), and the
/// summaries of `MC_TE_METRIC`.
#[allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]
pub fn log_level() -> String {
    level_of(&std::env::var("MC_LOG_LEVEL").unwrap_or_default())
}

fn level_of(text: &str) -> String {
    let known =
        ["trace", "debug", "info", "error"].into_iter().find(|level| text.eq_ignore_ascii_case(level));
    log_filter(known.unwrap_or("warn"))
}

impl TransferEngineBuilder {
    /// Applies the environment of this process. It overrides earlier settings, and later settings
    /// override it. An invalid value is logged and ignored.
    ///
    /// Variables of transports apply to those selected by name, not to
    /// [`transports`](Self::transports).
    #[allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]
    pub fn environment(self) -> Self {
        self.environment_of(|name| std::env::var(name).ok())
    }

    /// Applies the variables that `get` returns.
    pub fn environment_of(mut self, get: impl Fn(&str) -> Option<String>) -> Self {
        for variable in VARIABLES {
            // An empty variable counts as unset.
            let set =
                variable.names.iter().find_map(|name| Some((name, get(name).filter(|v| !v.is_empty())?)));
            let Some((name, value)) = set else { continue };
            if let Err(error) = (variable.set)(&mut self, &value) {
                tracing::warn!("{name}={value} is ignored: {error}");
            }
        }
        self
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

fn partners(text: &str) -> Result<Vec<(String, Vec<String>)>, String> {
    let entries = text.split(';').map(str::trim).filter(|entry| !entry.is_empty());
    let entry = |entry: &str| {
        let (ours, theirs) = entry.split_once('=')?;
        let theirs = theirs.split(',').map(str::trim).filter(|name| !name.is_empty());
        let theirs: Vec<String> = theirs.map(str::to_owned).collect();
        (!ours.trim().is_empty() && !theirs.is_empty()).then(|| (ours.trim().to_owned(), theirs))
    };
    let said = |text: &str| format!("{text:?} is not `ours=theirs,theirs`");
    entries.map(|text| entry(text).ok_or_else(|| said(text))).collect()
}

fn parse<T: FromStr<Err: fmt::Display>>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|error: T::Err| error.to_string())
}

fn within<T: FromStr<Err: fmt::Display> + PartialOrd + fmt::Display>(
    text: &str,
    least: T,
    most: T,
) -> Result<T, String> {
    let value = parse::<T>(text)?;
    if value < least || value > most {
        return Err(format!("{value} is not from {least} to {most}"));
    }
    Ok(value)
}

fn listening(text: &str) -> Result<u16, String> {
    let port = within(text, 1024, 65535)?;
    if OUTGOING.contains(&port) {
        return Err(format!("{port} is one of the ports that outgoing connections get"));
    }
    Ok(port)
}

fn is_off(text: &str) -> bool {
    ["0", "false", "no", "off"].iter().any(|off| text.eq_ignore_ascii_case(off))
}

#[cfg(test)]
mod tests;
