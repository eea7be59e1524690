//! Files on a file system that clients share (`--root_fs_dir`). Values are written there after a
//! put, and read from there when no other replica exists.
//!
//! A file holds the value and nothing else. The client writes it under a temporary name that no
//! reader opens, syncs it, and renames it. The name that the master gives to readers is therefore
//! always that of a whole file. A reader accepts a file if the file has the length of the value and
//! did not change during the read.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::deadline::{Deadline, late};
use mooncake_protocol::wire::StorageConfig;

/// Maximum number of files that are written at a time, as in Mooncake C++.
const WRITES: usize = 2;
/// Maximum number of files that are read at a time.
const READS: usize = 16;
/// Maximum amount of data that waits to be written, in KiB. A value above the limit gets no file.
const WAITING_KIB: usize = 256 << 10;
/// Number of bytes that are read at a time.
const PIECE: usize = 4 << 20;

/// Access of this client to the shared files.
#[derive(Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    evict: bool,
    quota: u64,
    /// Permits to write a file.
    writing: Semaphore,
    /// Permits to read a file.
    reading: Arc<Semaphore>,
    /// Permits for data that waits to be written, one per KiB.
    waiting: Arc<Semaphore>,
    /// Marker that is set when the existing files are counted, before the first write.
    counted: tokio::sync::OnceCell<()>,
    known: Mutex<Known>,
    /// Granted files that are neither reported nor given up, by key.
    granted: Mutex<HashMap<Vec<u8>, Granted>>,
    /// Signal that a granted file is reported or given up.
    settled: Notify,
    /// Number of files that this client was granted.
    grants: AtomicU64,
    counts: Counts,
    /// True if a failed write has been logged.
    said: AtomicBool,
}

/// Files that a client knows: its own, and those that existed before its first write.
#[derive(Debug, Default)]
struct Known {
    /// Paths in the order of their age, the oldest first. Removed files may still be listed here.
    order: VecDeque<PathBuf>,
    files: HashMap<PathBuf, KnownFile>,
    /// Files that this client wrote, by key.
    own: HashMap<Vec<u8>, OwnFile>,
    used: u64,
    /// Bytes of files that are being written, or not reported yet.
    pending: u64,
}

#[derive(Debug, Default)]
struct Granted {
    count: usize,
    /// Grants with smaller numbers are of values that were removed.
    removed_before: u64,
}

#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    /// Number of the grant. A later value of the key has a larger one.
    number: u64,
}

#[derive(Debug)]
struct KnownFile {
    len: u64,
    /// Key of the value, if this client wrote the file.
    key: Option<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    written_bytes: AtomicU64,
    refused: AtomicU64,
    evicted: AtomicU64,
    read: AtomicU64,
    read_bytes: AtomicU64,
    unread: AtomicU64,
}

/// Counters of a client for the files that it shares with other clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Values written to files.
    pub written: u64,
    /// Bytes of the values written to files.
    pub written_bytes: u64,
    /// Values that got no file, because too many values were waiting, there was no space, or the
    /// file system failed.
    pub refused: u64,
    /// Files that were removed to make space for others.
    pub evicted: u64,
    /// Values and parts of values that were read from files.
    pub read: u64,
    /// Bytes that were read from files.
    pub read_bytes: u64,
    /// Files that were missing, truncated, changed during the read, or not readable in time.
    pub unread: u64,
    /// Bytes of the files that this client counts towards the quota.
    pub used: u64,
}

/// Granted file that is neither reported nor given up. It is given up when dropped.
#[derive(Debug)]
pub(crate) struct GrantedFile {
    files: Arc<Files>,
    key: Vec<u8>,
    number: u64,
}

impl Drop for GrantedFile {
    fn drop(&mut self) {
        let mut granted = self.files.granted.lock();
        if let Some(of_key) = granted.get_mut(&self.key) {
            of_key.count -= 1;
            if of_key.count == 0 {
                granted.remove(&self.key);
            }
        }
        drop(granted);
        self.files.settled.notify_waiters();
    }
}

/// Permit for a value that waits to be written.
pub(crate) type Waiting = OwnedSemaphorePermit;

