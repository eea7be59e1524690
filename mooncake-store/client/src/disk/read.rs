//! Asking the owners of disks for objects: they read them into memory of theirs, and lend that for a while.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::scoped;
use crate::deadline::Deadline;
use crate::{Client, Inner};
use mooncake_protocol::client::{RpcClient, RpcOptions};
use mooncake_protocol::message::{LendObjects, LendParts, ReturnObjects};
use mooncake_protocol::wire::{Lent, LentParts};

/// Owners whose connections are kept; with more, all are opened anew.
const KEPT: usize = 1024;

/// Connections to owners of disks.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    known: Mutex<HashMap<String, Arc<Owner>>>,
    /// Objects they have lent.
    lent: AtomicU64,
}

/// The owner of a disk.
#[derive(Debug)]
struct Owner {
    rpc: RpcClient,
    /// It is of the existing system: it lends whole objects only.
    whole: AtomicBool,
}

impl Owners {
    fn at(&self, endpoint: &str, limit: Duration) -> Arc<Owner> {
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
    owner: Arc<Owner>,
    runtime: Handle,
    batch: u64,
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

impl<T: Transport> Client<T> {
    /// Objects that owners of disks have read for this client.
    pub fn disk_reads(&self) -> u64 {
        self.inner.owners.lent.load(Relaxed)
    }
}

impl<T: Transport> Inner<T> {
    /// Whole objects of a disk, all or none. The outer error means that the owner does not answer; its own refusal is inside.
    pub(crate) async fn borrow_objects(
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
        let answer = deadline.bound("an object from a disk", owner.rpc.call(&request)).await;
        let answer = self.heard(endpoint, answer)?;
        Ok(answer.and_then(|lent| self.loan(owner, lent, Vec::new(), asked, objects.len())))
    }

    /// The same for parts of objects. Where the owner lends no parts, they are whole in its memory, and the addresses those of the parts.
    pub(crate) async fn borrow_parts(
        &self,
        endpoint: &str,
        parts: &[Wanted<'_>],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let asked = self.config.clock.now();
        let owner = self.owner_at(endpoint)?;
        if owner.whole.load(Relaxed) {
            return self.borrow_whole(endpoint, parts, deadline).await;
        }
        let keys = self.scoped(parts.iter().map(|part| part.key));
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let request = LendParts {
            keys: keys[..].into(),
            sizes: parts.iter().map(|part| part.size).collect(),
            starts: parts.iter().map(|part| part.range.start).collect(),
            counts: parts.iter().map(|part| part.range.end - part.range.start).collect(),
        };
        let answer = deadline.bound("a part of an object from a disk", owner.rpc.call(&request)).await;
        if answer.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            owner.whole.store(true, Relaxed);
            return self.borrow_whole(endpoint, parts, deadline).await;
        }
        let answer = self.heard(endpoint, answer)?;
        Ok(answer
            .and_then(|LentParts { lent, versions }| self.loan(owner, lent, versions, asked, parts.len())))
    }

    async fn borrow_whole(
        &self,
        endpoint: &str,
        parts: &[Wanted<'_>],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let mut objects: Vec<(&[u8], u64)> = Vec::new();
        let mut of = Vec::with_capacity(parts.len());
        for part in parts {
            let known = objects.iter().position(|(key, _)| *key == part.key);
            of.push(known.unwrap_or_else(|| {
                objects.push((part.key, part.size));
                objects.len() - 1
            }));
        }
        let lent = self.borrow_objects(endpoint, &objects, deadline).await?;
        Ok(lent.map(|mut loan| {
            let at = |(part, of): (&Wanted<'_>, &usize)| loan.addresses[*of].saturating_add(part.range.start);
            loan.addresses = parts.iter().zip(&of).map(at).collect();
            loan
        }))
    }

    fn scoped<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Vec<u8>> {
        keys.map(|key| scoped(&self.config.tenant, key)).collect()
    }

    fn owner_at(&self, endpoint: &str) -> Result<Arc<Owner>> {
        self.unreachable.check(endpoint)?;
        Ok(self.owners.at(endpoint, self.config.timeout))
    }

    /// What an owner answered; the outer error means that it did not.
    fn heard<R>(&self, endpoint: &str, answer: Result<Result<R, ErrorCode>>) -> Result<Result<R>> {
        let answer = answer.inspect_err(|error| {
            if matches!(error.code(), ErrorCode::RpcFail | ErrorCode::RpcTimeout) {
                self.unreachable.failed(endpoint);
            }
        })?;
        self.unreachable.answered(endpoint);
        Ok(answer.map_err(|code| Error::from(code).context(format!("the owner at {endpoint}"))))
    }

    fn loan(
        &self,
        owner: Arc<Owner>,
        lent: Lent,
        versions: Vec<u64>,
        asked: Moment,
        objects: usize,
    ) -> Result<Loan> {
        let Lent { batch, addresses, endpoint, ttl_ms } = lent;
        let runtime = self.runtime.clone();
        let until = asked.after(Duration::from_millis(ttl_ms));
        let loan = Loan { owner, runtime, batch, addresses, versions, endpoint, until };
        if loan.addresses.len() != objects || ![0, objects].contains(&loan.versions.len()) {
            let text = format!("{} addresses for {objects} objects", loan.addresses.len());
            return Err(Error::new(ErrorCode::RpcFail, text));
        }
        self.owners.lent.fetch_add(objects as u64, Relaxed);
        Ok(loan)
    }
}
