//! A disk of this client's: its store, the memory others read it through, and what was done with it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng, SharedClock};
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_disk::{DiskConfig, EngineKind, FileStore, StoreConfig, StoreStats};
use mooncake_transport::Transport;
use mooncake_transport::engine::Engine;
use parking_lot::Mutex;

use super::serve::Owner;
use super::shelf::{Place, Shelf};
use super::{OffloadConfig, scoped, split};
use crate::client::config::{join_port, split_port};
use crate::protocol::server::{RunningServer, Server, ServerOptions};
use crate::protocol::wire::Lent;

/// Longest a reader waits for room in the memory it reads from, and for the disk: readers have their own, shorter times.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most objects read together.
const MAX_BATCH: usize = 4096;

/// The disk of a client.
#[derive(Debug)]
pub(in crate::client) struct Disk<T: Transport> {
    pub(super) config: OffloadConfig,
    pub(super) store: FileStore,
    /// Who serves it; empty when nobody does.
    pub(super) endpoint: String,
    pub(super) counts: Counts,
    /// There is something for the master to hear, or to say.
    pub(super) wake: tokio::sync::Notify,
    shelf: Shelf<T>,
    /// What a peer opens to reach the shelf.
    memory: String,
    clock: SharedClock,
    lent: Mutex<Loans<T>>,
}

/// What is lent, and until when.
#[derive(Debug)]
struct Loans<T: Transport> {
    rng: Rng,
    batches: HashMap<u64, (Moment, Vec<Place<T>>)>,
}

/// What was done with a disk since the start.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) offloaded: AtomicU64,
    pub(super) offloaded_bytes: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) promoted: AtomicU64,
    read: AtomicU64,
    read_bytes: AtomicU64,
    unread: AtomicU64,
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
    /// Objects that it wanted and that could not be written: gone meanwhile, no space, or the disk failed.
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

/// Opens a disk, and serves it. It is not offered to the master yet.
pub(super) async fn open<T: Transport>(
    config: OffloadConfig,
    engine: &Engine<T>,
    name: &str,
) -> Result<(Arc<Disk<T>>, Option<RunningServer>)> {
    let opened = config.clone();
    let store = tokio::task::spawn_blocking(move || open_store(&opened))
        .await
        .map_err(|error| Error::internal(format!("opening a disk failed: {error}")))??;
    let len = usize::try_from(config.buffer).map_err(|_| Error::invalid("offload: buffer is too large"))?;
    let memory = Arc::new(HostMemory::new(len).map_err(|error| error.context("offload buffer"))?);
    let shelf = Shelf::new(engine.register(memory).await?);
    let host = split_port(name).0;
    let server = match config.serve {
        true => {
            let any = if host.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            Some(Server::bind(any, ServerOptions::default()).await?)
        }
        false => None,
    };
    let endpoint = server.as_ref().map(|server| join_port(host, server.local_addr().port()));
    let disk = Arc::new(Disk {
        config,
        store,
        endpoint: endpoint.unwrap_or_default(),
        counts: Counts::default(),
        wake: tokio::sync::Notify::new(),
        shelf,
        memory: name.to_owned(),
        clock: engine.clock().clone(),
        lent: Mutex::new(Loans { rng: Rng::from_os(), batches: HashMap::new() }),
    });
    tracing::info!(path = %disk.config.path.display(), endpoint = disk.endpoint, "disk open");
    let server = server.map(|server| server.start(Arc::new(Owner(disk.clone()))));
    Ok((disk, server))
}

fn open_store(config: &OffloadConfig) -> Result<FileStore> {
    let engine = if config.threads { EngineKind::Threads } else { EngineKind::Auto };
    let capacity = capacity(config)?;
    let mut store = StoreConfig::new(&config.path, capacity);
    store.max_objects = config.max_objects;
    (store.high_watermark, store.low_watermark) = config.watermarks.unwrap_or((1.0, 1.0));
    let (store, _) = FileStore::open(DiskConfig { engine, ..DiskConfig::default() }, store)?;
    Ok(store)
}

