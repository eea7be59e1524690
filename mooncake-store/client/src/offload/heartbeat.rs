//! Heartbeat of a disk. It writes the objects that the master wants on disk, brings back those that
//! the master wants in memory, and reports to the master.

mod prefetch;
mod promote;
mod verify;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::{StreamExt, future};
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::ReplicaStatus;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_disk::Put;
use mooncake_transport::{Slice, Transport};
use tokio::sync::watch;

use self::promote::promote;
use self::verify::Verifier;
use crate::buffers::COPY_CHUNK;
use crate::deadline::Deadline;
use crate::disk::own::{Disk, Running, open, split};
use crate::disk::scoped;
use crate::errors::display_key;
use crate::state::{Client, Inner};
use mooncake_protocol::message::{
    FetchDiskWork, MountLocalDiskSegment, OffloadObjectHeartbeat, PollRemoveAll, ReportSsdCapacity,
    UnmountLocalDiskSegment,
};
use mooncake_protocol::server::RunningServer;
use mooncake_protocol::wire::{DiskWork, OffloadItem, StoredAt};

/// Maximum number of objects that are copied out of memory and reported together.
const MAX_BATCH: usize = 256;
/// Maximum number of bytes that are copied together, unless a single object has more.
const MAX_BATCH_BYTES: i64 = 32 << 20;
/// Number of objects that are written concurrently.
const MAX_CONCURRENT_WRITES: usize = 8;
/// Number of objects in one announcement.
const MAX_ANNOUNCED: usize = 4096;
/// Number of attempts to copy an object whose copy outlasts its lease, and to send a report.
const MAX_ATTEMPTS: usize = 3;
/// Interval of the search for expired loans.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// State of the heartbeat of a disk.
#[derive(Debug, Default)]
struct DiskHeartbeat {
    /// True if the master knows the disk and its objects.
    offered: bool,
    /// Number of the last response whose work is finished.
    done: u64,
    /// True if the master does not number its responses.
    unnumbered: bool,
    /// True if an object was written, so that the master may have more work.
    busy: bool,
    /// Objects that left the disk by themselves and that were not reported to the master yet.
    departed: Vec<Arc<[u8]>>,
}

/// Runs until `closed` is set or the client is dropped. The server for other clients runs as long
/// as the heartbeat.
async fn run<T: Transport>(
    client: Weak<Inner<T>>,
    disk: Arc<Disk<T>>,
    server: RunningServer,
    mut state: DiskHeartbeat,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let Some(strong) = client.upgrade() else { break };
        // A master that numbers its responses can be asked as often as it is pinged.
        let interval = if state.unnumbered { disk.config.interval } else { strong.config.ping_interval };
        drop(strong);
        let pause = if state.busy { Duration::ZERO } else { interval.min(disk.config.interval) };
        let pause = tokio::time::sleep(pause);
        tokio::select! {
            // An error means that the sender and the client are gone.
            _ = closed.wait_for(|closed| *closed) => break,
            () = pause => {}
            () = disk.wake.notified() => {}
        }
        let Some(strong) = client.upgrade() else { break };
        state.busy = false;
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => break,
            outcome = beat(&strong, &disk, &mut state) => {
                if let Err(error) = outcome {
                    tracing::warn!(client = %strong.id, "the master was not asked what goes to disk: {error}");
                }
            }
        }
    }
    server.stop().await;
}

/// Ends expired loans until `closed` is set.
async fn sweep<T: Transport>(disk: Arc<Disk<T>>, mut closed: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(SWEEP_INTERVAL) => disk.end_expired_loans(),
        }
    }
}

/// Offers the disk to the master and announces its objects.
async fn offer<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    state: &mut DiskHeartbeat,
) -> Result<()> {
    *state = DiskHeartbeat { departed: std::mem::take(&mut state.departed), ..DiskHeartbeat::default() };
    let (master, id) = (&client.master, client.id);
    let mount = master.call(MountLocalDiskSegment { client: id, enabled: true });
    client.deadline().bound("offering a disk", mount).await?;
    let bytes = i64::try_from(disk.store.stats().capacity).unwrap_or(i64::MAX);
    let report = master.call(ReportSsdCapacity { client: id, bytes });
    if let Err(error) = client.deadline().bound("size of a disk", report).await {
        tracing::debug!(client = %id, "the master was not notified of the capacity of the disk: {error}");
    }
    // This request precedes the announcements, so that the master reports the objects that it
    // rejects.
    let begin = master.call(FetchDiskWork { client: id, begin: true, done: 0 });
    match client.deadline().bound("heartbeat of a disk", begin).await {
        Ok(work) => disk.tenants.store(work.tenants, Relaxed),
        Err(error) if error.code() == ErrorCode::NotSupported => state.unnumbered = true,
        Err(error) => return Err(error),
    }
    let listing = disk.listing();
    for chunk in listing.chunks(MAX_ANNOUNCED) {
        let (items, locations): (Vec<_>, Vec<_>) =
            chunk.iter().map(|(key, len)| disk.stored(key, len.cast_signed())).unzip();
        let work = Some(0).filter(|_| !state.unnumbered);
        let report = master.report_offloaded(id, work, &items, &locations);
        client.deadline().bound("announcing a disk", report).await?;
    }
    tracing::info!(client = %id, objects = listing.len(), "disk offered");
    state.offered = true;
    Ok(())
}

