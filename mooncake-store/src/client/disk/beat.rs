//! The heartbeat of a disk: what the master wants written, what it wants back in memory, and what it is to hear.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::replica::ReplicaStatus;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_disk::Put;
use mooncake_transport::{Slice, Transport};
use tokio::sync::watch;

use super::owner::{Disk, DiskReport, open};
use super::promote::promote;
use super::{scoped, split};
use crate::client::buffers::COPIED_AT_ONCE;
use crate::client::deadline::Deadline;
use crate::client::{Client, Inner, shown};
use crate::protocol::server::RunningServer;
use crate::protocol::wire::{OffloadItem, StoredAt};

/// Objects copied out of memory and reported together, at most; and their bytes, unless one alone is longer.
const TOGETHER: usize = 256;
const BYTES_TOGETHER: i64 = 64 << 20;
/// Objects written at a time.
const WRITES: usize = 8;
/// Objects announced at a time.
const ANNOUNCED: usize = 4096;
/// A write that takes longer is given up; the disk is as good as gone then.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);
/// How often an object is looked for again that was being read for longer than its lease.
const TRIES: usize = 3;
/// How often loans that are overdue are looked for.
const SWEEP: Duration = Duration::from_millis(250);

/// A disk at work.
pub(in crate::client) struct Running<T: Transport> {
    disk: Arc<Disk<T>>,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl<T: Transport> Running<T> {
    pub(in crate::client) fn report(&self) -> DiskReport {
        self.disk.report()
    }
}

/// Runs until it is stopped, or the client dropped. Others are served as long.
async fn run<T: Transport>(
    client: Weak<Inner<T>>,
    disk: Arc<Disk<T>>,
    server: Option<RunningServer>,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let pause = tokio::time::sleep(disk.config.interval);
        tokio::select! {
            // An error means that the sender is gone, and the client with it.
            _ = closed.wait_for(|closed| *closed) => break,
            () = pause => {}
            () = disk.wake.notified() => {}
        }
        let Some(strong) = client.upgrade() else { break };
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => break,
            outcome = beat(&strong, &disk) => {
                if let Err(error) = outcome {
                    tracing::warn!(client = %strong.id, "the master was not asked what goes to disk: {error}");
                }
            }
        }
    }
    if let Some(server) = server {
        server.stop().await;
    }
}

/// Takes back what was lent for too long, as long.
async fn sweep<T: Transport>(disk: Arc<Disk<T>>, mut closed: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(SWEEP) => disk.take_back_overdue(),
        }
    }
}

/// Offers the disk, and says what lies there.
async fn offer<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>) -> Result<()> {
    let (master, id) = (&client.master, client.id);
    client.deadline().bound("offering a disk", master.mount_disk(id, true)).await?;
    let capacity = disk.store.stats().capacity;
    if let Err(error) = client.deadline().bound("size of a disk", master.disk_capacity(id, capacity)).await {
        tracing::debug!(client = %id, "the master was not told how large the disk is: {error}");
    }
    // Before anything is announced, so that what the master does not take is heard of.
    clean_up(client, disk).await?;
    let listing = disk.store.listing();
    for some in listing.chunks(ANNOUNCED) {
        let (items, places): (Vec<_>, Vec<_>) =
            some.iter().map(|(key, len)| disk.stored(key, len.cast_signed())).unzip();
        client.deadline().bound("announcing a disk", master.offloaded(id, &items, &places)).await?;
    }
    tracing::info!(client = %id, objects = listing.len(), "disk offered");
    Ok(())
}

async fn beat<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>) -> Result<()> {
    let (master, id) = (&client.master, client.id);
    let ask = || async {
        let ask = master.must_clear_disk(id);
        client.deadline().bound("whether the disk is to be emptied", ask).await
    };
    // Before anything else is asked, so that it concerns nothing that is told afterwards.
    let clear = match ask().await {
        // The master is another one, or had given us up.
        Err(error) if error.code() == ErrorCode::SegmentNotFound => {
            offer(client, disk).await?;
            ask().await?
        }
        clear => clear?,
    };
    if clear {
        let gone = disk.store.remove_where(|_| true).await;
        tracing::info!(client = %id, objects = gone, "disk emptied");
    }
    let items = client.deadline().bound("what goes to disk", master.to_offload(id, true)).await?;
    clean_up(client, disk).await?;
    write_out(client, disk, items).await?;
    promote(client, disk).await?;
    if disk.config.watermarks.is_some() {
        disk.store.trim().await;
    }
    report_departed(client, disk).await
}

