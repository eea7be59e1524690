//! Untrusted peers: an owner and a peer that are only a socket. A node believes nothing that they
//! send.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_ipc::record::{Record, RegionRecord};
use mooncake_shm::{ShmConfig, ShmTransport};
use mooncake_transport::fallback::PartialTransport;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, Region, SegmentDesc, Transport};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::runtime::Runtime;

const KEY: &str = "shm_endpoint";

fn node() -> (ShmTransport, Runtime) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let config = ShmConfig { response_timeout: Duration::from_millis(300), ..ShmConfig::default() };
    (ShmTransport::start(config, runtime.handle()).unwrap(), runtime)
}

fn shared(len: usize) -> HostMemory {
    HostMemory::with(len, &HostMemoryOptions { shared: Some("t".into()), ..Default::default() }).unwrap()
}

fn send(to: &UnixStream, bytes: &[u8], fd: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let _ = sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
}

/// Connects a node to an owner that runs `script`, and returns the resulting error.
fn connect(number: usize, script: impl FnOnce(&UnixStream) + Send) -> mooncake_core::Error {
    let name = format!("mooncake-shm-stranger-{}-{number}", std::process::id());
    let listener =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(name.as_bytes()).unwrap()).unwrap();
    let (node, runtime) = node();
    let mut desc = SegmentDesc::new("stranger");
    node.describe(&mut desc);
    let own_endpoint = desc.extra[KEY].as_str().unwrap().to_owned();
    let (host, _) = own_endpoint.split_once(':').unwrap();
    desc.extra.insert(KEY.into(), format!("{host}:{name}").into());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            script(&stream);
            // Waits until the node closes the connection.
            let _ = std::io::copy(&mut &stream, &mut std::io::sink());
        });
        runtime.block_on(node.connect(&desc)).unwrap_err()
    })
}

#[test]
fn malformed_responses_are_refused_by_name() {
    let sealed_file = shared(4096);
    let unsealed_file = tempfile();
    let send_tables = |to: &UnixStream| {
        send(to, &Record::SlotTable.encode(), sealed_file.fd());
        send(to, &Record::CopyCounters.encode(), sealed_file.fd());
    };
    let head = |to: &UnixStream, regions| send(to, &Record::Head { regions, version: 0 }.encode(), None);
    let region = RegionRecord { slot: 0, generation: 1, addr: 0x1000, len: 4096, offset: 0 };
    let send_one_region = |to: &UnixStream, region| {
        send_tables(to);
        head(to, 1);
        send(to, &Record::Region(region).encode(), sealed_file.fd());
    };
    type Script<'a> = Box<dyn Fn(&UnixStream) + Send + Sync + 'a>;
    let scripts: Vec<(&str, Script<'_>)> = vec![
        ("begins with", Box::new(|to| send(to, &[7; 64], None))),
        ("not one record", Box::new(|to| send(to, &[7; 63], None))),
        (
            "instead of the slot table",
            Box::new(|to| send(to, &Record::CopyCounters.encode(), sealed_file.fd())),
        ),
        ("without the file", Box::new(|to| send(to, &Record::SlotTable.encode(), None))),
        ("cannot be sealed", Box::new(|to| send(to, &Record::SlotTable.encode(), Some(to.as_fd())))),
        ("sealed", Box::new(|to| send(to, &Record::SlotTable.encode(), Some(unsealed_file.as_fd())))),
        (
            "too many regions",
            Box::new(|to| {
                send_tables(to);
                head(to, u32::MAX);
            }),
        ),
        ("slot", Box::new(|to| send_one_region(to, RegionRecord { slot: 480, ..region }))),
        ("in a file of", Box::new(|to| send_one_region(to, RegionRecord { offset: 1, ..region }))),
        ("a region of", Box::new(|to| send_one_region(to, RegionRecord { addr: u64::MAX, ..region }))),
        (
            "without the file",
            Box::new(|to| {
                send_tables(to);
                head(to, 1);
                send(to, &Record::Region(region).encode(), None);
            }),
        ),
        ("does not answer", Box::new(|to| send_tables(to))),
    ];
    for (number, (word, script)) in scripts.iter().enumerate() {
        let error = connect(number, script);
        assert!(error.to_string().contains(word), "{number}: {error}");
    }
}

/// Creates a file whose size any process could change.
fn tempfile() -> File {
    let fd = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(fd);
    file.set_len(4096).unwrap();
    file
}

#[test]
fn descriptors_that_lead_nowhere_are_errors() {
    let (node, runtime) = node();
    let mut desc = SegmentDesc::new("nowhere");
    assert!(!node.reaches(&desc));
    node.describe(&mut desc);
    let own_endpoint = desc.extra[KEY].as_str().unwrap().to_owned();
    let (host, _) = own_endpoint.split_once(':').unwrap();
    for (value, kind) in [
        (serde_json::json!(7), ErrorKind::Invalid),
        (serde_json::json!("no colon"), ErrorKind::Invalid),
        (serde_json::json!("another-host:name"), ErrorKind::Unsupported),
        (serde_json::json!(format!("{host}:nobody-listens-here")), ErrorKind::Unavailable),
        (serde_json::json!(format!("{host}:{}", "x".repeat(5000))), ErrorKind::Invalid),
        (serde_json::json!(format!("{host}:")), ErrorKind::Invalid),
    ] {
        desc.extra.insert(KEY.into(), value.clone());
        let error = runtime.block_on(node.connect(&desc)).unwrap_err();
        assert_eq!(error.kind(), kind, "{value}: {error}");
    }
}

#[test]
fn an_owner_outlives_peers_that_send_garbage() {
    let (owner, runtime) = node();
    let region = Region::register(&owner, Arc::new(shared(4096)), Access::Remote).unwrap();
    let mut desc = SegmentDesc::new("owner");
    owner.describe(&mut desc);
    let name = desc.extra[KEY].as_str().unwrap().split_once(':').unwrap().1.to_owned();
    let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
    let mut open_connections = Vec::new();
    for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 64], &[255; 64], &Record::CopyCounters.encode()] {
        let stream = UnixStream::connect_addr(&address).unwrap();
        send(&stream, bytes, None);
        open_connections.push(stream);
        // The first record is valid, and garbage follows, with a useless file.
        let stream = UnixStream::connect_addr(&address).unwrap();
        send(&stream, &Record::ListRegions.encode(), None);
        send(&stream, bytes, Some(stream.as_fd()));
        send(&stream, bytes, None);
        open_connections.push(stream);
    }
    let (user, _runtime) = node();
    let peer = runtime.block_on(user.connect(&desc)).unwrap();
    let deadline = Some(user.clock().now().after(Duration::from_secs(20)));
    let read = [Transfer::new(region.addr(), vec![1u8; 64])];
    let (result, [read]) = transfer::read(&user, &peer, read, deadline).wait();
    result.unwrap();
    assert_eq!(read.buffer, [0; 64]);
    drop(open_connections);
    drop(region);
}
