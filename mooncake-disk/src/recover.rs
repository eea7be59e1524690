//! Recovery of the objects of a store.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::transfer::{self, Transfer};
use rustix::fs::{FlockOperation, flock};

use crate::buffer::Frame;
use crate::file::cannot_open;
use crate::layout::{INDEX_HEADER, IndexHeader, Note, Parsed, Record, VERSION, header_len, record_len};
use crate::segment::DiskSegment;
use crate::transport::DiskTransport;

/// Result of the recovery when a store is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Number of recovered objects.
    pub objects: u64,
    /// Bytes of their values.
    pub bytes: u64,
    /// Number of notes without their record: mostly removed objects, and damaged ones.
    pub dropped: u64,
    /// Bytes of the index that are not notes: cut off by a crash, or damaged.
    pub skipped_bytes: u64,
    /// True if the index was present and unreadable; the store is empty.
    pub index_lost: bool,
    /// Layout version of an index that another version of this program wrote. The index is set
    /// aside as `index.version-<N>`, and the store is empty.
    pub other_version: Option<u32>,
}

/// Recovered object.
pub(crate) struct Survivor {
    pub(crate) key: Vec<u8>,
    pub(crate) seq: u64,
    pub(crate) offset: u64,
    pub(crate) value_len: u64,
    pub(crate) sums: Vec<u32>,
}

/// Lock on a directory for this process.
#[derive(Debug)]
pub(crate) struct Lock(ParentOnly<File>);

impl Drop for Lock {
    fn drop(&mut self) {
        // Unlocked explicitly, because a forked child that has not become another program yet has
        // the file open too.
        let _ = flock(&*self.0, FlockOperation::Unlock);
    }
}

/// Paths of the files of a store in its directory.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) dir: PathBuf,
}

impl Files {
    pub(crate) fn index(&self) -> PathBuf {
        self.dir.join("index")
    }

    pub(crate) fn new_index(&self) -> PathBuf {
        self.dir.join("index.new")
    }

    pub(crate) fn objects(&self) -> PathBuf {
        self.dir.join("objects")
    }

    /// Creates the directory if it is missing, and locks it until the file is closed.
    ///
    /// # Errors
    ///
    /// The message names the process that holds the directory, its owner, or why it cannot be
    /// written.
    pub(crate) fn take(&self) -> Result<Lock> {
        let shown = self.dir.display();
        std::fs::create_dir_all(&self.dir).map_err(|e| cannot_open(&self.dir, e))?;
        let about = std::fs::metadata(&self.dir).map_err(|e| cannot_open(&self.dir, e))?;
        let (owner, me) = (about.uid(), rustix::process::geteuid().as_raw());
        if owner != me {
            return Err(Error::new(
                ErrorCode::FileOpenFail,
                format!(
                    "cannot use {shown}: it belongs to user {owner}, and this process runs as user {me}; change the owner or use another directory"
                ),
            ));
        }
        let path = self.dir.join("lock");
        let open =
            std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = open.map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Error::new(
                ErrorCode::FileOpenFail,
                format!("{shown} cannot be written: {e}; use a writable directory for the disk cache"),
            )
            .with_source(e),
            _ => cannot_open(&path, e),
        })?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            let holder =
                if holder.is_empty() { "another process".into() } else { format!("process {holder}") };
            return Err(Error::new(
                ErrorCode::FileLockFail,
                format!("{shown} is in use by {holder}; every client needs a directory of its own"),
            ));
        }
        // The process id serves only the message above, so a failed write is ignored.
        let _ = file.set_len(0).and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
        Ok(Lock(ParentOnly::new(file)))
    }

    /// Reads the index: its header, if there is one, and the newest note of each key.
    pub(crate) fn read_index(&self, found: &mut Recovery) -> Result<OldIndex> {
        let path = self.index();
        let half = || u128::from(Rng::from_os().next_u64());
        let fresh = || OldIndex { store: half() << 64 | half(), last_seq: 0, len: None, notes: Vec::new() };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(fresh()),
            Err(e) => return Err(cannot_open(&path, e)),
        };
        let mut reader = LookaheadReader::new(file);
        let failed = |e: io::Error| {
            Error::new(ErrorCode::FileReadFail, format!("cannot read {}: {e}", path.display())).with_source(e)
        };
        let header = IndexHeader::decode(reader.at_least(INDEX_HEADER).map_err(failed)?);
        let Some(header) = header else {
            found.index_lost = true;
            return Ok(fresh());
        };
        if header.version != VERSION {
            if is_planted("refuse-other-disk-version") {
                return Err(Error::new(ErrorCode::InvalidVersion, "cannot read index: unknown version"));
            }
            // Records count only with their index, so the new store never finds them.
            let aside = self.dir.join(format!("index.version-{}", header.version));
            std::fs::rename(&path, &aside).map_err(|e| cannot_open(&aside, e))?;
            found.other_version = Some(header.version);
            return Ok(fresh());
        }
        reader.consume(INDEX_HEADER);
        let mut newest: HashMap<Vec<u8>, OwnedNote> = HashMap::new();
        let mut last_seq = 0;
        while let Some(note) = next_note(&mut reader, &mut found.skipped_bytes).map_err(failed)? {
            last_seq = last_seq.max(note.seq);
            let older = newest.get(&note.key).is_some_and(|known| known.seq > note.seq);
            if !older {
                newest.insert(note.key.clone(), note);
            }
        }
        let len = std::fs::metadata(&path).map_err(failed)?.len();
        Ok(OldIndex { store: header.store, last_seq, len: Some(len), notes: newest.into_values().collect() })
    }
}

