//! Batches of reads and writes on the loopback transport.

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use mooncake_core::ErrorKind;
use mooncake_core::clock::ManualClock;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::meta::{MemoryMetadata, MetadataBackend};
use mooncake_transport::engine::{Batch, Progress, Status};
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::{Directory, Engine, Loopback, LoopbackNet, Region, Transport};

struct World {
    net: LoopbackNet,
    clock: Arc<ManualClock>,
    metadata: Arc<MemoryMetadata>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::new());
        Self { net: LoopbackNet::with_clock(clock.clone()), clock, metadata: Arc::default() }
    }

    fn on<T: Transport>(&self, wire: Arc<T>, name: &str) -> Engine<T> {
        let directory = Directory::new(self.metadata.clone());
        now(Engine::builder(wire).name(name).clock(self.clock.clone()).directory(directory).start()).unwrap()
    }

    fn engine(&self, name: &str) -> Engine<Loopback> {
        self.on(Arc::new(self.net.node()), name)
    }
}

fn now<F: Future>(future: F) -> F::Output {
    future.now_or_never().expect("nothing on the loopback wire waits")
}

fn memory(len: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(len).unwrap())
}

fn bytes_of<T: Transport>(region: &Region<T>) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.slice(0..region.len()).unwrap().copy_to(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn reads_and_writes_to_many_targets_travel_together() {
    let world = World::new();
    let owners: Vec<_> = (0..3).map(|i| world.engine(&format!("owner{i}"))).collect();
    let regions: Vec<_> = owners.iter().map(|o| now(o.register(memory(64))).unwrap()).collect();
    let user = world.engine("user");
    let mut batch = Batch::new();
    let targets: Vec<_> = (0..3).map(|i| now(user.open(&format!("owner{i}"))).unwrap()).collect();
    for (i, fill) in [(2, 3u8), (0, 1), (1, 2)] {
        batch.write(&targets[i], regions[i].addr(), vec![fill; 8]);
    }
    let done = now(user.submit(batch, None));
    assert!(done.results.iter().all(Result::is_ok) && done.notified.is_none());
    let mut batch = Batch::new();
    for i in [1, 2, 0, 1] {
        batch.read(&targets[i], regions[i].addr() + 4, vec![0; 8]);
    }
    batch.write(&targets[0], regions[0].addr() + 64, Bytes::from_static(b"outside"));
    assert_eq!(batch.len(), 5);
    let running = user.submit(batch, None);
    let view = running.view();
    let done = now(running);
    let read: Vec<Vec<u8>> = done.buffers.into_iter().filter_map(|buffer| buffer.try_into().ok()).collect();
    assert_eq!(read, [2u8, 3, 1, 2].map(|fill| vec![fill, fill, fill, fill, 0, 0, 0, 0]));
    assert_eq!(done.results[4].as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(view.request(3), Some(Progress { status: Status::Completed, transferred: 8 }));
    assert_eq!(view.request(4), Some(Progress { status: Status::Failed, transferred: 0 }));
    assert_eq!(
        (view.request(5), view.overall()),
        (None, Progress { status: Status::Failed, transferred: 32 })
    );
    let counted = user.metrics();
    let of = |i: usize| &counted.iter().find(|line| line.peer == format!("owner{i}")).unwrap().counts;
    assert_eq!((of(0).reads, of(0).writes, of(0).bytes_read, of(0).failures), (1, 1, 8, 1));
    assert_eq!((of(1).reads, of(1).bytes_written, of(1).postings()), (2, 8, 3));
    assert!(counted.iter().all(|line| line.wire.as_str() == "loopback"));
    let nothing = user.submit(Batch::new(), None);
    assert_eq!(nothing.view().overall().status, Status::Completed, "nothing to do is done");
}

#[test]
fn each_request_is_seen_while_others_run() {
    let world = World::new();
    let owner = world.engine("owner");
    let region = now(owner.register(memory(64))).unwrap();
    let wire = Arc::new(Faulty::new(Arc::new(world.net.node()), 1, Faults::none()));
    let user = world.on(wire.clone(), "user");
    let target = now(user.open("owner")).unwrap();
    wire.set(Faults::none().with(Fault::Delay, 1000));
    let mut batch = Batch::new();
    for i in 0..3 {
        batch.write(&target, region.addr() + i, vec![7]);
    }
    let running = user.submit(batch, None);
    let view = running.view();
    let seen = || [0, 1, 2].map(|i| view.request(i).unwrap().status);
    assert_eq!(seen(), [Status::Pending; 3]);
    wire.set(Faults::none());
    wire.release(1);
    assert_eq!(seen(), [Status::Completed, Status::Pending, Status::Pending]);
    assert_eq!(view.overall(), Progress { status: Status::Pending, transferred: 1 });
    assert!(!view.is_finished());
    wire.release(2);
    assert!(now(running).results.iter().all(Result::is_ok) && view.is_finished());
}

#[test]
fn giving_a_batch_up_frees_nothing_that_is_in_use() {
    let world = World::new();
    let owner = world.engine("owner");
    let region = now(owner.register(memory(64))).unwrap();
    let wire = Arc::new(Faulty::new(Arc::new(world.net.node()), 1, Faults::none()));
    let user = world.on(wire.clone(), "user");
    let target = now(user.open("owner")).unwrap();
    let source = memory(16);
    let local = user.register_local(source.clone()).unwrap();
    wire.set(Faults::none().with(Fault::Delay, 1000));
    let mut batch = Batch::new();
    batch.write(&target, region.addr(), local.slice(0..16).unwrap());
    let running = user.submit(batch, None);
    let view = running.view();
    drop((running, local));
    assert_eq!(Arc::strong_count(&source), 2, "the wire still needs it");
    assert_eq!(view.overall().status, Status::Pending);
    wire.set(Faults::none());
    wire.release(1);
    assert_eq!(Arc::strong_count(&source), 1);
    assert_eq!(view.overall(), Progress { status: Status::Completed, transferred: 16 });
    // A failed request is not repeated when the batch is not awaited.
    wire.set(Faults::none().with(Fault::Fail, 1000));
    let mut batch = Batch::new();
    batch.write(&target, region.addr(), vec![1]);
    let running = user.submit(batch, None);
    let view = running.view();
    assert_eq!(view.overall().status, Status::Pending, "it may be repeated yet");
    drop(running);
    assert_eq!(view.overall().status, Status::Failed);
}

#[test]
fn many_regions_are_published_at_once_and_all_or_none() {
    let world = World::new();
    let engine = world.engine("a");
    let revision = || now(world.metadata.get("mooncake/ram/a")).unwrap().unwrap().revision;
    let before = revision();
    let parts: Vec<_> = (0..8).map(|_| memory(64)).collect();
    let sources = || parts.iter().map(|part| part.clone() as Arc<dyn MemorySource>).collect::<Vec<_>>();
    let regions = now(engine.register_many(sources())).unwrap();
    assert_eq!(revision() - before, 1, "published once");
    assert_eq!(engine.descriptor().buffers.len(), 8);
    let overlap = now(engine.register_many(sources())).unwrap_err();
    assert_eq!(overlap.engine_code().number(), -7);
    let mut twice = sources();
    twice.push(parts[0].clone());
    now(engine.unregister_many(regions)).unwrap();
    assert!(engine.descriptor().buffers.is_empty());
    let within = now(engine.register_many(twice)).unwrap_err();
    assert_eq!(within.engine_code().number(), -7, "an overlap inside the batch");
    assert!(engine.descriptor().buffers.is_empty(), "all or none");
}

#[tokio::test]
async fn several_takers_share_a_stream_of_notifications() {
    use futures::StreamExt;
    use mooncake_transport::engine::HandshakePort;
    use mooncake_transport::handshake::Notification;
    let world = World::new();
    let start = |name: &str| {
        let builder = Engine::builder(Arc::new(world.net.node())).name(name).directory(Directory::P2p);
        builder
            .handshake(HandshakePort { host: Some("127.0.0.1".into()), ..HandshakePort::default() })
            .start()
    };
    let (a, b) = (start("127.0.0.1").await.unwrap(), start("127.0.0.1").await.unwrap());
    let takers: Vec<_> = (0..2).map(|_| tokio::spawn(b.notifications().collect::<Vec<_>>())).collect();
    assert!(a.probe(b.name(), std::time::Duration::from_secs(5)).await.unwrap());
    let region = b.register(memory(64)).await.unwrap();
    let target = a.open(b.name()).await.unwrap();
    for i in 0..10u8 {
        let mut batch = Batch::new();
        batch.write(&target, region.addr(), vec![i]);
        batch.notify(&target, Notification { name: "n".into(), message: i.to_string() });
        let done = a.submit(batch, None).await;
        done.notified.unwrap().unwrap();
        assert_eq!(bytes_of(&region)[0], i);
    }
    let mut failing = Batch::new();
    failing.write(&target, 8, vec![1]);
    failing.notify(&target, Notification { name: "n".into(), message: "never".into() });
    assert!(a.submit(failing, None).await.notified.unwrap().is_err());
    b.close().await.unwrap();
    let mut got = Vec::new();
    for taker in takers {
        got.extend(taker.await.unwrap().into_iter().map(|n| n.message.parse::<u8>().unwrap()));
    }
    got.sort_unstable();
    assert_eq!(got, (0..10).collect::<Vec<u8>>());
}
