//! Master whose responses get lost, that responds slowly, or that is suddenly another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::clock::{ManualClock, SharedClock};
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{ErrorCode, Result};
#[cfg(feature = "disk")]
use mooncake_store::client::OffloadConfig;
use mooncake_store::client::{
    Client, ClientConfig, MasterHandle, PutOptions, PutOutcome, RangeRead, RangeWrite,
};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::master_client::MasterConnection;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::Service;
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::TaskStatus;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::cluster::{eventually, slices, value};

/// Connection to a master. It forwards each call, and drops the responses on its list.
#[derive(Debug)]
pub(crate) struct Front {
    master: Mutex<Arc<Master>>,
    options: MasterOptions,
    pub(crate) lose: Mutex<Vec<&'static str>>,
    /// Calls whose next responses arrive, before those of `lose`.
    pub(crate) pass: Mutex<Vec<&'static str>>,
    /// Calls whose next responses arrive only once `stalled` has a permit.
    pub(crate) stall: Mutex<Vec<&'static str>>,
    pub(crate) stalled: Semaphore,
    /// Delay of the next response of `locate`.
    late: Mutex<Duration>,
    /// Makes the service behave like Mooncake C++, which has no numbers of writes.
    existing: bool,
    /// Makes the master keep inventories.
    lists: bool,
    /// Number of masters so far: each has an epoch of its own.
    masters: AtomicU64,
    /// Gate of `remount`, which takes one permit per call.
    gate: Semaphore,
    remounting: Mutex<usize>,
    clock: Arc<ManualClock>,
}

impl Front {
    pub(crate) fn new(existing: bool) -> Arc<Self> {
        Self::with(existing, MasterOptions::default())
    }

    fn with(existing: bool, options: MasterOptions) -> Arc<Self> {
        let clock = Arc::new(ManualClock::new());
        let master = Mutex::new(Self::fresh(&options, &clock, 7));
        let gate = Semaphore::new(Semaphore::MAX_PERMITS);
        let (lose, late, remounting) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (lists, masters) = (false, AtomicU64::new(7));
        let (pass, stall, stalled) = (Mutex::default(), Mutex::default(), Semaphore::new(0));
        Arc::new(Self {
            master,
            options,
            lose,
            pass,
            stall,
            stalled,
            late,
            existing,
            lists,
            masters,
            gate,
            remounting,
            clock,
        })
    }

    /// Creates a service whose master keeps inventories.
    fn with_lists() -> Arc<Self> {
        let front = Arc::into_inner(Self::new(false)).unwrap();
        Arc::new(Self { lists: true, ..front })
    }

    fn fresh(options: &MasterOptions, clock: &Arc<ManualClock>, seed: u64) -> Arc<Master> {
        let options = options.clone();
        let clock: SharedClock = clock.clone();
        Arc::new(Master::with_parts(options, &Default::default(), &Default::default(), clock, seed).unwrap())
    }

    fn restart(&self) {
        let seed = self.masters.fetch_add(1, SeqCst) + 1;
        *self.master.lock() = Self::fresh(&self.options, &self.clock, seed);
    }

    pub(crate) fn master(&self) -> Arc<Master> {
        self.master.lock().clone()
    }