async fn beat<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    state: &mut DiskHeartbeat,
) -> Result<()> {
    if !disk.is_usable().await {
        return Ok(());
    }
    loop {
        if !state.offered {
            offer(client, disk, state).await?;
        }
        let work = match fetch_work(client, disk, state).await {
            // The master is a new one, or this client has expired there.
            Err(error) if error.code() == ErrorCode::SegmentNotFound => {
                offer(client, disk, state).await?;
                fetch_work(client, disk, state).await?
            }
            work => work?,
        };
        let more = !work.dropped.is_empty();
        let before = disk.counts.offloaded.load(Relaxed);
        let number = work.number;
        execute(client, disk, work, state.unnumbered).await?;
        state.done = number;
        state.busy |= disk.counts.offloaded.load(Relaxed) > before;
        if !more {
            break;
        }
    }
    promote(client, disk).await?;
    if disk.config.watermarks.is_some() {
        let full = disk.clone();
        disk.work(async move { full.store.trim().await }).await?;
    }
    report_departed(client, disk, state).await
}

/// Requests work from the master, and acknowledges the work of the previous response.
async fn fetch_work<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    state: &mut DiskHeartbeat,
) -> Result<DiskWork> {
    let (master, id) = (&client.master, client.id);
    if !state.unnumbered {
        let call = master.call(FetchDiskWork { client: id, begin: false, done: state.done });
        let work = client.deadline().bound("request for disk work", call).await?;
        disk.tenants.store(work.tenants, Relaxed);
        return Ok(work);
    }
    // This request comes first, so that clearing the disk affects no object that the master sends
    // afterwards.
    let call = master.call(PollRemoveAll { client: id });
    let clear = client.deadline().bound("whether the disk is to be emptied", call).await?;
    let call = master.call(OffloadObjectHeartbeat { client: id, enabled: true });
    let write = client.deadline().bound("request for objects to offload", call).await;
    // The master sends the request to clear the disk only once, so an error of the second request
    // must not discard it.
    match write {
        Err(error) if !clear => Err(error),
        write => Ok(DiskWork { clear, write: write.unwrap_or_default(), ..DiskWork::default() }),
    }
}

async fn execute<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    work: DiskWork,
    is_unnumbered: bool,
) -> Result<()> {
    if work.clear {
        let emptied = disk.clone();
        let all = async move { emptied.store.remove_where(|_| true).await };
        let removed = disk.work(all).await?;
        tracing::info!(client = %client.id, objects = removed, "disk emptied");
    }
    remove(disk, work.dropped.iter().map(|item| scoped(&item.tenant, &item.key)).collect()).await?;
    write_out(client, disk, Some(work.number).filter(|_| !is_unnumbered), work.write).await
}

/// Makes objects unreadable on the disk. The disk may finish after this call has timed out.
async fn remove<T: Transport>(disk: &Arc<Disk<T>>, keys: Vec<Vec<u8>>) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    let from = disk.clone();
    disk.work(async move { from.store.remove(keys).await }).await.map(drop)
}

/// Reports objects to the master that left the disk by themselves: evicted, damaged or unreadable.
async fn report_departed<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    state: &mut DiskHeartbeat,
) -> Result<()> {
    state.departed.extend(disk.store.take_departed());
    // Some of these objects may be on the disk again.
    state.departed.retain(|key| !disk.store.contains(key));
    let mut by_tenant: BTreeMap<&str, Vec<&[u8]>> = BTreeMap::new();
    for key in &state.departed {
        let (tenant, key) = split(key);
        by_tenant.entry(tenant).or_default().push(key);
    }
    for (tenant, keys) in by_tenant {
        for chunk in keys.chunks(MAX_ANNOUNCED) {
            let work = Some(state.done).filter(|_| !state.unnumbered);
            let call = client.master.report_dropped(client.id, work, tenant, chunk);
            client.deadline().bound("report of objects evicted from disk", call).await?;
        }
    }
    state.departed.clear();
    Ok(())
}

