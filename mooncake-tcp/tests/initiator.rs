//! Requests of the initiator, byte by byte, with a target that is only a socket.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use common::*;
use mooncake_core::clock::Moment;
use mooncake_core::{ErrorCode, ErrorKind, Result};
use mooncake_tcp::{TcpConfig, TcpPeer, TcpTransport};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Protocol, SegmentDesc, Ticket, Transport};

/// Listener whose connections the test handles, in the order in which they come.
struct Target {
    port: u16,
    thread: Option<JoinHandle<()>>,
}

impl Target {
    /// Passes each connection with its number to `script`, and closes the listener after
    /// `connections` of them.
    fn new(connections: usize, mut script: impl FnMut(usize, TcpStream) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let thread = std::thread::spawn(move || {
            for number in 0..connections {
                let (stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                script(number, stream);
            }
        });
        Self { port, thread: Some(thread) }
    }

    /// Waits for the end of the script, and passes its panic on.
    fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

struct Client {
    node: Node,
    peer: TcpPeer,
}

impl Client {
    fn new(port: u16, version: u32, config: TcpConfig) -> Self {
        let node = Node::start(config);
        let desc = SegmentDesc {
            protocols: vec![Protocol::TCP],
            tcp_data_host: "127.0.0.1".into(),
            tcp_data_port: port,
            tcp_proto_version: version,
            ..SegmentDesc::new("target")
        };
        let peer = node.runtime.block_on(node.transport.connect(&desc)).unwrap();
        Self { node, peer }
    }

    fn to(target: &Target) -> Self {
        Self::new(target.port, 2, TcpConfig::default())
    }

    fn deadline_in(&self, span: Duration) -> Option<Moment> {
        Some(self.node.transport.clock().now().after(span))
    }

    fn now(&self) -> Moment {
        self.node.transport.clock().now()
    }

    fn post_read(&self, at: u64, len: usize, deadline: Option<Moment>) -> Ticket<[Transfer<Vec<u8>>; 1]> {
        transfer::read(&self.node.transport, &self.peer, [Transfer::new(at, vec![0; len])], deadline)
    }

    fn read(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let (result, [transfer]) = self.post_read(at, len, self.deadline_in(TIMEOUT)).wait();
        result.map(|()| transfer.buffer)
    }

    fn post_write(&self, at: u64, body: Vec<u8>) -> Ticket<[Transfer<Vec<u8>>; 1]> {
        transfer::write(
            &self.node.transport,
            &self.peer,
            [Transfer::new(at, body)],
            self.deadline_in(TIMEOUT),
        )
    }

    fn write(&self, at: u64, body: &[u8]) -> Result<()> {
        self.post_write(at, body.to_vec()).wait().0
    }
}

/// Returns the expected header of a request, with zero padding.
fn expected_header(opcode: u8, addr: u64, len: u64) -> Vec<u8> {
    let mut bytes = header(opcode, addr, len);
    bytes[17..].fill(0);
    bytes
}

fn closed_by_client(stream: &mut TcpStream) {
    assert_eq!(read_until_close(stream), b"", "the client closes without sending more");
}

#[test]
fn the_captured_conversation() {
    let target = Target::new(1, |_, mut stream| {
        assert_eq!(read_exactly(&mut stream, 24), expected_header(0x80, 0x7f66_cdef_e110, 8));
        write_parts(&mut stream, &[&OK, b"SECRET42"]);
        assert_eq!(read_exactly(&mut stream, 24), expected_header(0x81, 0x7f66_cdef_e210, 8));
        assert_eq!(read_exactly(&mut stream, 8), b"WRITTEN!");
        write_parts(&mut stream, &[&OK]);
        assert_eq!(read_exactly(&mut stream, 28)[24..], *b"next");
        // A response in pieces of one byte.
        for byte in OK {
            write_parts(&mut stream, &[&[byte]]);
        }
    });
    let client = Client::to(&target);
    assert_eq!(client.read(0x7f66_cdef_e110, 8).unwrap(), b"SECRET42");
    client.write(0x7f66_cdef_e210, b"WRITTEN!").unwrap();
    client.write(0x7f66_cdef_e268, b"next").unwrap();
    target.join();
}

#[test]
fn refusals_have_their_error_kinds() {
    let target = Target::new(3, |number, mut stream| {
        read_exactly(&mut stream, 24);
        match number {
            0 => write_parts(&mut stream, &[&REFUSED]),
            1 => write_parts(&mut stream, &[b"\x07\0\0\0VTCM"]),
            _ => write_parts(&mut stream, &[b"not a status frame"]),
        }
        closed_by_client(&mut stream);
    });
    let client = Client::to(&target);
    assert_eq!(client.read(1000, 8).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(client.read(1000, 8).unwrap_err().kind(), ErrorKind::Unavailable);
    let error = client.read(1000, 8).unwrap_err();
    assert!(error.kind() == ErrorKind::Unavailable && error.to_string().contains("status frame"), "{error}");
    target.join();
}

#[test]
fn unexpected_bytes_end_the_connection() {
    let target = Target::new(1, |_, mut stream| {
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&OK, b"12345678", b"9"]);
        closed_by_client(&mut stream);
    });
    let client = Client::to(&target);
    assert_eq!(client.read(1000, 8).unwrap(), b"12345678");
    target.join();
}

/// Targets of Mooncake C++ close idle connections in this way; no transfer may fail for it.
#[test]
fn transfers_succeed_with_a_peer_that_closes_after_each_response() {
    let respond = |stream: &mut TcpStream| {
        let request = read_exactly(stream, 24);
        write_parts(stream, &[&OK, &request[8..9]]);
    };
    let target = Target::new(300, move |_, mut stream| respond(&mut stream));
    let client = Client::to(&target);
    for i in 0..10 {
        assert_eq!(client.read(i, 1).unwrap(), [i as u8], "one by one");
    }
    let batch: Vec<_> = (10..30).map(|i| Transfer::new(i, vec![0; 1])).collect();
    let ticket = transfer::read(&client.node.transport, &client.peer, batch, client.deadline_in(TIMEOUT));
    let (result, batch) = ticket.wait();
    result.unwrap();
    assert!(batch.iter().all(|t| t.buffer == [t.remote as u8]), "all at once");
}

#[test]
fn a_request_is_tried_twice_and_not_three_times() {
    let target = Target::new(2, |_, mut stream| {
        read_exactly(&mut stream, 24);
    });
    let client = Client::to(&target);
    assert_eq!(client.read(1000, 8).unwrap_err().kind(), ErrorKind::Unavailable);
    target.join();
}

#[test]
fn half_a_response_is_an_error() {
    let target = Target::new(1, |_, mut stream| {
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&OK, b"1234"]);
    });
    let client = Client::to(&target);
    assert_eq!(client.read(1000, 8).unwrap_err().kind(), ErrorKind::Unavailable);
    target.join();
}

