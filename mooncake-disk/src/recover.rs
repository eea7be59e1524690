//! Recovery of the objects of a store.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::private_files::{self, FileMode, Folder, Opening};
use mooncake_transport::transfer::{self, Transfer};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::info;

use crate::buffer::Frame;
use crate::file::cannot_open;
use crate::layout::{INDEX_HEADER, IndexEntry, IndexHeader, Parsed, Record, VERSION, header_len, record_len};
use crate::segment::DiskSegment;
use crate::transport::DiskTransport;

/// Result of the recovery when a store is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Number of recovered objects.
    pub objects: u64,
    /// Bytes of their values.
    pub bytes: u64,
    /// Number of index entries without their record: mostly removed objects, and damaged ones.
    pub dropped: u64,
    /// Bytes of the index that are not entries: cut off by a crash, or damaged.
    pub skipped_bytes: u64,
    /// True if the index was present and unreadable; the store is empty.
    pub index_lost: bool,
    /// Layout version of an index that another version of this program wrote. The index is set
    /// aside as `index.version-<N>`, and the store is empty.
    pub other_version: Option<u32>,
}

/// Recovered object.
pub(crate) struct RecoveredObject {
    pub(crate) key: Vec<u8>,
    pub(crate) seq: u64,
    pub(crate) offset: u64,
    pub(crate) value_len: u64,
    pub(crate) sums: Vec<u32>,
}

/// Directory of a store that this process has locked. Unlocked on drop.
#[derive(Debug)]
pub struct LockedDir {
    path: PathBuf,
    lock: ParentOnly<File>,
}

impl LockedDir {
    /// Creates a directory if it is missing, and locks it. Other users have no access to the
    /// directory, unless it has other contents, too.
    ///
    /// # Errors
    ///
    /// Returns `FILE_LOCK_FAIL` with the process that holds the directory. The message of others
    /// says whether the directory belongs to another user or cannot be written.
    pub fn lock(path: &Path) -> Result<Self> {
        let lock = Files { dir: path.to_owned() }.lock()?;
        Ok(Self { path: path.to_owned(), lock })
    }

    /// Locks a directory that several processes are given. The first of them gets the directory
    /// itself, each other one the first free of its subdirectories `worker-1`, `worker-2` and so
    /// on. As many processes as before therefore find the stores of all of them.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock). Returns `FILE_LOCK_FAIL` if all subdirectories are in use.
    pub fn lock_shared(path: &Path) -> Result<Self> {
        let is_in_use = |error: &Error| error.code() == ErrorCode::FileLockFail;
        let in_use_error = match Self::lock(path) {
            Err(error) if is_in_use(&error) && !is_planted("one-worker-per-folder") => error,
            locked => return locked,
        };
        for number in 1..=MAX_WORKERS {
            match Self::lock(&path.join(format!("{WORKER}{number}"))) {
                Err(error) if is_in_use(&error) => {}
                Ok(locked) => {
                    info!(dir = %locked.path.display(), "directory of the disk cache has other users: {in_use_error}");
                    return Ok(locked);
                }
                failed => return failed,
            }
        }
        Err(in_use_error.context(format!("{MAX_WORKERS} processes share the directory already")))
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LockedDir {
    fn drop(&mut self) {
        // Unlocked explicitly, because a forked child that has not become another program yet has
        // the file open too.
        let _ = flock(&*self.lock, FlockOperation::Unlock);
    }
}

const INDEX: &str = "index";
const NEW_INDEX: &str = "index.new";
const OBJECTS: &str = "objects";
const LOCK: &str = "lock";
/// Name of an index of another version, before its number.
const OTHER_VERSION: &str = "index.version-";
/// Name of the directory of a further process, before its number.
const WORKER: &str = "worker-";
/// Maximum number of such directories.
const MAX_WORKERS: usize = 1024;

fn is_own_name(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let is_worker = name.strip_prefix(WORKER).is_some_and(|number| number.parse::<usize>().is_ok());
    [INDEX, NEW_INDEX, OBJECTS, LOCK].contains(&&*name) || name.starts_with(OTHER_VERSION) || is_worker
}

/// Paths of the files of a store in its directory.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) dir: PathBuf,
}

impl Files {
    pub(crate) fn index(&self) -> PathBuf {
        self.dir.join(INDEX)
    }

    pub(crate) fn objects(&self) -> PathBuf {
        self.dir.join(OBJECTS)
    }

