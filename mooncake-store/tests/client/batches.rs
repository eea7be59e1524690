//! Batches that take longer than one lease, and calls that wait for their turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use mooncake_core::clock::ManualClock;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, ErrorCode};
use mooncake_store::client::{
    Client, Located, MasterHandle, PutOptions, PutOutcome, RangeOutcome, RangeRead,
};
use mooncake_store::master::{DiskOptions, Master, MasterOptions};
use mooncake_store::protocol::master_client::MasterConnection;
use mooncake_store::protocol::message::{LendObjects, LendParts, LocateAgain, LocateForRead, Request};
use mooncake_store::protocol::pack::{self, Answer};
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::{Lent, LentParts, OffloadItem, StoredAt};
use mooncake_transport::SliceMut;
use mooncake_transport::testkit::{Fault, Faults};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::cluster::{eventually, value};
use crate::common::fake_disk::FakeDisk;
use crate::faults::{Wire, World, always, at, locate};
use crate::identity::{LEN, NAME, first, memory};

const LEASE: Duration = Duration::from_secs(1);

/// Returns options with short leases. The clock moves in large steps, in which no client expires.
fn short_leases() -> MasterOptions {
    MasterOptions { lease_ttl: LEASE, client_ttl: Duration::from_secs(3600), ..MasterOptions::default() }
}

type Reading = JoinHandle<Vec<Result<Option<Vec<u8>>, ErrorCode>>>;

/// Lets the other tasks of this thread run until they wait.
async fn let_others_run() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// Returns memory of these lengths.
fn pieces(client: &Client<Wire>, lens: &[usize]) -> Vec<SliceMut<Wire>> {
    let all = client.memory().alloc(lens.iter().sum()).unwrap().exclusive().unwrap();
    let (mut rest, mut pieces) = (Some(all), Vec::new());
    for len in lens {
        match rest.take().unwrap().split_at(*len) {
            Ok((piece, more)) => {
                pieces.push(piece);
                rest = Some(more);
            }
            Err(last) => pieces.push(last),
        }
    }
    pieces
}

/// Reads into memory of the caller.
async fn read_into(client: Client<Wire>, keys: Vec<String>) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
    let memory = pieces(&client, &vec![5000; keys.len()]);
    let batch = client.batch_get_into(keys.into_iter().zip(memory).collect()).await;
    let bytes = |read: mooncake_store::client::ReadInto<Wire>| {
        let len = read.result.map_err(|error| error.code())?;
        Ok(len.map(|len| {
            let mut bytes = vec![0; len];
            read.into.copy_to(0, &mut bytes).unwrap();
            bytes
        }))
    };
    batch.reads.into_iter().map(bytes).collect()
}

async fn read_anywhere(client: Client<Wire>, keys: Vec<String>) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
    let read = client.batch_get(&keys).await.unwrap().into_iter();
    read.map(|got| got.map(|got| got.map(Into::into)).map_err(|error| error.code())).collect()
}

/// The transfers take three leases. An object that is removed meanwhile is a miss, and costs the
/// others nothing.
#[tokio::test]
async fn a_batch_that_takes_longer_than_a_lease_renews_it() {
    for lent in [false, true] {
        let world = World::new(short_leases());
        let (a, _) = world.connect(1 << 20).await;
        let (b, wire) = world.connect(0).await;
        let keys: Vec<String> = (0..4).map(|i| format!("k{i}")).collect();
        for (seed, key) in keys.iter().enumerate() {
            a.put(key, value(seed as u64, 5000)).await.unwrap();
        }
        wire.set(always(Fault::Delay));
        let reading = if lent {
            tokio::spawn(read_into(b.clone(), keys.clone()))
        } else {
            tokio::spawn(read_anywhere(b.clone(), keys.clone()))
        };
        world.held(&wire, 4).await;
        for step in 0..5 {
            let asked = world.master.stats().reads;
            world.clock.advance(LEASE * 6 / 10);
            if step == 2 {
                world.master.remove(b"k3", true).unwrap();
            }
            eventually("later leases are requested", async || world.master.stats().reads > asked).await;
            let_others_run().await;
        }
        assert_eq!(wire.held(), 4, "nothing is read twice");
        wire.set(Faults::none());
        wire.release(4);
        let read = reading.await.unwrap();
        for (seed, got) in read[..3].iter().enumerate() {
            assert_eq!(*got, Ok(Some(value(seed as u64, 5000).to_vec())), "{lent}");
        }
        assert_eq!(read[3], Ok(None), "{lent}");
    }
}

