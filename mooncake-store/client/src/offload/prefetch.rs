//! Prefetches: objects that are only on disks return to memory before they are read. The owner of
//! each disk brings its objects back.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use futures::{StreamExt, stream};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ClientId;
use mooncake_core::replica::{ReplicaList, ReplicaLocation};
use mooncake_core::{ErrorCode, Result};
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::disk::{Prefetches, RequestPermit};
use crate::handles::ClientReplicas;
use crate::state::Inner;
use mooncake_protocol::message::PrefetchObjects;

/// Number of keys in one request to the master, as in Mooncake C++.
const MAX_PART_KEYS: usize = 128;
/// Maximum number of owners that are called at the same time.
const MAX_CONCURRENT_OWNERS: usize = 8;

/// State of an object that is to return from a disk to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prefetch {
    /// The object is in memory.
    InMemory,
    /// The owner of a disk brings the object back.
    Requested,
    /// The object was prefetched a short time ago.
    Recent,
    /// The owner of the disk takes no prefetch now: it lacks the call or does not respond, too many
    /// objects wait, or memory had no space a short time ago.
    Refused,
    /// Only a shared file has the object. It is not prefetched.
    InFile,
    /// The object cannot be read.
    Missing,
}

/// Keys of objects on one disk. Those whose prefetch is not confirmed are forgotten when this is
/// dropped, so that they are prefetched again.
struct Claims<'p, 'k> {
    prefetches: &'p Prefetches,
    tenant: &'p str,
    keys: Vec<&'k [u8]>,
}

impl Drop for Claims<'_, '_> {
    fn drop(&mut self) {
        if is_planted("dropped-prefetches-count") {
            return;
        }
        for key in &self.keys {
            self.prefetches.release(self.tenant, key);
        }
    }
}

/// Objects on the disk of one owner: indices of the keys, and lengths in bytes.
type OnDisk = Vec<(usize, u64)>;

/// Location from which an object is prefetched.
enum Source {
    Own(u64),
    Owner(String, u64),
}

/// Returns the disk of an object, or its state if there is nothing to prefetch.
fn source_of(list: &ReplicaList, own: ClientId) -> Result<Source, Prefetch> {
    let mut found = Err(Prefetch::Missing);
    for replica in &list.replicas {
        match &replica.location {
            ReplicaLocation::LocalDisk { client, size, .. } if *client == own => {
                found = Ok(Source::Own(*size))
            }
            ReplicaLocation::LocalDisk { size, endpoint, .. } => {
                if !matches!(found, Ok(Source::Own(_))) {
                    found = Ok(Source::Owner(endpoint.clone(), *size));
                }
            }
            ReplicaLocation::Disk { .. } if found.is_err() => found = Err(Prefetch::InFile),
            ReplicaLocation::Disk { .. } => {}
            _ => return Err(Prefetch::InMemory),
        }
    }
    found
}

impl<T: Transport> Inner<T> {
    /// Requests that objects return from disks to memory. Returns the state of each.
    pub(crate) async fn prefetch(&self, keys: &[&[u8]]) -> Result<Vec<Result<Prefetch>>> {
        let mut states = Vec::with_capacity(keys.len());
        for part in keys.chunks(MAX_PART_KEYS) {
            match self.prefetch_part(part).await {
                Ok(part) => states.extend(part),
                Err(error) if states.is_empty() => return Err(error),
                Err(error) => {
                    states.resize_with(keys.len(), || Err(error.clone()));
                    break;
                }
            }
        }
        Ok(states)
    }

    /// Prefetches the objects of one request to the master.
    async fn prefetch_part(&self, keys: &[&[u8]]) -> Result<Vec<Result<Prefetch>>> {
        let (tenant, prefetches) = (self.config.tenant.as_str(), &*self.prefetches);
        let deadline = self.deadline();
        let mut states: Vec<_> = keys.iter().map(|_| Ok(Prefetch::Recent)).collect();
        let new: Vec<usize> = (0..keys.len()).filter(|at| !prefetches.is_recent(tenant, keys[*at])).collect();
        let key_slices: Vec<&[u8]> = new.iter().map(|at| keys[*at]).collect();
        let lists = self.master.list_replicas(tenant, &key_slices);
        let lists = deadline.bound("replicas of objects to prefetch", lists).await?;
        let (mut own, mut others) = (OnDisk::new(), BTreeMap::<String, OnDisk>::new());
        for (at, list) in new.into_iter().zip(lists) {
            states[at] = match list.map(|list| source_of(&list, self.id)) {
                Ok(Ok(Source::Own(size))) => {
                    own.push((at, size));
                    continue;
                }
                Ok(Ok(Source::Owner(endpoint, size))) => {
                    others.entry(endpoint).or_default().push((at, size));
                    continue;
                }
                Ok(Err(state)) => Ok(state),
                Err(error) if error.code() == ErrorCode::ObjectNotFound => Ok(Prefetch::Missing),
                Err(error) if error.code() == ErrorCode::ReplicaIsNotReady => Ok(Prefetch::Missing),
                Err(error) => Err(error),
            };
        }
        if !own.is_empty() {
            let objects: Vec<_> = own.iter().map(|(at, size)| (keys[*at], size.cast_signed())).collect();
            let state = if self.queue_own_prefetches(tenant, &objects) {
                Prefetch::Requested
            } else {
                Prefetch::Refused
            };
            own.iter().for_each(|(at, _)| states[*at] = Ok(state));
        }
        let calls =
            others.iter().map(|(endpoint, objects)| self.prefetch_at(endpoint, keys, objects, &deadline));
        let calls: Vec<_> = calls.collect();
        let mut calls = stream::iter(calls).buffer_unordered(MAX_CONCURRENT_OWNERS);
        while let Some(outcome) = calls.next().await {
            outcome.into_iter().for_each(|(at, state)| states[at] = Ok(state));
        }
        Ok(states)
    }

