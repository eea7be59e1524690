//! Wires that fail, delay and lose answers; members that die. On a clock that moves only when told to.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{ManualClock, SharedClock};
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::client::{Client, MasterHandle, PutOutcome};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::{Loopback, LoopbackNet};

use crate::support::{eventually, value};

type Wire = Faulty<Loopback>;

struct World {
    clock: Arc<ManualClock>,
    net: LoopbackNet,
    master: Arc<Master>,
}

impl World {
    fn new(options: MasterOptions) -> Self {
        let clock = Arc::new(ManualClock::new());
        let shared: SharedClock = clock.clone();
        let master =
            Master::with_parts(options, &Default::default(), &Default::default(), shared.clone(), 7).unwrap();
        Self { clock, net: LoopbackNet::with_clock(shared), master: Arc::new(master) }
    }

    async fn member(&self, segment: u64) -> (Client<Wire>, Arc<Wire>) {
        let wire = Arc::new(Faulty::new(Arc::new(self.net.node()), 1, Faults::none()));
        let client = Client::builder()
            .master(MasterHandle::embedded(self.master.clone()))
            .segment(segment)
            .local_buffer(1 << 20)
            .transport(wire.clone())
            .connect()
            .await
            .unwrap();
        (client, wire)
    }

    async fn held(&self, wire: &Wire, n: usize) {
        eventually("the transfer is under way", async || wire.held() == n).await;
    }
}

fn always(fault: Fault) -> Faults {
    Faults::none().with(fault, 1000)
}

fn short_leases() -> MasterOptions {
    MasterOptions { lease_ttl: Duration::from_secs(1), ..MasterOptions::default() }
}

#[tokio::test]
async fn bytes_that_come_after_the_lease_do_not_count() {
    let world = World::new(short_leases());
    let (a, _) = world.member(1 << 20).await;
    let (b, wire) = world.member(0).await;
    a.batch_put(&[("k", value(1, 1000)), ("l", value(2, 1000))], &ReplicateConfig::default()).await.unwrap();
    wire.set(always(Fault::Delay));

    // Both tries are too slow.
    let get = tokio::spawn({
        let b = b.clone();
        async move { b.get("k").await }
    });
    for _ in 0..2 {
        world.held(&wire, 1).await;
        world.clock.advance(Duration::from_secs(1));
        wire.release(1);
    }
    assert_eq!(get.await.unwrap().unwrap_err().code(), ErrorCode::LeaseExpired);

    // A batch, of which only one is asked for again.
    let batch = tokio::spawn({
        let b = b.clone();
        async move { b.batch_get(&["k", "l"]).await }
    });
    world.held(&wire, 2).await;
    world.clock.advance(Duration::from_secs(1));
    wire.set(Faults::none());
    wire.release(2);
    let got: Vec<_> = batch.await.unwrap().unwrap().into_iter().map(|got| got.unwrap().unwrap()).collect();
    assert_eq!(got, [value(1, 1000), value(2, 1000)]);

    // Into the caller's memory, which comes back.
    wire.set(always(Fault::Delay));
    let into = b.alloc_registered(1000).unwrap().exclusive().unwrap();
    let get = tokio::spawn({
        let b = b.clone();
        async move { b.get_into("k", into).await }
    });
    for _ in 0..2 {
        world.held(&wire, 1).await;
        world.clock.advance(Duration::from_secs(1));
        wire.release(1);
    }
    let (size, into) = get.await.unwrap();
    assert_eq!((size.unwrap_err().code(), into.len()), (ErrorCode::LeaseExpired, 1000));
}

#[tokio::test]
async fn another_replica_stands_in_for_one_that_cannot_be_read() {
    let world = World::new(MasterOptions::default());
    let (_a, wire) = world.member(1 << 20).await;
    let (_b, _) = world.member(1 << 20).await;
    let (c, _) = world.member(0).await;
    let items: Vec<_> = (0..8).map(|i| (format!("key {i}"), value(i, 5000))).collect();
    c.batch_put(&items, &ReplicateConfig::replicas(2)).await.unwrap();
    wire.inner().kill();
    for (key, expected) in &items {
        assert_eq!(c.get(key).await.unwrap().unwrap(), expected);
    }
    for (got, (_, expected)) in c
        .batch_get(&items.iter().map(|(key, _)| key).collect::<Vec<_>>())
        .await
        .unwrap()
        .into_iter()
        .zip(&items)
    {
        assert_eq!(got.unwrap().unwrap(), expected);
    }
}

