//! Long and many transfers, more than the queues hold.

use std::collections::HashSet;

use std::os::fd::AsFd;
use std::sync::Arc;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, HugePages, ListedDmaBuf, MemorySource};
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_rdma::RdmaConfig;
use mooncake_rdma::verbs::{Device, Domain, MemoryRegion, Rights};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, Region, Transport};

use crate::support::{NodePair, bytes, describe, local, open, patient};

const MIB: usize = 1 << 20;

/// Returns bytes that change every 64 KiB, so that a misplaced message is noticed.
fn striped(len: usize) -> Vec<u8> {
    (0..len.div_ceil(1 << 16)).flat_map(|i| [i as u8 + 1; 1 << 16]).take(len).collect()
}

#[test]
fn messages_are_no_longer_than_the_device_sends() {
    let whole = RdmaConfig { slice_bytes: usize::MAX, ..patient("rxe0") };
    let two = NodePair::new(whole, patient("rxe1"));
    assert_eq!(two.a.devices()[0].message_bytes, 8 * MIB, "the limit of Soft-RoCE");
    let region = open(&two.b, 9 * MIB + 5, 0);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    let sent = striped(9 * MIB + 5);
    two.write(&two.a, &peer, region.addr(), &sent).unwrap();
    assert!(bytes(&region) == sent);
    assert!(two.read(&two.a, &peer, region.addr(), sent.len()).unwrap() == sent);
}

