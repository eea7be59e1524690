//! Metadata directory in a folder of this host: RocksDB, for state that a process must find again
//! after a restart.

#[allow(unsafe_code)]
mod database;
#[allow(unsafe_code)]
mod library;
mod mark;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mooncake_core::meta::{
    Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend, Watchers, fingerprint,
};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::private_files::Folder;
use parking_lot::{Condvar, Mutex};

use crate::settings::FOLDER;
use database::{Change, Database};
use mark::Mark;

/// Key of the last change's number, and of the sum of all [`trace`]s, of eight bytes each.
const LAST: &[u8] = b"last";
/// First byte of the keys of the directory. A value is the number of its change, of eight bytes,
/// and the stored bytes.
const ENTRY: u8 = b'/';

/// Metadata directory in a folder. Runs on a tokio runtime.
///
/// Acknowledged changes survive a crash of the process and of the machine. One process at a time
/// has the folder open, and shares it between all users in that process. A failed write may have
/// been applied all the same. Watchers then receive it once that is known. The cause of a failure,
/// such as a full disk, may disappear before the next call. RocksDB merges its files from time to
/// time, so as much space again as they take should be free.
#[derive(Clone, Debug)]
pub struct RocksMetadata {
    shared: Arc<Shared>,
}

impl RocksMetadata {
    /// Opens the directory in the folder of `rocksdb:///absolute/path`, or creates it. Blocks for
    /// some milliseconds.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a relative path or a folder with other contents,
    /// `NOT_SUPPORTED` without the library, `FILE_LOCK_FAIL` if another process has the folder,
    /// `CHECKSUM_MISMATCH` for damage, and `FILE_OPEN_FAIL`.
    pub fn open(url: &str) -> Result<Self> {
        let path = Path::new(url.strip_prefix(FOLDER).unwrap_or_default());
        if !path.is_absolute() {
            return Err(Error::invalid(format!(
                "metadata directory {url:?}: expected {FOLDER} and an absolute path"
            )));
        }
        Shared::open(path).map(|shared| Self { shared }).map_err(|error| error.context(describe(path)))
    }

    /// Runs a function on a thread that may block.
    async fn with<A: Send + 'static>(
        &self,
        operation: impl FnOnce(&mut State) -> Result<A> + Send + 'static,
    ) -> Result<A> {
        let place = describe(&self.shared.path);
        let runtime = tokio::runtime::Handle::try_current()
            .map_err(|_| Error::invalid(format!("cannot use {place}: no tokio runtime; call it on one")))?;
        let shared = self.shared.clone();
        let outcome = runtime.spawn_blocking(move || operation(&mut shared.state.lock())).await;
        outcome
            .unwrap_or_else(|error| Err(Error::internal(format!("blocking call was cancelled: {error}"))))
            .map_err(|error| error.context(place))
    }
}

fn describe(path: &Path) -> String {
    format!("metadata directory {FOLDER}{}", path.display())
}

#[async_trait]
impl MetadataBackend for RocksMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: true, durable: true, atomic: true, list: true }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        let key = key.to_owned();
        self.with(move |state| state.opened()?.get(&key)).await
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let key = key.to_owned();
        self.with(move |state| state.put(&key, value, expect)).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let key = key.to_owned();
        self.with(move |state| state.delete(&key)).await
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        let key = key.to_owned();
        self.with(move |state| state.delete_at(&key, revision)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let prefix = prefix.to_owned();
        self.with(move |state| state.opened()?.list(&prefix)).await
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        let prefix = prefix.to_owned();
        self.with(move |state| Ok(state.watchers.add(&prefix))).await
    }
}

/// Open folder, shared by all its users in this process.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    path: PathBuf,
    /// Open database. `None` after a failed write, until the next call.
    opened: Option<Opened>,
    mark: Mark,
    watchers: Watchers,
    /// Key and number of a failed change that may have been applied.
    uncertain_change: Option<(String, u64)>,
}