    pub(crate) fn lose(&self, calls: &[&'static str]) {
        self.lose.lock().extend(calls);
    }

    /// Returns whether the response of this call gets lost.
    fn loses(&self, call: &str) -> bool {
        !take(&self.pass, call) && take(&self.lose, call)
    }

    /// Returns whether the master lacks the call.
    fn lacks(&self, function: u32) -> bool {
        match function {
            FetchInventory::FUNCTION | FetchTimedInventory::FUNCTION => !self.lists,
            ExchangePromise::FUNCTION
            | DrainClient::FUNCTION
            | FetchExpired::FUNCTION
            | AnnounceExpired::FUNCTION
            | ReportUnreachable::FUNCTION => true,
            _ => self.existing && ADDED.iter().any(|shape| shape.function == function),
        }
    }

    pub(crate) async fn connect(self: &Arc<Self>, segment: u64) -> Client {
        let config = ClientConfig {
            ping_interval: Duration::from_millis(20),
            timeout: Duration::from_secs(20),
            ..ClientConfig::default()
        };
        let builder = Client::builder()
            .config(config)
            .master(MasterHandle::custom(self.clone()))
            .segment(segment)
            .clock(self.clock.clone())
            .copy_in_process(false);
        builder.connect().await.unwrap()
    }
}

/// Removes a call from a list. Returns whether the call was there.
fn take(calls: &Mutex<Vec<&'static str>>, call: &str) -> bool {
    let mut calls = calls.lock();
    let at = calls.iter().position(|other| *other == call);
    at.map(|at| calls.remove(at)).is_some()
}

#[async_trait]
impl MasterConnection for Front {
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>> {
        if self.lacks(function) {
            return Err(ErrorCode::NotSupported.into());
        }
        let name = match function {
            PutStart::FUNCTION
            | UpsertStart::FUNCTION
            | BatchPutStart::FUNCTION
            | BatchUpsertStart::FUNCTION
            | StartWrites::FUNCTION
            | StartHintedWrites::FUNCTION => "start",
            PutEnd::FUNCTION
            | UpsertEnd::FUNCTION
            | BatchPutEnd::FUNCTION
            | BatchUpsertEnd::FUNCTION
            | EndWrites::FUNCTION => "end",
            FetchDiskWork::FUNCTION if pack::decode::<FetchDiskWork>(body).unwrap().begin => "begin",
            FetchDiskWork::FUNCTION => "work",
            NotifyOffloadSuccess::FUNCTION | ReportOffloaded::FUNCTION => "offloaded",
            StartCopy::FUNCTION | StartMove::FUNCTION => "copy start",
            EndCopy::FUNCTION | EndMove::FUNCTION => "copy end",
            LocateForRead::FUNCTION => "locate",
            // The request is lost, not only the response.
            RevokeWrites::FUNCTION if self.loses("revoke") => return Err(ErrorCode::RpcFail.into()),
            BatchEvictDiskReplica::FUNCTION | ReportDropped::FUNCTION if self.loses("dropped") => {
                return Err(ErrorCode::RpcFail.into());
            }
            ReMountSegment::FUNCTION => {
                *self.remounting.lock() += 1;
                self.gate.acquire().await.unwrap().forget();
                "remount"
            }
            _ => "",
        };
        let (mut out, mut ignored) = (Vec::new(), None);
        if self.existing && function == ReMountSegment::FUNCTION {
            let request = pack::decode::<ReMountSegment<'_>>(body).unwrap();
            if !self.master().ping(request.client).need_remount {
                // Mooncake C++ ignores the segments of a client that it knows.
                let segments = Vec::new().into();
                let body = ignored.insert(Vec::new());
                pack::encode(&ReMountSegment { segments, ..request }, body);
            }
        }
        let body = ignored.as_deref().unwrap_or(body);
        MasterService(self.master()).call(function, body, &mut out).unwrap();
        let look_ups = [
            GetReplicaList::FUNCTION,
            BatchGetReplicaList::FUNCTION,
            LocateAgain::FUNCTION,
            LocatePrefix::FUNCTION,
        ];
        if look_ups.contains(&function) {
            self.clock.advance(std::mem::take(&mut *self.late.lock()));
        }
        if take(&self.stall, name) {
            self.stalled.acquire().await.unwrap().forget();
        }
        if self.loses(name) { Err(ErrorCode::RpcFail.into()) } else { Ok(out) }
    }
}

#[cfg(feature = "disk")]
fn with_disks(existing: bool) -> Arc<Front> {
    let disks = Some(mooncake_store::master::DiskOptions::default());
    Front::with(existing, MasterOptions { disks, ..MasterOptions::default() })
}

/// Starts an owner of a disk with this capacity.
#[cfg(feature = "disk")]
async fn owner(front: &Arc<Front>, folder: &std::path::Path, capacity: u64) -> Client {
    let interval = Duration::from_millis(20);
    let disk = OffloadConfig { interval, buffer: 1 << 20, capacity, ..OffloadConfig::new(folder) };
    let builder = Client::builder()
        .master(MasterHandle::custom(front.clone()))
        .segment(1 << 20)
        .clock(front.clock.clone())
        .offload(disk);
    builder.connect().await.unwrap()
}

#[cfg(feature = "disk")]
fn on_disk(front: &Front, key: &str) -> bool {
    let replicas = front.master().peek(key.as_bytes()).unwrap_or_default();
    replicas.iter().any(|replica| replica.location.memory().is_none())
}

#[cfg(feature = "disk")]
#[tokio::test]
async fn a_disk_report_with_a_lost_response_is_sent_again() {
    let front = with_disks(false);
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&front, folder.path(), 1 << 20).await;
    front.lose(&["work", "work"]);
    owner.put("k", &value(1, 1000)[..]).await.unwrap();
    eventually("it is written", async || on_disk(&front, "k")).await;
    front.lose(&["work"]);
    owner.remove("k", true).await.unwrap();
    eventually("it is dropped", async || owner.status().disk().unwrap().store.objects == 0).await;
    // The response is lost once per report, and once more.
    front.lose(&["offloaded"; 4]);
    owner.put("l", &value(2, 1000)[..]).await.unwrap();
    eventually("it is reported", async || on_disk(&front, "l")).await;
    front.lose(&["work"]);
    owner.remove_all(true).await.unwrap();
    eventually("the disk is emptied", async || owner.status().disk().unwrap().store.objects == 0).await;
    owner.put("m", &value(3, 1000)[..]).await.unwrap();
    eventually("and used again", async || on_disk(&front, "m")).await;
}

