//! Tasks for clients: requested copies and moves.

use std::collections::HashSet;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::TaskKind;
use serde::Serialize;

use super::state::Jobs;
use crate::directory::object::not_found;

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Creates a task for copies of an object.
    pub(crate) fn create_copy(&self, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        if targets.is_empty() {
            return Err(Error::invalid("cannot create copy: the request names no target segment"));
        }
        // A key that a task cannot contain is refused whether or not the object exists.
        self.key_text(key)?;
        let (source, client) = self.source_of(key, None)?;
        targets.iter().try_for_each(|target| self.check_target(target))?;
        // Each target once: a task is kept for a while, however long its list is.
        let mut seen = HashSet::new();
        let once: Vec<&str> = targets.iter().copied().filter(|target| seen.insert(*target)).collect();
        self.add_copy(client, key, &source, &once, None)
    }

    /// Queues a copy for the client of the source. A copy of a hot object is for the value of an
    /// `epoch`; the lease of its token is the id of the task.
    pub(crate) fn add_copy(
        &self,
        client: ClientId,
        key: &[u8],
        source: &str,
        targets: &[&str],
        epoch: Option<u64>,
    ) -> Result<Uuid> {
        let (tenant_id, key) = self.key_text(key)?;
        self.add_task(TaskKind::Copy, client, |id| {
            let token = epoch.map(|epoch| CopyToken { lease: id, epoch }).unwrap_or_default();
            CopyPayload {
                tenant_id,
                key,
                source,
                targets,
                dynamic_replication_lease_id_high: token.lease.first,
                dynamic_replication_lease_id_low: token.lease.second,
                dynamic_replication_version_epoch: token.epoch,
            }
        })
    }

    /// Creates a task for the move of a replica.
    pub(crate) fn create_move(&self, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        if source == target {
            return Err(Error::invalid("cannot create move: source and target are the same segment"));
        }
        let (tenant_id, text) = self.key_text(key)?;
        self.check_target(target)?;
        let (source, client) = self.source_of(key, Some(source))?;
        self.add_task(TaskKind::Move, client, |_| MovePayload {
            tenant_id,
            key: text,
            source: &source,
            target,
        })
    }

    /// Ends a task that no client has fetched. Returns whether there was one.
    pub(crate) fn withdraw_task(&self, id: Uuid, message: &str) -> bool {
        self.tasks.lock().withdraw(id, message, self.space.clock.wall_ms())
    }

    fn check_target(&self, name: &str) -> Result<()> {
        let now = self.space.clock.now();
        let registry = self.space.segments.read();
        let segments = registry.with_name(name);
        if segments.is_empty() {
            return Err(Error::invalid(format!(
                "cannot create task: target segment is not mounted. name={name}"
            )));
        }
        if !segments.iter().any(|segment| segment.would_open(now)) {
            let text = format!("cannot create task: target segment accepts no objects now. name={name}");
            return Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
        }
        Ok(())
    }

    /// Returns a segment that holds a replica, at random unless it is named, and its client.
    fn source_of(&self, key: &[u8], name: Option<&str>) -> Result<(String, ClientId)> {
        let hash = self.space.directory.hash(key);
        let shard = self.space.directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        let Some(value) = shard[slot].value() else { return Err(ErrorCode::ReplicaIsNotReady.into()) };
        let live: Vec<_> = value.live().map(|held| &held.segment).collect();
        let found = match name {
            Some(name) => live.into_iter().find(|segment| segment.info.name == name).ok_or_else(|| {
                Error::invalid(format!("cannot create move: no replica in segment. name={name}"))
            })?,
            None if live.is_empty() => return Err(not_found()),
            None => live[self.space.random.below(live.len())],
        };
        Ok((found.info.name.clone(), found.client))
    }

    /// Returns a key as tenant and text.
    fn key_text<'a>(&self, key: &'a [u8]) -> Result<(&'a str, &'a str)> {
        let (tenant, key) = self.space.tenants.split(key);
        match std::str::from_utf8(key) {
            Ok(text) => Ok((tenant, text)),
            Err(_) => Err(Error::invalid("cannot create task: the key is not UTF-8")),
        }
    }

    fn add_task<P: Serialize>(
        &self,
        kind: TaskKind,
        client: ClientId,
        payload: impl FnOnce(Uuid) -> P,
    ) -> Result<Uuid> {
        let id = self.tasks.lock().new_id();
        let payload = serde_json::to_string(&payload(id))
            .map_err(|e| Error::internal(format!("cannot encode payload of task: {e}")))?;
        let (now, wall) = (self.space.clock.now(), self.space.clock.wall_ms());
        self.tasks.lock().add(id, kind, client, payload, now, wall)?;
        Ok(id)
    }
}

/// Payload of a copy, as clients of Mooncake C++ read it.
#[derive(Serialize)]
struct CopyPayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    targets: &'a [&'a str],
    dynamic_replication_lease_id_high: u64,
    dynamic_replication_lease_id_low: u64,
    dynamic_replication_version_epoch: u64,
}

/// Payload of a move, as clients of Mooncake C++ read it.
#[derive(Serialize)]
struct MovePayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    target: &'a str,
}
