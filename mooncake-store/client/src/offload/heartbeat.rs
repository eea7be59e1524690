//! Heartbeat of a disk. It writes the objects that the master wants on disk, brings back those that
//! the master wants in memory, and reports to the master.

mod promote;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::{StreamExt, future};
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{ReplicaStatus, ReplicaType};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_disk::Put;
use mooncake_transport::{Slice, Transport};
use tokio::sync::watch;

use self::promote::promote;
use crate::buffers::COPIED_AT_ONCE;
use crate::deadline::Deadline;
use crate::disk::own::{Disk, Running, open, split};
use crate::disk::scoped;
use crate::errors::shown;
use crate::state::{Client, Inner};
use mooncake_protocol::message::{
    FetchDiskWork, MountLocalDiskSegment, NotifyOffloadSuccess, OffloadObjectHeartbeat, PollRemoveAll,
    ReportSsdCapacity, UnmountLocalDiskSegment,
};
use mooncake_protocol::server::RunningServer;
use mooncake_protocol::wire::{DiskWork, OffloadItem, StoredAt};

/// Maximum number of objects that are copied out of memory and reported together.
const TOGETHER: usize = 256;
/// Maximum number of bytes that are copied together, unless a single object has more.
const BYTES_TOGETHER: i64 = 32 << 20;
/// Number of objects that are written concurrently.
const WRITES: usize = 8;
/// Number of objects in one announcement.
const ANNOUNCED: usize = 4096;
/// Number of attempts to copy an object whose copy outlasts its lease, and to send a report.
const TRIES: usize = 3;
/// Interval of the search for expired loans.
const SWEEP: Duration = Duration::from_millis(250);

/// State of the heartbeat of a disk.
#[derive(Debug, Default)]
struct Beat {
    /// True if the master knows the disk and its objects.
    offered: bool,
    /// Number of the last response whose work is finished.
    done: u64,
    /// True if the master does not number its responses.
    plain: bool,
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
    server: Option<RunningServer>,
    mut state: Beat,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let Some(strong) = client.upgrade() else { break };
        // A master that numbers its responses can be asked as often as it is pinged.
        let often = if state.plain { disk.config.interval } else { strong.config.ping_interval };
        drop(strong);
        let pause = if state.busy { Duration::ZERO } else { often.min(disk.config.interval) };
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
    if let Some(server) = server {
        server.stop().await;
    }
}

/// Ends expired loans until `closed` is set.
async fn sweep<T: Transport>(disk: Arc<Disk<T>>, mut closed: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(SWEEP) => disk.take_back_overdue(),
        }
    }
}

/// Offers the disk to the master and announces its objects.
async fn offer<T: Transport>(client: &Arc<Inner<T>>, disk: &Arc<Disk<T>>, state: &mut Beat) -> Result<()> {
    *state = Beat { departed: std::mem::take(&mut state.departed), ..Beat::default() };
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
        Err(error) if error.code() == ErrorCode::NotSupported => state.plain = true,
        Err(error) => return Err(error),
    }
    let listing = disk.listing();
    for some in listing.chunks(ANNOUNCED) {
        let (items, places): (Vec<_>, Vec<_>) =
            some.iter().map(|(key, len)| disk.stored(key, len.cast_signed())).unzip();
        let (offloaded, places) = (items.into(), places.into());
        let report = master.call(NotifyOffloadSuccess { client: id, offloaded, places });
        client.deadline().bound("announcing a disk", report).await?;
    }
    tracing::info!(client = %id, objects = listing.len(), "disk offered");
    state.offered = true;
    Ok(())
}

async fn beat<T: Transport>(client: &Arc<Inner<T>>, disk: &Arc<Disk<T>>, state: &mut Beat) -> Result<()> {
    if !disk.is_usable().await {
        return Ok(());
    }
    loop {
        if !state.offered {
            offer(client, disk, state).await?;
        }
        let work = match ask(client, disk, state).await {
            // The master is a new one, or this client has expired there.
            Err(error) if error.code() == ErrorCode::SegmentNotFound => {
                offer(client, disk, state).await?;
                ask(client, disk, state).await?
            }
            work => work?,
        };
        let more = !work.dropped.is_empty();
        let before = disk.counts.offloaded.load(Relaxed);
        let number = work.number;
        see_to(client, disk, work).await?;
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
async fn ask<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    state: &mut Beat,
) -> Result<DiskWork> {
    let (master, id) = (&client.master, client.id);
    if !state.plain {
        let ask = master.call(FetchDiskWork { client: id, begin: false, done: state.done });
        let work = client.deadline().bound("request for disk work", ask).await?;
        disk.tenants.store(work.tenants, Relaxed);
        return Ok(work);
    }
    // This request comes first, so that clearing the disk affects no object that the master sends
    // afterwards.
    let ask = master.call(PollRemoveAll { client: id });
    let clear = client.deadline().bound("whether the disk is to be emptied", ask).await?;
    let ask = master.call(OffloadObjectHeartbeat { client: id, enabled: true });
    let write = client.deadline().bound("request for objects to offload", ask).await;
    // The master sends the request to clear the disk only once, so an error of the second request
    // must not discard it.
    match write {
        Err(error) if !clear => Err(error),
        write => Ok(DiskWork { clear, write: write.unwrap_or_default(), ..DiskWork::default() }),
    }
}

async fn see_to<T: Transport>(client: &Arc<Inner<T>>, disk: &Arc<Disk<T>>, work: DiskWork) -> Result<()> {
    if work.clear {
        let emptied = disk.clone();
        let all = async move { emptied.store.remove_where(|_| true).await };
        let gone = disk.work(all).await?;
        tracing::info!(client = %client.id, objects = gone, "disk emptied");
    }
    remove(disk, work.dropped.iter().map(|item| scoped(&item.tenant, &item.key)).collect()).await?;
    write_out(client, disk, work.write).await
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
    state: &mut Beat,
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
        for some in keys.chunks(ANNOUNCED) {
            let tell = client.master.drop_from_disk(client.id, tenant, some, ReplicaType::LocalDisk);
            client.deadline().bound("report of objects evicted from disk", tell).await?;
        }
    }
    state.departed.clear();
    Ok(())
}