/// Writes the objects that the master wants on disk, and reports the results under the number of
/// the work. While some objects are written, the next ones are copied out of memory.
async fn write_out<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    work: Option<u64>,
    items: Vec<OffloadItem>,
) -> Result<()> {
    let mut rest = &items[..];
    let (mut copied, mut puts) = (&rest[..0], Vec::new());
    loop {
        let (batch, later) = rest.split_at(leading_batch_len(rest));
        rest = later;
        let writing = futures::stream::iter(puts).map(|put| write(disk, put)).buffered(MAX_CONCURRENT_WRITES);
        let (written, next) = future::join(writing.collect::<Vec<_>>(), copies(client, disk, batch)).await;
        if !copied.is_empty() {
            report(client, disk, work, copied, &written).await?;
        }
        if batch.is_empty() {
            return Ok(());
        }
        (copied, puts) = (batch, next);
    }
}

/// Returns the number of leading items that are copied together. All of them have the same tenant.
fn leading_batch_len(items: &[OffloadItem]) -> usize {
    let Some(first) = items.first() else { return 0 };
    let mut bytes = 0i64;
    let fits = |item: &&OffloadItem| {
        let alone = bytes == 0;
        bytes = bytes.saturating_add(item.size.max(1));
        item.tenant == first.tenant && (alone || bytes <= MAX_BATCH_BYTES)
    };
    items.iter().take(MAX_BATCH).take_while(fits).count().max(1)
}

/// Reports which objects are on the disk now, and which are not.
async fn report<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    work: Option<u64>,
    items: &[OffloadItem],
    written: &[bool],
) -> Result<()> {
    let mut locations = Vec::with_capacity(items.len());
    let mut unwritten = Vec::new();
    for (item, written) in items.iter().zip(written) {
        let key = scoped(&item.tenant, &item.key);
        if *written {
            disk.counts.offloaded.fetch_add(1, Relaxed);
            disk.counts.offloaded_bytes.fetch_add(item.size.unsigned_abs(), Relaxed);
        } else {
            disk.counts.refused.fetch_add(1, Relaxed);
            unwritten.push(key.clone());
        }
        locations.push(disk.stored(&key, if *written { item.size } else { -1 }).1);
    }
    // An older value of the key must not be found in place of the missing one.
    remove(disk, unwritten).await?;
    report_offloaded(client, work, items, &locations).await
}

/// Reports written objects to the master. The report is repeated if the response is lost.
async fn report_offloaded<T: Transport>(
    client: &Arc<Inner<T>>,
    work: Option<u64>,
    items: &[OffloadItem],
    locations: &[StoredAt],
) -> Result<()> {
    let mut outcome = Ok(());
    for _ in 0..MAX_ATTEMPTS {
        let report = client.master.report_offloaded(client.id, work, items, locations);
        outcome = client.deadline().bound("report of offloaded objects", report).await;
        match &outcome {
            Err(error) if error.code() != ErrorCode::SegmentNotFound => {}
            _ => break,
        }
    }
    outcome
}

async fn write<T: Transport>(disk: &Arc<Disk<T>>, put: Option<Put>) -> bool {
    let Some(put) = put.filter(|_| !disk.is_overdue()) else { return false };
    let late = Arc::new(AtomicBool::new(false));
    let (target, was_late) = (disk.clone(), late.clone());
    let written = disk.work(async move {
        let key = put.key().clone();
        target.store.put(put).await?;
        if was_late.load(Relaxed) {
            // The master has already received the report that the object is not on the disk.
            target.store.remove([key]).await;
        }
        Ok::<_, Error>(())
    });
    match written.await.and_then(std::convert::identity) {
        Ok(()) => true,
        Err(error) => {
            late.store(true, Relaxed);
            tracing::warn!("an object cannot be written to disk: {error}");
            false
        }
    }
}

/// Copies objects of one tenant out of the memory of this client. The result is `None` for objects
/// that are no longer there.
async fn copies<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    items: &[OffloadItem],
) -> Vec<Option<Put>> {
    let tenant = items.first().map_or("", |first| &first.tenant);
    let mut puts: Vec<Option<Put>> = items.iter().map(|_| None).collect();
    let mut pending: Vec<usize> = (0..items.len()).collect();
    for _ in 0..MAX_ATTEMPTS {
        if pending.is_empty() {
            break;
        }
        let keys: Vec<&[u8]> = pending.iter().map(|&i| &*items[i].key).collect();
        let requested_at = client.config.clock.now();
        // No replica is named, so the only read of an object is left to its reader.
        let replicas = vec![ReplicaId::OF_OFFLOAD; keys.len()];
        let call = client.master.locate_again(tenant, &keys, &replicas);
        let results = match client.deadline().bound("replica list", call).await {
            Ok(results) => results,
            Err(error) => {
                tracing::debug!(client = %client.id, "nothing is written to disk: {error}");
                break;
            }
        };
        let mut again = Vec::new();
        for (&i, result) in pending.iter().zip(results) {
            let item = &items[i];
            let Ok(list) = result else { continue };
            let complete = list.replicas.iter().filter(|replica| replica.status == ReplicaStatus::Complete);
            let own = complete.filter_map(|replica| client.own_bytes(replica)).next();
            let Some(own) = own.filter(|own| own.len() as i64 == item.size) else { continue };
            match copy(disk, &scoped(tenant, &item.key), &own).await {
                // The lease covered the whole copy, so the bytes belonged to the object until the
                // end.
                Ok(put) if client.config.clock.now() < requested_at.after(list.lease) => puts[i] = Some(put),
                Ok(_) => again.push(i),
                Err(error) => tracing::warn!(key = %display_key(&item.key), "not written to disk: {error}"),
            }
        }
        pending = again;
    }
    puts
}

