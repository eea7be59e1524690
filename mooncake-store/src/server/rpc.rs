//! The master behind the RPC server, with its calls counted.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::alloc::Extent;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment, SegmentStatus};

use super::State;
use super::counting::Tally;
use crate::api::{Caller, CopyToken, EndItem, PingReply, PutItem, WriteMode};
use crate::master::Master;
use crate::protocol::inventory::InventoryCalls;
use crate::protocol::pack::Writer;
use crate::protocol::server::{Refusal, Service};
use crate::protocol::service::{MasterService, ObjectCalls, OwnerCalls, SegmentCalls, TaskCalls};
use crate::protocol::tiers::TierCalls;
use crate::protocol::wire::{
    CopyPlan, InventoryPage, MovePlan, NofSegment, StoredReplica, Task, TaskInfo, TaskKind, TaskReport,
};

/// Counts calls on their way to the master.
pub(super) struct Counted {
    state: Arc<State>,
    calls: MasterService<Items>,
}

impl Counted {
    pub(super) fn new(state: Arc<State>) -> Self {
        let items = Items(state.master.clone());
        Self { state, calls: MasterService(Arc::new(items)) }
    }
}

impl Service for Counted {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        Tally::begin();
        let clock = self.state.master.clock();
        let begun = clock.now();
        let outcome = self.calls.call(function, body, out);
        self.state.requests.count(function, Tally::end(), clock.now().since(begun));
        outcome
    }
}

/// Notes how each item of a call ends. Everything else is the master's.
#[derive(Debug)]
struct Items(Arc<Master>);

impl ObjectCalls for Items {
    fn exist(&self, tenant: &str, key: &[u8]) -> Result<bool> {
        Tally::item(self.0.exist(tenant, key))
    }

    fn locate(&self, tenant: &str, key: &[u8]) -> Result<ReplicaList> {
        Tally::item(ObjectCalls::locate(&*self.0, tenant, key))
    }

    fn locate_to(&self, tenant: &str, key: &[u8], out: &mut Writer<'_>) -> Result<()> {
        Tally::item(ObjectCalls::locate_to(&*self.0, tenant, key, out))
    }

    fn locate_matching(&self, tenant: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>> {
        Tally::item(ObjectCalls::locate_matching(&*self.0, tenant, pattern))
    }

    fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
    ) -> Result<Vec<Replica>> {
        Tally::item(ObjectCalls::put_start(&*self.0, caller, mode, item, config, group))
    }

    fn put_start_to(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
        out: &mut Writer<'_>,
    ) -> Result<()> {
        Tally::item(ObjectCalls::put_start_to(&*self.0, caller, mode, item, config, group, out))
    }

    fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: EndItem<'_>,
        replicas: ReplicaType,
    ) -> Result<()> {
        Tally::item(ObjectCalls::put_end(&*self.0, caller, mode, item, replicas))
    }

    fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        key: &[u8],
        replicas: ReplicaType,
    ) -> Result<()> {
        Tally::item(ObjectCalls::put_revoke(&*self.0, caller, mode, key, replicas))
    }

    fn remove(&self, tenant: &str, key: &[u8], force: bool) -> Result<()> {
        Tally::item(ObjectCalls::remove(&*self.0, tenant, key, force))
    }

    fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        Tally::item(ObjectCalls::remove_matching(&*self.0, tenant, pattern, force))
    }

    fn remove_all(&self, tenant: &str, force: bool) -> Result<u64> {
        Tally::item(ObjectCalls::remove_all(&*self.0, tenant, force))
    }
}

impl SegmentCalls for Items {
    fn ping(&self, client: ClientId) -> Result<PingReply> {
        Tally::item(SegmentCalls::ping(&*self.0, client))
    }

    fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        Tally::item(SegmentCalls::mount(&*self.0, client, segment))
    }

    fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        Tally::item(SegmentCalls::remount(&*self.0, client, segments))
    }

    fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        Tally::item(SegmentCalls::unmount(&*self.0, client, segment))
    }

    fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        SegmentCalls::report_unreachable(&*self.0, client, endpoint)
    }

    fn unmount_later(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        Tally::item(self.0.unmount_later(client, segment, grace))
    }

    fn segment_status_by_name(&self, name: &str) -> Result<SegmentStatus> {
        self.0.segment_status_by_name(name)
    }

    fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus> {
        SegmentCalls::segment_status(&*self.0, segment)
    }
}

impl OwnerCalls for Items {
    fn client_addresses(&self, clients: &[ClientId]) -> Result<Vec<(ClientId, Vec<String>)>> {
        Tally::item(self.0.client_addresses(clients))
    }

    fn clear_replicas(&self, client: ClientId, keys: &[&[u8]], segment: &str) -> Result<Vec<ObjectKey>> {
        Tally::item(OwnerCalls::clear_replicas(&*self.0, client, keys, segment))
    }
}

impl TaskCalls for Items {
    fn fetch_tasks(&self, client: ClientId, limit: u64) -> Result<Vec<Task>> {
        Tally::item(TaskCalls::fetch_tasks(&*self.0, client, limit))
    }

    fn create_copy(&self, tenant: &str, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        Tally::item(TaskCalls::create_copy(&*self.0, tenant, key, targets))
    }

    fn create_move(&self, tenant: &str, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        Tally::item(TaskCalls::create_move(&*self.0, tenant, key, source, target))
    }

    fn task(&self, task: Uuid) -> Result<TaskInfo> {
        Tally::item(self.0.task(task))
    }

    fn complete_task(&self, client: ClientId, report: &TaskReport) -> Result<()> {
        Tally::item(self.0.complete_task(client, report))
    }

    fn copy_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        from: &str,
        to: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        Tally::item(TaskCalls::copy_start(&*self.0, caller, key, from, to, token))
    }

    fn move_start(&self, caller: Caller<'_>, key: &[u8], from: &str, to: &str) -> Result<MovePlan> {
        Tally::item(TaskCalls::move_start(&*self.0, caller, key, from, to))
    }

    fn replication_end(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        Tally::item(TaskCalls::replication_end(&*self.0, caller, kind, key, token))
    }

    fn replication_revoke(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        Tally::item(TaskCalls::replication_revoke(&*self.0, caller, kind, key, token))
    }
}

impl TierCalls for Items {
    fn find(&self, tenant: &str, key: &[u8]) -> Result<()> {
        TierCalls::find(&*self.0, tenant, key)
    }

    fn mount_nof(&self, client: ClientId, segments: &[NofSegment]) -> Result<()> {
        Tally::item(self.0.mount_nof(client, segments))
    }

    fn unmount_nof(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        Tally::item(self.0.unmount_nof(client, segment))
    }

    fn dropped_from_disk(
        &self,
        client: ClientId,
        tenant: &str,
        key: &[u8],
        replicas: ReplicaType,
    ) -> Result<()> {
        Tally::item(self.0.dropped_from_disk(client, tenant, key, replicas))
    }
}

impl InventoryCalls for Items {
    fn inventory(&self, client: ClientId, after: u64) -> Result<InventoryPage> {
        InventoryCalls::inventory(&*self.0, client, after)
    }

    fn mount_kept(&self, client: ClientId, segment: &Segment) -> Result<()> {
        Tally::item(InventoryCalls::mount_kept(&*self.0, client, segment))
    }

    fn keep(&self, client: ClientId, segment: SegmentId, extents: &[Extent], open: bool) -> Result<()> {
        InventoryCalls::keep(&*self.0, client, segment, extents, open)
    }

    fn announce(&self, client: ClientId, stored: &StoredReplica) -> Result<()> {
        Tally::item(InventoryCalls::announce(&*self.0, client, stored))
    }

    fn release_kept(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        InventoryCalls::release_kept(&*self.0, client, segment)
    }
}