/// An open file and its stamp at the time of opening.
#[derive(Debug)]
pub(crate) struct Opened {
    file: Arc<File>,
    stamp: Stamp,
}

/// Attributes of a file that change when a process writes to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Stamp {
    inode: (u64, u64),
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::other("no ordinary file"));
        }
        Ok(Self {
            inode: (about.dev(), about.ino()),
            len: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
        })
    }
}

impl Files {
    /// Creates the access to shared files. Returns `None` if the master has no directory for files,
    /// or if the path of the directory is not absolute or contains `..`.
    pub(crate) fn new(config: StorageConfig) -> Option<Arc<Self>> {
        if config.fs_dir.is_empty() {
            return None;
        }
        let dir = PathBuf::from(config.fs_dir);
        if !dir.is_absolute() || dir.components().any(|part| part == Component::ParentDir) {
            tracing::warn!(dir = %dir.display(), "the folder for files of the master is not an absolute path: no files are used");
            return None;
        }
        Some(Arc::new(Self {
            dir,
            evict: config.evict,
            quota: config.quota,
            writing: Semaphore::new(WRITES),
            reading: Arc::new(Semaphore::new(READS)),
            waiting: Arc::new(Semaphore::new(WAITING_KIB)),
            counted: tokio::sync::OnceCell::new(),
            known: Mutex::default(),
            granted: Mutex::default(),
            settled: Notify::new(),
            grants: AtomicU64::new(0),
            counts: Counts::default(),
            said: AtomicBool::new(false),
        }))
    }

    pub(crate) fn report(&self) -> FileReport {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let counts = &self.counts;
        FileReport {
            written: read(&counts.written),
            written_bytes: read(&counts.written_bytes),
            refused: read(&counts.refused),
            evicted: read(&counts.evicted),
            read: read(&counts.read),
            read_bytes: read(&counts.read_bytes),
            unread: read(&counts.unread),
            used: self.known.lock().used,
        }
    }

    /// Checks that a path from the master lies below the directory.
    fn inside(&self, path: &str) -> Result<PathBuf> {
        let rest = Path::new(path).strip_prefix(&self.dir).ok();
        let plain = |rest: &&Path| {
            let mut parts = rest.components();
            parts.next().is_some() && rest.components().all(|part| matches!(part, Component::Normal(_)))
        };
        let rest = rest.filter(plain);
        let outside = || {
            Error::invalid(format!(
                "{path:?} is not below {}, where the master's files are",
                self.dir.display()
            ))
        };
        Ok(self.dir.join(rest.ok_or_else(outside)?))
    }

    /// Registers a file that the master granted to a write.
    pub(crate) fn granted(self: &Arc<Self>, key: &[u8]) -> GrantedFile {
        self.register(&mut self.granted.lock(), key)
    }

    fn register(self: &Arc<Self>, granted: &mut HashMap<Vec<u8>, Granted>, key: &[u8]) -> GrantedFile {
        granted.entry(key.to_vec()).or_default().count += 1;
        GrantedFile { files: self.clone(), key: key.to_vec(), number: self.grants.fetch_add(1, Relaxed) }
    }

    /// Registers a file for each of these keys, as soon as no file of any of them is registered.
    /// Registers none before that, so that two callers cannot wait for each other.
    pub(crate) async fn reserve(self: &Arc<Self>, keys: &[&[u8]]) -> Vec<GrantedFile> {
        loop {
            let mut changed = std::pin::pin!(self.settled.notified());
            changed.as_mut().enable();
            {
                let mut granted = self.granted.lock();
                if !keys.iter().any(|key| granted.contains_key(*key)) {
                    return keys.iter().map(|key| self.register(&mut granted, key)).collect();
                }
            }
            changed.await;
        }
    }

    /// Reserves capacity for a value that waits to be written. Returns `None` if there is none now.
    pub(crate) fn room(&self, len: usize) -> Option<Waiting> {
        let room = u32::try_from(len.div_ceil(1024)).ok();
        let room = room.and_then(|kib| self.waiting.clone().try_acquire_many_owned(kib).ok());
        if room.is_none() {
            self.counts.refused.fetch_add(1, Relaxed);
        }
        room
    }