#[derive(Debug)]
struct Opened {
    database: Database,
    /// Number of the last change.
    last: u64,
    /// Sum of the [`trace`]s of all entries.
    sum: u64,
}

/// Folders that are open in this process. A folder without users stays until it is closed.
static OPEN: Mutex<Option<HashMap<PathBuf, Weak<Shared>>>> = Mutex::new(None);
static CLOSED: Condvar = Condvar::new();

impl Shared {
    fn open(path: &Path) -> Result<Arc<Self>> {
        let unusable = |error: std::io::Error| Error::new(ErrorCode::FileOpenFail, error.to_string());
        Folder::own(path).map_err(unusable)?;
        let path = path.canonicalize().map_err(unusable)?;
        let mut open = OPEN.lock();
        while let Some(known) = open.get_or_insert_default().get(&path) {
            match known.upgrade() {
                Some(shared) => return Ok(shared),
                None => CLOSED.wait(&mut open),
            }
        }
        let mark = Mark::take(&path)?;
        let opened = Opened::open(&path, &mark)?;
        let watchers = Watchers::default();
        let state =
            State { path: path.clone(), opened: Some(opened), mark, watchers, uncertain_change: None };
        let shared = Arc::new(Self { path: path.clone(), state: Mutex::new(state) });
        open.get_or_insert_default().insert(path, Arc::downgrade(&shared));
        Ok(shared)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.state.get_mut().opened = None;
        self.state.get_mut().mark.release();
        OPEN.lock().get_or_insert_default().remove(&self.path);
        CLOSED.notify_all();
    }
}

impl Opened {
    fn open(path: &Path, mark: &Mark) -> Result<Self> {
        let database = Database::open(path)?;
        let (last, sum) = match database.get(LAST)? {
            Some(bytes) => {
                let (last, sum) = parts(&bytes)?;
                (last, number(sum)?)
            }
            None => (0, 0),
        };
        if last < mark.number() {
            return Err(damaged(format!(
                "change {} was acknowledged, but the last one found is {last}: files are missing or truncated",
                mark.number()
            )));
        }
        let opened = Self { database, last, sum };
        // RocksDB detects damage inside a file, but not always a missing file.
        let mut there = 0u64;
        opened.each("", |key, revision, _| there = there.wrapping_add(trace(key, revision)))?;
        if there != sum {
            return Err(damaged(
                "the entries differ from the acknowledged ones: files are missing or truncated",
            ));
        }
        Ok(opened)
    }

    fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        let Some(bytes) = self.database.get(&entry(key))? else { return Ok(None) };
        let (revision, value) = parts(&bytes)?;
        Ok(Some(MetaValue { revision, value: Bytes::copy_from_slice(value) }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let mut entries = Vec::new();
        self.each(prefix, |key, revision, value| {
            entries.push((key.to_owned(), MetaValue { revision, value: Bytes::copy_from_slice(value) }));
        })?;
        Ok(entries)
    }

    /// Calls `each` for the key, revision and value of each entry with this prefix, in order.
    fn each(&self, prefix: &str, mut each: impl FnMut(&str, u64, &[u8])) -> Result<()> {
        self.database.scan(&entry(prefix), |key, stored| {
            let key = str::from_utf8(&key[1..]).map_err(|_| damaged("a key is not valid UTF-8"))?;
            let (revision, value) = parts(stored)?;
            each(key, revision, value);
            Ok(())
        })
    }
}

impl State {
    /// Returns the database, which is opened again after a failed write.
    fn opened(&mut self) -> Result<&mut Opened> {
        let opened = match self.opened.take() {
            Some(opened) => opened,
            None => {
                let opened = Opened::open(&self.path, &self.mark)?;
                if let Some((key, number)) = &self.uncertain_change
                    && *number <= opened.last
                {
                    let now = opened.get(key)?;
                    tracing::info!(key, number, "failed write was applied");
                    self.watchers.notify(key, now.as_ref());
                }
                self.uncertain_change = None;
                opened
            }
        };
        Ok(self.opened.insert(opened))
    }

