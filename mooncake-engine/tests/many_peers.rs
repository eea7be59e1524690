//! Many peers of one process: their cost while they are connected, and the absence of leaks
//! afterwards.
#![cfg(all(target_os = "linux", feature = "transport-tcp"))]
#![allow(clippy::print_stdout, reason = "the figures are looked at, too")]

use std::sync::Arc;

use mooncake_core::memory::HostMemory;
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_transport::engine::{Batch, LocalCopies};
use mooncake_transport::{Directory, Engine, LoopbackNet, Transport};

/// Resources of the process.
#[derive(Debug)]
struct Usage {
    descriptors: usize,
    threads: usize,
    resident_mb: usize,
}

fn usage() -> Usage {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
    Usage {
        descriptors: count("/proc/self/fd"),
        threads: count("/proc/self/task"),
        resident_mb: (pages * 4096) >> 20,
    }
}

/// Opens all, writes to all and reads from all in one batch each, `rounds` times.
async fn talk<T: Transport>(user: &Engine<T>, peers: &[(String, u64)], rounds: usize) {
    for round in 0..rounds {
        let (mut writes, mut reads) = (Batch::new(), Batch::new());
        for (index, (name, at)) in peers.iter().enumerate() {
            let target = user.open(name).await.unwrap();
            writes.write(&target, *at, vec![(index + round) as u8; 512]);
            reads.read(&target, at + 256, vec![0; 256]);
        }
        assert!(user.submit(writes, None).await.results.iter().all(Result::is_ok));
        let done = user.submit(reads, None).await;
        for (index, (result, buffer)) in done.results.into_iter().zip(done.buffers).enumerate() {
            result.unwrap();
            let bytes: Vec<u8> = buffer.try_into().unwrap();
            assert_eq!(bytes, [(index + round) as u8; 256]);
        }
    }
}

// One test, so that nothing else opens files meanwhile.
#[test]
fn peers_cost_little_and_leave_nothing() {
    let before = usage();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let thousand = runtime.block_on(async {
        let (net, directory) = (LoopbackNet::new(), Directory::new(Arc::<MemoryMetadata>::default()));
        let start = |name: String| {
            Engine::builder(Arc::new(net.node())).name(name).directory(directory.clone()).start()
        };
        let (mut owners, mut regions, mut peers) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..1000 {
            let owner = start(format!("owner{index}")).await.unwrap();
            let region = owner.register(Arc::new(HostMemory::new(4096).unwrap())).await.unwrap();
            peers.push((owner.name().to_owned(), region.addr()));
            regions.push(region);
            owners.push(owner);
        }
        let user = start("user".into()).await.unwrap();
        talk(&user, &peers, 3).await;
        usage()
    });
    let real = runtime.block_on(async {
        let start = || {
            let wires = TransportOptions::for_protocol("tcp").unwrap().without_shared_memory();
            let builder = TransferEngine::builder().name("127.0.0.1").transports(wires);
            builder.local_copies(LocalCopies::Never).start()
        };
        let (mut owners, mut regions, mut peers) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..200 {
            let owner = start().await.unwrap();
            let region = owner.register(Arc::new(HostMemory::new(4096).unwrap())).await.unwrap();
            peers.push((owner.name().to_owned(), region.addr()));
            regions.push(region);
            owners.push(owner);
        }
        let user = start().await.unwrap();
        talk(&user, &peers, 3).await;
        let real = usage();
        drop(regions);
        for engine in owners.iter().chain([&user]) {
            engine.close().await.unwrap();
        }
        real
    });
    drop(runtime);
    let after = usage();
    println!(
        "before {before:?}\n1000 peers over loopback {thousand:?}\n200 peers over TCP {real:?}\nafter {after:?}"
    );
    assert!(thousand.descriptors <= before.descriptors + 20, "loopback needs no files");
    // A handshake port, a data port, and a connection with both its ends in this process.
    assert!(real.descriptors <= before.descriptors + 200 * 4 + 40, "{real:?}");
    assert!(real.threads <= before.threads + 20, "a peer is no thread: {real:?}");
    assert!(real.resident_mb <= before.resident_mb + 256, "{real:?}");
    // The allocator keeps some of what it had.
    assert!(after.resident_mb <= before.resident_mb + 64, "{after:?}, {before:?} before");
    assert!(after.descriptors <= before.descriptors + 4, "{after:?}, {before:?} before");
    assert!(after.threads <= before.threads + 4, "{after:?}");
}
