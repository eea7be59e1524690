//! Instances: a data connection is bound to the process that published the descriptor. A later
//! process on the same host, port and address gets no request that was meant for the earlier one.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr::NonNull;
use std::sync::{Arc, RwLock};

use common::*;
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::testkit::{ForkedChild, fork_child, free_port};
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_tcp::hello::{Hello, HelloResponse, Instance};
use mooncake_tcp::{Framing, TcpConfig, TcpPeer, TcpTransport};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Protocol, Region, SegmentDesc, Transport};

const LEN: usize = 1 << 16;

/// Held exclusively while a process starts. Up to its `exec` the new process has copies of all
/// sockets, so a port of this process that is closed meanwhile stays in use.
static PROCESS_START_LOCK: RwLock<()> = RwLock::new(());

/// Registers `memory`, filled with `byte`, at a data port.
fn owner(port: u16, memory: &Arc<HostMemory>, byte: u8) -> (Node, Region<TcpTransport>) {
    let node = Node::start(TcpConfig { ports: port..=port, ..TcpConfig::default() });
    let region = Region::register(&node.transport, memory.clone(), Access::Remote).unwrap();
    let mut all = region.exclusive().unwrap();
    all.copy_from(0, &vec![byte; memory.span().len]).unwrap();
    (node, all.into_region().unwrap())
}

fn descriptor(node: &Node, region: &Region<TcpTransport>) -> SegmentDesc {
    described(&node.transport, region.addr(), region.len())
}

/// Returns the descriptor as a client sees it, after a round trip through its JSON form.
fn described(transport: &TcpTransport, addr: u64, len: usize) -> SegmentDesc {
    let mut desc = SegmentDesc::new("owner");
    desc.buffers.push(BufferDesc { name: "owner".into(), addr, length: len as u64, ..BufferDesc::default() });
    transport.describe(&mut desc);
    desc.tcp_data_host = "127.0.0.1".into();
    SegmentDesc::decode(&desc.encode()).unwrap()
}

/// Returns the instance that a descriptor names.
fn instance(desc: &SegmentDesc) -> &str {
    desc.extra.get("tcp_instance").and_then(|value| value.as_str()).unwrap_or("none")
}

struct Client {
    node: Node,
    peer: TcpPeer,
}

impl Client {
    fn to(desc: &SegmentDesc, config: TcpConfig) -> Self {
        let node = Node::start(config);
        let peer = node.runtime.block_on(node.transport.connect(desc)).unwrap();
        Self { node, peer }
    }

    fn read(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let deadline = Some(self.node.transport.clock().now().after(TIMEOUT));
        let transfers = [Transfer::new(at, vec![0; len])];
        let (result, [transfer]) =
            transfer::read(&self.node.transport, &self.peer, transfers, deadline).wait();
        result.map(|()| transfer.buffer)
    }

    fn write(&self, at: u64, bytes: Vec<u8>) -> Result<()> {
        let deadline = Some(self.node.transport.clock().now().after(TIMEOUT));
        transfer::write(&self.node.transport, &self.peer, [Transfer::new(at, bytes)], deadline).wait().0
    }
}

/// Checks that the error names the expected instance and, if known, the one that was found.
fn assert_names_instances(error: &Error, expected: &str, found: Option<&str>) {
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{text}");
    assert!(text.contains(expected), "{text} does not name {expected}");
    assert!(found.is_none_or(|found| text.contains(found)), "{text} does not name {found:?}");
}

#[test]
fn a_process_that_took_over_port_and_address_is_not_used() {
    for framing in [Framing::Acknowledged, Framing::Plain] {
        let memory = Arc::new(HostMemory::new(LEN).unwrap());
        let port = free_port();
        let (first, region) = owner(port, &memory, 1);
        let first_desc = descriptor(&first, &region);
        let client = Client::to(&first_desc, TcpConfig { framing, ..TcpConfig::default() });
        let at = region.addr();
        assert_eq!(client.read(at, 64).unwrap(), [1; 64]);
        let (second, region) = {
            let _no_copies = PROCESS_START_LOCK.read();
            drop((region, first));
            owner(port, &memory, 2)
        };
        let new = descriptor(&second, &region);
        assert_eq!(region.addr(), at);

        let read = client.read(at, 64);
        assert_names_instances(
            &read.expect_err("bytes of another process"),
            instance(&first_desc),
            Some(instance(&new)),
        );
        let write = client.write(at, vec![9; LEN / 2]);
        assert_names_instances(
            &write.expect_err("a write into another process"),
            instance(&first_desc),
            Some(instance(&new)),
        );
        assert_eq!(contents(&region), [2; LEN], "nothing has landed in the second process");

        // The same client reaches the second process by its own descriptor, beside the refused one.
        let peer = client.node.runtime.block_on(client.node.transport.connect(&new)).unwrap();
        let client = Client { peer, ..client };
        assert_eq!(client.read(at, 64).unwrap(), [2; 64]);
        client.write(at, vec![3; 64]).unwrap();
        assert_eq!(contents(&region)[..64], [3; 64]);
    }
}

