//! The directory in this process's memory: for embedded clusters, tests, and the master's own HTTP metadata server.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::stream::BoxStream;
use parking_lot::Mutex;

use super::{Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use crate::error::{Error, ErrorCode, Result};

/// A directory that lives and dies with this value. Share it by `Arc`.
#[derive(Debug, Default)]
pub struct MemoryMetadata {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<String, MetaValue>,
    revision: u64,
    watchers: Vec<(String, UnboundedSender<MetaEvent>)>,
}

impl MemoryMetadata {
    /// An empty directory.
    pub fn new() -> Self {
        Self::default()
    }
}

impl State {
    fn announce(&mut self, key: &str, value: Option<&MetaValue>) {
        // A watcher that went away is dropped at the first change it misses.
        self.watchers.retain(|(prefix, sender)| {
            !key.starts_with(prefix.as_str())
                || sender.unbounded_send(MetaEvent { key: key.to_owned(), value: value.cloned() }).is_ok()
        });
    }
}

#[async_trait]
impl MetadataBackend for MemoryMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: true, durable: false, atomic: true, list: true }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        Ok(self.state.lock().entries.get(key).cloned())
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let mut state = self.state.lock();
        let current = state.entries.get(key).map(|v| v.revision);
        let holds = match expect {
            Expect::Any => true,
            Expect::Absent => current.is_none(),
            Expect::At(revision) => current == Some(revision),
        };
        if !holds {
            return Err(Error::new(
                ErrorCode::ObjectAlreadyExists,
                format!("metadata key {key:?} is at revision {current:?}, expected {expect:?}"),
            ));
        }
        state.revision += 1;
        let entry = MetaValue { value, revision: state.revision };
        state.announce(key, Some(&entry));
        let revision = entry.revision;
        state.entries.insert(key.to_owned(), entry);
        Ok(revision)
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let mut state = self.state.lock();
        let was = state.entries.remove(key).is_some();
        if was {
            state.announce(key, None);
        }
        Ok(was)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let state = self.state.lock();
        Ok(state
            .entries
            .range(prefix.to_owned()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect())
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        let (sender, receiver) = unbounded();
        self.state.lock().watchers.push((prefix.to_owned(), sender));
        Ok(receiver.boxed())
    }
}
