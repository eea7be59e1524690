//! Data port, byte by byte, with a client that is only a socket.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use common::*;
use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_tcp::{TcpConfig, TcpTransport};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, Region, SegmentDesc, Transport};

fn node() -> Node {
    Node::start(TcpConfig::default())
}

#[test]
fn the_captured_conversation() {
    let node = node();
    let region = node.open(4096);
    let (read_at, write_at) = (region.addr() + 0x110, region.addr() + 0x210);
    let mut all = region.exclusive().unwrap();
    all.copy_from(0x110, b"SECRET42").unwrap();
    let region = all.into_region().unwrap();
    let mut stream = node.connect();

    let mut request = [8u8, 0, 0, 0, 0, 0, 0, 0].to_vec();
    request.extend(read_at.to_le_bytes());
    request.extend([0x80, 0, 0, 0, 0, 0, 0, 0]);
    write_parts(&mut stream, &[&request]);
    assert_eq!(read_exactly(&mut stream, 8), [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
    assert_eq!(read_exactly(&mut stream, 8), b"SECRET42");

    request[8..16].copy_from_slice(&write_at.to_le_bytes());
    request[16] = 0x81;
    write_parts(&mut stream, &[&request]);
    write_parts(&mut stream, &[b"WRITTEN!"]);
    assert_eq!(read_exactly(&mut stream, 8), [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
    assert_eq!(contents(&region)[0x210..0x218], *b"WRITTEN!");

    request[0] = 4;
    write_parts(&mut stream, &[&request, b"4444"]);
    assert_eq!(read_exactly(&mut stream, 8), OK);
    assert_eq!(contents(&region)[0x210..0x218], *b"4444TEN!");
}

#[test]
fn framings_mix_and_requests_are_served_in_order() {
    let node = node();
    let region = node.open(4096);
    let at = region.addr();
    let mut stream = node.connect();
    let requests = [
        header(READ, at, 5),
        header(WRITE, at, 3),
        b"abc".to_vec(),
        header(PLAIN_READ, at, 5),
        header(PLAIN_WRITE, at + 3, 2),
        b"de".to_vec(),
        header(PLAIN_READ, at, 6),
        header(0xff, at, 1),
        header(0x02, at, 1),
        header(WRITE, at + 4095, 1),
        b"z".to_vec(),
        header(READ, at + 4094, 2),
    ]
    .concat();
    let second_to_last = pattern(4096)[4094];
    let expected_responses = [
        &OK[..],
        &[0, 1, 2, 3, 4],
        &OK,
        b"abc\x03\x04",
        b"abcde\x05",
        &OK,
        b"a",
        b"a",
        &OK,
        &OK,
        &[second_to_last, b'z'],
    ]
    .concat();
    write_parts(&mut stream, &[&requests]);
    assert_eq!(read_exactly(&mut stream, expected_responses.len()), expected_responses);
    // The same bytes, one at a time.
    let mut all = region.exclusive().unwrap();
    all.copy_from(0, &pattern(4096)).unwrap();
    stream.set_nodelay(true).unwrap();
    for byte in requests {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(read_exactly(&mut stream, expected_responses.len()), expected_responses);
}

#[test]
fn ranges_outside_are_refused_and_the_connection_closed() {
    let node = node();
    let memory = Arc::new(HostMemory::new(8192).unwrap());
    let register_half = |from| {
        let part = Part { memory: memory.clone(), from, len: 4096 };
        Region::register(&node.transport, Arc::new(part), Access::Remote).unwrap()
    };
    let (low, high) = (register_half(0), register_half(4096));
    let (start, end) = (low.addr(), high.addr() + 4096);
    for (addr, len) in [
        (start, 0),
        (start, 1 << 63),
        (start, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX - 7, 8),
        (start, (u64::MAX - start) + 1),
        (start - 1, 2),
        (end - 1, 2),
        (end, 1),
        (0, 1),
        (high.addr() - 1, 2),
        (start, 8192),
    ] {
        for opcode in [READ, WRITE, PLAIN_READ, PLAIN_WRITE] {
            let mut stream = node.connect();
            // A valid request first, whose response must not be lost, and a body after the refused
            // one.
            write_parts(&mut stream, &[&header(PLAIN_READ, start, 2), &header(opcode, addr, len), &[9; 64]]);
            let response = read_until_close(&mut stream);
            let refusal = if opcode >= 0x80 { &REFUSED[..] } else { &[] };
            assert_eq!(response, [&[0, 0], refusal].concat(), "{opcode:#x} {addr:#x}+{len}");
        }
    }
    assert!(contents(&low).iter().chain(&contents(&high)).all(|b| *b == 0));
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(READ, high.addr(), 4096)]);
    read_exactly(&mut stream, 8 + 4096);
}

#[test]
fn a_refusal_arrives_though_the_body_is_still_coming() {
    let node = node();
    let region = node.open(4096);
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(WRITE, region.addr(), 8 << 20)]);
    let body = vec![9; 8 << 20];
    let _ = stream.write_all(&body);
    assert_eq!(read_until_close(&mut stream), REFUSED);
    assert_eq!(contents(&region), pattern(4096));
}

#[test]
fn garbage_harms_no_other_connection() {
    let node = node();
    let region = node.open(4096);
    let mut rng = Rng::seeded(11);
    for round in 0..60 {
        let mut bytes = vec![0; 1 + rng.below(400) as usize];
        rng.fill(&mut bytes);
        let mut stream = node.connect();
        let _ = stream.write_all(&bytes);
        if bytes.len() < 24 {
            continue;
        }
        let response = read_until_close(&mut stream);
        let expected = if bytes[16] >= 0x80 { &REFUSED[..] } else { &[] };
        assert_eq!(response, expected, "round {round}");
    }
    assert_eq!(contents(&region), pattern(4096));
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(READ, region.addr(), 1)]);
    assert_eq!(read_exactly(&mut stream, 9), [&OK[..], &[0]].concat());
}

