//! Promotions: calls of a client that reads objects back from its disk into memory.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, SlotId};
use mooncake_core::replica::{Replica, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::OffloadItem;

use super::master::Master;
use crate::directory::object::not_found;
use crate::directory::{CopyOutcome, Object, Replicas, Shard, Value, Write};
use crate::model::disk::{PromotionCause, count, not_offered};
use crate::model::misses::MissCause;
use crate::model::value::{Stamp, Writer};
use crate::sync::atomic::Ordering::Relaxed;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the objects that a client is to promote. They are returned once.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has offered no disk.
    pub fn to_promote(&self, client: ClientId) -> Result<Vec<OffloadItem>> {
        let owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        let now = self.space().clock.now();
        self.space().disks.mark_seen(client, now);
        let options = self.space().options.disks.as_ref().and_then(|disks| disks.promotion);
        let mut items = Vec::new();
        // Without promotions by reads, prefetches that the owner never ended expire here.
        let most = options.map_or(0, |options| options.per_heartbeat);
        for key in owner.next_promotions(most, now) {
            let hash = self.space().directory.hash(key.as_bytes());
            let shard = self.space().directory.lock(hash);
            let object = shard.find(hash, key.as_bytes()).map(|slot| &shard[slot]);
            match object.and_then(Object::disk) {
                Some(disk) => items.push(self.jobs.offload_item(&key, disk.len)),
                None => {
                    owner.end_promotion(key.as_bytes());
                    count(&self.space().disks.promotions.cancelled);
                }
            }
        }
        Ok(items)
    }

    /// Allocates space for an object that its owner promotes. A repeated start with the same number
    /// returns the same space.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY` if the client was not asked to, or not any more;
    /// `INVALID_PARAMS` for another length; `NO_AVAILABLE_HANDLE`, because a promotion evicts at
    /// most objects of less value; `INVALID_VERSION` (a promotion with this number has ended).
    pub fn promotion_start(
        &self,
        promoter: impl Into<Writer>,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<Replica> {
        let promoter = promoter.into();
        let value = match self.place_promotion(promoter, key, len, preferred)? {
            PromotionStart::Placed(replica) => return Ok(replica),
            PromotionStart::NoSpace { value } => value.ok_or_else(|| no_space(len))?,
        };
        let now = self.space().clock.now();
        if self.space().free_space_for_value(len, value, now)
            && let PromotionStart::Placed(replica) = self.place_promotion(promoter, key, len, preferred)?
        {
            return Ok(replica);
        }
        Err(no_space(len))
    }

    /// Starts a promotion in free space.
    fn place_promotion(
        &self,
        promoter: Writer,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<PromotionStart> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        if shard.copy_outcome(promoter).is_some() {
            return Err(Error::new(
                ErrorCode::InvalidVersion,
                "cannot start promotion: it has ended already",
            ));
        }
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune(slot, now, self.space().options.put_release);
        let is_requested =
            self.space().disks.get(promoter.client).is_some_and(|owner| owner.is_promoting(key));
        let object = &shard[slot];
        let repeats =
            |write: &&Write<A>| write.promotes && write.len == len && write.writer.repeats(promoter);
        let again = object.write().filter(repeats).map(Write::describe);
        if let Some(replica) = again.and_then(|replicas| replicas.into_iter().next()) {
            return Ok(PromotionStart::Placed(replica));
        }
        let disk = object.disk().filter(|_| object.value().is_none() && object.write().is_none());
        let Some(disk) = disk.filter(|_| is_requested) else { return Err(nothing_promoted()) };
        if disk.len != len {
            return Err(Error::invalid(format!(
                "cannot promote object: length differs. expected={} len={len}",
                disk.len
            )));
        }
        let config = ReplicateConfig {
            preferred_segments: preferred.iter().map(|name| (*name).to_owned()).collect(),
            ..ReplicateConfig::default()
        };
        let charged = self.space().tenants.reserve(object.tenant(), len, 0).map_err(|_| no_space(len))?;
        let grantee = promoter.grantee(object.tenant());
        let Ok(space) = self.space().place(len, hash, grantee, &config, now) else {
            drop(charged);
            return Ok(PromotionStart::NoSpace {
                value: self.space().directory.value_in_memory(&mut shard, slot),
            });
        };
        let mut write = Write::new(promoter, now, len, space);
        (write.promotes, write.begun) = (true, self.space().next_logical_time());
        let replica = write.describe().into_iter().next().ok_or_else(|| no_space(len))?;
        shard.put_write(slot, write, charged.spend());
        Ok(PromotionStart::Placed(replica))
    }

    /// Ends a promotion: the object is readable from memory again, and stays on disk. Repeating the
    /// call of a numbered promotion has no effect.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY` if this client has no promotion of it in
    /// progress.
    pub fn promoted(&self, promoter: impl Into<Writer>, key: &[u8]) -> Result<()> {
        self.promoted_at(promoter.into(), key, None)
    }

    /// Ends a promotion like [`Master::promoted`]. The server had read the request at the logical
    /// time `receipt`; a promotion that began later is another one.
    pub(super) fn promoted_at(&self, promoter: Writer, key: &[u8], receipt: Option<u64>) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        if shard.copy_outcome(promoter) == Some(CopyOutcome::Made) {
            return Ok(());
        }
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        let on_disk = shard[slot].disk().map(|disk| (disk.checksum, disk.stamp));
        let (checksum, stamp) = on_disk.unwrap_or((None, Stamp::UNKNOWN));
        let (cause, write) = self.take_promotion(&mut shard, slot, promoter, receipt);
        let write = write.ok_or_else(|| {
            if cause.is_some() {
                count(&self.space().disks.promotions.failed);
            }
            nothing_promoted()
        })?;
        let live: Replicas<A> = write.replicas.into_iter().filter(|held| held.segment.is_alive()).collect();
        let late = write.started.after(self.space().options.put_release) <= now;
        if live.is_empty() || late {
            live.into_iter().for_each(|held| held.quarantine(now, now));
            shard.remove_if_empty(slot, MissCause::OwnerLost);
            count(&self.space().disks.promotions.failed);
            return Err(nothing_promoted());
        }
        shard.record_copy_end(promoter, CopyOutcome::Made);
        count(&self.space().disks.promotions.completed);
        self.space().disks.promotions.bytes.fetch_add(write.len, Relaxed);
        let value = Value {
            len: write.len,
            checksum,
            writer: write.writer,
            superseded: false,
            stamp: self.stamp_of_promotion(stamp),
            replicas: live,
        };
        self.space().announcements.returned.record(&shard[slot].key);
        self.space().directory.put_value(&mut shard, slot, value, &self.space().next_place());
        if cause == Some(PromotionCause::Prefetch) && !is_planted("prefetch-without-lease") {
            shard[slot].grant_lease(self.space().lease_from(now));
        }
        drop(shard);
        self.space().eviction.end_backoff();
        Ok(())
    }

    /// Returns the stamp of a value that is promoted. `on_disk` is its stamp, as far as that is
    /// known. A value of an earlier master stays one: a later value may be announced.
    fn stamp_of_promotion(&self, on_disk: Stamp) -> Stamp {
        let (own, number) = (self.space().epoch, self.space().directory.next_stamp_number());
        match on_disk.epoch {
            epoch if epoch == own || is_planted("promotion-makes-newer") => Stamp { epoch: own, number },
            // Epochs are random, so no other master gives this number.
            Stamp::BEFORE => Stamp { epoch: Stamp::BEFORE, number: own.wrapping_add(number) },
            _ => on_disk,
        }
    }

    /// Ends a promotion that failed.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub fn promotion_failed(&self, promoter: impl Into<Writer>, key: &[u8]) -> Result<()> {
        self.promotion_failed_at(promoter.into(), key, None)
    }

    /// Ends a promotion like [`Master::promotion_failed`], with a time as in
    /// [`promoted_at`](Self::promoted_at).
    pub(super) fn promotion_failed_at(
        &self,
        promoter: Writer,
        key: &[u8],
        receipt: Option<u64>,
    ) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        if shard.copy_outcome(promoter).is_some() {
            return Ok(());
        }
        shard.record_copy_end(promoter, CopyOutcome::Revoked);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        let (cause, write) = self.take_promotion(&mut shard, slot, promoter, receipt);
        if cause.is_some() {
            count(&self.space().disks.promotions.failed);
        }
        if let Some(write) = write {
            // Bytes that the owner gave up on may still arrive.
            let rest = now.after(self.space().options.revoke_rest);
            write.quarantine(self.space().quarantine_end(rest), now);
        }
        shard.remove_if_empty(slot, MissCause::OwnerLost);
        Ok(())
    }

    /// Ends a promotion, unless the call is about an earlier one of the same object. Returns its
    /// cause if it was in progress, and its write.
    fn take_promotion(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        promoter: Writer,
        receipt: Option<u64>,
    ) -> (Option<PromotionCause>, Option<Write<A>>) {
        let client = promoter.client;
        let own = shard[slot].write().filter(|write| write.promotes && write.writer.client == client);
        let is_earlier = |write: &Write<A>| {
            let is_late = receipt.is_some_and(|receipt| receipt < write.begun);
            (write.writer != promoter || is_late) && !is_planted("copy-end-any")
        };
        if own.is_some_and(is_earlier) {
            return (None, None);
        }
        let is_own = own.is_some();
        let owner = self.space().disks.get(client);
        let cause = owner.and_then(|owner| owner.end_promotion(shard[slot].key.as_bytes()));
        (cause, if is_own { shard.take_write(slot) } else { None })
    }
}

/// Outcome of the start of a promotion.
enum PromotionStart {
    Placed(Replica),
    /// No free space. The object would have this value in memory, if victims compare by value.
    NoSpace {
        value: Option<u64>,
    },
}

fn nothing_promoted() -> Error {
    Error::new(ErrorCode::ReplicaIsNotReady, "no promotion of the object is in progress")
}

fn no_space(len: u64) -> Error {
    Error::new(
        ErrorCode::NoAvailableHandle,
        format!("cannot promote object: no segment has enough free space. len={len}"),
    )
}
