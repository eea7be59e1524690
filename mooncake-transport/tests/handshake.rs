//! Handshake port over real sockets: its responses, its refusals, and its isolation from bad
//! clients.
#![cfg(not(miri))]

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::ErrorKind;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::meta::{MemoryMetadata, MetadataBackend};
use mooncake_transport::admission::ByteBudget;
use mooncake_transport::engine::HandshakePort;
use mooncake_transport::handshake::{
    HandshakeConfig, Kind, Notification, encode, exchange, fetch_descriptor, probe,
};
use mooncake_transport::net::HostPort;
use mooncake_transport::{Directory, Engine, Loopback, LoopbackNet};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HOST: &str = "127.0.0.1";

fn port() -> HandshakePort {
    HandshakePort { host: Some(HOST.into()), bind: Some([127, 0, 0, 1].into()), ..HandshakePort::default() }
}

async fn engine(net: &LoopbackNet, port: HandshakePort) -> Engine<Loopback> {
    let builder = Engine::builder(Arc::new(net.node())).directory(Directory::P2p).handshake(port);
    builder.start().await.unwrap()
}

async fn raw(at: &HostPort, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect((at.host.as_str(), at.port)).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut reply = Vec::new();
    // A reset is as good a refusal as a close.
    let _ = stream.read_to_end(&mut reply).await;
    reply
}

