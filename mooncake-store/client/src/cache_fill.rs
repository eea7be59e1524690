//! Use of the hot cache by reads and writes, and the reads that fill the cache.

use bytes::Bytes;
use mooncake_core::Result;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{ReplicaList, ReplicaStatus};
use mooncake_transport::Transport;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::{CachedValue, HotCache};
use crate::errors::display_key;
use crate::get;
use crate::state::Inner;

impl<T: Transport> Inner<T> {
    /// Returns the cached bytes of the value that a response of the master describes.
    pub(crate) fn cached_value(&self, key: &[u8], list: &ReplicaList) -> Option<Bytes> {
        self.cache.as_ref()?.find(key, list)
    }

    /// Removes keys from the cache.
    pub(crate) fn forget<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Some(cache) = &self.cache {
            cache.forget(keys);
        }
    }

    /// Removes all keys from the cache.
    pub(crate) fn forget_all(&self) {
        if let Some(cache) = &self.cache {
            cache.clear();
        }
    }

    /// Returns whether bytes from an endpoint need a transport, as far as the host name shows.
    pub(crate) fn needs_transport(&self, endpoint: &str) -> bool {
        let shared = cfg!(feature = "transport-shm") && self.config.share_memory;
        endpoint != self.endpoint && !(shared && self.is_near(endpoint))
    }

    /// Counts a value that was read over a transport. Fetches the value into the cache if it is
    /// read often. `replica` is a replica of the value.
    pub(crate) fn record_remote_read(self: &Arc<Self>, key: &[u8], len: u64, replica: ReplicaId) {
        let Some(cache) = &self.cache else { return };
        if len > cache.config.longest.min(cache.config.bytes) {
            return;
        }
        let mut table = cache.table.lock();
        if u32::from(table.count(key)) < cache.config.admission.min(255) {
            return;
        }
        // A key above the limit of concurrent fetches is skipped. Its next read tries again.
        let Ok(permit) = cache.fetch_permits.clone().try_acquire_owned() else { return };
        if !table.begin(key) {
            return;
        }
        let (client, key): (_, Box<[u8]>) = (self.clone(), key.into());
        self.runtime.spawn(async move {
            let _permit = permit;
            let Some(cache) = &client.cache else { return };
            let fetched = fetch(&client, cache, &key, replica).await;
            let entry = fetched.unwrap_or_else(|error| {
                tracing::debug!(key = %display_key(&key), "it is not kept: {error}");
                None
            });
            if cache.table.lock().end(&key, entry) {
                cache.fills.fetch_add(1, Relaxed);
            }
        });
    }
}

/// Reads the present value of a key into memory of the cache. The value that was read is named: the
/// first read of another one may be the last, and is left to a caller.
async fn fetch<T: Transport>(
    client: &Arc<Inner<T>>,
    cache: &HotCache<T>,
    key: &[u8],
    replica: ReplicaId,
) -> Result<Option<CachedValue>> {
    client.usable()?;
    let deadline = client.deadline();
    let stamp = client.request_stamp();
    let (keys, replicas) = ([key], [replica]);
    let call = client.master.locate_again(&client.config.tenant, &keys, &replicas);
    let Some(response) = deadline.bound("replica list", call).await?.pop() else { return Ok(None) };
    let mut list = response?;
    list.replicas.retain(|replica| replica.status == ReplicaStatus::Complete);
    let len = list.replicas.iter().find_map(|replica| replica.location.memory()).map_or(0, |at| at.size);
    if len == 0 || len > cache.config.longest {
        return Ok(None);
    }
    let Some(buffer) = usize::try_from(len).ok().and_then(|len| cache.allocate(len)) else { return Ok(None) };
    let read = get::read_to(client, key, list.clone(), stamp, buffer, &deadline).await?;
    Ok(read.map(|bytes| CachedValue { bytes, replicas: list.replicas, checksum: list.checksum }))
}
