//! Calls about many objects, in parts that fit into one frame each.

use mooncake_core::error::{Error, Reason, Result};
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig};

use super::{MasterClient, ReadNumber};
use crate::api::{Caller, EndItem, PutItem, WriteMode};
use crate::parts::{
    KEY_OVERHEAD, MAX_ITEMS, OnFailure, call_in_parts, front, part_of, probe_in_parts, shorter,
};
use crate::wire::{ProbePolicy, ReadablePrefix};

/// Length of a description of a replica in a response, in bytes. Most are shorter.
const REPLICA_LEN: usize = 512;

fn key_len(key: &&[u8]) -> usize {
    key.len() + KEY_OVERHEAD
}

impl MasterClient {
    /// Returns for each key whether it can be read now. Grants a lease on those that can.
    pub async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        let call = |_, keys| self.exist_part(tenant, keys);
        call_in_parts(keys, key_len, OnFailure::KeepResults, call).await
    }

    /// Returns for each key whether it can be read now. Grants leases as `policy` says.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if the master lacks the call: that of Mooncake C++ 0.3.13, and earlier
    /// versions of this system. `INVALID_PARAMS` for each key of a policy that does not fit.
    pub async fn probe(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        policy: ProbePolicy,
    ) -> Result<Vec<Result<bool>>> {
        let call = |keys, policy| self.probe_part(tenant, keys, policy);
        probe_in_parts(keys, key_len, policy, call, |keys| self.exist(tenant, keys)).await
    }

    /// Returns the replicas of each object and grants a lease on them.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` for an object.
    pub async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        let call = |_, keys| self.locate_part(tenant, keys);
        call_in_parts(keys, key_len, OnFailure::KeepResults, call).await
    }

    /// Returns the replicas like [`locate`](Self::locate), of objects that this client has located
    /// before. `located` is the number of a replica of each.
    ///
    /// An object whose first read is the last one can be located again under its lease. A master
    /// without hints is asked as for the first time.
    pub async fn locate_again(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        located: &[ReplicaId],
    ) -> Result<Vec<Result<ReplicaList>>> {
        if located.len() != keys.len() {
            let text = format!("{} replicas are named for {} keys", located.len(), keys.len());
            return Err(Error::invalid(text));
        }
        call_in_parts(keys, key_len, OnFailure::KeepResults, |at, keys| {
            let located = &located[at..at + keys.len()];
            self.locate_again_part(tenant, keys, located)
        })
        .await
    }

    /// Returns the replicas like [`locate`](Self::locate), or with `located` like
    /// [`locate_again`](Self::locate_again), for a read whose end is reported. A master without
    /// such reads counts its leases.
    pub async fn locate_for_read(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        located: &[ReplicaId],
        read: ReadNumber,
    ) -> Result<Vec<Result<ReplicaList>>> {
        if !located.is_empty() && located.len() != keys.len() {
            let text = format!("{} replicas are named for {} keys", located.len(), keys.len());
            return Err(Error::invalid(text));
        }
        call_in_parts(keys, key_len, OnFailure::KeepResults, |at, keys| {
            let located = if located.is_empty() { located } else { &located[at..at + keys.len()] };
            self.locate_for_read_part(tenant, keys, located, read)
        })
        .await
    }

    /// Returns the number of keys from the front that can be read now. Grants a lease on each of
    /// these objects.
    ///
    /// A master without this call is asked about all keys. It grants leases on later objects, too.
    pub async fn prefix_hits(&self, tenant: &str, keys: &[&[u8]]) -> Result<usize> {
        if let Some(prefix) = self.prefix_in_parts(tenant, keys, false).await? {
            return Ok(usize::try_from(prefix.count).unwrap_or(keys.len()));
        }
        let found = self.exist(tenant, keys).await?;
        Ok(found.into_iter().take_while(|found| matches!(found, Ok(true))).count())
    }

    /// Returns the replicas of the objects of the keys from the front that can be read now, and
    /// grants a lease on each, as [`prefix_hits`](Self::prefix_hits) does.
    pub async fn locate_prefix(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<ReplicaList>> {
        match self.prefix_in_parts(tenant, keys, true).await? {
            Some(prefix) => Ok(prefix.replicas),
            None => Ok(self.locate(tenant, keys).await?.into_iter().map_while(Result::ok).collect()),
        }
    }

    /// Returns the readable prefix of the keys, or `None` if the master lacks the call for
    /// prefixes.
    async fn prefix_in_parts(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        with_replicas: bool,
    ) -> Result<Option<ReadablePrefix>> {
        let (mut all, mut rest, mut most) = (ReadablePrefix::default(), keys, MAX_ITEMS);
        loop {
            let part = front(rest, most, key_len);
            match self.prefix(tenant, part, with_replicas).await {
                Ok(None) => return Ok(None),
                Ok(Some(found)) if part.len() == keys.len() => return Ok(Some(found)),
                Ok(Some(found)) => {
                    let is_cut = found.count < part.len() as u64;
                    all.count += found.count;
                    all.replicas.extend(found.replicas);
                    rest = &rest[part.len()..];
                    if is_cut || rest.is_empty() {
                        return Ok(Some(all));
                    }
                }
                Err(error) => most = shorter(part.len(), &error, OnFailure::KeepResults).ok_or(error)?,
            }
        }
    }

    /// Grants space for each object. If one of several requests fails, the grants of the others
    /// count as unknown, too.
    pub async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let replicas = usize::try_from(config.replicas).unwrap_or(usize::MAX);
        let replicas_len = replicas.saturating_mul(REPLICA_LEN);
        let len = |item: &PutItem<'_>| replicas_len.saturating_add(item.key.len());
        call_in_parts(items, len, OnFailure::FailAll, |at, part| {
            let config = part_of(config, at, part.len(), items.len(), |at| items[at].key);
            async move {
                let started = self.put_start_part(caller, mode, part, &config).await;
                // A start that was made is only repeated where it gets the same grants.
                let is_repeatable = caller.attempt != 0 && self.fences_writes();
                started.map_err(|error| match error.reason() {
                    Some(Reason::ResponseTooLong) if is_repeatable => error.with_reason(Reason::TooLong),
                    _ => error,
                })
            }
        })
        .await
    }

    /// Marks each object as completely written: it is readable from now on.
    pub async fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let len = |item: &EndItem<'_>| item.key.len() + 2 * KEY_OVERHEAD;
        let call = |_, items| self.put_end_part(caller, mode, items, replicas);
        // The caller repeats an end that fails.
        call_in_parts(items, len, OnFailure::FailAll, call).await
    }

    /// Cancels the write of each object. A failed upsert keeps the old value.
    pub async fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let call = |_, keys| self.put_revoke_part(caller, mode, keys, replicas);
        // The caller repeats a revoke that fails.
        call_in_parts(keys, key_len, OnFailure::FailAll, call).await
    }

    /// Removes each object; `force` overrides leases. Readers that hold a lease never see the bytes
    /// of another object.
    pub async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>> {
        let call = |_, keys| self.remove_part(tenant, keys, force);
        call_in_parts(keys, key_len, OnFailure::KeepResults, call).await
    }

    /// Removes unleased copies that the caller wrote: those in the named segment, or all for an
    /// empty name. Returns the keys of the affected objects.
    pub async fn clear_replicas(
        &self,
        caller: Caller<'_>,
        keys: &[&[u8]],
        segment_name: &str,
    ) -> Result<Vec<ObjectKey>> {
        let (mut cleared, mut rest, mut most) = (Vec::new(), keys, MAX_ITEMS);
        loop {
            let part = front(rest, most, key_len);
            match self.clear_replicas_part(caller, part, segment_name).await {
                Ok(keys) => cleared.extend(keys),
                Err(error) => {
                    most = shorter(part.len(), &error, OnFailure::KeepResults).ok_or(error)?;
                    continue;
                }
            }
            rest = &rest[part.len()..];
            if rest.is_empty() {
                return Ok(cleared);
            }
        }
    }

    /// Reports that copies of objects of a tenant are gone: from the client's disk
    /// ([`ReplicaType::LocalDisk`]) or from a shared folder ([`ReplicaType::Disk`]).
    pub async fn drop_from_disk(
        &self,
        client: ClientId,
        tenant: &str,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let call = |_, keys| self.drop_from_disk_part(client, tenant, keys, replicas);
        call_in_parts(keys, key_len, OnFailure::KeepResults, call).await
    }
}
