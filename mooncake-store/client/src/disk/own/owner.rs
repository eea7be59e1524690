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

use super::loan_buffer::{LoanBuffer, LoanSlice};
use super::prefetch_queue::PrefetchQueue;
use super::split;
use crate::config::OffloadConfig;
use crate::disk::scoped;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::wire::{Lent, LentParts};

/// Time that a stalled disk gets to respond to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of objects that are read together.
const MAX_BATCH: usize = 4096;

/// The disk of a client.
#[derive(Debug)]
pub(crate) struct Disk<T: Transport> {
    pub(crate) config: OffloadConfig,
    pub(crate) store: FileStore,
    /// Endpoint of the server of the disk; empty if the disk has no server.
    pub(crate) endpoint: String,
    pub(crate) counts: DiskCounts,
    /// Notification for the heartbeat: there is something to report to the master or to request
    /// from it.
    pub(crate) wake: tokio::sync::Notify,
    /// True if the cluster has tenants. Without tenants, all objects belong to the default tenant,
    /// regardless of the caller.
    pub(crate) tenants: AtomicBool,
    /// Number of operations that exceeded their time limit and have not finished.
    pub(crate) overdue_operations: AtomicUsize,
    pub(crate) loan_buffer: LoanBuffer<T>,
    /// Endpoint that other nodes open to reach the loan buffer.
    pub(crate) memory_endpoint: String,
    pub(crate) clock: SharedClock,
    /// Objects that are to return to memory.
    pub(crate) prefetches: PrefetchQueue,
    pub(crate) loans: Mutex<Loans<T>>,
}

/// Loans that are active, with their expiry times.
#[derive(Debug)]
pub(crate) struct Loans<T: Transport> {
    pub(crate) rng: Rng,
    pub(crate) batches: HashMap<u64, (Moment, Vec<LoanSlice<T>>)>,
}

/// Part of an object, with the length of the whole object as the caller knows it.
#[derive(Debug)]
pub(crate) struct PartToLend {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    /// Range of the part. It is not empty and lies inside the object.
    pub(crate) range: Range<u64>,
}

impl PartToLend {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Counters of a disk since the start.
#[derive(Debug, Default)]
pub(crate) struct DiskCounts {
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
fn check_len(stored_len: u64, size: u64) -> Result<()> {
    match stored_len == size {
        true => Ok(()),
        false => Err(Error::invalid(format!("the object has {stored_len} bytes, not {size}"))),
    }
}

fn disk_timeout() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the disk does not answer")
}

impl<T: Transport> Disk<T> {
    /// Returns the contents and counters of the disk.
    pub(crate) fn report(&self) -> DiskReport {
        let read = |count: &AtomicU64| count.load(Relaxed);
        let counts = &self.counts;
        DiskReport {
            store: self.store.stats(),
            offloaded: read(&counts.offloaded),
            offloaded_bytes: read(&counts.offloaded_bytes),
            refused: read(&counts.refused),
            promoted: read(&counts.promoted),
            read: read(&counts.read),
            read_bytes: read(&counts.read_bytes),
            unread: read(&counts.unread),
            lent_bytes: self.loan_buffer.used(),
        }
    }

