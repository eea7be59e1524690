//! Effect of settings on a running engine: names, addresses, ports, and repeated look-ups of
//! segments.
#![cfg(feature = "transport-tcp")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::HostMemory;
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::transport_set::TransportOptions;
use mooncake_engine::{TransferEngine, TransferEngineBuilder};
use mooncake_transport::engine::{HandshakePort, LocalCopies};
use mooncake_transport::handshake::HandshakeConfig;
use mooncake_transport::net::default_host;
use mooncake_transport::{Directory, Protocol, SegmentDesc, Transport};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Handle;

fn with(variables: &[(&str, &str)]) -> TransferEngineBuilder {
    let builder = TransferEngine::builder().local_copies(LocalCopies::Never);
    builder.environment_of(&variables.iter().copied().collect())
}

fn memory(len: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(len).unwrap())
}

async fn assert_transfers(owner: &TransferEngine, user: &TransferEngine) {
    let region = owner.register(memory(4096)).await.unwrap();
    let target = user.open(owner.name()).await.unwrap();
    user.write(&target, region.addr(), vec![5; 100], None).await.0.unwrap();
    let (result, read) = user.read(&target, region.addr() + 99, vec![9; 2], None).await;
    result.unwrap();
    assert_eq!(read, [5, 0]);
}

