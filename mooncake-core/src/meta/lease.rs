//! Keys under a lease, for electing a leader.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::MetadataBackend;
use crate::error::Result;

/// Key taken under a lease.
#[derive(Debug, PartialEq, Eq)]
pub struct Hold {
    /// The key.
    pub key: String,
    /// Revision of the value. It grows with each holder of the key.
    pub revision: u64,
    /// Number of the lease in the backend.
    pub lease: i64,
}

/// Directory whose keys can be taken under a lease.
///
/// Contract (the conformance suite has one case per sentence): a key has at most one holder, and
/// can be read like any other; a key is deleted, and watchers see the deletion, when its holder
/// releases it or has not renewed it for its lease time, and not before; a holder whose key
/// expired, or was deleted or written by another client, has lost the lease, and its later calls
/// change nothing; the backend counts the time from when it receives the last call of the holder.
/// So a holder that counts from when it *began* that call is never late.
#[async_trait]
pub trait Leases: MetadataBackend {
    /// Takes a free key, with a value, for a time (whole seconds, at least two). Returns `None`
    /// when the key is held.
    async fn take(&self, key: &str, value: Bytes, time: Duration) -> Result<Option<Hold>>;

    /// Renews the lease for its full time. Returns false when the lease is lost.
    async fn renew(&self, hold: &Hold) -> Result<bool>;

    /// Releases the key. A lost lease is ignored.
    async fn release(&self, hold: Hold) -> Result<()>;
}