#[tokio::test]
async fn a_dead_member_costs_objects_and_nothing_else() {
    let world = World::new(MasterOptions::default());
    let (_a, wire) = world.member(1 << 20).await;
    let (b, _) = world.member(1 << 20).await;
    let (c, _) = world.member(0).await;
    let items: Vec<_> = (0..16).map(|i| (format!("key {i}"), value(i, 5000))).collect();
    c.batch_put(&items, &ReplicateConfig::default()).await.unwrap();
    wire.inner().kill();
    // The master does not know yet. What lay there is a miss..
    let mut misses = 0;
    for (key, expected) in &items {
        match b.get(key).await.unwrap() {
            Some(got) => assert_eq!(got, expected),
            None => misses += 1,
        }
    }
    assert!(misses > 0 && misses < items.len());
    // ..and what would go there goes elsewhere.
    for i in 0..16 {
        let (key, bytes) = (format!("new {i}"), value(100 + i, 5000));
        assert_eq!(b.put(&key, &bytes).await.unwrap(), PutOutcome::Stored);
        assert_eq!(c.get(&key).await.unwrap().unwrap(), bytes);
    }
    let again: Vec<_> = (0..16).map(|i| (format!("batch {i}"), value(200 + i, 500))).collect();
    for outcome in b.batch_put(&again, &ReplicateConfig::replicas(2)).await.unwrap() {
        assert_eq!(outcome.unwrap(), PutOutcome::Stored);
    }
}

#[tokio::test]
async fn a_write_that_failed_leaves_nothing_behind() {
    let world = World::new(MasterOptions::default());
    let (_a, _) = world.member(1 << 20).await;
    let (b, wire) = world.member(0).await;
    for fault in [Fault::Fail, Fault::Drop, Fault::Cut] {
        wire.set(always(fault));
        let error = b.put("k", value(1, 5000)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{fault:?}");
        let stats = world.master.stats();
        assert_eq!((stats.keys, stats.writing, stats.used()), (0, 0, stats.resting()), "{fault:?}");
        assert_eq!(b.get("k").await.unwrap(), None);
        // The member is left alone for a moment, then tried again.
        world.clock.advance(Duration::from_secs(2));
        wire.set(Faults::none());
        assert_eq!(b.put("k", value(1, 5000)).await.unwrap(), PutOutcome::Stored);
        assert!(b.remove("k", true).await.unwrap());
    }
}

#[tokio::test]
async fn a_write_that_may_still_land_keeps_its_space() {
    let world = World::new(MasterOptions::default());
    let (_a, _) = world.member(1 << 20).await;
    let (b, wire) = world.member(0).await;
    wire.set(always(Fault::LoseAnswer));
    assert_eq!(b.put("k", value(1, 5000)).await.unwrap_err().kind(), ErrorKind::Timeout);
    wire.set(Faults::none());
    world.clock.advance(Duration::from_secs(2));
    // Not given back: the key is not free, nor is the space.
    assert_eq!(world.master.stats().writing, 1);
    assert_eq!(b.put("k", value(2, 5000)).await.unwrap(), PutOutcome::Existed);
    assert_eq!(b.get("k").await.unwrap(), None);
    // In time the master takes it back.
    world.clock.advance(Duration::from_secs(30));
    b.is_healthy().await;
    assert_eq!(b.put("k", value(3, 5000)).await.unwrap_or(PutOutcome::Existed), PutOutcome::Stored);
    assert_eq!(b.get("k").await.unwrap().unwrap(), value(3, 5000));
}

#[tokio::test]
async fn a_put_that_is_dropped_is_taken_back_once_it_has_landed() {
    let world = World::new(MasterOptions::default());
    let (a, _) = world.member(1 << 20).await;
    let (b, wire) = world.member(0).await;
    wire.set(always(Fault::Delay));
    let put = tokio::spawn({
        let b = b.clone();
        async move { b.put("k", value(1, 5000)).await }
    });
    world.held(&wire, 1).await;
    put.abort();
    assert!(put.await.unwrap_err().is_cancelled());
    wire.set(Faults::none());
    // While it is under way the space stays granted.
    assert_eq!(a.put("k", value(2, 100)).await.unwrap(), PutOutcome::Existed);
    assert_eq!(wire.release(1), 1);
    eventually("the space is given back", async || world.master.stats().writing == 0).await;
    assert_eq!(a.put("k", value(2, 100)).await.unwrap(), PutOutcome::Stored);
    assert_eq!(b.get("k").await.unwrap().unwrap(), value(2, 100));
    assert_eq!(b.local_buffer_used(), 0);
}
