//! Metadata service that stops responding to some calls.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::pending;
use futures::stream::BoxStream;
use mooncake_core::Result;
use mooncake_core::meta::{Expect, MemoryMetadata, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use tokio::sync::watch;

/// Service that never responds to a change of an object or to the end of a read.
#[derive(Debug)]
pub(crate) struct Silent {
    inner: Arc<MemoryMetadata>,
    /// Number of calls that wait to end a read.
    waiting: watch::Sender<usize>,
}

/// Call that waits; the drop of its future ends it.
struct Waiting<'a>(&'a watch::Sender<usize>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Silent {
    pub(crate) fn new(inner: Arc<MemoryMetadata>) -> Self {
        Self { inner, waiting: watch::Sender::new(0) }
    }

    /// Waits until this many calls wait at the same time to end a read.
    pub(crate) async fn wait_for_ends(&self, count: usize) {
        self.waiting.subscribe().wait_for(|waiting| *waiting >= count).await.unwrap();
    }
}

#[async_trait]
impl MetadataBackend for Silent {
    fn capabilities(&self) -> MetaCapabilities {
        self.inner.capabilities()
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        self.inner.get(key).await
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        if key.starts_with("mooncake/checkpoint/") {
            return pending().await;
        }
        self.inner.put(key, value, expect).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.inner.delete(key).await
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        if key.starts_with("mooncake/p2p/reads/") {
            self.waiting.send_modify(|count| *count += 1);
            let _waiting = Waiting(&self.waiting);
            return pending().await;
        }
        self.inner.delete_at(key, revision).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        self.inner.list(prefix).await
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        self.inner.watch(prefix).await
    }
}
