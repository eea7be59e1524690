//! Failing cables, keys and devices.

use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_rdma::RdmaConfig;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{SegmentDesc, Transport};
use serde_json::json;

use crate::support::{NodePair, bytes, command, describe, local, open, patient};

/// Restores the cable on drop.
struct CableRestored;

impl Drop for CableRestored {
    fn drop(&mut self) {
        let _ = std::process::Command::new("tc").args(["qdisc", "del", "dev", "rdma0", "root"]).output();
        command("ip link set rdma1 up");
    }
}

#[test]
fn a_cable_that_is_pulled_and_put_back() {
    let impatient = RdmaConfig { timeout: 14, attempts: 1, ..patient("rxe0") };
    let two = NodePair::new(impatient, patient("rxe1"));
    let region = open(&two.b, 4096, 1);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    two.write(&two.a, &peer, region.addr(), &[2; 64]).unwrap();
    let restored = CableRestored;
    command("ip link set rdma1 down");
    let error = two.write(&two.a, &peer, region.addr(), &[3; 64]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // The event of the device may come later than the timeout.
    let deadline = two.clock.now().after(Duration::from_secs(60));
    while two.a.devices()[0].up && two.clock.now() < deadline {
        let _ = two.write(&two.a, &peer, region.addr(), &[3; 64]);
    }
    assert!(!two.a.has_active_device(), "{:?}", two.a.devices());
    let error = two.write(&two.a, &peer, region.addr(), &[3; 64]).unwrap_err();
    assert!(error.to_string().contains("no local RDMA device is up"), "{error}");
    drop(restored);
    while two.write(&two.a, &peer, region.addr(), &[4; 64]).is_err() {
        assert!(two.clock.now() < deadline, "{:?}", two.a.devices());
    }
    assert_eq!(bytes(&region)[..65], [&[4; 64][..], &[1]].concat());
}

#[test]
fn a_cable_that_loses_packets() {
    let two = NodePair::patient();
    let region = open(&two.b, 1 << 20, 0);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    let _restored = CableRestored;
    command("tc qdisc add dev rdma0 root netem loss 2%");
    for byte in 1..4 {
        let sent = vec![byte; 1 << 20];
        two.write(&two.a, &peer, region.addr(), &sent).unwrap();
        assert!(bytes(&region) == sent);
        assert!(two.read(&two.a, &peer, region.addr(), 1 << 20).unwrap() == sent);
    }
}

#[test]
fn a_wrong_key_is_refused_and_harms_no_other_transfer() {
    let two = NodePair::patient();
    let region = open(&two.b, 4096, 1);
    let good = two.connect(&two.a, &two.b, &[&region]);
    two.write(&two.a, &good, region.addr(), &[2; 64]).unwrap();
    let mut desc = describe(&two.b, &[&region]);
    let key = desc.buffers[0].extra["rkey"][0].as_u64().unwrap();
    desc.buffers[0].extra.insert("rkey".into(), json!([key ^ 0x5555]));
    let bad = two.runtime.block_on(two.a.connect(&desc)).unwrap();
    // Good messages on the same connection fail with the refused one: they are sent again.
    let write = |peer, byte: u8, at: u64| {
        let sent = [Transfer::new(region.addr() + at, local(&two.a, &[byte; 64]).into_shared())];
        transfer::write(&*two.a, peer, sent, two.deadline_in(60))
    };
    let tickets: Vec<_> =
        (0..20).map(|i| write(if i == 7 { &bad } else { &good }, 10 + i, u64::from(i) * 64)).collect();
    for (i, ticket) in tickets.into_iter().enumerate() {
        match (i, ticket.wait().0) {
            (7, outcome) => assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Invalid),
            (_, outcome) => outcome.unwrap_or_else(|error| panic!("write {i}: {error}")),
        }
    }
    let now = bytes(&region);
    for i in (0..20usize).filter(|i| *i != 7) {
        assert_eq!(now[i * 64..i * 64 + 64], [10 + i as u8; 64], "write {i}");
    }
    assert_eq!(now[7 * 64..8 * 64], [1; 64], "the refused write");
}