    /// Waits until no value waits to be written.
    pub(crate) async fn idle(&self) {
        let _ = self.waiting.acquire_many(WAITING_KIB as u32).await;
    }

    /// Writes a value to a file. Also returns the keys of files that were evicted for it, which the
    /// master still lists as replicas. [`keep`](Self::keep) or [`discard`](Self::discard) follows a
    /// success.
    pub(crate) async fn write(
        self: &Arc<Self>,
        path: &str,
        bytes: Vec<u8>,
        mark: u64,
    ) -> (Result<()>, Vec<Vec<u8>>) {
        let mut gone = Vec::new();
        let written = self.try_write(path, bytes, mark, &mut gone).await;
        if let Err(error) = &written {
            self.counts.refused.fetch_add(1, Relaxed);
            if !self.said.swap(true, Relaxed) {
                tracing::warn!("an object was not written to a file (said once): {error}");
            }
        }
        (written, gone)
    }

    async fn try_write(
        self: &Arc<Self>,
        path: &str,
        bytes: Vec<u8>,
        mark: u64,
        gone: &mut Vec<Vec<u8>>,
    ) -> Result<()> {
        let path = self.inside(path)?;
        let len = bytes.len() as u64;
        let turn = self.writing.acquire().await;
        let files = self.clone();
        self.counted.get_or_init(|| async move { drop(blocking(move || files.count()).await) }).await;
        gone.extend(self.make_room(len).await?);
        let files = self.clone();
        let written = blocking(move || files.write_file(&path, &bytes, mark)).await;
        drop(turn);
        if written.is_err() {
            self.known.lock().pending -= len;
        }
        written?;
        self.counts.written.fetch_add(1, Relaxed);
        self.counts.written_bytes.fetch_add(len, Relaxed);
        Ok(())
    }

    /// Records a written file that the master lists, and removes that of an earlier value.
    pub(crate) async fn keep(&self, granted: &GrantedFile, path: &str, len: u64) {
        let Ok(path) = self.inside(path) else { return };
        let obsolete = {
            let all = self.granted.lock();
            let is_removed = all.get(&granted.key).is_some_and(|of| granted.number < of.removed_before);
            let mut known = self.known.lock();
            known.pending -= len;
            match is_removed {
                true => Some(path),
                false => known.keep(path, len, &granted.key, granted.number),
            }
        };
        if let Some(obsolete) = obsolete {
            unlink(obsolete).await;
        }
    }

    /// Removes a written file that the master does not list.
    pub(crate) async fn discard(&self, path: &str, len: u64) {
        let Ok(path) = self.inside(path) else { return };
        {
            let mut known = self.known.lock();
            known.pending -= len;
            known.remove(&path);
        }
        unlink(path).await;
    }

    /// Removes the oldest files until the quota has space for `len` more bytes, and reserves them.
    /// Returns the keys of the removed files that this client wrote.
    async fn make_room(self: &Arc<Self>, len: u64) -> Result<Vec<Vec<u8>>> {
        let files = self.clone();
        let quota = blocking(move || files.limit()).await?;
        if len > quota {
            return Err(Error::new(
                ErrorCode::BufferOverflow,
                format!("{len} bytes; files may take {quota}"),
            ));
        }
        let mut gone = Vec::new();
        loop {
            let oldest = {
                let mut known = self.known.lock();
                if known.used.saturating_add(known.pending).saturating_add(len) <= quota {
                    known.pending += len;
                    return Ok(gone);
                }
                if self.evict { known.take_oldest() } else { None }
            };
            let Some((path, key)) = oldest else {
                return Err(Error::new(ErrorCode::NoAvailableHandle, "no space for more files"));
            };
            unlink(path).await;
            self.counts.evicted.fetch_add(1, Relaxed);
            gone.extend(key);
        }
    }

    /// Returns the number of bytes that files may take.
    fn limit(&self) -> io::Result<u64> {
        if self.quota > 0 {
            return Ok(self.quota);
        }
        self.make_dir(&self.dir)?;
        let about = rustix::fs::statvfs(&self.dir)?;
        Ok((about.f_frsize.saturating_mul(about.f_blocks) as f64 * 0.9) as u64)
    }