#[test]
fn bulk_goes_through_one_header() {
    let node = node();
    let len = 700_001;
    let region = node.open(len);
    let mut stream = node.connect();
    let body: Vec<u8> = (0..len).map(|i| (i * 7 % 253) as u8).collect();
    let (write, read) = (header(WRITE, region.addr(), len as u64), header(READ, region.addr(), len as u64));
    write_parts(&mut stream, &[&write, &body, &read]);
    assert_eq!(read_exactly(&mut stream, 8), OK);
    assert_eq!(contents(&region), body);
    assert_eq!(read_exactly(&mut stream, 8), OK);
    assert!(read_exactly(&mut stream, len) == body);
}

#[test]
fn a_thousand_requests_at_once() {
    let node = node();
    let region = node.open(1 << 20);
    let mut stream = node.connect();
    let requests: Vec<u8> = (0..1000u64)
        .flat_map(|i| {
            let mut request = header(WRITE, region.addr() + i * 1000, 16);
            request.extend([i as u8; 16]);
            request.extend(header(READ, region.addr() + i * 1000, 17));
            request
        })
        .collect();
    let mut sender = stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || sender.write_all(&requests).unwrap());
    let untouched = pattern(1 << 20);
    for i in 0..1000 {
        let mut expected = [OK, OK].concat();
        expected.extend([i as u8; 16]);
        expected.push(untouched[i * 1000 + 16]);
        assert_eq!(read_exactly(&mut stream, expected.len()), expected, "request {i}");
    }
    sending.join().unwrap();
}

#[test]
fn half_a_write_stays_and_the_node_goes_on() {
    let node = node();
    let region = node.open(4096);
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(WRITE, region.addr(), 100), &[9; 40]]);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(read_until_close(&mut stream), b"", "no acknowledgement for half a write");
    let after = contents(&region);
    assert_eq!(after[..40], [9; 40]);
    assert_eq!(after[40..], pattern(4096)[40..]);
}

#[test]
fn stalled_connections_are_dropped_and_idle_ones_are_not() {
    let node =
        Node::start(TcpConfig { progress_timeout: Duration::from_millis(300), ..TcpConfig::default() });
    let region = node.open(32 << 20);
    let clock = SystemClock::new();
    let start = clock.now();
    let mut idle = node.connect();
    let mut in_header = node.connect();
    write_parts(&mut in_header, &[&header(WRITE, region.addr(), 100)[..10]]);
    let mut in_body = node.connect();
    write_parts(&mut in_body, &[&header(WRITE, region.addr(), 100), &[9; 40]]);
    let mut unread = node.connect();
    write_parts(&mut unread, &[&header(READ, region.addr(), 32 << 20)]);
    assert_eq!(read_until_close(&mut in_header), b"");
    assert_eq!(read_until_close(&mut in_body), b"");
    assert!(clock.now().since(start) >= Duration::from_millis(300), "the connection is not dropped early");
    // One more connection stalls after them: when it is dropped, the response has been stuck for
    // long enough.
    let mut extra_connection = node.connect();
    write_parts(&mut extra_connection, &[&[0; 1]]);
    assert_eq!(read_until_close(&mut extra_connection), b"");
    assert!(read_until_close(&mut unread).len() < 32 << 20, "a response that is not read is dropped");
    write_parts(&mut idle, &[&header(READ, region.addr(), 1)]);
    assert_eq!(read_exactly(&mut idle, 8), OK, "an idle connection outlives the progress timeout");
}

