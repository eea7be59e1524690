//! Metadata directories in etcd and Redis, against real servers that each test starts (Debian:
//! `etcd-server`, `redis-server`). Without them a test reports that and passes, except in CI.
#![cfg(all(feature = "metadata-etcd", feature = "metadata-redis", not(miri)))]

mod servers;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::ErrorKind;
use mooncake_core::clock::SystemClock;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::testkit::{lease, meta::check};
use mooncake_metadata::etcd::EtcdMetadata;
use mooncake_metadata::redis::RedisMetadata;
use mooncake_metadata::{DirectoryOptions, RedisLogin, connect};
use mooncake_transport::engine::HandshakePort;
use mooncake_transport::{Directory, Engine, Loopback, LoopbackNet};
use servers::{Server, etcd, ready, redis, redis_with_password, start};

async fn etcd_backend(server: &Server) -> Arc<EtcdMetadata> {
    let backend = Arc::new(EtcdMetadata::new(&server.at()).unwrap());
    ready(&*backend).await;
    backend
}

async fn redis_backend(server: &Server, login: &RedisLogin) -> Arc<RedisMetadata> {
    let backend = Arc::new(RedisMetadata::new(&server.at(), login).unwrap());
    ready(&*backend).await;
    backend
}

#[tokio::test]
async fn etcd_conforms() {
    let Some(server) = start(etcd) else { return };
    let backend = etcd_backend(&server).await;
    check(backend.clone()).await;
    // Every key there is.
    backend.put("a", "1".into(), Expect::Any).await.unwrap();
    backend.put("é", "2".into(), Expect::Any).await.unwrap();
    assert_eq!(backend.list("").await.unwrap().len(), 2);
}

#[tokio::test]
async fn keys_held_in_etcd_conform() {
    let Some(server) = start(etcd) else { return };
    let backend = etcd_backend(&server).await;
    lease::check(&*backend, &SystemClock::new(), tokio::time::sleep).await;
}

#[tokio::test]
async fn redis_conforms() {
    let Some(server) = start(redis) else { return };
    let backend = redis_backend(&server, &RedisLogin::default()).await;
    check(backend.clone()).await;
    for key in ["p*/a", "p*/b", "pq/c", "p-[x]/d"] {
        backend.put(key, "v".into(), Expect::Any).await.unwrap();
    }
    let keys = |found: Vec<(String, _)>| found.into_iter().map(|(key, _)| key).collect::<Vec<_>>();
    assert_eq!(keys(backend.list("p*/").await.unwrap()), ["p*/a", "p*/b"], "a prefix is no pattern");
    assert_eq!(keys(backend.list("p-[x]").await.unwrap()), ["p-[x]/d"]);
}

#[tokio::test]
async fn redis_receives_the_credentials() {
    let Some(server) = start(redis_with_password) else { return };
    let login = RedisLogin { password: "open sesame".into(), database: 3, ..RedisLogin::default() };
    let backend = redis_backend(&server, &login).await;
    backend.put("k", "v".into(), Expect::Any).await.unwrap();
    let nobody = RedisMetadata::new(&server.at(), &RedisLogin::default()).unwrap();
    let error = nobody.get("k").await.unwrap_err();
    assert!(error.to_string().contains("NOAUTH") && error.to_string().contains(&server.at()), "{error}");
    let elsewhere = RedisMetadata::new(&server.at(), &RedisLogin { database: 0, ..login }).unwrap();
    assert!(elsewhere.get("k").await.unwrap().is_none(), "databases are apart");
}

#[tokio::test]
async fn a_watch_in_etcd_outlives_a_restart_of_the_server() {
    let Some(mut server) = start(etcd) else { return };
    let backend = etcd_backend(&server).await;
    let mut events = backend.watch("w/").await.unwrap();
    backend.put("w/a", "1".into(), Expect::Any).await.unwrap();
    assert_eq!(events.next().await.unwrap().key, "w/a");
    server.restart(etcd);
    ready(&*backend).await;
    assert_eq!(backend.get("w/a").await.unwrap().unwrap().value, "1", "etcd is durable");
    backend.put("w/b", "2".into(), Expect::Any).await.unwrap();
    let event = tokio::time::timeout(Duration::from_secs(30), events.next()).await.unwrap().unwrap();
    assert_eq!(
        (event.key.as_str(), event.value.unwrap().value),
        ("w/b", "2".into()),
        "nothing twice, nothing missed"
    );
}

