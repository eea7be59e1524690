//! Disk replicas of an object, its file, and its offload in progress.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::ids::ClientId;

use super::object::Object;
use crate::model::disk::DiskOwner;
use crate::model::disk_replicas::{
    DiskLocation, DiskReplica, DiskReplicas, DiskTier, FileTotals, PendingFile, StoredFile,
};
use crate::model::value::{Stamp, Writer};
use crate::sync::atomic::Ordering::Relaxed;

/// Time for which an object stays in memory until its writer reports the file.
const FILE_PATIENCE: Duration = Duration::from_secs(10);

impl<A: SegmentAllocator> Object<A> {
    /// Returns the owner of the disk that is to write the object.
    pub(crate) fn offload(&self) -> Option<&Arc<DiskOwner>> {
        self.tier.as_ref()?.offload.as_ref()
    }

    /// Returns the time until which the owner of a disk may read the value that it was asked to
    /// write there.
    pub(crate) fn offloaded_until(&self) -> Moment {
        self.offload().map_or(Moment(0), |owner| owner.reads_until(self.key.as_bytes()))
    }

    /// Returns whether the object could not be written to disk.
    pub(crate) fn has_failed_offload(&self) -> bool {
        self.tier.as_ref().is_some_and(|tier| tier.offload_failed)
    }

    /// Records the owner of the disk that is to write the object.
    pub(crate) fn begin_offload(&mut self, owner: Arc<DiskOwner>) {
        self.tier.get_or_insert_default().offload = Some(owner);
    }

    /// Records that no disk is to write the object any more.
    pub(crate) fn end_offload(&mut self) {
        if let Some(tier) = &mut self.tier {
            tier.offload = None;
        }
    }

    /// Records that the object could not be written to disk.
    pub(crate) fn fail_offload(&mut self) {
        self.tier.get_or_insert_default().offload_failed = true;
    }

    /// Returns whether any client holds the object or is writing it.
    pub(crate) fn has_any_holder(&self) -> bool {
        self.value().is_some() || self.write().is_some() || self.disk().is_some_and(DiskReplicas::is_live)
    }

    /// Adds a disk replica, in place of an earlier one of the same owner. `stamp` is that of its
    /// value.
    pub(crate) fn add_disk_replica(
        &mut self,
        len: u64,
        checksum: Option<u64>,
        stamp: Stamp,
        copy: DiskReplica,
    ) {
        let tier = self.tier.get_or_insert_default();
        let owner = copy.owner().map(|owner| owner.client);
        let others = tier.on_disk.as_mut().is_some_and(|disk| disk.retain(|other| Some(other) != owner));
        match &mut tier.on_disk {
            Some(disk) if others => disk.copies.push(copy),
            on_disk => {
                let copies = std::iter::once(copy).collect();
                *on_disk = Some(DiskReplicas { len, checksum, stamp, copies });
            }
        }
    }

    /// Records a replica that a restarted owner found while others are known on disks and none in
    /// memory. Returns whether the replica may count once the others are gone: an owner that was
    /// killed and is back before it was missed must not lose everything.
    pub(crate) fn add_successor(&mut self, copy: DiskReplica) -> bool {
        let elsewhere = self.has_other_holder();
        let Some(DiskTier { on_disk: Some(disk), successor, .. }) = self.tier.as_deref_mut() else {
            return false;
        };
        if elsewhere || copy.len != disk.len || !disk.live().all(|before| copy.succeeds(before)) {
            return false;
        }
        *successor = Some(Box::new(copy));
        true
    }

    /// Returns whether a client that has the object on no disk holds it or is writing it.
    fn has_other_holder(&self) -> bool {
        let on_disk =
            |client| self.disk().is_some_and(|disk| disk.copies.iter().any(|copy| copy.is_of(client)));
        self.write().is_some()
            || self.value().is_some_and(|value| value.live().any(|held| !on_disk(held.segment.client)))
    }

    /// Keeps the disk replicas of the clients that `keep` accepts and that are alive.
    pub(crate) fn retain_disk_replicas(&mut self, keep: impl Fn(ClientId) -> bool) {
        let Some(tier) = &self.tier else { return };
        let elsewhere = tier.successor.is_some() && self.has_other_holder();
        let Some(tier) = &mut self.tier else { return };
        if let Some(disk) = &mut tier.on_disk {
            let inherits = |successor: &DiskReplica| {
                !elsewhere
                    && successor.is_live()
                    && disk.copies.iter().all(|copy| !copy.is_live() && successor.succeeds(copy))
            };
            let next = tier.successor.as_deref().is_some_and(inherits);
            if !disk.retain(keep) {
                match tier.successor.take() {
                    Some(successor) if next => disk.copies.push(*successor),
                    successor => {
                        successor.iter().for_each(|successor| successor.reject(&self.key));
                        tier.on_disk = None;
                    }
                }
            }
        }
        if tier.offload.as_ref().is_some_and(|owner| !owner.is_alive()) {
            tier.offload = None;
        }
        if tier.on_disk.is_none() && tier.pending.is_none() && tier.offload.is_none() && !tier.offload_failed
        {
            self.tier = None;
        }
    }

    /// Drops all disk replicas, because the value is replaced or removed.
    pub(crate) fn drop_disk_replicas(&mut self) {
        let Some(tier) = self.tier.take() else { return };
        let key = self.key.as_bytes();
        if let Some(owner) = &tier.offload {
            owner.cancel(key);
        }
        for owner in tier.on_disk.iter().flat_map(DiskReplicas::live_owners) {
            owner.cancel(key);
            owner.state.lock().mark_dropped(&self.key);
        }
        if let Some(successor) = tier.successor {
            successor.reject(&self.key);
        }
    }

    /// Returns whether the writer is still expected to report the file.
    pub(crate) fn awaits_file(&self, now: Moment) -> bool {
        let pending = self.tier.as_ref().and_then(|tier| tier.pending.as_ref());
        pending.is_some_and(|pending| now < pending.since.after(FILE_PATIENCE))
    }

    /// Adds the file of a value as a replica.
    pub(crate) fn store_file(&mut self, pending: PendingFile, files: &Arc<FileTotals>) {
        let PendingFile { grant, writer, len, checksum, .. } = pending;
        files.objects.fetch_add(1, Relaxed);
        files.used.fetch_add(len, Relaxed);
        let file = StoredFile { path: grant.path, writer, files: files.clone() };
        let stamp = self.value().map_or(Stamp::UNKNOWN, |value| value.stamp);
        self.add_disk_replica(
            len,
            checksum,
            stamp,
            DiskReplica { id: grant.id, len, version: None, location: DiskLocation::File(file) },
        );
    }

    /// Drops the file if `writer` wrote it; `None` stands for any writer.
    pub(crate) fn drop_file(&mut self, writer: Option<Writer>) -> bool {
        let Some(tier) = &mut self.tier else { return false };
        let is = |of: Writer| writer.is_none_or(|writer| of.is(writer));
        let pending = tier.pending.take_if(|pending| is(pending.writer)).is_some();
        let Some(disk) = &mut tier.on_disk else { return pending };
        let before = disk.copies.len();
        disk.copies.retain(|copy| !matches!(&copy.location, DiskLocation::File(file) if is(file.writer)));
        let dropped = disk.copies.len() < before;
        self.retain_disk_replicas(|_| true);
        dropped || pending
    }
}