/// Removes what does not count any more. Masters of the existing system do not say.
async fn clean_up<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>) -> Result<()> {
    loop {
        let ask = client.master.not_on_disk(client.id);
        let items = match client.deadline().bound("what is gone from disk", ask).await {
            Err(error) if error.code() == ErrorCode::NotSupported => return Ok(()),
            items => items?,
        };
        if items.is_empty() {
            return Ok(());
        }
        disk.store.remove(items.iter().map(|item| scoped(&item.tenant, &item.key))).await;
    }
}

/// Tells the master of objects that went by themselves: evicted, damaged, unreadable.
async fn report_departed<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>) -> Result<()> {
    let departed = disk.store.take_departed();
    let mut by_tenant: BTreeMap<&str, Vec<&[u8]>> = BTreeMap::new();
    for key in &departed {
        let (tenant, key) = split(key);
        by_tenant.entry(tenant).or_default().push(key);
    }
    for (tenant, keys) in by_tenant {
        for some in keys.chunks(ANNOUNCED) {
            let tell = client.master.dropped_from_disk(client.id, tenant, some);
            client.deadline().bound("what left the disk", tell).await?;
        }
    }
    Ok(())
}

/// Writes what the master wants on disk, and says how it went.
async fn write_out<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    items: Vec<OffloadItem>,
) -> Result<()> {
    let mut rest = &items[..];
    while !rest.is_empty() {
        let tenant = &rest[0].tenant;
        let mut bytes = 0i64;
        let fits = |item: &&OffloadItem| {
            let first = bytes == 0;
            bytes = bytes.saturating_add(item.size.max(1));
            item.tenant == *tenant && (first || bytes <= BYTES_TOGETHER)
        };
        let count = rest.iter().take(TOGETHER).take_while(fits).count().max(1);
        let (some, others) = rest.split_at(count);
        rest = others;
        let puts = copies(client, disk, tenant, some).await;
        let written: Vec<bool> =
            futures::stream::iter(puts).map(|put| write(disk, put)).buffered(WRITES).collect().await;
        let mut places = Vec::with_capacity(some.len());
        for (item, written) in some.iter().zip(&written) {
            let key = scoped(&item.tenant, &item.key);
            if *written {
                disk.counts.offloaded.fetch_add(1, Relaxed);
                disk.counts.offloaded_bytes.fetch_add(item.size.unsigned_abs(), Relaxed);
            } else {
                disk.counts.refused.fetch_add(1, Relaxed);
                // An older value is not to be found in place of the one that is not there.
                disk.store.remove([&key]).await;
            }
            places.push(disk.stored(&key, if *written { item.size } else { -1 }).1);
        }
        tell(client, some, &places).await?;
    }
    Ok(())
}

/// Reports what was written. It may be said again when the answer is lost.
async fn tell<T: Transport>(
    client: &Arc<Inner<T>>,
    items: &[OffloadItem],
    places: &[StoredAt],
) -> Result<()> {
    let mut told = Ok(());
    for _ in 0..TRIES {
        let report = client.master.offloaded(client.id, items, places);
        told = client.deadline().bound("what was written to disk", report).await;
        match &told {
            Err(error) if error.code() != ErrorCode::SegmentNotFound => {}
            _ => break,
        }
    }
    told
}

async fn write<T: Transport>(disk: &Disk<T>, put: Option<Put>) -> bool {
    let Some(put) = put else { return false };
    match tokio::time::timeout(WRITE_PATIENCE, disk.store.put(put)).await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::warn!("an object cannot be written to disk: {error}");
            false
        }
        Err(_) => {
            tracing::warn!("the disk does not take an object within {WRITE_PATIENCE:?}");
            false
        }
    }
}

