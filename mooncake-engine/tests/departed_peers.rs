//! Peers that come and go leave nothing in the processes that have talked to them.
#![cfg(all(target_os = "linux", feature = "transport-tcp", feature = "transport-shm"))]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::{AddressRequest, TransferEngine, TransferEngineBuilder, TransportOptions};
use mooncake_transport::engine::LocalCopies;
use mooncake_transport::{Directory, Opcode};
use tokio::runtime::Runtime;

/// Number of peers that come and go. `PEERS` overrides it.
#[allow(clippy::disallowed_methods, reason = "an argument of a long run")]
fn peers() -> usize {
    std::env::var("PEERS").ok().and_then(|text| text.parse().ok()).unwrap_or(60)
}

/// Resources of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    descriptors: usize,
    maps: usize,
    tasks: usize,
    counters: usize,
}

fn usage(runtime: &Runtime, engine: &TransferEngine) -> Usage {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    Usage {
        descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        // The allocator and the stacks of threads map other memory.
        maps: maps.lines().filter(|line| line.contains("memfd") || line.contains("/dev/shm")).count(),
        tasks: runtime.metrics().num_alive_tasks(),
        counters: engine.metrics().len(),
    }
}

fn builder(transports: TransportOptions) -> TransferEngineBuilder {
    TransferEngine::builder()
        .name("127.0.0.1")
        .transports(transports)
        .local_copies(LocalCopies::Never)
        .close_unused_after(Duration::from_millis(200))
}

fn shared_memory() -> Arc<HostMemory> {
    let options = HostMemoryOptions { shared: Some("peer".into()), ..HostMemoryOptions::default() };
    Arc::new(HostMemory::with(8192, &options).unwrap())
}

/// Waits until the resources are back.
fn wait_for(runtime: &Runtime, engine: &TransferEngine, before: Usage, what: &str) {
    let clock = SystemClock::shared();
    let end = clock.now().after(Duration::from_secs(60));
    loop {
        let now = usage(runtime, engine);
        let is_back = now.descriptors <= before.descriptors
            && now.maps <= before.maps
            && now.tasks <= before.tasks
            && now.counters <= before.counters + 1;
        if is_back {
            return;
        }
        assert!(clock.now() < end, "{what}: {now:?} stay, {before:?} before");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Transfers in both directions between `engine` and a new peer, which then departs.
async fn visit(engine: &TransferEngine, own: u64, peer: TransferEngineBuilder) {
    let peer = peer.start().await.unwrap();
    let memory = shared_memory();
    let at = memory.span().addr();
    // SAFETY: the memory outlives the engine of the peer.
    unsafe { peer.register_raw(at, 8192) }.await.unwrap();
    let to =
        |target, local, remote| [AddressRequest { opcode: Opcode::Write, local, target, remote, len: 64 }];
    let target = engine.open(peer.name()).await.unwrap();
    if engine.transfer(&to(target, own, at), None, None).await.is_err() {
        // The port, and so the name, may be that of a peer that has just departed.
        engine.forget(peer.name());
        let target = engine.open(peer.name()).await.unwrap();
        engine.transfer(&to(target, own, at), None, None).await.unwrap();
    }
    let target = peer.open(engine.name()).await.unwrap();
    peer.transfer(&to(target, at + 4096, own + 4096), None, None).await.unwrap();
    peer.close().await.unwrap();
    peer.regions().clear().await;
}

fn come_and_go(what: &str, transports: TransportOptions, directory: Option<Directory>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let with = |name: &str| match &directory {
        Some(directory) => builder(transports.clone()).name(name).directory(directory.clone()),
        None => builder(transports.clone()),
    };
    let engine = runtime.block_on(with("stays").start()).unwrap();
    let memory = shared_memory();
    // SAFETY: the memory outlives the engine.
    runtime.block_on(unsafe { engine.register_raw(memory.span().addr(), 8192) }).unwrap();
    let before = usage(&runtime, &engine);
    for index in 0..peers() {
        let peer = with(&format!("peer{index}"));
        runtime.block_on(visit(&engine, memory.span().addr(), peer));
    }
    wait_for(&runtime, &engine, before, what);
    let counts = engine.metrics().iter().map(|peer| peer.counts.writes).sum::<u64>();
    assert_eq!(counts, peers() as u64, "the counters of departed peers are summed");
    runtime.block_on(engine.regions().clear());
}

// One test, so that nothing else opens files meanwhile.
#[test]
fn departed_peers_leave_nothing() {
    let tcp = TransportOptions::for_protocol("tcp").unwrap();
    come_and_go("tcp", tcp.clone().without_shared_memory(), None);
    come_and_go("tcp beside shared memory", tcp.clone(), None);
    come_and_go("shared memory", TransportOptions::for_protocol("shm").unwrap(), None);
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    come_and_go("tcp with a metadata service", tcp, Some(directory));
}
