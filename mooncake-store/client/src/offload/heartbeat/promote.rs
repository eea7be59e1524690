//! Promotion of objects from disk to memory, as requested by the master for objects that are read
//! often.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;

use crate::disk::own::Disk;
use crate::disk::scoped;
use crate::errors::shown;
use crate::issuer::Issuer;
use crate::state::{Inner, Unreached};
use mooncake_protocol::message::{
    NotifyPromotionFailure, NotifyPromotionSuccess, PromotionAllocStart, PromotionObjectHeartbeat,
};
use mooncake_protocol::wire::OffloadItem;

/// Reads back the objects that the master requests, one after the other.
pub(crate) async fn promote<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>) -> Result<()> {
    let ask = client.master.call(PromotionObjectHeartbeat { client: client.id });
    let items = match client.deadline().bound("request for objects to promote", ask).await {
        // This client has expired at the master, or the master does not support promotion. The next
        // heartbeat detects it.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        items => items?,
    };
    for item in items {
        match bring_back(client, disk, &item).await {
            Ok(()) => {
                disk.counts.promoted.fetch_add(1, Relaxed);
            }
            Err(error) => tracing::debug!(key = %shown(&item.key), "not back in memory: {error}"),
        }
    }
    Ok(())
}

async fn bring_back<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>, item: &OffloadItem) -> Result<()> {
    let moved = move_up(client, disk, item).await;
    // A transfer that timed out may still land. Its space is left to the master, which waits long
    // enough before it reuses the space.
    if moved.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout) {
        return moved;
    }
    let (id, key, tenant, done) = (client.id, item.key.as_slice(), item.tenant.as_str(), moved.is_ok());
    let told = async {
        match done {
            true => client.master.call(NotifyPromotionSuccess { client: id, key, tenant }).await,
            false => client.master.call(NotifyPromotionFailure { client: id, key, tenant }).await,
        }
    };
    moved.and(client.deadline().bound("end of a way back from disk", told).await)
}

async fn move_up<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>, item: &OffloadItem) -> Result<()> {
    let deadline = client.deadline();
    let key = scoped(&item.tenant, &item.key);
    let len = disk.store.value_len(&key).filter(|len| len.cast_signed() == item.size);
    let len = len.ok_or(ErrorCode::ObjectNotFound)?;
    let value = deadline.bound("reading from disk", disk.shelve(&key, len)).await?;
    let own = [client.name.as_str()];
    let known = client.engine.look_ups();
    let start = client.master.call(PromotionAllocStart {
        client: client.id,
        key: &item.key,
        tenant: &item.tenant,
        size: len,
        preferred: Cow::Borrowed(&own),
    });
    let place = deadline.bound("space for a promoted object", start).await?.memory;
    let granted = place.location.memory().filter(|at| at.size == len);
    let at = granted.ok_or_else(|| Error::internal("the master granted something else than memory"))?;
    let target = client.reach_owner(&at.endpoint, Issuer::Master(known), &deadline).await;
    let target = target.map_err(Unreached::into_error)?;
    let landing = Some(deadline.portion(7, 8));
    let (result, _) = client.engine.write(&target, at.address, value, landing).await;
    client.note(&at.endpoint, &result);
    result
}
