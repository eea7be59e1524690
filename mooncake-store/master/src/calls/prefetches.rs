//! Prefetches: promotions that the owner of a disk reserves before the objects are read.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, ErrorCode, Result};

use super::master::Master;
use crate::directory::object::not_found;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Reserves the promotion of an object whose only readable replica is on the disk of a client.
    /// The client then promotes the object, and the object gets a lease. The reservation ends by
    /// itself after a minute.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the client has no disk here, or its heartbeats are
    /// overdue; `OBJECT_NOT_FOUND`; `PROMOTION_ALREADY_EXISTS` for an object that is in memory or
    /// returns there already; `REPLICA_IS_NOT_READY` for one that is being written or is on no
    /// disk; `INVALID_PARAMS` for one on the disk of another client; `KEYS_ULTRA_LIMIT` if too many
    /// promotions wait.
    pub fn register_prefetch(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let owner = self.space().disks.get(client).filter(|owner| owner.is_readable());
        let owner = owner.ok_or_else(|| {
            let text = format!("cannot prefetch object: the client serves no disk. client={client}");
            Error::new(ErrorCode::UnavailableInCurrentStatus, text)
        })?;
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune(slot, now, self.space().options.put_release);
        if shard.end_of_lifetime(slot, now).is_some() {
            return Err(not_found());
        }
        let object = &shard[slot];
        let not_ready = |text| Err(Error::new(ErrorCode::ReplicaIsNotReady, text));
        match object.write() {
            _ if object.value().is_some() => return Err(ErrorCode::PromotionAlreadyExists.into()),
            Some(write) if write.promotes => return Err(ErrorCode::PromotionAlreadyExists.into()),
            Some(_) => return not_ready("cannot prefetch object: a write is in progress"),
            None => {}
        }
        match object.disk() {
            Some(disk) if disk.has_owner(client) => {}
            Some(disk) if disk.first_owner().is_some() => {
                let text = format!("cannot prefetch object: another client has it on disk. client={client}");
                return Err(Error::invalid(text));
            }
            _ => return not_ready("cannot prefetch object: no client has it on disk"),
        }
        let promotion = self.space().options.disks.as_ref().and_then(|disks| disks.promotion);
        let limit = promotion.unwrap_or_default().queue_limit;
        owner.reserve_promotion(&object.key, limit, now)
    }
}
