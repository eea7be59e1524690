//! Index file beside a segment file. It records the objects of the segment for the next process.

use mooncake_core::ids::{ReplicaId, SegmentId};
use mooncake_transport::private_files::{FileMode, Folder};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::index::{self, Change, Header, ITEMS, IndexedObject};

/// Writes a file under a temporary name and renames it, so that the file is complete or absent.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let (folder, name) = Folder::around(path)?;
    folder.replace(name, bytes, FileMode::PRIVATE)
}

/// Removes the file, or a link of its name.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let (folder, name) = Folder::around(path)?;
    folder.remove(name)
}

/// Writer of the index file. The data need not reach a disk: it must outlive the process, not the
/// machine.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) path: PathBuf,
    pub(crate) header: Header,
    pub(crate) file: Option<File>,
    /// Offsets of objects that are gone since the last write.
    pub(crate) removed: Vec<u64>,
    /// Offsets of objects that were offered to the master since the last write.
    pub(crate) offered: Vec<u64>,
    /// Replicas that are new since the last write.
    pub(crate) added: Vec<ReplicaId>,
    /// True if the file must be rewritten, because the changes cannot be listed one by one.
    pub(crate) needs_rewrite: bool,
    /// Number of items in the file.
    pub(crate) items: usize,
}

/// Last report of the master that the index includes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReportedUpTo {
    pub(crate) epoch: u64,
    /// Number of the last change.
    pub(crate) last_change: u64,
    /// True if all keys begin with the names of tenants.
    pub(crate) has_tenants: Option<bool>,
}

impl Journal {
    pub(crate) fn record_removed(&mut self, segment: SegmentId, offset: u64) {
        if segment == self.header.segment {
            self.removed.push(offset);
        }
    }

    pub(crate) fn record_offered(&mut self, segment: SegmentId, offset: u64) {
        if segment == self.header.segment {
            self.offered.push(offset);
        }
    }

    pub(crate) fn record_added(&mut self, replica: ReplicaId) {
        self.added.push(replica);
    }

    pub(crate) fn request_rewrite(&mut self) {
        self.needs_rewrite = true;
    }

    /// Appends the changes as one record, with the number of the last change that the master
    /// reported. If the record is truncated, the next process requests its changes from the master
    /// again.
    pub(crate) fn append(
        &mut self,
        ReportedUpTo { epoch, last_change, has_tenants }: ReportedUpTo,
        removed: &[u64],
        offered: &[u64],
        added: &[IndexedObject],
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        let change = Change {
            epoch,
            last_change,
            removed: removed.to_vec(),
            offered: offered.to_vec(),
            added: added.to_vec(),
            has_tenants,
        };
        index::append(&change, &mut bytes);
        self.items += removed.len() + offered.len() + added.len();
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(&bytes))
    }

    /// Rewrites the file with all objects.
    pub(crate) fn rewrite(
        &mut self,
        ReportedUpTo { epoch, last_change, has_tenants }: ReportedUpTo,
        all: &[IndexedObject],
    ) -> io::Result<()> {
        let mut bytes = index::begin(&self.header);
        for part in all.chunks(ITEMS) {
            let (removed, offered) = (Vec::new(), Vec::new());
            let added = part.to_vec();
            let change = Change { epoch, last_change, removed, offered, added, has_tenants };
            index::append(&change, &mut bytes);
        }
        self.items = all.len();
        self.file = Some(replace_file(&self.path, &bytes)?);
        self.needs_rewrite = false;
        Ok(())
    }
}
