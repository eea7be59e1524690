//! The local hot cache: values that this client has read from other members more than once, kept to be read again without a wire.
//!
//! A read asks the master all the same, and with the answer comes what decides whether the bytes kept are the value asked for.
//! Address and length do not: space is used again. The numbers of the replicas do, where each is of one value for all time: a master of ours
//! draws where it begins to count, so that no two masters, and no two lives of one, give out the same, and changes the number when it lets
//! space be written over in place. So bytes that were once read whole, under a lease, from a replica of that number are the value of every later
//! answer that names it, whatever others have written or removed meanwhile; nothing has to be told to this client, and no lease is
//! needed to copy what is its own.
//!
//! A master of the existing system counts from 1 in each life, and a value of the same length is written over under its old number.
//! What is known then is what the existing client knows: its own puts, upserts and removes make it forget the key (before and after the call, and
//! what is being fetched as well), a mount after the master forgot it makes it forget everything, and number, place, length and checksum must be
//! what they were. What another client writes over in place, without a checksum, is seen only when the value has been evicted here. So the cache is
//! off unless it is asked for, and with checksums on (`ClientConfig::checksum`) this is closed, too: the master's answer carries the new
//! value's.
//!
//! Keys come in by being asked for: a sketch counts what came from afar, and who has come often enough is fetched once more in the
//! background, straight into memory of the cache, so that the reader keeps neither its buffer nor its time for it.

mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_core::replica::{ReplicaList, ReplicaStatus};
use mooncake_core::{Error, Result};
use mooncake_transport::engine::Engine;
use mooncake_transport::{BufferPool, PoolBuf, PoolConfig, Transport};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use self::table::{Entry, Table};
use super::{Inner, get, shown};

/// Values that are fetched at once.
const COMING: usize = 2;
/// Who makes room drops this many times what it needs at most: space that is still being copied from comes back later.
const DROPS: u64 = 4;

/// How much of what is read from other members a client keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotCacheConfig {
    /// Bytes of memory for it. Zero: nothing is kept.
    pub bytes: u64,
    /// Longest value that is kept, in bytes.
    pub longest: u64,
    /// A key is kept from this read on; 255 at most.
    pub admission: u32,
}

impl Default for HotCacheConfig {
    fn default() -> Self {
        Self { bytes: 0, longest: 16 << 20, admission: 2 }
    }
}

/// What the hot cache holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HotCacheStats {
    /// Values kept.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that were served from it.
    pub hits: u64,
    /// Values that came into it.
    pub fills: u64,
}

pub(super) struct HotCache<T: Transport> {
    pool: BufferPool<T>,
    config: HotCacheConfig,
    table: Mutex<Table>,
    coming: Arc<Semaphore>,
    hits: AtomicU64,
    fills: AtomicU64,
}

impl<T: Transport> HotCache<T> {
    /// `None` when nothing is to be kept.
    pub(super) fn new(
        config: HotCacheConfig,
        memory: &HostMemoryOptions,
        engine: &Engine<T>,
        seed: u64,
    ) -> Result<Option<Self>> {
        if config.bytes == 0 {
            return Ok(None);
        }
        let len = usize::try_from(config.bytes)
            .map_err(|_| Error::invalid(format!("a hot cache of {} bytes", config.bytes)))?;
        let memory = HostMemory::with(len, memory).map_err(|error| error.context("hot cache"))?;
        let memory = engine.register_local(Arc::new(memory))?.exclusive();
        let memory = memory.map_err(|_| Error::internal("new memory is not ours alone"))?;
        Ok(Some(Self {
            pool: BufferPool::new(memory, &PoolConfig::default())?,
            config,
            table: Mutex::new(Table::new(seed)),
            coming: Arc::new(Semaphore::new(COMING)),
            hits: AtomicU64::new(0),
            fills: AtomicU64::new(0),
        }))
    }

    /// The bytes of the value that the answer is about, if they are kept.
    pub(super) fn find(&self, key: &[u8], list: &ReplicaList) -> Option<Bytes> {
        self.table.lock().find(key, list)
    }

