//! Set-up of connections: from both sides at once, after a restart, and a thousand of them.

use mooncake_core::clock::{Rng, SystemClock};
use mooncake_rdma::message::{Connection, INSTANCE_KEY};
use mooncake_rdma::{RdmaConfig, RdmaTransport, verbs};
use mooncake_transport::Transport;
use mooncake_transport::handshake::{AcceptConnection, ConnectionDescriptor, HandshakeServer};
use mooncake_transport::instance::Instance;
use mooncake_transport::net::{self, DEFAULT_PORTS};
use mooncake_transport::transfer::{self, Transfer};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::support::{
    LOCALHOST, NodePair, bytes, command, describe, local, node, open, patient, runtime, serve,
};

/// Sends a request to a node, as its handshake port does.
fn handshake(runtime: &Runtime, node: &RdmaTransport, request: Value) -> Connection {
    let reply = runtime.block_on(node.accept(ConnectionDescriptor(request)));
    Connection::decode(&reply.0).unwrap()
}

#[test]
fn both_sides_may_connect_at_once() {
    for _ in 0..8 {
        let two = NodePair::patient();
        let (at_a, at_b) = (open(&two.a, 4096, 0), open(&two.b, 4096, 0));
        let (to_a, to_b) = (two.connect(&two.b, &two.a, &[&at_a]), two.connect(&two.a, &two.b, &[&at_b]));
        let there = [Transfer::new(at_b.addr(), local(&two.a, &[1; 4096]).into_shared())];
        let back = [Transfer::new(at_a.addr(), local(&two.b, &[2; 4096]).into_shared())];
        let there = transfer::write(&*two.a, &to_b, there, two.deadline_in(60));
        let back = transfer::write(&*two.b, &to_a, back, two.deadline_in(60));
        there.wait().0.unwrap();
        back.wait().0.unwrap();
        assert!(bytes(&at_b) == [1; 4096] && bytes(&at_a) == [2; 4096]);
    }
}

#[test]
fn a_connection_serves_both_directions() {
    let two = NodePair::patient();
    let (at_a, at_b) = (open(&two.a, 64, 3), open(&two.b, 64, 4));
    let (to_a, to_b) = (two.connect(&two.b, &two.a, &[&at_a]), two.connect(&two.a, &two.b, &[&at_b]));
    assert_eq!(two.read(&two.a, &to_b, at_b.addr(), 64).unwrap(), [4; 64]);
    assert_eq!(two.read(&two.b, &to_a, at_a.addr(), 64).unwrap(), [3; 64]);
    assert_eq!((two.a.devices()[0].connections, two.b.devices()[0].connections), (1, 1));
}

#[test]
fn the_handshake_is_that_of_mooncake_cpp() {
    let two = NodePair::patient();
    let a = describe(&two.a, &[]).rdma_server_name;
    let gid = Some("::ffff:10.77.0.2".parse().unwrap());
    let handshake = |message: &Connection| handshake(&two.runtime, &two.a, message.encode());
    let request = Connection {
        local_nic_path: "10.77.0.2:15999@rxe1".into(),
        peer_nic_path: format!("{a}@rxe0"),
        gid,
        pairs: vec![77, 78],
        ready: Some(false),
        ..Connection::default()
    };
    let reply = handshake(&request);
    assert_eq!((reply.refusal.as_str(), reply.pairs.len(), reply.ready), ("", 2, Some(false)));
    assert_eq!(
        (&reply.local_nic_path, &reply.peer_nic_path),
        (&request.peer_nic_path, &request.local_nic_path)
    );
    assert_eq!(reply.gid, Some("::ffff:10.77.0.1".parse().unwrap()));
    assert_eq!(handshake(&request).pairs, reply.pairs, "a repeated request gets the same connection");
    assert_eq!(handshake(&Connection { ready: Some(true), ..request.clone() }), Connection::default());

    let restarted = handshake(&Connection { pairs: vec![79, 80], ..request.clone() });
    assert!(
        restarted.pairs.len() == 2 && restarted.pairs != reply.pairs,
        "a restarted peer gets a new connection"
    );
    let silent = handshake(&Connection { pairs: vec![81, 82], ready: None, ..request.clone() });
    assert_eq!(
        (silent.refusal.as_str(), silent.ready),
        ("", None),
        "a peer that does not send ready messages gets none"
    );

    for (message, word) in [
        (Connection { pairs: vec![1], ..request.clone() }, "same number"),
        (Connection { peer_nic_path: "elsewhere@rxe0".into(), ..request.clone() }, "unknown device"),
        (Connection { local_nic_path: "nobody".into(), ..request.clone() }, "invalid device path"),
        (Connection { gid: None, pairs: vec![5, 6], ..request.clone() }, "no address"),
        (Connection { peer_instance: Some(Instance(1)), ..request.clone() }, "another process"),
        (Connection { ready: Some(true), pairs: vec![9, 9], ..request.clone() }, "no connection"),
    ] {
        let refusal = handshake(&message).refusal;
        assert!(refusal.contains(word), "{message:?}: {refusal}");
    }
    assert!(self::handshake(&two.runtime, &two.a, Value::Null).refusal.contains("JSON object"));
}

