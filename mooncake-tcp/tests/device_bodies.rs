//! Device memory behind the data port, byte by byte, and devices that are slow or fail.

mod common;

use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use common::*;
use mooncake_core::memory::MemorySource;
use mooncake_core::testkit::device::{TestDevice, TestDeviceMemory};
use mooncake_tcp::{TcpConfig, TcpTransport};
use mooncake_transport::{Access, Region};

const FAILED: [u8; 8] = *b"\x02\0\0\0VTCM";
const MIB: usize = 1 << 20;

fn open(node: &Node, device: &TestDevice, len: usize) -> (Arc<TestDeviceMemory>, Region<TcpTransport>) {
    let memory = Arc::new(device.memory(len).unwrap());
    memory.fill(&pattern(len));
    let region = Region::register(&node.transport, memory.clone(), Access::Remote).unwrap();
    (memory, region)
}

#[test]
fn requests_are_served_in_order() {
    let (node, device) = (Node::start(TcpConfig::default()), TestDevice::new());
    let (memory, region) = open(&node, &device, 4096);
    let host = node.open(64);
    let at = region.addr();
    let mut stream = node.connect();
    let requests = [
        header(READ, at, 5),
        header(WRITE, at, 3),
        b"abc".to_vec(),
        header(PLAIN_READ, at, 5),
        header(READ, host.addr(), 2),
        header(PLAIN_WRITE, at + 3, 2),
        b"de".to_vec(),
        header(WRITE, host.addr(), 1),
        b"h".to_vec(),
        header(PLAIN_READ, at, 6),
        header(PLAIN_READ, host.addr(), 2),
        header(READ, at + 4095, 1),
        header(READ, at + 4095, 2),
    ]
    .concat();
    write_parts(&mut stream, &[&requests]);
    let answers = [
        &OK[..],
        &[0, 1, 2, 3, 4],
        &OK,
        b"abc\x03\x04",
        &OK,
        &[0, 1],
        &OK,
        b"abcde\x05",
        b"h\x01",
        &OK,
        &[79],
        &REFUSED,
    ]
    .concat();
    assert_eq!(read_until_close(&mut stream), answers);
    assert_eq!(&memory.bytes()[..6], b"abcde\x05");
}

/// Bodies longer than the buffers, in pieces that end anywhere.
#[test]
fn long_bodies_arrive_whole() {
    let (node, device) = (Node::start(TcpConfig::default()), TestDevice::new());
    let len = 5 * MIB + 3;
    let (memory, region) = open(&node, &device, len);
    let sent: Vec<u8> = pattern(len).iter().map(|byte| byte ^ 0x55).collect();
    let mut stream = node.connect();
    let mut writer = stream.try_clone().unwrap();
    let (head, body) = (header(WRITE, region.addr(), len as u64), sent.clone());
    let writing = std::thread::spawn(move || {
        writer.write_all(&head).unwrap();
        body.chunks(300_007).for_each(|piece| writer.write_all(piece).unwrap());
        writer
            .write_all(&header(READ, u64::from_le_bytes(head[8..16].try_into().unwrap()), len as u64))
            .unwrap();
    });
    assert_eq!(read_exactly(&mut stream, 8), OK);
    assert!(memory.bytes() == sent);
    assert_eq!(read_exactly(&mut stream, 8), OK);
    assert!(read_exactly(&mut stream, len) == sent);
    writing.join().unwrap();
}

#[test]
fn a_failed_device_is_reported() {
    let (node, device) = (Node::start(TcpConfig::default()), TestDevice::new());
    let (memory, region) = open(&node, &device, 3 * MIB);
    let host = node.open(64);
    let at = region.addr();
    // Earlier requests get their responses first.
    let earlier = [header(WRITE, host.addr(), 1), b"x".to_vec()].concat();
    for (opcode, body) in [(READ, 0), (WRITE, 3 * MIB)] {
        device.fail_copies(1);
        let mut stream = node.connect();
        write_parts(&mut stream, &[&earlier, &header(opcode, at, 3 * MIB as u64)]);
        // The node may close the connection before all bytes are sent.
        let _ = stream.write_all(&vec![9; body]);
        assert_eq!(read_until_close(&mut stream), [OK, FAILED].concat());
    }
    device.fail_copies(1);
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(PLAIN_READ, at, 10)]);
    assert_eq!(read_until_close(&mut stream), b"", "this framing has no frame for a failure");
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(WRITE, at, 2), b"ok"]);
    assert_eq!(read_exactly(&mut stream, 8), OK);
    assert_eq!(&memory.bytes()[..2], b"ok");
}

