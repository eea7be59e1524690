//! Files on a file system that clients share (`--root_fs_dir`). Values are written there after a
//! put, and read from there when no other replica exists.
//!
//! A file holds the value and nothing else. The client writes it under a temporary name that no
//! reader opens, syncs it, and renames it. The name that the master gives to readers is therefore
//! always that of a whole file. A reader accepts a file if the file has the length of the value and
//! did not change during the read.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::shared_folder::SharedFolder;
use crate::config::ClientConfig;
use crate::deadline::{Deadline, deadline_exceeded};
use mooncake_protocol::wire::StorageConfig;

/// Maximum number of files that are written at a time, as in Mooncake C++.
const MAX_WRITES: usize = 2;
/// Maximum number of files that are read at a time.
const MAX_READS: usize = 16;
/// Maximum amount of data that waits to be written, in KiB. A value above the limit gets no file.
const MAX_QUEUED_KIB: usize = 256 << 10;
/// Number of bytes that are read at a time.
const READ_CHUNK: usize = 4 << 20;

/// Access of this client to the shared files.
#[derive(Debug)]
pub(crate) struct Files {
    folder: Arc<SharedFolder>,
    evict: bool,
    quota: u64,
    /// Permits to write a file.
    write_permits: Semaphore,
    /// Permits to read a file.
    read_permits: Arc<Semaphore>,
    /// Permits for data that waits to be written, one per KiB.
    queue_permits: Arc<Semaphore>,
    /// Marker that is set when the existing files are counted, before the first write.
    counted: tokio::sync::OnceCell<()>,
    table: Mutex<FileTable>,
    /// Granted files that are neither reported nor given up, by key.
    granted: Mutex<HashMap<Vec<u8>, KeyGrants>>,
    /// Signal that a granted file is reported or given up.
    settled: Notify,
    /// Number of files that this client was granted.
    grants: AtomicU64,
    counts: FileCounts,
    /// True if a failed write has been logged.
    failure_logged: AtomicBool,
}