#[test]
fn a_peer_that_restarts_is_found_again() {
    let two = NodePair::patient();
    // One port for both lives, which also keeps their name.
    let port = net::listen(LOCALHOST, DEFAULT_PORTS, &mut Rng::from_os()).unwrap();
    let live = || serve(&two.runtime, two.clock.clone(), patient("rxe1"), port.try_clone().unwrap());
    let (first, its_port) = live();
    let region = open(&first, 4096, 1);
    let peer = two.connect(&two.a, &first, &[&region]);
    assert_eq!(two.read(&two.a, &peer, region.addr(), 16).unwrap(), [1; 16]);
    drop(region);
    two.runtime.block_on(HandshakeServer::stop(its_port));
    let published = describe(&first, &[]);
    let (name, its_instance) = (published.rdma_server_name, published.extra[INSTANCE_KEY].clone());
    drop(first);
    // The second life has other queue pairs and other keys.
    let (again, _its_port) = live();
    assert_eq!(describe(&again, &[]).rdma_server_name, name);
    let region = open(&again, 4096, 2);
    // A descriptor of the first life, with keys that are valid in the second one.
    let mut earlier = describe(&again, &[&region]);
    earlier.extra.insert(INSTANCE_KEY.into(), its_instance);
    let to_earlier = two.runtime.block_on(two.a.connect(&earlier)).unwrap();
    for _ in 0..2 {
        let error = two.write(&two.a, &to_earlier, region.addr(), &[9; 16]).unwrap_err();
        assert!(error.to_string().contains("another process has the port now"), "{error}");
    }
    assert_eq!(bytes(&region), [2; 4096]);
    let peer = two.connect(&two.a, &again, &[&region]);
    assert_eq!(two.read(&two.a, &peer, region.addr(), 16).unwrap(), [2; 16]);
    // In the other direction, the restarted node connects to the node that still has the old
    // connection.
    let at_a = open(&two.a, 4096, 3);
    let back = two.connect(&again, &two.a, &[&at_a]);
    assert_eq!(two.read(&again, &back, at_a.addr(), 16).unwrap(), [3; 16]);
}

#[test]
fn a_thousand_connections_come_and_go() {
    let before = verbs::object_counts();
    let devices = command("rdma resource");
    {
        let runtime = runtime();
        // Short queues, because their creation takes most of the time.
        let config = RdmaConfig { max_endpoints: 50, requests: 8, pairs: 1, ..patient("rxe0") };
        let (a, _port) = node(&runtime, SystemClock::shared(), config);
        let name = describe(&a, &[]).rdma_server_name;
        for i in 0..1000u32 {
            let request = Connection {
                local_nic_path: format!("10.77.0.2:{}@rxe1", 1000 + i),
                peer_nic_path: format!("{name}@rxe0"),
                gid: Some("::ffff:10.77.0.2".parse().unwrap()),
                pairs: vec![i],
                ready: (i % 2 == 0).then_some(false),
                ..Connection::default()
            };
            let reply = handshake(&runtime, &a, request.encode());
            assert_eq!((reply.refusal.as_str(), reply.pairs.len()), ("", 1), "connection {i}");
        }
        // Closed connections may still be in the process of destruction.
        assert!(a.devices()[0].connections <= 60, "{:?}", a.devices());
    }
    // Sends something on each connection.
    for round in 0..10 {
        let two = NodePair::patient();
        let region = open(&two.b, 64, round);
        let peer = two.connect(&two.a, &two.b, &[&region]);
        assert_eq!(two.read(&two.a, &peer, region.addr(), 64).unwrap(), [round; 64]);
    }
    assert_eq!(verbs::object_counts(), before);
    assert_eq!(command("rdma resource"), devices, "the kernel has as many resources as before");
}
