//! Small file beside the database, with its owner and the last acknowledged change.
//!
//! A log with a missing end looks like the log after a crash, to RocksDB too. This file
//! distinguishes the two: a crash loses only changes that were not acknowledged yet.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use mooncake_core::fork::ParentOnly;
use mooncake_core::meta::fingerprint;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::private_files::{FileMode, Folder, Opening};
use rustix::fs::{FlockOperation, flock};

const NAME: &str = "acknowledged";
/// File that RocksDB creates first.
const DATABASE: &str = "CURRENT";
const MAGIC: [u8; 8] = *b"mcmeta-1";
/// Length of a slot: a number and its fingerprint. Two slots follow the magic, so that one is valid
/// after a crash.
const SLOT: usize = 16;
const SIZE: usize = MAGIC.len() + 2 * SLOT;

/// Mark file, locked by one process at a time.
#[derive(Debug)]
pub(super) struct Mark {
    file: ParentOnly<File>,
    number: u64,
}

impl Mark {
    /// Locks a folder that has a mark file, or is empty, and makes it private to this user.
    ///
    /// # Errors
    /// Returns `FILE_LOCK_FAIL` if another process has it, `INVALID_PARAMS` if it has other
    /// contents, `CHECKSUM_MISMATCH` if it is damaged, and `FILE_OPEN_FAIL`.
    pub(super) fn take(folder: &Path) -> Result<Self> {
        let unusable = |error: io::Error| Error::new(ErrorCode::FileOpenFail, format!("{NAME}: {error}"));
        let own = Folder::own(folder).map_err(unusable)?;
        let entries = own.entries().map_err(unusable)?;
        if !entries.is_empty() && entries.iter().all(|entry| entry.name != NAME) {
            return Err(Error::invalid("the folder has other contents than a metadata directory"));
        }
        let mut file = own.file(NAME, Opening::Create, FileMode::PRIVATE).map_err(unusable)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::new(ErrorCode::FileLockFail, "another process has the folder open"));
            }
            Err(error) => return Err(unusable(error.into())),
        }
        // RocksDB creates its files with permissions that depend on the umask.
        own.narrow_if(|_| true).and_then(|()| own.keep_files_private()).map_err(unusable)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(unusable)?;
        let number = match read(&bytes) {
            Some(number) => number,
            // Without a database, no change was acknowledged.
            None if !folder.join(DATABASE).exists() => {
                begin(&file, folder).map_err(unusable)?;
                0
            }
            None => return Err(Error::new(ErrorCode::ChecksumMismatch, format!("{NAME} is damaged"))),
        };
        Ok(Self { file: ParentOnly::new(file), number })
    }

    /// Returns the last acknowledged change.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Records a change before it is acknowledged.
    ///
    /// # Errors
    /// Returns `PERSISTENT_FAIL`.
    pub(super) fn note(&mut self, number: u64) -> Result<()> {
        let at = MAGIC.len() as u64 + number % 2 * SLOT as u64;
        let written = self.file.write_all_at(&slot(number), at).and_then(|()| self.file.sync_data());
        written.map_err(|error| Error::new(ErrorCode::PersistentFail, format!("{NAME}: {error}")))?;
        self.number = number;
        Ok(())
    }

    /// Releases the folder for another process.
    pub(super) fn release(&self) {
        // The unlock is explicit, because a forked child that has not called `exec` yet has the
        // file open too.
        let _ = flock(&*self.file, FlockOperation::Unlock);
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.release();
    }
}

fn begin(file: &File, folder: &Path) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all_at(&[&MAGIC[..], &slot(0), &[0; SLOT]].concat(), 0)?;
    file.sync_all()?;
    File::open(folder)?.sync_all()
}

fn slot(number: u64) -> [u8; SLOT] {
    let (mut slot, number) = ([0; SLOT], number.to_le_bytes());
    slot[..8].copy_from_slice(&number);
    slot[8..].copy_from_slice(&seal(number).to_le_bytes());
    slot
}

fn seal(number: [u8; 8]) -> u64 {
    fingerprint(&[MAGIC, number].concat())
}

fn read(bytes: &[u8]) -> Option<u64> {
    if bytes.len() != SIZE {
        return None;
    }
    let slots = bytes.strip_prefix(&MAGIC)?.as_chunks::<8>().0.as_chunks::<2>().0;
    let whole = slots.iter().filter(|[number, sum]| seal(*number) == u64::from_le_bytes(*sum));
    whole.map(|[number, _]| u64::from_le_bytes(*number)).max()
}

#[cfg(test)]
impl Mark {
    /// Makes further records fail.
    pub(super) fn forbid(&mut self, folder: &Path) {
        self.file = ParentOnly::new(File::open(folder.join(NAME)).unwrap());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_every_prefix_costs_one_number_at_most() {
        let folder = tempfile::tempdir().unwrap();
        let mut mark = Mark::take(folder.path()).unwrap();
        for number in [1, 2, 300, 301] {
            mark.note(number).unwrap();
        }
        drop(mark);
        let bytes = std::fs::read(folder.path().join(NAME)).unwrap();
        assert_eq!(read(&bytes), Some(301));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let found = read(&damaged);
            assert!(
                matches!(found, Some(300 | 301)) || (found.is_none() && bit < 64),
                "bit {bit}: {found:?}"
            );
        }
        for length in 0..bytes.len() {
            assert_eq!(read(&bytes[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn a_folder_is_taken_that_is_empty_or_ours_and_by_one() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("letter"), "dear all").unwrap();
        let refused = Mark::take(folder.path()).unwrap_err();
        assert!(
            refused.code() == ErrorCode::InvalidParams && !folder.path().join(NAME).exists(),
            "{refused}"
        );
        std::fs::remove_file(folder.path().join("letter")).unwrap();
        let mark = Mark::take(folder.path()).unwrap();
        assert_eq!(Mark::take(folder.path()).unwrap_err().code(), ErrorCode::FileLockFail);
        drop(mark);
        // A process that stopped before the database was created has acknowledged no change.
        std::fs::write(folder.path().join(NAME), "mcm").unwrap();
        assert_eq!(Mark::take(folder.path()).unwrap().number(), 0);
        std::fs::write(folder.path().join(NAME), "mcm").unwrap();
        std::fs::write(folder.path().join(DATABASE), "").unwrap();
        assert_eq!(Mark::take(folder.path()).unwrap_err().code(), ErrorCode::ChecksumMismatch);
    }
}
