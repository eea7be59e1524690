//! Transports that fail, delay and lose responses, and clients that die, under a manual clock.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{ManualClock, SharedClock};
use mooncake_core::meta::MemoryMetadata;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::client::{
    Client, ClientBuilder, Located, MasterHandle, PutOptions, PutOutcome, RangeRead,
};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::wire::TaskStatus;
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::{Directory, Loopback, LoopbackNet};

use crate::cluster::{eventually, slices, value};

pub(crate) type Wire = Faulty<Loopback>;

pub(crate) struct World {
    pub(crate) clock: Arc<ManualClock>,
    net: LoopbackNet,
    directory: Arc<MemoryMetadata>,
    pub(crate) master: Arc<Master>,
}

impl World {
    pub(crate) fn new(options: MasterOptions) -> Self {
        let clock = Arc::new(ManualClock::new());
        let shared: SharedClock = clock.clone();
        let master =
            Master::with_parts(options, &Default::default(), &Default::default(), shared.clone(), 7).unwrap();
        let net = LoopbackNet::with_clock(shared);
        Self { clock, net, directory: Arc::default(), master: Arc::new(master) }
    }

    pub(crate) async fn connect(&self, segment: u64) -> (Client<Wire>, Arc<Wire>) {
        self.named("127.0.0.1", segment).await
    }

    /// Connects a client with this name.
    pub(crate) async fn named(&self, name: &str, segment: u64) -> (Client<Wire>, Arc<Wire>) {
        self.with_buffer(name, segment, 1 << 20).await
    }

    /// Connects a client with a local buffer of this length.
    pub(crate) async fn buffered(&self, segment: u64, buffer: u64) -> (Client<Wire>, Arc<Wire>) {
        self.with_buffer("127.0.0.1", segment, buffer).await
    }

    async fn with_buffer(&self, name: &str, segment: u64, buffer: u64) -> (Client<Wire>, Arc<Wire>) {
        let builder = Client::builder().master(MasterHandle::embedded(self.master.clone()));
        self.over(builder, name, segment, buffer).await
    }

    /// Connects a client through this connection to the master. Such clients find each other.
    pub(crate) async fn through(&self, master: MasterHandle, segment: u64) -> (Client<Wire>, Arc<Wire>) {
        let directory = Directory::new(self.directory.clone());
        let builder = Client::builder().master(master).directory(directory).clock(self.clock.clone());
        self.over(builder, "127.0.0.1", segment, 1 << 20).await
    }

    /// Connects a client with further settings.
    pub(crate) async fn over(
        &self,
        builder: ClientBuilder,
        name: &str,
        segment: u64,
        buffer: u64,
    ) -> (Client<Wire>, Arc<Wire>) {
        let wire = Arc::new(Faulty::new(Arc::new(self.net.node()), 1, Faults::none()));
        let client = builder
            .local_hostname(name)
            .segment(segment)
            .local_buffer(buffer)
            .transport(wire.clone())
            .connect()
            .await
            .unwrap();
        (client, wire)
    }

    pub(crate) async fn held(&self, wire: &Wire, n: usize) {
        eventually("the transfer is under way", async || wire.held() == n).await;
    }
}

/// Reads parts of located objects in one call, given the offset and the length of each.
async fn parts(
    client: &Client<Wire>,
    wanted: &[(&Located, usize, usize)],
) -> Vec<Result<Vec<u8>, ErrorCode>> {
    let read = |&(object, offset, len): &(&Located, usize, usize)| RangeRead {
        object: object.clone(),
        offset: offset as u64,
        into: client.memory().alloc(len).unwrap().exclusive().unwrap(),
    };
    let read = client.ranges().read(wanted.iter().map(read).collect()).await.into_iter();
    let bytes = |into: mooncake_transport::SliceMut<Wire>| {
        let mut bytes = vec![0; into.len()];
        into.copy_to(0, &mut bytes).unwrap();
        bytes
    };
    read.map(|read| read.result.map(|()| bytes(read.into)).map_err(|error| error.code())).collect()
}