/// No lease can be renewed in time: the clock jumps. Each lease is enough for one owner.
#[tokio::test]
async fn a_batch_reads_what_it_can_and_repeats_the_rest() {
    for lent in [false, true] {
        let world = World::new(short_leases());
        let keys: Vec<String> = (0..4).map(|i| format!("k{i}")).collect();
        let (b, wire) = world.connect(0).await;
        let mut owners = Vec::new();
        for (seed, key) in keys.iter().enumerate() {
            let (owner, _) = world.connect(1 << 20).await;
            b.put_with(key, value(seed as u64, 5000), &at(&owner)).await.unwrap();
            owners.push(owner);
        }
        wire.set(always(Fault::Delay));
        let reading = if lent {
            tokio::spawn(read_into(b.clone(), keys.clone()))
        } else {
            tokio::spawn(read_anywhere(b.clone(), keys.clone()))
        };
        for left in [4, 3, 2, 1] {
            world.held(&wire, left).await;
            wire.release(1);
            let_others_run().await;
            world.clock.advance(LEASE);
            wire.release(left - 1);
        }
        let read = reading.await.unwrap();
        for (seed, got) in read.into_iter().enumerate() {
            assert_eq!(got, Ok(Some(value(seed as u64, 5000).to_vec())), "{lent}");
        }
    }
}

/// Without any progress, a batch ends after a second lease.
#[tokio::test]
async fn a_batch_without_progress_ends() {
    let world = World::new(short_leases());
    let (a, _) = world.connect(1 << 20).await;
    let (b, wire) = world.connect(0).await;
    a.put("k", value(1, 5000)).await.unwrap();
    wire.set(always(Fault::Delay));
    let reading = tokio::spawn(read_anywhere(b, vec!["k".into()]));
    for _ in 0..2 {
        world.held(&wire, 1).await;
        world.clock.advance(LEASE);
        wire.release(1);
    }
    assert_eq!(reading.await.unwrap(), [Err(ErrorCode::LeaseExpired)]);
}

async fn read_current(client: &Client<Wire>, object: &Located) -> Result<Vec<u8>, ErrorCode> {
    let len = usize::try_from(object.size()).unwrap();
    let into = client.memory().alloc(len).unwrap().exclusive().unwrap();
    let read = RangeRead { object: object.clone(), offset: 0, into };
    let RangeOutcome { result, into } = client.ranges().read_current(vec![read]).await.remove(0);
    let mut bytes = vec![0; len];
    into.copy_to(0, &mut bytes).unwrap();
    result.map(|()| bytes).map_err(|error| error.code())
}

/// The time between the location of objects and their read can be longer than a lease.
#[tokio::test]
async fn objects_whose_lease_ended_before_the_read_are_located_again() {
    let world = World::new(short_leases());
    let (a, _) = world.connect(1 << 20).await;
    let (b, _) = world.connect(0).await;
    let pass = || world.clock.advance(LEASE * 2);
    let upsert = || at(&a).upsert();
    for key in ["same", "replaced", "longer", "removed"] {
        a.put(key, value(1, 5000)).await.unwrap();
    }
    let objects = locate(&b, ["same", "replaced", "longer", "removed"]).await;
    pass();
    a.put_with("replaced", value(2, 5000), &upsert()).await.unwrap();
    a.put_with("longer", value(2, 6000), &upsert()).await.unwrap();
    a.remove("removed", true).await.unwrap();
    let [same, replaced, longer, removed] = objects;
    assert_eq!(read_current(&b, &same).await, Ok(value(1, 5000).to_vec()));
    assert_eq!(read_current(&b, &replaced).await, Ok(value(2, 5000).to_vec()));
    assert_eq!(read_current(&b, &longer).await, Err(ErrorCode::LeaseExpired));
    assert_eq!(read_current(&b, &removed).await, Err(ErrorCode::ObjectNotFound));
    // Bytes have been read, and the others have to be of the same value.
    pass();
    assert_eq!(read_current(&b, &same).await, Ok(value(1, 5000).to_vec()));
    pass();
    a.put_with("same", value(2, 5000), &upsert()).await.unwrap();
    assert_eq!(read_current(&b, &same).await, Err(ErrorCode::LeaseExpired));
}

