//! A master whose answers get lost, that is slow in answering, or that is another one all of a sudden.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::clock::{ManualClock, SharedClock};
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};
use mooncake_core::{ErrorCode, Result};
use mooncake_store::api::{
    Caller, DiskService, EndItem, InventoryService, ObjectService, PingReply, PutItem, SegmentService,
    TaskService, WriteMode,
};
use mooncake_store::client::{Client, ClientConfig, MasterHandle, PutOutcome};
use mooncake_store::master::{Master, MasterOptions};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::support::{eventually, value};

/// In front of a master. Each call is made; what is on the list has its answer lost.
#[derive(Debug)]
struct Front {
    master: Mutex<Arc<Master>>,
    lose: Mutex<Vec<&'static str>>,
    /// As masters of the existing system: it knows nothing of numbers.
    existing: bool,
    /// What `remount` waits for, one permit a call.
    gate: Semaphore,
    remounting: Mutex<usize>,
    clock: Arc<ManualClock>,
}

impl Front {
    fn new(existing: bool) -> Arc<Self> {
        let clock = Arc::new(ManualClock::new());
        let master = Mutex::new(Self::fresh(&clock));
        let gate = Semaphore::new(Semaphore::MAX_PERMITS);
        let (lose, remounting) = (Mutex::default(), Mutex::default());
        Arc::new(Self { master, lose, existing, gate, remounting, clock })
    }

    fn fresh(clock: &Arc<ManualClock>) -> Arc<Master> {
        let options = MasterOptions::default();
        let clock: SharedClock = clock.clone();
        Arc::new(Master::with_parts(options, &Default::default(), &Default::default(), clock, 7).unwrap())
    }

    fn restart(&self) {
        *self.master.lock() = Self::fresh(&self.clock);
    }

    fn master(&self) -> Arc<Master> {
        self.master.lock().clone()
    }

    fn lose(&self, calls: &[&'static str]) {
        self.lose.lock().extend(calls);
    }

    fn caller<'a>(&self, caller: Caller<'a>) -> Caller<'a> {
        if self.existing { Caller { attempt: 0, ..caller } } else { caller }
    }

    fn answer<T>(&self, call: &'static str, answer: Result<T>) -> Result<T> {
        let mut lose = self.lose.lock();
        match lose.iter().position(|lost| *lost == call) {
            Some(at) => {
                lose.remove(at);
                Err(ErrorCode::RpcFail.into())
            }
            None => answer,
        }
    }

    async fn member(self: &Arc<Self>, segment: u64) -> Client {
        let config = ClientConfig { ping_interval: Duration::from_millis(20), ..ClientConfig::default() };
        let builder = Client::builder()
            .config(config)
            .master(MasterHandle::custom(self.clone()))
            .segment(segment)
            .clock(self.clock.clone())
            .copy_in_process(false);
        builder.connect().await.unwrap()
    }
}

#[async_trait]
impl ObjectService for Front {
    fn fences_writes(&self) -> bool {
        !self.existing
    }

    async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        self.master().exist(tenant, keys).await
    }

    async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        ObjectService::locate(&*self.master(), tenant, keys).await
    }

    async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let caller = self.caller(caller);
        let answer = ObjectService::put_start(&*self.master(), caller, mode, items, config).await;
        self.answer("start", answer)
    }

    async fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let caller = self.caller(caller);
        let answer = ObjectService::put_end(&*self.master(), caller, mode, items, replicas).await;
        self.answer("end", answer)
    }

    async fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let caller = self.caller(caller);
        ObjectService::put_revoke(&*self.master(), caller, mode, keys, replicas).await
    }

    async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>> {
        ObjectService::remove(&*self.master(), tenant, keys, force).await
    }

    async fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        ObjectService::remove_matching(&*self.master(), tenant, pattern, force).await
    }

    async fn remove_all(&self, tenant: &str, force: bool) -> Result<u64> {
        ObjectService::remove_all(&*self.master(), tenant, force).await
    }
}

#[async_trait]
impl SegmentService for Front {
    async fn version(&self) -> Result<String> {
        self.master().version().await
    }

    async fn ping(&self, client: ClientId) -> Result<PingReply> {
        SegmentService::ping(&*self.master(), client).await
    }

    async fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        SegmentService::mount(&*self.master(), client, segment).await
    }

    async fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        *self.remounting.lock() += 1;
        self.gate.acquire().await.unwrap().forget();
        SegmentService::remount(&*self.master(), client, segments).await
    }

    async fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        SegmentService::unmount(&*self.master(), client, segment).await
    }

    async fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        SegmentService::unmount_after(&*self.master(), client, segment, grace).await
    }
}

