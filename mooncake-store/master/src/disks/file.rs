//! Copies of objects in files of a file system that clients share (`--root_fs_dir`): which file is whose.
//!
//! Whoever puts an object writes its file, and says when it is there. Folders are the existing system's, and so is the beginning of a file's name; the
//! number of the copy follows, so that no file is ever of two values: neither a writer that comes late nor a key that looks the same can bring bytes
//! under a name that somebody was told about.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, ReplicaId, SlotId};
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicaStatus};
use mooncake_core::{Error, Result};

use super::super::Master;
use super::super::directory::{Object, Shard};
use super::super::put::{Writer, absent};
use super::{DiskCopy, Place};
use mooncake_protocol::wire::StorageConfig;

/// How long an object is kept in memory for the sake of its file, which its writer has not spoken of.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest part of a key in a name, in bytes. File systems take names of 255.
const NAME: usize = 200;

/// Copies of objects in files of a shared file system. The defaults are the existing system's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// The folder they lie in, by the same path for every client.
    pub dir: String,
    /// Whether clients drop files when there is no more room.
    pub evict: bool,
    /// Bytes that the files may take, 0 for nine tenths of the file system.
    pub quota: u64,
    /// Bytes that are reported as capacity; nothing depends on them.
    pub capacity: u64,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { dir: String::new(), evict: true, quota: 0, capacity: 0 }
    }
}

/// All files there are, in figures.
#[derive(Debug, Default)]
pub(crate) struct Files {
    pub(crate) objects: AtomicU64,
    pub(crate) used: AtomicU64,
}

/// A file that a writer is to write.
pub(crate) struct FileGrant {
    id: ReplicaId,
    path: String,
    /// It has.
    written: bool,
}

impl FileGrant {
    pub(crate) fn describe(&self, size: u64) -> Replica {
        let location = ReplicaLocation::Disk { path: self.path.clone(), size };
        Replica { id: self.id, location, status: ReplicaStatus::Processing }
    }
}

/// A file of a value that can be read already.
pub(super) struct Pending {
    grant: FileGrant,
    writer: Writer,
    len: u64,
    checksum: Option<u64>,
    since: Moment,
}

/// A file that is there.
pub(super) struct Kept {
    pub(super) path: String,
    writer: Writer,
    files: Arc<Files>,
}

impl Kept {
    pub(super) fn leave(&self, len: u64) {
        self.files.objects.fetch_sub(1, Relaxed);
        self.files.used.fetch_sub(len, Relaxed);
    }
}

impl<A: SegmentAllocator> Object<A> {
    /// Whether its writer is still expected to say that the file is there.
    pub(super) fn awaits_file(&self, now: Moment) -> bool {
        let pending = self.tier.as_ref().and_then(|tier| tier.pending.as_ref());
        pending.is_some_and(|pending| now < pending.since.after(PATIENCE))
    }

    fn keep_file(&mut self, pending: Pending, files: &Arc<Files>) {
        let Pending { grant, writer, len, checksum, .. } = pending;
        files.objects.fetch_add(1, Relaxed);
        files.used.fetch_add(len, Relaxed);
        let kept = Kept { path: grant.path, writer, files: files.clone() };
        self.add_disk(len, checksum, DiskCopy { id: grant.id, len, place: Place::File(kept) });
    }

