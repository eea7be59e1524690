//! Owners that are replaced by another process of the same name, with the same memory at the same
//! addresses.

use std::sync::Arc;

use mooncake_core::ErrorCode;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, RangeOutcome, RangeRead, RangeWrite};
use mooncake_store::master::MasterOptions;
use mooncake_store::protocol::wire::TaskStatus;
use mooncake_transport::{Region, Slice};

use crate::cluster::{eventually, value};
use crate::faults::{Wire, World, at, locate};

pub(crate) const LEN: usize = 4096;
const SEGMENT: usize = 1 << 16;
pub(crate) const NAME: &str = "owner:7";

/// Process with the name [`NAME`].
pub(crate) struct Process {
    pub(crate) client: Client<Wire>,
    wire: Arc<Wire>,
}

impl Process {
    async fn start(world: &World) -> Self {
        let (client, wire) = world.named(NAME, 0).await;
        Self { client, wire }
    }

    /// Dies without a message to the master, which learns of it by the heartbeat timeout.
    pub(crate) async fn die(self) {
        self.wire.inner().kill();
        // The name becomes free, as a metadata service frees that of a host and port for the next
        // process.
        self.client.engine().close().await.unwrap();
        std::mem::forget(self.client);
    }
}

pub(crate) fn memory() -> Arc<HostMemory> {
    Arc::new(HostMemory::new(SEGMENT).unwrap())
}

/// Returns all bytes of a region that was registered for this.
fn contents(region: &Region<Wire>) -> Vec<u8> {
    let slice: Slice<Wire> = region.slice(0..SEGMENT).unwrap();
    let mut bytes = vec![0; SEGMENT];
    slice.copy_to(0, &mut bytes).unwrap();
    bytes
}

/// Starts the next process with the memory at the addresses of the previous one.
pub(crate) async fn next(world: &World, memory: &Arc<HostMemory>, byte: u8) -> (Process, Region<Wire>) {
    let process = Process::start(world).await;
    let region = process.client.engine().register(memory.clone() as Arc<dyn MemorySource>).await.unwrap();
    let mut all = region.exclusive().unwrap();
    all.copy_from(0, &vec![byte; SEGMENT]).unwrap();
    (process, all.into_region().unwrap())
}

async fn read(client: &Client<Wire>, object: &mooncake_store::client::Located) -> Result<Vec<u8>, ErrorCode> {
    let into = client.memory().alloc(LEN).unwrap().exclusive().unwrap();
    let RangeOutcome { result: outcome, into } =
        client.ranges().read(vec![RangeRead { object: object.clone(), offset: 0, into }]).await.remove(0);
    let mut bytes = vec![0; LEN];
    into.copy_to(0, &mut bytes).unwrap();
    outcome.map(|()| bytes).map_err(|error| error.code())
}

/// Starts the first process, with one object.
pub(crate) async fn first(world: &World, memory: &Arc<HostMemory>) -> Process {
    let process = Process::start(world).await;
    process.client.segments().mount_memory(memory.clone()).await.unwrap();
    process.client.put("k", &value(1, LEN)[..]).await.unwrap();
    process
}

#[tokio::test]
async fn an_object_of_the_process_before_is_not_read_from_the_next_one() {
    // The test runs with and without an existing route.
    for known in [true, false] {
        let world = World::new(MasterOptions::default());
        let memory = memory();
        let before = first(&world, &memory).await;
        let (reader, _) = world.connect(0).await;
        let [object] = locate(&reader, ["k"]).await;
        if known {
            assert_eq!(read(&reader, &object).await.unwrap(), value(1, LEN));
        }
        before.die().await;
        let (after, region) = next(&world, &memory, 0xee).await;
        drop(region);
        after.client.segments().mount_memory(memory.clone()).await.unwrap();
        for _ in 0..3 {
            let outcome = read(&reader, &object).await;
            assert!(outcome.is_err(), "bytes of another process were taken for the object");
            world.clock.advance(std::time::Duration::from_millis(1500));
        }
        assert_eq!(reader.get("k").await.unwrap(), None);
        // The next process serves its own objects.
        after.client.put("l", &value(2, LEN)[..]).await.unwrap();
        assert_eq!(reader.get("l").await.unwrap().unwrap(), value(2, LEN));
    }
}