pub(crate) async fn locate<const N: usize>(client: &Client<Wire>, keys: [&str; N]) -> [Located; N] {
    let mut located = client.ranges().locate(&keys).await.unwrap().into_iter();
    keys.map(|_| located.next().unwrap().unwrap().unwrap())
}

pub(crate) fn at(client: &Client<Wire>) -> PutOptions {
    PutOptions::new().prefer_segment(client.hostname())
}

pub(crate) fn always(fault: Fault) -> Faults {
    Faults::none().with(fault, 1000)
}

fn short_leases() -> MasterOptions {
    MasterOptions { lease_ttl: Duration::from_secs(1), ..MasterOptions::default() }
}

#[tokio::test]
async fn bytes_that_come_after_the_lease_do_not_count() {
    let world = World::new(short_leases());
    let (a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    a.batch_put(&slices(&[("k", value(1, 1000)), ("l", value(2, 1000))]), &PutOptions::default())
        .await
        .unwrap();
    wire.set(always(Fault::Delay));

    // Both attempts are too slow.
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

    // One object of the batch is requested again.
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

    // The read goes into memory of the caller, and returns it.
    wire.set(always(Fault::Delay));
    let into = b.memory().alloc(1000).unwrap().exclusive().unwrap();
    let get = tokio::spawn({
        let b = b.clone();
        async move { b.get_into("k", into).await }
    });
    for _ in 0..2 {
        world.held(&wire, 1).await;
        world.clock.advance(Duration::from_secs(1));
        wire.release(1);
    }
    let read = get.await.unwrap();
    assert_eq!((read.result.unwrap_err().code(), read.into.len()), (ErrorCode::LeaseExpired, 1000));
}

#[tokio::test]
async fn another_replica_stands_in_for_one_that_cannot_be_read() {
    let world = World::new(MasterOptions::default());
    let (_a, wire) = world.connect(1 << 20).await;
    let (_b, _) = world.connect(1 << 20).await;
    let (c, _) = world.connect(0).await;
    let items: Vec<_> = (0..8).map(|i| (format!("key {i}"), value(i, 5000))).collect();
    c.batch_put(&slices(&items), &PutOptions::new().replicas(2)).await.unwrap();
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
async fn a_killed_client_costs_its_objects_and_nothing_else() {
    let world = World::new(MasterOptions::default());
    let (_a, wire) = world.connect(1 << 20).await;
    let (b, _) = world.connect(1 << 20).await;
    let (c, _) = world.connect(0).await;
    let items: Vec<_> = (0..16).map(|i| (format!("key {i}"), value(i, 5000))).collect();
    c.batch_put(&slices(&items), &PutOptions::default()).await.unwrap();
    wire.inner().kill();
    // The master does not know of the death yet. Objects in that segment are misses.
    let mut misses = 0;
    for (key, expected) in &items {
        match b.get(key).await.unwrap() {
            Some(got) => assert_eq!(got, expected),
            None => misses += 1,
        }
    }
    assert!(misses > 0 && misses < items.len());
    // New objects for that segment go to another one.
    for i in 0..16 {
        let (key, bytes) = (format!("new {i}"), value(100 + i, 5000));
        assert_eq!(b.put(&key, &bytes[..]).await.unwrap(), PutOutcome::Stored);
        assert_eq!(c.get(&key).await.unwrap().unwrap(), bytes);
    }
    let again: Vec<_> = (0..16).map(|i| (format!("batch {i}"), value(200 + i, 500))).collect();
    for outcome in b.batch_put(&slices(&again), &PutOptions::new().replicas(2)).await.unwrap() {
        assert_eq!(outcome.unwrap(), PutOutcome::Stored);
    }
}

#[tokio::test]
async fn a_write_that_failed_leaves_nothing_behind() {
    let world = World::new(MasterOptions::default());
    let (_a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    for fault in [Fault::Fail, Fault::Drop, Fault::Cut] {
        wire.set(always(fault));
        let error = b.put("k", &value(1, 5000)[..]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{fault:?}");
        let stats = world.master.stats();
        assert_eq!((stats.keys, stats.writing, stats.used()), (0, 0, stats.resting()), "{fault:?}");
        assert_eq!(b.get("k").await.unwrap(), None);
        // The client avoids the unreachable owner for a moment, and then tries again.
        world.clock.advance(Duration::from_secs(2));
        wire.set(Faults::none());
        assert_eq!(b.put("k", &value(1, 5000)[..]).await.unwrap(), PutOutcome::Stored);
        assert!(b.remove("k", true).await.unwrap());
    }
}

#[tokio::test]
async fn a_write_that_may_still_land_keeps_its_space() {
    let world = World::new(MasterOptions::default());
    let (_a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    wire.set(always(Fault::LoseResponse));
    assert_eq!(b.put("k", &value(1, 5000)[..]).await.unwrap_err().kind(), ErrorKind::Timeout);
    wire.set(Faults::none());
    world.clock.advance(Duration::from_secs(2));
    // The space is not revoked: neither the key nor the space is free.
    assert_eq!(world.master.stats().writing, 1);
    assert_eq!(b.put("k", &value(2, 5000)[..]).await.unwrap(), PutOutcome::Existed);
    assert_eq!(b.get("k").await.unwrap(), None);
    // The master reclaims the space in time.
    world.clock.advance(Duration::from_secs(30));
    b.status().is_healthy().await;
    assert_eq!(b.put("k", &value(3, 5000)[..]).await.unwrap_or(PutOutcome::Existed), PutOutcome::Stored);
    assert_eq!(b.get("k").await.unwrap().unwrap(), value(3, 5000));
}

#[tokio::test]
async fn a_put_that_is_dropped_is_taken_back_once_it_has_landed() {
    let world = World::new(MasterOptions::default());
    let (a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    wire.set(always(Fault::Delay));
    let put = tokio::spawn({
        let b = b.clone();
        async move { b.put("k", &value(1, 5000)[..]).await }
    });
    world.held(&wire, 1).await;
    put.abort();
    assert!(put.await.unwrap_err().is_cancelled());
    wire.set(Faults::none());
    // The space stays allocated while the write is in progress.
    assert_eq!(a.put("k", &value(2, 100)[..]).await.unwrap(), PutOutcome::Existed);
    assert_eq!(wire.release(1), 1);
    eventually("the space is given back", async || world.master.stats().writing == 0).await;
    assert_eq!(a.put("k", &value(2, 100)[..]).await.unwrap(), PutOutcome::Stored);
    assert_eq!(b.get("k").await.unwrap().unwrap(), value(2, 100));
    assert_eq!(b.status().local_buffer_used(), 0);
}

/// Objects of an owner that died are read from the current owner: ranges of one object, of several,
/// and of one that was read in part before.
#[tokio::test]
async fn ranges_are_read_where_the_object_has_gone_meanwhile() {
    let world = World::new(MasterOptions::default());
    let (a, wire) = world.connect(1 << 20).await;
    let (b, _) = world.connect(1 << 20).await;
    let (c, _) = world.connect(0).await;
    let keys = ["one", "two", "three", "session"];
    for (i, key) in keys.into_iter().enumerate() {
        a.put_with(key, &value(i as u64, 5000)[..], &at(&a)).await.unwrap();
    }
    let [one, two, three, session] = locate(&c, keys).await;
    assert_eq!(parts(&c, &[(&session, 0, 3000)]).await, [Ok(value(3, 5000)[..3000].to_vec())]);
    for key in keys {
        let task = c.replicas().copy(key, &[b.hostname()]).await.unwrap();
        let status = async || c.replicas().task(task).await.unwrap().status == TaskStatus::Success;
        eventually("it is copied", status).await;
    }
    wire.inner().kill();
    // One object is read in two ranges; then several objects, one of which was already read in
    // part.
    let whole = value(0, 5000);
    let expected = [Ok(whole[..100].to_vec()), Ok(whole[100..].to_vec())];
    assert_eq!(parts(&c, &[(&one, 0, 100), (&one, 100, 4900)]).await, expected);
    let expected =
        [(1, 0..5000), (2, 7..4007), (3, 3000..5000)].map(|(seed, of)| Ok(value(seed, 5000)[of].to_vec()));
    assert_eq!(parts(&c, &[(&two, 0, 5000), (&three, 7, 4000), (&session, 3000, 2000)]).await, expected);
    // The client keeps the result of the lookup: not every part asks the master.
    let asked = world.master.stats().reads;
    assert_eq!(parts(&c, &[(&session, 0, 5000)]).await, [Ok(value(3, 5000).to_vec())]);
    assert_eq!(world.master.stats().reads, asked);
}

/// A read never combines parts of two values.
#[tokio::test]
async fn a_value_that_has_replaced_another_is_read_whole_or_not_at_all() {
    let world = World::new(MasterOptions::default());
    let (a, wire) = world.connect(1 << 20).await;
    let (b, _) = world.connect(1 << 20).await;
    let (c, _) = world.connect(0).await;
    for key in ["k", "longer", "gone"] {
        a.put_with(key, &value(1, 5000)[..], &at(&a)).await.unwrap();
    }
    let [begun, unread, longer, gone] = locate(&c, ["k", "k", "longer", "gone"]).await;
    assert_eq!(parts(&c, &[(&begun, 0, 2500)]).await, [Ok(value(1, 5000)[..2500].to_vec())]);
    wire.inner().kill();
    for (key, len) in [("k", 5000), ("longer", 6000)] {
        b.remove(key, true).await.unwrap();
        b.put_with(key, &value(2, len)[..], &at(&b)).await.unwrap();
    }
    b.remove("gone", true).await.unwrap();
    let read = parts(
        &c,
        &[(&begun, 2500, 2500), (&unread, 0, 2500), (&unread, 2500, 2500), (&longer, 0, 5000), (&gone, 0, 1)],
    )
    .await;
    let new = value(2, 5000);
    let lost = Err(ErrorCode::TransferFail);
    assert_eq!(read[..3], [lost.clone(), Ok(new[..2500].to_vec()), Ok(new[2500..].to_vec())]);
    assert_eq!(read[3..], [lost, Err(ErrorCode::ObjectNotFound)]);
}

#[tokio::test]
async fn the_lease_of_ranges_that_are_under_way_is_renewed() {
    let world = World::new(short_leases());
    let (a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    a.put("k", &value(1, 5000)[..]).await.unwrap();
    let slow = async |then: &dyn Fn()| {
        let [object] = locate(&b, ["k"]).await;
        let asked = world.master.stats().reads;
        wire.set(always(Fault::Delay));
        let read = tokio::spawn({
            let b = b.clone();
            async move { parts(&b, &[(&object, 0, 5000)]).await.remove(0) }
        });
        world.held(&wire, 1).await;
        world.clock.advance(Duration::from_millis(600));
        then();
        eventually("it is asked for", async || world.master.stats().reads > asked).await;
        // The caller gets the response before the next request may continue.
        tokio::task::yield_now().await;
        world.clock.advance(Duration::from_millis(600));
        wire.set(Faults::none());
        wire.release(1);
        read.await.unwrap()
    };
    assert_eq!(slow(&|| {}).await, Ok(value(1, 5000).to_vec()));
    // The object is gone: its lease is not renewed, and transfers in progress do not count.
    let remove = || world.master.remove(b"k", true).unwrap();
    assert_eq!(slow(&remove).await, Err(ErrorCode::ObjectNotFound));
}

/// Objects that were located too long ago are refused without a transfer.
#[tokio::test]
async fn ranges_of_what_was_located_before_the_lease_ended_are_refused() {
    let world = World::new(short_leases());
    let (a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    a.put("k", &value(1, 5000)[..]).await.unwrap();
    let [object] = locate(&b, ["k"]).await;
    world.clock.advance(Duration::from_secs(1));
    wire.set(always(Fault::Fail));
    assert_eq!(parts(&b, &[(&object, 0, 5000)]).await, [Err(ErrorCode::LeaseExpired)]);
}