/// Content of an index.
pub(crate) struct OldIndex {
    pub(crate) store: u128,
    /// Highest sequence number in the index, notes that no longer count included: no later record
    /// may match one of them.
    pub(crate) last_seq: u64,
    /// Length of the index, if it can be extended.
    pub(crate) len: Option<u64>,
    pub(crate) notes: Vec<OwnedNote>,
}

/// Note read from a file.
#[derive(Debug)]
pub(crate) struct OwnedNote {
    seq: u64,
    offset: u64,
    value_len: u64,
    key: Vec<u8>,
}

fn next_note(reader: &mut LookaheadReader, skipped: &mut u64) -> io::Result<Option<OwnedNote>> {
    let mut need = 4;
    loop {
        let bytes = reader.at_least(need)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let skip = match Note::parse(bytes) {
            Parsed::Whole(note, used) => {
                let Note { seq, offset, value_len, key } = note;
                let note = OwnedNote { seq, offset, value_len, key: key.to_vec() };
                reader.consume(used);
                return Ok(Some(note));
            }
            Parsed::More(more) if bytes.len() >= need => {
                need = more;
                continue;
            }
            // The note is cut off by a crash, or overwritten: the next one may begin anywhere
            // behind it.
            Parsed::More(_) | Parsed::Bad => 1 + bytes[1..].iter().take_while(|b| **b != b'm').count(),
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
    fn at_least(&mut self, len: usize) -> io::Result<&[u8]> {
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

/// Returns the recovered objects: notes whose records are present, newest first. Headers are read
/// many at a time.
pub(crate) fn survivors(
    transport: &DiskTransport,
    data: &DiskSegment,
    store: u128,
    mut notes: Vec<OwnedNote>,
    found: &mut Recovery,
) -> Result<Vec<Survivor>> {
    const AT_ONCE: usize = 256;
    let all = notes.len() as u64;
    let fits = |note: &OwnedNote| {
        let len = record_len(note.key.len(), note.value_len);
        note.offset.checked_add(len).is_some_and(|end| end <= data.len())
    };
    notes.retain(fits);
    notes.sort_unstable_by_key(|note| std::cmp::Reverse(note.seq));
    let mut there = Vec::with_capacity(notes.len());
    for some in notes.chunks(AT_ONCE) {
        let reads = some.iter().map(|note| {
            let header = usize::try_from(header_len(note.key.len(), note.value_len))
                .map_err(|_| Error::invalid("cannot read record: header exceeds the address space"))?;
            Ok(Transfer::new(data.addr() + note.offset, Frame::new(header)?))
        });
        let reads: Vec<_> = reads.collect::<Result<_>>()?;
        let ticket = transfer::read(transport, &transport.own(), reads, None);
        let (results, reads) = ticket.results().wait();
        for ((note, result), read) in some.iter().zip(results).zip(reads) {
            // A block that cannot be read costs one object.
            let Some(record) = result.ok().and_then(|()| Record::decode(&read.buffer)) else { continue };
            let same = record.store == store
                && record.seq == note.seq
                && record.value_len == note.value_len
                && record.key == note.key;
            if same {
                there.push(Survivor {
                    key: note.key.clone(),
                    seq: note.seq,
                    offset: note.offset,
                    value_len: note.value_len,
                    sums: record.sums,
                });
            }
        }
    }
    found.dropped = all - there.len() as u64;
    Ok(there)
}

/// Writes a new index beside the old one and replaces it.
pub(crate) fn write_index<'a>(
    files: &Files,
    header: IndexHeader,
    notes: impl Iterator<Item = Note<'a>>,
) -> Result<u64> {
    let path = files.new_index();
    let failed = |e: io::Error| {
        let code = match e.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => ErrorCode::NoAvailableHandle,
            _ => ErrorCode::FileWriteFail,
        };
        Error::new(code, format!("cannot write {}: {e}", path.display())).with_source(e)
    };
    let mut bytes = header.encode().to_vec();
    let mut file = File::create(&path).map_err(failed)?;
    let mut len = 0;
    for note in notes {
        note.encode(&mut bytes);
        if bytes.len() >= 1 << 20 {
            file.write_all(&bytes).map_err(failed)?;
            len += bytes.len() as u64;
            bytes.clear();
        }
    }
    file.write_all(&bytes).and_then(|()| file.sync_data()).map_err(failed)?;
    len += bytes.len() as u64;
    std::fs::rename(&path, files.index()).map_err(failed)?;
    sync_dir(&files.dir);
    Ok(len)
}

/// Flushes the directory, so that the new name is on the disk. On a file system that cannot do
/// this, a power failure loses the index, and with it the cache.
fn sync_dir(dir: &Path) {
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
}
