//! The heartbeat of a disk: what the master wants written, what it wants back in memory, and what
//! it is to hear.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::{StreamExt, future};
use mooncake_core::replica::ReplicaStatus;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_disk::Put;
use mooncake_transport::{Slice, Transport};
use tokio::sync::watch;

use super::promote::promote;
use crate::buffers::COPIED_AT_ONCE;
use crate::deadline::Deadline;
use crate::disk::{Disk, Running, open};
use crate::disk::{scoped, split};
use crate::errors::shown;
use crate::state::{Client, Inner};
use mooncake_protocol::server::RunningServer;
use mooncake_protocol::wire::{DiskWork, OffloadItem, StoredAt};

/// Objects copied out of memory and reported together, at most; and their bytes, unless one alone
/// is longer.
const TOGETHER: usize = 256;
const BYTES_TOGETHER: i64 = 32 << 20;
/// Objects written at a time.
const WRITES: usize = 8;
/// Objects announced at a time.
const ANNOUNCED: usize = 4096;
/// How often an object is looked for again that was being read for longer than its lease.
const TRIES: usize = 3;
/// How often loans that are overdue are looked for.
const SWEEP: Duration = Duration::from_millis(250);

/// What the heartbeat of a disk remembers.
#[derive(Debug, Default)]
struct Beat {
    /// The master knows the disk, and what lies there.
    offered: bool,
    /// Number of the last answer that was seen to.
    done: u64,
    /// The master does not number what it says.
    plain: bool,
    /// Something was written: more has come meanwhile, perhaps.
    busy: bool,
    /// Objects that went by themselves, and the master has not been told of.
    departed: Vec<Arc<[u8]>>,
}

/// Runs until it is stopped, or the client dropped. Others are served as long.
async fn run<T: Transport>(
    client: Weak<Inner<T>>,
    disk: Arc<Disk<T>>,
    server: Option<RunningServer>,
    mut state: Beat,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let Some(strong) = client.upgrade() else { break };
        // A master that numbers what it says can be asked as often as it is told that we live.
        let often = if state.plain { disk.config.interval } else { strong.config.ping_interval };
        drop(strong);
        let pause = if state.busy { Duration::ZERO } else { often.min(disk.config.interval) };
        let pause = tokio::time::sleep(pause);
        tokio::select! {
            // An error means that the sender is gone, and the client with it.
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
async fn offer<T: Transport>(client: &Arc<Inner<T>>, disk: &Arc<Disk<T>>, state: &mut Beat) -> Result<()> {
    *state = Beat { departed: std::mem::take(&mut state.departed), ..Beat::default() };
    let (master, id) = (&client.master, client.id);
    client.deadline().bound("offering a disk", master.mount_disk(id, true)).await?;
    let capacity = disk.store.stats().capacity;
    if let Err(error) = client.deadline().bound("size of a disk", master.disk_capacity(id, capacity)).await {
        tracing::debug!(client = %id, "the master was not told how large the disk is: {error}");
    }
    // Before anything is announced, so that what the master does not take is heard of.
    match client.deadline().bound("what is told of a disk", master.disk_work(id, true, 0)).await {
        Ok(work) => disk.tenants.store(work.tenants, Relaxed),
        Err(error) if error.code() == ErrorCode::NotSupported => state.plain = true,
        Err(error) => return Err(error),
    }
    let listing = disk.listing();
    for some in listing.chunks(ANNOUNCED) {
        let (items, places): (Vec<_>, Vec<_>) =
            some.iter().map(|(key, len)| disk.stored(key, len.cast_signed())).unzip();
        client.deadline().bound("announcing a disk", master.offloaded(id, &items, &places)).await?;
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
            // The master is another one, or had given us up.
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

/// Asks what is to be done, and says that what was heard before is.
async fn ask<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Arc<Disk<T>>,
    state: &mut Beat,
) -> Result<DiskWork> {
    let (master, id) = (&client.master, client.id);
    if !state.plain {
        let ask = master.disk_work(id, false, state.done);
        let work = client.deadline().bound("what is to be done with a disk", ask).await?;
        disk.tenants.store(work.tenants, Relaxed);
        return Ok(work);
    }
    // Before anything else, so that it concerns nothing that is told afterwards.
    let ask = master.must_clear_disk(id);
    let clear = client.deadline().bound("whether the disk is to be emptied", ask).await?;
    let write = client.deadline().bound("what goes to disk", master.to_offload(id, true)).await;
    // That it is to be emptied is said once.
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

/// Makes objects unreadable on the disk, in whatever time that takes.
async fn remove<T: Transport>(disk: &Arc<Disk<T>>, keys: Vec<Vec<u8>>) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    let from = disk.clone();
    disk.work(async move { from.store.remove(keys).await }).await.map(drop)
}

/// Tells the master of objects that went by themselves: evicted, damaged, unreadable.
async fn report_departed<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    state: &mut Beat,
) -> Result<()> {
    state.departed.extend(disk.store.take_departed());
    // Some may be back by now.
    state.departed.retain(|key| !disk.store.contains(key));
    let mut by_tenant: BTreeMap<&str, Vec<&[u8]>> = BTreeMap::new();
    for key in &state.departed {
        let (tenant, key) = split(key);
        by_tenant.entry(tenant).or_default().push(key);
    }
    for (tenant, keys) in by_tenant {
        for some in keys.chunks(ANNOUNCED) {
            let tell = client.master.dropped_from_disk(client.id, tenant, some);
            client.deadline().bound("what left the disk", tell).await?;
        }
    }
    state.departed.clear();
    Ok(())
}

/// Writes what the master wants on disk, and says how it went. While some are written, the next are
/// copied out of memory.
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

/// How many of the first are copied together. All are of one tenant.
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

/// Says which objects are on the disk now, and which are not.
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
    // An older value is not to be found in place of the one that is not there.
    remove(disk, unwritten).await?;
    tell(client, items, &places).await
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

async fn write<T: Transport>(disk: &Arc<Disk<T>>, put: Option<Put>) -> bool {
    let Some(put) = put.filter(|_| !disk.is_behind()) else { return false };
    let late = Arc::new(AtomicBool::new(false));
    let (to, was_late) = (disk.clone(), late.clone());
    let written = disk.work(async move {
        let key = put.key().clone();
        to.store.put(put).await?;
        if was_late.load(Relaxed) {
            // The master has heard that it is not there.
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

/// Copies objects of a tenant out of our memory. `None` for those that are not there any more.
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

/// Closing files and deregistering memory takes a while, so it does not belong on a task's thread.
async fn drop_disk<T: Transport>(disk: Arc<Disk<T>>) {
    let _ = tokio::task::spawn_blocking(move || drop(disk)).await;
}

impl<T: Transport> Inner<T> {
    /// Stops serving the disk, and takes it back. What lies there stays, and may be another
    /// client's from now on.
    pub(crate) async fn close_disk(&self, deadline: &Deadline) {
        let Some(Running { disk, stop, task }) = self.disk.lock().take() else { return };
        stop.send_replace(true);
        let _ = task.await;
        drop_disk(disk).await;
        if let Err(error) = deadline.bound("taking a disk back", self.master.unmount_disk(self.id)).await {
            tracing::debug!(client = %self.id, "the master was not told that a disk is gone: {error}");
        }
    }

    /// The master has forgotten us: it is to hear of the disk at once.
    pub(crate) fn offer_disk_again(&self) {
        if let Some(running) = &*self.disk.lock() {
            running.disk.wake.notify_one();
        }
    }
}