#[cfg(feature = "disk")]
#[tokio::test]
async fn a_removal_from_a_disk_is_sent_until_acknowledged() {
    let front = with_disks(false);
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&front, folder.path(), 1 << 20).await;
    front.lose(&["dropped", "dropped"]);
    for number in 0..40 {
        owner.put(number.to_string(), &value(number, 60_000)[..]).await.unwrap();
        // The objects are put one by one, so that each is written.
        eventually("it is written", async || on_disk(&front, &number.to_string())).await;
        front.clock.advance(Duration::from_secs(1));
    }
    eventually("the master knows what is there", async || {
        let there = (0..40).filter(|number| on_disk(&front, &number.to_string())).count() as u64;
        front.lose.lock().is_empty() && there == owner.status().disk().unwrap().store.objects
    })
    .await;
    assert!(owner.status().disk().unwrap().store.evicted > 0);
}

#[cfg(feature = "disk")]
#[tokio::test]
async fn an_offer_that_is_not_made_to_its_end_is_made_again() {
    let front = with_disks(false);
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&front, folder.path(), 1 << 20).await;
    owner.put("k", &value(1, 1000)[..]).await.unwrap();
    eventually("it is written", async || on_disk(&front, "k")).await;
    // A new master gets the objects on the disk announced, which fails at first.
    for lost in ["begin", "offloaded"] {
        front.lose(&[lost]);
        front.restart();
        eventually("it is announced", async || front.lose.lock().is_empty() && on_disk(&front, "k")).await;
    }
}

#[cfg(feature = "disk")]
#[tokio::test]
async fn a_master_that_does_not_number_is_asked_as_ever() {
    let front = with_disks(true);
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&front, folder.path(), 1 << 20).await;
    owner.put("k", &value(1, 1000)[..]).await.unwrap();
    eventually("it is written", async || on_disk(&front, "k")).await;
    owner.remove_all(true).await.unwrap();
    eventually("the disk is emptied", async || owner.status().disk().unwrap().store.objects == 0).await;
}

#[tokio::test]
async fn a_put_survives_the_loss_of_a_response() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    for (key, lost) in [("start", &["start"][..]), ("end", &["end"]), ("both", &["start", "end"])] {
        front.lose(lost);
        let outcome = client.put(key, &value(1, 1000)[..]).await.unwrap();
        assert_eq!(outcome, PutOutcome::Stored, "{key}: nobody else has put it");
        assert_eq!(client.get(key).await.unwrap().unwrap(), value(1, 1000));
    }
}

/// Moves `k` from one client to the other. Returns whether the task succeeded.
async fn moves(from: &Client, to: &Client) -> bool {
    let task = from.replicas().move_to("k", from.hostname(), to.hostname()).await.unwrap();
    let status = async || from.replicas().task(task).await.unwrap().status;
    let over = [TaskStatus::Failed, TaskStatus::Success];
    eventually("the task is over", async || over.contains(&status().await)).await;
    status().await == TaskStatus::Success
}

