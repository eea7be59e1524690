//! Loans from the owners of disks. An owner reads objects into its own memory and lends that memory
//! for a limited time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::disk::{Loan, Owner, Wanted, scoped};
use crate::issuer::{Asked, Issuer};
use crate::state::Inner;
use mooncake_protocol::message::{LendObjects, LendParts};
use mooncake_protocol::wire::{Lent, LentParts};

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
        let asked = self.asked();
        let owner = self.owner_at(endpoint)?;
        let request = LendObjects { keys: keys[..].into(), sizes };
        let answer = deadline.bound("an object from a disk", owner.rpc.call(&request)).await;
        let answer = self.heard(endpoint, answer)?;
        Ok(answer.and_then(|lent| self.loan(owner, lent, Vec::new(), asked, objects.len())))
    }

    /// Borrows parts of objects from a disk, all or none. If the owner lends no parts, it lends the
    /// whole objects, and the addresses are those of the parts inside them. The errors are those of
    /// `borrow_objects`.
    pub(crate) async fn borrow_parts(
        &self,
        endpoint: &str,
        parts: &[Wanted<'_>],
        deadline: &Deadline,
    ) -> Result<Result<Loan>> {
        let asked = self.asked();
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

    /// Records whether an owner responded, and returns its response. The outer error means that it
    /// did not respond.
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
        asked: Asked,
        objects: usize,
    ) -> Result<Loan> {
        let Lent { batch, addresses, endpoint, ttl_ms } = lent;
        let runtime = self.runtime.clone();
        let until = asked.at.after(Duration::from_millis(ttl_ms));
        let issuer = Issuer::Owner(asked.known);
        let loan = Loan { owner, runtime, batch, addresses, versions, endpoint, issuer, until };
        if loan.addresses.len() != objects || ![0, objects].contains(&loan.versions.len()) {
            let text = format!("{} addresses for {objects} objects", loan.addresses.len());
            return Err(Error::new(ErrorCode::RpcFail, text));
        }
        self.owners.lent.fetch_add(objects as u64, Relaxed);
        Ok(loan)
    }
}
