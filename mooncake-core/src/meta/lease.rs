//! Keys that one of many holds for as long as it says so: for electing a leader.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::MetadataBackend;
use crate::error::Result;

/// A key that was taken.
#[derive(Debug, PartialEq, Eq)]
pub struct Hold {
    /// The key.
    pub key: String,
    /// Revision of its value: which holder this is, in the order in which they came.
    pub revision: u64,
    /// The backend's own number for it.
    pub lease: i64,
}

/// A directory whose keys can be held.
///
/// Contract (the conformance suite has one case per sentence): a key has at most one holder, and can be read like any other; it goes, and watchers see
/// it go, when its holder lets it go, or has not kept it for the time it was taken for, and not before; whose key has gone, or was deleted or
/// written by somebody else, holds nothing any more, and what he does then touches nobody's. The time is counted by the backend, from when it takes the last
/// word of the holder in: so a holder who counts it from when it *began* to speak is never late.
#[async_trait]
pub trait Leases: MetadataBackend {
    /// Takes a key that nobody has, with a value, for a time (of whole seconds, two at least); `None` when somebody has it.
    async fn take(&self, key: &str, value: Bytes, time: Duration) -> Result<Option<Hold>>;

    /// Holds it for the same time again; false when it is lost.
    async fn keep(&self, hold: &Hold) -> Result<bool>;

    /// Lets it go. What is lost already is none the worse.
    async fn let_go(&self, hold: Hold) -> Result<()>;
}