#[tokio::test]
async fn a_move_survives_the_loss_of_responses() {
    let front = Front::new(false);
    let (one, two) = (front.connect(1 << 20).await, front.connect(1 << 20).await);
    let options = PutOptions::new().prefer_segment(one.hostname());
    one.put_with("k", &value(1, 1000)[..], &options).await.unwrap();
    for lost in [&["copy start"][..], &["copy end"], &["copy start", "copy start", "copy end", "copy end"]] {
        for (from, to) in [(&one, &two), (&two, &one)] {
            front.lose(lost);
            assert!(moves(from, to).await, "{lost:?}");
            assert_eq!(front.master().peek(b"k").unwrap().len(), 1, "the source is dropped");
            assert_eq!(one.get("k").await.unwrap().unwrap(), value(1, 1000));
        }
    }
    // Without any response the move fails, and nothing holds the object.
    for lost in ["copy start", "copy end"] {
        front.lose(&[lost; 3]);
        moves(&one, &two).await;
        let replace = PutOptions::new().upsert();
        let upsert = async || one.put_with("k", &value(2, 1000)[..], &replace).await.is_ok();
        eventually("the object can be replaced", upsert).await;
        one.remove("k", true).await.unwrap();
        one.put_with("k", &value(1, 1000)[..], &options).await.unwrap();
    }
}

#[tokio::test]
async fn a_master_that_does_not_number_copies_has_them_made() {
    let front = Front::new(true);
    let (one, two) = (front.connect(1 << 20).await, front.connect(1 << 20).await);
    let options = PutOptions::new().prefer_segment(one.hostname());
    one.put_with("k", &value(1, 1000)[..], &options).await.unwrap();
    assert!(moves(&one, &two).await);
    let task = two.replicas().copy("k", &[one.hostname()]).await.unwrap();
    let status = async || two.replicas().task(task).await.unwrap().status;
    eventually("the copy is made", async || status().await == TaskStatus::Success).await;
    assert_eq!(front.master().peek(b"k").unwrap().len(), 2);
}

#[tokio::test]
async fn space_whose_grant_never_came_is_given_back() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    front.lose(&["start", "start"]);
    client.put("k", &value(1, 1000)[..]).await.unwrap_err();
    eventually("nothing is being written", async || front.master().stats().writing == 0).await;
    // The failed put may be repeated: the key does not exist.
    assert_eq!(client.put("k", &value(2, 1000)[..]).await.unwrap(), PutOutcome::Stored);
    assert_eq!(client.get("k").await.unwrap().unwrap(), value(2, 1000));
}

#[tokio::test]
async fn a_master_without_numbers_is_asked_for_space_once() {
    let front = Front::new(true);
    let client = front.connect(1 << 20).await;
    front.lose(&["start"]);
    let error = client.put("k", &value(1, 1000)[..]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::RpcFail);
    assert_eq!(front.master().stats().writing, 1, "it cannot be told which write is meant");
    front.lose(&["end"]);
    assert_eq!(client.put("l", &value(2, 1000)[..]).await.unwrap(), PutOutcome::Stored);
}

#[tokio::test]
async fn what_was_not_written_is_not_committed() {
    let front = Front::new(false);
    let owner = front.connect(1 << 20).await;
    let reserved = owner.ranges().reserve(&[("k", 1000), ("l", 1000)], &Default::default()).await.unwrap();
    let [k, l] = reserved.try_into().map(|both: [Result<_>; 2]| both.map(Result::unwrap)).unwrap();
    let write = |object, offset| {
        let from = owner.memory().alloc(500).unwrap().slice(0..500).unwrap();
        vec![RangeWrite { object, offset, from }]
    };
    for (object, offset) in [(&k, 0), (&l, 0), (&l, 500)] {
        owner.ranges().write(write(object, offset)).await.remove(0).unwrap();
    }
    // The time exceeds that in which Mooncake C++ still knows the write.
    front.clock.advance(Duration::from_secs(26));
    let code = |outcome: Result<()>| outcome.unwrap_err().code();
    let late = owner.ranges().write(write(&k, 500)).await.remove(0);
    assert_eq!(code(late), ErrorCode::UnavailableInCurrentStatus);
    assert!(k.is_incomplete() && !l.is_incomplete());
    let [ended, other] = owner.ranges().commit(&[&k, &l]).await.unwrap().try_into().unwrap();
    assert_eq!(code(ended), ErrorCode::UnavailableInCurrentStatus);
    other.unwrap();
    assert_eq!(owner.get("k").await.unwrap(), None);
}

