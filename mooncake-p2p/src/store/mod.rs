//! Store of one node: its objects, its engine, and the catalogue.

mod close;
mod fetch;
mod inner;
mod lease;
mod seed;
mod sources;

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::Rng;
use mooncake_core::host_port;
use mooncake_core::memory::MemorySource;
use mooncake_core::meta::MetadataBackend;
use mooncake_core::{Error, Result};
use mooncake_engine::{TransferEngine, TransferEngineBuilder};
use mooncake_transport::Directory;
use mooncake_transport::engine::HandshakePort;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::catalogue::{Payload, Role};
use crate::options::{GetOptions, P2pOptions, RegisterOptions};
use inner::Inner;

/// Store of one node. Clones are handles of the same store.
///
/// A store whose last handle is dropped without [`close`](Self::close) is like a node that crashed:
/// its entries end with its lease.
#[derive(Clone, Debug)]
pub struct P2pStore {
    inner: Arc<Inner>,
    renewal: Arc<Renewal>,
}

/// Object in the list of a catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Name of the object.
    pub name: String,
    /// Maximum length of a shard in bytes.
    pub max_shard_size: u64,
    /// Length of the object in bytes.
    pub size: u64,
    /// Lengths of the ranges of memory that the object consists of, in bytes.
    pub size_list: Vec<u64>,
}

/// Task that renews the lease of the node, and ends with the last handle of the store.
#[derive(Debug)]
struct Renewal(AbortHandle);

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns the builder of the engine of a node, with the settings of the environment. Others reach
/// the node at the host of `hostname`. A port there only makes the name of the segment unique;
/// without one the name gets a random number.
pub fn engine_builder(hostname: &str, metadata: &str) -> TransferEngineBuilder {
    let (host, port) = host_port::split(hostname);
    let port = port.unwrap_or_else(|| u16::try_from(Rng::from_os().range(1024..65536)).unwrap_or(u16::MAX));
    let handshake = HandshakePort { host: Some(host.to_owned()), ..HandshakePort::default() };
    TransferEngine::builder()
        .environment()
        .metadata(metadata)
        .handshake(handshake)
        .name(host_port::join(host, port))
        .protocol("tcp")
}

impl P2pStore {
    /// Opens a store on an engine, with the catalogue in the metadata service of the engine.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an engine in peer-to-peer mode and for settings that are 0, and
    /// the errors of [`open_with`](Self::open_with).
    pub async fn open(engine: TransferEngine, options: P2pOptions) -> Result<Self> {
        let backend = match engine.directory() {
            Directory::Metadata { backend, .. } => backend.clone(),
            Directory::P2p => {
                return Err(Error::invalid(
                    "cannot open P2P store: the engine has no metadata service; start it with etcd://host:port",
                ));
            }
        };
        Self::open_with(engine, backend, options).await
    }

    /// Opens a store on an engine, with the catalogue in another metadata service.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` for a service that cannot compare and set or list keys,
    /// `INVALID_PARAMS` for settings that are 0, and the errors of the service.
    pub async fn open_with(
        engine: TransferEngine,
        backend: Arc<dyn MetadataBackend>,
        options: P2pOptions,
    ) -> Result<Self> {
        options.check()?;
        let inner = Arc::new(Inner::new(engine, backend, options)?);
        inner.bounded("open P2P store", inner.begin_lease()).await?;
        let renewal = tokio::spawn(lease::renew_regularly(Arc::downgrade(&inner), inner.options.lease / 3));
        Ok(Self { inner, renewal: Arc::new(Renewal(renewal.abort_handle())) })
    }

    /// Returns the name of this node's segment: host and port, unless the engine has another name.
    pub fn segment_name(&self) -> &str {
        &self.inner.segment
    }

    /// Returns the engine.
    pub fn engine(&self) -> &TransferEngine {
        &self.inner.engine
    }

    /// Enters an object that lies in these ranges of memory, as its seeder. No byte is copied. The
    /// bytes do not change until [`unregister`](Self::unregister) has returned; a reader refuses
    /// other bytes by their checksums.
    ///
    /// A range may lie in a range that this node has registered for another object. The call is
    /// bounded by [`catalogue_timeout`](P2pOptions::catalogue_timeout), beside the time to compute
    /// the checksums. It continues to its end if its future is dropped.
    ///
    /// # Errors
    /// Returns `OBJECT_ALREADY_EXISTS` if the catalogue or this node has the name, and
    /// `INVALID_PARAMS` for an empty range, a shard size that does not divide 4 GiB, and a range
    /// that overlaps a registered one without lying in it.
    pub async fn register(
        &self,
        name: &str,
        memory: Vec<Arc<dyn MemorySource>>,
        options: RegisterOptions,
    ) -> Result<()> {
        let (inner, name) = (self.inner.clone(), name.to_owned());
        finish(async move { inner.register(&name, memory, options).await }).await
    }

