//! What an object has to do with disks.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::ids::ClientId;

use super::super::directory::Object;
use super::file::Pending;
use super::{DiskCopy, OnDisk, Owner};

/// What an object has to do with disks.
#[derive(Default)]
pub(crate) struct Tier {
    pub(super) on_disk: Option<OnDisk>,
    /// What a restarted owner has found, before the one it was is given up.
    heir: Option<Box<DiskCopy>>,
    /// Its file, which is being written.
    pub(super) pending: Option<Pending>,
    /// Who is to write it to disk.
    offload: Option<Arc<Owner>>,
    /// It could not be written.
    gave_up: bool,
}

impl<A: SegmentAllocator> Object<A> {
    pub(crate) fn disk(&self) -> Option<&OnDisk> {
        self.tier.as_ref()?.on_disk.as_ref()
    }

    pub(crate) fn offload(&self) -> Option<&Arc<Owner>> {
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

    /// An owner tells of a copy it found while others have the object on their disks, and nobody else in memory. Whether it may count once they are given
    /// up: an owner that was killed and is back before it was missed must not lose all it has.
    pub(super) fn stand_in_line(&mut self, copy: DiskCopy) -> bool {
        let elsewhere = self.is_elsewhere();
        let Some(Tier { on_disk: Some(disk), heir, .. }) = self.tier.as_deref_mut() else { return false };
        if elsewhere || copy.len != disk.len || !disk.live().all(|before| copy.follows(before)) {
            return false;
        }
        *heir = Some(Box::new(copy));
        true
    }

    /// Whether somebody has it, or is writing it, who has it on no disk.
    fn is_elsewhere(&self) -> bool {
        let on_disk =
            |client| self.disk().is_some_and(|disk| disk.copies.iter().any(|copy| copy.is_of(client)));
        self.write().is_some()
            || self.value().is_some_and(|value| value.live().any(|held| !on_disk(held.segment.client)))
    }

    /// Keeps the disk copies of these clients, as far as they live.
    pub(crate) fn retain_disk(&mut self, keep: impl Fn(ClientId) -> bool) {
        let Some(tier) = &self.tier else { return };
        let elsewhere = tier.heir.is_some() && self.is_elsewhere();
        let Some(tier) = &mut self.tier else { return };
        if let Some(disk) = &mut tier.on_disk {
            let inherits = |heir: &DiskCopy| {
                !elsewhere
                    && heir.is_live()
                    && disk.copies.iter().all(|copy| !copy.is_live() && heir.follows(copy))
            };
            let next = tier.heir.as_deref().is_some_and(inherits);
            if !disk.retain(keep) {
                match tier.heir.take() {
                    Some(heir) if next => disk.copies.push(*heir),
                    heir => {
                        heir.iter().for_each(|heir| heir.refuse(&self.key));
                        tier.on_disk = None;
                    }
                }
            }
        }
        if tier.offload.as_ref().is_some_and(|owner| !owner.is_alive()) {
            tier.offload = None;
        }
        if tier.on_disk.is_none() && tier.pending.is_none() && tier.offload.is_none() && !tier.gave_up {
            self.tier = None;
        }
    }

    /// Its value is replaced or removed: nothing of it on disks counts any more.
    pub(crate) fn leave_disks(&mut self) {
        let Some(tier) = self.tier.take() else { return };
        let key = self.key.as_bytes();
        if let Some(owner) = &tier.offload {
            owner.forget(key);
        }
        for owner in tier.on_disk.iter().flat_map(OnDisk::live_owners) {
            owner.forget(key);
            owner.state.lock().drop_copy(&self.key);
        }
        if let Some(heir) = tier.heir {
            heir.refuse(&self.key);
        }
    }
}