#[tokio::test]
async fn a_lease_that_expired_on_the_way_is_requested_again() {
    let front = Front::new(false);
    let owner = front.connect(1 << 20).await;
    owner.put("k", &value(1, 1000)[..]).await.unwrap();
    for late in [1, 12] {
        *front.late.lock() = Duration::from_secs(late);
        let object = owner.ranges().locate(&["k"]).await.unwrap().remove(0).unwrap().unwrap();
        let into = owner.memory().alloc(1000).unwrap().exclusive().unwrap();
        let read = owner.ranges().read(vec![RangeRead { object, offset: 0, into }]).await;
        for range in read {
            range.result.unwrap();
        }
        *front.late.lock() = Duration::from_secs(late);
        let object = owner.ranges().locate_prefix(&["k", "none"]).await.unwrap().remove(0);
        let into = owner.memory().alloc(1000).unwrap().exclusive().unwrap();
        let read = owner.ranges().read(vec![RangeRead { object, offset: 0, into }]).await;
        read.into_iter().next().unwrap().result.unwrap();
        *front.late.lock() = Duration::from_secs(late);
        assert_eq!(owner.get("k").await.unwrap().unwrap(), value(1, 1000));
    }
}

#[tokio::test]
async fn a_batch_that_is_tried_again_keeps_its_groups() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    // The empty key is refused without the master, which gets two of three keys.
    let groups = ["a", "b", "c"].map(String::from).to_vec();
    let config = PutOptions::from(ReplicateConfig { group_ids: Some(groups), ..ReplicateConfig::default() });
    let items = [("x", value(1, 10)), ("", value(2, 10)), ("y", value(3, 10))];
    let outcomes = client.batch_put(&slices(&items), &config).await.unwrap();
    assert!(matches!(outcomes[..], [Ok(PutOutcome::Stored), Err(_), Ok(PutOutcome::Stored)]), "{outcomes:?}");
    // The group of an object does not change.
    let upsert = async |group: &str| {
        let config = ReplicateConfig { group_ids: Some(vec![group.into()]), ..ReplicateConfig::default() };
        let options = PutOptions::from(config).upsert();
        let outcomes = client.batch_put(&slices(&[("y", value(4, 10))]), &options).await.unwrap();
        outcomes.into_iter().next().unwrap().map_err(|error| error.code())
    };
    assert_eq!(upsert("b").await, Err(ErrorCode::InvalidParams));
    assert_eq!(upsert("c").await, Ok(PutOutcome::Stored));
}

#[tokio::test]
async fn a_mount_right_after_a_restart_brings_the_other_segments_along() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    front.restart();
    client.segments().mount(2 << 20).await.unwrap();
    let mut sizes: Vec<u64> = front.master().stats().segments.iter().map(|s| s.segment.size).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [1 << 20, 2 << 20]);
}

/// The master may have placed objects in memory whose mount has failed, or whose client is gone.
#[tokio::test]
async fn failed_mount_and_dropped_client_retire_addresses() {
    let front = Front::new(false);
    let client = front.connect(0).await;
    let memory = || Arc::new(HostMemory::new(1 << 20).unwrap());
    let (failed, mounted) = (memory(), memory());
    front.lose(&["remount"]);
    client.segments().mount_memory(failed.clone()).await.unwrap_err();
    client.segments().mount_memory(mounted.clone()).await.unwrap();
    let engine = client.engine().clone();
    assert!(engine.is_span_retired(failed.span()) && !engine.is_span_retired(mounted.span()));
    drop(client);
    eventually("the client is gone", async || engine.is_span_retired(mounted.span())).await;
}

#[tokio::test]
async fn memory_is_mounted_twice_at_mooncake_cpp() {
    let front = Front::new(true);
    let client = front.connect(0).await;
    let memory = Arc::new(HostMemory::new(1 << 20).unwrap());
    for _ in 0..2 {
        let segment = client.segments().mount_memory(memory.clone()).await.unwrap();
        assert_eq!(front.master().stats().segments.len(), 1);
        client.segments().unmount(segment).await.unwrap();
    }
}