/// Reads whole objects as ranges of objects that the same call has located.
async fn read_located(client: Client<Wire>, keys: Vec<String>) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
    let located = client.ranges().locate(&keys).await.unwrap();
    let objects: Vec<Located> = located.into_iter().map(|found| found.unwrap().unwrap()).collect();
    let lens: Vec<usize> = objects.iter().map(|object| usize::try_from(object.size()).unwrap()).collect();
    let read = |(object, into)| RangeRead { object, offset: 0, into };
    let reads = objects.into_iter().zip(pieces(&client, &lens)).map(read).collect();
    let read = client.ranges().read_current(reads).await;
    let bytes = |RangeOutcome { result, into }: RangeOutcome<Wire>| {
        let mut bytes = vec![0; into.len()];
        into.copy_to(0, &mut bytes).unwrap();
        result.map(|()| Some(bytes)).map_err(|error| error.code())
    };
    read.into_iter().map(bytes).collect()
}

/// Starts a read in one of three forms.
fn begin(client: &Client<Wire>, form: usize, keys: &[String]) -> Reading {
    let (client, keys) = (client.clone(), keys.to_vec());
    match form {
        0 => tokio::spawn(read_into(client, keys)),
        1 => tokio::spawn(read_anywhere(client, keys)),
        _ => tokio::spawn(read_located(client, keys)),
    }
}

/// Maximum number of objects of a part of a batch.
const PART: usize = 16 << 10;

/// The transfers of both parts together take longer than one operation may.
#[tokio::test]
async fn each_part_of_a_large_batch_has_the_time_of_an_operation() {
    // The clock jumps further than a client may be silent.
    let long = Duration::from_secs(600);
    let options = MasterOptions { lease_ttl: long, client_ttl: long, ..MasterOptions::default() };
    let world = World::new(options);
    let (a, _) = world.connect(16 << 20).await;
    let keys: Vec<String> = (0..PART + 2).map(|i| format!("k{i}")).collect();
    let items: Vec<(&String, Bytes)> =
        keys.iter().enumerate().map(|(seed, key)| (key, value(seed as u64, 16))).collect();
    for stored in a.batch_put(&items, &PutOptions::new()).await.unwrap() {
        assert_eq!(stored.unwrap(), PutOutcome::Stored);
    }
    for form in [0, 2] {
        let (b, wire) = world.connect(0).await;
        wire.set(always(Fault::Delay));
        let reading = begin(&b, form, &keys);
        for part in [PART, 2] {
            world.held(&wire, part).await;
            world.clock.advance(b.config().timeout * 3 / 4);
            wire.release(part);
        }
        for ((key, expected), got) in items.iter().zip(reading.await.unwrap()) {
            assert_eq!(got, Ok(Some(expected.to_vec())), "{form} {key}");
        }
    }
}

const SHORT_LEASE: Duration = Duration::from_millis(200);

/// Master whose look-ups take some time for each object.
#[derive(Debug)]
struct SlowMaster {
    master: Arc<Master>,
    clock: Arc<ManualClock>,
    time_of_object: Mutex<Duration>,
    longest: AtomicUsize,
}

impl SlowMaster {
    /// Starts a master, and an owner of objects with these keys.
    async fn with(keys: &[String]) -> (World, Arc<Self>, Client<Wire>) {
        // All look-ups together take less time than an operation may.
        let world = World::new(MasterOptions { lease_ttl: SHORT_LEASE, ..MasterOptions::default() });
        let (master, clock) = (world.master.clone(), world.clock.clone());
        let (time_of_object, longest) = (Mutex::default(), AtomicUsize::new(0));
        let slow = Arc::new(Self { master, clock, time_of_object, longest });
        let (a, _) = world.through(MasterHandle::custom(slow.clone()), 1 << 20).await;
        for (seed, key) in keys.iter().enumerate() {
            a.put(key, value(seed as u64, 5000)).await.unwrap();
        }
        (world, slow, a)
    }
}