const SCRIPTED: Instance = Instance(0x00c0_ffee_0000_00aa);

/// Creates a client of a target that is only a socket and publishes [`SCRIPTED`].
fn client_of(listener: &TcpListener, config: TcpConfig) -> Client {
    let mut desc = SegmentDesc {
        protocols: vec![Protocol::TCP],
        tcp_data_host: "127.0.0.1".into(),
        tcp_data_port: listener.local_addr().unwrap().port(),
        tcp_proto_version: 2,
        ..SegmentDesc::new("target")
    };
    desc.extra.insert("tcp_instance".into(), SCRIPTED.to_string().into());
    Client::to(&desc, config)
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn expect_hello(stream: &mut TcpStream) {
    assert_eq!(read_exactly(stream, 24), Hello { instance: SCRIPTED }.encode());
    // The next byte is sent after the response.
    stream.set_nonblocking(true).unwrap();
    assert_eq!(stream.peek(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
}

fn hello_response(accepted: bool) -> [u8; 16] {
    HelloResponse { accepted, instance: SCRIPTED }.encode()
}

#[test]
fn requests_under_way_are_not_sent_again_to_another_process() {
    let port = free_port();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let memory = Arc::new(HostMemory::new(LEN).unwrap());
    let at = memory.span().addr();
    let client = client_of(&listener, TcpConfig { connections: 1, ..TcpConfig::default() });
    let deadline = Some(client.node.transport.clock().now().after(TIMEOUT));
    let writes: Vec<_> = (0..8).map(|i| Transfer::new(at + i * 64, vec![9; 64])).collect();
    let ticket = transfer::write(&client.node.transport, &client.peer, writes, deadline);
    let mut stream = accept(&listener);
    expect_hello(&mut stream);
    write_parts(&mut stream, &[&hello_response(true)]);
    // The first write is applied and the second has begun. Then the process ends, and another one
    // takes over.
    assert_eq!(read_exactly(&mut stream, 24 + 64)[24..], [9; 64]);
    write_parts(&mut stream, &[&OK]);
    read_exactly(&mut stream, 24 + 10);
    let (second, region) = {
        let _no_copies = PROCESS_START_LOCK.read();
        drop(listener);
        owner(port, &memory, 2)
    };
    drop(stream);
    let (results, _) = ticket.results().wait();
    let new = descriptor(&second, &region);
    results[0].as_ref().unwrap();
    for result in &results[1..] {
        assert_names_instances(result.as_ref().unwrap_err(), &SCRIPTED.to_string(), Some(instance(&new)));
    }
    assert_eq!(contents(&region), [2; LEN], "nothing has landed in the second process");
}

#[test]
fn a_node_without_hellos_on_the_port_gets_no_request() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = client_of(&listener, TcpConfig { connections: 1, ..TcpConfig::default() });
    let target = std::thread::spawn(move || {
        for response in [&REFUSED[..], b"SSH-2.0-OpenSSH_9.7 Debian", &[]] {
            let mut stream = accept(&listener);
            expect_hello(&mut stream);
            write_parts(&mut stream, &[response]);
            if response.is_empty() {
                // The client repeats a connection that is closed without a response.
                drop(stream);
                stream = accept(&listener);
                expect_hello(&mut stream);
                write_parts(&mut stream, &[&REFUSED]);
            }
            // The client may have closed the connection already.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            assert_eq!(read_until_close(&mut stream), b"");
        }
    });
    while !target.is_finished() {
        assert_names_instances(
            &client.write(1000, vec![9; 64]).unwrap_err(),
            &SCRIPTED.to_string(),
            Some("unknown"),
        );
        std::thread::yield_now();
    }
    target.join().unwrap();
}

#[test]
fn a_connection_closed_before_the_response_is_opened_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = client_of(&listener, TcpConfig { connections: 1, ..TcpConfig::default() });
    let target = std::thread::spawn(move || {
        expect_hello(&mut accept(&listener));
        let mut stream = accept(&listener);
        expect_hello(&mut stream);
        // A response in single bytes.
        for byte in hello_response(true) {
            write_parts(&mut stream, &[&[byte]]);
        }
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&OK, b"12345678"]);
        stream
    });
    assert_eq!(client.read(1000, 8).unwrap(), b"12345678");
    drop(target.join().unwrap());
}