#[tokio::test]
async fn a_segment_that_is_taken_back_meanwhile_is_not_mounted_again() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    let [segment] = client.segments().ids()[..] else { panic!() };
    // The heartbeat has its list of segments, and its call hangs.
    front.gate.forget_permits(Semaphore::MAX_PERMITS);
    front.restart();
    eventually("the client mounts again", async || *front.remounting.lock() == 1).await;
    let unmount = tokio::spawn({
        let client = client.clone();
        async move { client.segments().unmount(segment).await }
    });
    // The call runs until it waits; without the gate it would end.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    front.gate.add_permits(1000);
    unmount.await.unwrap().unwrap();
    assert_eq!(client.segments().ids(), []);
    assert_eq!(
        front.master().stats().segments.len(),
        0,
        "the master would send writers to memory that is gone"
    );
    client.close().await.unwrap();
}

/// A master is restarted during a remount: its successor learns of the segments from the remaining
/// calls.
#[tokio::test]
async fn objects_outlive_masters_after_two_restarts_during_one_remount() {
    let front = Front::with_lists();
    let owner = front.connect(1 << 20).await;
    let passing = tokio::spawn({
        let front = front.clone();
        async move {
            loop {
                front.clock.advance(Duration::from_millis(500));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    });
    let mounts = *front.remounting.lock();
    front.gate.forget_permits(Semaphore::MAX_PERMITS);
    front.restart();
    eventually("it is being mounted again", async || *front.remounting.lock() > mounts).await;
    front.restart();
    front.gate.add_permits(1000);
    eventually("an object would outlive the master", async || {
        let _ = owner.put("k", &value(2, 1000)[..]).await;
        owner.status().lasting_objects().await > 0 && front.master().peek(b"k").is_ok()
    })
    .await;
    front.restart();
    eventually("it is served again", async || {
        owner.get("k").await.is_ok_and(|got| got.is_some_and(|got| got == value(2, 1000)))
    })
    .await;
    passing.abort();
}

/// Warnings of this thread about hints.
#[derive(Clone, Default)]
struct HintWarnings(Arc<AtomicU64>);

impl tracing::Subscriber for HintWarnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.fetch_add(u64::from(text.0.contains("ignores hints") && text.0.contains("ttl_ms")), SeqCst);
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A master of Mooncake C++ or an older one ignores hints, and the process says so once.
#[tokio::test]
async fn a_master_without_hints_ignores_them() {
    let warnings = HintWarnings::default();
    let _guard = tracing::subscriber::set_default(warnings.clone());
    let front = Front::new(true);
    let client = front.connect(1 << 20).await;
    let options = PutOptions::new().time_to_live(Duration::from_secs(1)).delete_after_read().parent_key("p");
    for key in ["a", "b"] {
        assert_eq!(client.put_with(key, "v", &options).await.unwrap(), PutOutcome::Stored);
    }
    front.clock.advance(Duration::from_secs(2));
    for _ in 0..2 {
        assert_eq!(&client.get("a").await.unwrap().unwrap()[..], b"v");
    }
    // Another client of the process does not repeat the warning.
    let other = front.connect(1 << 20).await;
    assert_eq!(other.put_with("c", "v", &options).await.unwrap(), PutOutcome::Stored);
    assert_eq!(warnings.0.load(SeqCst), 1);
    other.close().await.unwrap();
    client.close().await.unwrap();
}

/// A start with hints whose response is lost is repeated, and gets the same space.
#[tokio::test]
async fn a_start_with_hints_is_repeated() {
    let front = Front::new(false);
    let client = front.connect(1 << 20).await;
    front.lose(&["start"]);
    let options = PutOptions::new().delete_after_read();
    assert_eq!(client.put_with("a", "v", &options).await.unwrap(), PutOutcome::Stored);
    assert!(front.lose.lock().is_empty());
    assert_eq!(&client.get("a").await.unwrap().unwrap()[..], b"v");
    assert_eq!(client.get("a").await.unwrap(), None);
    client.close().await.unwrap();
}
