//! Work for the owner of a disk, numbered: it is sent again until the owner acknowledges it, so
//! that a lost response loses nothing.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_protocol::wire::DiskWork;

use super::master::Master;
use crate::model::disk::{AssignedWork, not_offered};

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Records the heartbeat of a disk whose owner numbers its work. Returns the work of the owner.
    /// Work that is not done is returned again.
    ///
    /// With `begin`, the client asks for the first time, before it announces the objects that it
    /// found. An object that arrived on the disk later, and only such an object, may be one that is
    /// to be dropped.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has offered no disk, or has expired: it offers the disk
    /// again and reports its objects.
    pub fn disk_work(&self, client: ClientId, begin: bool, done: u64) -> Result<DiskWork> {
        let tenants = self.space().tenants.are_on();
        let mut owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        if begin {
            let mut state = owner.state.lock();
            (state.seen, state.fetches_work) = (self.space().clock.now(), true);
            return Ok(DiskWork { tenants, ..DiskWork::default() });
        }
        let over = owner.state.lock().assigned.number == done;
        if over && self.clear_disk(&owner, true) {
            // The owner is replaced by one whose disk is taken as empty.
            owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        }
        let mut state = owner.state.lock();
        let (now, write_out) = (self.space().clock.now(), self.space().options.put_release);
        (state.enabled, state.announcing, state.seen) = (true, false, now);
        match state.assigned.number == done {
            true => state.assign_next(now, write_out),
            false => state.assign_again(now, write_out),
        }
        let AssignedWork { number, clear, dropped, write } = &state.assigned;
        let dropped = dropped.iter().map(|key| self.jobs.offload_item(key, 0)).collect();
        let write = write.iter().map(|(key, len)| self.jobs.offload_item(key, *len)).collect();
        Ok(DiskWork { number: *number, tenants, clear: *clear, dropped, write })
    }
}
