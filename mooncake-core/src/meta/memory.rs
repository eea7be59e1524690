//! In-memory metadata directory: for embedded clusters, tests, and the HTTP metadata server of the
//! master.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use parking_lot::{Mutex, MutexGuard};

use super::watchers::Watchers;
use super::{Expect, Hold, Leases, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use crate::clock::{Moment, SharedClock, SystemClock};
use crate::error::{Error, ErrorCode, Result};
use crate::fault_injection::is_planted;

/// Bounds of a directory in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Largest number of keys.
    pub entries: usize,
    /// Largest number of bytes that all keys and values have together.
    pub bytes: usize,
}

impl MemoryLimits {
    /// No bounds: for directories that only their own process writes.
    pub const NONE: Self = Self { entries: usize::MAX, bytes: usize::MAX };
    /// Bounds of a server: about ten times what a cluster of 10,000 nodes writes.
    pub const SERVER: Self = Self { entries: 1 << 18, bytes: 1 << 30 };
}

/// Directory in the memory of this process. Share it by `Arc`.
///
/// No task runs in the background. The next call of any method deletes expired keys, or
/// [`expire`](Self::expire) if there is no other.
#[derive(Debug)]
pub struct MemoryMetadata {
    clock: SharedClock,
    limits: MemoryLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<String, MetaValue>,
    /// Bytes of all keys and values.
    bytes: usize,
    revision: u64,
    watchers: Watchers,
    /// Leases by key.
    holds: HashMap<String, Lease>,
}

#[derive(Debug)]
struct Lease {
    /// Revision of the value that the key was taken with.
    revision: u64,
    time: Duration,
    until: Moment,
}

impl MemoryMetadata {
    /// Creates an empty directory on the clock of the machine.
    pub fn new() -> Self {
        Self::with_clock(SystemClock::shared())
    }

    /// Creates an empty directory that counts lease times on this clock.
    pub fn with_clock(clock: SharedClock) -> Self {
        Self { clock, limits: MemoryLimits::NONE, state: Mutex::default() }
    }

    /// Creates an empty directory that refuses what would exceed its bounds, by the machine's
    /// clock.
    pub fn with_limits(limits: MemoryLimits) -> Self {
        Self { limits, ..Self::new() }
    }

    /// Checks that a value may be set.
    ///
    /// # Errors
    /// Returns `NO_AVAILABLE_HANDLE` if the directory would exceed its bounds. A value that is not
    /// longer than the present one of its key is always taken.
    fn check_limits(&self, state: &State, key: &str, value: &Bytes) -> Result<()> {
        let current = state.entries.get(key).map(|current| key.len() + current.value.len());
        let (new, MemoryLimits { entries, bytes }) = (key.len() + value.len(), self.limits);
        let is_full = match current {
            Some(current) => new > current && state.bytes - current + new > bytes,
            None => state.entries.len() >= entries || state.bytes.saturating_add(new) > bytes,
        };
        if !is_full || is_planted("metadata-unbounded") {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::NoAvailableHandle,
            format!(
                "cannot set metadata key: the directory is full. key={key:?} len={} entries={} \
                 of {entries} bytes={} of {bytes}; delete the keys of nodes that are gone",
                value.len(),
                state.entries.len(),
                state.bytes
            ),
        ))
    }

    /// Deletes keys whose lease has expired, and notifies watchers.
    pub fn expire(&self) {
        drop(self.lock_current());
    }

    /// Locks the state and deletes expired keys.
    fn lock_current(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if !state.holds.is_empty() {
            let now = self.clock.now();
            let over: Vec<_> = state.holds.extract_if(|_, lease| lease.until <= now).collect();
            for (key, _) in over {
                state.remove(&key);
            }
        }
        state
    }
}

impl Default for MemoryMetadata {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn set(&mut self, key: &str, value: Bytes) -> u64 {
        self.revision += 1;
        let entry = MetaValue { value, revision: self.revision };
        self.watchers.notify(key, Some(&entry));
        self.bytes += key.len() + entry.value.len();
        if let Some(old) = self.entries.insert(key.to_owned(), entry) {
            self.bytes -= key.len() + old.value.len();
        }
        // A write by another client ends the lease.
        self.holds.remove(key);
        self.revision
    }

    fn remove(&mut self, key: &str) -> bool {
        self.holds.remove(key);
        let Some(old) = self.entries.remove(key) else { return false };
        self.bytes -= key.len() + old.value.len();
        self.watchers.notify(key, None);
        true
    }

    fn held(&mut self, hold: &Hold) -> Option<&mut Lease> {
        self.holds.get_mut(&hold.key).filter(|lease| lease.revision == hold.revision)
    }
}

#[async_trait]
impl MetadataBackend for MemoryMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: true, durable: false, atomic: true, list: true }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        Ok(self.lock_current().entries.get(key).cloned())
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let mut state = self.lock_current();
        let current = state.entries.get(key).map(|v| v.revision);
        expect.check(key, current)?;
        self.check_limits(&state, key, &value)?;
        Ok(state.set(key, value))
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.lock_current().remove(key))
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        let mut state = self.lock_current();
        let current = state.entries.get(key).map(|v| v.revision);
        Expect::At(revision).check(key, current)?;
        state.remove(key);
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let state = self.lock_current();
        Ok(state
            .entries
            .range(prefix.to_owned()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect())
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        Ok(self.lock_current().watchers.add(prefix))
    }
}

#[async_trait]
impl Leases for MemoryMetadata {
    async fn take(&self, key: &str, value: Bytes, time: Duration) -> Result<Option<Hold>> {
        let mut state = self.lock_current();
        if state.entries.contains_key(key) {
            return Ok(None);
        }
        self.check_limits(&state, key, &value)?;
        let revision = state.set(key, value);
        let lease = Lease { revision, time, until: self.clock.now().after(time) };
        state.holds.insert(key.to_owned(), lease);
        Ok(Some(Hold { key: key.to_owned(), revision, lease: revision.cast_signed() }))
    }

    async fn renew(&self, hold: &Hold) -> Result<bool> {
        let mut state = self.lock_current();
        let Some(lease) = state.held(hold) else { return Ok(false) };
        lease.until = self.clock.now().after(lease.time);
        Ok(true)
    }

    async fn release(&self, hold: Hold) -> Result<()> {
        let mut state = self.lock_current();
        if state.held(&hold).is_some() {
            state.remove(&hold.key);
        }
        Ok(())
    }
}