    /// Drops its file if that is of this writer, or of anybody.
    fn drop_file(&mut self, writer: Option<Writer>) -> bool {
        let Some(tier) = &mut self.tier else { return false };
        let is = |of: Writer| writer.is_none_or(|writer| of.is(writer));
        let pending = tier.pending.take_if(|pending| is(pending.writer)).is_some();
        let Some(disk) = &mut tier.on_disk else { return pending };
        let before = disk.copies.len();
        disk.copies.retain(|copy| !matches!(&copy.place, Place::File(kept) if is(kept.writer)));
        let dropped = disk.copies.len() < before;
        self.retain_disk(|_| true);
        dropped || pending
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Where files of objects lie; the folder is empty if there are none.
    pub fn storage(&self) -> StorageConfig {
        let files = self.options.files.as_ref();
        StorageConfig {
            fs_dir: files.map(|files| files.dir.clone()).unwrap_or_default(),
            evict: files.is_none_or(|files| files.evict),
            quota: files.map_or(0, |files| files.quota),
        }
    }

    /// A file for a write of that key, if there are to be any.
    pub(crate) fn grant_file(&self, key: &[u8]) -> Option<Box<FileGrant>> {
        let files = self.options.files.as_ref()?;
        let id = self.new_replica();
        Some(Box::new(FileGrant { id, path: path(&files.dir, key, id), written: false }))
    }

    /// The value of a write can be read; its file counts when its writer says so.
    pub(crate) fn begin_file(&self, object: &mut Object<A>, grant: FileGrant, writer: Writer, now: Moment) {
        let Some((len, checksum)) = object.value().map(|value| (value.len, value.checksum)) else { return };
        let written = grant.written;
        let pending = Pending { grant, writer, len, checksum, since: now };
        if written {
            object.keep_file(pending, &self.disks.files);
        } else {
            object.tier.get_or_insert_default().pending = Some(pending);
        }
    }

    /// A writer says that its file is there; whether one was expected of it, or is there.
    pub(crate) fn end_file(&self, object: &mut Object<A>, writer: Writer) -> bool {
        if let Some(grant) = object.file_of_write(writer) {
            grant.written = true;
            return true;
        }
        let pending = object.tier.as_mut().and_then(|tier| tier.pending.take_if(|p| p.writer.is(writer)));
        if let Some(pending) = pending {
            object.keep_file(pending, &self.disks.files);
            return true;
        }
        let mut copies = object.disk().into_iter().flat_map(|disk| &disk.copies);
        copies.any(|copy| matches!(&copy.place, Place::File(kept) if kept.writer.is(writer)))
    }

    /// A writer says that its file will not be there; whether there was one of it.
    pub(crate) fn revoke_file(&self, shard: &mut Shard<A, E>, slot: SlotId, writer: Writer) -> bool {
        if shard[slot].take_file_of_write(writer) {
            return true;
        }
        let dropped = shard[slot].drop_file(Some(writer));
        shard.settle(slot);
        dropped
    }

    /// A client says that the file of an object is gone, or cannot be read.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND` when there is no such object.
    pub fn dropped_file(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let hash = self.directory.hash(key);
        let mut shard = self.directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(absent)?;
        if shard[slot].drop_file(None) {
            tracing::debug!(%client, key = %key.escape_ascii(), "the file of an object is gone");
        }
        shard.settle(slot);
        drop(shard);
        self.eviction.something_changed();
        Ok(())
    }
}

impl FileOptions {
    /// # Errors
    /// `INVALID_PARAMS` for a folder that is named differently from place to place.
    pub(crate) fn check(&self) -> Result<()> {
        let plain = |part: &str| part != ".." && part != "." && !part.contains('\0');
        if !self.dir.starts_with('/') || !self.dir.split('/').all(plain) {
            return Err(Error::invalid(format!(
                "root_fs_dir: {:?} is no absolute path without `.` and `..`: clients share the folder by its path",
                self.dir
            )));
        }
        Ok(())
    }
}

/// The path of a copy: two folders by the key's hash, and the key with its number.
fn path(dir: &str, key: &[u8], id: ReplicaId) -> String {
    let hash = folder_hash(key);
    let letter = |shift: u32| char::from(b'a' + (hash >> shift & 15) as u8);
    let mut name = String::with_capacity(NAME);
    for c in String::from_utf8_lossy(key).chars() {
        let c = if c.is_control() || r#"/\:*?"<>|"#.contains(c) { '_' } else { c };
        if name.len() + c.len_utf8() > NAME {
            break;
        }
        name.push(c);
    }
    format!("{}/{}/{}/{name}.{:016x}", dir.trim_end_matches('/'), letter(0), letter(4), id.0)
}

/// What the existing system chooses folders by: MurmurHash64A, as the standard library of GCC seeds it.
fn folder_hash(key: &[u8]) -> u64 {
    const BY: u64 = 0xc6a4_a793_5bd1_e995;
    let mix = |word: u64| word ^ word >> 47;
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    let mut hash = 0xc70f_6907 ^ (key.len() as u64).wrapping_mul(BY);
    let mut words = key.chunks_exact(8);
    for bytes in &mut words {
        hash = (hash ^ mix(word(bytes).wrapping_mul(BY)).wrapping_mul(BY)).wrapping_mul(BY);
    }
    if !words.remainder().is_empty() {
        hash = (hash ^ word(words.remainder())).wrapping_mul(BY);
    }
    mix(mix(hash).wrapping_mul(BY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_in_the_folders_of_the_existing_system_and_never_outside() {
        // Where its release 0.3.13 puts them.
        for (key, folders, name) in [
            (&b"a"[..], "l/g", "a"),
            (b"dir/ke:y*", "j/b", "dir_ke_y_"),
            (b"../../x", "g/g", ".._.._x"),
            (b"k\0z", "a/f", "k_z"),
            (b"big", "j/c", "big"),
        ] {
            let path = path("/mnt/x/c", key, ReplicaId(0x80));
            assert_eq!(path, format!("/mnt/x/c/{folders}/{name}.0000000000000080"));
        }
        for key in [&b".."[..], b".", b"/", b"\xff\xfe/..", &[b'/'; 5000], "\u{1f9ca}".repeat(400).as_bytes()]
        {
            let path = path("/r/", key, ReplicaId(u64::MAX));
            let parts: Vec<&str> = path.split('/').collect();
            assert_eq!((parts.len(), parts[1]), (5, "r"), "{path}");
            assert!(parts[4].len() <= 255 && !matches!(parts[4], "." | ".."), "{path}");
        }
    }

    #[test]
    fn keys_that_look_the_same_have_files_of_their_own() {
        let at = |key: &[u8], id| path("/r", key, ReplicaId(id));
        assert_ne!(at(b"a/b", 1), at(b"a_b", 2));
        assert_ne!(at(b"k", 1), at(b"k", 2), "a later value is not written over an earlier one");
    }
}
