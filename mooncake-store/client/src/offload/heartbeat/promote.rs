//! Promotion of objects from disk to memory, as requested by the master for objects that are read
//! often.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;

use crate::disk::own::Disk;
use crate::disk::scoped;
use crate::errors::display_key;
use crate::issuer::Issuer;
use crate::state::{Inner, Unreached};
use mooncake_protocol::api::Caller;
use mooncake_protocol::message::PromotionObjectHeartbeat;
use mooncake_protocol::wire::OffloadItem;

/// Reads back the objects that the master requests, one after the other.
pub(crate) async fn promote<T: Transport>(client: &Arc<Inner<T>>, disk: &Disk<T>) -> Result<()> {
    let call = client.master.call(PromotionObjectHeartbeat { client: client.id });
    let items = match client.deadline().bound("request for objects to promote", call).await {
        // This client has expired at the master, or the master does not support promotion. The next
        // heartbeat detects it.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        items => items?,
    };
    for item in items {
        match promote_object(client, disk, &item).await {
            Ok(()) => {
                disk.counts.promoted.fetch_add(1, Relaxed);
            }
            Err(error) => tracing::debug!(key = %display_key(&item.key), "not back in memory: {error}"),
        }
    }
    Ok(())
}

/// Reads an object back into memory. The master has reserved that.
pub(super) async fn promote_object<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    item: &OffloadItem,
) -> Result<()> {
    let mut attempt = client.rng.lock().next_u64().max(1);
    let moved = copy_to_memory(client, disk, item, &mut attempt).await;
    // A transfer that timed out may still land. Its space is left to the master, which waits long
    // enough before it reuses the space.
    if moved.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout) {
        return moved;
    }
    let caller = Caller { tenant: &item.tenant, ..client.caller(attempt) };
    let end = client.master.promotion_end(caller, &item.key, moved.is_ok());
    moved.and(client.deadline().bound("end of a way back from disk", end).await)
}

/// Reads an object back. `attempt` is the number of the promotion, and becomes the one by which the
/// master knows it.
async fn copy_to_memory<T: Transport>(
    client: &Arc<Inner<T>>,
    disk: &Disk<T>,
    item: &OffloadItem,
    attempt: &mut u64,
) -> Result<()> {
    let deadline = client.deadline();
    let key = scoped(&item.tenant, &item.key);
    let len = disk.store.value_len(&key).filter(|len| len.cast_signed() == item.size);
    let len = len.ok_or(ErrorCode::ObjectNotFound)?;
    let value = deadline.bound("reading from disk", disk.read_to_buffer(&key, len)).await?;
    let own = [client.name.as_str()];
    let look_ups = client.engine.look_ups();
    let caller = Caller { tenant: &item.tenant, ..client.caller(*attempt) };
    let start = client.master.promotion_start(caller, &item.key, len, &own);
    let (plan, number) = deadline.bound("space for a promoted object", start).await?;
    let replica = plan.memory;
    *attempt = number;
    let granted = replica.location.memory().filter(|at| at.size == len);
    let at = granted.ok_or_else(|| Error::internal("the master granted something else than memory"))?;
    let target = client.reach_owner(&at.endpoint, Issuer::Master(look_ups), &deadline).await;
    let target = target.map_err(Unreached::into_error)?;
    let landing = Some(deadline.portion(7, 8));
    let (result, _) = client.engine.write(&target, at.address, value, landing).await;
    client.record_outcome(&at.endpoint, &result);
    result
}
