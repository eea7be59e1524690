//! Effect of settings on a running engine: names, addresses, ports, and repeated look-ups of
//! segments.
#![cfg(feature = "transport-tcp")]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::HostMemory;
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::transport_set::TransportOptions;
use mooncake_engine::{TransferEngine, TransferEngineBuilder};
use mooncake_transport::engine::{HandshakePort, LocalCopies};
use mooncake_transport::handshake::HandshakeConfig;
use mooncake_transport::{Directory, Protocol, SegmentDesc, Transport};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Handle;

fn with(variables: &[(&str, &str)]) -> TransferEngineBuilder {
    let builder = TransferEngine::builder().local_copies(LocalCopies::Never);
    builder.environment_of(&variables.iter().copied().collect())
}

fn memory(len: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(len).unwrap())
}

async fn moves_bytes(owner: &TransferEngine, user: &TransferEngine) {
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
    let wires = TransportOptions::named("tcp").unwrap().open(&Handle::current(), &clock).unwrap();
    assert_eq!(getrlimit(Resource::Nofile).current, all);
    drop(wires);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ipv6() {
    let tcp = [("MC_FORCE_TCP", "1"), ("MC_USE_IPV6", "1"), ("MC_TCP_BIND_ADDRESS", "::1")];
    let (owner, user) = (with(&tcp).start().await.unwrap(), with(&tcp).start().await.unwrap());
    assert!(owner.name().starts_with("[::1]:"), "{}", owner.name());
    assert_eq!(owner.descriptor().tcp_data_host, "::1");
    moves_bytes(&owner, &user).await;
    let plain = with(&[("MC_FORCE_TCP", "1")]).name("127.0.0.1").start().await.unwrap();
    moves_bytes(&owner, &plain).await;
    let named = with(&tcp[..2]).name("[::1]:7").start().await.unwrap();
    moves_bytes(&named, &plain).await;
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
    let named = with(&[("MC_TCP_BIND_ADDRESS", "192.0.2.1")]).name("127.0.0.1").start().await.unwrap();
    assert!(named.name().starts_with("127.0.0.1:"), "{}", named.name());
    assert_eq!(named.descriptor().tcp_data_host, "127.0.0.1");
}

/// Puts a descriptor with another data port into the directory, as of an engine that has moved.
async fn moved(directory: &Directory, port: u16) {
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
    let (lasting, fresh) =
        (start("lasting", &[]).await, start("fresh", &[("MC_DISABLE_METACACHE", "1")]).await);
    let watching = start("watching", &[("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "1")]).await;
    let port = async |engine: &TransferEngine| engine.open("owner").await.unwrap().descriptor().tcp_data_port;
    let before = owner.descriptor().tcp_data_port;
    for engine in [&lasting, &fresh, &watching] {
        assert_eq!(port(engine).await, before);
    }
    moved(&directory, 1).await;
    assert_eq!((port(&lasting).await, port(&fresh).await), (before, 1));
    tokio::time::timeout(Duration::from_secs(20), async {
        while port(&watching).await == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("looked up by itself");
    // A transfer that fails finds the port by itself, too.
    let region = owner.register(memory(64)).await.unwrap();
    moved(&directory, 1).await;
    let target = fresh.open("owner").await.unwrap();
    moved(&directory, before).await;
    fresh.write(&target, region.addr(), vec![1], None).await.0.unwrap();
}
