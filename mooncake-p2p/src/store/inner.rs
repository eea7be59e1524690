//! State of a store that its calls share.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::Rng;
use mooncake_core::host_port;
use mooncake_core::meta::MetadataBackend;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransferEngine;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::catalogue::{Catalogue, Entry, Location, Payload, Role};
use crate::expiry::Expiry;
use crate::object::Object;
use crate::options::P2pOptions;
use crate::records::{ChecksumRecord, NodeRecord, Records};

/// State of a store that its calls share.
pub(super) struct Inner {
    pub(super) engine: TransferEngine,
    pub(super) catalogue: Catalogue,
    pub(super) records: Records,
    pub(super) options: P2pOptions,
    /// Name of the segment of this node.
    pub(super) segment: String,
    pub(super) rng: Mutex<Rng>,
    pub(super) objects: Mutex<BTreeMap<String, Opened>>,
    pub(super) lease: tokio::sync::Mutex<NodeLease>,
    /// True once the store is being closed.
    pub(super) is_closing: watch::Sender<bool>,
    /// Notification that a call has released the name of its object.
    released: Notify,
}

/// Object that this node has open.
#[derive(Clone, Debug)]
pub(super) enum Opened {
    /// A call is about to open or to close the object.
    InProgress,
    Object(Arc<Object>),
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("segment", &self.segment).field("catalogue", &self.catalogue).finish()
    }
}

/// Lease of this node, and its observations of others.
#[derive(Debug)]
pub(super) struct NodeLease {
    pub(super) record: NodeRecord,
    /// Revision of the record, if this node has one.
    pub(super) revision: Option<u64>,
    pub(super) others: Expiry,
}

impl Inner {
    pub(super) fn new(
        engine: TransferEngine,
        backend: Arc<dyn MetadataBackend>,
        options: P2pOptions,
    ) -> Result<Self> {
        let mut rng = Rng::from_os();
        let record = NodeRecord { instance: rng.next_u64(), heartbeats: 0, has_expired: false };
        let lease = NodeLease { record, revision: None, others: Expiry::default() };
        Ok(Self {
            segment: engine.name().to_owned(),
            catalogue: Catalogue::new(backend.clone(), rng.split())?,
            records: Records::new(backend),
            objects: Mutex::default(),
            lease: tokio::sync::Mutex::new(lease),
            is_closing: watch::Sender::new(false),
            released: Notify::new(),
            rng: Mutex::new(rng),
            engine,
            options,
        })
    }