/// Copies objects of a tenant out of our memory. `None` for those that are not there any more.
async fn copies<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    tenant: &str,
    items: &[OffloadItem],
) -> Vec<Option<Put>> {
    let mut puts: Vec<Option<Put>> = items.iter().map(|_| None).collect();
    let mut wanted: Vec<usize> = (0..items.len()).collect();
    for _ in 0..TRIES {
        if wanted.is_empty() {
            break;
        }
        let keys: Vec<&[u8]> = wanted.iter().map(|&i| &*items[i].key).collect();
        let asked = client.config.clock.now();
        let call = client.master.locate(tenant, &keys);
        let answers = match client.deadline().bound("replica list", call).await {
            Ok(answers) => answers,
            Err(error) => {
                tracing::debug!(client = %client.id, "nothing is written to disk: {error}");
                break;
            }
        };
        let mut again = Vec::new();
        for (&i, answer) in wanted.iter().zip(answers) {
            let item = &items[i];
            let Ok(list) = answer else { continue };
            let complete = list.replicas.iter().filter(|replica| replica.status == ReplicaStatus::Complete);
            let own = complete.filter_map(|replica| client.own_bytes(replica)).next();
            let Some(own) = own.filter(|own| own.len() as i64 == item.size) else { continue };
            match copy(disk, &scoped(tenant, &item.key), &own).await {
                // The bytes were the object's to the end.
                Ok(put) if client.config.clock.now() < asked.after(list.lease) => puts[i] = Some(put),
                Ok(_) => again.push(i),
                Err(error) => tracing::warn!(key = %shown(&item.key), "not written to disk: {error}"),
            }
        }
        wanted = again;
    }
    puts
}

async fn copy<T: Transport>(disk: &Disk<T>, key: &[u8], from: &Slice<T>) -> Result<Put> {
    let mut put = disk.store.value(key, from.len())?;
    for (part, into) in put.value().chunks_mut(COPIED_AT_ONCE).enumerate() {
        if part > 0 {
            tokio::task::yield_now().await;
        }
        from.copy_to(part * COPIED_AT_ONCE, into)?;
    }
    Ok(put)
}

impl<T: Transport> Disk<T> {
    /// An object on this disk, as the master is told of it.
    fn stored(&self, key: &[u8], len: i64) -> (OffloadItem, StoredAt) {
        let (tenant, own) = split(key);
        let item = OffloadItem { tenant: tenant.into(), key: own.into(), size: len };
        // Where in the file it lies is nobody else's affair.
        let key_size = i64::try_from(own.len()).unwrap_or(i64::MAX);
        let place =
            StoredAt { bucket: 0, offset: 0, key_size, data_size: len, endpoint: self.endpoint.clone() };
        (item, place)
    }
}

impl<T: Transport> Client<T> {
    /// Opens the disk that the configuration speaks of, and offers it.
    pub(in crate::client) async fn start_disk(&self) -> Result<()> {
        let inner = &self.inner;
        let Some(config) = inner.config.offload.clone() else { return Ok(()) };
        let (disk, server) = open(config, &inner.engine, &inner.endpoint).await?;
        offer(inner, &disk).await.map_err(|error| match error.code() {
            ErrorCode::UnableOffload => Error::new(
                ErrorCode::UnableOffload,
                "offload: the master puts no objects on disks; start it with --enable_offload",
            ),
            _ => error.context("offload"),
        })?;
        let (stop, stopped) = watch::channel(false);
        let sweeping = sweep(disk.clone(), stopped.clone());
        let running = run(Arc::downgrade(inner), disk.clone(), server, stopped);
        let last = disk.clone();
        let task = inner.runtime.spawn(async move {
            tokio::join!(sweeping, running);
            drop_disk(last).await;
        });
        *inner.disk.lock() = Some(Running { disk, stop, task });
        self.start_heartbeat();
        Ok(())
    }
}

/// Closing files and deregistering memory takes a while, so it does not belong on a task's thread.
async fn drop_disk<T: Transport>(disk: Arc<Disk<T>>) {
    let _ = tokio::task::spawn_blocking(move || drop(disk)).await;
}

impl<T: Transport> Inner<T> {
    /// Stops serving the disk, and takes it back. What lies there stays, and may be another client's from now on.
    pub(in crate::client) async fn close_disk(&self, deadline: &Deadline) {
        let Some(Running { disk, stop, task }) = self.disk.lock().take() else { return };
        stop.send_replace(true);
        let _ = task.await;
        drop_disk(disk).await;
        if let Err(error) = deadline.bound("taking a disk back", self.master.unmount_disk(self.id)).await {
            tracing::debug!(client = %self.id, "the master was not told that a disk is gone: {error}");
        }
    }

    /// The master has forgotten us: it is to hear of the disk at once.
    pub(in crate::client) fn offer_disk_again(&self) {
        if let Some(running) = &*self.disk.lock() {
            running.disk.wake.notify_one();
        }
    }
}