/// In the middle of a response no failure can be reported: the response is cut short.
#[test]
fn an_incomplete_response_is_cut() {
    let (node, device) = (Node::start(TcpConfig::default()), TestDevice::new());
    let (_memory, region) = open(&node, &device, 64 * MIB);
    let mut stream = node.connect();
    write_parts(&mut stream, &[&header(READ, region.addr(), 64 * MIB as u64)]);
    assert_eq!(read_exactly(&mut stream, 8 + 4096)[..8], OK);
    device.fail_copies(u64::MAX);
    let received = read_until_close(&mut stream);
    assert!(received.len() < 64 * MIB - 4096);
    assert!(
        received.iter().zip(4096..).all(|(byte, i)| *byte == (i % 251) as u8),
        "all bytes before the cut are correct"
    );
}

/// Deregistration waits for a copy that a device is busy with, even on the thread that the task of
/// the connection needs.
#[test]
fn deregistering_waits_for_copies() {
    let device = TestDevice::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = TcpConfig { bind: Some([127, 0, 0, 1].into()), ..TcpConfig::default() };
    let transport = TcpTransport::start(config, runtime.handle()).unwrap();
    for opcode in [READ, WRITE] {
        let memory = Arc::new(device.memory(MIB).unwrap());
        let address = memory.span().addr();
        let region = Region::register(&transport, memory.clone(), Access::Remote).unwrap();
        device.hold(true);
        let port = transport.local_addr();
        let (begun_sender, begun) = channel();
        let peer = std::thread::spawn(move || {
            let mut stream = std::net::TcpStream::connect(port).unwrap();
            write_parts(&mut stream, &[&header(opcode, address, MIB as u64)]);
            if opcode == WRITE {
                let _ = stream.write_all(&vec![7; MIB]);
            }
            begun_sender.send(()).unwrap();
            // The response is the copied bytes or a refusal.
            read_exactly(&mut stream, 8)
        });
        runtime.block_on(async {
            // The task runs only on this thread, and gets as far as the device lets it.
            while device.waiting() == 0 {
                tokio::task::yield_now().await;
            }
            begun.recv().unwrap();
            let letting_go = device.let_go_after(Duration::from_millis(50));
            drop(region);
            assert!(
                letting_go.is_finished() || device.waiting() == 0,
                "deregistration returned during a copy"
            );
            letting_go.join().unwrap();
            // No copy is in progress: dropping the memory during a copy would end the process.
            drop(memory);
            tokio::task::spawn_blocking(move || peer.join().unwrap()).await.unwrap();
        });
    }
}

/// Fewer buffers than connections, and a slow device.
#[test]
fn many_connections_share_few_buffers() {
    let (node, device) = (Node::start(TcpConfig::default()), TestDevice::new());
    let len = 2 * MIB;
    let (memory, region) = open(&node, &device, 48 * len);
    let peers: Vec<_> = (0..48u8)
        .map(|i| {
            let (mut stream, at) = (node.connect(), region.addr() + u64::from(i) * len as u64);
            std::thread::spawn(move || {
                write_parts(&mut stream, &[&header(WRITE, at, len as u64), &vec![i; len]]);
                assert_eq!(read_exactly(&mut stream, 8), OK);
                write_parts(&mut stream, &[&header(READ, at, len as u64)]);
                assert_eq!(read_exactly(&mut stream, 8), OK);
                assert!(read_exactly(&mut stream, len) == vec![i; len]);
            })
        })
        .collect();
    peers.into_iter().for_each(|peer| peer.join().unwrap());
    assert!(memory.bytes().chunks(len).zip(0u8..).all(|(part, i)| part.iter().all(|byte| *byte == i)));
}
