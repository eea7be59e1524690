//! What an object has to do with disks.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::ids::ClientId;

use super::super::directory::Object;
use super::file::Pending;
use super::{DiskCopy, OnDisk, Owner};

/// What an object has to do with disks.
#[derive(Default)]
pub(in crate::master) struct Tier {
    pub(super) on_disk: Option<OnDisk>,
    /// Its file, which is being written.
    pub(super) pending: Option<Pending>,
    /// Who is to write it to disk.
    offload: Option<Arc<Owner>>,
    /// It could not be written.
    gave_up: bool,
}

impl<A: SegmentAllocator> Object<A> {
    pub(in crate::master) fn disk(&self) -> Option<&OnDisk> {
        self.tier.as_ref()?.on_disk.as_ref()
    }

    pub(in crate::master) fn offload(&self) -> Option<&Arc<Owner>> {
        self.tier.as_ref()?.offload.as_ref()
    }

    pub(super) fn gave_up_offload(&self) -> bool {
        self.tier.as_ref().is_some_and(|tier| tier.gave_up)
    }

    pub(super) fn begin_offload(&mut self, owner: Arc<Owner>) {
        self.tier.get_or_insert_default().offload = Some(owner);
    }

    pub(super) fn end_offload(&mut self) {
        if let Some(tier) = &mut self.tier {
            tier.offload = None;
        }
    }

    pub(super) fn give_up_offload(&mut self) {
        self.tier.get_or_insert_default().gave_up = true;
    }

    /// Whether somebody has it, or is writing it.
    pub(super) fn is_known(&self) -> bool {
        self.value().is_some() || self.write().is_some() || self.disk().is_some_and(OnDisk::is_live)
    }

    pub(super) fn add_disk(&mut self, len: u64, checksum: Option<u64>, copy: DiskCopy) {
        let tier = self.tier.get_or_insert_default();
        let owner = copy.owner().map(|owner| owner.client);
        let others = tier.on_disk.as_mut().is_some_and(|disk| disk.retain(|other| Some(other) != owner));
        match &mut tier.on_disk {
            Some(disk) if others => disk.copies.push(copy),
            on_disk => {
                let copies = std::iter::once(copy).collect();
                *on_disk = Some(OnDisk { len, checksum, copies });
            }
        }
    }

    /// Keeps the disk copies of these clients, as far as they live.
    pub(in crate::master) fn retain_disk(&mut self, keep: impl Fn(ClientId) -> bool) {
        let Some(tier) = &mut self.tier else { return };
        if tier.on_disk.as_mut().is_some_and(|disk| !disk.retain(keep)) {
            tier.on_disk = None;
        }
        if tier.offload.as_ref().is_some_and(|owner| !owner.is_alive()) {
            tier.offload = None;
        }
        if tier.on_disk.is_none() && tier.pending.is_none() && tier.offload.is_none() && !tier.gave_up {
            self.tier = None;
        }
    }

    /// Its value is replaced or removed: nothing of it on disks counts any more.
    pub(in crate::master) fn leave_disks(&mut self) {
        let Some(tier) = self.tier.take() else { return };
        let key = self.key.as_bytes();
        if let Some(owner) = &tier.offload {
            owner.forget(key);
        }
        for owner in tier.on_disk.iter().flat_map(OnDisk::live_owners) {
            owner.forget(key);
            owner.state.lock().drop_copy(&self.key);
        }
    }
}