#[test]
fn a_slow_reader_gets_everything_and_delays_no_other() {
    let node = node();
    let len = 12 << 20;
    let region = node.open(len);
    let mut slow = node.connect();
    write_parts(&mut slow, &[&header(READ, region.addr(), len as u64)]);
    assert_eq!(read_exactly(&mut slow, 8), OK);
    let mut other = node.connect();
    for i in 0..100 {
        write_parts(&mut other, &[&header(READ, region.addr() + i, 1)]);
        assert_eq!(read_exactly(&mut other, 9)[8], i as u8);
    }
    assert!(read_exactly(&mut slow, len) == pattern(len));
}

#[test]
fn deregistering_cuts_off_a_write_under_way() {
    let node = node();
    let region = node.open(8 << 20);
    let memory = region.memory().clone();
    let mut stream = node.connect();
    let at = region.addr();
    write_parts(&mut stream, &[&header(READ, at, 1), &header(WRITE, at, 8 << 20), &[9; 100_000]]);
    read_exactly(&mut stream, 9);
    drop(region);
    let before = snapshot(&*memory);
    let _ = stream.write_all(&vec![9; 4 << 20]);
    assert_eq!(read_until_close(&mut stream), REFUSED);
    assert!(snapshot(&*memory) == before, "the memory changed after its deregistration");
}

#[test]
fn deregistering_cuts_off_a_read_under_way() {
    let node = node();
    let len = 64 << 20;
    let region = node.open(len);
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(READ, region.addr(), len as u64)]);
    read_exactly(&mut stream, 8);
    // Far more than the kernel buffers hold is still to come, so the response is stuck half-way.
    drop(region);
    let rest = read_until_close(&mut stream);
    assert!(rest.len() < len && rest == pattern(len)[..rest.len()], "{} bytes", rest.len());
}

/// Connections that each read once use every slot. Each new one is served, and the connection that
/// has been idle longest is closed for it.
#[test]
fn the_longest_idle_connection_is_closed_whatever_it_has_requested() {
    let node = Node::start(TcpConfig { max_served: 4, ..TcpConfig::default() });
    let region = node.open(64);
    let mut connections = std::collections::VecDeque::new();
    for _ in 0..4 {
        let mut stream = node.connect();
        read_one_byte(&mut stream, &region);
        connections.push_back(stream);
    }
    for _ in 0..20 {
        let mut next = node.connect();
        read_one_byte(&mut next, &region);
        connections.push_back(next);
        let mut longest_idle = connections.pop_front().unwrap();
        assert_eq!(read_until_close(&mut longest_idle), b"", "the longest idle connection is closed");
    }
    for stream in &mut connections {
        read_one_byte(stream, &region);
    }
}

/// A write whose body does not come, and a response that is not read, occupy no slot that another
/// connection needs.
#[test]
fn stalled_requests_release_their_slot() {
    let node = Node::start(TcpConfig { max_served: 3, ..TcpConfig::default() });
    let (small, large) = (node.open(64), node.open(64 << 20));
    let (mut stalled_in_header, mut stalled_in_body, mut unread) =
        (node.connect(), node.connect(), node.connect());
    stalled_in_header.write_all(&header(READ, small.addr(), 1)[..5]).unwrap();
    write_parts(&mut stalled_in_body, &[&header(WRITE, small.addr(), 64), &[7; 10]]);
    write_parts(&mut unread, &[&header(READ, large.addr(), 64 << 20)]);
    read_exactly(&mut unread, 8);
    // Three connections that are served at once leave no capacity for a stalled one.
    let is_served = |stream: &mut std::net::TcpStream| {
        stream.write_all(&header(READ, small.addr(), 1)).is_ok() && stream.read_exact(&mut [0; 9]).is_ok()
    };
    let mut served = Vec::new();
    while served.len() < 3 {
        served.push(node.connect());
        served.retain_mut(is_served);
    }
    assert_eq!(read_until_close(&mut stalled_in_header), b"");
    assert_eq!(read_until_close(&mut stalled_in_body), b"");
    assert!(read_until_close(&mut unread).len() < 64 << 20);
}

fn read_one_byte(stream: &mut std::net::TcpStream, region: &Region<TcpTransport>) {
    write_parts(stream, &[&header(READ, region.addr(), 1)]);
    read_exactly(stream, 9);
}