    /// Ends the copies of an object that this node registered, and then releases the memory. Copies
    /// of other nodes remain. The object leaves the catalogue with its last copy.
    ///
    /// The call is bounded by [`catalogue_timeout`](P2pOptions::catalogue_timeout). It continues to
    /// its end if its future is dropped.
    ///
    /// # Errors
    /// Returns `REPLICA_NOT_FOUND` if this node has not registered the object, and the errors of
    /// the metadata service. The object stays registered then.
    pub async fn unregister(&self, name: &str) -> Result<()> {
        let (inner, name) = (self.inner.clone(), name.to_owned());
        finish(async move { inner.leave(&name, Role::Gold).await }).await
    }

    /// Returns the objects whose names have this prefix, in the order of their names. The call is
    /// bounded by [`catalogue_timeout`](P2pOptions::catalogue_timeout).
    ///
    /// # Errors
    /// Returns the errors of the metadata service.
    pub async fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let found = self.inner.bounded("list objects", self.inner.catalogue.list(prefix)).await?;
        Ok(found.into_iter().map(|entry| ObjectInfo::from(entry.payload)).collect())
    }

    /// Returns the object of this name, or `None` if the catalogue does not have it. The call is
    /// bounded by [`catalogue_timeout`](P2pOptions::catalogue_timeout).
    ///
    /// # Errors
    /// Returns the errors of the metadata service.
    pub async fn find(&self, name: &str) -> Result<Option<ObjectInfo>> {
        let found = self.inner.bounded("find object", self.inner.catalogue.read(name)).await?;
        Ok(found.map(|entry| ObjectInfo::from(entry.payload)))
    }

    /// Reads an object into memory whose ranges have the lengths of the object's ranges. Enters
    /// each shard as a copy of this node as soon as the shard has arrived, so that other readers
    /// read it from here.
    ///
    /// The call ends when all shards have arrived and are entered. It fails when no shard arrives
    /// for [`stall_timeout`](P2pOptions::stall_timeout). A drop of its future cancels it: reads in
    /// progress end, this node's copies leave the catalogue, and then the memory is released.
    ///
    /// # Errors
    /// Returns `OBJECT_NOT_FOUND` without such an object, `OBJECT_ALREADY_EXISTS` if this node has
    /// it open, `INVALID_PARAMS` for other lengths, read-only memory and an overlap with registered
    /// memory, `TRANSFER_FAIL` if no source works, and `CHECKSUM_MISMATCH` if all sources of a
    /// shard have wrong bytes.
    pub async fn get_replica(
        &self,
        name: &str,
        memory: Vec<Arc<dyn MemorySource>>,
        options: GetOptions,
    ) -> Result<()> {
        let (inner, name) = (self.inner.clone(), name.to_owned());
        // The task cancels the read when this end is dropped.
        let (_alive, cancel) = oneshot::channel::<()>();
        finish(async move { inner.get_replica(&name, memory, options, cancel).await }).await
    }

    /// Ends the copies of an object that this node has read, and then releases the memory.
    ///
    /// The call is bounded by [`catalogue_timeout`](P2pOptions::catalogue_timeout). It continues to
    /// its end if its future is dropped.
    ///
    /// # Errors
    /// Returns `REPLICA_NOT_FOUND` if this node has not read the object, and the errors of the
    /// metadata service. The replica stays then.
    pub async fn delete_replica(&self, name: &str) -> Result<()> {
        let (inner, name) = (self.inner.clone(), name.to_owned());
        finish(async move { inner.leave(&name, Role::Replica).await }).await
    }

    /// Renews the lease of this node, and ends the entries of nodes whose lease has ended. The
    /// store does this by itself three times in each lease.
    ///
    /// # Errors
    /// Returns the errors of the metadata service.
    pub async fn renew_lease(&self) -> Result<()> {
        let inner = self.inner.clone();
        finish(async move { inner.bounded("renew lease", inner.renew_lease()).await }).await
    }

    /// Ends all copies of this node and its lease. The engine stays open. Reads in progress are
    /// cancelled, other calls in progress end first, and later calls that open an object fail.
    ///
    /// The call is bounded by [`catalogue_timeout`](P2pOptions::catalogue_timeout) for the calls in
    /// progress and for each object. It continues to its end if its future is dropped.
    ///
    /// # Errors
    /// Returns the first error of the metadata service. The other entries are ended all the same,
    /// and what is left ends with the lease.
    pub async fn close(&self) -> Result<()> {
        self.renewal.0.abort();
        let inner = self.inner.clone();
        finish(async move { inner.close().await }).await
    }

    /// Closes the store, and then its engine, whose segment leaves the metadata service. For an
    /// engine without other users.
    ///
    /// # Errors
    /// Returns the first error of the metadata service.
    pub async fn close_with_engine(&self) -> Result<()> {
        let closed = self.close().await;
        let engine = self.inner.engine.clone();
        closed.and(finish(async move { engine.close().await }).await)
    }
}

/// Runs a call in a task of its own, so that it ends in order if its future is dropped.
async fn finish<R: Send + 'static>(call: impl Future<Output = Result<R>> + Send + 'static) -> Result<R> {
    let ended = tokio::spawn(call).await;
    ended.unwrap_or_else(|error| Err(Error::internal(format!("cannot finish call: its task ended: {error}"))))
}

impl From<Payload> for ObjectInfo {
    fn from(payload: Payload) -> Self {
        let Payload { name, size, size_list, max_shard_size, .. } = payload;
        Self { name, max_shard_size, size, size_list }
    }
}
