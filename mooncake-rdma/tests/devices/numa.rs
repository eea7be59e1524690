//! Tests on two NUMA nodes with a device on each; `cargo xtask rdma-test` starts such a machine.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_rdma::{RdmaConfig, RdmaTransport};
use mooncake_transport::topology::Discovery;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, Region};
use serde_json::json;

use crate::support::{NodePair, Remote, bytes, command, describe, patient};

const LEN: usize = 2 << 20;

/// Creates memory of a NUMA node, filled with one byte.
fn on(number: u32, node: &RdmaTransport, access: Access, byte: u8) -> Remote {
    let options = HostMemoryOptions { numa_node: Some(number), ..HostMemoryOptions::default() };
    let memory = Arc::new(HostMemory::with(LEN, &options).unwrap());
    let mut all = Region::register(node, memory, access).unwrap().exclusive().unwrap();
    all.copy_from(0, &vec![byte; LEN]).unwrap();
    all.into_region().unwrap()
}

fn two() -> NodePair {
    // Without names, all devices are used.
    let both = || RdmaConfig { devices: Vec::new(), ..patient("") };
    NodePair::new(both(), both())
}

fn connections(two: &NodePair) -> Vec<usize> {
    two.a.devices().iter().map(|device| device.connections).collect()
}

#[test]
#[ignore = "needs two NUMA nodes"]
fn the_topology_of_the_machine_is_discovered() {
    let matrix = json!({"cpu:0": [["rxe0"], ["rxe1"]], "cpu:1": [["rxe1"], ["rxe0"]]});
    assert_eq!(Discovery::default().topology().to_json(), matrix, "the topology dump");
    let two = two();
    let nodes: Vec<_> = two.a.devices().iter().map(|device| (device.name.clone(), device.node)).collect();
    assert_eq!(nodes, [("rxe0".to_owned(), Some(0)), ("rxe1".to_owned(), Some(1))]);
    for number in 0..2 {
        let region = on(number, &two.b, Access::Remote, 1);
        let desc = describe(&two.b, &[&region]);
        assert_eq!(desc.extra["priority_matrix"], matrix);
        assert_eq!(desc.buffers[0].name, format!("cpu:{number}"));
    }
}

#[test]
#[ignore = "needs two NUMA nodes"]
fn the_near_device_is_taken_while_it_works() {
    for near in 0..2u32 {
        let two = two();
        let region = on(1 - near, &two.b, Access::Remote, 1);
        let peer = two.connect(&two.a, &two.b, &[&region]);
        let write = |byte: u8, len: usize| {
            let local = on(near, &two.a, Access::Local, byte).slice(0..len).unwrap();
            transfer::write(&*two.a, &peer, [Transfer::new(region.addr(), local)], two.deadline_in(60))
                .wait()
                .0
        };
        // One message, and a transfer long enough to be spread over devices that are equally near.
        for (byte, len) in [(2, 64), (3, LEN)] {
            write(byte, len).unwrap();
            assert!(bytes(&region)[..len].iter().all(|found| *found == byte));
        }
        let mut expected = [0, 0];
        expected[near as usize] = 1;
        assert_eq!(connections(&two), expected, "memory of node {near}");
        assert_eq!(two.read(&two.a, &peer, region.addr(), 64).unwrap(), [3; 64]);

        command(&format!("ip link set rdma{near} down"));
        let deadline = two.clock.now().after(Duration::from_secs(60));
        while two.a.devices()[near as usize].up && two.clock.now() < deadline {
            let _ = write(4, 64);
        }
        let outcome = write(5, 64);
        command(&format!("ip link set rdma{near} up"));
        outcome.unwrap();
        assert_eq!(bytes(&region)[..64], [5; 64]);
        assert_eq!(connections(&two)[1 - near as usize], 1, "the far device is better than none");
    }
}