/// What is asked for, and no more than 90 % of what the file system has or the store has already.
fn capacity(config: &OffloadConfig) -> Result<u64> {
    let failed = |error: std::io::Error| {
        let text = format!("cannot use {} for objects: {error}", config.path.display());
        Error::new(ErrorCode::FileOpenFail, text).with_source(error)
    };
    std::fs::create_dir_all(&config.path).map_err(failed)?;
    let about = rustix::fs::statvfs(&config.path).map_err(|errno| failed(errno.into()))?;
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    let there = free.saturating_add(allocated(&config.path.join("objects")));
    let most = there / 10 * 9;
    Ok((config.capacity.min(most) / 4096 * 4096).max(4096))
}

fn allocated(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(file).map_or(0, |about| about.blocks().saturating_mul(512))
}

impl<T: Transport> Disk<T> {
    /// What it holds and has done.
    pub(in crate::client) fn report(&self) -> DiskReport {
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
        if self.store.contains(key) {
            return key.to_vec();
        }
        // A key with a NUL names its tenant. What else could be meant is another object.
        let (tenant, own) = split(key);
        scoped(tenant, own)
    }

    /// Reads objects, each of the length the reader knows, into memory that peers may read for a while. All or none.
    pub(super) async fn lend(&self, wanted: Vec<(Vec<u8>, u64)>) -> Result<Lent> {
        let none = |_| Err(Error::new(ErrorCode::RpcTimeout, "the disk does not answer"));
        let outcome = tokio::time::timeout(PATIENCE, self.lend_all(&wanted)).await.unwrap_or_else(none);
        let objects = wanted.len() as u64;
        match &outcome {
            Ok(_) => {
                let bytes = wanted.iter().fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
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

    async fn lend_all(&self, wanted: &[(Vec<u8>, u64)]) -> Result<Lent> {
        if wanted.len() > MAX_BATCH {
            return Err(Error::invalid(format!("{} objects at once; at most {MAX_BATCH}", wanted.len())));
        }
        let mut names = Vec::with_capacity(wanted.len());
        for (key, len) in wanted {
            let name = self.named(key);
            let there = self.store.value_len(&name).ok_or(ErrorCode::ObjectNotFound)?;
            if *len != there {
                return Err(Error::invalid(format!("the object has {there} bytes, not {len}")));
            }
            names.push(name);
        }
        let lens: Vec<u64> = wanted.iter().map(|(_, len)| *len).collect();
        let mut places = self.shelf.take(&lens, PATIENCE).await?;
        let reads = names.iter().zip(&lens).map(|(name, len)| self.store.read_part(name, 0..*len));
        let parts = futures::future::join_all(reads).await;
        for (place, part) in places.iter_mut().zip(parts) {
            place.copy_from(&part?)?;
        }
        let addresses = places.iter().map(Place::address).collect();
        let mut lent = self.lent.lock();
        let batch = lent.rng.next_u64();
        lent.batches.insert(batch, (self.clock.now().after(self.config.lend), places));
        let ttl_ms = u64::try_from(self.config.lend.as_millis()).unwrap_or(u64::MAX);
        Ok(Lent { batch, addresses, endpoint: self.memory.clone(), ttl_ms })
    }

    /// Reads an object into memory that wires take.
    pub(super) async fn shelve(&self, key: &[u8], len: u64) -> Result<Place<T>> {
        let mut places = self.shelf.take(&[len], PATIENCE).await?;
        let value = self.store.read_part(key, 0..len).await?;
        let mut place = places.pop().ok_or(ErrorCode::InternalError)?;
        place.copy_from(&value)?;
        Ok(place)
    }

    /// A loan is given back; whether there was one.
    pub(super) fn take_back(&self, batch: u64) -> bool {
        let lent = self.lent.lock().batches.remove(&batch);
        // The lock is not held while others are told of the room.
        lent.is_some()
    }

    /// Takes back what was lent too long ago.
    pub(super) fn take_back_overdue(&self) {
        let now = self.clock.now();
        let overdue: Vec<_> = self.lent.lock().batches.extract_if(|_, (until, _)| *until <= now).collect();
        drop(overdue);
    }
}