#[async_trait]
impl MasterConnection for SlowMaster {
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        MasterService(self.master.clone()).call(function, body, &mut out).unwrap();
        let objects = match function {
            LocateForRead::FUNCTION => pack::decode::<LocateForRead<'_>>(body).unwrap().keys.len(),
            LocateAgain::FUNCTION => pack::decode::<LocateAgain<'_>>(body).unwrap().keys.len(),
            _ => 0,
        };
        self.longest.fetch_max(objects, SeqCst);
        self.clock.advance(*self.time_of_object.lock() * u32::try_from(objects).unwrap());
        Ok(out)
    }
}

/// A look-up of all objects takes three leases, and one of a few objects less than one.
#[tokio::test]
async fn a_look_up_that_takes_longer_than_a_lease_is_made_in_parts() {
    let keys: Vec<String> = (0..12).map(|i| format!("k{i}")).collect();
    let (world, slow, _a) = SlowMaster::with(&keys).await;
    for form in 0..3 {
        let (b, _) = world.through(MasterHandle::custom(slow.clone()), 0).await;
        *slow.time_of_object.lock() = SHORT_LEASE / 4;
        let read = begin(&b, form, &keys).await.unwrap();
        for (seed, got) in read.into_iter().enumerate() {
            assert_eq!(got, Ok(Some(value(seed as u64, 5000).to_vec())), "{form}");
        }
        assert_eq!(slow.longest.swap(0, SeqCst), keys.len());
    }
}

/// No look-up is as fast as a lease. The batch ends.
#[tokio::test]
async fn a_look_up_of_one_object_that_takes_longer_than_a_lease_ends_the_batch() {
    let keys: Vec<String> = (0..5).map(|i| format!("k{i}")).collect();
    let (world, slow, _a) = SlowMaster::with(&keys).await;
    for form in 0..3 {
        let (b, _) = world.through(MasterHandle::custom(slow.clone()), 0).await;
        *slow.time_of_object.lock() = SHORT_LEASE;
        let read = begin(&b, form, &keys).await.unwrap();
        assert!(read.iter().all(|got| *got == Err(ErrorCode::LeaseExpired)), "{form}: {read:?}");
    }
}

/// Many more puts than the local buffer has space for wait for it, and all of them are stored.
#[tokio::test]
async fn puts_wait_for_the_local_buffer_however_many_there_are() {
    const PUTS: usize = 1500;
    let world = World::new(MasterOptions::default());
    let (_a, _) = world.connect(8 << 20).await;
    let (b, wire) = world.buffered(0, 4096).await;
    wire.set(always(Fault::Delay));
    let bytes = value(1, 1024);
    let put = |i: usize| {
        let (b, bytes) = (b.clone(), bytes.clone());
        tokio::spawn(async move { b.put(format!("k{i}"), &bytes[..]).await })
    };
    let puts: Vec<_> = (0..PUTS).map(put).collect();
    eventually("every put has space", async || world.master.stats().writing == PUTS as u64).await;
    let_others_run().await;
    // The next put takes over from one that is dropped.
    puts[PUTS / 2].abort();
    wire.set(Faults::none());
    wire.release(usize::MAX);
    for (i, put) in puts.into_iter().enumerate() {
        match put.await {
            Ok(stored) => assert!(stored.is_ok(), "{i}: {stored:?}"),
            Err(cancelled) => assert!(i == PUTS / 2 && cancelled.is_cancelled()),
        }
    }
    eventually("the buffer is free", async || b.status().local_buffer_used() == 0).await;
}

const OWNER: ClientId = ClientId(Uuid { first: 7, second: 7 });

/// Owner of a disk that has no free buffer for the first requests.
struct BusyDisk {
    disk: FakeDisk,
    refusals: AtomicUsize,
    refused: AtomicUsize,
}

impl Service for BusyDisk {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let lends = function == LendObjects::FUNCTION || (function == LendParts::FUNCTION && self.disk.parts);
        if !lends || self.refusals.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_err() {
            return self.disk.call(function, body, out);
        }
        self.refused.fetch_add(1, SeqCst);
        if function == LendObjects::FUNCTION {
            pack::encode(&Answer::<Lent>::Err(ErrorCode::NoAvailableHandle), out);
        } else {
            pack::encode(&Answer::<LentParts>::Err(ErrorCode::NoAvailableHandle), out);
        }
        Ok(())
    }
}

