//! Effect of each variable, and invalid values.

use mooncake_core::ErrorKind;
use mooncake_transport::topology::Discovery;

use super::*;
use crate::{TransferEngine, built_in};

fn with(variables: &[(&str, &str)]) -> TransferEngineBuilder {
    let clock = std::sync::Arc::new(mooncake_core::clock::ManualClock::new());
    TransferEngine::builder().clock(clock).environment_of(&variables.iter().copied().collect())
}

fn of_rdma(engine: &TransferEngineBuilder, read_value: impl Fn(&RdmaConfig) -> String) -> String {
    read_value(&engine.rdma.clone().unwrap_or_default())
}

type Look = fn(&TransferEngineBuilder) -> String;
type Case = (&'static str, &'static str, Look, &'static str, &'static str);

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

/// Columns: the setting, its observed value, and the observed value without it.
#[rustfmt::skip]
const CASES: &[Case] = &[
    ("MC_TRANSFER_TIMEOUT", "60", |e| format!("{:?}", e.timeout), "60s", "30s"),
    ("MC_SLICE_TIMEOUT", "7", |e| format!("{:?}", e.max_timeout), "Some(7s)", "None"),
    ("MC_LEGACY_RPC_PORT_BINDING", "1", |e| e.port_of_name.to_string(), "true", "false"),
    ("MC_TCP_BIND_ADDRESS", "10.1.2.3", |e| format!("{:?}", e.published_host), "Some(\"10.1.2.3\")", "None"),
    ("MC_BIND_ADDRESS", "10.1.2.4", |e| e.bind_address.clone(), "10.1.2.4", ""),
    ("MC_USE_IPV6", "1", |e| e.handshake.ipv6.to_string(), "true", "false"),
    ("MC_HANDSHAKE_PORT", "12345", |e| e.handshake.limits.default_port.to_string(), "12345", "12001"),
    ("MC_MIN_RPC_PORT", "16000", |e| format!("{:?}", e.drawn_ports()), "Some(16000..=17000)", "None"),
    ("MC_MIN_PRC_PORT", "16000", |e| format!("{:?}", e.drawn_ports()), "Some(16000..=17000)", "None"),
    ("MC_MAX_RPC_PORT", "15999", |e| format!("{:?}", e.drawn_ports()), "Some(15000..=15999)", "None"),
    ("MC_MAX_PRC_PORT", "15999", |e| format!("{:?}", e.drawn_ports()), "Some(15000..=15999)", "None"),
    ("MC_HANDSHAKE_CONNECT_TIMEOUT", "9", |e| format!("{:?}", e.handshake.limits.connect_timeout), "9s", "5s"),
    ("MC_CONNECTION_BYTES", "2MB", |e| format!("{:?}", e.connection_bytes), "Some(2097152)", "None"),
    ("MC_HANDSHAKE_MAX_LENGTH", "2097152", |e| e.handshake.limits.max_len.to_string(), "2097152", "1048576"),
    ("MC_METADATA_CLUSTER_ID", "c", |e| e.options.cluster_id.clone(), "c", ""),
    ("MC_METADATA_HTTP_TOKEN", "t", |e| format!("{:?}", e.options.token.authorization()), "Some(\"Bearer t\")", "None"),
    ("MC_REDIS_USERNAME", "u", |e| e.options.redis.username.clone(), "u", ""),
    ("MC_REDIS_PASSWORD", "p", |e| e.options.redis.password.clone(), "p", ""),
    ("MC_REDIS_DB_INDEX", "3", |e| e.options.redis.database.to_string(), "3", "0"),
    ("MC_DISABLE_METACACHE", "1", |e| e.cache_descriptors.to_string(), "false", "true"),
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
    ("MC_TCP_STATUS_TIMEOUT_SEC", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.response_timeout)), "Some(2s)", "None"),
    ("MC_TCP_PROGRESS_TIMEOUT_SEC", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.progress_timeout)), "Some(2s)", "None"),
    ("MC_TCP_LANES_PER_PEER", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.connections)), "Some(2)", "None"),
    ("MC_TCP_MAX_CONNECTIONS_PER_PEER", "2", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.connections)), "Some(2)", "None"),
    ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "9", |e| format!("{:?}", e.tcp.as_ref().map(|t| t.max_queued)), "Some(9)", "None"),
];

#[rustfmt::skip]
const GPU_CASES: &[Case] = &[
    ("MC_FORCE_MNNVL", "1", |e| e.gpu.force.to_string(), "true", "false"),
    ("MC_INTRANODE_NVLINK", "1", |e| e.gpu.intra_node.to_string(), "true", "false"),
    ("MC_INTRA_NVLINK", "on", |e| e.gpu.intra_node.to_string(), "true", "false"),
    ("MC_USE_NVLINK_IPC", "1", |e| e.gpu.ipc.to_string(), "true", "false"),
];

