//! Several transports of one engine: the choice between them, and the isolation from a peer that
//! does not respond.
#![cfg(all(feature = "transport-tcp", feature = "transport-shm"))]

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_shm::ShmConfig;
use mooncake_tcp::TcpConfig;
use mooncake_transport::engine::{Batch, LocalCopies, Status};
use mooncake_transport::handshake::{HandshakeConfig, Notification};
use mooncake_transport::net::HostPort;
use mooncake_transport::{Directory, Protocol, SegmentDesc};
use socket2::{Domain, Socket, Type};

async fn engine(wires: TransportOptions) -> TransferEngine {
    let builder =
        TransferEngine::builder().name("127.0.0.1").transports(wires).local_copies(LocalCopies::Never);
    builder.start().await.unwrap()
}

fn both(data_host: &str) -> TransportOptions {
    let tcp = TcpConfig { data_host: data_host.into(), ..TcpConfig::default() };
    TransportOptions { tcp: Some(tcp), shm: Some(ShmConfig::default()), ..TransportOptions::default() }
}

fn memory(len: usize, shared: bool) -> Arc<HostMemory> {
    let shared = shared.then(|| "transports".into());
    Arc::new(HostMemory::with(len, &HostMemoryOptions { shared, ..HostMemoryOptions::default() }).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_location_of_memory_decides_the_transport() {
    const LEN: usize = 8 << 20;
    // A success has not gone over TCP, because no process can connect to this address.
    let (local, user) = (engine(both("192.0.2.1")).await, engine(both("127.0.0.1")).await);
    let region = local.register(memory(LEN, true)).await.unwrap();
    let target = user.open(local.name()).await.unwrap();
    for len in [1, 5000, LEN] {
        let mut batch = Batch::new();
        batch.write(&target, region.addr() + (LEN - len) as u64, vec![7; len]);
        assert!(user.submit(batch, None).await.results[0].is_ok(), "{len} bytes");
        let (result, read) = user.read(&target, region.addr() + (LEN - len) as u64, vec![0; len], None).await;
        result.unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
    }
    let region = local.register(memory(4096, false)).await.unwrap();
    let deadline = Some(user.clock().now().after(Duration::from_millis(200)));
    let (result, _) = user.read(&target, region.addr(), vec![0; 8], deadline).await;
    assert!(result.is_err(), "what is not shared has no other way");
    let line = |name: &str| user.metrics().into_iter().find(|line| line.peer == name).unwrap();
    assert_eq!(line(local.name()).wire.as_str(), "shm+tcp");
    let (left, bytes) = (line(local.name()).fallback_requests, line(local.name()).fallback_bytes);
    assert!(left >= 1 && bytes == 8 * left, "{left} times, {bytes} bytes");
    // One batch over both.
    let remote = engine(both("127.0.0.1")).await;
    let (shared, private) =
        (remote.register(memory(LEN, true)).await, remote.register(memory(LEN, false)).await);
    let (shared, private) = (shared.unwrap(), private.unwrap());
    let target = user.open(remote.name()).await.unwrap();
    let mut batch = Batch::new();
    for i in 0..16 {
        let region = if i % 2 == 0 { &shared } else { &private };
        batch.write(&target, region.addr() + (i << 18) as u64, vec![i as u8; 1 << 18]);
    }
    let done = user.submit(batch, None).await;
    assert!(done.results.iter().all(Result::is_ok));
    let line = line(remote.name());
    assert_eq!((line.counts.writes, line.fallback_requests, line.fallback_bytes), (16, 8, 8 << 18));
    for i in 0..16u8 {
        let region = if i % 2 == 0 { &shared } else { &private };
        let mut got = vec![0; 1 << 18];
        region.slice(0..LEN).unwrap().copy_to(usize::from(i) << 18, &mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == i));
    }
}

/// A port that takes no connection, and says nothing about it.
fn black_hole() -> (Socket, Vec<Socket>, u16) {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    listener.listen(0).unwrap();
    let at = listener.local_addr().unwrap();
    let full = (0..4)
        .map(|_| {
            let stream = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.connect(&at);
            stream
        })
        .collect();
    let port = at.as_socket().unwrap().port();
    (listener, full, port)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_does_not_respond_delays_no_other() {
    let (_listener, _full, port) = black_hole();
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    let mut desc = SegmentDesc::new("silent");
    desc.protocols.push(Protocol::TCP);
    desc.tcp_data_host = "127.0.0.1".into();
    desc.tcp_data_port = port;
    directory.publish(&desc, true).await.unwrap();
    let start = |name: &str| {
        let builder = TransferEngine::builder().name(name).directory(directory.clone());
        builder.transports(both("127.0.0.1").without_shared_memory()).local_copies(LocalCopies::Never).start()
    };
    let (owner, user) = (start("owner").await.unwrap(), start("user").await.unwrap());
    let region = owner.register(memory(4096, false)).await.unwrap();
    let (silent, alive) = (user.open("silent").await.unwrap(), user.open("owner").await.unwrap());
    let mut batch = Batch::new();
    batch.write(&silent, 4096, vec![1; 100]);
    batch.write(&alive, region.addr(), vec![1; 100]);
    let running = user.submit(batch, Some(user.clock().now().after(Duration::from_secs(2))));
    let view = running.view();
    // Others in the same batch, and after it.
    while view.request(1).unwrap().status == Status::Pending {
        tokio::task::yield_now().await;
    }
    assert_eq!(view.request(1).unwrap().status, Status::Completed);
    for _ in 0..100 {
        user.write(&alive, region.addr(), vec![2; 100], None).await.0.unwrap();
    }
    assert_eq!(view.request(0).unwrap().status, Status::Pending, "and it is still waited for");
    let done = running.await;
    assert_eq!(done.results[0].as_ref().unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(view.overall().status, Status::Timeout);
}

/// Starts a target that reads the header of one read, reports it, and responds on command.
fn slow_target() -> (u16, Receiver<()>, Sender<()>, JoinHandle<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let ((respond, wait), (requested, request_received)) = (channel(), channel());
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 24]).unwrap();
        requested.send(()).unwrap();
        wait.recv().unwrap();
        stream.write_all(&[&b"\0\0\0\0VTCM"[..], &[5; 100]].concat()).unwrap();
        // Until the other side closes: nothing more is asked.
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0);
    });
    (port, request_received, respond, thread)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_in_a_batch_that_is_given_up_is_not_sent() {
    let (port, request_received, respond, target) = slow_target();
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    let mut desc = SegmentDesc::new("slow");
    desc.protocols.push(Protocol::TCP);
    desc.tcp_data_host = "127.0.0.1".into();
    desc.tcp_data_port = port;
    desc.tcp_proto_version = 2;
    directory.publish(&desc, true).await.unwrap();
    let mut wires = both("127.0.0.1").without_shared_memory();
    wires.tcp = Some(TcpConfig { connections: 1, window: 1, ..wires.tcp.unwrap_or_default() });
    let user =
        TransferEngine::builder().name("user").directory(directory).transports(wires).start().await.unwrap();
    let slow_peer = user.open("slow").await.unwrap();
    let sources: Vec<_> = (0..4).map(|_| memory(100, false)).collect();
    let mut batch = Batch::new();
    for (i, source) in sources.iter().enumerate() {
        let region = user.register_local(source.clone()).unwrap();
        batch.read(&slow_peer, i as u64 * 100, region.exclusive().unwrap());
    }
    let holders = || [0, 1, 2, 3].map(|i| Arc::strong_count(&sources[i]));
    let running = user.submit(batch, None);
    let view = running.view();
    tokio::task::block_in_place(|| request_received.recv()).unwrap();
    assert_eq!(view.overall().status, Status::Pending);
    drop(running);
    let statuses = || [0, 1, 2, 3].map(|i| view.request(i).unwrap().status);
    while statuses()[1..].contains(&Status::Pending) {
        tokio::task::yield_now().await;
    }
    assert_eq!(statuses(), [Status::Pending, Status::Canceled, Status::Canceled, Status::Canceled]);
    assert_eq!(holders()[0], 2, "what is on its way keeps its memory");
    respond.send(()).unwrap();
    while view.request(0).unwrap().status == Status::Pending || holders() != [1; 4] {
        tokio::task::yield_now().await;
    }
    assert_eq!(view.request(0).unwrap().status, Status::Completed);
    drop(user);
    target.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_to_be_repeated_is_given_up_too() {
    let (port, request_received, respond, target) = slow_target();
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    let mut desc = SegmentDesc::new("moved");
    desc.protocols.push(Protocol::TCP);
    desc.tcp_data_host = "127.0.0.1".into();
    desc.tcp_proto_version = 2;
    // No process listens at the earlier address.
    desc.tcp_data_port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    directory.publish(&desc, true).await.unwrap();
    let mut wires = both("127.0.0.1").without_shared_memory();
    wires.tcp = Some(TcpConfig { connections: 1, window: 1, ..wires.tcp.unwrap_or_default() });
    let user = TransferEngine::builder()
        .name("user")
        .directory(directory.clone())
        .transports(wires)
        .start()
        .await
        .unwrap();
    let moved = user.open("moved").await.unwrap();
    desc.tcp_data_port = port;
    directory.publish(&desc, false).await.unwrap();
    let regions = [(); 2].map(|()| user.register_local(memory(100, false)).unwrap());
    let mut batch = Batch::new();
    for (i, region) in regions.into_iter().enumerate() {
        batch.read(&moved, i as u64 * 100, region.exclusive().unwrap());
    }
    let running = user.submit(batch, None);
    let view = running.view();
    let driving = tokio::spawn(running);
    tokio::task::block_in_place(|| request_received.recv()).unwrap();
    assert_eq!(view.overall().status, Status::Pending);
    driving.abort();
    assert!(driving.await.unwrap_err().is_cancelled());
    while view.request(1).unwrap().status == Status::Pending {
        tokio::task::yield_now().await;
    }
    assert_eq!(view.request(1).unwrap().status, Status::Canceled);
    assert_eq!(view.request(0).unwrap().status, Status::Pending, "it is on the wire, and not over");
    respond.send(()).unwrap();
    while view.request(0).unwrap().status == Status::Pending {
        tokio::task::yield_now().await;
    }
    assert_eq!(view.request(0).unwrap().status, Status::Completed);
    drop((moved, user));
    target.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notification_that_no_peer_takes_ends_with_the_deadline() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    let mut desc = SegmentDesc::new("silent");
    desc.protocols.push(Protocol::TCP);
    desc.tcp_data_host = "127.0.0.1".into();
    desc.tcp_data_port = 9;
    let at = HostPort::new("127.0.0.1", silent.local_addr().unwrap().port());
    directory.announce("silent", &at, &HandshakeConfig::default()).await.unwrap();
    directory.publish(&desc, true).await.unwrap();
    let user = TransferEngine::builder()
        .name("user")
        .directory(directory)
        .transports(both("127.0.0.1"))
        .start()
        .await
        .unwrap();
    let target = user.open("silent").await.unwrap();
    let mut batch = Batch::new();
    batch.notify(&target, Notification { name: "n".into(), message: "m".into() });
    let begun = user.clock().now();
    let finished = user.submit(batch, Some(begun.after(Duration::from_millis(200)))).await;
    assert_eq!(finished.notified.unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    // Half of what the handshake port alone would be waited for.
    assert!(user.clock().now().since(begun) < Duration::from_secs(5));
}
