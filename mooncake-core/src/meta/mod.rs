//! Metadata directory in which nodes find each other: the [`MetadataBackend`] interface, the
//! in-memory implementation, and the key layout of Mooncake C++.

mod keys;
mod lease;
mod memory;
mod watchers;

use std::fmt::Debug;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;

use crate::error::{Error, ErrorCode, Result};

pub use keys::{MetaKeys, longest_promise, master_view};
pub use lease::{Hold, Leases};
pub use memory::{MemoryLimits, MemoryMetadata};
pub use watchers::Watchers;

/// Abilities of a backend beyond get, put and delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaCapabilities {
    /// True if [`MetadataBackend::watch`] works.
    pub watch: bool,
    /// True if values survive a restart of the backend.
    pub durable: bool,
    /// True if the backend checks [`Expect::At`] and [`Expect::Absent`] atomically. Otherwise a
    /// read before the write checks them, so that two writers can both succeed.
    pub atomic: bool,
    /// True if [`MetadataBackend::list`] works.
    pub list: bool,
}

/// Condition of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// No condition: overwrite.
    Any,
    /// Absent key.
    Absent,
    /// Unchanged revision of the key.
    At(u64),
}

impl Expect {
    /// Checks the condition against the current revision of a key, if any.
    ///
    /// # Errors
    /// Returns `OBJECT_ALREADY_EXISTS` if the condition does not hold.
    pub fn check(self, key: &str, current: Option<u64>) -> Result<()> {
        let holds = match self {
            Expect::Any => true,
            Expect::Absent => current.is_none(),
            Expect::At(revision) => current == Some(revision),
        };
        if holds {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::ObjectAlreadyExists,
            format!(
                "cannot write metadata key: revision differs. key={key:?} revision={current:?} expected={self:?}"
            ),
        ))
    }
}

/// Value and its revision, which changes with every put of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaValue {
    /// Stored bytes.
    pub value: Bytes,
    /// Opaque revision, for [`Expect::At`].
    pub revision: u64,
}

/// Change of a key, as a watcher sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaEvent {
    /// Changed key.
    pub key: String,
    /// New value, `None` when deleted.
    pub value: Option<MetaValue>,
}

/// Key-value directory of a cluster. It is used when nodes join and leave, never per transfer.
///
/// Contract (the conformance suite has one case per sentence): a get after a put returns the value
/// of the last put; a get of a key never put or deleted returns `None`; a put whose [`Expect`] does
/// not hold fails with kind `AlreadyExists` and changes nothing; a delete returns whether the key
/// was there; a delete at a revision that the key does not have fails with kind `AlreadyExists` and
/// changes nothing; `list` returns exactly the keys with the prefix, in order; a watch delivers
/// every change under its prefix made after it was opened, in order per key; keys may contain `/`,
/// `:`, spaces and any other UTF-8.
#[async_trait]
pub trait MetadataBackend: Debug + Send + Sync + 'static {
    /// Returns the abilities of the backend.
    fn capabilities(&self) -> MetaCapabilities;

    /// Returns the value of a key.
    async fn get(&self, key: &str) -> Result<Option<MetaValue>>;

    /// Sets a key and returns its new revision.
    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64>;

    /// Deletes a key. Returns whether it was there.
    async fn delete(&self, key: &str) -> Result<bool>;

    /// Deletes a key that still has this revision.
    ///
    /// A backend whose [capabilities](Self::capabilities) are atomic overrides this method. The
    /// present one reads the key and deletes it then, so that a write in between is lost.
    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        let current = self.get(key).await?.map(|current| current.revision);
        Expect::At(revision).check(key, current)?;
        self.delete(key).await.map(drop)
    }

    /// Returns the keys with this prefix and their values, in key order.
    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>>;

    /// Returns the stream of later changes under this prefix.
    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>>;
}

/// Returns a revision for a backend whose server has none: a fingerprint of the value (64-bit
/// FNV-1a). A put of the same value does not change it.
pub fn fingerprint(value: &[u8]) -> u64 {
    value
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