    /// Creates the directory if it is missing, and locks it until the file is closed. Other users
    /// have no access to the directory, unless it has other contents, too.
    ///
    /// # Errors
    ///
    /// The message names the process that holds the directory, its owner, or why it cannot be
    /// written.
    fn lock(&self) -> Result<ParentOnly<File>> {
        let dir = self.dir.display();
        let folder = Folder::own(&self.dir).map_err(|e| cannot_open(&self.dir, e))?;
        let path = self.dir.join(LOCK);
        let open = folder.file(LOCK, Opening::Create, FileMode::PRIVATE);
        let mut file = open.map_err(|e| match e.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => Error::new(
                ErrorCode::FileOpenFail,
                format!("{dir} cannot be written: {e}; use a writable directory for the disk cache"),
            )
            .with_source(e),
            _ => cannot_open(&path, e),
        })?;
        if let Err(errno) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if errno != Errno::WOULDBLOCK {
                return Err(cannot_open(&path, errno.into()));
            }
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            let holder =
                if holder.is_empty() { "another process".into() } else { format!("process {holder}") };
            return Err(Error::new(
                ErrorCode::FileLockFail,
                format!("{dir} is in use by {holder}; every store needs a directory of its own"),
            ));
        }
        folder.narrow_if(is_own_name).map_err(|e| cannot_open(&self.dir, e))?;
        // The process id serves only the message above, so a failed write is ignored.
        let _ = file.set_len(0).and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
        Ok(ParentOnly::new(file))
    }

    /// Reads the index: its header, if there is one, and the newest entry of each key.
    pub(crate) fn read_index(&self, recovery: &mut Recovery) -> Result<OldIndex> {
        let path = self.index();
        let half = || u128::from(Rng::from_os().next_u64());
        let empty =
            || OldIndex { store: half() << 64 | half(), last_seq: 0, len: None, index_entries: Vec::new() };
        let file = match private_files::open(&path, Opening::Read, FileMode::PRIVATE) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(empty()),
            Err(e) => return Err(cannot_open(&path, e)),
        };
        let mut reader = LookaheadReader::new(file);
        let failed = |e: io::Error| {
            Error::new(ErrorCode::FileReadFail, format!("cannot read {}: {e}", path.display())).with_source(e)
        };
        let header = IndexHeader::decode(reader.peek(INDEX_HEADER).map_err(failed)?);
        let Some(header) = header else {
            recovery.index_lost = true;
            return Ok(empty());
        };
        if header.version != VERSION {
            if is_planted("refuse-other-disk-version") {
                return Err(Error::new(ErrorCode::InvalidVersion, "cannot read index: unknown version"));
            }
            // Records count only with their index, so the new store never finds them.
            let renamed_index = format!("{OTHER_VERSION}{}", header.version);
            let renamed = Folder::open(&self.dir).and_then(|folder| folder.rename(INDEX, &renamed_index));
            renamed.map_err(|e| cannot_open(&self.dir.join(&renamed_index), e))?;
            recovery.other_version = Some(header.version);
            return Ok(empty());
        }
        reader.consume(INDEX_HEADER);
        let mut newest: HashMap<Vec<u8>, OwnedIndexEntry> = HashMap::new();
        let mut last_seq = 0;
        while let Some(index_entry) =
            next_index_entry(&mut reader, &mut recovery.skipped_bytes).map_err(failed)?
        {
            last_seq = last_seq.max(index_entry.seq);
            let older = newest.get(&index_entry.key).is_some_and(|known| known.seq > index_entry.seq);
            if !older {
                newest.insert(index_entry.key.clone(), index_entry);
            }
        }
        let len = reader.file.metadata().map_err(failed)?.len();
        Ok(OldIndex {
            store: header.store,
            last_seq,
            len: Some(len),
            index_entries: newest.into_values().collect(),
        })
    }
}

/// Content of an index.
pub(crate) struct OldIndex {
    pub(crate) store: u128,
    /// Highest sequence number in the index, entries that no longer count included: no later record
    /// may match one of them.
    pub(crate) last_seq: u64,
    /// Length of the index, if it can be extended.
    pub(crate) len: Option<u64>,
    pub(crate) index_entries: Vec<OwnedIndexEntry>,
}

/// Index entry read from a file.
#[derive(Debug)]
pub(crate) struct OwnedIndexEntry {
    seq: u64,
    offset: u64,
    value_len: u64,
    key: Vec<u8>,
}

fn next_index_entry(reader: &mut LookaheadReader, skipped: &mut u64) -> io::Result<Option<OwnedIndexEntry>> {
    let mut need = 4;
    loop {
        let bytes = reader.peek(need)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let skip = match IndexEntry::parse(bytes) {
            Parsed::Complete(index_entry, used) => {
                let IndexEntry { seq, offset, value_len, key } = index_entry;
                let index_entry = OwnedIndexEntry { seq, offset, value_len, key: key.to_vec() };
                reader.consume(used);
                return Ok(Some(index_entry));
            }
            Parsed::Incomplete(needed) if bytes.len() >= need => {
                need = needed;
                continue;
            }
            // The entry is cut off by a crash, or overwritten: the next one may begin anywhere
            // behind it.
            Parsed::Incomplete(_) | Parsed::Invalid => {
                1 + bytes[1..].iter().take_while(|b| **b != b'm').count()
            }
        };
        *skipped += skip as u64;
        reader.consume(skip);
        need = 4;
    }
}