#[test]
fn messages_without_credit_wait_and_excess_messages_are_refused() {
    // The completion queue has fewer entries than one queue pair.
    let narrow =
        RdmaConfig { completions: 15, requests: 8, slice_bytes: 512, fragment_bytes: 0, ..patient("rxe0") };
    let two = NodePair::new(narrow, patient("rxe1"));
    let region = open(&two.b, 1 << 16, 0);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    for byte in 1..4 {
        let sent = vec![byte; 1 << 16];
        two.write(&two.a, &peer, region.addr(), &sent).unwrap();
        assert!(bytes(&region) == sent);
    }
    // Two rails to two peers share the queue.
    let other = NodePair::new(patient("rxe1"), patient("rxe1"));
    let third = open(&other.b, 1 << 16, 0);
    let to_third = two.connect(&two.a, &other.b, &[&third]);
    let part = |byte: u8| [Transfer::new(region.addr(), local(&two.a, &[byte; 1 << 16]).into_shared())];
    let first = transfer::write(&*two.a, &peer, part(9), two.deadline_in(60));
    let second = [Transfer::new(third.addr(), local(&two.a, &[8; 1 << 16]).into_shared())];
    let second = transfer::write(&*two.a, &to_third, second, two.deadline_in(60));
    first.wait().0.unwrap();
    second.wait().0.unwrap();
    assert!(bytes(&region) == [9; 1 << 16] && bytes(&third) == [8; 1 << 16]);

    let short = RdmaConfig { max_waiting: 4, slice_bytes: 512, fragment_bytes: 0, ..patient("rxe0") };
    let two = NodePair::new(short, patient("rxe1"));
    let region = open(&two.b, 1 << 16, 0);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    let error = two.write(&two.a, &peer, region.addr(), &[1; 1 << 16]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    two.write(&two.a, &peer, region.addr(), &[1; 2048]).unwrap();
}

#[test]
fn long_transfers_go_over_every_device() {
    let both = || RdmaConfig { devices: vec!["rxe0".into(), "rxe1".into()], ..patient("") };
    let two = NodePair::new(both(), both());
    let region = open(&two.b, 2 * MIB + 7, 0);
    let peer = two.connect(&two.a, &two.b, &[&region]);
    let sent = striped(2 * MIB + 7);
    two.write(&two.a, &peer, region.addr(), &sent).unwrap();
    assert!(bytes(&region) == sent);
    assert!(two.read(&two.a, &peer, region.addr(), sent.len()).unwrap() == sent);
    let used: Vec<usize> = two.a.devices().iter().map(|device| device.connections).collect();
    assert!(used.iter().all(|n| *n > 0), "connections by device: {used:?}");
}

#[test]
fn objects_of_another_transport_are_refused() {
    let two = NodePair::patient();
    let region = open(&two.b, 64, 1);
    let to_b = two.connect(&two.a, &two.b, &[&region]);
    let of_b = [Transfer::new(region.addr(), local(&two.b, &[0; 64]))];
    let error = transfer::read(&*two.a, &to_b, of_b, two.deadline_in(60)).wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let of_b = [Transfer::new(region.addr(), local(&two.b, &[0; 64]))];
    let error = transfer::read(&*two.b, &to_b, of_b, two.deadline_in(60)).wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(two.a.capabilities().needs_registration);
}

/// Memory longer than a device's limit is registered in parts, of different lengths on either side.
#[test]
fn memory_in_parts_acts_as_one() {
    let parts = |device, region_bytes| RdmaConfig { region_bytes, ..patient(device) };
    let two = NodePair::new(parts("rxe0", 300 << 10), parts("rxe1", 200 << 10));
    let region = open(&two.b, MIB + 7, 0);
    let desc = describe(&two.b, &[&region]);
    let lengths: Vec<u64> = desc.buffers.iter().map(|buffer| buffer.length).collect();
    assert_eq!(lengths, [200 << 10, 200 << 10, 200 << 10, 200 << 10, 200 << 10, (24 << 10) + 7]);
    let keys: HashSet<u64> = desc.buffers.iter().filter_map(|b| b.extra["rkey"][0].as_u64()).collect();
    assert_eq!(keys.len(), 6, "a key for each part");
    let peer = two.connect(&two.a, &two.b, &[&region]);
    let sent = striped(MIB + 7);
    two.write(&two.a, &peer, region.addr(), &sent).unwrap();
    assert!(bytes(&region) == sent);
    assert!(two.read(&two.a, &peer, region.addr(), sent.len()).unwrap() == sent);
    // Transfers across the end of a part, up to it, and from it.
    let seam = 200 << 10;
    for (at, len) in [(seam - 3, 7), (seam - 3, 3), (seam, 3)] {
        two.write(&two.a, &peer, region.addr() + at, &vec![0xee; len]).unwrap();
        assert_eq!(bytes(&region)[at as usize..][..len], vec![0xee; len]);
    }
    let error = two.write(&two.a, &peer, region.addr() + MIB as u64, &[1; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "past the end: {error}");
}

#[test]
fn huge_pages_work_like_ordinary_ones() {
    std::fs::write("/proc/sys/vm/nr_hugepages", "8").unwrap();
    let two = NodePair::patient();
    let options = HostMemoryOptions { huge_pages: HugePages::Size2M, ..HostMemoryOptions::default() };
    let memory = Arc::new(HostMemory::with(4 * MIB, &options).unwrap());
    let mut all = Region::register(&*two.b, memory, Access::Remote).unwrap().exclusive().unwrap();
    all.copy_from(0, &vec![1; 4 * MIB]).unwrap();
    let region = all.into_region().unwrap();
    let peer = two.connect(&two.a, &two.b, &[&region]);
    let sent = striped(3 * MIB);
    two.write(&two.a, &peer, region.addr() + 7, &sent).unwrap();
    assert!(bytes(&region)[7..][..3 * MIB] == sent);
    assert!(two.read(&two.a, &peer, region.addr() + 7, sent.len()).unwrap() == sent);
    drop((peer, region, two));
    std::fs::write("/proc/sys/vm/nr_hugepages", "0").unwrap();
}

/// Soft-RoCE accepts no dma-buf: the error says so, and memory with a usable address is registered
/// by address.
#[test]
fn a_driver_without_dma_bufs_is_reported() {
    let domain = Domain::new(&Device::open("rxe0").unwrap()).unwrap();
    let options = HostMemoryOptions { shared: Some("dma-buf".into()), ..HostMemoryOptions::default() };
    let memory = HostMemory::with(MIB, &options).unwrap();
    let span = memory.span();
    let file = memory.fd().unwrap().try_clone_to_owned().unwrap();
    let rights = Rights { remote: true, write: true, relaxed: true };
    // SAFETY: the call registers nothing.
    let refused =
        unsafe { MemoryRegion::register_dmabuf(&domain, file.as_fd(), 0, MIB, span.addr(), rights) };
    let error = refused.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotSupported, "{error}");
    assert!(error.to_string().contains("driver does not support"), "{error}");

    let two = NodePair::patient();
    let _listed = ListedDmaBuf::new(span, file, 0).unwrap();
    let region = Region::register(&*two.b, Arc::new(memory), Access::Remote).unwrap();
    let peer = two.connect(&two.a, &two.b, &[&region]);
    two.write(&two.a, &peer, region.addr(), &[9; 4096]).unwrap();
    assert_eq!(bytes(&region)[..4096], [9; 4096]);
}

/// Writes with and without relaxed ordering.
#[test]
fn writes_arrive_in_either_order() {
    for relaxed_ordering in [true, false] {
        let config = |device| RdmaConfig { relaxed_ordering, ..patient(device) };
        let two = NodePair::new(config("rxe0"), config("rxe1"));
        let region = open(&two.b, MIB, 0);
        let peer = two.connect(&two.a, &two.b, &[&region]);
        let sent = striped(MIB);
        two.write(&two.a, &peer, region.addr(), &sent).unwrap();
        assert!(two.read(&two.a, &peer, region.addr(), MIB).unwrap() == sent);
    }
}

/// The local device uses the configured one of two devices of the peer, or the one of its own name.
#[test]
fn devices_have_partners() {
    for (partners, used) in [(Vec::new(), "rxe0"), (vec![("rxe0".into(), vec!["rxe1".into()])], "rxe1")] {
        let both = RdmaConfig { devices: vec!["rxe0".into(), "rxe1".into()], ..patient("") };
        let two = NodePair::new(RdmaConfig { partners, ..patient("rxe0") }, both);
        let region = open(&two.b, 4096, 0);
        let peer = two.connect(&two.a, &two.b, &[&region]);
        for byte in 1..9 {
            two.write(&two.a, &peer, region.addr(), &[byte; 64]).unwrap();
        }
        let devices = two.b.devices();
        let connected: Vec<_> =
            devices.iter().filter(|nic| nic.connections > 0).map(|nic| &nic.name).collect();
        assert_eq!(connected, [used]);
    }
}
