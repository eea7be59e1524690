//! Custom metadata backend for transfer engines: two groups of engines share one directory, each
//! under a prefix, and neither sees the other. Checked by the public conformance suite.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use mooncake_core::memory::HostMemory;
use mooncake_core::meta::{Expect, MemoryMetadata, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use mooncake_core::{Error, Result};
use mooncake_engine::TransferEngine;
use mooncake_transport::Directory;
use mooncake_transport::engine::HandshakePort;

/// Directory inside another one: every key has a prefix there that callers do not see.
#[derive(Debug)]
pub struct Prefixed {
    prefix: String,
    inner: Arc<dyn MetadataBackend>,
}

impl Prefixed {
    /// Creates the directory of the keys of `inner` under this prefix.
    pub fn new(prefix: impl Into<String>, inner: Arc<dyn MetadataBackend>) -> Self {
        Self { prefix: prefix.into(), inner }
    }

    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

#[async_trait]
impl MetadataBackend for Prefixed {
    fn capabilities(&self) -> MetaCapabilities {
        self.inner.capabilities()
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        self.inner.get(&self.full(key)).await
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        self.inner.put(&self.full(key), value, expect).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.inner.delete(&self.full(key)).await
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        self.inner.delete_at(&self.full(key), revision).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let found = self.inner.list(&self.full(prefix)).await?;
        let own =
            |(key, value): (String, MetaValue)| Some((key.strip_prefix(&self.prefix)?.to_owned(), value));
        Ok(found.into_iter().filter_map(own).collect())
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        let (events, cut) = (self.inner.watch(&self.full(prefix)).await?, self.prefix.len());
        Ok(events
            .map(move |event| MetaEvent { key: event.key.get(cut..).unwrap_or_default().to_owned(), ..event })
            .boxed())
    }
}

#[cfg(test)]
#[test]
fn prefixed_metadata_conforms() {
    let backend = Arc::new(Prefixed::new("group/", Arc::<MemoryMetadata>::default()));
    futures::executor::block_on(mooncake_core::testkit::meta::check(backend));
}

async fn engine(group: &str, name: &str, shared: &Arc<MemoryMetadata>) -> Result<TransferEngine> {
    let directory = Directory::new(Arc::new(Prefixed::new(format!("{group}/"), shared.clone())));
    let port = HandshakePort { host: Some("127.0.0.1".into()), ..HandshakePort::default() };
    TransferEngine::builder().name(name).directory(directory).handshake(port).start().await
}

#[tokio::main]
async fn main() -> Result<()> {
    let shared = Arc::new(MemoryMetadata::new());
    // The same name in two groups.
    let red = engine("red", "owner", &shared).await?;
    let blue = engine("blue", "owner", &shared).await?;
    let red_user = engine("red", "user", &shared).await?;
    let region = red.register(Arc::new(HostMemory::new(4096)?)).await?;
    let others = blue.register(Arc::new(HostMemory::new(4096)?)).await?;
    let target = red_user.open("owner").await?;
    let (result, _) = red_user.write(&target, region.addr(), b"for red only".to_vec(), None).await;
    result?;
    let (mut ours, mut theirs) = ([0; 12], [0; 12]);
    region.slice(0..12)?.copy_to(0, &mut ours)?;
    others.slice(0..12)?.copy_to(0, &mut theirs)?;
    println!("red has {:?}, blue has {theirs:?}", String::from_utf8_lossy(&ours));
    if &ours != b"for red only" || theirs != [0; 12] {
        return Err(Error::internal("the bytes arrived at the wrong engine"));
    }
    let keys: Vec<String> = shared.list("").await?.into_iter().map(|(key, _)| key).collect();
    println!("the shared directory: {}", keys.join(", "));
    for engine in [red_user, red, blue] {
        engine.close().await?;
    }
    Ok(())
}
