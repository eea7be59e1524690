//! A disk of this client: its store, the buffer that other clients read from, and its counters.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng, SharedClock};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_disk::{FileStore, StoreStats};
use mooncake_transport::Transport;
use parking_lot::Mutex;

use super::shelf::{LentBuffer, Shelf};
use super::split;
use crate::config::OffloadConfig;
use crate::disk::scoped;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::wire::{Lent, LentParts};

/// Time that a stalled disk gets to respond to a probe.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// Maximum number of objects that are read together.
const MAX_BATCH: usize = 4096;

/// The disk of a client.
#[derive(Debug)]
pub(crate) struct Disk<T: Transport> {
    pub(crate) config: OffloadConfig,
    pub(crate) store: FileStore,
    /// Endpoint of the server of the disk; empty if the disk has no server.
    pub(crate) endpoint: String,
    pub(crate) counts: Counts,
    /// Notification for the heartbeat: there is something to report to the master or to request
    /// from it.
    pub(crate) wake: tokio::sync::Notify,
    /// True if the cluster has tenants. Without tenants, all objects belong to the default tenant,
    /// regardless of the caller.
    pub(crate) tenants: AtomicBool,
    /// Number of operations that exceeded their time limit and have not finished.
    pub(crate) behind: AtomicUsize,
    pub(crate) shelf: Shelf<T>,
    /// Endpoint that other nodes open to reach the shelf.
    pub(crate) memory: String,
    pub(crate) clock: SharedClock,
    pub(crate) lent: Mutex<Loans<T>>,
}

/// Loans that are active, with their expiry times.
#[derive(Debug)]
pub(crate) struct Loans<T: Transport> {
    pub(crate) rng: Rng,
    pub(crate) batches: HashMap<u64, (Moment, Vec<LentBuffer<T>>)>,
}

/// Part of an object, with the length of the whole object as the caller knows it.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    /// Range of the part. It is not empty and lies inside the object.
    pub(crate) range: Range<u64>,
}

impl Wanted {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Counters of a disk since the start.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) offloaded: AtomicU64,
    pub(crate) offloaded_bytes: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) promoted: AtomicU64,
    pub(crate) read: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) unread: AtomicU64,
}

/// Contents and counters of a client's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskReport {
    /// Statistics of the store.
    pub store: StoreStats,
    /// Objects written for the master.
    pub offloaded: u64,
    /// Bytes of the objects written for the master.
    pub offloaded_bytes: u64,
    /// Objects that the master wanted on disk and that could not be written. The object was gone,
    /// there was no space, or the disk failed.
    pub refused: u64,
    /// Objects that were copied back to memory.
    pub promoted: u64,
    /// Objects read for other clients.
    pub read: u64,
    /// Bytes read for other clients.
    pub read_bytes: u64,
    /// Requested objects that could not be read.
    pub unread: u64,
    /// Bytes of the read buffer that are in use now.
    pub lent_bytes: u64,
}

/// Checks that an object has the length that its reader expects.
fn is_long(there: u64, size: u64) -> Result<()> {
    match there == size {
        true => Ok(()),
        false => Err(Error::invalid(format!("the object has {there} bytes, not {size}"))),
    }
}

fn unanswered() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the disk does not answer")
}

impl<T: Transport> Disk<T> {
    /// Returns the contents and counters of the disk.
    pub(crate) fn report(&self) -> DiskReport {
        let of = |count: &AtomicU64| count.load(Relaxed);
        let counts = &self.counts;
        DiskReport {
            store: self.store.stats(),
            offloaded: of(&counts.offloaded),
            offloaded_bytes: of(&counts.offloaded_bytes),
            refused: of(&counts.refused),
            promoted: of(&counts.promoted),
            read: of(&counts.read),
            read_bytes: of(&counts.read_bytes),
            unread: of(&counts.unread),
            lent_bytes: self.shelf.used(),
        }
    }

    /// Returns the key in the store of the object that a reader calls `key`.
    fn named(&self, key: &[u8]) -> Vec<u8> {
        // A key with a NUL byte names its tenant. Any other interpretation would name another
        // object.
        let (tenant, own) = split(key);
        if !self.tenants.load(Relaxed) {
            return scoped(DEFAULT_TENANT, own);
        }
        if self.store.contains(key) { key.to_vec() } else { scoped(tenant, own) }
    }

    /// Returns the stored objects that may belong to this cluster, with their lengths.
    pub(crate) fn listing(&self) -> Vec<(Arc<[u8]>, u64)> {
        let mut listing = self.store.listing();
        if !self.tenants.load(Relaxed) {
            listing.retain(|(key, _)| split(key).0 == DEFAULT_TENANT);
        }
        listing
    }