/// Reader of a file from front to back, with look-ahead.
struct LookaheadReader {
    file: File,
    bytes: Vec<u8>,
    from: usize,
    ended: bool,
}

impl LookaheadReader {
    fn new(file: File) -> Self {
        Self { file, bytes: Vec::new(), from: 0, ended: false }
    }

    /// Returns the next bytes: so many or more, fewer at the end of the file.
    fn peek(&mut self, len: usize) -> io::Result<&[u8]> {
        while self.bytes.len() - self.from < len && !self.ended {
            self.bytes.drain(..self.from);
            self.from = 0;
            let old = self.bytes.len();
            self.bytes.resize(old + len.max(1 << 20), 0);
            let read = loop {
                match self.file.read(&mut self.bytes[old..]) {
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    read => break read?,
                }
            };
            self.bytes.truncate(old + read);
            self.ended = read == 0;
        }
        Ok(&self.bytes[self.from..])
    }

    fn consume(&mut self, len: usize) {
        self.from += len;
    }
}

/// Returns the recovered objects: index entries whose records are present, newest first. Headers
/// are read many at a time.
pub(crate) fn recover_objects(
    transport: &DiskTransport,
    data: &DiskSegment,
    store: u128,
    mut index_entries: Vec<OwnedIndexEntry>,
    recovery: &mut Recovery,
) -> Result<Vec<RecoveredObject>> {
    const BATCH: usize = 256;
    let all = index_entries.len() as u64;
    let fits = |index_entry: &OwnedIndexEntry| {
        let len = record_len(index_entry.key.len(), index_entry.value_len);
        index_entry.offset.checked_add(len).is_some_and(|end| end <= data.len())
    };
    index_entries.retain(fits);
    index_entries.sort_unstable_by_key(|index_entry| std::cmp::Reverse(index_entry.seq));
    let mut recovered = Vec::with_capacity(index_entries.len());
    for batch in index_entries.chunks(BATCH) {
        let reads = batch.iter().map(|index_entry| {
            let header = usize::try_from(header_len(index_entry.key.len(), index_entry.value_len))
                .map_err(|_| Error::invalid("cannot read record: header exceeds the address space"))?;
            Ok(Transfer::new(data.addr() + index_entry.offset, Frame::new(header)?))
        });
        let reads: Vec<_> = reads.collect::<Result<_>>()?;
        let ticket = transfer::read(transport, &transport.own_peer(), reads, None);
        let (results, reads) = ticket.results().wait();
        for ((index_entry, result), read) in batch.iter().zip(results).zip(reads) {
            // A block that cannot be read costs one object.
            let Some(record) = result.ok().and_then(|()| Record::decode(&read.buffer)) else { continue };
            let is_same = record.store == store
                && record.seq == index_entry.seq
                && record.value_len == index_entry.value_len
                && record.key == index_entry.key;
            if is_same {
                recovered.push(RecoveredObject {
                    key: index_entry.key.clone(),
                    seq: index_entry.seq,
                    offset: index_entry.offset,
                    value_len: index_entry.value_len,
                    sums: record.sums,
                });
            }
        }
    }
    recovery.dropped = all - recovered.len() as u64;
    Ok(recovered)
}

/// Writes a new index beside the old one and replaces it.
pub(crate) fn write_index<'a>(
    files: &Files,
    header: IndexHeader,
    index_entries: impl Iterator<Item = IndexEntry<'a>>,
) -> Result<u64> {
    let path = files.dir.join(NEW_INDEX);
    let failed = |e: io::Error| {
        let code = match e.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => ErrorCode::NoAvailableHandle,
            _ => ErrorCode::FileWriteFail,
        };
        Error::new(code, format!("cannot write {}: {e}", path.display())).with_source(e)
    };
    let mut bytes = header.encode().to_vec();
    let folder = Folder::open(&files.dir).map_err(failed)?;
    folder.remove_if_present(NEW_INDEX).map_err(failed)?;
    let mut file = folder.file(NEW_INDEX, Opening::New, FileMode::PRIVATE).map_err(failed)?;
    let mut len = 0;
    for index_entry in index_entries {
        index_entry.encode(&mut bytes);
        if bytes.len() >= 1 << 20 {
            file.write_all(&bytes).map_err(failed)?;
            len += bytes.len() as u64;
            bytes.clear();
        }
    }
    file.write_all(&bytes).and_then(|()| file.sync_data()).map_err(failed)?;
    len += bytes.len() as u64;
    folder.rename(NEW_INDEX, INDEX).map_err(failed)?;
    // On a file system that cannot flush names, a power failure loses the index, and with it the
    // cache.
    let _ = folder.sync();
    Ok(len)
}
