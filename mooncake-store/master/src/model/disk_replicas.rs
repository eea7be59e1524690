//! Replicas of objects on disks of clients and in files of a shared file system.

use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::host_port;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId};
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicaStatus};
use mooncake_protocol::wire::StoredAt;
use smallvec::SmallVec;

use super::disk::DiskOwner;
use super::value::{Stamp, Writer};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Replicas of one value on disks.
pub(crate) struct DiskReplicas {
    pub(crate) len: u64,
    pub(crate) checksum: Option<u64>,
    /// Stamp of the value, if it was in memory when it was written to disk.
    pub(crate) stamp: Stamp,
    pub(crate) copies: SmallVec<[DiskReplica; 1]>,
}

/// Identity of a value on the disk of a client. The next process that uses the disk reports the
/// same one, and a later value of the key has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskVersion {
    pub(crate) store: u64,
    pub(crate) number: u64,
}

impl DiskVersion {
    /// Returns the version that a report names; `None` if its client names none.
    pub(crate) fn reported(place: &StoredAt) -> Option<Self> {
        let version = Self { store: place.bucket.cast_unsigned(), number: place.offset.cast_unsigned() };
        (version != Self { store: 0, number: 0 }).then_some(version)
    }
}

/// Value on the disk of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskHolding {
    pub(crate) client: ClientId,
    pub(crate) version: Option<DiskVersion>,
}

impl DiskHolding {
    /// Returns whether the two are one value. Without versions, the client must be the same: what
    /// another one finds may be older.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self.version, other.version) {
            (Some(one), Some(two)) => one == two,
            _ => self.client == other.client,
        }
    }
}

/// Replica on a disk or in a file.
pub(crate) struct DiskReplica {
    pub(crate) id: ReplicaId,
    pub(crate) len: u64,
    /// Version on the disk of the owner, if it is known.
    pub(crate) version: Option<DiskVersion>,
    pub(crate) location: DiskLocation,
}

/// Location of a replica on disk.
pub(crate) enum DiskLocation {
    /// On the disk of a client, which serves it at this endpoint.
    Owned(Arc<DiskOwner>, String),
    /// In a file that any client can read.
    File(StoredFile),
}

impl DiskReplica {
    pub(crate) fn new(id: ReplicaId, owner: &Arc<DiskOwner>, len: u64, place: &StoredAt) -> Self {
        owner.used.fetch_add(len, Relaxed);
        owner.objects.fetch_add(1, Relaxed);
        let version = DiskVersion::reported(place);
        Self { id, len, version, location: DiskLocation::Owned(owner.clone(), place.endpoint.clone()) }
    }

    pub(crate) fn owner(&self) -> Option<&Arc<DiskOwner>> {
        match &self.location {
            DiskLocation::Owned(owner, _) => Some(owner),
            DiskLocation::File(_) => None,
        }
    }

    pub(crate) fn is_live(&self) -> bool {
        self.owner().is_none_or(|owner| owner.is_alive())
    }

    /// Returns whether this replica can be read now.
    pub(crate) fn is_readable(&self) -> bool {
        self.owner().is_none_or(|owner| owner.is_readable())
    }

    pub(crate) fn is_of(&self, client: ClientId) -> bool {
        self.owner().is_some_and(|owner| owner.client == client)
    }

    /// Marks this replica as stale at its owner.
    pub(crate) fn reject(&self, key: &ObjectKey) {
        if let Some(owner) = self.owner() {
            owner.state.lock().mark_dropped(key);
        }
    }

    /// Returns whether this replica looks like `before`, found by the next process of the same
    /// owner: it is on the same host, has the same version if both are known, and the owner of
    /// `before` has sent no heartbeat since this owner joined.
    pub(crate) fn succeeds(&self, before: &DiskReplica) -> bool {
        let (DiskLocation::Owned(ours, here), DiskLocation::Owned(theirs, there)) =
            (&self.location, &before.location)
        else {
            return false;
        };
        let joined = ours.state.lock().joined;
        ours.client != theirs.client
            && self.version.zip(before.version).is_none_or(|(here, there)| here == there)
            && host_port::split(here).0 == host_port::split(there).0
            && theirs.state.lock().seen <= joined
    }
}

impl Drop for DiskReplica {
    fn drop(&mut self) {
        match &self.location {
            DiskLocation::Owned(owner, _) => {
                owner.used.fetch_sub(self.len, Relaxed);
                owner.objects.fetch_sub(1, Relaxed);
            }
            DiskLocation::File(file) => file.subtract(self.len),
        }
    }
}

impl DiskReplicas {
    /// Returns the replicas whose owners are not gone.
    pub(crate) fn live(&self) -> impl Iterator<Item = &DiskReplica> {
        self.copies.iter().filter(|copy| copy.is_live())
    }

    pub(crate) fn live_owners(&self) -> impl Iterator<Item = &Arc<DiskOwner>> {
        self.live().filter_map(DiskReplica::owner)
    }

    pub(crate) fn is_live(&self) -> bool {
        self.live().next().is_some()
    }

