//! Index file beside a segment file. It records the objects of the segment for the next process.

use mooncake_core::ids::{ReplicaId, SegmentId};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::index::{self, Came, Change, Header, ITEMS};

/// Writes a file under a temporary name and renames it, so that the file is complete or absent.
pub(crate) fn write_anew(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut beside = path.to_owned().into_os_string();
    beside.push(".new");
    let mut file = File::create(&beside)?;
    let written = file.write_all(bytes).and_then(|()| std::fs::rename(&beside, path));
    written.inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
    Ok(file)
}

/// Writer of the index file. The data need not reach a disk: it must outlive the process, not the
/// machine.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) path: PathBuf,
    pub(crate) header: Header,
    pub(crate) file: Option<File>,
    /// Offsets of objects that are gone since the last write.
    pub(crate) went: Vec<u64>,
    /// Offsets of objects that were offered to the master since the last write.
    pub(crate) offered: Vec<u64>,
    /// Replicas that are new since the last write.
    pub(crate) came: Vec<ReplicaId>,
    /// True if the file must be rewritten, because the changes cannot be listed one by one.
    pub(crate) anew: bool,
    /// Number of items in the file.
    pub(crate) items: usize,
}

impl Journal {
    pub(crate) fn went(&mut self, segment: SegmentId, offset: u64) {
        if segment == self.header.segment {
            self.went.push(offset);
        }
    }

    pub(crate) fn offered(&mut self, segment: SegmentId, offset: u64) {
        if segment == self.header.segment {
            self.offered.push(offset);
        }
    }

    pub(crate) fn came(&mut self, replica: ReplicaId) {
        self.came.push(replica);
    }

    pub(crate) fn write_anew(&mut self) {
        self.anew = true;
    }

    /// Appends the changes as one record, with the number of the last change that the master
    /// reported. If the record is truncated, the next process requests its changes from the master
    /// again.
    pub(crate) fn append(
        &mut self,
        (epoch, heard): (u64, u64),
        went: &[u64],
        offered: &[u64],
        came: &[Came],
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        let change =
            Change { epoch, heard, went: went.to_vec(), offered: offered.to_vec(), came: came.to_vec() };
        index::append(&change, &mut bytes);
        self.items += went.len() + offered.len() + came.len();
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(&bytes))
    }

    /// Rewrites the file with all objects.
    pub(crate) fn rewrite(&mut self, (epoch, heard): (u64, u64), all: &[Came]) -> io::Result<()> {
        let mut bytes = index::begin(&self.header);
        for part in all.chunks(ITEMS) {
            let (went, offered) = (Vec::new(), Vec::new());
            let change = Change { epoch, heard, went, offered, came: part.to_vec() };
            index::append(&change, &mut bytes);
        }
        self.items = all.len();
        self.file = Some(write_anew(&self.path, &bytes)?);
        self.anew = false;
        Ok(())
    }
}