#[tokio::test]
async fn every_kind_is_answered() {
    let net = LoopbackNet::new();
    let engine = engine(&net, port()).await;
    let (at, limits) = (engine.handshake_addr().unwrap().clone(), HandshakeConfig::default());
    assert_eq!(engine.name(), at.to_string());
    assert!((15000..=17000).contains(&at.port));
    let region = engine.register(Arc::new(HostMemory::new(4096).unwrap())).await.unwrap();
    let desc = fetch_descriptor(&at, b"{}", &limits).await.unwrap();
    assert_eq!((desc.name.as_str(), desc.buffers[0].addr), (engine.name(), region.addr()));
    assert_eq!(desc.tcp_data_host, HOST);
    assert_eq!(exchange(&at, Kind::Probe, b"{}", &limits).await.unwrap(), br#"{"status":"success"}"#);
    let reply = exchange(&at, Kind::Connection, b"{}", &limits).await.unwrap();
    assert!(String::from_utf8(reply.clone()).unwrap().contains(r#""qp_num":[]"#));
    let legacy = raw(&at, &encode(Kind::Connection, true, b"{}")).await;
    assert_eq!(&legacy[8..], &reply[..], "the oldest peers are answered without a type byte");
    assert_eq!(
        raw(&at, &encode(Kind::Probe, false, b"{}")).await,
        encode(Kind::Probe, false, br#"{"status":"success"}"#)
    );
}

/// Engines with very many regions are found, and find others, with the default limits.
#[tokio::test]
async fn engines_with_many_regions_find_each_other() {
    const REGIONS: usize = 20_000;
    let net = LoopbackNet::new();
    let (large, small) = (engine(&net, port()).await, engine(&net, port()).await);
    let memory = (0..REGIONS).map(|_| Arc::new(HostMemory::new(64).unwrap()) as Arc<dyn MemorySource>);
    let regions = large.register_many(memory.collect()).await.unwrap();
    assert!(large.descriptor().encode().len() > 1 << 20, "longer than a message");
    let found = small.open(large.name()).await.unwrap().descriptor();
    assert_eq!(found.buffers.len(), REGIONS);
    let is_found = |at: usize| found.holds(regions[at].addr(), 64);
    assert!(is_found(0) && is_found(REGIONS - 1));
    let region = small.register(Arc::new(HostMemory::new(4096).unwrap())).await.unwrap();
    let found = large.open(small.name()).await.unwrap().descriptor();
    assert_eq!(found.buffers[0].addr, region.addr());
}

/// A message above the limit of a peer names the limit.
#[tokio::test]
async fn oversized_message_error_states_limit() {
    let net = LoopbackNet::new();
    let engine = engine(&net, port()).await;
    let at = engine.handshake_addr().unwrap();
    let limits = HandshakeConfig { max_len: 8, ..HandshakeConfig::default() };
    let error = exchange(at, Kind::Connection, b"{}", &limits).await.unwrap_err().to_string();
    assert!(error.contains("at most 8 are read (MC_HANDSHAKE_MAX_LENGTH)"), "{error}");
    assert!(fetch_descriptor(at, b"{}", &limits).await.is_ok(), "a descriptor has another limit");
}

/// Parts of requests are counted while they wait, and released when their connection ends.
#[tokio::test]
async fn parts_of_requests_are_counted() {
    let net = LoopbackNet::new();
    let limits = HandshakeConfig { max_len: 64 << 20, ..HandshakeConfig::default() };
    let engine = engine(&net, HandshakePort { limits, ..port() }).await;
    let at = engine.handshake_addr().unwrap();
    let mut stream = TcpStream::connect((at.host.as_str(), at.port)).await.unwrap();
    stream.write_all(&(32_u64 << 20).to_le_bytes()).await.unwrap();
    stream.write_all(&vec![7; 16 << 20]).await.unwrap();
    let until = async |holds: fn(u64) -> bool| {
        let wait = async {
            while !holds(ByteBudget::of_process().report().held) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("bytes are counted exactly");
    };
    until(|held| held >= 16 << 20).await;
    drop(stream);
    until(|held| held < 16 << 20).await;
}

#[tokio::test]
async fn notifications_arrive_in_order_and_are_bounded() {
    let net = LoopbackNet::new();
    let limits = HandshakeConfig { max_notifications: 2, ..HandshakeConfig::default() };
    let receiver = engine(&net, HandshakePort { limits, ..port() }).await;
    let sender = engine(&net, port()).await;
    let note = |i: u32| Notification { name: format!("n{i}"), message: "hello".into() };
    for i in 0..2 {
        sender.notify(receiver.name(), &note(i)).await.unwrap();
    }
    assert_eq!(sender.notify(receiver.name(), &note(2)).await.unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(receiver.take_notifications(), [note(0), note(1)]);
    sender.notify(receiver.name(), &note(3)).await.unwrap();
    assert_eq!(receiver.take_notifications(), [note(3)]);
}

#[tokio::test]
async fn untaken_notifications_are_bounded_in_bytes() {
    let net = LoopbackNet::new();
    let limits = HandshakeConfig { max_notification_bytes: 100, ..HandshakeConfig::default() };
    let receiver = engine(&net, HandshakePort { limits, ..port() }).await;
    let sender = engine(&net, port()).await;
    let note = |len: usize| Notification { name: "n".into(), message: "m".repeat(len) };
    let error = sender.notify(receiver.name(), &note(2 << 20)).await.unwrap_err().to_string();
    assert!(error.contains("where frames have 1048576 at most"), "{error}");
    for _ in 0..2 {
        sender.notify(receiver.name(), &note(500)).await.unwrap();
        assert_eq!(sender.notify(receiver.name(), &note(1)).await.unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(pin!(receiver.notifications()).next().await, Some(note(500)), "a long one waits alone");
        sender.notify(receiver.name(), &note(49)).await.unwrap();
        sender.notify(receiver.name(), &note(49)).await.unwrap();
        assert_eq!(sender.notify(receiver.name(), &note(1)).await.unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(receiver.take_notifications(), [note(49), note(49)]);
    }
}

#[tokio::test]
async fn bad_frames_are_closed_without_a_reply() {
    let net = LoopbackNet::new();
    let engine = engine(&net, port()).await;
    let at = engine.handshake_addr().unwrap();
    let with_len = |len: u64, rest: &[u8]| [&len.to_le_bytes()[..], rest].concat();
    for bytes in [
        with_len(0, b""),
        with_len(1 << 63, b"x"),
        with_len((1 << 20) + 1, b"\x01{}"),
        with_len(3, b"\x80{}"),
        with_len(3, b"\x01{]"),
        with_len(2, b"\x01"),
        with_len(2, b"xx"),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        let mut stream = TcpStream::connect((at.host.as_str(), at.port)).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply).await;
        assert!(reply.is_empty(), "{bytes:?} was answered with {reply:?}");
    }
    assert!(
        probe(at, Duration::from_secs(1), &HandshakeConfig::default()).await,
        "and nobody else is harmed"
    );
}

#[tokio::test]
async fn a_stalled_client_costs_other_clients_nothing() {
    let net = LoopbackNet::new();
    let limits =
        HandshakeConfig { receive_timeout: Duration::from_millis(300), ..HandshakeConfig::default() };
    let engine = engine(&net, HandshakePort { limits, ..port() }).await;
    let at = engine.handshake_addr().unwrap();
    let mut silent = Vec::new();
    for i in 0..20u64 {
        let mut stream = TcpStream::connect((at.host.as_str(), at.port)).await.unwrap();
        // Some say nothing at all, some announce more than they send.
        stream.write_all(&(1000 * (i % 2)).to_le_bytes()[..(8 * (i % 2)) as usize]).await.unwrap();
        silent.push(stream);
    }
    let (clock, limits) = (SystemClock::new(), HandshakeConfig::default());
    let start = clock.now();
    for _ in 0..20 {
        assert!(probe(at, Duration::from_secs(1), &limits).await);
    }
    assert!(clock.now().since(start) < Duration::from_millis(250), "{:?}", clock.now().since(start));
    for mut stream in silent {
        let mut reply = Vec::new();
        tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut reply))
            .await
            .expect("cut off")
            .ok();
        assert!(reply.is_empty());
    }
}

#[tokio::test]
async fn idle_connections_take_no_slot_from_others() {
    let net = LoopbackNet::new();
    let limits = HandshakeConfig {
        max_connections: 3,
        receive_timeout: Duration::from_secs(60),
        ..HandshakeConfig::default()
    };
    let engine = engine(&net, HandshakePort { limits, ..port() }).await;
    let at = engine.handshake_addr().unwrap();
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(TcpStream::connect((at.host.as_str(), at.port)).await.unwrap());
    }
    for _ in 0..2 {
        assert!(probe(at, Duration::from_secs(10), &HandshakeConfig::default()).await);
    }
    // The first connection was replaced. The others still get responses.
    let mut reply = Vec::new();
    let _ = silent.remove(0).read_to_end(&mut reply).await;
    assert!(reply.is_empty());
    let mut last = silent.pop().unwrap();
    last.write_all(&encode(Kind::Probe, false, b"{}")).await.unwrap();
    last.shutdown().await.unwrap();
    last.read_to_end(&mut reply).await.unwrap();
    assert_eq!(reply, encode(Kind::Probe, false, br#"{"status":"success"}"#));
}

#[tokio::test]
async fn legacy_peer_gets_no_type_byte() {
    let listener = tokio::net::TcpListener::bind((HOST, 0)).await.unwrap();
    let at = HostPort::new(HOST, listener.local_addr().unwrap().port());
    let old = tokio::spawn(async move {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let len = stream.read_u64_le().await.unwrap();
            let mut text = vec![0; len as usize];
            stream.read_exact(&mut text).await.unwrap();
            // Text that does not begin like JSON is not understood, and the connection is closed.
            if text[0] == b'{' {
                stream.write_all(&encode(Kind::Connection, true, br#"{"qp_num":[7]}"#)).await.unwrap();
            }
        }
    });
    let limits = HandshakeConfig::default();
    assert_eq!(exchange(&at, Kind::Connection, b"{}", &limits).await.unwrap(), br#"{"qp_num":[7]}"#);
    old.await.unwrap();
}

#[tokio::test]
async fn closed_port_and_stalled_listener_differ() {
    let limits = HandshakeConfig { reply_timeout: Duration::from_millis(50), ..HandshakeConfig::default() };
    let silent = tokio::net::TcpListener::bind((HOST, 0)).await.unwrap();
    let at = HostPort::new(HOST, silent.local_addr().unwrap().port());
    let late = fetch_descriptor(&at, b"{}", &limits).await.unwrap_err();
    assert!(late.kind() == ErrorKind::Timeout && late.to_string().contains(&at.to_string()), "{late}");
    drop(silent);
    let refused = fetch_descriptor(&at, b"{}", &limits).await.unwrap_err();
    assert!(
        refused.kind() == ErrorKind::Unavailable && refused.to_string().contains(&at.to_string()),
        "{refused}"
    );
}

#[tokio::test]
async fn port_in_use_error_states_port() {
    let net = LoopbackNet::new();
    let first = engine(&net, port()).await;
    let taken = first.handshake_addr().unwrap().port;
    let wanted = HandshakePort { ports: taken..=taken, ..port() };
    let builder = Engine::builder(Arc::new(net.node())).directory(Directory::P2p).handshake(wanted);
    let error = builder.start().await.unwrap_err().to_string();
    assert!(error.contains(&taken.to_string()) && error.contains("in use"), "{error}");
}

#[tokio::test]
async fn transfers_work_between_engines_that_meet_at_the_handshake_port() {
    let net = LoopbackNet::new();
    let (a, b) = (engine(&net, port()).await, engine(&net, port()).await);
    let remote = a.register(Arc::new(HostMemory::new(4096).unwrap())).await.unwrap();
    let target = b.open(a.name()).await.unwrap();
    b.write(&target, remote.addr(), b"over there".to_vec(), None).await.0.unwrap();
    let (result, got) = b.read(&target, remote.addr(), vec![0; 10], None).await;
    result.unwrap();
    assert_eq!(got, b"over there");
    a.close().await.unwrap();
    b.forget(a.name());
    assert_eq!(b.open(a.name()).await.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_name_in_use_is_refused_and_a_stale_one_taken_over() {
    let net = LoopbackNet::new();
    let metadata = Arc::new(MemoryMetadata::new());
    let start = || {
        let directory = Directory::new(metadata.clone());
        Engine::builder(Arc::new(net.node())).name("node:7").directory(directory).handshake(port()).start()
    };
    let first = start().await.unwrap();
    let at = first.handshake_addr().unwrap().clone();
    let refused = start().await.unwrap_err();
    assert!(
        refused.kind() == ErrorKind::AlreadyExists && refused.to_string().contains(&at.to_string()),
        "{refused}"
    );
    // As after a crash: the entries stay, the port is silent.
    let stale = metadata.get("mooncake/rpc_meta/node:7").await.unwrap().unwrap().value;
    first.close().await.unwrap();
    assert!(metadata.get("mooncake/rpc_meta/node:7").await.unwrap().is_none());
    metadata.put("mooncake/rpc_meta/node:7", stale, mooncake_core::meta::Expect::Any).await.unwrap();
    let second = start().await.unwrap();
    assert_ne!(second.handshake_addr().unwrap(), &at);
    let (at, limits) = (second.handshake_addr().unwrap(), HandshakeConfig::default());
    let descriptor = exchange(at, Kind::Metadata, b"{}", &limits).await.unwrap();
    assert_eq!(descriptor, b"null", "the descriptor is in the directory");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_want_a_stale_name_one_has_it() {
    let net = LoopbackNet::new();
    for round in 0..5 {
        let metadata = Arc::new(MemoryMetadata::new());
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let stale = format!("{{\"ip_or_host_name\": \"127.0.0.1\", \"rpc_port\": {}}}", nobody.port());
        metadata.put("mooncake/rpc_meta/n", stale.into(), mooncake_core::meta::Expect::Any).await.unwrap();
        let engines = (0..8).map(|_| {
            let (node, directory) = (Arc::new(net.node()), Directory::new(metadata.clone()));
            tokio::spawn(Engine::builder(node).name("n").directory(directory).handshake(port()).start())
        });
        let engines = futures::future::join_all(engines.collect::<Vec<_>>()).await;
        let (has, others): (Vec<_>, Vec<_>) =
            engines.into_iter().map(Result::unwrap).partition(Result::is_ok);
        assert_eq!(has.len(), 1, "in round {round}");
        for refused in others {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        let owner = has.into_iter().next().unwrap().unwrap();
        let found = Directory::new(metadata).locate("n").await.unwrap();
        assert_eq!(found.as_ref(), owner.handshake_addr(), "in round {round}");
    }
}
