//! The environment: the variables of the existing transfer engine that mean something here. No other file of the crate reads it.
//!
//! Nothing is read unless the builder is told so ([`TransferEngineBuilder::environment`]).

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use mooncake_core::{Error, Result};
#[cfg(feature = "transport-rdma")]
use mooncake_rdma::RdmaConfig;
#[cfg(feature = "transport-tcp")]
use mooncake_tcp::{Framing, TcpConfig};
use mooncake_transport::net::DEFAULT_PORTS;

use crate::engine::TransferEngineBuilder;
use crate::summary::log_filter;

/// Ports that the kernel gives to outgoing connections, where a listener could be in their way.
const OUTGOING: RangeInclusive<u16> = 32768..=60999;

/// One setting, under all its names.
pub struct Variable {
    /// The name, and older ones; the first that is set counts.
    pub names: &'static [&'static str],
    /// What holds without it.
    pub default: &'static str,
    /// What it does, in a sentence.
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

/// Every variable that is read.
pub const VARIABLES: &[Variable] = &[
    variable(
        &["MC_TRANSFER_TIMEOUT"],
        "30",
        "Seconds that a transfer may take, 5 at least, beside a nanosecond per byte",
        |engine, text| {
            let seconds: u64 = parse(text)?;
            engine.timeout = Duration::from_secs(seconds.max(5));
            Ok(())
        },
    ),
    variable(
        &["MC_SLICE_TIMEOUT"],
        "",
        "Seconds (1 to 65535) that a transfer may take at most, however many bytes it has",
        |engine, text| {
            engine.longest = Some(Duration::from_secs(within(text, 1, 65535)?));
            Ok(())
        },
    ),
    variable(
        &["MC_LEGACY_RPC_PORT_BINDING"],
        "",
        "The handshake port is the one in the engine's own name, and its host is what others are told",
        |engine, _| {
            engine.port_of_name = true;
            Ok(())
        },
    ),
    variable(
        &["MC_TCP_BIND_ADDRESS"],
        "first address of an interface that is up",
        "Address that others are told; the ports listen on all",
        |engine, text| {
            let address: std::net::IpAddr = parse(text)?;
            engine.handshake.host = Some(address.to_string());
            Ok(())
        },
    ),
    variable(
        &["MC_USE_IPV6"],
        "",
        "The handshake port is IPv6, and so is the address that others are told",
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
        "First port that the handshake and data ports are drawn from; 1024 at least, not 32768 to 60999, not above the last",
        |engine, text| {
            engine.ports.0 = Some(listening(text)?);
            Ok(())
        },
    ),
    variable(&["MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT"], "17000", "Last of these ports", |engine, text| {
        engine.ports.1 = Some(listening(text)?);
        Ok(())
    }),
    variable(
        &["MC_HANDSHAKE_CONNECT_TIMEOUT"],
        "5",
        "Seconds (1 to 3599) that connecting to a handshake port may take",
        |engine, text| {
            engine.handshake.limits.connect_timeout = Duration::from_secs(within(text, 1, 3599)?);
            Ok(())
        },
    ),
    variable(
        &["MC_HANDSHAKE_MAX_LENGTH"],
        "1048576",
        "Bytes (1 to 128 MiB) of the longest message of a handshake",
        |engine, text| {
            let bytes: u64 = within(text, 1 << 20, 128 << 20)?;
            engine.handshake.limits.max_len = usize::try_from(bytes).map_err(|e| e.to_string())?;
            Ok(())
        },
    ),
    variable(
        &["MC_METADATA_CLUSTER_ID"],
        "",
        "Tells the keys of a cluster from those of others in the same directory",
        |engine, text| {
            engine.options.cluster_id = text.into();
            Ok(())
        },
    ),
    variable(&["MC_REDIS_USERNAME"], "", "User of a directory in Redis", |engine, text| {
        engine.options.redis.username = text.into();
        Ok(())
    }),
    variable(&["MC_REDIS_PASSWORD"], "", "Password there", |engine, text| {
        engine.options.redis.password = text.into();
        Ok(())
    }),
    variable(&["MC_REDIS_DB_INDEX"], "0", "Number (0 to 255) of the database there", |engine, text| {
        engine.options.redis.database = parse(text)?;
        Ok(())
    }),
    variable(
        &["MC_DISABLE_METACACHE"],
        "",
        "A segment is looked up each time it is opened, not once",
        |engine, _| {
            engine.caches = false;
            Ok(())
        },
    ),
    variable(
        &["MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"],
        "0",
        "Seconds between two look-ups of all opened segments; 0 for none",
        |engine, text| {
            let seconds: u32 = parse(text)?;
            engine.refresh = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            Ok(())
        },
    ),
    variable(
        &["MC_FORCE_TCP"],
        "",
        "Leave every other wire alone, unless 0, false, no or off",
        |engine, text| {
            engine.force_tcp = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_FORCE_HCA"],
        "",
        "Use RDMA, and fail where there is none, unless 0, false, no or off; `MC_FORCE_TCP` goes before it",
        |engine, text| {
            engine.force_rdma = !is_off(text);
            Ok(())
        },
    ),
    variable(
        &["MC_CUSTOM_TOPO_JSON"],
        "",
        "File that says which devices are near which memory, in place of what is found",
        |engine, text| {
            engine.topology_file = Some(text.into());
            Ok(())
        },
    ),
    variable(
        &["MC_TE_FILTERS", "MC_MS_FILTERS"],
        "",
        "RDMA devices that count, with commas between them; all when there is none",
        |engine, text| {
            engine.discovery = std::mem::take(&mut engine.discovery).only(text.split(','));
            Ok(())
        },
    ),
    variable(&["MC_TE_FILTERS_EXCLUDE"], "", "RDMA devices that do not count", |engine, text| {
        engine.discovery = std::mem::take(&mut engine.discovery).without(text.split(','));
        Ok(())
    }),
    variable(
        &["MC_TE_METRIC"],
        "",
        "1, true, yes or on: log what was moved from time to time",
        |engine, text| {
            engine.summary = ["1", "true", "yes", "on"].iter().any(|on| text.eq_ignore_ascii_case(on));
            Ok(())
        },
    ),
    variable(
        &["MC_TE_METRIC_INTERVAL_SECONDS"],
        "5",
        "Seconds (1 to 86400) between two such lines",
        |engine, text| {
            engine.summary_interval = Duration::from_secs(within(text, 1, 86400)?);
            Ok(())
        },
    ),
    #[cfg(feature = "transport-tcp")]
    variable(&["MC_TCP_PROTO"], "", "1: ask peers without acknowledgements, as of old", |engine, text| {
        tcp(engine).framing = if text == "1" { Framing::Plain } else { Framing::Acknowledged };
        Ok(())
    }),
    #[cfg(feature = "transport-tcp")]
    variable(
        &["MC_TCP_STATUS_TIMEOUT_SEC"],
        "30",
        "Seconds that a peer may take to move a byte of its answer",
        |engine, text| {
            tcp(engine).answer_timeout = Duration::from_secs(within(text, 1, 86400)?);
            Ok(())
        },
    ),
    #[cfg(feature = "transport-tcp")]
    variable(
        &["MC_TCP_PROGRESS_TIMEOUT_SEC"],
        "30",
        "Seconds that a peer who asked may stop half-way",
        |engine, text| {
            tcp(engine).progress_timeout = Duration::from_secs(within(text, 1, 86400)?);
            Ok(())
        },
    ),
    #[cfg(feature = "transport-tcp")]
    variable(
        &["MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER"],
        "4",
        "Connections (1 to 16) to one peer at most",
        |engine, text| {
            tcp(engine).connections = within(text, 1, 16)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-tcp")]
    variable(
        &["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"],
        "65536",
        "Transfers (1 to 65535) that may wait on one connection; more are refused",
        |engine, text| {
            tcp(engine).max_queued = within(text, 1, 65535)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_GID_INDEX", "NCCL_IB_GID_INDEX"],
        "-1",
        "Index of the RDMA port's address (0 to 255); -1 chooses",
        |engine, text| {
            let index: i16 = within(text, -1, 255)?;
            rdma(engine).gid_index = u8::try_from(index).ok();
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_AUTO_GID_MAX_RETRIES"],
        "2",
        "How many other addresses (0 to 16) are tried when there is no way from the chosen one",
        |engine, text| {
            rdma(engine).gid_retries = within(text, 0, 16)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(&["MC_IB_PORT"], "1", "Port (1 to 255) of each RDMA device", |engine, text| {
        rdma(engine).port = within(text, 1, 255)?;
        Ok(())
    }),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_MTU"],
        "4096",
        "Largest RDMA packet in bytes (512, 1024, 2048 or 4096), as far as the port goes",
        |engine, text| {
            let bytes: u32 = parse(text)?;
            if ![512, 1024, 2048, 4096].contains(&bytes) {
                return Err(format!("{bytes} is not 512, 1024, 2048 or 4096"));
            }
            rdma(engine).mtu = bytes;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(&["MC_PKEY_INDEX"], "0", "Index of the partition key", |engine, text| {
        rdma(engine).pkey_index = parse(text)?;
        Ok(())
    }),
    #[cfg(feature = "transport-rdma")]
    variable(&["MC_IB_TC"], "-1", "Traffic class (0 to 255) of RDMA packets; -1 is 0", |engine, text| {
        let class: i16 = within(text, -1, 255)?;
        rdma(engine).traffic_class = u8::try_from(class).unwrap_or(0);
        Ok(())
    }),
    #[cfg(feature = "transport-rdma")]
    variable(&["MC_IB_SL"], "-1", "Service level (0 to 15) of RDMA packets; -1 is 0", |engine, text| {
        let level: i16 = within(text, -1, 15)?;
        rdma(engine).service_level = u8::try_from(level).unwrap_or(0);
        Ok(())
    }),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_NUM_QP_PER_EP"],
        "2",
        "Queue pairs (1 to 255) of a connection; peers must have as many",
        |engine, text| {
            rdma(engine).pairs = within(text, 1, 255)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_MAX_WR"],
        "256",
        "Requests (1 to 65535) in a queue pair, as far as the device goes",
        |engine, text| {
            rdma(engine).requests = within(text, 1, 65535)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_MAX_CQE_PER_CTX"],
        "4096",
        "Requests (1 to 4194304) under way on an RDMA device, as far as its completion queue goes",
        |engine, text| {
            rdma(engine).completions = within(text, 1, 4 << 20)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_MAX_EP_PER_CTX"],
        "65536",
        "Connections (1 to 65536) of an RDMA device, as far as it goes; the one used longest ago gives way",
        |engine, text| {
            rdma(engine).max_endpoints = within(text, 1, 65536)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_SLICE_SIZE"],
        "65536",
        "Bytes (1 to 1 GiB) of a message over RDMA; a rest of a quarter goes with the one before",
        |engine, text| {
            let rdma = rdma(engine);
            rdma.slice_bytes = within(text, 1, 1 << 30)?;
            rdma.fragment_bytes = rdma.slice_bytes / 4;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_FRAGMENT_RATIO"],
        "4",
        "Which part of a message such a rest is at most: one by this (1 to 65535)",
        |engine, text| {
            let rdma = rdma(engine);
            rdma.fragment_bytes = rdma.slice_bytes / within(text, 1, 65535)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_RETRY_CNT"],
        "9",
        "How often (1 to 127) a message is tried again, here or elsewhere, after RDMA devices gave it up",
        |engine, text| {
            rdma(engine).attempts = within(text, 1, 127)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_RDMA_RAIL_PAUSE_SECONDS"],
        "30",
        "Seconds (1 to 3599) that a way which failed is left alone while there is another",
        |engine, text| {
            rdma(engine).rail_pause = Duration::from_secs(within(text, 1, 3599)?);
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_CONN_PAUSE_TTL_MS"],
        "0",
        "Milliseconds (0 to 600000) that a way on which connecting failed is not tried again; what is to go there fails at once",
        |engine, text| {
            rdma(engine).connect_pause = Duration::from_millis(within(text, 0, 600_000)?);
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_ENABLE_HCA_PEER_AFFINITY"],
        "",
        "Heed `MC_NIC_PEER_AFFINITY`, unless 0, false, no or off",
        |engine, text| {
            engine.partners.0 = !is_off(text);
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_NIC_PEER_AFFINITY"],
        "",
        "Devices of peers that ours prefer, `ours=theirs,theirs;ours=theirs`; without an entry, the one of the same name",
        |engine, text| {
            engine.partners.1 = partners(text)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_IB_PCI_RELAXED_ORDERING"],
        "1",
        "Devices may write in any order, where they can; 0: they may not (1 and 2 are the same here)",
        |engine, text| {
            rdma(engine).relaxed_ordering = within(text, 0, 2)? != 0;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_MAX_MR_SIZE"],
        "1099511627776",
        "Bytes (4096 at least) of one registration with an RDMA device, as far as it goes; longer memory is registered in parts",
        |engine, text| {
            rdma(engine).region_bytes = within(text, 4096, u64::MAX)?;
            Ok(())
        },
    ),
    #[cfg(feature = "transport-rdma")]
    variable(
        &["MC_RDMA_BIND_ADDRESS"],
        "",
        "Address that RDMA peers reach the handshake port by, where it is another than others use",
        |engine, text| {
            let address: std::net::IpAddr = parse(text)?;
            rdma(engine).server_name = address.to_string();
            Ok(())
        },
    ),
];

/// What the log of a program takes that says nothing of it itself: by `MC_LOG_LEVEL` (`TRACE`, `DEBUG`, `INFO`, `WARNING`, `ERROR`; warnings
/// without it), and the summaries that `MC_TE_METRIC` asks for. For `tracing_subscriber::EnvFilter`.
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
    /// Takes what the environment of this process says, over what was said before; what is said afterwards goes over it. A value that
    /// makes no sense is warned of, and changes nothing.
    ///
    /// What it says of wires goes for those chosen by name, not for [`wires`](Self::wires).
    #[allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]
    pub fn environment(self) -> Self {
        self.environment_of(|name| std::env::var(name).ok())
    }

    /// The same with variables from elsewhere.
    pub fn environment_of(mut self, get: impl Fn(&str) -> Option<String>) -> Self {
        for variable in VARIABLES {
            // An empty variable is one that is not set.
            let set =
                variable.names.iter().find_map(|name| Some((name, get(name).filter(|v| !v.is_empty())?)));
            let Some((name, value)) = set else { continue };
            if let Err(error) = (variable.set)(&mut self, &value) {
                tracing::warn!("{name}={value} is ignored: {error}");
            }
        }
        self
    }

    /// The ports to draw from, if any were named that can be.
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

#[cfg(feature = "transport-rdma")]
fn rdma(engine: &mut TransferEngineBuilder) -> &mut RdmaConfig {
    engine.rdma.get_or_insert_default()
}

#[cfg(feature = "transport-tcp")]
fn tcp(engine: &mut TransferEngineBuilder) -> &mut TcpConfig {
    engine.tcp.get_or_insert_default()
}

#[cfg(feature = "transport-rdma")]
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

/// Fails where a name that has to have one has no port.
pub(crate) fn own_port(name: &str) -> Result<(String, u16)> {
    let at = mooncake_transport::net::HostPort::parse(name, 0);
    if at.host.is_empty() || at.port == 0 {
        return Err(Error::invalid(format!(
            "MC_LEGACY_RPC_PORT_BINDING takes the handshake port from the engine's name, and {name:?} is not host:port"
        )));
    }
    Ok((at.host, at.port))
}

#[cfg(test)]
mod tests {
    use mooncake_transport::topology::Discovery;

    use super::*;
    use crate::TransferEngine;

    fn with(variables: &[(&str, &str)]) -> TransferEngineBuilder {
        let clock = std::sync::Arc::new(mooncake_core::clock::ManualClock::new());
        TransferEngine::builder().clock(clock).environment_of(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[cfg(feature = "transport-rdma")]
    fn of_rdma(engine: &TransferEngineBuilder, look: impl Fn(&RdmaConfig) -> String) -> String {
        look(&engine.rdma.clone().unwrap_or_default())
    }

    type Look = fn(&TransferEngineBuilder) -> String;
    type Case = (&'static str, &'static str, Look, &'static str, &'static str);

    #[cfg(not(feature = "transport-rdma"))]
    const RDMA_CASES: &[Case] = &[];
    #[cfg(feature = "transport-rdma")]
    #[rustfmt::skip]
    const RDMA_CASES: &[Case] = &[
        ("MC_GID_INDEX", "3", |e| of_rdma(e, |c| format!("{:?}", c.gid_index)), "Some(3)", "None"),
        ("NCCL_IB_GID_INDEX", "255", |e| of_rdma(e, |c| format!("{:?}", c.gid_index)), "Some(255)", "None"),
        ("MC_AUTO_GID_MAX_RETRIES", "0", |e| of_rdma(e, |c| c.gid_retries.to_string()), "0", "2"),
        ("MC_IB_PORT", "2", |e| of_rdma(e, |c| c.port.to_string()), "2", "1"),
        ("MC_MTU", "1024", |e| of_rdma(e, |c| c.mtu.to_string()), "1024", "4096"),
        ("MC_PKEY_INDEX", "7", |e| of_rdma(e, |c| c.pkey_index.to_string()), "7", "0"),
        ("MC_IB_TC", "106", |e| of_rdma(e, |c| c.traffic_class.to_string()), "106", "0"),
        ("MC_IB_SL", "15", |e| of_rdma(e, |c| c.service_level.to_string()), "15", "0"),
        ("MC_NUM_QP_PER_EP", "4", |e| of_rdma(e, |c| c.pairs.to_string()), "4", "2"),
        ("MC_MAX_WR", "512", |e| of_rdma(e, |c| c.requests.to_string()), "512", "256"),
        ("MC_MAX_CQE_PER_CTX", "8192", |e| of_rdma(e, |c| c.completions.to_string()), "8192", "4096"),
        ("MC_MAX_EP_PER_CTX", "256", |e| of_rdma(e, |c| c.max_endpoints.to_string()), "256", "65536"),
        ("MC_SLICE_SIZE", "131072", |e| of_rdma(e, |c| format!("{} {}", c.slice_bytes, c.fragment_bytes)), "131072 32768", "65536 16384"),
        ("MC_FRAGMENT_RATIO", "8", |e| of_rdma(e, |c| c.fragment_bytes.to_string()), "8192", "16384"),
        ("MC_RETRY_CNT", "3", |e| of_rdma(e, |c| c.attempts.to_string()), "3", "9"),
        ("MC_RDMA_RAIL_PAUSE_SECONDS", "5", |e| of_rdma(e, |c| format!("{:?}", c.rail_pause)), "5s", "30s"),
        ("MC_CONN_PAUSE_TTL_MS", "1500", |e| of_rdma(e, |c| format!("{:?}", c.connect_pause)), "1.5s", "0ns"),
        ("MC_ENABLE_HCA_PEER_AFFINITY", "1", |e| e.partners.0.to_string(), "true", "false"),
        ("MC_NIC_PEER_AFFINITY", "a=b,c; d = e", |e| format!("{:?}", e.partners.1), r#"[("a", ["b", "c"]), ("d", ["e"])]"#, "[]"),
        ("MC_IB_PCI_RELAXED_ORDERING", "0", |e| of_rdma(e, |c| c.relaxed_ordering.to_string()), "false", "true"),
        ("MC_MAX_MR_SIZE", "1073741824", |e| of_rdma(e, |c| c.region_bytes.to_string()), "1073741824", "1099511627776"),
        ("MC_RDMA_BIND_ADDRESS", "10.9.9.9", |e| of_rdma(e, |c| c.server_name.clone()), "10.9.9.9", ""),
    ];

    /// What is set, what is seen of it, and what is seen without it.
    #[rustfmt::skip]
    const CASES: &[Case] = &[
        ("MC_TRANSFER_TIMEOUT", "60", |e| format!("{:?}", e.timeout), "60s", "30s"),
        ("MC_SLICE_TIMEOUT", "7", |e| format!("{:?}", e.longest), "Some(7s)", "None"),
        ("MC_LEGACY_RPC_PORT_BINDING", "1", |e| e.port_of_name.to_string(), "true", "false"),
        ("MC_TCP_BIND_ADDRESS", "10.1.2.3", |e| format!("{:?}", e.handshake.host), "Some(\"10.1.2.3\")", "None"),
        ("MC_USE_IPV6", "1", |e| e.ipv6.to_string(), "true", "false"),
        ("MC_HANDSHAKE_PORT", "12345", |e| e.handshake.limits.default_port.to_string(), "12345", "12001"),
        ("MC_MIN_RPC_PORT", "16000", |e| format!("{:?}", e.drawn_ports()), "Some(16000..=17000)", "None"),
        ("MC_MIN_PRC_PORT", "16000", |e| format!("{:?}", e.drawn_ports()), "Some(16000..=17000)", "None"),
        ("MC_MAX_RPC_PORT", "15999", |e| format!("{:?}", e.drawn_ports()), "Some(15000..=15999)", "None"),
        ("MC_MAX_PRC_PORT", "15999", |e| format!("{:?}", e.drawn_ports()), "Some(15000..=15999)", "None"),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", "9", |e| format!("{:?}", e.handshake.limits.connect_timeout), "9s", "5s"),
        ("MC_HANDSHAKE_MAX_LENGTH", "2097152", |e| e.handshake.limits.max_len.to_string(), "2097152", "1048576"),
        ("MC_METADATA_CLUSTER_ID", "c", |e| e.options.cluster_id.clone(), "c", ""),
        ("MC_REDIS_USERNAME", "u", |e| e.options.redis.username.clone(), "u", ""),
        ("MC_REDIS_PASSWORD", "p", |e| e.options.redis.password.clone(), "p", ""),
        ("MC_REDIS_DB_INDEX", "3", |e| e.options.redis.database.to_string(), "3", "0"),
        ("MC_DISABLE_METACACHE", "1", |e| e.caches.to_string(), "false", "true"),
        ("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "4", |e| format!("{:?}", e.refresh), "Some(4s)", "None"),
        ("MC_FORCE_TCP", "1", |e| e.force_tcp.to_string(), "true", "false"),
        ("MC_FORCE_HCA", "1", |e| e.force_rdma.to_string(), "true", "false"),
        ("MC_CUSTOM_TOPO_JSON", "/t", |e| format!("{:?}", e.topology_file), "Some(\"/t\")", "None"),
        ("MC_TE_FILTERS", "a, b", |e| (e.discovery == Discovery::default().only(["a", "b"])).to_string(), "true", "false"),
        ("MC_MS_FILTERS", "a, b", |e| (e.discovery == Discovery::default().only(["a", "b"])).to_string(), "true", "false"),
        ("MC_TE_FILTERS_EXCLUDE", "a,b", |e| (e.discovery == Discovery::default().without(["a", "b"])).to_string(), "true", "false"),
        ("MC_TE_METRIC", "Yes", |e| e.summary.to_string(), "true", "false"),
        ("MC_TE_METRIC_INTERVAL_SECONDS", "9", |e| format!("{:?}", e.summary_interval), "9s", "5s"),
        ("MC_TCP_PROTO", "1", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.framing)), "Some(Plain)", "None"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.answer_timeout)), "Some(2s)", "None"),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.progress_timeout)), "Some(2s)", "None"),
        ("MC_TCP_LANES_PER_PEER", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.connections)), "Some(2)", "None"),
        ("MC_TCP_MAX_CONNECTIONS_PER_PEER", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.connections)), "Some(2)", "None"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "9", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.max_queued)), "Some(9)", "None"),
    ];

    #[test]
    fn every_variable_sets_what_it_says() {
        for (name, value, look, set, unset) in CASES.iter().chain(RDMA_CASES) {
            assert_eq!(look(&with(&[(name, value)])), *set, "{name}={value}");
            assert_eq!(look(&with(&[(name, "")])), *unset, "{name} is empty");
        }
        let known = VARIABLES.iter().flat_map(|variable| variable.names);
        for name in known.clone() {
            assert!(CASES.iter().chain(RDMA_CASES).any(|(case, ..)| case == name), "{name} has no case");
        }
        let count = known.clone().count();
        assert_eq!(known.collect::<std::collections::BTreeSet<_>>().len(), count, "a name is there twice");
    }

    #[test]
    fn the_log_takes_summaries_at_every_level() {
        for (said, level) in
            [("", "warn"), ("WARNING", "warn"), ("Error", "error"), ("TRACE", "trace"), ("x", "warn")]
        {
            assert_eq!(level_of(said), format!("{level},mooncake_engine::summary=info"), "{said}");
        }
    }

    #[test]
    fn what_makes_no_sense_changes_nothing() {
        let without = format!("{:?}", with(&[]));
        for (name, value) in [
            ("MC_TRANSFER_TIMEOUT", "soon"),
            ("MC_SLICE_TIMEOUT", "-1"),
            ("MC_SLICE_TIMEOUT", "65536"),
            ("MC_TCP_BIND_ADDRESS", "here"),
            ("MC_HANDSHAKE_PORT", "0"),
            ("MC_MIN_RPC_PORT", "1023"),
            ("MC_MIN_RPC_PORT", "40000"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "3600"),
            ("MC_HANDSHAKE_MAX_LENGTH", "1"),
            ("MC_REDIS_DB_INDEX", "256"),
        ] {
            assert_eq!(format!("{:?}", with(&[(name, value)])), without, "{name}={value}");
        }
        assert_eq!(with(&[("MC_TRANSFER_TIMEOUT", "1")]).timeout, Duration::from_secs(5), "5 s at least");
        assert_eq!(with(&[("MC_MIN_RPC_PORT", "17001")]).drawn_ports(), None, "the first is above the last");
        assert!(!with(&[("MC_FORCE_TCP", "False")]).force_tcp);
        let newest = with(&[("MC_MIN_RPC_PORT", "16001"), ("MC_MIN_PRC_PORT", "16002")]);
        assert_eq!(newest.drawn_ports(), Some(16001..=17000), "the new name goes before the old one");
    }

    #[test]
    #[cfg(feature = "transport-rdma")]
    fn nor_does_it_of_rdma() {
        for (name, value) in [
            ("MC_GID_INDEX", "256"),
            ("MC_IB_PORT", "0"),
            ("MC_MTU", "1500"),
            ("MC_IB_SL", "16"),
            ("MC_NUM_QP_PER_EP", "0"),
            ("MC_MAX_WR", "0"),
            ("MC_MAX_EP_PER_CTX", "65537"),
            ("MC_SLICE_SIZE", "0"),
            ("MC_FRAGMENT_RATIO", "0"),
            ("MC_RETRY_CNT", "128"),
            ("MC_RDMA_RAIL_PAUSE_SECONDS", "3600"),
            ("MC_IB_PCI_RELAXED_ORDERING", "3"),
            ("MC_CONN_PAUSE_TTL_MS", "600001"),
            ("MC_MAX_MR_SIZE", "4095"),
            ("MC_RDMA_BIND_ADDRESS", "here"),
        ] {
            let said = with(&[(name, value)]).rdma.unwrap_or_default();
            assert_eq!(said, RdmaConfig::default(), "{name}={value}");
        }
        for text in ["a", "a=", "=b", "a=b;c"] {
            let said = with(&[("MC_NIC_PEER_AFFINITY", text)]).partners;
            assert_eq!(said, (false, Vec::new()), "{text}");
        }
        let cut = with(&[("MC_FRAGMENT_RATIO", "2"), ("MC_SLICE_SIZE", "4096")]).rdma.unwrap_or_default();
        assert_eq!((cut.slice_bytes, cut.fragment_bytes), (4096, 2048));
        let index =
            |text| with(&[("MC_GID_INDEX", "4"), ("NCCL_IB_GID_INDEX", text)]).rdma.unwrap_or_default();
        assert_eq!(index("1").gid_index, Some(4), "the system's own name goes first");
        assert_eq!(with(&[("MC_GID_INDEX", "-1")]).rdma.unwrap_or_default().gid_index, None);
    }

    #[test]
    #[cfg(feature = "transport-rdma")]
    fn what_is_said_of_devices_reaches_the_wire() {
        let rdma = |engine: TransferEngineBuilder| {
            engine.protocol("rdma").transport_options().unwrap().rdma.unwrap()
        };
        let filters = [("MC_TE_FILTERS", "a,b"), ("MC_TE_FILTERS_EXCLUDE", "b"), ("MC_GID_INDEX", "3")];
        let said = rdma(with(&filters));
        assert_eq!(said.discovery, Discovery::default().only(["a", "b"]).without(["b"]));
        assert_eq!((said.gid_index, said.devices.is_empty()), (Some(3), true));
        assert_eq!(rdma(with(&[]).devices(" a, b,")).devices, ["a", "b"]);
        assert!(rdma(with(&[]).devices("auto-discovery")).devices.is_empty());
        let (switch, list) = (("MC_ENABLE_HCA_PEER_AFFINITY", "1"), ("MC_NIC_PEER_AFFINITY", "a=b"));
        assert_eq!(rdma(with(&[switch, list])).partners, [("a".into(), vec!["b".into()])]);
        assert!(rdma(with(&[list])).partners.is_empty(), "the list alone says nothing");

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("topology.json");
        std::fs::write(&file, r#"{"cpu:0": [["a"], ["b"]]}"#).unwrap();
        let told = rdma(with(&[("MC_CUSTOM_TOPO_JSON", file.to_str().unwrap())]));
        assert_eq!(told.topology.unwrap().devices(), ["a", "b"]);
        assert!(rdma(with(&[("MC_CUSTOM_TOPO_JSON", "/no/such/file")])).topology.is_none());
    }

    #[test]
    fn a_bound_name_needs_a_port() {
        assert_eq!(own_port("10.0.0.1:123").unwrap(), ("10.0.0.1".into(), 123));
        for name in ["", "10.0.0.1", ":5", "[::1]"] {
            assert!(own_port(name).is_err(), "{name}");
        }
    }
}
