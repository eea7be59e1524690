//! The local hot cache: values that this client has read from other members more than once, kept to
//! be read again without a wire.
//!
//! A read asks the master all the same, and with the answer comes what decides whether the bytes
//! kept are the value asked for. Address and length do not: space is used again. The numbers of the
//! replicas do, where each is of one value for all time: a master of ours draws where it begins to
//! count, so that no two masters, and no two lives of one, give out the same, and changes the
//! number when it lets space be written over in place. So bytes that were once read whole, under a
//! lease, from a replica of that number are the value of every later answer that names it, whatever
//! others have written or removed meanwhile; nothing has to be told to this client, and no lease is
//! needed to copy what is its own.
//!
//! A master of the existing system counts from 1 in each life, and a value of the same length is
//! written over under its old number. What is known then is what the existing client knows: its own
//! puts, upserts and removes make it forget the key (before and after the call, and what is being
//! fetched as well), a mount after the master forgot it makes it forget everything, and number,
//! place, length and checksum must be what they were. What another client writes over in place,
//! without a checksum, is seen only when the value has been evicted here. So the cache is off
//! unless it is asked for, and with checksums on (`ClientConfig::checksum`) this is closed, too:
//! the master's answer carries the new value's.
//!
//! Keys come in by being asked for: a sketch counts what came from afar, and who has come often
//! enough is fetched once more in the background, straight into memory of the cache, so that the
//! reader keeps neither its buffer nor its time for it.

mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_core::replica::ReplicaList;
use mooncake_core::{Error, Result};
use mooncake_transport::engine::Engine;
use mooncake_transport::{BufferPool, PoolBuf, PoolConfig, Transport};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub(crate) use self::table::Entry;
use self::table::Table;
use crate::config::HotCacheConfig;

/// Values that are fetched at once.
const COMING: usize = 2;
/// Who makes room drops this many times what it needs at most: space that is still being copied
/// from comes back later.
const DROPS: u64 = 4;

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

pub(crate) struct HotCache<T: Transport> {
    pub(crate) pool: BufferPool<T>,
    pub(crate) config: HotCacheConfig,
    pub(crate) table: Mutex<Table>,
    pub(crate) coming: Arc<Semaphore>,
    pub(crate) hits: AtomicU64,
    pub(crate) fills: AtomicU64,
}

impl<T: Transport> HotCache<T> {
    /// `None` when nothing is to be kept.
    pub(crate) fn new(
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
    pub(crate) fn find(&self, key: &[u8], list: &ReplicaList) -> Option<Bytes> {
        self.table.lock().find(key, list)
    }

    /// A value was copied from here.
    pub(crate) fn hit(&self) {
        self.hits.fetch_add(1, Relaxed);
    }

    pub(crate) fn forget<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        let mut table = self.table.lock();
        keys.into_iter().for_each(|key| table.forget(key));
    }

    pub(crate) fn clear(&self) {
        self.table.lock().clear();
    }

    pub(crate) fn stats(&self) -> HotCacheStats {
        let (objects, bytes) = self.table.lock().size();
        let (hits, fills) = (self.hits.load(Relaxed), self.fills.load(Relaxed));
        HotCacheStats { objects: objects as u64, bytes, hits, fills }
    }

    /// Memory for a value, if others can make room for it.
    pub(crate) fn room(&self, len: usize) -> Option<PoolBuf<T>> {
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