/// Files that a client knows: its own, and those that existed before its first write.
#[derive(Debug, Default)]
struct FileTable {
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
struct KeyGrants {
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
struct FileCounts {
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
pub(crate) type QueuePermit = OwnedSemaphorePermit;

/// An open file and its stamp at the time of opening.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: Arc<File>,
    stamp: FileStamp,
}

/// Attributes of a file that change when a process writes to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileStamp {
    inode: (u64, u64),
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("no ordinary file"));
        }
        Ok(Self {
            inode: (metadata.dev(), metadata.ino()),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

impl Files {
    /// Creates the access to shared files. Returns `None` if the master has no directory for files,
    /// or if the path of the directory is not absolute or contains `..`. A directory that
    /// `client` does not allow is logged, and not used.
    pub(crate) fn new(config: StorageConfig, client: &ClientConfig) -> Option<Arc<Self>> {
        if config.fs_dir.is_empty() {
            return None;
        }
        let dir = PathBuf::from(config.fs_dir);
        if !dir.is_absolute() || dir.components().any(|part| part == Component::ParentDir) {
            tracing::warn!(dir = %dir.display(), "the folder for files of the master is not an absolute path: no files are used");
            return None;
        }
        let folder = Arc::new(SharedFolder::new(dir, &client.fs_roots, client.file_mode));
        let checked = folder.clone();
        // A file system that hangs delays nothing else.
        drop(tokio::task::spawn_blocking(move || checked.check()));
        Some(Arc::new(Self {
            folder,
            evict: config.evict,
            quota: config.quota,
            write_permits: Semaphore::new(MAX_WRITES),
            read_permits: Arc::new(Semaphore::new(MAX_READS)),
            queue_permits: Arc::new(Semaphore::new(MAX_QUEUED_KIB)),
            counted: tokio::sync::OnceCell::new(),
            table: Mutex::default(),
            granted: Mutex::default(),
            settled: Notify::new(),
            grants: AtomicU64::new(0),
            counts: FileCounts::default(),
            failure_logged: AtomicBool::new(false),
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
            used: self.table.lock().used,
        }
    }

    /// Registers a file that the master granted to a write.
    pub(crate) fn granted(self: &Arc<Self>, key: &[u8]) -> GrantedFile {
        self.register(&mut self.granted.lock(), key)
    }

    fn register(self: &Arc<Self>, granted: &mut HashMap<Vec<u8>, KeyGrants>, key: &[u8]) -> GrantedFile {
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
    pub(crate) fn acquire_queue_permit(&self, len: usize) -> Option<QueuePermit> {
        let permit = u32::try_from(len.div_ceil(1024)).ok();
        let permit = permit.and_then(|kib| self.queue_permits.clone().try_acquire_many_owned(kib).ok());
        if permit.is_none() {
            self.counts.refused.fetch_add(1, Relaxed);
        }
        permit
    }

    /// Waits until no value waits to be written.
    pub(crate) async fn idle(&self) {
        let _ = self.queue_permits.acquire_many(MAX_QUEUED_KIB as u32).await;
    }

    /// Writes a value to a file. Also returns the keys of files that were evicted for it, which the
    /// master still lists as replicas. [`record_written`](Self::record_written) or
    /// [`discard`](Self::discard) follows a success.
    pub(crate) async fn write(
        self: &Arc<Self>,
        path: &str,
        bytes: Vec<u8>,
        mark: u64,
    ) -> (Result<()>, Vec<Vec<u8>>) {
        let mut evicted_keys = Vec::new();
        let written = self.try_write(path, bytes, mark, &mut evicted_keys).await;
        if let Err(error) = &written {
            self.counts.refused.fetch_add(1, Relaxed);
            if !self.failure_logged.swap(true, Relaxed) {
                tracing::warn!("an object was not written to a file (said once): {error}");
            }
        }
        (written, evicted_keys)
    }

    async fn try_write(
        self: &Arc<Self>,
        path: &str,
        bytes: Vec<u8>,
        mark: u64,
        evicted_keys: &mut Vec<Vec<u8>>,
    ) -> Result<()> {
        let path = self.folder.inside(path)?;
        let len = bytes.len() as u64;
        let permit = self.write_permits.acquire().await;
        let files = self.clone();
        self.counted.get_or_init(|| async move { drop(blocking(move || files.count()).await) }).await;
        evicted_keys.extend(self.evict_for(len).await?);
        let files = self.clone();
        let written = blocking(move || files.folder.write(&path, &bytes, mark)).await;
        drop(permit);
        if written.is_err() {
            self.table.lock().pending -= len;
        }
        written?;
        self.counts.written.fetch_add(1, Relaxed);
        self.counts.written_bytes.fetch_add(len, Relaxed);
        Ok(())
    }

    /// Records a written file that the master lists, and removes that of an earlier value.
    pub(crate) async fn record_written(&self, granted: &GrantedFile, path: &str, len: u64) {
        let Ok(path) = self.folder.inside(path) else { return };
        let obsolete = {
            let all = self.granted.lock();
            let is_removed = all.get(&granted.key).is_some_and(|of| granted.number < of.removed_before);
            let mut table = self.table.lock();
            table.pending -= len;
            match is_removed {
                true => Some(path),
                false => table.record_written(path, len, &granted.key, granted.number),
            }
        };
        if let Some(obsolete) = obsolete {
            self.unlink(obsolete).await;
        }
    }

    /// Removes a written file that the master does not list.
    pub(crate) async fn discard(&self, path: &str, len: u64) {
        let Ok(path) = self.folder.inside(path) else { return };
        {
            let mut table = self.table.lock();
            table.pending -= len;
            table.remove(&path);
        }
        self.unlink(path).await;
    }

    /// Removes the oldest files until the quota has space for `len` more bytes, and reserves them.
    /// Returns the keys of the removed files that this client wrote.
    async fn evict_for(self: &Arc<Self>, len: u64) -> Result<Vec<Vec<u8>>> {
        let files = self.clone();
        let quota = blocking(move || files.limit()).await?;
        if len > quota {
            return Err(Error::new(
                ErrorCode::BufferOverflow,
                format!("{len} bytes; files may take {quota}"),
            ));
        }
        let mut evicted_keys = Vec::new();
        loop {
            let oldest = {
                let mut table = self.table.lock();
                if table.used.saturating_add(table.pending).saturating_add(len) <= quota {
                    table.pending += len;
                    return Ok(evicted_keys);
                }
                if self.evict { table.take_oldest() } else { None }
            };
            let Some((path, key)) = oldest else {
                return Err(Error::new(ErrorCode::NoAvailableHandle, "no space for more files"));
            };
            self.unlink(path).await;
            self.counts.evicted.fetch_add(1, Relaxed);
            evicted_keys.extend(key);
        }
    }

    /// Returns the number of bytes that files may take.
    fn limit(&self) -> io::Result<u64> {
        if self.quota > 0 {
            return Ok(self.quota);
        }
        Ok((self.folder.capacity()? as f64 * 0.9) as u64)
    }

    /// Counts the files in the directory, the oldest first.
    fn count(&self) -> io::Result<()> {
        let found = self.folder.files()?;
        let mut table = self.table.lock();
        for file in found {
            table.add(file.path, file.len, None);
        }
        Ok(())
    }

    /// Removes the files of these keys from the table and returns their paths.
    pub(crate) fn remove_keys<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Vec<PathBuf> {
        let mut granted = self.granted.lock();
        let mut table = self.table.lock();
        let mut paths = Vec::new();
        for key in keys {
            if let Some(of_key) = granted.get_mut(key) {
                of_key.removed_before = self.grants.load(Relaxed);
            }
            if let Some(path) = table.own.get(key).map(|own| own.path.clone()) {
                table.remove(&path);
                paths.push(path);
            }
        }
        paths
    }

    /// Removes the file of a key if it has this path and this client wrote it.
    pub(crate) async fn forget(&self, key: &[u8], path: &Path) {
        let is_own = {
            let mut table = self.table.lock();
            let is_own = table.own.get(key).is_some_and(|own| own.path == path);
            if is_own {
                table.remove(path);
            }
            is_own
        };
        if is_own {
            self.unlink(path.to_owned()).await;
        }
    }

    /// Returns the keys and paths of the files that this client wrote.
    pub(crate) fn own(&self) -> Vec<(Vec<u8>, PathBuf)> {
        self.table.lock().own.iter().map(|(key, own)| (key.clone(), own.path.clone())).collect()
    }

    pub(crate) async fn unlink_all(&self, paths: Vec<PathBuf>) {
        for path in paths {
            self.unlink(path).await;
        }
    }

    /// Removes a file. A file that does not exist counts as removed.
    async fn unlink(&self, path: PathBuf) {
        let folder = self.folder.clone();
        let _ = blocking(move || folder.remove(&path)).await;
    }

    /// Opens the file of a value of `len` bytes.
    ///
    /// # Errors
    /// Returns `TRANSFER_FAIL` if the file is missing or has another length, `FILE_OPEN_FAIL` if
    /// this client may not read it, and `RPC_TIMEOUT` if the file system does not respond in time.
    pub(crate) async fn open(&self, path: &str, len: u64, deadline: &Deadline) -> Result<OpenFile> {
        let path = self.folder.inside(path)?;
        let folder = self.folder.clone();
        let open = move || {
            let file = folder.read(&path)?;
            FileStamp::of(&file).map(|stamp| (file, stamp))
        };
        let (file, stamp) = self.run_read(open, deadline).await?;
        if stamp.len != len {
            let text = format!("a file of {} bytes for a value of {len}", stamp.len);
            return Err(Error::new(ErrorCode::TransferFail, text));
        }
        Ok(OpenFile { file: Arc::new(file), stamp })
    }

    /// Reads a part of a file in pieces. `take` receives each piece with its offset in the part.
    /// The read fails if the file changed meanwhile.
    pub(crate) async fn read(
        &self,
        open_file: &OpenFile,
        (from, len): (u64, usize),
        deadline: &Deadline,
        mut take: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        while at < len {
            let (file, chunk_len) = (open_file.file.clone(), READ_CHUNK.min(len - at));
            let start = from + at as u64;
            let read = move || {
                let mut piece = vec![0; chunk_len];
                file.read_exact_at(&mut piece, start).map(|()| piece)
            };
            let piece = self.run_read(read, deadline).await?;
            for (part, bytes) in piece.chunks(crate::buffers::COPY_CHUNK).enumerate() {
                if part > 0 {
                    tokio::task::yield_now().await;
                }
                take(at + part * crate::buffers::COPY_CHUNK, bytes)?;
            }
            at += chunk_len;
        }
        let file = open_file.file.clone();
        if self.run_read(move || FileStamp::of(&file), deadline).await? != open_file.stamp {
            return Err(Error::new(ErrorCode::TransferFail, "the file was written to while it was read"));
        }
        self.counts.read.fetch_add(1, Relaxed);
        self.counts.read_bytes.fetch_add(len as u64, Relaxed);
        Ok(())
    }

    pub(crate) fn record_unread(&self, path: &str, error: &Error) {
        self.counts.unread.fetch_add(1, Relaxed);
        tracing::debug!(path, "a file was not read: {error}");
    }

    /// Runs file access on a blocking thread. An access that hangs keeps its read permit, and the
    /// caller waits until the deadline.
    async fn run_read<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<R> + Send + 'static,
        deadline: &Deadline,
    ) -> Result<R> {
        let read_permits = self.read_permits.clone();
        let read = async {
            let permit = read_permits.acquire_owned().await;
            blocking(move || {
                let done = work();
                drop(permit);
                done
            })
            .await
        };
        tokio::time::timeout(deadline.left(), read).await.map_err(|_| deadline_exceeded("a file"))?
    }
}

impl OpenFile {
    /// Returns a number that differs for every other file, and for the same file after a write.
    pub(crate) fn number(&self) -> u64 {
        use std::hash::BuildHasher;
        foldhash::quality::FixedState::with_seed(0).hash_one(self.stamp)
    }
}

impl FileTable {
    /// Adds a file that this client wrote. Returns the path of the obsolete file: that of an
    /// earlier value of the key, or this one if a later value has a file.
    fn record_written(&mut self, path: PathBuf, len: u64, key: &[u8], number: u64) -> Option<PathBuf> {
        let earlier = match self.own.get(key) {
            Some(own) if own.path == path => None,
            Some(own) if own.number > number => return Some(path),
            Some(own) => Some(own.path.clone()),
            None => None,
        };
        if let Some(earlier) = &earlier {
            self.remove(earlier);
        }
        self.add(path.clone(), len, Some(key));
        self.own.insert(key.to_vec(), OwnFile { path, number });
        earlier
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
    done.map_err(|error| {
        // Files that this client may not use are not missing.
        let refused = error.kind() == io::ErrorKind::PermissionDenied;
        let code = if refused { ErrorCode::FileOpenFail } else { ErrorCode::TransferFail };
        Error::new(code, error.to_string()).with_source(error)
    })
}