    /// Reads parts of objects into memory that other nodes may read for a limited time. Each object
    /// must have the length that the reader knows. The call reads all parts or none.
    pub(crate) async fn lend(&self, wanted: Vec<Wanted>) -> Result<LentParts> {
        let outcome = match self.is_stalled() {
            true => Err(unanswered()),
            false => {
                let lent = tokio::time::timeout(self.readers_wait(), self.lend_all(&wanted)).await;
                lent.unwrap_or_else(|_| Err(unanswered()))
            }
        };
        let objects = wanted.len() as u64;
        match &outcome {
            Ok(_) => {
                let bytes = wanted.iter().map(Wanted::len).fold(0, u64::saturating_add);
                self.counts.read.fetch_add(objects, Relaxed);
                self.counts.read_bytes.fetch_add(bytes, Relaxed);
            }
            Err(error) => {
                self.counts.unread.fetch_add(objects, Relaxed);
                tracing::debug!(%error, objects, "not read from disk");
                if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Internal) {
                    // The object is gone, and the heartbeat must report this to the master.
                    self.wake.notify_one();
                }
            }
        }
        outcome
    }

    async fn lend_all(&self, wanted: &[Wanted]) -> Result<LentParts> {
        if wanted.len() > MAX_BATCH {
            return Err(Error::invalid(format!("{} objects at once; at most {MAX_BATCH}", wanted.len())));
        }
        let mut names = Vec::with_capacity(wanted.len());
        for Wanted { key, size, .. } in wanted {
            let name = self.named(key);
            let there = self.store.value_len(&name).ok_or(ErrorCode::ObjectNotFound)?;
            is_long(there, *size)?;
            names.push(name);
        }
        let lens: Vec<u64> = wanted.iter().map(Wanted::len).collect();
        let mut buffers = self.shelf.take(&lens, self.readers_wait()).await?;
        // Each part is copied while others are still being read.
        let reads = names.iter().zip(wanted).zip(&mut buffers).map(|((name, wanted), buffer)| async move {
            let part = self.store.read_part(name, wanted.range.clone()).await?;
            // The object may have been replaced while this call waited for space in the buffer.
            is_long(part.value_len(), wanted.size)?;
            buffer.copy_from(&part)?;
            Ok::<_, Error>(part.version())
        });
        let versions = futures::future::try_join_all(reads).await?;
        let addresses = buffers.iter().map(LentBuffer::address).collect();
        let mut lent = self.lent.lock();
        let batch = lent.rng.next_u64();
        lent.batches.insert(batch, (self.clock.now().after(self.config.lend), buffers));
        let ttl_ms = u64::try_from(self.config.lend.as_millis()).unwrap_or(u64::MAX);
        let lent = Lent { batch, addresses, endpoint: self.memory.clone(), ttl_ms };
        Ok(LentParts { lent, versions })
    }

    /// Returns the longest time that a reader waits for space in the buffer, and for the disk.
    /// Readers have their own timeouts, which are mostly shorter.
    fn readers_wait(&self) -> Duration {
        self.config.patience / 3
    }

    /// Returns whether the disk has not responded for so long that it receives no more requests.
    /// This limit is shorter than the wait of readers. Abandoned reads therefore never hold more
    /// memory than the buffer has.
    fn is_stalled(&self) -> bool {
        self.store.stalled_for() >= self.config.patience / 6
    }

    /// Returns whether the disk is stalled, or has not finished an operation that exceeded its time
    /// limit.
    pub(crate) fn is_behind(&self) -> bool {
        self.behind.load(Relaxed) != 0 || self.is_stalled()
    }

    /// Returns whether the heartbeat may use the disk. Probes the disk first if it is stalled.
    pub(crate) async fn is_usable(self: &Arc<Self>) -> bool {
        if self.behind.load(Relaxed) == 0 && self.is_stalled() {
            let disk = self.clone();
            let _ = self.within(SIGN_OF_LIFE, async move { disk.store.probe().await }).await;
        }
        let usable = !self.is_behind();
        if !usable {
            tracing::warn!(path = %self.config.path.display(), "the disk does not answer; nothing goes to it");
        }
        usable
    }

    /// Runs an operation on the disk to its end, and waits for it for a limited time. After that
    /// time the call returns `RPC_TIMEOUT`. The operation continues, and the disk is not usable
    /// until it ends.
    pub(crate) async fn work<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = R> + Send + 'static,
    ) -> Result<R> {
        self.within(self.config.patience, work).await
    }

    async fn within<R: Send + 'static>(
        self: &Arc<Self>,
        patience: Duration,
        work: impl Future<Output = R> + Send + 'static,
    ) -> Result<R> {
        let mut task = tokio::spawn(work);
        match tokio::time::timeout(patience, &mut task).await {
            Ok(done) => done.map_err(|error| Error::internal(format!("work on a disk failed: {error}"))),
            Err(_) => {
                self.behind.fetch_add(1, Relaxed);
                let disk = self.clone();
                tokio::spawn(async move {
                    let _ = task.await;
                    disk.behind.fetch_sub(1, Relaxed);
                    disk.wake.notify_one();
                });
                Err(unanswered())
            }
        }
    }

    /// Reads an object into registered memory.
    pub(crate) async fn shelve(&self, key: &[u8], len: u64) -> Result<LentBuffer<T>> {
        let mut buffers = self.shelf.take(&[len], self.readers_wait()).await?;
        let value = self.store.read_part(key, 0..len).await?;
        is_long(value.value_len(), len)?;
        let mut buffer = buffers.pop().ok_or(ErrorCode::InternalError)?;
        buffer.copy_from(&value)?;
        Ok(buffer)
    }

    /// Ends a loan. Returns whether the loan existed.
    pub(crate) fn take_back(&self, batch: u64) -> bool {
        let lent = self.lent.lock().batches.remove(&batch);
        // The memory is freed after the lock is released, because readers that wait for space are
        // notified then.
        lent.is_some()
    }

    /// Ends all loans that have expired.
    pub(crate) fn take_back_overdue(&self) {
        let now = self.clock.now();
        let overdue: Vec<_> = self.lent.lock().batches.extract_if(|_, (until, _)| *until <= now).collect();
        drop(overdue);
    }
}