/// Serves the disk, and makes the master name it for the object "d".
async fn serve(world: &World, owner: Arc<impl Service>) -> RunningServer {
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let endpoint = server.local_addr().to_string();
    world.master.mount_disk(OWNER, true).unwrap();
    let item = OffloadItem { tenant: "default".into(), key: b"d".to_vec(), size: LEN as i64 };
    let place = StoredAt { bucket: 0, offset: 0, key_size: 1, data_size: LEN as i64, endpoint };
    world.master.offloaded(OWNER, &[item], &[place]).unwrap();
    server.start(owner)
}

/// An owner whose buffers are all lent is asked again until the deadline. An object on its disk
/// is not a miss.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reads_wait_for_the_buffers_of_a_disk() {
    for (parts, refusals) in [(false, 3), (true, 3), (false, usize::MAX), (true, usize::MAX)] {
        let disks = Some(DiskOptions::default());
        let world = World::new(MasterOptions { disks, ..MasterOptions::default() });
        let memory = memory();
        let _owner = first(&world, &memory).await;
        let (reader, _) = world.connect(0).await;
        let disk = FakeDisk {
            value: Mutex::new((memory.span().addr(), 1, 60_000)),
            memory: NAME.into(),
            parts,
            ranges: false,
            asked: Mutex::default(),
        };
        let (refusals, refused) = (AtomicUsize::new(refusals), AtomicUsize::new(0));
        let owner = Arc::new(BusyDisk { disk, refusals, refused });
        let _server = serve(&world, owner.clone()).await;
        let reading = tokio::spawn({
            let reader = reader.clone();
            async move {
                if !parts {
                    let got = reader.get("d").await.map_err(|error| error.code());
                    return got.map(|got| got.map(Into::into));
                }
                let object = reader.ranges().locate(&["d"]).await.unwrap().remove(0).unwrap().unwrap();
                read_current(&reader, &object).await.map(Some)
            }
        });
        if owner.refusals.load(SeqCst) > 3 {
            eventually("it is refused", async || owner.refused.load(SeqCst) >= 3).await;
            world.clock.advance(Duration::from_secs(600));
            assert_eq!(reading.await.unwrap(), Err(ErrorCode::NoAvailableHandle), "{parts}");
        } else {
            assert_eq!(reading.await.unwrap(), Ok(Some(value(1, LEN).to_vec())), "{parts}");
            assert_eq!(owner.refused.load(SeqCst), 3);
        }
    }
}

/// Owner of a disk that takes longer than a lease of the master to read a value.
struct SlowDisk {
    disk: FakeDisk,
    clock: Arc<ManualClock>,
}

impl Service for SlowDisk {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if [LendObjects::FUNCTION, LendParts::FUNCTION].contains(&function) {
            self.clock.advance(LEASE * 2);
        }
        self.disk.call(function, body, out)
    }
}

/// The owner keeps a value in its buffer for its readers, whatever the lease of the master.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn values_on_disks_are_read_under_short_leases() {
    for parts in [false, true] {
        let disks = Some(DiskOptions::default());
        let world = World::new(MasterOptions { disks, ..short_leases() });
        let memory = memory();
        let _owner = first(&world, &memory).await;
        let (reader, _) = world.connect(0).await;
        let disk = FakeDisk {
            value: Mutex::new((memory.span().addr(), 1, 60_000)),
            memory: NAME.into(),
            parts,
            ranges: false,
            asked: Mutex::default(),
        };
        let _server = serve(&world, Arc::new(SlowDisk { disk, clock: world.clock.clone() })).await;
        assert_eq!(reader.get("d").await.unwrap().unwrap(), value(1, LEN), "{parts}");
        let [object] = locate(&reader, ["d"]).await;
        let part = |offset: usize| {
            let into = reader.memory().alloc(LEN / 2).unwrap().exclusive().unwrap();
            RangeRead { object: object.clone(), offset: offset as u64, into }
        };
        for offset in [0, LEN / 2] {
            let read = reader.ranges().read_current(vec![part(offset)]).await.remove(0);
            let mut bytes = vec![0; LEN / 2];
            read.into.copy_to(0, &mut bytes).unwrap();
            let got = read.result.map(|()| bytes).map_err(|error| error.code());
            assert_eq!(got, Ok(value(1, LEN)[offset..offset + LEN / 2].to_vec()), "{parts} {offset}");
        }
    }
}
