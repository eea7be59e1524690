//! Segments that leave while a put is under way. The put is repeated in other segments with the
//! same bytes, for every kind of write.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use mooncake_core::ids::SegmentId;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::client::{
    AsPayload, Client, ClientConfig, MasterHandle, Payload, PutOptions, PutOutcome, RangeWrite, Reservation,
};
use mooncake_store::master::{Master, MasterOptions, MissCause};
use mooncake_store::protocol::master_client::MasterConnection;
use mooncake_store::protocol::message::{
    BatchPutEnd, CheckSpace, EndWrites, FetchTimedInventory, PutEnd, Request, UpsertEnd,
};
use mooncake_store::protocol::server::Service;
use mooncake_store::protocol::service::MasterService;
use mooncake_transport::testkit::{Fault, Faults};
use mooncake_transport::{Slice, Transport};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

use crate::cluster::{eventually, value};
use crate::faults::{Wire, World, always, at};

const LEN: usize = 5000;

/// Bytes that a put takes, in memory of each kind.
enum Memory<T: Transport> {
    Shared(Bytes),
    Copied(Bytes),
    Slice(Slice<T>),
    Pieces(Vec<Slice<T>>),
}

impl<T: Transport> AsPayload<T> for Memory<T> {
    fn as_payload(&self) -> Payload<'_, T> {
        match self {
            Self::Shared(bytes) => Payload::Shared(bytes),
            Self::Copied(bytes) => Payload::Bytes(bytes),
            Self::Slice(slice) => Payload::Slice(slice),
            Self::Pieces(pieces) => Payload::Pieces(pieces),
        }
    }
}