async fn copy<T: Transport>(disk: &Disk<T>, key: &[u8], from: &Slice<T>) -> Result<Put> {
    let mut put = disk.store.value(key, from.len())?;
    for (part, into) in put.value().chunks_mut(COPY_CHUNK).enumerate() {
        if part > 0 {
            tokio::task::yield_now().await;
        }
        from.copy_to(part * COPY_CHUNK, into)?;
    }
    Ok(put)
}

impl<T: Transport> Disk<T> {
    /// Returns the description of an object on this disk for the master.
    fn stored(&self, key: &[u8], len: i64) -> (OffloadItem, StoredAt) {
        let (tenant, own) = split(key);
        let item = OffloadItem { tenant: tenant.into(), key: own.into(), size: len };
        // The position inside the file is private to this client. Its fields name the value
        // instead, so that the master recognizes it when the next process finds it.
        let (store, number) = self.store.identity(key).unwrap_or_default();
        let (bucket, offset) = (store.cast_signed(), number.cast_signed());
        let key_size = i64::try_from(own.len()).unwrap_or(i64::MAX);
        let location = StoredAt { bucket, offset, key_size, data_size: len, endpoint: self.endpoint.clone() };
        (item, location)
    }
}

impl<T: Transport> Client<T> {
    /// Opens the disk of the configuration and offers it to the master.
    pub(crate) async fn start_disk(&self) -> Result<()> {
        let inner = &self.inner;
        let Some(config) = inner.config.offload.clone() else { return Ok(()) };
        let verifier = Arc::new(Verifier(Arc::downgrade(inner)));
        let prefetches = inner.prefetches.clone();
        let (disk, server) =
            open(config, &inner.engine, &inner.endpoint, inner.bound, verifier, prefetches).await?;
        let mut state = DiskHeartbeat::default();
        offer(inner, &disk, &mut state).await.map_err(|error| match error.code() {
            ErrorCode::UnableOffload => Error::new(
                ErrorCode::UnableOffload,
                "offload: the master puts no objects on disks; start it with --enable_offload",
            ),
            _ => error.context("offload"),
        })?;
        let (stop, stopped) = watch::channel(false);
        let sweeping = sweep(disk.clone(), stopped.clone());
        let prefetching = prefetch::run(Arc::downgrade(inner), disk.clone(), stopped.clone());
        let running = run(Arc::downgrade(inner), disk.clone(), server, state, stopped);
        let last = disk.clone();
        let task = inner.runtime.spawn(async move {
            tokio::join!(sweeping, prefetching, running);
            drop_disk(last).await;
        });
        *inner.disk.lock() = Some(Running { disk, stop, task });
        self.start_heartbeat();
        Ok(())
    }
}

/// Closes a disk on a blocking thread, because closing files and deregistering memory takes a
/// while.
async fn drop_disk<T: Transport>(disk: Arc<Disk<T>>) {
    let _ = tokio::task::spawn_blocking(move || drop(disk)).await;
}

impl<T: Transport> Inner<T> {
    /// Stops serving the disk and unmounts it at the master. The objects stay on the disk, and
    /// another client may open it from now on.
    pub(crate) async fn close_disk(&self, deadline: &Deadline) {
        let Some(Running { disk, stop, task }) = self.disk.lock().take() else { return };
        stop.send_replace(true);
        let _ = task.await;
        drop_disk(disk).await;
        let unmount = self.master.call(UnmountLocalDiskSegment { client: self.id });
        if let Err(error) = deadline.bound("taking a disk back", unmount).await {
            tracing::debug!(client = %self.id, "the master was not notified of a closed disk: {error}");
        }
    }

    /// Wakes the heartbeat of the disk, so that a master that has forgotten this client receives
    /// the offer at once.
    pub(crate) fn offer_disk_again(&self) {
        if let Some(running) = &*self.disk.lock() {
            running.disk.wake.notify_one();
        }
    }
}