    /// Returns the error `RPC_TIMEOUT` if work in the metadata service exceeds the time limit.
    pub(super) async fn bounded<R>(&self, verb: &str, work: impl Future<Output = Result<R>>) -> Result<R> {
        let limit = self.options.catalogue_timeout;
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            Err(Error::new(
                ErrorCode::RpcTimeout,
                format!("cannot {verb}: the metadata service did not respond. limit={limit:?}; retry"),
            ))
        })
    }

    /// Returns whether a segment is on the host of this one, by their names.
    pub(super) fn is_own_host(&self, segment: &str) -> bool {
        host_port::split(segment).0 == host_port::split(&self.segment).0
    }

    /// Reserves a name for a call that opens or closes an object.
    pub(super) fn reserve(self: &Arc<Self>, name: &str) -> Result<Reservation> {
        let mut objects = self.objects.lock();
        if *self.is_closing.borrow() {
            return Err(Error::new(
                ErrorCode::UnavailableInCurrentStatus,
                format!("cannot open object: the store is closed. name={name:?}; open another one"),
            ));
        }
        if objects.contains_key(name) {
            return Err(Error::new(
                ErrorCode::ObjectAlreadyExists,
                format!("cannot open object: this node has it open. name={name:?}; close it first"),
            ));
        }
        objects.insert(name.to_owned(), Opened::InProgress);
        Ok(Reservation { inner: self.clone(), name: name.to_owned(), outcome: None })
    }

    /// Waits until the store is being closed.
    pub(super) async fn until_closing(&self) {
        // The sender lives as long as the store.
        _ = self.is_closing.subscribe().wait_for(|is_closing| *is_closing).await;
    }

    /// Waits until no call opens or closes an object.
    pub(super) async fn settle_calls(&self) {
        let is_settled = || !self.objects.lock().values().any(|opened| matches!(opened, Opened::InProgress));
        loop {
            let mut released = std::pin::pin!(self.released.notified());
            released.as_mut().enable();
            if is_settled() {
                return;
            }
            released.await;
        }
    }

    /// Removes the copies of a node from an object, and then its checksums.
    pub(super) async fn remove_copies(&self, name: &str, roles: &[Role], segment: &str) -> Result<()> {
        self.catalogue.edit(name, |payload| payload.remove_node(roles, segment)).await?;
        self.records.delete_checksums(name, segment).await
    }

    /// Enters copies of shards in this node, after their checksums. `known` is the object as this
    /// node knows it. Enters the object again if the catalogue has lost it and this node has all of
    /// it. Returns `None` if another object has its name now.
    pub(super) async fn enter(&self, copies: &Copies, known: &Payload) -> Result<Option<Entry>> {
        self.records.put_checksums(&known.name, &self.segment, &copies.checksums).await?;
        let add_to = |payload: &mut Payload| {
            let mut is_changed = false;
            for (shard, location) in &copies.locations {
                is_changed |= payload.add(copies.role, *shard, location);
            }
            is_changed
        };
        let mut is_replaced = false;
        let edited = self.catalogue.edit(&known.name, |payload| {
            is_replaced = !payload.has_layout_of(known) || !payload.shares_copy_with(known);
            !is_replaced && add_to(payload)
        });
        match edited.await? {
            _ if is_replaced => Ok(None),
            Some(entry) => Ok(Some(entry)),
            None if copies.locations.len() == known.shards.len() => {
                let mut payload = Payload::new(&known.name, &known.size_list, known.max_shard_size)?;
                add_to(&mut payload);
                self.catalogue.create(payload, false).await.map(Some)
            }
            None => Err(not_found(&known.name)),
        }
    }

    /// Reserves the name of an object that this node has open in this role.
    pub(super) fn reserve_opened(
        self: &Arc<Self>,
        name: &str,
        role: Role,
    ) -> Result<(Arc<Object>, Reservation)> {
        let mut objects = self.objects.lock();
        match objects.get(name) {
            Some(Opened::Object(object)) if object.role == role => {
                let object = object.clone();
                objects.insert(name.to_owned(), Opened::InProgress);
                Ok((object, Reservation { inner: self.clone(), name: name.to_owned(), outcome: None }))
            }
            Some(Opened::InProgress) => Err(Error::new(
                ErrorCode::ObjectReplicaBusy,
                format!("cannot close object: another call opens or closes it. name={name:?}; retry"),
            )),
            _ => {
                let done = if role == Role::Gold { "registered" } else { "read" };
                Err(Error::new(
                    ErrorCode::ReplicaNotFound,
                    format!("cannot close object: this node has not {done} it. name={name:?}"),
                ))
            }
        }
    }
}

/// Copies of shards in this node, to be entered.
pub(super) struct Copies {
    pub(super) role: Role,
    pub(super) locations: Vec<(usize, Location)>,
    pub(super) checksums: ChecksumRecord,
}

/// Name that a call has reserved. The drop opens the object of the outcome, or frees the name.
pub(super) struct Reservation {
    inner: Arc<Inner>,
    name: String,
    pub(super) outcome: Option<Arc<Object>>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut objects = self.inner.objects.lock();
        match self.outcome.take() {
            Some(object) => objects.insert(std::mem::take(&mut self.name), Opened::Object(object)),
            None => objects.remove(&self.name),
        };
        self.inner.released.notify_waiters();
    }
}

pub(super) fn not_found(name: &str) -> Error {
    Error::new(
        ErrorCode::ObjectNotFound,
        format!("cannot read object: the catalogue does not have it. name={name:?}"),
    )
}
