//! Stores of several nodes in this process, over real engines and a catalogue in memory.

mod nodes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use mooncake_core::clock::{ManualClock, Rng};
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::testkit::test_seed;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransferEngine;
use mooncake_p2p::{GetOptions, GetProgress, P2pOptions, P2pStore, Payload, RegisterOptions, Role};
use nodes::silent::Silent;
use nodes::{Cluster, Memory, SHARD, patiently};
use tokio::sync::watch;

const SIZES: [usize; 2] = [5 * SHARD + 100, 2 * SHARD];
const SHARDS: usize = 8;

fn options(max_shard_size: u64) -> RegisterOptions {
    RegisterOptions { max_shard_size, ..RegisterOptions::default() }
}

fn code<T: std::fmt::Debug>(result: Result<T>) -> ErrorCode {
    result.unwrap_err().code()
}

/// Registers an object with random bytes. Returns its memory.
async fn seed(store: &P2pStore, name: &str) -> Memory {
    let memory = Memory::random(&SIZES, test_seed());
    store.register(name, memory.sources(), options(SHARD as u64)).await.unwrap();
    memory
}

async fn read(store: &P2pStore, name: &str) -> Result<Memory> {
    let memory = Memory::zeroed(&SIZES);
    store.get_replica(name, memory.sources(), GetOptions::default()).await?;
    Ok(memory)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_serve_what_they_have_read() {
    let cluster = Cluster::new();
    let (seeder, first, second) = (cluster.node().await, cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    assert_eq!(seeder.list("").await.unwrap()[0].size_list, SIZES.map(|size| size as u64));
    let copy = read(&first, "a").await.unwrap();
    assert!(copy == bytes);
    let payload = cluster.payload("a").await.unwrap();
    assert_eq!(payload.shards.len(), SHARDS);
    for shard in &payload.shards {
        assert_eq!(shard.gold[0].segment_name, seeder.segment_name());
        assert_eq!(shard.replica_list[0].segment_name, first.segment_name());
    }
    seeder.unregister("a").await.unwrap();
    assert!(cluster.payload("a").await.unwrap().shards.iter().all(|shard| shard.gold.is_empty()));
    assert!(read(&second, "a").await.unwrap() == bytes, "the first reader serves the second one");
    first.delete_replica("a").await.unwrap();
    second.delete_replica("a").await.unwrap();
    assert_eq!(cluster.payload("a").await, None, "the last copy takes the object along");
    assert_eq!(cluster.keys("mooncake/p2p/reads/").await, Vec::<String>::new());
    assert_eq!(cluster.keys("mooncake/p2p/checksums/").await, Vec::<String>::new());
    for store in [seeder, first, second] {
        store.close().await.unwrap();
    }
    assert_eq!(cluster.keys("mooncake/").await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_readers_share_the_load() {
    let cluster = Cluster::new();
    let seeder = cluster.node().await;
    let bytes = seed(&seeder, "a").await;
    let readers = join_all((0..8).map(|_| cluster.node())).await;
    for copy in join_all(readers.iter().map(|reader| read(reader, "a"))).await {
        assert!(copy.unwrap() == bytes);
    }
    let from_seeder = |reader: &P2pStore| {
        let metrics = reader.engine().metrics();
        let of_seeder = metrics.iter().filter(|metrics| metrics.peer == seeder.segment_name());
        of_seeder.map(|metrics| metrics.counts.bytes_read).sum::<u64>()
    };
    let served: u64 = readers.iter().map(from_seeder).sum();
    let size: u64 = SIZES.iter().map(|size| *size as u64).sum();
    assert!(served >= size && served < 8 * size, "the seeder served {served} bytes of {size} for 8 readers");
    let payload = cluster.payload("a").await.unwrap();
    assert!(payload.shards.iter().all(|shard| shard.replica_list.len() == 8));
    assert_eq!(cluster.keys("mooncake/p2p/reads/").await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_has_a_bounded_number_of_reads() {
    let cluster = Cluster::new();
    let seeder = cluster.node().await;
    seed(&seeder, "a").await;
    let mut events =
        cluster.backend.watch(&format!("mooncake/p2p/reads/{}/", seeder.segment_name())).await.unwrap();
    let readers = join_all((0..6).map(|_| cluster.node())).await;
    for copy in join_all(readers.iter().map(|reader| read(reader, "a"))).await {
        copy.unwrap();
    }
    cluster
        .backend
        .put(&format!("mooncake/p2p/reads/{}/end", seeder.segment_name()), "".into(), Expect::Any)
        .await
        .unwrap();
    let (mut slots, mut most) = (std::collections::BTreeSet::new(), 0);
    while let Some(event) = patiently("the end of the reads", events.next()).await {
        if event.key.ends_with("/end") {
            break;
        }
        if event.value.is_some() {
            slots.insert(event.key)
        } else {
            slots.remove(&event.key)
        };
        most = most.max(slots.len());
    }
    assert!((1..=4).contains(&most), "{most} reads at once");
}

/// Waits for a state of an object.
async fn wait_for(cluster: &Cluster, name: &str, mut is_reached: impl FnMut(&Payload) -> bool) {
    let mut events = cluster.backend.watch(&format!("mooncake/checkpoint/{name}")).await.unwrap();
    while !cluster.payload(name).await.is_some_and(|payload| is_reached(&payload)) {
        patiently("a change of the object", events.next()).await.unwrap();
    }
}

/// Makes the shards from `from` on unreadable: their only copy is at a node that does not exist.
async fn hide_shards(cluster: &Cluster, name: &str, from: usize) -> Payload {
    let before = cluster.payload(name).await.unwrap();
    let hide = |payload: &mut Payload| {
        for shard in &mut payload.shards[from..] {
            shard.gold[0].segment_name = "127.0.0.1:1".into();
        }
        true
    };
    cluster.catalogue.edit(name, hide).await.unwrap();
    before
}

/// Undoes [`hide_shards`].
async fn show_shards(cluster: &Cluster, name: &str, before: &Payload) {
    let show = |payload: &mut Payload| {
        payload.shards.iter_mut().zip(&before.shards).for_each(|(shard, old)| shard.gold = old.gold.clone());
        true
    };
    cluster.catalogue.edit(name, show).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_are_served_before_the_object_is_complete() {
    let cluster = Cluster::new();
    let (seeder, first, second) = (cluster.node().await, cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    let complete = hide_shards(&cluster, "a", 4).await;
    let names = [first.segment_name().to_owned(), second.segment_name().to_owned()];
    let reads = [first.clone(), second.clone()];
    let reads = reads.map(|store| tokio::spawn(async move { read(&store, "a").await }));
    wait_for(&cluster, "a", |payload| {
        let has_both = |shard: &mooncake_p2p::Shard| {
            names.iter().all(|name| shard.replica_list.iter().any(|copy| copy.segment_name == *name))
        };
        payload.shards[..4].iter().all(has_both)
    })
    .await;
    let payload = cluster.payload("a").await.unwrap();
    assert!(payload.shards[4..].iter().all(|shard| shard.replica_list.is_empty()));
    show_shards(&cluster, "a", &complete).await;
    for ended in join_all(reads).await {
        assert!(ended.unwrap().unwrap() == bytes);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_read_leaves_nothing() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    let complete = hide_shards(&cluster, "a", 4).await;
    let memory = Memory::zeroed(&SIZES);
    let released = memory.released();
    let (store, sources) = (reader.clone(), memory.sources());
    let call = tokio::spawn(async move { store.get_replica("a", sources, GetOptions::default()).await });
    wait_for(&cluster, "a", |payload| payload.shards[..4].iter().all(|s| !s.replica_list.is_empty())).await;
    drop(memory);
    call.abort();
    wait_for(&cluster, "a", |payload| payload.shards.iter().all(|s| s.replica_list.is_empty())).await;
    patiently("the release of the memory", released.notified()).await;
    assert_eq!(cluster.keys("mooncake/p2p/reads/").await, Vec::<String>::new());
    cluster
        .catalogue
        .edit("a", |payload| {
            *payload = complete.clone();
            true
        })
        .await
        .unwrap();
    assert!(read(&reader, "a").await.unwrap() == bytes, "the name is free again");
}

/// A cancelled read waits once for a service that does not respond, and not once for each slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_of_a_cancelled_read_are_freed_together() {
    let cluster = Cluster::new();
    let seeder = cluster.node().await;
    seed(&seeder, "a").await;
    let service = Arc::new(Silent::new(cluster.backend.clone()));
    let limits = P2pOptions { catalogue_timeout: Duration::from_secs(1), ..P2pOptions::default() };
    let reader = P2pStore::open_with(cluster.engine().await, service.clone(), limits).await.unwrap();
    let (arrived, mut shards) = watch::channel(0);
    let on_progress = move |progress: GetProgress| {
        arrived.send_replace(progress.arrived_bytes);
    };
    let options = GetOptions { resume: false, on_progress: Some(Arc::new(on_progress)) };
    let sources = Memory::zeroed(&SIZES).sources();
    let call = tokio::spawn(async move { reader.get_replica("a", sources, options).await });
    // No shard can be entered, so the slots of those that have arrived stay taken.
    let enough = shards.wait_for(|bytes| *bytes >= 3 * SHARD as u64);
    patiently("three shards", enough).await.unwrap();
    call.abort();
    patiently("the end of three slots", service.wait_for_ends(3)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_finish_without_the_seeder() {
    let cluster = Cluster::new();
    let seeder = cluster.isolated_node();
    let bytes = {
        let memory = Memory::random(&SIZES, test_seed());
        let (store, sources) = (seeder.store.clone(), memory.sources());
        seeder.run(async move { store.register("a", sources, options(SHARD as u64)).await }).await.unwrap();
        memory
    };
    let readers = join_all((0..8).map(|_| cluster.node())).await;
    let begin = |store: P2pStore| tokio::spawn(async move { read(&store, "a").await });
    let reads: Vec<_> = readers.iter().cloned().map(begin).collect();
    wait_for(&cluster, "a", |payload| payload.shards.iter().all(|s| !s.replica_list.is_empty())).await;
    seeder.kill();
    for ended in join_all(reads).await {
        assert!(ended.unwrap().unwrap() == bytes);
    }
    assert!(cluster.payload("a").await.unwrap().shards.iter().all(|s| s.replica_list.len() == 8));
}

/// Lets a minute pass, as the leases see it.
async fn pass_a_minute(clock: &ManualClock, stores: &[P2pStore]) {
    for _ in 0..6 {
        clock.advance(Duration::from_secs(10));
        for store in stores {
            store.renew_lease().await.unwrap();
        }
    }
}

/// Lets time pass, a second at a time, until the future is dropped.
async fn pass_time(clock: &ManualClock, stores: &[P2pStore]) {
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    loop {
        ticks.tick().await;
        clock.advance(Duration::from_secs(1));
        for store in stores {
            store.renew_lease().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_readers_disturb_no_other_and_leave_no_entry() {
    let cluster = Cluster::new();
    let seeder = cluster.node().await;
    let bytes = seed(&seeder, "a").await;
    // No reader has the whole object before the nodes are killed.
    let complete = hide_shards(&cluster, "a", 6).await;
    let mut rng = Rng::seeded(test_seed());
    let mut killed = Vec::new();
    for _ in 0..3 {
        let node = cluster.isolated_node();
        let entered = rng.range(1..6);
        let memory = Memory::zeroed(&SIZES);
        let store = node.store.clone();
        node.start(async move { store.get_replica("a", memory.sources(), GetOptions::default()).await });
        killed.push((node, entered));
    }
    let readers = join_all((0..4).map(|_| cluster.node())).await;
    let begin = |store: P2pStore| tokio::spawn(async move { read(&store, "a").await });
    let reads: Vec<_> = readers.iter().cloned().map(begin).collect();
    for (node, entered) in &killed {
        let name = node.store.segment_name();
        wait_for(&cluster, "a", |payload| {
            let own =
                |shard: &&mooncake_p2p::Shard| shard.replica_list.iter().any(|l| l.segment_name == name);
            payload.shards.iter().filter(own).count() as u64 >= *entered
        })
        .await;
    }
    let mut names = Vec::new();
    for (node, _) in killed {
        names.push(node.store.segment_name().to_owned());
        node.kill();
    }
    show_shards(&cluster, "a", &complete).await;
    let mut alive = readers;
    alive.push(seeder);
    // The slots of killed readers are free when their leases have ended.
    let ended = async {
        tokio::select! {
            reads = join_all(reads) => reads,
            () = pass_time(&cluster.clock, &alive) => Vec::new(),
        }
    };
    let ended = patiently("the end of the reads", ended).await;
    assert_eq!(ended.len(), 4);
    for ended in ended {
        assert!(ended.unwrap().unwrap() == bytes);
    }
    pass_a_minute(&cluster.clock, &alive).await;
    let payload = cluster.payload("a").await.unwrap();
    for shard in &payload.shards {
        assert_eq!((shard.gold.len(), shard.replica_list.len()), (1, 4), "copies of live nodes remain");
    }
    for name in names {
        for key in cluster.keys("mooncake/p2p/").await {
            assert!(!key.contains(&name), "{key} remains");
        }
    }
    assert_eq!(cluster.keys("mooncake/p2p/reads/").await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_lease_ended_enters_its_copies_again() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    seed(&seeder, "a").await;
    read(&reader, "a").await.unwrap();
    let copies = async || cluster.payload("a").await.unwrap().shards[0].clone();
    pass_a_minute(&cluster.clock, std::slice::from_ref(&seeder)).await;
    assert_eq!((copies().await.gold.len(), copies().await.replica_list.len()), (1, 0), "the reader was mute");
    reader.renew_lease().await.unwrap();
    assert_eq!((copies().await.gold.len(), copies().await.replica_list.len()), (1, 1));
    pass_a_minute(&cluster.clock, &[seeder, reader]).await;
    assert_eq!((copies().await.gold.len(), copies().await.replica_list.len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_an_earlier_process_end_at_the_start() {
    let cluster = Cluster::new();
    let seeder = cluster.node().await;
    seed(&seeder, "a").await;
    let engine = cluster.engine().await;
    let earlier = mooncake_p2p::Location { segment_name: engine.name().into(), offset: 4096 };
    let enter = |payload: &mut Payload| payload.add(Role::Replica, 0, &earlier);
    cluster.catalogue.edit("a", enter).await.unwrap();
    let (node, read) = (format!("mooncake/p2p/nodes/{}", engine.name()), "mooncake/p2p/reads/x:1/0");
    cluster.backend.put(&node, "{}".into(), Expect::Any).await.unwrap();
    let record = format!(r#"{{"reader":{:?},"name":"a","shard":0}}"#, engine.name());
    cluster.backend.put(read, record.into(), Expect::Any).await.unwrap();
    let store = P2pStore::open_with(engine, cluster.backend.clone(), P2pOptions::default()).await.unwrap();
    assert!(cluster.payload("a").await.unwrap().shards[0].replica_list.is_empty());
    assert!(cluster.backend.get(read).await.unwrap().is_none());
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_bytes_are_refused_and_read_elsewhere() {
    let cluster = Cluster::new();
    let (seeder, first) = (cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    let expected = bytes.copy();
    assert!(read(&first, "a").await.unwrap() == expected);
    // The memory of the seeder changes under its readers.
    bytes.corrupt(0, 3 * SHARD + 7);
    bytes.corrupt(1, 5);
    for _ in 0..4 {
        let reader = cluster.node().await;
        assert!(read(&reader, "a").await.unwrap() == expected, "no wrong byte");
        reader.delete_replica("a").await.unwrap();
    }
    first.delete_replica("a").await.unwrap();
    let error = read(&cluster.node().await, "a").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{error}");
    let payload = cluster.payload("a").await.unwrap();
    assert!(
        payload.shards.iter().all(|shard| shard.replica_list.is_empty()),
        "a failed read leaves no entry"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_of_the_go_library_are_read_without_checksums() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    for key in cluster.keys("mooncake/p2p/").await {
        if !key.ends_with(reader.segment_name()) {
            cluster.backend.delete(&key).await.unwrap();
        }
    }
    assert!(read(&reader, "a").await.unwrap() == bytes);
    pass_a_minute(&cluster.clock, std::slice::from_ref(&reader)).await;
    let payload = cluster.payload("a").await.unwrap();
    assert!(
        payload.shards.iter().all(|s| (s.gold.len(), s.replica_list.len()) == (1, 1)),
        "no lease, no end"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_resumes_with_the_bytes_that_are_there() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    let memory = bytes.copy();
    memory.corrupt(1, SHARD + 1);
    let first = Arc::new(AtomicU64::new(u64::MAX));
    let seen = first.clone();
    let on_progress = move |progress: mooncake_p2p::GetProgress| {
        seen.fetch_min(progress.arrived_bytes, Ordering::SeqCst);
    };
    let options = GetOptions { resume: true, on_progress: Some(Arc::new(on_progress)) };
    reader.get_replica("a", memory.sources(), options).await.unwrap();
    assert!(memory == bytes);
    let size: usize = SIZES.iter().sum();
    assert_eq!(first.load(Ordering::SeqCst), (size - SHARD) as u64, "one shard was missing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_object_is_read_again() {
    let cluster = Cluster::new();
    let (old, new, reader) = (cluster.node().await, cluster.node().await, cluster.node().await);
    seed(&old, "a").await;
    hide_shards(&cluster, "a", 4).await;
    let call = tokio::spawn(async move { read(&reader, "a").await });
    wait_for(&cluster, "a", |payload| payload.shards[..4].iter().all(|s| !s.replica_list.is_empty())).await;
    let bytes = Memory::random(&SIZES, test_seed() + 1);
    let force = RegisterOptions { force_create: true, ..options(SHARD as u64) };
    new.register("a", bytes.sources(), force).await.unwrap();
    assert!(call.await.unwrap().unwrap() == bytes, "no byte of the old object");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seeder_that_leaves_ends_only_its_own_copies() {
    let cluster = Cluster::new();
    let seeder = cluster.node().await;
    seed(&seeder, "a").await;
    let other = mooncake_p2p::Location { segment_name: "10.0.0.9:12345".into(), offset: 1 };
    let enter = |payload: &mut Payload| payload.add(Role::Gold, 2, &other);
    cluster.catalogue.edit("a", enter).await.unwrap();
    seeder.unregister("a").await.unwrap();
    let payload = cluster.payload("a").await.unwrap();
    let golds: Vec<usize> = payload.shards.iter().map(|shard| shard.gold.len()).collect();
    assert_eq!(golds, [0, 0, 1, 0, 0, 0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_may_share_memory() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    let memory = Memory::random(&[4 * SHARD], test_seed());
    seeder.register("whole", memory.sources(), options(SHARD as u64)).await.unwrap();
    let part = |from: usize, to: usize| vec![memory.part(0, from..to)];
    seeder.register("part", part(SHARD, 3 * SHARD), options(SHARD as u64)).await.unwrap();
    seeder.unregister("whole").await.unwrap();
    let copy = Memory::zeroed(&[2 * SHARD]);
    reader.get_replica("part", copy.sources(), GetOptions::default()).await.unwrap();
    assert_eq!(copy.bytes(0), memory.bytes(0)[SHARD..3 * SHARD]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_calls_are_refused() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    let bytes = seed(&seeder, "a").await;
    let one = || Memory::zeroed(&[SHARD]);
    let register = async |store: &P2pStore, name: &str, memory: &Memory, max| {
        store.register(name, memory.sources(), options(max)).await
    };
    assert_eq!(code(register(&seeder, "a", &one(), 4096).await), ErrorCode::ObjectAlreadyExists);
    assert_eq!(code(register(&reader, "a", &one(), 4096).await), ErrorCode::ObjectAlreadyExists);
    assert_eq!(code(register(&reader, "b", &one(), 3).await), ErrorCode::InvalidParams);
    assert_eq!(code(reader.register("b", Vec::new(), options(4096)).await), ErrorCode::InvalidParams);
    let across = vec![bytes.part(0, 0..SHARD), bytes.part(0, SHARD / 2..2 * SHARD)];
    let error: Error = reader.register("b", across, options(4096)).await.unwrap_err();
    assert_eq!(error.engine_code().number(), -7, "{error}");
    assert_eq!(code(read(&reader, "b").await.map(drop)), ErrorCode::ObjectNotFound);
    assert_eq!(code(read(&seeder, "a").await.map(drop)), ErrorCode::ObjectAlreadyExists);
    let short = one();
    let refused = reader.get_replica("a", short.sources(), GetOptions::default()).await;
    assert_eq!(code(refused), ErrorCode::InvalidParams);
    for result in
        [reader.unregister("a").await, reader.delete_replica("a").await, seeder.delete_replica("a").await]
    {
        assert_eq!(code(result), ErrorCode::ReplicaNotFound);
    }
    assert!(read(&reader, "a").await.unwrap() == bytes, "refused calls leave the name free");
    assert_eq!(code(reader.unregister("a").await), ErrorCode::ReplicaNotFound);
    let engine = TransferEngine::builder().name("127.0.0.1").start().await.unwrap();
    let without_catalogue = P2pStore::open(engine.clone(), P2pOptions::default()).await;
    assert_eq!(code(without_catalogue.map(drop)), ErrorCode::InvalidParams);
    let zero = P2pOptions { lease: Duration::ZERO, ..P2pOptions::default() };
    let refused = P2pStore::open_with(engine, cluster.backend.clone(), zero).await;
    assert!(refused.unwrap_err().message().contains("lease"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_store_cancels_its_reads() {
    let cluster = Cluster::new();
    let (seeder, reader) = (cluster.node().await, cluster.node().await);
    seed(&seeder, "a").await;
    hide_shards(&cluster, "a", 4).await;
    let store = reader.clone();
    let call = tokio::spawn(async move { read(&store, "a").await });
    wait_for(&cluster, "a", |payload| payload.shards[..4].iter().all(|s| !s.replica_list.is_empty())).await;
    reader.close().await.unwrap();
    assert_eq!(code(call.await.unwrap()), ErrorCode::UnavailableInCurrentStatus);
    assert!(cluster.payload("a").await.unwrap().shards.iter().all(|s| s.replica_list.is_empty()));
    for key in cluster.keys("mooncake/p2p/").await {
        assert!(!key.contains(reader.segment_name()), "{key} remains");
    }
    assert_eq!(code(read(&reader, "a").await), ErrorCode::UnavailableInCurrentStatus);
}