#[tokio::test]
async fn unreachable_etcd_endpoint_is_skipped() {
    let Some(server) = start(etcd) else { return };
    ready(&*etcd_backend(&server).await).await;
    let nobody = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).unwrap();
    let backend = EtcdMetadata::new(&format!("etcd://{nobody},{}", server.at())).unwrap();
    backend.put("k", "v".into(), Expect::Absent).await.unwrap();
    let unreachable = EtcdMetadata::new(&nobody.to_string()).unwrap();
    let error = unreachable.get("k").await.unwrap_err();
    assert!(
        error.kind() == ErrorKind::Unavailable && error.to_string().contains(&nobody.to_string()),
        "{error}"
    );
}

#[tokio::test]
async fn redis_is_found_again_after_a_restart() {
    let Some(mut server) = start(redis) else { return };
    let backend = redis_backend(&server, &RedisLogin::default()).await;
    backend.put("k", "v".into(), Expect::Any).await.unwrap();
    server.restart(redis);
    ready(&*backend).await;
    assert!(backend.get("k").await.unwrap().is_none());
}

async fn engine(
    net: &LoopbackNet,
    name: &str,
    directory: Directory,
) -> mooncake_core::Result<Engine<Loopback>> {
    let handshake = HandshakePort {
        host: Some("127.0.0.1".into()),
        bind: Some([127, 0, 0, 1].into()),
        ..HandshakePort::default()
    };
    Engine::builder(Arc::new(net.node())).name(name).directory(directory).handshake(handshake).start().await
}

/// Checks that two engines meet in a directory, and that their entries have the format of Mooncake
/// C++, with the newline.
async fn engines_meet(url: &str, backend: Arc<dyn MetadataBackend>) {
    let net = LoopbackNet::new();
    let options = DirectoryOptions { cluster_id: "c".into(), ..DirectoryOptions::default() };
    let directory = connect(url, &options).unwrap();
    let (a, b) = (
        engine(&net, "a:1", directory.clone()).await.unwrap(),
        engine(&net, "b", directory.clone()).await.unwrap(),
    );
    let memory = Arc::new(mooncake_core::memory::HostMemory::new(4096).unwrap());
    let region = a.register(memory).await.unwrap();
    let target = b.open("a:1").await.unwrap();
    b.write(&target, region.addr(), vec![1, 2, 3], None).await.0.unwrap();
    let at = a.handshake_addr().unwrap();
    let stored = backend.get("mooncake/c/rpc_meta/a:1").await.unwrap().unwrap().value;
    assert_eq!(stored, format!("{{\"ip_or_host_name\":\"127.0.0.1\",\"rpc_port\":{}}}\n", at.port));
    let stored = backend.get("mooncake/c/ram/a:1").await.unwrap().unwrap().value;
    assert!(stored.ends_with(b"}\n") && stored.starts_with(b"{\"buffers\":[{"), "{stored:?}");
    // A name in use is refused, by the address of who has it.
    let refused = engine(&net, "a:1", directory.clone()).await.unwrap_err();
    assert!(
        refused.kind() == ErrorKind::AlreadyExists && refused.to_string().contains(&at.to_string()),
        "{refused}"
    );
    // As after a crash, the entry remains and no engine responds there.
    let stale = backend.get("mooncake/c/rpc_meta/a:1").await.unwrap().unwrap().value;
    drop(region);
    a.close().await.unwrap();
    backend.put("mooncake/c/rpc_meta/a:1", stale, Expect::Any).await.unwrap();
    let again = engine(&net, "a:1", directory).await.unwrap();
    again.close().await.unwrap();
    b.close().await.unwrap();
    assert!(backend.list("mooncake/").await.unwrap().is_empty());
}

#[tokio::test]
async fn engines_meet_in_etcd() {
    let Some(server) = start(etcd) else { return };
    let backend = etcd_backend(&server).await;
    engines_meet(&format!("etcd://{}", server.at()), backend).await;
}

#[tokio::test]
async fn engines_meet_in_redis() {
    let Some(server) = start(redis) else { return };
    let backend = redis_backend(&server, &RedisLogin::default()).await;
    engines_meet(&format!("redis://{}", server.at()), backend).await;
}