    /// Returns the key in the store of the object that a reader calls `key`.
    fn store_key(&self, key: &[u8]) -> Vec<u8> {
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
    pub(crate) async fn lend(&self, parts: Vec<PartToLend>) -> Result<LentParts> {
        let outcome = match self.is_stalled() {
            true => Err(disk_timeout()),
            false => {
                let outcome = tokio::time::timeout(self.reader_timeout(), self.lend_all(&parts)).await;
                outcome.unwrap_or_else(|_| Err(disk_timeout()))
            }
        };
        let objects = parts.len() as u64;
        match &outcome {
            Ok(_) => {
                let bytes = parts.iter().map(PartToLend::len).fold(0, u64::saturating_add);
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

    async fn lend_all(&self, parts: &[PartToLend]) -> Result<LentParts> {
        if parts.len() > MAX_BATCH {
            return Err(Error::invalid(format!("{} objects at once; at most {MAX_BATCH}", parts.len())));
        }
        let mut keys = Vec::with_capacity(parts.len());
        for PartToLend { key: reader_key, size, .. } in parts {
            let key = self.store_key(reader_key);
            let stored_len = self.store.value_len(&key).ok_or(ErrorCode::ObjectNotFound)?;
            check_len(stored_len, *size)?;
            keys.push(key);
        }
        let lens: Vec<u64> = parts.iter().map(PartToLend::len).collect();
        // A reader that gets no space must receive the error before its time for the disk is over.
        let mut buffers = self.loan_buffer.allocate(&lens, self.reader_timeout() / 2).await?;
        // Each part is copied while others are still being read.
        let reads = keys.iter().zip(parts).zip(&mut buffers).map(|((key, requested), buffer)| async move {
            let part = self.store.read_part(key, requested.range.clone()).await?;
            // The object may have been replaced while this call waited for space in the buffer.
            check_len(part.value_len(), requested.size)?;
            buffer.copy_from(&part)?;
            Ok::<_, Error>(part.version())
        });
        let versions = futures::future::try_join_all(reads).await?;
        let addresses = buffers.iter().map(LoanSlice::address).collect();
        let mut loans = self.loans.lock();
        let batch = loans.rng.next_u64();
        loans.batches.insert(batch, (self.clock.now().after(self.config.lend), buffers));
        let ttl_ms = u64::try_from(self.config.lend.as_millis()).unwrap_or(u64::MAX);
        let reply = Lent { batch, addresses, endpoint: self.memory_endpoint.clone(), ttl_ms };
        Ok(LentParts { lent: reply, versions })
    }

    /// Returns whether an object that a reader calls `key` is on the disk; `None` if the disk does
    /// not respond in time.
    pub(crate) async fn has(&self, key: &[u8]) -> Option<bool> {
        let name = self.store_key(key);
        if self.is_stalled() {
            return None;
        }
        if self.store.value_len(&name).is_none() {
            return Some(false);
        }
        match tokio::time::timeout(self.reader_timeout(), self.store.read_part(&name, 0..1)).await {
            Ok(Ok(_)) => Some(true),
            // A damaged or missing file is no longer listed.
            Ok(Err(_)) if !self.store.contains(&name) => Some(false),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Returns the longest time that a reader waits for space in the buffer, and for the disk.
    /// Readers have their own timeouts, which are mostly shorter.
    fn reader_timeout(&self) -> Duration {
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
    pub(crate) fn is_overdue(&self) -> bool {
        self.overdue_operations.load(Relaxed) != 0 || self.is_stalled()
    }

    /// Returns whether the heartbeat may use the disk. Probes the disk first if it is stalled.
    pub(crate) async fn is_usable(self: &Arc<Self>) -> bool {
        if self.overdue_operations.load(Relaxed) == 0 && self.is_stalled() {
            let disk = self.clone();
            let _ = self.within(PROBE_TIMEOUT, async move { disk.store.probe().await }).await;
        }
        let usable = !self.is_overdue();
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
        timeout: Duration,
        work: impl Future<Output = R> + Send + 'static,
    ) -> Result<R> {
        let mut task = tokio::spawn(work);
        match tokio::time::timeout(timeout, &mut task).await {
            Ok(done) => done.map_err(|error| Error::internal(format!("work on a disk failed: {error}"))),
            Err(_) => {
                self.overdue_operations.fetch_add(1, Relaxed);
                let disk = self.clone();
                tokio::spawn(async move {
                    let _ = task.await;
                    disk.overdue_operations.fetch_sub(1, Relaxed);
                    disk.wake.notify_one();
                });
                Err(disk_timeout())
            }
        }
    }

    /// Reads an object into registered memory.
    pub(crate) async fn read_to_buffer(&self, key: &[u8], len: u64) -> Result<LoanSlice<T>> {
        let mut buffers = self.loan_buffer.allocate(&[len], self.reader_timeout()).await?;
        let value = self.store.read_part(key, 0..len).await?;
        check_len(value.value_len(), len)?;
        let mut buffer = buffers.pop().ok_or(ErrorCode::InternalError)?;
        buffer.copy_from(&value)?;
        Ok(buffer)
    }

    /// Queues the prefetch of those objects that are on this disk with this length. Returns whether
    /// any are, and all of them are queued.
    pub(crate) fn queue_prefetches(&self, tenant: &str, objects: &[(&[u8], i64)]) -> bool {
        let has_tenants = self.tenants.load(Relaxed) && !tenant.is_empty();
        let tenant = if has_tenants { tenant } else { DEFAULT_TENANT };
        let is_stored = |(key, size): &&(&[u8], i64)| {
            self.store.value_len(&scoped(tenant, key)).is_some_and(|len| len.cast_signed() == *size)
        };
        let objects: Vec<_> = objects.iter().filter(is_stored).copied().collect();
        !objects.is_empty() && self.prefetches.add(tenant, &objects)
    }

    /// Ends a loan. Returns whether the loan existed.
    pub(crate) fn end_loan(&self, batch: u64) -> bool {
        let loan = self.loans.lock().batches.remove(&batch);
        // The memory is freed after the lock is released, because readers that wait for space are
        // notified then.
        loan.is_some()
    }

    /// Ends all loans that have expired.
    pub(crate) fn end_expired_loans(&self) {
        let now = self.clock.now();
        let expired: Vec<_> = self.loans.lock().batches.extract_if(|_, (until, _)| *until <= now).collect();
        drop(expired);
    }
}