#[test]
fn a_refused_connection_is_an_error_at_once() {
    let target = Target::new(0, |_, _| ());
    let port = target.port;
    target.join();
    let client = Client::new(port, 2, TcpConfig::default());
    let start = client.now();
    for _ in 0..3 {
        let error = client.read(1000, 8).unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains(&port.to_string()), "{error}");
    }
    assert!(client.now().since(start) < Duration::from_secs(2));
}

/// Creates a target that swallows requests. The channel returns its connections.
fn silent(connections: usize) -> (Target, Receiver<TcpStream>) {
    let (send, receive): (Sender<TcpStream>, _) = channel();
    (Target::new(connections, move |_, stream| send.send(stream).unwrap()), receive)
}

#[test]
fn a_stall_ends_at_the_deadline_and_late_bytes_land_nowhere() {
    let (target, streams) = silent(1);
    let client = Client::to(&target);
    let start = client.now();
    let ticket = client.post_read(1000, 4, client.deadline_in(Duration::from_millis(300)));
    let mut stream = streams.recv().unwrap();
    read_exactly(&mut stream, 24);
    let (result, [transfer]) = ticket.wait();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Timeout);
    let took = client.now().since(start);
    assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(3), "{took:?}");
    closed_by_client(&mut stream);
    let _ = stream.write_all(&[&OK[..], b"late"].concat());
    assert_eq!(transfer.buffer, [0; 4]);
    target.join();
}