#[test]
fn an_invalid_instance_is_refused_by_name() {
    let node = Node::start(TcpConfig::default());
    let mut desc = described(&node.transport, 4096, 4096);
    for value in [serde_json::json!("x"), serde_json::json!(7), serde_json::json!(null)] {
        desc.extra.insert("tcp_instance".into(), value);
        let error = node.runtime.block_on(node.transport.connect(&desc)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("tcp_instance"), "{error}");
    }
}

#[test]
fn requests_behind_a_hello_for_another_process_are_not_read() {
    let node = Node::start(TcpConfig::default());
    let mut region = node.open(4096);
    let desc = descriptor(&node, &region);
    let own_instance = Instance::parse(instance(&desc)).unwrap();
    let other = Instance(own_instance.0 ^ 1);
    let requests =
        [&header(WRITE, region.addr(), 64)[..], &[9; 64], &header(READ, region.addr(), 8)].concat();
    for in_bytes in [false, true] {
        let mut stream = node.connect();
        stream.set_nodelay(true).unwrap();
        let all = [&Hello { instance: other }.encode()[..], &requests].concat();
        // The node may close before the last byte is sent.
        let parts: Vec<&[u8]> = if in_bytes { all.chunks(1).collect() } else { vec![&all] };
        let _ = parts.iter().try_for_each(|part| stream.write_all(part));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let expected = HelloResponse { accepted: false, instance: own_instance }.encode();
        assert_eq!(read_until_close(&mut stream), expected);
        assert_eq!(contents(&region), pattern(4096));

        // The requests again, behind a hello for the right instance.
        let mut stream = node.connect();
        stream.set_nodelay(true).unwrap();
        let all = [&Hello { instance: own_instance }.encode()[..], &requests].concat();
        for part in if in_bytes { all.chunks(1).collect::<Vec<_>>() } else { vec![&all[..]] } {
            stream.write_all(part).unwrap();
        }
        let expected =
            [&HelloResponse { accepted: true, instance: own_instance }.encode()[..], &OK, &OK, &[9; 8]]
                .concat();
        assert_eq!(read_exactly(&mut stream, expected.len()), expected);
        // A hello that is not the first frame is a read of no bytes.
        write_parts(&mut stream, &[&Hello { instance: own_instance }.encode()]);
        assert_eq!(read_until_close(&mut stream), REFUSED);
        region = {
            let mut all = region.exclusive().unwrap();
            all.copy_from(0, &pattern(4096)).unwrap();
            all.into_region().unwrap()
        };
    }
}

/// Memory at an address that both processes choose.
struct Fixed(NonNull<u8>);

const FIXED_ADDR: usize = 0x3a00_0000_0000;
const FIXED_LEN: usize = 16 << 20;