#[test]
fn variables_of_nvlink_reach_the_transport() {
    let nvlink = |variables: &[(&str, &str)]| with(variables).transport_options().unwrap().nvlink;
    if !built_in::has("nvlink") {
        let error = with(&[("MC_FORCE_MNNVL", "1")]).transport_options().unwrap_err();
        return assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    assert!(nvlink(&[]).is_none() && nvlink(&[("MC_FORCE_MNNVL", "0")]).is_none());
    let forced = nvlink(&[("MC_FORCE_MNNVL", "1")]).unwrap();
    assert!(forced.fabric && !forced.intra_node);
    assert!(!nvlink(&[("MC_FORCE_MNNVL", "1"), ("MC_USE_NVLINK_IPC", "1")]).unwrap().fabric);
    assert!(nvlink(&[("MC_INTRANODE_NVLINK", "1")]).unwrap().intra_node);
}

#[test]
fn every_variable_sets_what_it_says() {
    for (name, value, read_value, set, unset) in CASES.iter().chain(RDMA_CASES).chain(GPU_CASES) {
        assert_eq!(read_value(&with(&[(name, value)])), *set, "{name}={value}");
        assert_eq!(read_value(&with(&[(name, "")])), *unset, "{name} is empty");
    }
    let known: Vec<&str> = VARIABLES.iter().flat_map(|variable| variable.names()).collect();
    for name in &known {
        assert!(
            CASES.iter().chain(RDMA_CASES).chain(GPU_CASES).any(|(case, ..)| case == name),
            "{name} has no case"
        );
    }
    let different: std::collections::BTreeSet<_> = known.iter().collect();
    assert_eq!(different.len(), known.len(), "a name is there twice");
}

#[test]
fn the_log_takes_summaries_at_every_level() {
    for (config, level) in
        [("", "warn"), ("WARNING", "warn"), ("Error", "error"), ("TRACE", "trace"), ("x", "warn")]
    {
        assert_eq!(level_of(config), format!("{level},mooncake_engine::summary=info"), "{config}");
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
        let config = with(&[(name, value)]).rdma.unwrap_or_default();
        assert_eq!(config, RdmaConfig::default(), "{name}={value}");
    }
    for text in ["a", "a=", "=b", "a=b;c"] {
        let config = with(&[("MC_NIC_PEER_AFFINITY", text)]).partners;
        assert_eq!(config, (false, Vec::new()), "{text}");
    }
    let config = with(&[("MC_FRAGMENT_RATIO", "2"), ("MC_SLICE_SIZE", "4096")]).rdma.unwrap_or_default();
    assert_eq!((config.slice_bytes, config.fragment_bytes), (4096, 2048));
    let index = |text| with(&[("MC_GID_INDEX", "4"), ("NCCL_IB_GID_INDEX", text)]).rdma.unwrap_or_default();
    assert_eq!(index("1").gid_index, Some(4), "the system's own name goes first");
    assert_eq!(with(&[("MC_GID_INDEX", "-1")]).rdma.unwrap_or_default().gid_index, None);
}

#[test]
fn variables_of_devices_reach_the_transport() {
    if !built_in::has("rdma") {
        let error = with(&[("MC_FORCE_HCA", "1")]).transport_options().unwrap_err();
        return assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    let rdma =
        |engine: TransferEngineBuilder| engine.protocol("rdma").transport_options().unwrap().rdma.unwrap();
    let filters = [("MC_TE_FILTERS", "a,b"), ("MC_TE_FILTERS_EXCLUDE", "b"), ("MC_GID_INDEX", "3")];
    let config = rdma(with(&filters));
    assert_eq!(config.discovery, Discovery::default().only(["a", "b"]).without(["b"]));
    assert_eq!((config.gid_index, config.devices.is_empty()), (Some(3), true));
    assert_eq!(rdma(with(&[]).devices(" a, b,")).devices, ["a", "b"]);
    assert!(rdma(with(&[]).devices("auto-discovery")).devices.is_empty());
    let (switch, list) = (("MC_ENABLE_HCA_PEER_AFFINITY", "1"), ("MC_NIC_PEER_AFFINITY", "a=b"));
    assert_eq!(rdma(with(&[switch, list])).partners, [("a".into(), vec!["b".into()])]);
    assert!(rdma(with(&[list])).partners.is_empty(), "the list alone says nothing");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("topology.json");
    std::fs::write(&file, r#"{"cpu:0": [["a"], ["b"]]}"#).unwrap();
    let config = rdma(with(&[("MC_CUSTOM_TOPO_JSON", file.to_str().unwrap())]));
    assert_eq!(config.topology.unwrap().devices(), ["a", "b"]);
    assert!(rdma(with(&[("MC_CUSTOM_TOPO_JSON", "/no/such/file")])).topology.is_none());
}

#[test]
fn a_log_level_that_is_none_is_reported() {
    for known in ["", "trace", "DEBUG", "Info", "WARN", "warning", "ERROR"] {
        assert_eq!(unknown_level(known), None);
    }
    for unknown in ["loud", "3", "-1", "debug,info"] {
        let warning = unknown_level(unknown).unwrap();
        assert!(warning.starts_with(&format!("MC_LOG_LEVEL={unknown} is ignored")), "{warning}");
        assert_eq!(level_of(unknown), level_of("warn"));
    }
}

#[test]
fn numbers_that_make_no_sense_are_refused_by_name() {
    for variable in VARIABLES.iter().filter(|variable| variable.default.parse::<f64>().is_ok()) {
        for value in ["-2", "18446744073709551616", "99999999999999999999999999", "1e400", "nan"] {
            let mut engine = TransferEngine::builder();
            let ignored = apply(VARIABLES, &mut engine, &[(variable.name, value)].into_iter().collect());
            assert!(ignored.len() == 1 && ignored[0].contains(variable.name), "{ignored:?} {value}");
        }
    }
    let refuses = |name, value| {
        let mut engine = TransferEngine::builder();
        !apply(VARIABLES, &mut engine, &[(name, value)].into_iter().collect()).is_empty()
    };
    assert!(refuses("MC_TRANSFER_TIMEOUT", "18446744073709551615"));
}