    /// Requests that the owner at an endpoint brings objects back. Returns the state of each.
    async fn prefetch_at(
        &self,
        endpoint: &str,
        keys: &[&[u8]],
        objects: &OnDisk,
        deadline: &Deadline,
    ) -> Vec<(usize, Prefetch)> {
        let (tenant, prefetches) = (self.config.tenant.as_str(), &*self.prefetches);
        let (claimed, recent): (OnDisk, OnDisk) =
            objects.iter().partition(|(at, _)| prefetches.claim(tenant, keys[*at]));
        let key_slices: Vec<&[u8]> = claimed.iter().map(|(at, _)| keys[*at]).collect();
        let mut claims = Claims { prefetches, tenant, keys: key_slices.clone() };
        let sizes = claimed.iter().map(|(_, size)| size.cast_signed()).collect();
        let state = match claimed.is_empty() {
            true => Prefetch::Recent,
            false => match self.request_prefetch(endpoint, key_slices, sizes, deadline).await {
                Ok(true) => {
                    claims.keys.clear();
                    Prefetch::Requested
                }
                Ok(false) => Prefetch::Refused,
                Err(error) => {
                    tracing::debug!(endpoint, objects = claimed.len(), "not prefetched: {error}");
                    Prefetch::Refused
                }
            },
        };
        let recent = recent.into_iter().map(|(at, _)| (at, Prefetch::Recent));
        claimed.into_iter().map(|(at, _)| (at, state)).chain(recent).collect()
    }

    /// Calls the owner of a disk. An owner that lacks the call is remembered.
    async fn request_prefetch(
        &self,
        endpoint: &str,
        keys: Vec<&[u8]>,
        sizes: Vec<i64>,
        deadline: &Deadline,
    ) -> Result<bool> {
        if endpoint.is_empty() {
            return Ok(false);
        }
        let owner = self.disk_owner(endpoint)?;
        if owner.lacks_prefetch.load(Relaxed) {
            return Ok(false);
        }
        let tenant = self.config.tenant.as_str();
        let request = PrefetchObjects { keys: keys.into(), sizes: sizes.into(), tenant };
        let accepted = deadline.bound("a prefetch from a disk", owner.rpc.call(&request)).await;
        match accepted {
            Ok(accepted) => {
                self.unreachable.record_response(endpoint);
                Ok(accepted)
            }
            Err(error) if error.code() == ErrorCode::NotSupported => {
                owner.lacks_prefetch.store(true, Relaxed);
                Ok(false)
            }
            Err(error) => {
                if matches!(error.code(), ErrorCode::RpcFail | ErrorCode::RpcTimeout) {
                    self.unreachable.record_error(endpoint, &error);
                }
                Err(error)
            }
        }
    }

    /// Prefetches objects in the background, except those that were prefetched a short time ago.
    /// Returns false if too many prefetches are in progress.
    pub(crate) fn prefetch_later<'k>(self: &Arc<Self>, keys: impl Iterator<Item = &'k [u8]>) -> bool {
        let is_new = |key: &&[u8]| !self.prefetches.is_recent(&self.config.tenant, key);
        let keys: Vec<Vec<u8>> = keys.filter(is_new).map(<[u8]>::to_vec).collect();
        if keys.is_empty() {
            return true;
        }
        let Some(permit) = self.prefetches.begin_request(keys.len()) else {
            tracing::debug!(objects = keys.len(), "not prefetched: too many prefetches are in progress");
            return false;
        };
        self.runtime.spawn(prefetch_in_background(Arc::downgrade(self), keys, permit));
        true
    }
}

/// Prefetches objects until the client is closed or dropped.
async fn prefetch_in_background<T: Transport>(
    client: Weak<Inner<T>>,
    keys: Vec<Vec<u8>>,
    _permit: RequestPermit,
) {
    for part in keys.chunks(MAX_PART_KEYS) {
        // Between two parts, the client can be dropped.
        let Some(client) = client.upgrade() else { return };
        let mut closed = client.closed.subscribe();
        let part: Vec<&[u8]> = part.iter().map(Vec::as_slice).collect();
        let states = tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            states = client.prefetch_part(&part) => states,
        };
        match states {
            Ok(states) => tracing::trace!(?states, "objects prefetched"),
            Err(error) => return tracing::debug!(objects = keys.len(), "not prefetched: {error}"),
        }
    }
}

impl<T: Transport> ClientReplicas<'_, T> {
    /// Requests that objects that are only on disks of clients return to memory. Returns the state
    /// of each at once; the owners of the disks then bring them back, if memory has space. An
    /// object that is back has a lease.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown; `NOT_SUPPORTED` if the master lacks
    /// prefetches, as that of Mooncake C++ 0.3.13 does.
    pub async fn prefetch<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<Vec<Result<Prefetch>>> {
        let inner = &self.client.inner;
        inner.usable()?;
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        inner.prefetch(&keys).await
    }
}