#[allow(unsafe_code)]
impl Fixed {
    fn new(byte: u8) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let expected = std::ptr::without_provenance_mut::<libc::c_void>(FIXED_ADDR);
        // SAFETY: a new mapping that replaces none.
        let at = unsafe { libc::mmap(expected, FIXED_LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_eq!(at.addr(), FIXED_ADDR, "{}", std::io::Error::last_os_error());
        // SAFETY: the mapping has this length, and no other user.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), byte, FIXED_LEN) };
        Self(NonNull::new(at.cast()).unwrap())
    }
}

// SAFETY: the mapping stays until the process ends.
#[allow(unsafe_code)]
unsafe impl MemorySource for Fixed {
    fn span(&self) -> MemorySpan {
        MemorySpan::new(self.0, FIXED_LEN)
    }
}

// SAFETY: an address, without thread affinity.
#[allow(unsafe_code)]
unsafe impl Send for Fixed {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Fixed {}

/// Process of the owner. Standard input carries port and byte, then commands; a line of standard
/// output answers each.
#[test]
#[ignore = "runs as the other process of the test below"]
fn owner_process() {
    let mut commands = std::io::stdin().lines();
    let mut number = || commands.next()?.ok()?.parse::<u16>().ok();
    let (Some(port), Some(byte)) = (number(), number()) else { return };
    let byte = u8::try_from(byte).unwrap();
    let node = Node::start(TcpConfig { ports: port..=port, ..TcpConfig::default() });
    let region = Region::register(&node.transport, Arc::new(Fixed::new(byte)), Access::Remote).unwrap();
    let desc = descriptor(&node, &region);
    let mut out = std::io::stdout();
    writeln!(out, "> {}", String::from_utf8(desc.encode()).unwrap()).unwrap();
    while let Some(Ok(command)) = commands.next() {
        if command == "fork" {
            writeln!(out, "> {}", fork_child().unwrap()).unwrap();
            continue;
        }
        let same = contents(&region).iter().all(|found| *found == byte);
        writeln!(out, "> {same}").unwrap();
    }
}

struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    desc: SegmentDesc,
}

impl Process {
    fn start(port: u16, byte: u8) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["owner_process", "--exact", "--ignored", "--nocapture"]);
        let mut child = {
            let _lock = PROCESS_START_LOCK.write();
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        };
        writeln!(child.stdin.as_mut().unwrap(), "{port}\n{byte}").unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Self { child, lines, desc: SegmentDesc::default() };
        process.desc = SegmentDesc::decode(process.read_line().as_bytes()).unwrap();
        process
    }

    fn read_line(&mut self) -> String {
        loop {
            let line = self.lines.next().expect("the process answers").unwrap();
            if let Some((_, text)) = line.split_once("> ") {
                return text.to_owned();
            }
        }
    }

    fn run_command(&mut self, command: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        self.read_line()
    }

    fn is_untouched(&mut self) -> bool {
        self.run_command("look") == "true"
    }

    #[allow(unsafe_code)]
    fn stop(&self) {
        // SAFETY: a signal to a child of this process that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id().try_into().unwrap(), libc::SIGSTOP) }, 0);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_process_is_not_confused_with_the_next_one_on_its_port() {
    let mut first = Process::start(free_port(), 1);
    assert!(first.is_untouched());
    let (port, at) = (first.desc.tcp_data_port, FIXED_ADDR as u64);
    let client = Client::to(&first.desc, TcpConfig::default());
    assert_eq!(client.read(at, 64).unwrap(), [1; 64]);
    // Write that the first process never reads to its end.
    first.stop();
    let deadline = Some(client.node.transport.clock().now().after(TIMEOUT));
    let pending_write = [Transfer::new(at, vec![9; FIXED_LEN])];
    let pending_write = transfer::write(&client.node.transport, &client.peer, pending_write, deadline);
    let first_desc = first.desc.clone();
    drop(first);

    let mut second = Process::start(port, 2);
    assert_eq!((second.desc.tcp_data_port, second.desc.buffers[0].addr), (port, at));
    assert_eq!(pending_write.wait().0.unwrap_err().kind(), ErrorKind::Unavailable);
    let (expected, found) = (instance(&first_desc), Some(instance(&second.desc)));
    let again = client.read(at, 64);
    assert!(again.is_err(), "bytes of the second process: {again:?}");
    loop {
        // The client pauses for a moment after the port refused a connection in between.
        let error = client.write(at, vec![9; 64]).expect_err("a late write into the second process");
        if error.to_string().contains(expected) {
            break assert_names_instances(&error, expected, found);
        }
        std::thread::yield_now();
    }
    assert!(second.is_untouched());
    let client = Client::to(&second.desc, TcpConfig::default());
    assert_eq!(client.read(at, 64).unwrap(), [2; 64]);
}

#[test]
fn the_port_of_a_killed_process_is_free_while_its_child_lives_on() {
    let mut first = Process::start(free_port(), 1);
    let port = first.desc.tcp_data_port;
    let child = ForkedChild(first.run_command("fork").parse().unwrap());
    let client = Client::to(&first.desc, TcpConfig::default());
    assert_eq!(client.read(FIXED_ADDR as u64, 64).unwrap(), [1; 64], "the parent still serves");
    drop(first);
    // Otherwise the next client would wait in the queue of an abandoned socket.
    let refused = TcpStream::connect(("127.0.0.1", port)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    // The earlier connection has ended, too.
    assert_eq!(client.read(FIXED_ADDR as u64, 64).unwrap_err().kind(), ErrorKind::Unavailable);
    let second = Process::start(port, 2);
    assert_eq!(second.desc.tcp_data_port, port);
    drop(child);
}