/// A store opens its transports in the same way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transports_take_all_available_descriptors() {
    let all = getrlimit(Resource::Nofile).maximum;
    let fewer = all.map_or(1 << 20, |all| all - 1);
    setrlimit(Resource::Nofile, Rlimit { current: Some(fewer), maximum: all }).unwrap();
    let clock: SharedClock = Arc::new(SystemClock::new());
    let wires = TransportOptions::for_protocol("tcp").unwrap().open(&Handle::current(), &clock).unwrap();
    assert_eq!(getrlimit(Resource::Nofile).current, all);
    drop(wires);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ipv6() {
    let tcp = [("MC_FORCE_TCP", "1"), ("MC_USE_IPV6", "1"), ("MC_TCP_BIND_ADDRESS", "::1")];
    let (owner, user) = (with(&tcp).start().await.unwrap(), with(&tcp).start().await.unwrap());
    assert!(owner.name().starts_with("[::1]:"), "{}", owner.name());
    assert_eq!(owner.descriptor().tcp_data_host, "::1");
    assert_transfers(&owner, &user).await;
    let plain = with(&[("MC_FORCE_TCP", "1")]).name("127.0.0.1").start().await.unwrap();
    assert_transfers(&owner, &plain).await;
    let with_port = with(&tcp[..2]).name("[::1]:7").start().await.unwrap();
    assert_transfers(&with_port, &plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_transports_and_a_custom_topology() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let matrix = r#"{"cpu:0":[["mlx5_7"],[]]}"#;
    std::fs::write(file.path(), matrix).unwrap();
    let path = file.path().to_str().unwrap();
    let engine = with(&[("MC_CUSTOM_TOPO_JSON", path), ("MC_FORCE_HCA", "1"), ("MC_FORCE_TCP", "1")]);
    let engine = engine.name("127.0.0.1").start().await.unwrap();
    assert_eq!(engine.topology().to_json().to_string(), matrix);
    assert_eq!(engine.transport().protocol(), Protocol::TCP, "TCP goes before RDMA");
    // The transport is not built in, or has no device here. No other transport replaces it.
    let forced = with(&[("MC_FORCE_HCA", "yes")]).name("127.0.0.1").start().await;
    if let Ok(engine) = forced {
        assert_eq!(engine.transport().protocol(), Protocol::RDMA);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_and_names() {
    let limits =
        [("MC_MIN_RPC_PORT", "16100"), ("MC_MAX_RPC_PORT", "16199"), ("MC_TCP_BIND_ADDRESS", "127.0.0.1")];
    let engine = with(&limits).start().await.unwrap();
    let ports = [engine.handshake_addr().unwrap().port, engine.descriptor().tcp_data_port];
    assert!(ports.iter().all(|port| (16100..=16199).contains(port)), "{ports:?}");
    assert_eq!(engine.handshake_addr().unwrap().host, "127.0.0.1");
    let port = ports[0];
    engine.close().await.unwrap();
    drop(engine);
    // The port of the name, and a peer that is named without it.
    let name = format!("127.0.0.1:{port}");
    let bound = with(&[("MC_LEGACY_RPC_PORT_BINDING", "1")]).name(&name).start().await.unwrap();
    assert_eq!(bound.name(), name);
    let user = with(&[("MC_HANDSHAKE_PORT", &port.to_string())]).name("127.0.0.1").start().await.unwrap();
    assert_eq!(user.open("127.0.0.1").await.unwrap().name(), name);
    assert!(user.probe("127.0.0.1", Duration::from_secs(5)).await.unwrap());
    let drawn = with(&[("MC_LEGACY_RPC_PORT_BINDING", "1")]).name("127.0.0.1").start().await.unwrap();
    assert_eq!(drawn.name(), drawn.handshake_addr().unwrap().to_string(), "a name without a port");
    // Peers find an engine by the address in its name, and its bytes, too.
    let with_bind_address =
        with(&[("MC_TCP_BIND_ADDRESS", "192.0.2.1")]).name("127.0.0.1").start().await.unwrap();
    assert!(with_bind_address.name().starts_with("127.0.0.1:"), "{}", with_bind_address.name());
    assert_eq!(with_bind_address.descriptor().tcp_data_host, "127.0.0.1");
}

/// Puts a descriptor with another data port into the directory, as of an engine that has moved.
async fn publish_port(directory: &Directory, port: u16) {
    let mut desc: SegmentDesc =
        directory.descriptor("owner", b"{}", &HandshakeConfig::default()).await.unwrap();
    desc.tcp_data_port = port;
    directory.publish(&desc, false).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_segment_is_looked_up_again_on_request() {
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    let start = async |name: &str, variables: &[(&str, &str)]| {
        let host = HandshakePort { host: Some("127.0.0.1".into()), ..HandshakePort::default() };
        let builder = with(variables).name(name).directory(directory.clone()).handshake(host);
        builder.start().await.unwrap()
    };
    let owner = start("owner", &[]).await;
    let (cached, uncached) =
        (start("lasting", &[]).await, start("fresh", &[("MC_DISABLE_METACACHE", "1")]).await);
    let refreshing = start("watching", &[("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "1")]).await;
    let port = async |engine: &TransferEngine| engine.open("owner").await.unwrap().descriptor().tcp_data_port;
    let before = owner.descriptor().tcp_data_port;
    for engine in [&cached, &uncached, &refreshing] {
        assert_eq!(port(engine).await, before);
    }
    publish_port(&directory, 1).await;
    assert_eq!((port(&cached).await, port(&uncached).await), (before, 1));
    tokio::time::timeout(Duration::from_secs(20), async {
        while port(&refreshing).await == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("looked up by itself");
    // A transfer that fails finds the port by itself, too.
    let region = owner.register(memory(64)).await.unwrap();
    publish_port(&directory, 1).await;
    let target = uncached.open("owner").await.unwrap();
    publish_port(&directory, before).await;
    uncached.write(&target, region.addr(), vec![1], None).await.0.unwrap();
}

/// Returns whether a port accepts connections at an address.
async fn accepts(ip: IpAddr, port: u16) -> bool {
    TcpStream::connect((ip, port)).await.is_ok()
}

/// Both ports of an engine listen at the loopback address of its name, or at the address of the
/// setting. The other engines of the host still reach it there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_listen_at_loopback_or_where_the_setting_says() {
    let (v4, v6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
    let other = IpAddr::from([127, 0, 0, 9]);
    let outward = default_host();
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    for (name, variables, bound) in [
        ("127.0.0.1", &[][..], v4),
        ("127.0.0.9", &[], other),
        ("localhost", &[], v4),
        ("::1", &[], v6),
        ("127.0.0.1", &[("MC_USE_IPV6", "1")], v4),
        ("", &[("MC_BIND_ADDRESS", "127.0.0.9")], other),
        ("", &[("MC_BIND_ADDRESS", "::1")], v6),
    ] {
        for is_p2p in [true, false] {
            let what = format!("{name:?} {variables:?} {is_p2p}");
            // Another process may listen at the same port of another address; not at each attempt.
            let mut unexpected = Vec::new();
            for _ in 0..5 {
                let mut builder = with(variables).name(name).protocol("tcp");
                if !is_p2p {
                    let name = if name.is_empty() { "node" } else { name };
                    builder = builder.name(name).directory(directory.clone());
                }
                let engine = builder.start().await.unwrap();
                assert_eq!(engine.bound_address(), Some(bound), "{what}");
                let handshake = engine.handshake_addr().unwrap().clone();
                unexpected.clear();
                for port in [handshake.port, engine.descriptor().tcp_data_port] {
                    assert!(accepts(bound, port).await, "{what}");
                    for other_ip in [v4, other, v6, outward].iter().filter(|ip| **ip != bound) {
                        if accepts(*other_ip, port).await {
                            unexpected.push((*other_ip, port));
                        }
                    }
                }
                // The published host leads there.
                let published = lookup_host((handshake.host.as_str(), handshake.port)).await.unwrap();
                assert!(published.map(|at| at.ip()).any(|ip| ip == bound), "{what}: {handshake}");
                engine.close().await.unwrap();
                if unexpected.is_empty() {
                    break;
                }
            }
            assert_eq!(unexpected, [], "{what}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_that_cannot_be_bound_or_reached_are_refused() {
    let host = |host: &str| HandshakePort { host: Some(host.into()), ..HandshakePort::default() };
    for (builder, expected) in [
        (with(&[("MC_BIND_ADDRESS", "198.51.100.7")]), "not an address of this host"),
        (with(&[("MC_BIND_ADDRESS", "eth0")]), "not an IP address"),
        (TransferEngine::builder().name("10.0.0.1").bind_address("127.0.0.1"), "published=10.0.0.1"),
        (with(&[("MC_BIND_ADDRESS", "127.0.0.1")]).handshake(host("10.0.0.1")), "published=10.0.0.1"),
    ] {
        let error = builder.protocol("tcp").start().await.unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("bind_address="), "{error}");
    }
    // An explicit setting of every address overrides a loopback name.
    let open =
        with(&[("MC_BIND_ADDRESS", "0.0.0.0")]).name("127.0.0.1").protocol("tcp").start().await.unwrap();
    assert!(accepts(default_host(), open.handshake_addr().unwrap().port).await);
}