    fn put(&mut self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let current = self.opened()?.get(key)?.map(|value| value.revision);
        expect.check(key, current)?;
        self.change(key, current, Some(value))
    }

    fn delete(&mut self, key: &str) -> Result<bool> {
        let Some(current) = self.opened()?.get(key)? else { return Ok(false) };
        self.change(key, Some(current.revision), None)?;
        Ok(true)
    }

    fn delete_at(&mut self, key: &str, revision: u64) -> Result<()> {
        let current = self.opened()?.get(key)?.map(|value| value.revision);
        Expect::At(revision).check(key, current)?;
        self.change(key, current, None).map(drop)
    }

    /// Applies a permitted change to a key of this revision. Returns the number of the change.
    fn change(&mut self, key: &str, current: Option<u64>, value: Option<Bytes>) -> Result<u64> {
        let opened = self.opened()?;
        let number = opened.last + 1;
        let sum = opened.sum.wrapping_sub(current.map_or(0, |revision| trace(key, revision)));
        let sum = sum.wrapping_add(value.as_ref().map_or(0, |_| trace(key, number)));
        let entry = entry(key);
        let stored = value.as_ref().map(|value| [&number.to_be_bytes()[..], value].concat());
        let change = match &stored {
            Some(stored) => Change::Put(&entry, stored),
            None => Change::Delete(&entry),
        };
        let last = [number.to_be_bytes(), sum.to_be_bytes()].concat();
        let written = opened.database.write(&[change, Change::Put(LAST, &last)]);
        (opened.last, opened.sum) = (number, sum);
        if let Err(error) = written.and_then(|()| self.mark.note(number)) {
            // The outcome is known only once RocksDB has read its log again. It accepts no writes
            // before that either.
            self.opened = None;
            self.uncertain_change = Some((key.to_owned(), number));
            return Err(error);
        }
        self.watchers.notify(key, value.map(|value| MetaValue { value, revision: number }).as_ref());
        Ok(number)
    }
}

fn entry(key: &str) -> Vec<u8> {
    [&[ENTRY], key.as_bytes()].concat()
}

/// Splits a stored value into revision and bytes.
fn parts(stored: &[u8]) -> Result<(u64, &[u8])> {
    let (revision, value) = stored.split_at_checked(8).ok_or_else(|| damaged("a value is too short"))?;
    Ok((number(revision)?, value))
}

fn number(bytes: &[u8]) -> Result<u64> {
    let bytes = bytes.try_into().map_err(|_| damaged("a number does not have eight bytes"))?;
    Ok(u64::from_be_bytes(bytes))
}

/// Returns the contribution of an entry to the sum over all entries.
fn trace(key: &str, revision: u64) -> u64 {
    fingerprint(&[key.as_bytes(), &revision.to_be_bytes()].concat())
}

fn damaged(what: impl Into<String>) -> Error {
    Error::new(ErrorCode::ChecksumMismatch, what.into())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use futures::{FutureExt, StreamExt};

    #[tokio::test]
    async fn failed_but_applied_write_is_watched() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("{FOLDER}{}", folder.path().display());
        // The suite in `tests/` decides whether the library must be present.
        let Ok(backend) = RocksMetadata::open(&url) else { return };
        backend.put("k", "1".into(), Expect::Any).await.unwrap();
        let mut events = backend.watch("").await.unwrap();
        backend.shared.state.lock().mark.forbid(folder.path());
        let error = backend.put("k", "2".into(), Expect::Any).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::PersistentFail, "{error}");
        assert!(events.next().now_or_never().is_none(), "nobody knows yet");
        let now = backend.get("k").await.unwrap().unwrap();
        assert_eq!(now.value, "2");
        let event = events.next().now_or_never().flatten().unwrap();
        assert_eq!((event.key.as_str(), event.value), ("k", Some(now)));
        backend.delete("k").await.unwrap_err();
        assert!(backend.list("").await.unwrap().is_empty());
        assert_eq!(events.next().now_or_never().flatten().unwrap().value, None);
    }
}