/// Writes the objects that the master wants on disk, and reports the results. While some objects
/// are written, the next ones are copied out of memory.
async fn write_out<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    items: Vec<OffloadItem>,
) -> Result<()> {
    let mut rest = &items[..];
    let (mut copied, mut puts) = (&rest[..0], Vec::new());
    loop {
        let (some, others) = rest.split_at(together(rest));
        rest = others;
        let writing = futures::stream::iter(puts).map(|put| write(disk, put)).buffered(WRITES);
        let (written, next) = future::join(writing.collect::<Vec<_>>(), copies(client, disk, some)).await;
        if !copied.is_empty() {
            report(client, disk, copied, &written).await?;
        }
        if some.is_empty() {
            return Ok(());
        }
        (copied, puts) = (some, next);
    }
}

/// Returns the number of leading items that are copied together. All of them have the same tenant.
fn together(items: &[OffloadItem]) -> usize {
    let Some(first) = items.first() else { return 0 };
    let mut bytes = 0i64;
    let fits = |item: &&OffloadItem| {
        let alone = bytes == 0;
        bytes = bytes.saturating_add(item.size.max(1));
        item.tenant == first.tenant && (alone || bytes <= BYTES_TOGETHER)
    };
    items.iter().take(TOGETHER).take_while(fits).count().max(1)
}

/// Reports which objects are on the disk now, and which are not.
async fn report<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    items: &[OffloadItem],
    written: &[bool],
) -> Result<()> {
    let mut places = Vec::with_capacity(items.len());
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
        places.push(disk.stored(&key, if *written { item.size } else { -1 }).1);
    }
    // An older value of the key must not be found in place of the missing one.
    remove(disk, unwritten).await?;
    tell(client, items, &places).await
}

/// Reports written objects to the master. The report is repeated if the response is lost.
async fn tell<T: Transport>(
    client: &Arc<Inner<T>>,
    items: &[OffloadItem],
    places: &[StoredAt],
) -> Result<()> {
    let mut told = Ok(());
    for _ in 0..TRIES {
        let report = client.master.call(NotifyOffloadSuccess {
            client: client.id,
            offloaded: items.into(),
            places: places.into(),
        });
        told = client.deadline().bound("report of offloaded objects", report).await;
        match &told {
            Err(error) if error.code() != ErrorCode::SegmentNotFound => {}
            _ => break,
        }
    }
    told
}

async fn write<T: Transport>(disk: &Arc<Disk<T>>, put: Option<Put>) -> bool {
    let Some(put) = put.filter(|_| !disk.is_behind()) else { return false };
    let late = Arc::new(AtomicBool::new(false));
    let (to, was_late) = (disk.clone(), late.clone());
    let written = disk.work(async move {
        let key = put.key().clone();
        to.store.put(put).await?;
        if was_late.load(Relaxed) {
            // The master has already received the report that the object is not on the disk.
            to.store.remove([key]).await;
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
    let mut wanted: Vec<usize> = (0..items.len()).collect();
    for _ in 0..TRIES {
        if wanted.is_empty() {
            break;
        }
        let keys: Vec<&[u8]> = wanted.iter().map(|&i| &*items[i].key).collect();
        let asked = client.config.clock.now();
        // No replica is named, so the only read of an object is left to its reader.
        let named = vec![ReplicaId(0); keys.len()];
        let call = client.master.locate_again(tenant, &keys, &named);
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
                // The lease covered the whole copy, so the bytes belonged to the object until the
                // end.
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
    /// Returns the description of an object on this disk for the master.
    fn stored(&self, key: &[u8], len: i64) -> (OffloadItem, StoredAt) {
        let (tenant, own) = split(key);
        let item = OffloadItem { tenant: tenant.into(), key: own.into(), size: len };
        // The position inside the file is private to this client.
        let key_size = i64::try_from(own.len()).unwrap_or(i64::MAX);
        let place =
            StoredAt { bucket: 0, offset: 0, key_size, data_size: len, endpoint: self.endpoint.clone() };
        (item, place)
    }
}

impl<T: Transport> Client<T> {
    /// Opens the disk of the configuration and offers it to the master.
    pub(crate) async fn start_disk(&self) -> Result<()> {
        let inner = &self.inner;
        let Some(config) = inner.config.offload.clone() else { return Ok(()) };
        let (disk, server) = open(config, &inner.engine, &inner.endpoint).await?;
        let mut state = Beat::default();
        offer(inner, &disk, &mut state).await.map_err(|error| match error.code() {
            ErrorCode::UnableOffload => Error::new(
                ErrorCode::UnableOffload,
                "offload: the master puts no objects on disks; start it with --enable_offload",
            ),
            _ => error.context("offload"),
        })?;
        let (stop, stopped) = watch::channel(false);
        let sweeping = sweep(disk.clone(), stopped.clone());
        let running = run(Arc::downgrade(inner), disk.clone(), server, state, stopped);
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