    /// Counts the files in the directory, the oldest first.
    fn count(&self) -> io::Result<()> {
        let mut found: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
        for outer in std::fs::read_dir(&self.dir)?.flatten() {
            for inner in std::fs::read_dir(outer.path()).into_iter().flatten().flatten() {
                for file in std::fs::read_dir(inner.path()).into_iter().flatten().flatten() {
                    if let Ok(about) = file.metadata()
                        && about.is_file()
                    {
                        found.push((
                            about.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                            file.path(),
                            about.len(),
                        ));
                    }
                }
            }
        }
        found.sort();
        let mut known = self.known.lock();
        for (_, path, len) in found {
            known.add(path, len, None);
        }
        Ok(())
    }

    /// Creates a directory and its missing parents, down from the directory of the files. The
    /// parent of that directory must exist: if the file system is not mounted, nothing is written.
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        match std::fs::create_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound && dir != self.dir => {
                dir.parent().map_or(Ok(()), |above| self.make_dir(above))?;
                self.make_dir(dir)
            }
            made => made,
        }
    }

    fn write_file(&self, path: &Path, bytes: &[u8], mark: u64) -> io::Result<()> {
        let folder = path.parent().unwrap_or(&self.dir);
        let aside = folder.join(format!(".{mark:016x}"));
        let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits().cast_signed();
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o644).custom_flags(flags);
        let mut file = match options.open(&aside) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_dir(folder)?;
                options.open(&aside)?
            }
            opened => opened?,
        };
        // Readers accept a file by its length. The bytes are therefore synced before the file gets
        // its name, so that a crash of this machine leaves no partial file under that name.
        let written = file.write_all(bytes).and_then(|()| file.sync_data());
        let written = written.and_then(|()| std::fs::rename(&aside, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&aside);
        }
        written
    }

    /// Removes the files of these keys from the table and returns their paths.
    pub(crate) fn let_go<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Vec<PathBuf> {
        let mut granted = self.granted.lock();
        let mut known = self.known.lock();
        let mut gone = Vec::new();
        for key in keys {
            if let Some(of_key) = granted.get_mut(key) {
                of_key.removed_before = self.grants.load(Relaxed);
            }
            if let Some(path) = known.own.get(key).map(|own| own.path.clone()) {
                known.remove(&path);
                gone.push(path);
            }
        }
        gone
    }

    /// Removes the file of a key if it has this path and this client wrote it.
    pub(crate) async fn forget(&self, key: &[u8], path: &Path) {
        let own = {
            let mut known = self.known.lock();
            let is = known.own.get(key).is_some_and(|own| own.path == path);
            if is {
                known.remove(path);
            }
            is
        };
        if own {
            unlink(path.to_owned()).await;
        }
    }

    /// Returns the keys and paths of the files that this client wrote.
    pub(crate) fn own(&self) -> Vec<(Vec<u8>, PathBuf)> {
        self.known.lock().own.iter().map(|(key, own)| (key.clone(), own.path.clone())).collect()
    }

    pub(crate) async fn unlink(paths: Vec<PathBuf>) {
        for path in paths {
            unlink(path).await;
        }
    }

    /// Opens the file of a value of `len` bytes.
    ///
    /// # Errors
    /// Returns `TRANSFER_FAIL` if the file is missing or has another length, and `RPC_TIMEOUT` if
    /// the file system does not respond in time.
    pub(crate) async fn open(&self, path: &str, len: u64, deadline: &Deadline) -> Result<Opened> {
        let path = self.inside(path)?;
        let open = move || {
            // A symbolic link, or a pipe that waits for a writer, is not the file of a value.
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
            let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
            Stamp::of(&file).map(|stamp| (file, stamp))
        };
        let (file, stamp) = self.ask(open, deadline).await?;
        if stamp.len != len {
            let text = format!("a file of {} bytes for a value of {len}", stamp.len);
            return Err(Error::new(ErrorCode::TransferFail, text));
        }
        Ok(Opened { file: Arc::new(file), stamp })
    }

    /// Reads a part of a file in pieces. `take` receives each piece with its offset in the part.
    /// The read fails if the file changed meanwhile.
    pub(crate) async fn read(
        &self,
        opened: &Opened,
        (from, len): (u64, usize),
        deadline: &Deadline,
        mut take: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        while at < len {
            let (file, some) = (opened.file.clone(), PIECE.min(len - at));
            let start = from + at as u64;
            let read = move || {
                let mut piece = vec![0; some];
                file.read_exact_at(&mut piece, start).map(|()| piece)
            };
            let piece = self.ask(read, deadline).await?;
            for (part, bytes) in piece.chunks(crate::buffers::COPIED_AT_ONCE).enumerate() {
                if part > 0 {
                    tokio::task::yield_now().await;
                }
                take(at + part * crate::buffers::COPIED_AT_ONCE, bytes)?;
            }
            at += some;
        }
        let file = opened.file.clone();
        if self.ask(move || Stamp::of(&file), deadline).await? != opened.stamp {
            return Err(Error::new(ErrorCode::TransferFail, "the file was written to while it was read"));
        }
        self.counts.read.fetch_add(1, Relaxed);
        self.counts.read_bytes.fetch_add(len as u64, Relaxed);
        Ok(())
    }

    pub(crate) fn not_read(&self, path: &str, error: &Error) {
        self.counts.unread.fetch_add(1, Relaxed);
        tracing::debug!(path, "a file was not read: {error}");
    }

    /// Runs file access on a blocking thread. An access that hangs keeps its read permit, and the
    /// caller waits until the deadline.
    async fn ask<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<R> + Send + 'static,
        deadline: &Deadline,
    ) -> Result<R> {
        let reading = self.reading.clone();
        let asked = async {
            let turn = reading.acquire_owned().await;
            blocking(move || {
                let done = work();
                drop(turn);
                done
            })
            .await
        };
        tokio::time::timeout(deadline.left(), asked).await.map_err(|_| late("a file"))?
    }
}

