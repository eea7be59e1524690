//! Loans from the owners of disks. An owner reads objects into its own memory and lends that memory
//! for a limited time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::replica::Replica;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::disk::{DiskOwner, Loan, PartToBorrow, scoped};
use crate::errors::display_key;
use crate::issuer::{Issuer, RequestStamp};
use crate::replicas::on_disk;
use crate::state::Inner;
use mooncake_protocol::master_client::MasterClient;
use mooncake_protocol::message::{
    GetReplicaListForAdmin, LendObjects, LendParts, LendRanges, VerifyReplicas,
};
use mooncake_protocol::pack::Byte;
use mooncake_protocol::wire::{Lent, LentParts};

/// Asks the owner at an endpoint whether the replica on its disk that the master lists is there.
async fn verify(
    master: &MasterClient,
    owner: &DiskOwner,
    tenant: &str,
    endpoint: &str,
    key: &[u8],
) -> Result<Vec<Byte>> {
    let list = master.call(GetReplicaListForAdmin { key, tenant }).await?;
    let of_owner = |replica: &&Replica| on_disk(replica).is_some_and(|(_, of)| of == endpoint);
    let Some(replica) = list.replicas.iter().find(of_owner) else { return Ok(Vec::new()) };
    let keys = [key];
    let request = VerifyReplicas {
        tenant,
        keys: keys[..].into(),
        resolved_tenant: list.resolved_tenant.or_else(|| Some(tenant.to_owned())),
        replica_ids: Some(vec![replica.id.0]),
    };
    Ok(owner.rpc.call(&request).await??.states)
}

impl<T: Transport> Inner<T> {
    /// Borrows whole objects from a disk, all or none. The outer error means that the owner does
    /// not respond. The inner error is a refusal by the owner.
    pub(crate) async fn borrow_objects(
        &self,
        endpoint: &str,
        objects: &[(&[u8], u64)],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let keys = self.scoped(objects.iter().map(|(key, _)| *key));
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let sizes = objects.iter().map(|(_, size)| i64::try_from(*size).unwrap_or(i64::MAX)).collect();
        let stamp = self.request_stamp();
        let owner = self.disk_owner(endpoint)?;
        let request = LendObjects { keys: keys[..].into(), sizes };
        let response = deadline.bound("an object from a disk", owner.rpc.call(&request)).await;
        let response = self.record_owner_response(endpoint, response)?;
        Ok(response.and_then(|reply| self.to_loan(owner, reply, Vec::new(), stamp, objects.len())))
    }

    /// Borrows parts of objects from a disk, all or none. If the owner lends no parts, it lends the
    /// whole objects, and the addresses are those of the parts inside them. The errors are those of
    /// `borrow_objects`.
    pub(crate) async fn borrow_parts(
        &self,
        endpoint: &str,
        parts: &[PartToBorrow<'_>],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let stamp = self.request_stamp();
        let owner = self.disk_owner(endpoint)?;
        if owner.is_foreign.load(Relaxed) {
            return self.borrow_ranges(owner, endpoint, parts, deadline).await;
        }
        let keys = self.scoped(parts.iter().map(|part| part.key));
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let request = LendParts {
            keys: keys[..].into(),
            sizes: parts.iter().map(|part| part.size).collect(),
            starts: parts.iter().map(|part| part.range.start).collect(),
            counts: parts.iter().map(|part| part.range.end - part.range.start).collect(),
        };
        let response = deadline.bound("a part of an object from a disk", owner.rpc.call(&request)).await;
        if response.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            owner.is_foreign.store(true, Relaxed);
            return self.borrow_ranges(owner, endpoint, parts, deadline).await;
        }
        let response = self.record_owner_response(endpoint, response)?;
        Ok(response.and_then(|LentParts { lent: reply, versions }| {
            self.to_loan(owner, reply, versions, stamp, parts.len())
        }))
    }