    /// A value was copied from here.
    pub(super) fn hit(&self) {
        self.hits.fetch_add(1, Relaxed);
    }

    pub(super) fn forget<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        let mut table = self.table.lock();
        keys.into_iter().for_each(|key| table.forget(key));
    }

    pub(super) fn clear(&self) {
        self.table.lock().clear();
    }

    pub(super) fn stats(&self) -> HotCacheStats {
        let (objects, bytes) = self.table.lock().size();
        let (hits, fills) = (self.hits.load(Relaxed), self.fills.load(Relaxed));
        HotCacheStats { objects: objects as u64, bytes, hits, fills }
    }

    /// Memory for a value, if others can make room for it.
    fn room(&self, len: usize) -> Option<PoolBuf<T>> {
        let mut dropped = 0;
        loop {
            if let Ok(room) = self.pool.try_take(len) {
                return Some(room);
            }
            if dropped >= DROPS.saturating_mul(len as u64) {
                return None;
            }
            dropped += self.table.lock().evict()?.len() as u64;
        }
    }
}

impl<T: Transport> Inner<T> {
    /// The bytes kept of the value that the answer is about.
    pub(super) fn kept(&self, key: &[u8], list: &ReplicaList) -> Option<Bytes> {
        self.cache.as_ref()?.find(key, list)
    }

    /// Nothing of these keys is kept any more.
    pub(super) fn forget<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Some(cache) = &self.cache {
            cache.forget(keys);
        }
    }

    /// Nothing is kept any more.
    pub(super) fn forget_all(&self) {
        if let Some(cache) = &self.cache {
            cache.clear();
        }
    }

    /// Whether bytes from there take a wire, as far as its name tells.
    pub(super) fn is_afar(&self, endpoint: &str) -> bool {
        let shared = cfg!(feature = "transport-shm") && self.config.share_memory;
        endpoint != self.endpoint && !(shared && self.is_near(endpoint))
    }

    /// A value has come from afar: it may be worth keeping.
    pub(super) fn came(self: &Arc<Self>, key: &[u8], len: u64) {
        let Some(cache) = &self.cache else { return };
        if len > cache.config.longest.min(cache.config.bytes) {
            return;
        }
        let mut table = cache.table.lock();
        if u32::from(table.count(key)) < cache.config.admission.min(255) {
            return;
        }
        // Who comes while others are being fetched is asked for again if it matters.
        let Ok(turn) = cache.coming.clone().try_acquire_owned() else { return };
        if !table.begin(key) {
            return;
        }
        let (client, key): (_, Box<[u8]>) = (self.clone(), key.into());
        self.runtime.spawn(async move {
            let _turn = turn;
            let Some(cache) = &client.cache else { return };
            let fetched = fetch(&client, cache, &key).await;
            let entry = fetched.unwrap_or_else(|error| {
                tracing::debug!(key = %shown(&key), "it is not kept: {error}");
                None
            });
            if cache.table.lock().end(&key, entry) {
                cache.fills.fetch_add(1, Relaxed);
            }
        });
    }
}

/// Reads a value into memory of the cache, as it is now.
async fn fetch<T: Transport>(
    client: &Arc<Inner<T>>,
    cache: &HotCache<T>,
    key: &[u8],
) -> Result<Option<Entry>> {
    client.usable()?;
    let deadline = client.deadline();
    let asked = client.asked();
    let keys = [key];
    let call = client.master.locate(&client.config.tenant, &keys);
    let Some(answer) = deadline.bound("replica list", call).await?.pop() else { return Ok(None) };
    let mut list = answer?;
    list.replicas.retain(|replica| replica.status == ReplicaStatus::Complete);
    let len = list.replicas.iter().find_map(|replica| replica.location.memory()).map_or(0, |at| at.size);
    if len == 0 || len > cache.config.longest {
        return Ok(None);
    }
    let Some(room) = usize::try_from(len).ok().and_then(|len| cache.room(len)) else { return Ok(None) };
    let read = get::read_to(client, key, list.clone(), asked, room, &deadline).await?;
    Ok(read.map(|bytes| Entry { bytes, replicas: list.replicas, checksum: list.checksum }))
}
