//! Connections without progress: a second connection is tried beside them, and takes over requests
//! that may be repeated.

mod common;

use std::io::Read;
use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::time::Duration;

use common::*;
use mooncake_core::ErrorKind;
use mooncake_core::clock::Moment;
use mooncake_tcp::{TcpConfig, TcpPeer};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Protocol, SegmentDesc, Transport};

struct Client {
    node: Node,
    peer: TcpPeer,
}

impl Client {
    fn new(listener: &TcpListener) -> Self {
        let probe_after = Duration::from_millis(100);
        let node = Node::start(TcpConfig { connections: 1, probe_after, ..TcpConfig::default() });
        let desc = SegmentDesc {
            protocols: vec![Protocol::TCP],
            tcp_data_host: "127.0.0.1".into(),
            tcp_data_port: listener.local_addr().unwrap().port(),
            tcp_proto_version: 2,
            ..SegmentDesc::new("target")
        };
        let peer = node.runtime.block_on(node.transport.connect(&desc)).unwrap();
        Self { node, peer }
    }

    fn deadline_in(&self, span: Duration) -> Option<Moment> {
        Some(self.node.transport.clock().now().after(span))
    }
}

#[test]
fn reads_move_to_a_connection_established_later() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Client::new(&listener);
    let (open_streams, received_streams) = channel();
    let target = std::thread::spawn(move || {
        // Connections that never answer, as when a network loses every byte.
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().unwrap();
            read_exactly(&mut stream, 48);
            open_streams.send(stream).unwrap();
        }
        let (mut stream, _) = listener.accept().unwrap();
        read_exactly(&mut stream, 48);
        write_parts(&mut stream, &[&OK, b"12345678", &OK, b"abcdefgh"]);
        open_streams.send(stream).unwrap();
        listener
    });
    let transfers = [1000, 2000].map(|at| Transfer::new(at, vec![0; 8])).to_vec();
    let ticket = transfer::read(&client.node.transport, &client.peer, transfers, client.deadline_in(TIMEOUT));
    let (result, done) = ticket.wait();
    result.unwrap();
    assert_eq!([&done[0].buffer[..], &done[1].buffer], [b"12345678", b"abcdefgh"]);
    drop(target.join().unwrap());
    let replaced: Vec<_> = received_streams.into_iter().collect();
    let mut rest = Vec::new();
    assert!(
        (&replaced[0]).read_to_end(&mut rest).map_or(true, |n| n == 0),
        "the connection is closed without more bytes"
    );
}

#[test]
fn a_write_that_a_stopped_peer_may_have_is_not_sent_twice() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Client::new(&listener);
    let target = std::thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        read_exactly(&mut first, 24 + 8);
        // The probes are connections without a request.
        let (mut second, _) = listener.accept().unwrap();
        let probe_bytes = read_until_close(&mut second);
        (first, probe_bytes)
    });
    let transfers = [Transfer::new(1000, b"a letter".to_vec())];
    let deadline = client.deadline_in(Duration::from_millis(600));
    let ticket = transfer::write(&client.node.transport, &client.peer, transfers, deadline);
    assert_eq!(ticket.wait().0.unwrap_err().kind(), ErrorKind::Timeout);
    drop(client);
    assert_eq!(target.join().unwrap().1, b"");
}