#[test]
fn a_stall_without_a_deadline_ends_too() {
    let (target, streams) = silent(1);
    let client = Client::new(
        target.port,
        2,
        TcpConfig { response_timeout: Duration::from_millis(300), ..TcpConfig::default() },
    );
    let ticket = client.post_read(1000, 4, None);
    let mut stream = streams.recv().unwrap();
    read_exactly(&mut stream, 24);
    // Slowly arriving bytes count as progress.
    for byte in &OK[..3] {
        std::thread::sleep(Duration::from_millis(150));
        write_parts(&mut stream, &[&[*byte]]);
    }
    assert!(!ticket.is_done());
    assert_eq!(ticket.wait().0.unwrap_err().kind(), ErrorKind::Timeout);
    closed_by_client(&mut stream);
    target.join();
}

#[test]
fn a_body_that_is_not_read_ends_at_the_deadline() {
    let (target, streams) = silent(1);
    let client = Client::to(&target);
    let write = [Transfer::new(1000, vec![7u8; 64 << 20])];
    let deadline = client.deadline_in(Duration::from_millis(300));
    let ticket = transfer::write(&client.node.transport, &client.peer, write, deadline);
    let stream = streams.recv().unwrap();
    assert_eq!(ticket.wait().0.unwrap_err().kind(), ErrorKind::Timeout);
    drop(stream);
    target.join();
}

#[test]
fn one_deadline_does_not_fail_others() {
    let (target, streams) = silent(2);
    let client = Client::new(target.port, 2, TcpConfig { connections: 1, window: 1, ..TcpConfig::default() });
    let first = client.post_read(1, 1, client.deadline_in(TIMEOUT));
    let mut stream = streams.recv().unwrap();
    read_exactly(&mut stream, 24);
    // A request that has not begun fails alone.
    let unsent = client.post_read(2, 1, client.deadline_in(Duration::from_millis(200)));
    assert_eq!(unsent.wait().0.unwrap_err().kind(), ErrorKind::Timeout);
    write_parts(&mut stream, &[&OK, b"1"]);
    first.wait().0.unwrap();
    // A request that has begun ends its connection, and the requests behind it are sent again on a
    // new one.
    let expired = client.post_read(3, 1, client.deadline_in(Duration::from_millis(200)));
    let waiting = client.post_read(4, 1, client.deadline_in(TIMEOUT));
    assert_eq!(read_exactly(&mut stream, 24), expected_header(READ, 3, 1));
    assert_eq!(expired.wait().0.unwrap_err().kind(), ErrorKind::Timeout);
    closed_by_client(&mut stream);
    let mut stream = streams.recv().unwrap();
    assert_eq!(read_exactly(&mut stream, 24), expected_header(READ, 4, 1));
    write_parts(&mut stream, &[&OK, b"4"]);
    assert_eq!(waiting.wait().1[0].buffer, b"4");
    target.join();
}

#[test]
fn an_early_acknowledgement_counts_once_the_body_is_sent() {
    let len = 32 << 20;
    let (go, wait) = channel();
    let target = Target::new(1, move |_, mut stream| {
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&OK]);
        wait.recv().unwrap();
        assert!(read_exactly(&mut stream, len) == pattern(len));
        // The connection is still usable.
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&OK, b"x"]);
    });
    // This target accepts one connection only, and compares slowly.
    let client = Client::new(target.port, 2, TcpConfig { probe_after: TIMEOUT, ..TcpConfig::default() });
    let ticket = client.post_write(1000, pattern(len));
    let ticket = ticket.wait_timeout(Duration::from_millis(200)).expect_err("the body is stuck");
    go.send(()).unwrap();
    ticket.wait().0.unwrap();
    assert_eq!(client.read(1, 1).unwrap(), b"x");
    target.join();
}

#[test]
fn an_early_refusal_stops_the_body() {
    let target = Target::new(1, |_, mut stream| {
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&REFUSED]);
        let mut got = 0;
        let mut piece = vec![0; 1 << 20];
        while let Ok(n @ 1..) = stream.read(&mut piece) {
            got += n;
        }
        assert!(got < 512 << 20, "all of it was sent");
    });
    let client = Client::to(&target);
    assert_eq!(client.post_write(1000, vec![1; 512 << 20]).wait().0.unwrap_err().kind(), ErrorKind::Invalid);
    target.join();
}

