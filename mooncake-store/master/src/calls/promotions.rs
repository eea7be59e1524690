//! Promotions: calls of a client that reads objects back from its disk into memory.

use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::{MergeableOrder, Place};
use mooncake_core::ids::{ClientId, SlotId};
use mooncake_core::replica::{Replica, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::OffloadItem;

use super::master::Master;
use crate::directory::object::not_found;
use crate::directory::{Object, Replicas, Shard, Value, Write};
use crate::model::disk::{count, not_offered};
use crate::model::misses::MissCause;
use crate::model::value::Stamp;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the objects that a client is to promote. They are returned once.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has offered no disk.
    pub fn to_promote(&self, client: ClientId) -> Result<Vec<OffloadItem>> {
        let owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        let now = self.space().clock.now();
        self.space().disks.mark_seen(client, now);
        let Some(options) = self.space().options.disks.as_ref().and_then(|disks| disks.promotion) else {
            return Ok(Vec::new());
        };
        let mut items = Vec::new();
        for key in owner.next_promotions(options.per_heartbeat, now) {
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

    /// Allocates space for an object that its owner promotes.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY` if the client was not asked to, or not any more;
    /// `INVALID_PARAMS` for another length; `NO_AVAILABLE_HANDLE`, because a promotion evicts at
    /// most objects of less value.
    pub fn promotion_start(
        &self,
        client: ClientId,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<Replica> {
        let value = match self.place_promotion(client, key, len, preferred)? {
            PromotionStart::Placed(replica) => return Ok(replica),
            PromotionStart::NoSpace { value } => value.ok_or_else(|| no_space(len))?,
        };
        let now = self.space().clock.now();
        if self.space().free_space_for_value(len, value, now)
            && let PromotionStart::Placed(replica) = self.place_promotion(client, key, len, preferred)?
        {
            return Ok(replica);
        }
        Err(no_space(len))
    }

    /// Starts a promotion in free space.
    fn place_promotion(
        &self,
        client: ClientId,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<PromotionStart> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune(slot, now, self.space().options.put_release);
        let asked = self.space().disks.get(client).is_some_and(|owner| owner.is_promoting(key));
        let object = &shard[slot];
        let disk = object.disk().filter(|_| object.value().is_none() && object.write().is_none());
        let Some(disk) = disk.filter(|_| asked) else { return Err(nothing_promoted()) };
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
        let Some(space) = self.space().place(len, hash, &config, now) else {
            drop(charged);
            return Ok(PromotionStart::NoSpace {
                value: self.space().directory.value_in_memory(&mut shard, slot),
            });
        };
        let mut write = Write::new(client.into(), now, len, space);
        write.promotes = true;
        let replica = write.describe().into_iter().next().ok_or_else(|| no_space(len))?;
        shard.put_write(slot, write, charged.spend());
        Ok(PromotionStart::Placed(replica))
    }

    /// Ends a promotion: the object is readable from memory again, and stays on disk.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY` if this client has no promotion of it in
    /// progress.
    pub fn promoted(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        let checksum = shard[slot].disk().and_then(|disk| disk.checksum);
        let (asked, write) = self.take_promotion(&mut shard, slot, client);
        let write = write.ok_or_else(|| {
            if asked {
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
        count(&self.space().disks.promotions.completed);
        self.space().disks.promotions.bytes.fetch_add(write.len, Relaxed);
        let use_number = self.space().directory.next_use_number();
        let value = Value {
            len: write.len,
            checksum,
            writer: write.writer,
            superseded: false,
            stamp: Stamp { epoch: self.space().epoch, number: use_number },
            replicas: live,
        };
        self.space().directory.put_value(&mut shard, slot, value, &Place::numbered(use_number));
        drop(shard);
        self.space().eviction.end_backoff();
        Ok(())
    }

    /// Ends a promotion that failed.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub fn promotion_failed(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        let (asked, write) = self.take_promotion(&mut shard, slot, client);
        if asked {
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

    /// Ends a promotion. Returns whether the client was asked for it, and its write.
    fn take_promotion(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        client: ClientId,
    ) -> (bool, Option<Write<A>>) {
        let asked = self
            .space()
            .disks
            .get(client)
            .is_some_and(|owner| owner.end_promotion(shard[slot].key.as_bytes()));
        let mine = |write: &Write<A>| write.promotes && write.writer.client == client;
        let write = if shard[slot].write().is_some_and(mine) { shard.take_write(slot) } else { None };
        (asked, write)
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