impl Opened {
    /// Returns a number that differs for every other file, and for the same file after a write.
    pub(crate) fn number(&self) -> u64 {
        use std::hash::BuildHasher;
        foldhash::quality::FixedState::with_seed(0).hash_one(self.stamp)
    }
}

impl Known {
    /// Adds a file that this client wrote. Returns the path of the obsolete file: that of an
    /// earlier value of the key, or this one if a later value has a file.
    fn keep(&mut self, path: PathBuf, len: u64, key: &[u8], number: u64) -> Option<PathBuf> {
        let before = match self.own.get(key) {
            Some(own) if own.path == path => None,
            Some(own) if own.number > number => return Some(path),
            Some(own) => Some(own.path.clone()),
            None => None,
        };
        if let Some(before) = &before {
            self.remove(before);
        }
        self.add(path.clone(), len, Some(key));
        self.own.insert(key.to_vec(), OwnFile { path, number });
        before
    }

    /// Adds a file to the count. `key` is that of the value, if this client wrote the file.
    fn add(&mut self, path: PathBuf, len: u64, key: Option<&[u8]>) {
        self.remove(&path);
        self.used = self.used.saturating_add(len);
        self.files.insert(path.clone(), KnownFile { len, key: key.map(<[u8]>::to_vec) });
        if self.order.len() > 2 * self.files.len() + 64 {
            let files = &self.files;
            self.order.retain(|path| files.contains_key(path));
        }
        self.order.push_back(path);
    }

    fn remove(&mut self, path: &Path) -> Option<Vec<u8>> {
        let file = self.files.remove(path)?;
        self.used -= file.len;
        if let Some(key) = &file.key {
            self.own.remove(key);
        }
        file.key
    }

    fn take_oldest(&mut self) -> Option<(PathBuf, Option<Vec<u8>>)> {
        while let Some(path) = self.order.pop_front() {
            if self.files.contains_key(&path) {
                let key = self.remove(&path);
                return Some((path, key));
            }
        }
        None
    }
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> io::Result<R> + Send + 'static) -> Result<R> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|error| Error::internal(format!("work on a file ended early: {error}")))?;
    done.map_err(|error| Error::new(ErrorCode::TransferFail, error.to_string()))
}

/// Removes a file. A file that does not exist counts as removed.
async fn unlink(path: PathBuf) {
    let _ = blocking(move || std::fs::remove_file(path)).await;
}