#[tokio::test]
async fn memory_that_waits_for_its_mount_is_not_used() {
    let world = World::new(MasterOptions::default());
    let memory = memory();
    let before = first(&world, &memory).await;
    let (reader, _) = world.connect(0).await;
    before.die().await;
    // The next process has registered and published its memory, and the master still names the
    // previous one.
    let (after, region) = next(&world, &memory, 0xee).await;
    for _ in 0..2 {
        let got = reader.get("k").await.unwrap();
        assert!(got.is_none(), "bytes of another process were taken for the object");
        world.clock.advance(std::time::Duration::from_millis(1500));
    }
    let put = reader.put("p", &value(3, LEN)[..]).await;
    assert!(put.is_err(), "stored in memory that no master has");
    assert_eq!(contents(&region), [0xee; SEGMENT], "a put has landed in another process");
    drop(region);
    after.client.segments().mount_memory(memory.clone()).await.unwrap();
    assert_eq!(reader.get("k").await.unwrap(), None);
    world.clock.advance(std::time::Duration::from_secs(2));
    after.client.put("l", &value(2, LEN)[..]).await.unwrap();
    assert_eq!(reader.get("l").await.unwrap().unwrap(), value(2, LEN));
}

#[tokio::test]
async fn a_reservation_of_the_process_before_is_not_written_to_the_next_one() {
    // The writer may know the earlier process, and may have found the next one.
    for (known, is_found) in [(true, false), (false, false), (true, true), (false, true)] {
        let world = World::new(MasterOptions::default());
        let memory = memory();
        let before = first(&world, &memory).await;
        let (writer, _) = world.connect(0).await;
        if known {
            assert_eq!(writer.get("k").await.unwrap().unwrap(), value(1, LEN));
        }
        let reserved =
            writer.ranges().reserve(&[("r", LEN as u64)], &ReplicateConfig::default()).await.unwrap();
        let object = reserved.into_iter().next().unwrap().unwrap();
        before.die().await;
        let (after, region) = next(&world, &memory, 0xee).await;
        drop(region);
        after.client.segments().mount_memory(memory.clone()).await.unwrap();
        if is_found {
            after.client.put("l", &value(2, LEN)[..]).await.unwrap();
            eventually("the writer to find the next process", async || {
                world.clock.advance(std::time::Duration::from_millis(1500));
                writer.get("l").await.unwrap() == Some(value(2, LEN))
            })
            .await;
        }
        for _ in 0..3 {
            let mut from = writer.memory().alloc(LEN).unwrap().exclusive().unwrap();
            from.copy_from(0, &value(5, LEN)).unwrap();
            let from = from.into_shared();
            let outcome =
                writer.ranges().write(vec![RangeWrite { object: &object, offset: 0, from }]).await.remove(0);
            assert!(outcome.is_err(), "a write for another process has succeeded");
            world.clock.advance(std::time::Duration::from_millis(1500));
        }
        after.die().await;
        let (_look, region) = look(&world, &memory).await;
        let has_landed = contents(&region).windows(LEN).any(|bytes| bytes == value(5, LEN));
        assert!(!has_landed, "a write has landed in another process");
        assert!(is_found || contents(&region) == [0xee; SEGMENT], "the process was written to");
    }
}

#[tokio::test]
async fn a_copy_is_not_written_to_the_next_process() {
    for known in [true, false] {
        let world = World::new(MasterOptions::default());
        let memory = memory();
        let before = first(&world, &memory).await;
        let (source, _) = world.connect(SEGMENT as u64).await;
        source.put_with("c", &value(5, LEN)[..], &at(&source)).await.unwrap();
        if known {
            assert_eq!(source.get("k").await.unwrap().unwrap(), value(1, LEN));
        }
        before.die().await;
        // The next process has published its memory, and the master still names the previous one.
        let (_after, region) = next(&world, &memory, 0xee).await;
        let task = source.replicas().copy("c", &[NAME]).await.unwrap();
        eventually("the copy ends", async || {
            !matches!(
                source.replicas().task(task).await.unwrap().status,
                TaskStatus::Pending | TaskStatus::Processing
            )
        })
        .await;
        assert_eq!(contents(&region), [0xee; SEGMENT], "a copy has landed in another process");
        assert_eq!(source.replicas().task(task).await.unwrap().status, TaskStatus::Failed);
    }
}

/// Connects a process that reads memory without changing it.
async fn look(world: &World, memory: &Arc<HostMemory>) -> (Client<Wire>, Region<Wire>) {
    let (client, _) = world.connect(0).await;
    let region = client.engine().register(memory.clone() as Arc<dyn MemorySource>).await.unwrap();
    (client, region)
}
