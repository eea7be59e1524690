//! Owners of disks, and what they have lent.

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

/// Owners whose connections are kept; with more, all are opened anew.
const KEPT: usize = 1024;

/// Connections to owners of disks.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    pub(crate) known: Mutex<HashMap<String, Arc<Owner>>>,
    /// Objects they have lent.
    pub(crate) lent: AtomicU64,
}

/// The owner of a disk.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) rpc: RpcClient,
    /// It is of the existing system: it lends whole objects only.
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

/// A part of an object that is wanted.
#[derive(Debug)]
pub(crate) struct Wanted<'k> {
    pub(crate) key: &'k [u8],
    /// Length of the whole object.
    pub(crate) size: u64,
    pub(crate) range: Range<u64>,
}

/// Objects, or parts of them, in memory of an owner's, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Loan {
    pub(crate) owner: Arc<Owner>,
    pub(crate) runtime: Handle,
    pub(crate) batch: u64,
    /// Where each lies.
    pub(crate) addresses: Vec<u64>,
    /// Of which value each is, if the owner says that.
    pub(crate) versions: Vec<u64>,
    /// What is opened to reach that memory.
    pub(crate) endpoint: String,
    /// Until when it may be read.
    pub(crate) until: Moment,
}

impl Drop for Loan {
    fn drop(&mut self) {
        let (owner, batch) = (self.owner.clone(), self.batch);
        self.runtime.spawn(async move {
            // Otherwise the owner takes it back by itself.
            let _ = owner.rpc.call(&ReturnObjects { batch }).await;
        });
    }
}