    /// Borrows parts of objects from a client of Mooncake C++: ranges, or whole objects if it is of
    /// 0.3.13.
    async fn borrow_ranges(
        &self,
        owner: Arc<DiskOwner>,
        endpoint: &str,
        parts: &[PartToBorrow<'_>],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        if owner.lends_whole_objects.load(Relaxed) {
            return self.borrow_whole(endpoint, parts, deadline).await;
        }
        let stamp = self.request_stamp();
        let keys = self.scoped(parts.iter().map(|part| part.key));
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let request = LendRanges {
            keys: keys[..].into(),
            offsets: parts.iter().map(|part| signed(part.range.start)).collect(),
            lengths: parts.iter().map(|part| signed(part.range.end - part.range.start)).collect(),
            sizes: parts.iter().map(|part| signed(part.size)).collect(),
        };
        let response = deadline.bound("a range of an object from a disk", owner.rpc.call(&request)).await;
        if response.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            owner.lends_whole_objects.store(true, Relaxed);
            return self.borrow_whole(endpoint, parts, deadline).await;
        }
        let response = self.record_owner_response(endpoint, response)?;
        Ok(response.and_then(|reply| self.to_loan(owner, reply, Vec::new(), stamp, parts.len())))
    }

    async fn borrow_whole(
        &self,
        endpoint: &str,
        parts: &[PartToBorrow<'_>],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let mut objects: Vec<(&[u8], u64)> = Vec::new();
        let mut object_indices = Vec::with_capacity(parts.len());
        for part in parts {
            let existing = objects.iter().position(|(key, _)| *key == part.key);
            object_indices.push(existing.unwrap_or_else(|| {
                objects.push((part.key, part.size));
                objects.len() - 1
            }));
        }
        let loan = self.borrow_objects(endpoint, &objects, deadline).await?;
        Ok(loan.map(|mut loan| {
            let address = |(part, index): (&PartToBorrow<'_>, &usize)| {
                loan.addresses[*index].saturating_add(part.range.start)
            };
            loan.addresses = parts.iter().zip(&object_indices).map(address).collect();
            loan
        }))
    }

    /// Asks the owner of a disk, beside the read, for an object that it did not lend. If its file
    /// is gone, the owner lets the master drop the replica.
    pub(crate) fn verify_refused_object(&self, endpoint: &str, key: &[u8]) {
        let Ok(owner) = self.disk_owner(endpoint) else { return };
        if !self.disk_owners.begin_verification(endpoint, key) {
            return;
        }
        let (master, tenant) = (self.master.clone(), self.config.tenant.clone());
        let (in_progress, deadline) = (self.disk_owners.verifying.clone(), self.deadline());
        let (endpoint, key) = (endpoint.to_owned(), key.to_owned());
        self.runtime.spawn(async move {
            let check = verify(&master, &owner, &tenant, &endpoint, &key);
            match deadline.bound("check of a replica on disk", check).await {
                Ok(states) => {
                    tracing::debug!(key = %display_key(&key), endpoint, ?states, "replica on disk checked")
                }
                // The owner, or the master, is Mooncake C++ 0.3.13.
                Err(error) => {
                    tracing::debug!(key = %display_key(&key), endpoint, "replica on disk not checked: {error}")
                }
            }
            in_progress.lock().remove(&(endpoint, key));
        });
    }

    fn scoped<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Vec<u8>> {
        keys.map(|key| scoped(&self.config.tenant, key)).collect()
    }

    pub(super) fn disk_owner(&self, endpoint: &str) -> Result<Arc<DiskOwner>> {
        self.unreachable.check(endpoint)?;
        Ok(self.disk_owners.get_or_create(endpoint, self.config.timeout))
    }

    /// Records whether an owner responded, and returns its response. The outer error means that it
    /// did not respond.
    fn record_owner_response<R>(
        &self,
        endpoint: &str,
        response: Result<Result<R, ErrorCode>>,
    ) -> Result<Result<R>> {
        let response = response.inspect_err(|error| {
            if matches!(error.code(), ErrorCode::RpcFail | ErrorCode::RpcTimeout) {
                self.unreachable.record_error(endpoint, error);
            }
        })?;
        self.unreachable.record_response(endpoint);
        Ok(response.map_err(|code| Error::from(code).context(format!("the owner at {endpoint}"))))
    }

    fn to_loan(
        &self,
        owner: Arc<DiskOwner>,
        reply: Lent,
        versions: Vec<u64>,
        stamp: RequestStamp,
        objects: usize,
    ) -> Result<Loan> {
        let Lent { batch, addresses, endpoint, ttl_ms } = reply;
        let runtime = self.runtime.clone();
        let until = stamp.at.after(Duration::from_millis(ttl_ms));
        let issuer = Issuer::Owner(stamp.look_ups);
        let loan = Loan { owner, runtime, batch, addresses, versions, endpoint, issuer, until };
        if loan.addresses.len() != objects || ![0, objects].contains(&loan.versions.len()) {
            let text = format!("{} addresses for {objects} objects", loan.addresses.len());
            return Err(Error::new(ErrorCode::RpcFail, text));
        }
        self.disk_owners.borrowed_objects.fetch_add(objects as u64, Relaxed);
        Ok(loan)
    }
}
