//! The index file beside a segment file: objects of the segment, written for the next process.

use mooncake_core::ids::{ReplicaId, SegmentId};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::index::{self, Came, Change, Header, ITEMS};

/// Writes a file in one piece: it is there wholly or not at all.
pub(crate) fn write_anew(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut beside = path.to_owned().into_os_string();
    beside.push(".new");
    let mut file = File::create(&beside)?;
    let written = file.write_all(bytes).and_then(|()| std::fs::rename(&beside, path));
    written.inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
    Ok(file)
}

/// Writes down what is known. It need not reach a disk: it is to outlive the process, not the
/// machine.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) path: PathBuf,
    pub(crate) header: Header,
    pub(crate) file: Option<File>,
    /// Since the last time it was written down.
    pub(crate) went: Vec<u64>,
    pub(crate) offered: Vec<u64>,
    pub(crate) came: Vec<ReplicaId>,
    /// More has changed than can be told one by one.
    pub(crate) anew: bool,
    /// Items in the file.
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

    /// What has changed. The last line says how far it is heard: one that is cut off is of what is
    /// asked for again.
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

    /// All there is.
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
