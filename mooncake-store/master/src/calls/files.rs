//! Copies of objects in files of a file system that clients share (`--root_fs_dir`).
//!
//! The writer of an object also writes its file, and reports it when it is complete. Folders and
//! the beginning of a file name are those of Mooncake C++. The number of the copy follows, so that
//! a file never belongs to two values. Neither a late writer nor a similar key can bring bytes
//! under a name that was sent to a reader.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, SlotId};
use mooncake_protocol::wire::StorageConfig;

use super::master::Master;
use crate::directory::object::not_found;
use crate::directory::{Object, Shard};
use crate::model::disk_replicas::{DiskLocation, FileGrant, PendingFile};
use crate::model::misses::MissCause;
use crate::model::value::Writer;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the configuration of the files; the folder is empty if there are none.
    pub fn storage(&self) -> StorageConfig {
        let files = self.space().options.files.as_ref();
        StorageConfig {
            fs_dir: files.map(|files| files.dir.clone()).unwrap_or_default(),
            evict: files.is_none_or(|files| files.evict),
            quota: files.map_or(0, |files| files.quota),
        }
    }

    /// Returns a file for a write of that key, if this master uses files.
    pub(crate) fn grant_file(&self, key: &[u8]) -> Option<Box<FileGrant>> {
        let files = self.space().options.files.as_ref()?;
        let id = self.space().new_replica();
        Some(Box::new(FileGrant::new(&files.dir, key, id)))
    }

    /// Waits for the report of the file of a value that is readable now. If the report came first,
    /// the file counts at once.
    pub(crate) fn expect_file(&self, object: &mut Object<A>, grant: FileGrant, writer: Writer, now: Moment) {
        let Some((len, checksum)) = object.value().map(|value| (value.len, value.checksum)) else { return };
        let written = grant.written;
        let pending = PendingFile { grant, writer, len, checksum, since: now };
        if written {
            object.store_file(pending, &self.space().disks.files);
        } else {
            object.tier.get_or_insert_default().pending = Some(pending);
        }
    }

    /// Records that a writer has completed its file. Returns whether the file was expected or is
    /// known.
    pub(crate) fn end_file(&self, object: &mut Object<A>, writer: Writer) -> bool {
        if let Some(grant) = object.file_of_write(writer) {
            grant.written = true;
            return true;
        }
        let pending = object.tier.as_mut().and_then(|tier| tier.pending.take_if(|p| p.writer.is(writer)));
        if let Some(pending) = pending {
            object.store_file(pending, &self.space().disks.files);
            return true;
        }
        let mut copies = object.disk().into_iter().flat_map(|disk| &disk.copies);
        copies.any(|copy| matches!(&copy.location, DiskLocation::File(file) if file.writer.is(writer)))
    }

    /// Records that a writer gave up its file. Returns whether there was one.
    pub(crate) fn revoke_file(&self, shard: &mut Shard<A, E>, slot: SlotId, writer: Writer) -> bool {
        if shard[slot].take_file_of_write(writer) {
            return true;
        }
        let dropped = shard[slot].drop_file(Some(writer));
        shard.remove_if_empty(slot, MissCause::PutFailed);
        dropped
    }

    /// Records that the file of an object is gone or unreadable.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub fn dropped_file(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        if shard[slot].drop_file(None) {
            tracing::debug!(%client, key = %key.escape_ascii(), "file replica dropped");
        }
        shard.remove_if_empty(slot, MissCause::Evicted);
        drop(shard);
        self.space().eviction.end_backoff();
        Ok(())
    }
}
