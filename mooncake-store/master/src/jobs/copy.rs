//! Copies and moves of a value between segments. The master allocates the space; a client moves the
//! bytes.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ReplicaId, SlotId};
use mooncake_core::replica::ReplicaStatus;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::{CopyPlan, TaskKind};

use super::state::Jobs;
use crate::directory::object::not_found;
use crate::directory::{Copying, Object, Replicas, Shard};
use crate::model::misses::MissCause;
use crate::model::segment::Allocation;
use crate::space::hot_table::copy_not_requested;
use crate::space::mount::unknown;

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Allocates space for copies and begins a copy or move.
    pub(crate) fn begin_copy(
        &self,
        client: ClientId,
        kind: TaskKind,
        key: &[u8],
        source: &str,
        targets: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        let now = self.space.clock.now();
        if token.is_nil() {
            self.check_named(targets)?;
        }
        let hash = self.space.directory.hash(key);
        let mut shard = self.space.directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        if !token.is_nil() {
            let hot = self.space.hot.as_ref().ok_or_else(copy_not_requested)?;
            hot.check_copy(key, client, token, now)?;
            if shard[slot].value().is_none_or(|value| value.copy_epoch() != token.epoch) {
                return Err(Error::new(
                    ErrorCode::InvalidVersion,
                    "cannot start copy: the object has changed since the request",
                ));
            }
        }
        shard.prune(slot, now, self.space.options.put_release);
        let (source, space) = match self.space_for(&shard[slot], source, targets, now) {
            Ok(found) => found,
            Err(error) => {
                shard.remove_if_empty(slot, MissCause::OwnerLost);
                return Err(error);
            }
        };
        let object = &shard[slot];
        let Some(value) = object.value() else { return Err(not_found()) };
        let Some(from) = value.replicas.iter().find(|held| held.id == source) else {
            return Err(no_replica());
        };
        let plan = CopyPlan {
            source: from.describe(value.len, ReplicaStatus::Complete),
            targets: space.iter().map(|held| held.describe(value.len, ReplicaStatus::Processing)).collect(),
        };
        shard.begin_copy(
            slot,
            Copying { client, kind, token, started: now, source, targets: space, lost: false },
        );
        Ok(plan)
    }

    /// Checks that all segments exist. Mooncake C++ also checks this before anything else.
    fn check_named(&self, names: &[&str]) -> Result<()> {
        let registry = self.space.segments.read();
        match names.iter().find(|name| registry.named(name).is_empty()) {
            None => Ok(()),
            Some(name) => Err(unknown(name)),
        }
    }

    /// Returns the replica to read, and allocates space for the copies.
    fn space_for(
        &self,
        object: &Object<A>,
        source: &str,
        targets: &[&str],
        now: Moment,
    ) -> Result<(ReplicaId, Replicas<A>)> {
        if object.copying().is_some() {
            return Err(ErrorCode::ObjectHasReplicationTask.into());
        }
        // A replacement is in progress: the current value is not worth a copy, and a copy would
        // hold the wrong value.
        let value = object.value().filter(|_| object.write().is_none()).ok_or_else(no_replica)?;
        let in_segment = |name: &str| value.replicas.iter().find(|held| held.segment.info.name == name);
        let from = in_segment(source).ok_or_else(no_replica)?.id;
        let mut space = Replicas::new();
        for target in targets {
            let taken = |held: &Allocation<A>| held.segment.info.name == *target;
            if in_segment(target).is_some() || space.iter().any(taken) {
                continue;
            }
            match self.space.place_in(target, value.len, now) {
                Ok(held) => space.push(held),
                Err(error) => {
                    space.into_iter().for_each(|held| held.quarantine(now, now));
                    return Err(error);
                }
            }
        }
        Ok((from, space))
    }

    /// Makes the copies readable. A move drops its source.
    pub(crate) fn end_copy(
        &self,
        client: ClientId,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let now = self.space.clock.now();
        let hash = self.space.directory.hash(key);
        let mut shard = self.space.directory.lock(hash);
        let slot = self.find_copy(&mut shard, hash, key, (client, kind, token), now)?;
        let _held = self.space.tenants.hold(shard[slot].tenant(), shard[slot].charged_bytes());
        let Some(copying) = shard.take_copy(slot) else { return Err(no_task()) };
        if let (false, Some(hot), Some(held)) = (token.is_nil(), &self.space.hot, copying.targets.first()) {
            hot.record_made(token, (held.id, held.extent.len), now);
        }
        let lease = self.space.quarantine_end(self.space.in_use_until(&shard[slot]));
        shard.change_replicas(slot, |replicas| {
            replicas.extend(copying.targets);
            let source = replicas.iter().position(|held| held.id == copying.source);
            if kind == TaskKind::Move
                && replicas.len() > 1
                && let Some(source) = source
            {
                replicas.remove(source).quarantine(lease, now);
            }
        });
        drop(shard);
        self.space.eviction.end_backoff();
        Ok(())
    }

    /// Takes back the space of a copy or move that failed.
    pub(crate) fn revoke_copy(
        &self,
        client: ClientId,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let now = self.space.clock.now();
        let hash = self.space.directory.hash(key);
        let mut shard = self.space.directory.lock(hash);
        let slot = self.find_copy(&mut shard, hash, key, (client, kind, token), now)?;
        if let (false, Some(hot)) = (token.is_nil(), &self.space.hot) {
            hot.record_failed(&shard[slot].key, token, now);
        }
        if let Some(copying) = shard.take_copy(slot) {
            // Bytes that the client gave up on may still arrive.
            let abandoned = copying.started.after(self.space.options.put_release);
            let rest = now.after(self.space.options.revoke_rest).min(abandoned);
            copying.quarantine(self.space.quarantine_end(rest), now);
        }
        Ok(())
    }

    /// Returns the object of a copy that this client began.
    fn find_copy(
        &self,
        shard: &mut Shard<A, E>,
        hash: u64,
        key: &[u8],
        (client, kind, token): (ClientId, TaskKind, CopyToken),
        now: Moment,
    ) -> Result<SlotId> {
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune(slot, now, self.space.options.put_release);
        let object = &shard[slot];
        if object.value().is_none() && object.write().is_none() {
            shard.remove_if_empty(slot, MissCause::OwnerLost);
            return Err(not_found());
        }
        if object.lost_copy().is_some_and(|copying| copying.client == client && copying.kind == kind) {
            shard.take_copy(slot);
            return Err(Error::new(
                ErrorCode::ReplicaIsGone,
                "cannot end copy: every target segment is gone",
            ));
        }
        let copying = object.copying().ok_or_else(no_task)?;
        if copying.client != client {
            let text = format!("another client copies or moves the object. key={}", key.escape_ascii());
            return Err(Error::new(ErrorCode::IllegalClient, text));
        }
        if copying.kind != kind {
            return Err(Error::invalid(format!(
                "the task in progress is a {:?}. key={}",
                copying.kind,
                key.escape_ascii()
            )));
        }
        if copying.token != token && !(copying.token.is_nil() && token.is_nil()) {
            let text = format!("another copy of the object is in progress. key={}", key.escape_ascii());
            return Err(Error::new(ErrorCode::InvalidVersion, text));
        }
        Ok(slot)
    }
}

#[cold]
fn no_replica() -> Error {
    Error::new(ErrorCode::ReplicaNotFound, "cannot start copy: no complete replica in the source segment")
}

#[cold]
fn no_task() -> Error {
    ErrorCode::ObjectNoReplicationTask.into()
}