#[test]
fn a_plain_write_is_done_when_it_is_applied() {
    let (go, wait) = channel();
    let target = Target::new(1, move |_, mut stream| {
        assert_eq!(read_exactly(&mut stream, 24), expected_header(PLAIN_WRITE, 1000, 5));
        assert_eq!(read_exactly(&mut stream, 5), b"hello");
        assert_eq!(read_exactly(&mut stream, 24), expected_header(PLAIN_READ, 1004, 1));
        wait.recv().unwrap();
        write_parts(&mut stream, &[b"o"]);
        assert_eq!(read_exactly(&mut stream, 24), expected_header(PLAIN_READ, 1000, 5));
        write_parts(&mut stream, &[b"hello"]);
    });
    let client = Client::new(target.port, 1, TcpConfig::default());
    let ticket = client.post_write(1000, b"hello".to_vec());
    let ticket =
        ticket.wait_timeout(Duration::from_millis(200)).expect_err("nothing shows that the write is applied");
    go.send(()).unwrap();
    ticket.wait().0.unwrap();
    assert_eq!(client.read(1000, 5).unwrap(), b"hello");
    target.join();
}

#[test]
fn a_stopped_transport_ends_its_requests_and_refuses_others() {
    let (target, streams) = silent(1);
    let client = Client::to(&target);
    let ticket = client.post_read(1000, 4, client.deadline_in(TIMEOUT));
    let mut stream = streams.recv().unwrap();
    read_exactly(&mut stream, 24);
    assert!(!client.node.transport.is_stopped());
    client.node.transport.stop_transfers();
    let (result, [transfer]) = ticket.wait();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(client.node.transport.is_stopped());
    closed_by_client(&mut stream);
    let _ = stream.write_all(&[&OK[..], b"late"].concat());
    assert_eq!(transfer.buffer, [0; 4]);
    client.read(1000, 4).unwrap_err();
    target.join();
}

#[test]
fn requests_over_queue_limit_are_refused() {
    let (target, streams) = silent(1);
    let client =
        Client::new(target.port, 2, TcpConfig { connections: 1, max_queued: 3, ..TcpConfig::default() });
    let tickets: Vec<_> = (0..3).map(|i| client.post_read(i, 1, client.deadline_in(TIMEOUT))).collect();
    let error = client.read(4, 1).unwrap_err();
    assert_eq!(error.code(), ErrorCode::TaskPendingLimitExceeded, "{error}");
    let mut stream = streams.recv().unwrap();
    for _ in 0..3 {
        read_exactly(&mut stream, 24);
        write_parts(&mut stream, &[&OK, b"x"]);
    }
    for ticket in tickets {
        ticket.wait().0.unwrap();
    }
    target.join();
}

#[test]
fn other_connections_open_when_there_is_enough_to_do() {
    let (target, streams) = silent(4);
    let client = Client::to(&target);
    let len = 1 << 20;
    let tickets: Vec<_> = (0..8).map(|i| client.post_read(i, len, client.deadline_in(TIMEOUT))).collect();
    let serving: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = streams.recv().unwrap();
            std::thread::spawn(move || {
                for _ in 0..2 {
                    let number = read_exactly(&mut stream, 24)[8];
                    write_parts(&mut stream, &[&OK, &vec![number; len]]);
                }
            })
        })
        .collect();
    for (i, ticket) in tickets.into_iter().enumerate() {
        let (result, [transfer]) = ticket.wait();
        result.unwrap();
        assert!(transfer.buffer == vec![i as u8; len]);
    }
    for thread in serving {
        thread.join().unwrap();
    }
    target.join();
}

#[test]
fn no_transfer_waits_after_the_end_of_node_or_runtime() {
    for drop_runtime in [true, false] {
        let (target, streams) = silent(1);
        let Client { node: Node { transport, runtime }, peer } = Client::to(&target);
        let post =
            |transport: &TcpTransport| transfer::read(transport, &peer, [Transfer::new(1, vec![0; 1])], None);
        let ticket = post(&transport);
        let stream = streams.recv().unwrap();
        if drop_runtime {
            drop(runtime);
            assert_eq!(ticket.wait().0.unwrap_err().kind(), ErrorKind::Unavailable);
            assert_eq!(post(&transport).wait().0.unwrap_err().kind(), ErrorKind::Unavailable);
        } else {
            drop(transport);
            assert_eq!(ticket.wait().0.unwrap_err().kind(), ErrorKind::Unavailable);
        }
        drop(stream);
        target.join();
    }
}
