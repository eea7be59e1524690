//! Asking the owners of disks for objects: they read them into memory of theirs, and lend that for a while.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::scoped;
use crate::client::deadline::Deadline;
use crate::client::{Client, Inner};
use crate::protocol::client::{RpcClient, RpcOptions};
use crate::protocol::message::{LendObjects, ReturnObjects};
use crate::protocol::wire::Lent;

/// Owners whose connections are kept; with more, all are opened anew.
const KEPT: usize = 1024;

/// Connections to owners of disks.
#[derive(Debug, Default)]
pub(in crate::client) struct Owners {
    known: Mutex<HashMap<String, Arc<RpcClient>>>,
    /// Objects they have lent.
    lent: AtomicU64,
}

impl Owners {
    fn at(&self, endpoint: &str, limit: Duration) -> Arc<RpcClient> {
        let mut known = self.known.lock();
        if let Some(owner) = known.get(endpoint) {
            return owner.clone();
        }
        if known.len() >= KEPT {
            known.clear();
        }
        let options = RpcOptions { connect_timeout: limit, call_timeout: limit, ..RpcOptions::default() };
        let owner = Arc::new(RpcClient::new(endpoint, options));
        known.insert(endpoint.to_owned(), owner.clone());
        owner
    }
}

/// Objects in memory of an owner's, given back when this is dropped.
#[derive(Debug)]
pub(in crate::client) struct Loan {
    owner: Arc<RpcClient>,
    runtime: Handle,
    batch: u64,
    /// Where each lies.
    pub(in crate::client) addresses: Vec<u64>,
    /// What is opened to reach that memory.
    pub(in crate::client) endpoint: String,
    /// Until when it may be read.
    pub(in crate::client) until: Moment,
}

impl Drop for Loan {
    fn drop(&mut self) {
        let (owner, batch) = (self.owner.clone(), self.batch);
        self.runtime.spawn(async move {
            // Otherwise the owner takes it back by itself.
            let _ = owner.call(&ReturnObjects { batch }).await;
        });
    }
}

impl<T: Transport> Client<T> {
    /// Objects that owners of disks have read for this client.
    pub fn disk_reads(&self) -> u64 {
        self.inner.owners.lent.load(Relaxed)
    }
}

impl<T: Transport> Inner<T> {
    /// Whole objects of a disk, all or none. The outer error means that the owner does not answer; its own refusal is inside.
    pub(in crate::client) async fn borrow_objects(
        &self,
        endpoint: &str,
        objects: &[(&[u8], u64)],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let keys = self.scoped(objects.iter().map(|(key, _)| *key));
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let sizes = objects.iter().map(|(_, size)| i64::try_from(*size).unwrap_or(i64::MAX)).collect();
        let asked = self.config.clock.now();
        let owner = self.owner_at(endpoint)?;
        let request = LendObjects { keys: keys[..].into(), sizes };
        let answer = deadline.bound("an object from a disk", owner.call(&request)).await;
        self.lent(endpoint, owner.clone(), answer, asked, objects.len())
    }

    fn scoped<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Vec<u8>> {
        keys.map(|key| scoped(&self.config.tenant, key)).collect()
    }

    fn owner_at(&self, endpoint: &str) -> Result<Arc<RpcClient>> {
        self.unreachable.check(endpoint)?;
        Ok(self.owners.at(endpoint, self.config.timeout))
    }

    fn lent(
        &self,
        endpoint: &str,
        owner: Arc<RpcClient>,
        answer: Result<Result<Lent, ErrorCode>>,
        asked: Moment,
        objects: usize,
    ) -> Result<Result<Loan>> {
        let answer = answer.inspect_err(|error| {
            if matches!(error.code(), ErrorCode::RpcFail | ErrorCode::RpcTimeout) {
                self.unreachable.failed(endpoint);
            }
        })?;
        self.unreachable.answered(endpoint);
        let Lent { batch, addresses, endpoint: memory, ttl_ms } = match answer {
            Ok(lent) => lent,
            Err(code) => return Ok(Err(Error::from(code).context(format!("the owner at {endpoint}")))),
        };
        let runtime = self.runtime.clone();
        let until = asked.after(Duration::from_millis(ttl_ms));
        let loan = Loan { owner, runtime, batch, addresses, endpoint: memory, until };
        if loan.addresses.len() != objects {
            let text = format!("{} addresses for {objects} objects", loan.addresses.len());
            return Ok(Err(Error::new(ErrorCode::RpcFail, text)));
        }
        self.owners.lent.fetch_add(objects as u64, Relaxed);
        Ok(Ok(loan))
    }
}