impl TaskService for Front {}

impl InventoryService for Front {}

impl DiskService for Front {}

#[tokio::test]
async fn a_put_survives_the_loss_of_an_answer() {
    let front = Front::new(false);
    let client = front.member(1 << 20).await;
    for (key, lost) in [("start", &["start"][..]), ("end", &["end"]), ("both", &["start", "end"])] {
        front.lose(lost);
        let outcome = client.put(key, value(1, 1000)).await.unwrap();
        assert_eq!(outcome, PutOutcome::Stored, "{key}: nobody else has put it");
        assert_eq!(client.get(key).await.unwrap().unwrap(), value(1, 1000));
    }
}

#[tokio::test]
async fn space_whose_grant_never_came_is_given_back() {
    let front = Front::new(false);
    let client = front.member(1 << 20).await;
    front.lose(&["start", "start"]);
    client.put("k", value(1, 1000)).await.unwrap_err();
    eventually("nothing is being written", async || front.master().stats().writing == 0).await;
    // What was not put may be put: it is not said to be there.
    assert_eq!(client.put("k", value(2, 1000)).await.unwrap(), PutOutcome::Stored);
    assert_eq!(client.get("k").await.unwrap().unwrap(), value(2, 1000));
}

#[tokio::test]
async fn a_master_without_numbers_is_asked_for_space_once() {
    let front = Front::new(true);
    let client = front.member(1 << 20).await;
    front.lose(&["start"]);
    let error = client.put("k", value(1, 1000)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::RpcFail);
    assert_eq!(front.master().stats().writing, 1, "it cannot be told which write is meant");
    front.lose(&["end"]);
    assert_eq!(client.put("l", value(2, 1000)).await.unwrap(), PutOutcome::Stored);
}

#[tokio::test]
async fn a_batch_that_is_tried_again_keeps_its_groups() {
    let front = Front::new(false);
    let client = front.member(1 << 20).await;
    // The empty key is refused before the master is asked, so it is asked for two of three.
    let groups = ["a", "b", "c"].map(String::from).to_vec();
    let config = ReplicateConfig { group_ids: Some(groups), ..ReplicateConfig::default() };
    let items = [("x", value(1, 10)), ("", value(2, 10)), ("y", value(3, 10))];
    let outcomes = client.batch_put(&items, &config).await.unwrap();
    assert!(matches!(outcomes[..], [Ok(PutOutcome::Stored), Err(_), Ok(PutOutcome::Stored)]), "{outcomes:?}");
    // A group is for ever.
    let upsert = async |group: &str| {
        let config = ReplicateConfig { group_ids: Some(vec![group.into()]), ..ReplicateConfig::default() };
        let outcomes = client.batch_upsert(&[("y", value(4, 10))], &config).await.unwrap();
        outcomes.into_iter().next().unwrap().map_err(|error| error.code())
    };
    assert_eq!(upsert("b").await, Err(ErrorCode::InvalidParams));
    assert_eq!(upsert("c").await, Ok(()));
}

#[tokio::test]
async fn a_mount_right_after_a_restart_brings_the_other_segments_along() {
    let front = Front::new(false);
    let client = front.member(1 << 20).await;
    front.restart();
    client.mount(2 << 20).await.unwrap();
    let mut sizes: Vec<u64> = front.master().stats().segments.iter().map(|s| s.segment.size).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [1 << 20, 2 << 20]);
}

#[tokio::test]
async fn a_segment_that_is_taken_back_meanwhile_is_not_mounted_again() {
    let front = Front::new(false);
    let client = front.member(1 << 20).await;
    let [segment] = client.segments()[..] else { panic!() };
    // The heartbeat has its list of segments, and its call hangs.
    front.gate.forget_permits(Semaphore::MAX_PERMITS);
    front.restart();
    eventually("the client mounts again", async || *front.remounting.lock() == 1).await;
    let unmount = tokio::spawn({
        let client = client.clone();
        async move { client.unmount(segment).await }
    });
    // As far as it gets: with nothing to wait for it would be over.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    front.gate.add_permits(1000);
    unmount.await.unwrap().unwrap();
    assert_eq!(client.segments(), []);
    assert_eq!(
        front.master().stats().segments.len(),
        0,
        "the master would send writers to memory that is gone"
    );
    client.close().await.unwrap();
}
