//! A small directory that nodes find each other in: the [`MetadataBackend`] interface, the in-memory implementation,
//! and the key layout of the existing system.

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

/// What a backend can do beyond get, put and delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaCapabilities {
    /// [`MetadataBackend::watch`] works.
    pub watch: bool,
    /// What was put survives the backend's own restart.
    pub durable: bool,
    /// [`Expect::At`] and [`Expect::Absent`] are decided by the backend in one step. Without it they are checked by a
    /// read before the write, so two writers can both win.
    pub atomic: bool,
    /// [`MetadataBackend::list`] works.
    pub list: bool,
}

/// What must hold for a put to go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Nothing: overwrite.
    Any,
    /// The key is not there.
    Absent,
    /// The key still has this revision.
    At(u64),
}

impl Expect {
    /// Whether it holds of a key that has this revision now, if any.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` if it does not.
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
            format!("metadata key {key:?} is at revision {current:?}, expected {self:?}"),
        ))
    }
}

/// A value and its revision, which changes with every put of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaValue {
    /// The bytes that were put.
    pub value: Bytes,
    /// Opaque; for [`Expect::At`].
    pub revision: u64,
}

/// One change, as a watcher sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaEvent {
    /// The key that changed.
    pub key: String,
    /// Its new value, `None` when deleted.
    pub value: Option<MetaValue>,
}

/// A key-value directory. Cold: used when nodes come and go, never per transfer.
///
/// Contract (the conformance suite has one case per sentence): a get after a put returns the value of the last put;
/// a get of a key never put or deleted returns `None`; a put whose [`Expect`] does not hold fails with kind
/// `AlreadyExists` and changes nothing; a delete says whether the key was there; `list` returns exactly the keys
/// with the prefix, in order; a watch delivers every change under its prefix made after it was opened, in order per key;
/// keys may hold `/`, `:`, spaces and any other UTF-8.
#[async_trait]
pub trait MetadataBackend: Debug + Send + Sync + 'static {
    /// What it can do.
    fn capabilities(&self) -> MetaCapabilities;

    /// The value of a key.
    async fn get(&self, key: &str) -> Result<Option<MetaValue>>;

    /// Sets a key and returns its new revision.
    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64>;

    /// Removes a key; whether it was there.
    async fn delete(&self, key: &str) -> Result<bool>;

    /// Keys with this prefix and their values, in key order.
    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>>;

    /// Changes under this prefix from now on.
    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>>;
}

/// A revision for a backend whose server has none: a fingerprint of the value (64-bit FNV-1a). Putting the same value
/// again does not change it.
pub fn fingerprint(value: &[u8]) -> u64 {
    value
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
