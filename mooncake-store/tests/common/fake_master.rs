//! Fake master that answers calls: one table, space that is allocated once, and no leases.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use mooncake_core::error::{ErrorCode, Result};
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId};
use mooncake_core::replica::{
    MemoryLocation, Replica, ReplicaList, ReplicaLocation, ReplicaStatus, ReplicaType, ReplicateConfig,
    Segment, SegmentStatus,
};
use mooncake_store::api::{Caller, EndItem, PingReply, PutItem, WriteMode};
use mooncake_store::protocol::inventory::InventoryCalls;
use mooncake_store::protocol::service::{ObjectCalls, OwnerCalls, SegmentCalls, TaskCalls};
use mooncake_store::protocol::tiers::TierCalls;

#[derive(Debug, Default)]
pub(crate) struct FakeMaster(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<Vec<u8>, Replica>,
    segments: Vec<(ClientId, Segment, u64)>,
    replicas: u64,
}

impl FakeMaster {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl ObjectCalls for FakeMaster {
    fn exist(&self, _: &str, key: &[u8]) -> Result<bool> {
        Ok(self.state().objects.get(key).is_some_and(|replica| replica.status == ReplicaStatus::Complete))
    }

    fn locate(&self, _: &str, key: &[u8]) -> Result<ReplicaList> {
        let replica = self.state().objects.get(key).cloned().ok_or(ErrorCode::ObjectNotFound)?;
        if replica.status != ReplicaStatus::Complete {
            return Err(ErrorCode::ReplicaIsNotReady.into());
        }
        Ok(ReplicaList { replicas: vec![replica], lease: Duration::from_secs(10), checksum: None })
    }

    fn locate_matching(&self, _: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>> {
        let state = self.state();
        let found = state.objects.iter().filter(|(key, _)| key.starts_with(pattern.as_bytes()));
        found.map(|(key, replica)| Ok((ObjectKey::new(key)?, vec![replica.clone()]))).collect()
    }

    fn put_start(
        &self,
        _: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        _: &ReplicateConfig,
        _: &str,
    ) -> Result<Vec<Replica>> {
        let mut state = self.state();
        if mode == WriteMode::Put && state.objects.contains_key(item.key) {
            return Err(ErrorCode::ObjectAlreadyExists.into());
        }
        let (_, segment, used) = state
            .segments
            .iter_mut()
            .find(|(_, segment, used)| used.saturating_add(item.len) <= segment.size)
            .ok_or(ErrorCode::NoAvailableHandle)?;
        let location = ReplicaLocation::Memory(MemoryLocation {
            size: item.len,
            address: segment.base + *used,
            protocol: segment.protocol.clone(),
            endpoint: segment.endpoint.clone(),
        });
        *used += item.len;
        state.replicas += 1;
        let replica = Replica { id: ReplicaId(state.replicas), location, status: ReplicaStatus::Processing };
        state.objects.insert(item.key.to_vec(), replica.clone());
        Ok(vec![replica])
    }

    fn put_end(&self, _: Caller<'_>, _: WriteMode, item: EndItem<'_>, _: ReplicaType) -> Result<()> {
        let mut state = self.state();
        let replica = state.objects.get_mut(item.key).ok_or(ErrorCode::ObjectNotFound)?;
        replica.status = ReplicaStatus::Complete;
        Ok(())
    }

    fn put_revoke(&self, caller: Caller<'_>, _: WriteMode, key: &[u8], _: ReplicaType) -> Result<()> {
        self.remove(caller.tenant, key, true)
    }

    fn remove(&self, _: &str, key: &[u8], _: bool) -> Result<()> {
        self.state().objects.remove(key).map(drop).ok_or_else(|| ErrorCode::ObjectNotFound.into())
    }

    fn remove_matching(&self, _: &str, pattern: &str, _: bool) -> Result<u64> {
        let mut state = self.state();
        let before = state.objects.len();
        state.objects.retain(|key, _| !key.starts_with(pattern.as_bytes()));
        Ok((before - state.objects.len()) as u64)
    }

    fn remove_all(&self, _: &str, _: bool) -> Result<u64> {
        Ok(std::mem::take(&mut self.state().objects).len() as u64)
    }
}

impl SegmentCalls for FakeMaster {
    fn report_unreachable(&self, _client: ClientId, _endpoint: &str) -> Result<()> {
        Ok(())
    }

    fn ping(&self, client: ClientId) -> Result<PingReply> {
        let known = self.state().segments.iter().any(|(owner, ..)| *owner == client);
        Ok(PingReply { view: 0, need_remount: !known })
    }

    fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        if segment.size == 0 {
            return Err(ErrorCode::InvalidParams.into());
        }
        let mut state = self.state();
        if !state.segments.iter().any(|(_, mounted, _)| mounted.id == segment.id) {
            state.segments.push((client, segment.clone(), 0));
        }
        Ok(())
    }

    fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        segments.iter().try_for_each(|segment| self.mount(client, segment))
    }

    fn unmount(&self, _: ClientId, segment: SegmentId) -> Result<()> {
        self.state().segments.retain(|(_, mounted, _)| mounted.id != segment);
        Ok(())
    }

    fn unmount_later(&self, client: ClientId, segment: SegmentId, _: Duration) -> Result<()> {
        self.unmount(client, segment)
    }

    fn segment_status_by_name(&self, name: &str) -> Result<SegmentStatus> {
        let found = self.state().segments.iter().any(|(_, mounted, _)| mounted.name == name);
        if found { Ok(SegmentStatus::Ok) } else { Err(ErrorCode::SegmentNotFound.into()) }
    }

    fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus> {
        let found = self.state().segments.iter().any(|(_, mounted, _)| mounted.id == segment);
        if found { Ok(SegmentStatus::Ok) } else { Err(ErrorCode::SegmentNotFound.into()) }
    }
}

impl TaskCalls for FakeMaster {}

impl TierCalls for FakeMaster {
    fn find(&self, _: &str, key: &[u8]) -> Result<()> {
        self.state().objects.get(key).map(drop).ok_or_else(|| ErrorCode::ObjectNotFound.into())
    }
}

impl InventoryCalls for FakeMaster {}

impl OwnerCalls for FakeMaster {
    fn client_addresses(&self, clients: &[ClientId]) -> Result<Vec<(ClientId, Vec<String>)>> {
        let state = self.state();
        let found = state.segments.iter().filter(|(owner, ..)| clients.contains(owner));
        Ok(found.map(|(owner, segment, _)| (*owner, vec![segment.host_id.clone()])).collect())
    }

    fn clear_replicas(&self, _: ClientId, keys: &[&[u8]], _: &str) -> Result<Vec<ObjectKey>> {
        let mut state = self.state();
        let mut cleared = keys.to_vec();
        cleared.retain(|key| state.objects.remove(*key).is_some());
        cleared.into_iter().map(|key| Ok(ObjectKey::new(key)?)).collect()
    }
}
