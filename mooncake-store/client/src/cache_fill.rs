//! The hot cache as reads and writes use it, and the reads that fill it.

use bytes::Bytes;
use mooncake_core::Result;
use mooncake_core::replica::{ReplicaList, ReplicaStatus};
use mooncake_transport::Transport;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::{Entry, HotCache};
use crate::errors::shown;
use crate::get;
use crate::state::Inner;

impl<T: Transport> Inner<T> {
    /// The bytes kept of the value that the answer is about.
    pub(crate) fn kept(&self, key: &[u8], list: &ReplicaList) -> Option<Bytes> {
        self.cache.as_ref()?.find(key, list)
    }

    /// Nothing of these keys is kept any more.
    pub(crate) fn forget<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Some(cache) = &self.cache {
            cache.forget(keys);
        }
    }

    /// Nothing is kept any more.
    pub(crate) fn forget_all(&self) {
        if let Some(cache) = &self.cache {
            cache.clear();
        }
    }

    /// Whether bytes from there take a wire, as far as its name tells.
    pub(crate) fn is_afar(&self, endpoint: &str) -> bool {
        let shared = cfg!(feature = "transport-shm") && self.config.share_memory;
        endpoint != self.endpoint && !(shared && self.is_near(endpoint))
    }

    /// A value has come from afar: it may be worth keeping.
    pub(crate) fn came(self: &Arc<Self>, key: &[u8], len: u64) {
        let Some(cache) = &self.cache else { return };
        if len > cache.config.longest.min(cache.config.bytes) {
            return;
        }
        let mut table = cache.table.lock();
        if u32::from(table.count(key)) < cache.config.admission.min(255) {
            return;
        }
        // Who comes while others are being fetched is asked for again if it matters.
        let Ok(turn) = cache.coming.clone().try_acquire_owned() else { return };
        if !table.begin(key) {
            return;
        }
        let (client, key): (_, Box<[u8]>) = (self.clone(), key.into());
        self.runtime.spawn(async move {
            let _turn = turn;
            let Some(cache) = &client.cache else { return };
            let fetched = fetch(&client, cache, &key).await;
            let entry = fetched.unwrap_or_else(|error| {
                tracing::debug!(key = %shown(&key), "it is not kept: {error}");
                None
            });
            if cache.table.lock().end(&key, entry) {
                cache.fills.fetch_add(1, Relaxed);
            }
        });
    }
}

/// Reads a value into memory of the cache, as it is now.
async fn fetch<T: Transport>(
    client: &Arc<Inner<T>>,
    cache: &HotCache<T>,
    key: &[u8],
) -> Result<Option<Entry>> {
    client.usable()?;
    let deadline = client.deadline();
    let asked = client.asked();
    let keys = [key];
    let call = client.master.locate(&client.config.tenant, &keys);
    let Some(answer) = deadline.bound("replica list", call).await?.pop() else { return Ok(None) };
    let mut list = answer?;
    list.replicas.retain(|replica| replica.status == ReplicaStatus::Complete);
    let len = list.replicas.iter().find_map(|replica| replica.location.memory()).map_or(0, |at| at.size);
    if len == 0 || len > cache.config.longest {
        return Ok(None);
    }
    let Some(room) = usize::try_from(len).ok().and_then(|len| cache.room(len)) else { return Ok(None) };
    let read = get::read_to(client, key, list.clone(), asked, room, &deadline).await?;
    Ok(read.map(|bytes| Entry { bytes, replicas: list.replicas, checksum: list.checksum }))
}