#[test]
fn the_connection_that_waits_longest_is_closed() {
    let node = Node::start(TcpConfig { max_served: 4, ..TcpConfig::default() });
    let region = node.open(64);
    let mut connections: Vec<_> = (0..4).map(|_| node.connect()).collect();
    connections.iter_mut().for_each(|stream| read_one_byte(stream, &region));
    // The first one sends another request, so the second one has waited longest.
    read_one_byte(&mut connections[0], &region);
    let mut fifth = node.connect();
    read_one_byte(&mut fifth, &region);
    assert_eq!(read_until_close(&mut connections[1]), b"");
    for at in [0, 2, 3] {
        read_one_byte(&mut connections[at], &region);
    }
    read_one_byte(&mut fifth, &region);
    // Connections without a request, or with half a request, are closed in their turn.
    let mut silent: Vec<_> = (0..3).map(|_| node.connect()).collect();
    for at in [0, 2, 3] {
        assert_eq!(read_until_close(&mut connections[at]), b"");
    }
    silent[0].write_all(&header(READ, region.addr(), 1)[..5]).unwrap();
    let mut last = node.connect();
    read_one_byte(&mut last, &region);
    assert_eq!(read_until_close(&mut fifth), b"");
    let mut last = node.connect();
    read_one_byte(&mut last, &region);
    assert_eq!(read_until_close(&mut silent[0]), b"", "half a request does not count as one");
}

/// Clients that take turns, with fewer places at the node than connections.
#[test]
fn no_operation_fails_while_connections_are_closed() {
    let node = Node::start(TcpConfig { max_served: 4, ..TcpConfig::default() });
    let region = node.open(4096);
    let mut desc = SegmentDesc::new("node");
    node.transport.describe(&mut desc);
    desc.tcp_data_host = "127.0.0.1".into();
    let clients: Vec<_> = (0..12)
        .map(|_| {
            let client = Node::start(TcpConfig { connections: 1, ..TcpConfig::default() });
            let peer = client.runtime.block_on(client.transport.connect(&desc)).unwrap();
            (client, peer)
        })
        .collect();
    for round in 0..20u8 {
        for (client, peer) in &clients {
            let deadline = Some(client.transport.clock().now().after(TIMEOUT));
            let write = [Transfer::new(region.addr() + 64, vec![round; 64])];
            transfer::write(&client.transport, peer, write, deadline).wait().0.unwrap();
            let read = [Transfer::new(region.addr() + 64, vec![0; 64])];
            let (result, [read]) = transfer::read(&client.transport, peer, read, deadline).wait();
            result.unwrap();
            assert_eq!(read.buffer, [round; 64]);
        }
    }
}

#[test]
fn port_in_use_error_states_port() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = TcpConfig { bind: Some([127, 0, 0, 1].into()), ports: port..=port, ..TcpConfig::default() };
    let error = TcpTransport::start(config, runtime.handle()).unwrap_err();
    assert_eq!(error.kind(), mooncake_core::ErrorKind::Invalid);
    let text = error.to_string();
    assert!(text.contains(&port.to_string()) && text.contains("in use"), "{text}");
}

#[test]
fn both_families_reach_the_default_port() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let node = TcpTransport::start(TcpConfig::default(), runtime.handle()).unwrap();
    let port = node.local_addr().port();
    assert!((15000..=17000).contains(&port));
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    if node.local_addr().is_ipv6() {
        std::net::TcpStream::connect(("::1", port)).unwrap();
    }
}

#[test]
fn dropping_the_node_closes_port_and_connections() {
    let node = node();
    let mut stream = node.connect();
    let addr = node.transport.local_addr();
    let Node { transport, runtime } = node;
    drop(transport);
    assert_eq!(read_until_close(&mut stream), b"");
    assert_eq!(std::net::TcpStream::connect(addr).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    drop(runtime);
}

#[allow(unsafe_code)]
fn snapshot(memory: &dyn MemorySource) -> Vec<u8> {
    let span = memory.span();
    let mut bytes = vec![0; span.len];
    // SAFETY: the memory is allocated; the test looks for concurrent writes.
    unsafe { std::ptr::copy_nonoverlapping(span.ptr.as_ptr(), bytes.as_mut_ptr(), span.len) };
    bytes
}

struct Part {
    memory: Arc<HostMemory>,
    from: usize,
    len: usize,
}

// SAFETY: the memory is kept and does not move; the test uses ranges inside it.
#[allow(unsafe_code)]
unsafe impl MemorySource for Part {
    fn span(&self) -> MemorySpan {
        // SAFETY: inside the mapping.
        MemorySpan::new(unsafe { self.memory.span().ptr.add(self.from) }, self.len)
    }
}
