//! Prefetches from the disk of this client: the objects that readers requested return to memory one
//! after the other, a few at a time.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use futures::future;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;
use tokio::sync::watch;

use super::promote::promote_object;
use crate::disk::own::{Disk, QueuedPrefetch};
use crate::disk::scoped;
use crate::errors::display_key;
use crate::state::Inner;
use mooncake_protocol::wire::OffloadItem;

/// Maximum number of objects that are read back at the same time.
const MAX_CONCURRENT: usize = 4;

/// Brings queued objects back until `closed` is set or the client is dropped.
pub(super) async fn run<T: Transport>(
    client: Weak<Inner<T>>,
    disk: Arc<Disk<T>>,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let objects = tokio::select! {
            _ = closed.wait_for(|closed| *closed) => break,
            objects = disk.prefetches.next(MAX_CONCURRENT) => objects,
        };
        let Some(strong) = client.upgrade() else { break };
        let all: Vec<_> = objects.into_iter().map(|object| prefetch(&strong, &disk, object)).collect();
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => break,
            _ = future::join_all(all) => {}
        }
    }
    disk.prefetches.clear();
}

/// Brings an object back. After a failure, the object may be prefetched again.
async fn prefetch<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>, object: QueuedPrefetch) {
    let QueuedPrefetch { tenant, key, size } = object;
    let item = OffloadItem { tenant, key, size };
    match register_and_promote(client, disk, &item).await {
        Ok(()) => {
            disk.counts.promoted.fetch_add(1, Relaxed);
        }
        // The object is in memory, or returns there already.
        Err(error) if error.code() == ErrorCode::PromotionAlreadyExists => {}
        Err(error) => {
            if error.code() == ErrorCode::NoAvailableHandle {
                disk.prefetches.pause();
            }
            disk.prefetches.prefetches.release(&item.tenant, &item.key);
            tracing::debug!(key = %display_key(&item.key), "not prefetched: {error}");
        }
    }
}

async fn register_and_promote<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    item: &OffloadItem,
) -> Result<()> {
    let unavailable = |text| Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
    if disk.prefetches.is_paused() {
        return unavailable("cannot prefetch object: memory had no space a short time ago");
    }
    if disk.is_overdue() {
        return unavailable("cannot prefetch object: the disk does not answer");
    }
    if disk.store.value_len(&scoped(&item.tenant, &item.key)).is_none() {
        return Err(ErrorCode::ObjectNotFound.into());
    }
    let register = client.master.register_prefetch(client.id, &item.tenant, &item.key);
    client.deadline().bound("reservation of a prefetch", register).await?;
    promote_object(client, disk, item).await
}

impl<T: Transport> Inner<T> {
    /// Queues objects on the disk of this client. Returns whether they are taken.
    pub(crate) fn queue_own_prefetches(&self, tenant: &str, objects: &[(&[u8], i64)]) -> bool {
        let disk = self.disk.lock().as_ref().map(|running| running.disk.clone());
        disk.is_some_and(|disk| disk.queue_prefetches(tenant, objects))
    }
}