    /// Returns whether a replica can be read now.
    pub(crate) fn is_readable(&self) -> bool {
        self.copies.iter().any(DiskReplica::is_readable)
    }

    /// Drops replicas of owners that are gone or that `keep` refuses. Returns whether any are left.
    pub(crate) fn retain(&mut self, keep: impl Fn(ClientId) -> bool) -> bool {
        self.copies.retain(|copy| copy.owner().is_none_or(|owner| owner.is_alive() && keep(owner.client)));
        !self.copies.is_empty()
    }

    pub(crate) fn describe(&self) -> impl Iterator<Item = Replica> {
        self.copies.iter().filter(|copy| copy.is_readable()).map(|copy| Replica {
            id: copy.id,
            location: match &copy.location {
                DiskLocation::Owned(owner, endpoint) => ReplicaLocation::LocalDisk {
                    client: owner.client,
                    size: self.len,
                    endpoint: endpoint.clone(),
                },
                DiskLocation::File(file) => ReplicaLocation::Disk { path: file.path.clone(), size: self.len },
            },
            status: ReplicaStatus::Complete,
        })
    }

    /// Returns the values on the disks of owners that are alive.
    pub(crate) fn holdings(&self) -> impl Iterator<Item = DiskHolding> {
        let holding = |copy: &DiskReplica| {
            copy.owner().map(|owner| DiskHolding { client: owner.client, version: copy.version })
        };
        self.live().filter_map(holding)
    }

    pub(crate) fn owners(&self) -> impl Iterator<Item = ClientId> {
        self.live_owners().map(|owner| owner.client)
    }

    pub(crate) fn has_owner(&self, client: ClientId) -> bool {
        self.owners().any(|owner| owner == client)
    }

    pub(crate) fn first_owner(&self) -> Option<&Arc<DiskOwner>> {
        self.live_owners().next()
    }
}

/// Totals over all files.
#[derive(Debug, Default)]
pub(crate) struct FileTotals {
    pub(crate) objects: AtomicU64,
    pub(crate) used: AtomicU64,
}

/// File that a writer is to write.
pub(crate) struct FileGrant {
    pub(crate) id: ReplicaId,
    pub(crate) path: String,
    /// True if the writer has reported the file as written.
    pub(crate) written: bool,
}

impl FileGrant {
    /// Grants a file of its own for a copy of the object with that key.
    pub(crate) fn new(dir: &str, key: &[u8], id: ReplicaId) -> Self {
        Self { id, path: path(dir, key, id), written: false }
    }

    pub(crate) fn describe(&self, size: u64) -> Replica {
        let location = ReplicaLocation::Disk { path: self.path.clone(), size };
        Replica { id: self.id, location, status: ReplicaStatus::Processing }
    }
}

/// File of a value that is readable already. Its writer has not reported it yet.
pub(crate) struct PendingFile {
    pub(crate) grant: FileGrant,
    pub(crate) writer: Writer,
    pub(crate) len: u64,
    pub(crate) checksum: Option<u64>,
    pub(crate) since: Moment,
}

/// File that is complete.
pub(crate) struct StoredFile {
    pub(crate) path: String,
    pub(crate) writer: Writer,
    pub(crate) files: Arc<FileTotals>,
}

impl StoredFile {
    /// Removes the file from the totals.
    pub(crate) fn subtract(&self, len: u64) {
        self.files.objects.fetch_sub(1, Relaxed);
        self.files.used.fetch_sub(len, Relaxed);
    }
}

/// Relation of an object to disks and files.
#[derive(Default)]
pub(crate) struct DiskTier {
    pub(crate) on_disk: Option<DiskReplicas>,
    /// Replica that a restarted owner found before its predecessor expired.
    pub(crate) successor: Option<Box<DiskReplica>>,
    /// File that is being written.
    pub(crate) pending: Option<PendingFile>,
    /// Owner of the disk that is to write the object.
    pub(crate) offload: Option<Arc<DiskOwner>>,
    /// True if the object could not be written to disk.
    pub(crate) offload_failed: bool,
}

/// Maximum length of the part of a file name that comes from the key, in bytes. File systems allow
/// names of 255 bytes.
const MAX_NAME: usize = 200;

/// Returns the path of a copy: two folders by the hash of the key, then the key and the number of
/// the copy.
fn path(dir: &str, key: &[u8], id: ReplicaId) -> String {
    let hash = folder_hash(key);
    let letter = |shift: u32| char::from(b'a' + (hash >> shift & 15) as u8);
    let mut name = String::with_capacity(MAX_NAME);
    for c in String::from_utf8_lossy(key).chars() {
        let c = if c.is_control() || r#"/\:*?"<>|"#.contains(c) { '_' } else { c };
        if name.len() + c.len_utf8() > MAX_NAME {
            break;
        }
        name.push(c);
    }
    format!("{}/{}/{}/{name}.{:016x}", dir.trim_end_matches('/'), letter(0), letter(4), id.0)
}

/// Returns the hash by which Mooncake C++ chooses folders: MurmurHash64A with the seed of the
/// standard library of GCC.
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
        // Paths of Mooncake C++ 0.3.13.
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
