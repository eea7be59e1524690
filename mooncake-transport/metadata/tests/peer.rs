//! Tests against a live engine of Mooncake C++. Ignored by default. `PEER_PYTHON` is a Python that
//! has it installed, and the test runs where an interface besides `lo` is up:
//! `PEER_PYTHON=.venv/bin/python cargo test -p mooncake-metadata --test peer -- --ignored`.
#![cfg(not(miri))]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_metadata::{DirectoryOptions, connect};
use mooncake_transport::engine::HandshakePort;
use mooncake_transport::handshake::{HandshakeConfig, Kind, Notification, exchange, probe};
use mooncake_transport::net::HostPort;
use mooncake_transport::staged::{CopyTransport, Executor, Staged};
use mooncake_transport::{Directory, Engine, ExposedMemory, Protocol, SegmentDesc};

const SCRIPT: &str = r#"
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
status = engine.initialize(sys.argv[1], sys.argv[2], "tcp", "")
print(status, engine.get_rpc_port(), engine.allocate_managed_buffer(1 << 20), flush=True)
for line in sys.stdin:
    command, *rest = line.split()
    if command == "notifies":
        print(*[f"{n.name}={n.msg}" for n in engine.get_notifies()], flush=True)
    if command == "first":
        print(engine.get_first_buffer_address(rest[0]), flush=True)
"#;

struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    rpc_port: u16,
    buffer: u64,
}

impl Peer {
    fn start(name: &str, metadata: &str) -> Self {
        #[allow(clippy::disallowed_methods, reason = "the test's own argument")]
        let python = std::env::var("PEER_PYTHON").expect("PEER_PYTHON names a Python with Mooncake C++");
        let mut child = Command::new(python)
            .args(["-c", SCRIPT, name, metadata])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
        let [0, rpc_port, buffer] = numbers[..] else { panic!("the peer says {line:?}") };
        Self { child, input, output, rpc_port: rpc_port as u16, buffer }
    }

    fn send_command(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Looks like TCP from outside; moves nothing.
#[derive(Debug)]
struct Mute;

fn mute() -> Error {
    Error::new(ErrorCode::NotSupported, "this wire only describes itself")
}

impl CopyTransport for Mute {
    type Peer = ();

    fn protocol(&self) -> Protocol {
        Protocol::TCP
    }

    fn serve(&self, _memory: Arc<ExposedMemory>) {}

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.protocols.push(Protocol::TCP);
        desc.tcp_data_port = 9;
        desc.tcp_proto_version = 2;
    }

    async fn connect(&self, _desc: &SegmentDesc) -> Result<()> {
        Ok(())
    }

    async fn read_into(&self, _peer: &(), _addr: u64, _into: &mut [u8]) -> Result<()> {
        Err(mute())
    }

    async fn write_from(&self, _peer: &(), _addr: u64, _from: &[u8]) -> Result<()> {
        Err(mute())
    }
}

async fn engine(name: &str, directory: Directory) -> Engine<Staged<Mute>> {
    let wire = Staged::new(Mute, Executor::Inline, SystemClock::shared());
    let builder = Engine::builder(Arc::new(wire)).name(name).directory(directory);
    builder.handshake(HandshakePort::default()).start().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Mooncake C++, see above"]
async fn each_side_reads_the_others_descriptor_by_handshake() {
    let mut peer = Peer::start("127.0.0.1:1", "P2PHANDSHAKE");
    let ours = engine("", Directory::P2p).await;
    let theirs = format!("127.0.0.1:{}", peer.rpc_port);
    let target = ours.open(&theirs).await.unwrap();
    let desc = target.descriptor();
    assert!(desc.holds(peer.buffer, 1 << 20), "{desc:?}");
    assert!(desc.tcp_data_port != 0 && desc.tcp_proto_version == 2 && !desc.tcp_data_host.is_empty());
    let memory = ours.register(Arc::new(HostMemory::new(8192).unwrap())).await.unwrap();
    assert_eq!(peer.send_command(&format!("first {}", ours.name())), memory.addr().to_string());
    let note = Notification { name: "who".into(), message: "hello".into() };
    ours.notify(&theirs, &note).await.unwrap();
    assert_eq!(peer.send_command("notifies"), "who=hello");
    let (at, limits) = (HostPort::new("127.0.0.1", peer.rpc_port), HandshakeConfig::default());
    assert!(probe(&at, Duration::from_secs(1), &limits).await);
    let reply = exchange(&at, Kind::Connection, b"{}", &limits).await.unwrap();
    assert!(serde_json::from_slice::<serde_json::Value>(&reply).unwrap()["qp_num"].is_array());
}

#[cfg(feature = "metadata-http")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Mooncake C++ and METADATA_URL, its metadata server"]
async fn each_side_reads_the_others_descriptor_in_a_metadata_server() {
    #[allow(clippy::disallowed_methods, reason = "the test's own argument")]
    let url = std::env::var("METADATA_URL").expect("METADATA_URL names a metadata server");
    let mut peer = Peer::start("theirs:1", &url);
    let directory = connect(&url, &DirectoryOptions::default()).unwrap();
    let ours = engine("ours:1", directory.clone()).await;
    let target = ours.open("theirs:1").await.unwrap();
    assert!(target.descriptor().holds(peer.buffer, 1 << 20));
    let memory = ours.register(Arc::new(HostMemory::new(8192).unwrap())).await.unwrap();
    assert_eq!(peer.send_command("first ours:1"), memory.addr().to_string());
    ours.notify("theirs:1", &Notification { name: "n".into(), message: "m".into() }).await.unwrap();
    assert_eq!(peer.send_command("notifies"), "n=m");
    let at = |name| {
        let directory = directory.clone();
        async move { directory.locate(name).await.unwrap() }
    };
    assert_eq!(at("ours:1").await.as_ref(), ours.handshake_addr());
    ours.close().await.unwrap();
    assert_eq!(at("ours:1").await, None);
    // A peer killed without a word leaves its name behind; we may have it.
    drop(peer);
    assert!(at("theirs:1").await.is_some());
    let heir = engine("theirs:1", directory.clone()).await;
    assert_eq!(at("theirs:1").await.as_ref(), heir.handshake_addr());
    heir.close().await.unwrap();
}
