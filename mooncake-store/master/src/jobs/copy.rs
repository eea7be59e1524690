//! Copies and moves of a value between segments. The master allocates the space; a client moves the
//! bytes.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ReplicaId, SlotId};
use mooncake_core::replica::ReplicaStatus;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::{CopyPlan, TaskKind};

use super::state::Jobs;
use crate::directory::object::not_found;
use crate::directory::{CopyOutcome, Copying, Object, Replicas, Shard, Value};
use crate::model::misses::MissCause;
use crate::model::segment::Allocation;
use crate::model::value::Writer;
use crate::space::hot_table::copy_not_requested;
use crate::space::mount::unknown;

/// Copy or move that a call is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyCall<'a> {
    /// Client that copies, and the number of its copy.
    pub(crate) copier: Writer,
    pub(crate) kind: TaskKind,
    pub(crate) key: &'a [u8],
    /// Token of the copy of a hot object; nil for others.
    pub(crate) token: CopyToken,
    /// Logical time at which the server had read the request, if it is known.
    pub(crate) receipt: Option<u64>,
}

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Allocates space for copies and begins a copy or move. A repeated call has the same result.
    pub(crate) fn begin_copy(&self, call: CopyCall<'_>, source: &str, targets: &[&str]) -> Result<CopyPlan> {
        let CopyCall { copier, kind, key, token, .. } = call;
        let now = self.space.clock.now();
        if token.is_nil() {
            self.check_mounted(targets)?;
        }
        let hash = self.space.directory.hash(key);
        let mut shard = self.space.directory.lock(hash);
        if shard.copy_outcome(copier).is_some() {
            let text = format!("cannot start copy: it has ended already. key={}", key.escape_ascii());
            return Err(Error::new(ErrorCode::InvalidVersion, text));
        }
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        if !token.is_nil() {
            let hot = self.space.hot.as_ref().ok_or_else(copy_not_requested)?;
            hot.check_copy(key, copier.client, token, now)?;
            if shard[slot].value().is_none_or(|value| value.copy_epoch() != token.epoch) {
                return Err(Error::new(
                    ErrorCode::InvalidVersion,
                    "cannot start copy: the object has changed since the request",
                ));
            }
        }
        shard.prune(slot, now, self.space.options.put_release);
        if let Some(plan) = repeated(&mut shard[slot], call, source, targets) {
            return Ok(plan);
        }
        let (source, space) = match self.space_for(&shard[slot], copier, source, targets, now) {
            Ok(found) => found,
            Err(error) => {
                shard.remove_if_empty(slot, MissCause::OwnerLost);
                return Err(error);
            }
        };
        let begun = self.space.next_logical_time();
        let copying = Copying::new(copier, kind, token, (now, begun), source, (targets, space));
        let Some(plan) = shard[slot].value().and_then(|value| plan_of(&copying, value)) else {
            copying.quarantine(now, now);
            return Err(no_replica());
        };
        shard.begin_copy(slot, copying);
        Ok(plan)
    }

    /// Checks that all segments exist. Mooncake C++ also checks this before anything else.
    fn check_mounted(&self, names: &[&str]) -> Result<()> {
        let registry = self.space.segments.read();
        match names.iter().find(|name| registry.with_name(name).is_empty()) {
            None => Ok(()),
            Some(name) => Err(unknown(name)),
        }
    }

    /// Returns the replica to read, and allocates space for the copies.
    fn space_for(
        &self,
        object: &Object<A>,
        copier: Writer,
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
            match self.space.place_in(target, value.len, copier.grantee(object.tenant()), now) {
                Ok(held) => space.push(held),
                Err(error) => {
                    space.into_iter().for_each(|held| held.quarantine(now, now));
                    return Err(error);
                }
            }
        }
        Ok((from, space))
    }

    /// Makes the copies readable. A move drops its source. The end of a numbered copy may be
    /// repeated.
    pub(crate) fn end_copy(&self, call: CopyCall<'_>) -> Result<()> {
        let CopyCall { copier, kind, key, token, .. } = call;
        let now = self.space.clock.now();
        let hash = self.space.directory.hash(key);
        let mut shard = self.space.directory.lock(hash);
        if shard.copy_outcome(copier) == Some(CopyOutcome::Made) {
            return Ok(());
        }
        let slot = self.find_copy(&mut shard, hash, call, now)?;
        let _held = self.space.tenants.hold(shard[slot].tenant(), shard[slot].charged_bytes());
        let Some(copying) = shard.take_copy(slot) else { return Err(no_task()) };
        shard.record_copy_end(copier, CopyOutcome::Made);
        if let (false, Some(hot), Some(held)) = (token.is_nil(), &self.space.hot, copying.targets.first()) {
            hot.record_made(token, (held.id, held.extent.len), now);
        }
        if copying.is_shared {
            // Another task of the client may still write these bytes.
            let until = copying.started.after(self.space.options.put_release);
            copying.targets.iter().for_each(|held| held.segment.hold(held.extent, until));
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

    /// Takes back the space of a copy or move that failed. A numbered copy whose start arrives
    /// afterwards does not begin.
    pub(crate) fn revoke_copy(&self, call: CopyCall<'_>) -> Result<()> {
        let CopyCall { copier, key, token, .. } = call;
        let now = self.space.clock.now();
        let hash = self.space.directory.hash(key);
        let mut shard = self.space.directory.lock(hash);
        if shard.copy_outcome(copier) == Some(CopyOutcome::Revoked) {
            return Ok(());
        }
        let found = self.find_copy(&mut shard, hash, call, now);
        shard.record_copy_end(copier, CopyOutcome::Revoked);
        let slot = found?;
        if let (false, Some(hot)) = (token.is_nil(), &self.space.hot) {
            hot.record_failed(&shard[slot].key, token, now);
        }
        if let Some(copying) = shard.take_copy(slot) {
            // Bytes that the client gave up on may still arrive.
            let abandoned = copying.started.after(self.space.options.put_release);
            let rest = if copying.is_shared { abandoned } else { now.after(self.space.options.revoke_rest) };
            copying.quarantine(self.space.quarantine_end(rest.min(abandoned)), now);
        }
        Ok(())
    }

    /// Returns the object of the copy that a call is about.
    fn find_copy(
        &self,
        shard: &mut Shard<A, E>,
        hash: u64,
        call: CopyCall<'_>,
        now: Moment,
    ) -> Result<SlotId> {
        let CopyCall { copier, kind, key, token, receipt } = call;
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune(slot, now, self.space.options.put_release);
        let object = &shard[slot];
        if object.value().is_none() && object.write().is_none() {
            shard.remove_if_empty(slot, MissCause::OwnerLost);
            return Err(not_found());
        }
        if object.lost_copy().is_some_and(|copying| copying.copier == copier && copying.kind == kind) {
            shard.take_copy(slot);
            return Err(Error::new(
                ErrorCode::ReplicaIsGone,
                "cannot end copy: its client, its source or every target segment was lost meanwhile",
            ));
        }
        let copying = object.copying().ok_or_else(no_task)?;
        if copying.copier.client != copier.client {
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
        if is_planted("copy-end-any") {
            return Ok(slot);
        }
        let is_nil = copying.token.is_nil() && token.is_nil();
        if copying.token != token && !is_nil || copying.copier.attempt != copier.attempt {
            let text = format!("another copy of the object is in progress. key={}", key.escape_ascii());
            return Err(Error::new(ErrorCode::InvalidVersion, text));
        }
        // A client without numbers sent this request about an earlier copy.
        if receipt.is_some_and(|receipt| receipt < copying.begun) {
            return Err(no_task());
        }
        Ok(slot)
    }
}

/// Returns the plan of the copy in progress if this start of it is repeated.
fn repeated<A: SegmentAllocator>(
    object: &mut Object<A>,
    call: CopyCall<'_>,
    source: &str,
    targets: &[&str],
) -> Option<CopyPlan> {
    let CopyCall { copier, kind, token, .. } = call;
    let copying = object.copying()?;
    if copying.copier != copier || copying.kind != kind || copying.token != token {
        return None;
    }
    let value = object.value()?;
    let plan = plan_of(copying, value)?;
    if copier.attempt != 0 {
        return Some(plan);
    }
    let reads = |held: &Allocation<A>| held.id == copying.source && held.segment.info.name == source;
    let is_same = value.replicas.iter().any(reads)
        && copying.requested_targets.iter().map(|name| &**name).eq(targets.iter().copied());
    if !is_same {
        return None;
    }
    // Without a number, the call may also be that of a second task.
    object.share_copy();
    Some(plan)
}

/// Describes a copy of `value` to its client.
fn plan_of<A: SegmentAllocator>(copying: &Copying<A>, value: &Value<A>) -> Option<CopyPlan> {
    let from = value.replicas.iter().find(|held| held.id == copying.source)?;
    let targets = copying.targets.iter();
    Some(CopyPlan {
        source: from.describe(value.len, ReplicaStatus::Complete),
        targets: targets.map(|held| held.describe(value.len, ReplicaStatus::Processing)).collect(),
    })
}

#[cold]
fn no_replica() -> Error {
    Error::new(ErrorCode::ReplicaNotFound, "cannot start copy: no complete replica in the source segment")
}

#[cold]
fn no_task() -> Error {
    ErrorCode::ObjectNoReplicationTask.into()
}