#[test]
fn an_unresponsive_device_of_the_peer_is_avoided() {
    let two = NodePair::patient();
    let region = open(&two.b, 4096, 1);
    let desc = describe(&two.b, &[&region]);
    let key = desc.buffers[0].extra["rkey"][0].clone();
    // A second device that does not exist, first in the list.
    let mut wide: SegmentDesc = desc;
    let real = wide.extra["devices"][0].clone();
    wide.extra.insert("devices".into(), json!([{"name": "ghost", "lid": 0, "gid": real["gid"]}, real]));
    wide.buffers[0].extra.insert("rkey".into(), json!([1, key]));
    let peer = two.runtime.block_on(two.a.connect(&wide)).unwrap();
    for byte in 2..10 {
        two.write(&two.a, &peer, region.addr(), &[byte; 64]).unwrap();
        assert_eq!(bytes(&region)[..64], [byte; 64]);
    }
}

#[test]
fn an_unresponsive_peer_costs_its_deadline_and_no_more() {
    let mut two = NodePair::patient();
    let region = open(&two.b, 4096, 1);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    // A port that accepts connections and sends nothing.
    let port = two.ports.pop().unwrap();
    let addr = port.addr();
    two.runtime.block_on(port.stop());
    let _mute = std::net::TcpListener::bind(addr).unwrap();
    let read = [Transfer::new(region.addr(), local(&two.a, &[0; 64]))];
    let start = two.clock.now();
    let error = transfer::read(&*two.a, &peer, read, two.deadline_in(2)).wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(two.clock.now().since(start) >= Duration::from_secs(2));
}

/// Restores the address of the first device on drop.
struct AddressRestored;

impl Drop for AddressRestored {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip").args(["-4", "addr", "flush", "dev", "rdma0"]).output();
        command("ip addr add 10.77.0.1/24 dev rdma0");
    }
}

#[test]
fn a_device_whose_address_changes_continues_with_the_new_one() {
    let two = NodePair::patient();
    let region = open(&two.b, 4096, 1);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    two.write(&two.a, &peer, region.addr(), &[2; 64]).unwrap();
    let gid = || two.a.devices()[0].gid.to_string();
    assert_eq!(gid(), "::ffff:10.77.0.1");
    let restored = AddressRestored;
    command("ip addr del 10.77.0.1/24 dev rdma0");
    command("ip addr add 10.77.0.11/24 dev rdma0");
    let deadline = two.clock.now().after(Duration::from_secs(60));
    let wait_for = |wanted: &str| {
        while gid() != wanted {
            assert!(two.clock.now() < deadline, "{:?}", two.a.devices());
            std::thread::yield_now();
        }
    };
    wait_for("::ffff:10.77.0.11");
    assert!(describe(&two.a, &[]).extra["devices"][0]["gid"].as_str().unwrap().ends_with("0a:4d:00:0b"));
    // The old connection has lost its route; later messages find a new one.
    while two.write(&two.a, &peer, region.addr(), &[3; 64]).is_err() {
        assert!(two.clock.now() < deadline, "{:?}", two.a.devices());
    }
    assert_eq!(bytes(&region)[..64], [3; 64]);
    drop(restored);
    wait_for("::ffff:10.77.0.1");
    while two.write(&two.a, &peer, region.addr(), &[4; 64]).is_err() {
        assert!(two.clock.now() < deadline, "{:?}", two.a.devices());
    }
}

#[test]
fn a_rail_pauses_after_a_failed_connection_attempt() {
    for (pause, comes_back) in [(Duration::ZERO, true), (Duration::from_secs(600), false)] {
        let resting = RdmaConfig { connect_pause: pause, ..patient("rxe0") };
        let mut two = NodePair::new(resting, patient("rxe1"));
        let region = open(&two.b, 4096, 1);
        let peer = two.connect(&two.a, &two.b, &[&region]);
        let port = two.ports.pop().unwrap();
        let addr = port.addr();
        two.runtime.block_on(port.stop());
        let error = two.write(&two.a, &peer, region.addr(), &[2; 64]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let _port = two.serve_at(addr);
        let result = two.write(&two.a, &peer, region.addr(), &[3; 64]);
        assert_eq!(result.is_ok(), comes_back, "{result:?}");
        if let Err(error) = result {
            assert!(error.to_string().contains("a moment ago"), "{error}");
            // A peer that connects to this node is accepted nevertheless.
            let ours = open(&two.a, 64, 5);
            let back = two.connect(&two.b, &two.a, &[&ours]);
            assert_eq!(two.read(&two.b, &back, ours.addr(), 64).unwrap(), [5; 64]);
            two.write(&two.a, &peer, region.addr(), &[4; 64]).unwrap();
        }
    }
}
