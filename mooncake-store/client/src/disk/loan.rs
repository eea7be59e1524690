//! Connections to clients that serve disks, and the buffers that they lend.

use mooncake_core::clock::Moment;
use mooncake_protocol::client::{RpcClient, RpcOptions};
use mooncake_protocol::message::ReturnObjects;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
use tokio::runtime::Handle;

use crate::issuer::Issuer;

/// Maximum number of cached connections. Above it, all of them are discarded.
const KEPT: usize = 1024;

/// Connections to owners of disks.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    pub(crate) known: Mutex<HashMap<String, Arc<Owner>>>,
    /// Number of objects that owners have lent.
    pub(crate) lent: AtomicU64,
}

/// The owner of a disk.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) rpc: RpcClient,
    /// True if the owner is a client of Mooncake C++, which lends whole objects only.
    pub(crate) whole: AtomicBool,
}

impl Owners {
    pub(crate) fn at(&self, endpoint: &str, limit: Duration) -> Arc<Owner> {
        let mut known = self.known.lock();
        if let Some(owner) = known.get(endpoint) {
            return owner.clone();
        }
        if known.len() >= KEPT {
            known.clear();
        }
        let options = RpcOptions { connect_timeout: limit, call_timeout: limit, ..RpcOptions::default() };
        let owner = Arc::new(Owner { rpc: RpcClient::new(endpoint, options), whole: AtomicBool::new(false) });
        known.insert(endpoint.to_owned(), owner.clone());
        owner
    }
}

/// Part of an object to read from a disk.
#[derive(Debug)]
pub(crate) struct Wanted<'k> {
    pub(crate) key: &'k [u8],
    /// Length of the whole object.
    pub(crate) size: u64,
    pub(crate) range: Range<u64>,
}

/// Objects, or parts of objects, in the buffer of an owner. Dropping the loan returns them.
#[derive(Debug)]
pub(crate) struct Loan {
    pub(crate) owner: Arc<Owner>,
    pub(crate) runtime: Handle,
    pub(crate) batch: u64,
    /// Address of each object or part.
    pub(crate) addresses: Vec<u64>,
    /// Version of each object, if the owner reports versions.
    pub(crate) versions: Vec<u64>,
    /// Endpoint to open for access to the buffer.
    pub(crate) endpoint: String,
    /// Owner of the buffer, as the issuer of the addresses.
    pub(crate) issuer: Issuer,
    /// Time until which the buffer may be read.
    pub(crate) until: Moment,
}

impl Drop for Loan {
    fn drop(&mut self) {
        let (owner, batch) = (self.owner.clone(), self.batch);
        self.runtime.spawn(async move {
            // After an error, the owner reclaims the buffer when the loan expires.
            let _ = owner.rpc.call(&ReturnObjects { batch }).await;
        });
    }
}