/// Returns the bytes in memory of each kind, with the number of transfers that write them.
fn every_memory(client: &Client<Wire>, bytes: &Bytes) -> [(&'static str, Memory<Wire>, usize); 4] {
    let slice = |bytes: &[u8]| {
        let mut memory = client.memory().alloc(bytes.len()).unwrap().exclusive().unwrap();
        memory.copy_from(0, bytes).unwrap();
        memory.into_shared()
    };
    [
        ("shared", Memory::Shared(bytes.clone()), 1),
        ("copied", Memory::Copied(bytes.clone()), 1),
        ("slice", Memory::Slice(slice(bytes)), 1),
        ("pieces", Memory::Pieces(bytes.chunks(2000).map(slice).collect()), 3),
    ]
}

/// Ways in which a segment leaves.
#[derive(Clone, Copy, Debug)]
enum Departure {
    /// The master no longer has the segment, and its memory is still there.
    Retired,
    /// The owner has unmounted the segment.
    Unmounted,
    /// The owner has closed.
    Closed,
}

const DEPARTURES: [Departure; 3] = [Departure::Retired, Departure::Unmounted, Departure::Closed];

/// Owner whose segment leaves, owner whose segment stays, and writer without a segment.
struct Stage {
    world: World,
    leaver: Client<Wire>,
    stayer: Client<Wire>,
    writer: Client<Wire>,
    wire: Arc<Wire>,
}

impl Stage {
    async fn new() -> Self {
        let world = World::new(MasterOptions::default());
        let (leaver, _) = world.connect(1 << 20).await;
        let (stayer, _) = world.connect(1 << 20).await;
        let (writer, wire) = world.connect(0).await;
        wire.set(always(Fault::Delay));
        Self { world, leaver, stayer, writer, wire }
    }

    fn segment(&self) -> SegmentId {
        self.leaver.segments().ids()[0]
    }

    async fn leave(&self, how: Departure) {
        match how {
            Departure::Retired => self.world.master.unmount(self.leaver.id(), self.segment()).unwrap(),
            Departure::Unmounted => self.leaver.segments().unmount(self.segment()).await.unwrap(),
            Departure::Closed => self.leaver.close().await.unwrap(),
        }
    }

    /// Lets every transfer pass from now on.
    fn pass(&self) {
        self.wire.set(Faults::none());
        self.wire.release(usize::MAX);
    }

    /// Returns the endpoints of the segments with replicas of a key.
    async fn places(&self, key: &str) -> Vec<String> {
        let list = self.stayer.replicas().list(key).await.unwrap().unwrap();
        list.replicas.iter().map(|replica| replica.location.memory().unwrap().endpoint.clone()).collect()
    }

    async fn assert_stored(&self, key: &str, bytes: &Bytes) {
        assert_eq!(self.stayer.get(key).await.unwrap().as_ref(), Some(bytes), "{key}");
        let stats = self.world.master.stats();
        let stayer = stats.segments.into_iter().find(|segment| segment.client == self.stayer.id());
        let stayer = stayer.unwrap().segment.endpoint;
        assert_eq!(self.places(key).await, [stayer], "{key}");
        self.assert_nothing_is_left();
    }

    fn assert_nothing_is_left(&self) {
        assert_eq!(self.world.master.stats().writing, 0);
        assert_eq!(self.writer.status().local_buffer_used(), 0);
        assert_eq!(self.wire.held(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_is_repeated_when_its_segment_leaves() {
    for how in DEPARTURES {
        for kind in 0..4 {
            let stage = Stage::new().await;
            let bytes = value(kind as u64, LEN);
            let [(name, memory, transfers), ..] = {
                let mut all = every_memory(&stage.writer, &bytes);
                all.rotate_left(kind);
                all
            };
            let put = tokio::spawn({
                let (writer, options) = (stage.writer.clone(), at(&stage.leaver));
                async move { (writer.put_with("k", &memory, &options).await, memory) }
            });
            stage.world.held(&stage.wire, transfers).await;
            stage.leave(how).await;
            stage.pass();
            let (outcome, _memory) = put.await.unwrap();
            assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{how:?} {name}");
            stage.assert_stored("k", &bytes).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upsert_is_repeated_when_its_segment_leaves() {
    for how in DEPARTURES {
        let stage = Stage::new().await;
        let first = PutOptions::new().prefer_segment(stage.stayer.hostname());
        stage.stayer.put_with("k", value(1, LEN), &first).await.unwrap();
        let upsert = tokio::spawn({
            let (writer, options) = (stage.writer.clone(), at(&stage.leaver).upsert());
            async move { writer.put_with("k", value(2, LEN), &options).await }
        });
        stage.world.held(&stage.wire, 1).await;
        stage.leave(how).await;
        stage.pass();
        assert_eq!(upsert.await.unwrap().unwrap(), PutOutcome::Stored, "{how:?}");
        stage.assert_stored("k", &value(2, LEN)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_a_batch_is_repeated_when_a_segment_leaves() {
    for (how, upsert) in [(DEPARTURES[0], false), (DEPARTURES[0], true), (DEPARTURES[1], false)] {
        let stage = Stage::new().await;
        let items: Vec<(String, Bytes)> = (0..16).map(|i| (format!("k{i}"), value(i, LEN))).collect();
        let put = tokio::spawn({
            let (writer, items) = (stage.writer.clone(), items.clone());
            let options = if upsert { PutOptions::new().upsert() } else { PutOptions::new() };
            async move { writer.batch_put(&items, &options).await }
        });
        stage.world.held(&stage.wire, 16).await;
        stage.leave(how).await;
        stage.pass();
        for outcome in put.await.unwrap().unwrap() {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{how:?}");
        }
        for (key, bytes) in &items {
            stage.assert_stored(key, bytes).await;
        }
    }
}

/// A put with two replicas is stored with the one that is left, as with a master that has space for
/// one only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_of_two_replicas_survives_the_departure_of_one() {
    for how in DEPARTURES {
        let stage = Stage::new().await;
        let put = tokio::spawn({
            let writer = stage.writer.clone();
            async move { writer.put_with("k", value(1, LEN), &PutOptions::new().replicas(2)).await }
        });
        stage.world.held(&stage.wire, 2).await;
        stage.leave(how).await;
        stage.pass();
        assert_eq!(put.await.unwrap().unwrap(), PutOutcome::Stored, "{how:?}");
        stage.assert_stored("k", &value(1, LEN)).await;
    }
}

/// More segments leave one after the other than a put has attempts at clients that fail again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_follows_many_departures() {
    for how in [Departure::Retired, Departure::Unmounted] {
        let mut stage = Stage::new().await;
        let mut leavers = vec![stage.leaver.clone()];
        for _ in 0..6 {
            leavers.push(stage.world.connect(1 << 20).await.0);
        }
        let names: Vec<String> = leavers.iter().map(|leaver| leaver.hostname().to_owned()).collect();
        let put = tokio::spawn({
            let writer = stage.writer.clone();
            let options = names.iter().fold(PutOptions::new(), |options, name| options.prefer_segment(name));
            async move { writer.put_with("k", value(1, LEN), &options).await }
        });
        for leaver in leavers {
            stage.world.held(&stage.wire, 1).await;
            stage.leaver = leaver;
            stage.leave(how).await;
            stage.wire.release(1);
        }
        stage.world.held(&stage.wire, 1).await;
        stage.pass();
        assert_eq!(put.await.unwrap().unwrap(), PutOutcome::Stored, "{how:?}");
        stage.assert_stored("k", &value(1, LEN)).await;
    }
}

/// A stored value that leaves with its only segment is a miss whose cause the master names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_after_the_departure_of_the_only_segment_names_the_cause() {
    for how in DEPARTURES {
        let stage = Stage::new().await;
        stage.pass();
        let (key, options) = (format!("{how:?}"), at(&stage.leaver));
        let outcome = stage.writer.put_with(&key, value(1, LEN), &options).await;
        assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{how:?}");
        stage.leave(how).await;
        assert_eq!(stage.writer.get(&key).await.unwrap(), None, "{how:?}");
        // The entry of the object stays for a while after its last replica.
        let cause = stage.world.master.why_missing(key.as_bytes());
        assert!(matches!(cause, Some(MissCause::OwnerLost | MissCause::Unreadable)), "{how:?}: {cause:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_whose_only_segment_leaves_uses_the_next_one() {
    let stage = Stage::new().await;
    stage.stayer.segments().unmount(stage.stayer.segments().ids()[0]).await.unwrap();
    let put = tokio::spawn({
        let writer = stage.writer.clone();
        async move { writer.put("k", value(1, LEN)).await }
    });
    stage.world.held(&stage.wire, 1).await;
    stage.leave(Departure::Retired).await;
    stage.stayer.segments().mount(1 << 20).await.unwrap();
    stage.pass();
    assert_eq!(put.await.unwrap().unwrap(), PutOutcome::Stored);
    stage.assert_stored("k", &value(1, LEN)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_put_that_is_dropped_leaves_nothing() {
    for how in DEPARTURES {
        let stage = Stage::new().await;
        let put = tokio::spawn({
            let (writer, options) = (stage.writer.clone(), at(&stage.leaver));
            async move { writer.put_with("k", &value(1, LEN)[..], &options).await }
        });
        stage.world.held(&stage.wire, 1).await;
        stage.leave(how).await;
        stage.wire.release(1);
        stage.world.held(&stage.wire, 1).await;
        put.abort();
        assert!(put.await.unwrap_err().is_cancelled());
        stage.pass();
        eventually("the space is returned", async || stage.world.master.stats().writing == 0).await;
        eventually("the buffer is free", async || stage.writer.status().local_buffer_used() == 0).await;
        assert_eq!(stage.stayer.get("k").await.unwrap(), None);
        assert_eq!(stage.world.master.stats().keys, 0);
    }
}

/// Another client has taken the key while the first write had no segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_put_does_not_replace_the_value_of_another_client() {
    for how in DEPARTURES {
        for (upsert, expected) in [(false, 2), (true, 1)] {
            let stage = Stage::new().await;
            let put = tokio::spawn({
                let (writer, mut options) = (stage.writer.clone(), at(&stage.leaver));
                if upsert {
                    options = options.upsert();
                }
                async move { writer.put_with("k", value(1, LEN), &options).await }
            });
            stage.world.held(&stage.wire, 1).await;
            stage.leave(how).await;
            assert_eq!(stage.stayer.put("k", value(2, LEN)).await.unwrap(), PutOutcome::Stored);
            stage.pass();
            let outcome = if upsert { PutOutcome::Stored } else { PutOutcome::Existed };
            assert_eq!(put.await.unwrap().unwrap(), outcome, "{how:?}");
            stage.assert_stored("k", &value(expected, LEN)).await;
        }
    }
}

/// The owner of the preferred segment lives and refuses the address, and the master does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_to_memory_that_was_moved_is_repeated_elsewhere() {
    for round in 0..8 {
        let stage = Stage::new().await;
        stage.pass();
        let segment = stage.world.master.stats().segments.into_iter();
        let mut moved = segment.map(|one| one.segment).find(|one| one.id == stage.segment()).unwrap();
        stage.leave(Departure::Retired).await;
        (moved.id, moved.base) = (SegmentId(mooncake_core::ids::Uuid::new(1, round + 1)), 1 << 40);
        stage.world.master.mount(stage.leaver.id(), &moved).unwrap();
        let put = stage.writer.put_with("k", value(1, LEN), &at(&stage.leaver)).await;
        assert_eq!(put.unwrap(), PutOutcome::Stored);
        stage.assert_stored("k", &value(1, LEN)).await;
    }
}

/// Reserves space in the segment that leaves.
async fn reserve(stage: &Stage, replicas: u64) -> Reservation {
    let preferred_segments = vec![stage.leaver.hostname().to_owned()];
    let config = ReplicateConfig { replicas, preferred_segments, ..ReplicateConfig::default() };
    stage.writer.ranges().reserve(&[("k", LEN as u64)], &config).await.unwrap().remove(0).unwrap()
}

/// Returns writes of both halves of the object.
fn halves<'a>(client: &Client<Wire>, object: &'a Reservation, seed: u64) -> Vec<RangeWrite<'a, Wire>> {
    let bytes = value(seed, LEN);
    let write = |(i, bytes): (usize, &[u8])| {
        let mut from = client.memory().alloc(bytes.len()).unwrap().exclusive().unwrap();
        from.copy_from(0, bytes).unwrap();
        RangeWrite { object, offset: (i * LEN / 2) as u64, from: from.into_shared() }
    };
    bytes.chunks(LEN / 2).enumerate().map(write).collect()
}

async fn write(client: &Client<Wire>, writes: Vec<RangeWrite<'_, Wire>>) -> Vec<Result<(), ErrorCode>> {
    let outcomes = client.ranges().write(writes).await.into_iter();
    outcomes.map(|outcome| outcome.map_err(|error| error.code())).collect()
}

async fn commit(client: &Client<Wire>, object: &Reservation) -> Result<(), ErrorCode> {
    client.ranges().commit(&[object]).await.unwrap().remove(0).map_err(|error| error.code())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_continues_elsewhere_when_its_segment_leaves() {
    for how in [Departure::Unmounted, Departure::Closed] {
        for (during, replicas) in [(false, 1), (true, 1), (true, 2)] {
            let stage = Stage::new().await;
            let object = reserve(&stage, replicas).await;
            if !during {
                stage.leave(how).await;
                stage.pass();
            }
            let writes = halves(&stage.writer, &object, 1);
            let departure = async {
                if during {
                    stage.world.held(&stage.wire, 2 * replicas as usize).await;
                    stage.leave(how).await;
                    stage.pass();
                }
            };
            let (written, ()) = tokio::join!(write(&stage.writer, writes), departure);
            assert_eq!(written, [Ok(()), Ok(())], "{how:?} {during} {replicas}");
            assert_eq!(commit(&stage.writer, &object).await, Ok(()));
            stage.assert_stored("k", &value(1, LEN)).await;
        }
    }
}

/// Bytes of earlier calls are no longer the caller's, so that a session that loses them ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_loses_bytes_says_so() {
    for how in DEPARTURES {
        let stage = Stage::new().await;
        stage.pass();
        let object = reserve(&stage, 1).await;
        let [first, second] = halves(&stage.writer, &object, 1).try_into().unwrap();
        assert_eq!(write(&stage.writer, vec![first]).await, [Ok(())]);
        stage.leave(how).await;
        let written = write(&stage.writer, vec![second]).await.remove(0);
        assert_eq!(written.is_ok(), matches!(how, Departure::Retired), "{how:?}: {written:?}");
        let ended = commit(&stage.writer, &object).await;
        assert_eq!(ended, Err(ErrorCode::UnavailableInCurrentStatus), "{how:?}");
        stage.writer.ranges().give_back(&[&object]).await;
        assert_eq!(stage.stayer.get("k").await.unwrap(), None);
        stage.assert_nothing_is_left();
        // The key can be put again.
        assert_eq!(stage.writer.put("k", value(2, LEN)).await.unwrap(), PutOutcome::Stored);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_write_of_a_session_that_moves_leaves_nothing() {
    for given_back in [false, true] {
        let stage = Stage::new().await;
        let object = Arc::new(reserve(&stage, 1).await);
        let writing = tokio::spawn({
            let (writer, object) = (stage.writer.clone(), object.clone());
            async move { write(&writer, halves(&writer, &object, 1)).await }
        });
        stage.world.held(&stage.wire, 2).await;
        stage.leave(Departure::Unmounted).await;
        stage.wire.release(2);
        stage.world.held(&stage.wire, 2).await;
        writing.abort();
        assert!(writing.await.unwrap_err().is_cancelled());
        if given_back {
            assert!(!stage.writer.ranges().give_back(&[&object]).await, "bytes are under way");
            stage.pass();
        } else {
            stage.pass();
            eventually("nothing is under way", async || stage.writer.ranges().give_back(&[&object]).await)
                .await;
        }
        eventually("the space is returned", async || stage.world.master.stats().writing == 0).await;
        assert_eq!(stage.world.master.stats().keys, 0);
    }
}

/// Action between the transfers of a put and its end at the master.
type BeforeEnd = Box<dyn FnOnce(&mut Arc<Master>) + Send>;

/// Connection to a master that something happens to before or after the first end of a put.
#[derive(Default)]
struct Interrupted {
    master: Mutex<Option<Arc<Master>>>,
    before_end: Mutex<Option<BeforeEnd>>,
    /// Action after the first end, whose response is lost.
    after_lost_end: Mutex<Option<BeforeEnd>>,
    /// Action before the next request for an inventory.
    before_inventory: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Number of requests whether a wait for space may help.
    outlooks: AtomicUsize,
}

impl fmt::Debug for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupted")
    }
}

impl Interrupted {
    fn new() -> Arc<Self> {
        let front = Self::default();
        *front.master.lock() = Some(Arc::new(Master::new(MasterOptions::default()).unwrap()));
        Arc::new(front)
    }

    fn master(&self) -> Arc<Master> {
        self.master.lock().clone().unwrap()
    }

    fn replace_master(&self) {
        *self.master.lock() = Some(Arc::new(Master::new(MasterOptions::default()).unwrap()));
    }

    async fn connect(self: &Arc<Self>, segment: u64) -> Client {
        self.connect_with(segment, ClientConfig::default().ping_interval).await
    }

    async fn connect_with(self: &Arc<Self>, segment: u64, ping_interval: Duration) -> Client {
        let limit = Duration::from_secs(25);
        let config = ClientConfig {
            segment,
            ping_interval,
            timeout: limit,
            space_timeout: limit,
            copy_in_process: false,
            ..ClientConfig::default()
        };
        let builder = Client::builder().config(config).master(MasterHandle::custom(self.clone()));
        builder.connect().await.unwrap()
    }
}

#[async_trait]
impl MasterConnection for Interrupted {
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>> {
        let is_end = [PutEnd::FUNCTION, UpsertEnd::FUNCTION, BatchPutEnd::FUNCTION, EndWrites::FUNCTION]
            .contains(&function);
        if is_end && let Some(action) = self.before_end.lock().take() {
            action(self.master.lock().as_mut().unwrap());
        }
        if function == FetchTimedInventory::FUNCTION
            && let Some(action) = self.before_inventory.lock().take()
        {
            action();
        }
        if function == CheckSpace::FUNCTION {
            self.outlooks.fetch_add(1, SeqCst);
        }
        let mut out = Vec::new();
        MasterService(self.master()).call(function, body, &mut out).unwrap();
        if is_end && let Some(action) = self.after_lost_end.lock().take() {
            action(self.master.lock().as_mut().unwrap());
            return Err(ErrorCode::RpcFail.into());
        }
        Ok(out)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_is_repeated_at_a_new_master() {
    let front = Interrupted::new();
    let client = front.connect(1 << 20).await;
    *front.before_end.lock() =
        Some(Box::new(|master| *master = Arc::new(Master::new(MasterOptions::default()).unwrap())));
    assert_eq!(client.put("k", value(1, LEN)).await.unwrap(), PutOutcome::Stored);
    assert_eq!(client.get("k").await.unwrap(), Some(value(1, LEN)));
    assert_eq!(front.master().stats().writing, 0);
}

/// A put whose end may have been applied is not repeated, because a repetition would bring back a
/// value that was removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_with_a_lost_end_does_not_bring_back_a_removed_value() {
    let front = Interrupted::new();
    let client = front.connect(1 << 20).await;
    *front.after_lost_end.lock() = Some(Box::new(|master| master.remove(b"k", true).unwrap()));
    let error: Error = client.put("k", value(1, LEN)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnavailableInCurrentStatus, "{error}");
    assert_eq!(client.get("k").await.unwrap(), None);
    assert_eq!(front.master().stats().keys, 0);
}

/// Returns a runtime in which a blocking task runs only when no other one does.
fn with_one_blocking_thread() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).max_blocking_threads(1).enable_all().build().unwrap()
}

/// Occupies the blocking thread until the returned sender is dropped.
fn occupy() -> (mpsc::Sender<()>, impl FnOnce() + Send + 'static) {
    let (free, occupied) = mpsc::channel();
    let occupy = move || drop(tokio::task::spawn_blocking(move || occupied.recv()));
    (free, occupy)
}

/// The segment of the writer is in no list while it moves to other addresses.
#[test]
fn a_put_waits_for_a_segment_that_is_being_mounted_again() {
    with_one_blocking_thread().block_on(async {
        let front = Interrupted::new();
        let client = front.connect(1 << 20).await;
        let (free, occupy) = occupy();
        *front.before_end.lock() = Some(Box::new(|master| {
            *master = Arc::new(Master::new(MasterOptions::default()).unwrap());
            occupy();
        }));
        let put = tokio::spawn({
            let client = client.clone();
            async move { client.put("k", value(1, LEN)).await }
        });
        eventually("the segment moves", async || client.segments().ids().is_empty()).await;
        let before = front.outlooks.load(SeqCst);
        let waits = async || front.outlooks.load(SeqCst) > before + 1 || put.is_finished();
        eventually("the put asks again", waits).await;
        drop(free);
        assert_eq!(put.await.unwrap().unwrap(), PutOutcome::Stored);
        assert_eq!(client.get("k").await.unwrap(), Some(value(1, LEN)));
    });
}

/// A mount at a new master moves earlier segments first, and none of them is lost.
#[test]
fn a_dropped_mount_at_a_new_master_loses_no_segment() {
    with_one_blocking_thread().block_on(async {
        let front = Interrupted::new();
        // No heartbeat comes between.
        let client = front.connect_with(1 << 20, Duration::from_secs(600)).await;
        let segment = client.segments().ids()[0];
        front.replace_master();
        let (free, occupy) = occupy();
        *front.before_inventory.lock() = Some(Box::new(occupy));
        let mount = tokio::spawn({
            let client = client.clone();
            async move { client.segments().mount(1 << 20).await }
        });
        eventually("the segment moves", async || client.segments().ids().is_empty()).await;
        mount.abort();
        assert!(mount.await.unwrap_err().is_cancelled());
        drop(free);
        let second = client.segments().mount(1 << 20).await.unwrap();
        assert_eq!(client.segments().ids(), [segment, second]);
        let listed = front.master().stats().segments;
        assert_eq!(listed.len(), 2, "{listed:?}");
    });
}
