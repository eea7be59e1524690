//! A disk of this client's: its store, the memory others read it through, and what was done with
//! it.

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

use super::shelf::{Place, Shelf};
use super::{scoped, split};
use crate::config::OffloadConfig;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::wire::{Lent, LentParts};

/// How long one that stood still is given to answer.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// Most objects read together.
const MAX_BATCH: usize = 4096;

/// The disk of a client.
#[derive(Debug)]
pub(crate) struct Disk<T: Transport> {
    pub(crate) config: OffloadConfig,
    pub(crate) store: FileStore,
    /// Who serves it; empty when nobody does.
    pub(crate) endpoint: String,
    pub(crate) counts: Counts,
    /// There is something for the master to hear, or to say.
    pub(crate) wake: tokio::sync::Notify,
    /// Whether the cluster has tenants. Without, all objects are the default one's, whoever asks
    /// for them.
    pub(crate) tenants: AtomicBool,
    /// Work that its time was up for and that the disk has not come to the end of.
    pub(crate) behind: AtomicUsize,
    pub(crate) shelf: Shelf<T>,
    /// What a peer opens to reach the shelf.
    pub(crate) memory: String,
    pub(crate) clock: SharedClock,
    pub(crate) lent: Mutex<Loans<T>>,
}

/// What is lent, and until when.
#[derive(Debug)]
pub(crate) struct Loans<T: Transport> {
    pub(crate) rng: Rng,
    pub(crate) batches: HashMap<u64, (Moment, Vec<Place<T>>)>,
}

/// A part of an object, and how long the caller believes the whole to be.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    /// Not empty, and inside.
    pub(crate) range: Range<u64>,
}

impl Wanted {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// What was done with a disk since the start.
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

/// What a client's disk holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskReport {
    /// The store of objects.
    pub store: StoreStats,
    /// Objects written for the master.
    pub offloaded: u64,
    /// Bytes of these.
    pub offloaded_bytes: u64,
    /// Objects that it wanted and that could not be written: gone meanwhile, no space, or the disk
    /// failed.
    pub refused: u64,
    /// Objects that came back to memory.
    pub promoted: u64,
    /// Objects read for others.
    pub read: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Objects asked for that could not be read.
    pub unread: u64,
    /// Bytes of the buffer that others read from, in use now.
    pub lent_bytes: u64,
}

/// Refuses an object of another length than its reader believes.
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
    /// What it holds and has done.
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

    /// Under which key an object lies there that a reader calls by this one.
    fn named(&self, key: &[u8]) -> Vec<u8> {
        // A key with a NUL names its tenant. What else could be meant is another object.
        let (tenant, own) = split(key);
        if !self.tenants.load(Relaxed) {
            return scoped(DEFAULT_TENANT, own);
        }
        if self.store.contains(key) { key.to_vec() } else { scoped(tenant, own) }
    }

    /// What lies there and may be an object of this cluster, with its length.
    pub(crate) fn listing(&self) -> Vec<(Arc<[u8]>, u64)> {
        let mut listing = self.store.listing();
        if !self.tenants.load(Relaxed) {
            listing.retain(|(key, _)| split(key).0 == DEFAULT_TENANT);
        }
        listing
    }

    /// Reads parts of objects, each of the length the reader knows, into memory that peers may read
    /// for a while. All or none.
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
                    // It is gone, and the master is to hear of it.
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
        let mut places = self.shelf.take(&lens, self.readers_wait()).await?;
        // Each is copied while others are still read.
        let reads = names.iter().zip(wanted).zip(&mut places).map(|((name, wanted), place)| async move {
            let part = self.store.read_part(name, wanted.range.clone()).await?;
            // Another value may have taken its place while there was no room.
            is_long(part.value_len(), wanted.size)?;
            place.copy_from(&part)?;
            Ok::<_, Error>(part.version())
        });
        let versions = futures::future::try_join_all(reads).await?;
        let addresses = places.iter().map(Place::address).collect();
        let mut lent = self.lent.lock();
        let batch = lent.rng.next_u64();
        lent.batches.insert(batch, (self.clock.now().after(self.config.lend), places));
        let ttl_ms = u64::try_from(self.config.lend.as_millis()).unwrap_or(u64::MAX);
        let lent = Lent { batch, addresses, endpoint: self.memory.clone(), ttl_ms };
        Ok(LentParts { lent, versions })
    }

    /// Longest a reader waits for room in the memory it reads from, and for the disk: readers have
    /// their own, mostly shorter times.
    fn readers_wait(&self) -> Duration {
        self.config.patience / 3
    }

    /// Whether it has answered nothing for so long that it is asked for nothing more. That is
    /// sooner than readers give up, so what they leave behind is never more than the memory they
    /// read from.
    fn is_stalled(&self) -> bool {
        self.store.stalled_for() >= self.config.patience / 6
    }

    /// Whether it does not answer, or has not come to the end of what its time was up for.
    pub(crate) fn is_behind(&self) -> bool {
        self.behind.load(Relaxed) != 0 || self.is_stalled()
    }

    /// Whether the heartbeat may use it. One that does not answer is asked whether it does.
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

    /// Does something with the disk, to its end, and waits for that for a while. `RPC_TIMEOUT`: it
    /// goes on, and until it is over the disk is not usable.
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

    /// Reads an object into memory that wires take.
    pub(crate) async fn shelve(&self, key: &[u8], len: u64) -> Result<Place<T>> {
        let mut places = self.shelf.take(&[len], self.readers_wait()).await?;
        let value = self.store.read_part(key, 0..len).await?;
        is_long(value.value_len(), len)?;
        let mut place = places.pop().ok_or(ErrorCode::InternalError)?;
        place.copy_from(&value)?;
        Ok(place)
    }

    /// A loan is given back; whether there was one.
    pub(crate) fn take_back(&self, batch: u64) -> bool {
        let lent = self.lent.lock().batches.remove(&batch);
        // The lock is not held while others are told of the room.
        lent.is_some()
    }

    /// Takes back what was lent too long ago.
    pub(crate) fn take_back_overdue(&self) {
        let now = self.clock.now();
        let overdue: Vec<_> = self.lent.lock().batches.extract_if(|_, (until, _)| *until <= now).collect();
        drop(overdue);
    }
}
