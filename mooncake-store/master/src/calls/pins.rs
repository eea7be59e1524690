//! Soft pins of stored objects.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::{Error, Result};

use super::lookup::{is_readable, unreadable};
use super::master::Master;
use crate::directory::object::not_found;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Pins a stored object softly for `ttl` from now on, in place of an earlier soft pin, or ends
    /// its soft pin. The call grants no lease and counts as no read.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a longer time than
    /// [`max_soft_pin_ttl`](crate::MasterOptions::max_soft_pin_ttl); `OBJECT_NOT_FOUND`;
    /// `REPLICA_IS_NOT_READY` while the object cannot be read.
    pub fn soft_pin(&self, key: &[u8], ttl: Option<Duration>) -> Result<()> {
        let longest = self.space().options.max_soft_pin_ttl;
        if let Some(ttl) = ttl.filter(|ttl| *ttl > longest) {
            return Err(Error::invalid(format!(
                "cannot pin object: the time exceeds max_kv_soft_pin_ttl. \
                 ttl_ms={} longest_ms={}; choose a shorter one",
                ttl.as_millis(),
                longest.as_millis()
            )));
        }
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        if !is_readable(&shard, slot, now) {
            return Err(unreadable(&shard[slot]));
        }
        let until = ttl.map(|ttl| now.after(ttl)).filter(|until| *until > now).unwrap_or_default();
        shard.set_soft_pin(slot, until);
        // The owners keep the pin for the next master.
        shard.notify_ledgers(slot);
        Ok(())
    }
}
