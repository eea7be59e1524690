//! Client behind a Python store: a full client of the cluster in this process, or an IPC client of
//! the `mooncake_client` process on this host.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, Location, MemorySource};
use mooncake_core::replica::ReplicaList;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::TransportSet;
use mooncake_engine::on_stream::after_default_stream;
use mooncake_store::client::{self, Begun, Client, Operation, PutOptions, PutOutcome};
use mooncake_store::local::{LocalClient, LocalRange, LocalRead, LocatedLocal};
use mooncake_store::protocol::wire::TaskInfo;
use mooncake_transport::{Region, Slice, SliceMut, Transport};

use crate::runtime::runtime;

/// Client of a store, full or IPC.
pub(crate) enum StoreClient {
    /// Full client, which joined the cluster in this process.
    Full(Client),
    /// IPC client, which forwards its calls to a `mooncake_client` process.
    Ipc(LocalClient),
}

/// Object whose replicas were looked up.
#[derive(Clone)]
pub(crate) enum Located {
    Full(client::Located),
    Ipc(LocatedLocal),
}

/// Part of an object to read.
pub(crate) struct RangeRead {
    pub(crate) object: Located,
    pub(crate) offset: u64,
    pub(crate) into: SliceMut<TransportSet>,
}

/// Outcome of a read and its memory. The memory is `None` while `mooncake_client` may still write
/// to it.
pub(crate) type ReadOutcome = LocalRead<(), TransportSet>;

impl Located {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Full(object) => object.size(),
            Self::Ipc(object) => object.size(),
        }
    }
}

/// Defines methods that both clients have. The name in the full client follows `=`; the name in the
/// IPC client is that of the method.
macro_rules! both {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $full:ident $(.$of_handle:ident)?;)*) => {$(
        pub(crate) async fn $name(&self, $($argument: $type),*) -> $result {
            match self {
                Self::Full(client) => client.$full $(().$of_handle)? ($($argument),*).await,
                Self::Ipc(client) => client.$name($($argument),*).await,
            }
        }
    )*};
}

impl StoreClient {
    both! {
        exist(key: String) -> Result<bool> = exist;
        batch_exist(keys: &[String]) -> Result<Vec<Result<bool>>> = batch_exist;
        size(key: String) -> Result<Option<u64>> = size;
        batch_replicas(keys: &[String]) -> Result<Vec<Result<Option<ReplicaList>>>> = replicas.batch_list;
        remove(key: String, force: bool) -> Result<bool> = remove;
        batch_remove(keys: &[String], force: bool) -> Result<Vec<Result<bool>>> = batch_remove;
        remove_matching(pattern: &str, force: bool) -> Result<u64> = remove_matching;
        remove_all(force: bool) -> Result<u64> = remove_all;
        copy_task(key: String, targets: &[&str]) -> Result<Uuid> = replicas.copy;
        move_task(key: String, source: &str, target: &str) -> Result<Uuid> = replicas.move_to;
        task(task: Uuid) -> Result<TaskInfo> = replicas.task;
        is_healthy() -> bool = status.is_healthy;
        batch_put_pieces(items: &[(String, Vec<Slice<TransportSet>>)], options: &PutOptions) -> Result<Vec<Result<PutOutcome>>> = batch_put;
    }

    /// Begins to measure a call as Python sees it. The calls of an IPC client are counted by
    /// `mooncake_client`, which makes them.
    pub(crate) fn begin(&self, operation: Operation) -> Option<Begun> {
        match self {
            Self::Full(client) => Some(client.status().begin(operation)),
            Self::Ipc(_) => None,
        }
    }

    /// Runs `calls` and counts them as the operation that `begun` measures.
    pub(crate) async fn counted<F: Future>(&self, begun: Option<Begun>, calls: F) -> F::Output {
        match (self, begun) {
            (Self::Full(client), Some(begun)) => client.status().counted(begun, calls).await,
            _ => calls.await,
        }
    }

    /// Returns the full client, for calls that an IPC client does not have.
    pub(crate) fn full(&self) -> Result<&Client> {
        match self {
            Self::Full(client) => Ok(client),
            Self::Ipc(_) => Err(Error::invalid(
                "cannot make this call: a store of setup_dummy() has no full client; use mooncake_client or setup()",
            )),
        }
    }

    /// Returns the IPC client, if this is one.
    pub(crate) fn ipc(&self) -> Option<&LocalClient> {
        match self {
            Self::Full(_) => None,
            Self::Ipc(client) => Some(client),
        }
    }

    /// Returns the name in the cluster, which is empty for an IPC client.
    pub(crate) fn hostname(&self) -> &str {
        match self {
            Self::Full(client) => client.hostname(),
            Self::Ipc(_) => "",
        }
    }

    /// Returns whether the transport moves registered memory only.
    pub(crate) fn needs_registration(&self) -> bool {
        match self {
            Self::Full(client) => client.engine().transport().capabilities().needs_registration,
            Self::Ipc(_) => false,
        }
    }

    /// Orders the following transfers behind the work that the default stream of the device has
    /// been given. See [`after_default_stream`].
    pub(crate) fn after_default_stream(&self, location: Location) -> Result<()> {
        if !location.is_device() {
            return Ok(());
        }
        let transports = match self {
            Self::Full(client) => Some(&**client.engine().transport()),
            // An IPC client copies by itself.
            Self::Ipc(_) => None,
        };
        // The work that the stream waits for may need this very thread.
        tokio::task::block_in_place(|| after_default_stream(transports, location))
    }

    /// Returns the size of the local buffer in bytes.
    pub(crate) fn local_buffer(&self) -> u64 {
        match self {
            Self::Full(client) => client.config().local_buffer,
            Self::Ipc(client) => client.config().buffer,
        }
    }

    /// Allocates memory that calls can use without a copy.
    pub(crate) fn memory(&self, len: usize) -> Result<HostMemory> {
        match self {
            Self::Full(client) => HostMemory::with(len, &client.config().memory),
            Self::Ipc(client) => {
                let shared = Some("mooncake_shm".to_owned());
                HostMemory::with(len, &HostMemoryOptions { shared, ..client.config().memory.clone() })
            }
        }
    }

    /// Registers memory. For an IPC client, this waits until `mooncake_client` has mapped it.
    pub(crate) fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<TransportSet>> {
        let client = match self {
            Self::Full(client) => return client.memory().register(memory),
            Self::Ipc(client) => client.clone(),
        };
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        runtime()?.spawn(async move {
            // The receiver is gone only if the caller's thread is.
            let _ = tell.send(client.register(memory).await);
        });
        let lost = |_| Error::internal("cannot register memory: the task that registers it has stopped");
        tokio::task::block_in_place(|| told.recv()).map_err(lost)?
    }

    pub(crate) async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Located>>>> {
        Ok(match self {
            Self::Full(client) => {
                let found = client.ranges().locate(keys).await?;
                found.into_iter().map(|one| one.map(|object| object.map(Located::Full))).collect()
            }
            Self::Ipc(client) => {
                let found = client.locate(keys).await?;
                found.into_iter().map(|one| one.map(|object| object.map(Located::Ipc))).collect()
            }
        })
    }

    pub(crate) async fn read_ranges(&self, reads: Vec<RangeRead>) -> Vec<ReadOutcome> {
        let ended = self.read_each(reads).await.into_iter();
        ended.map(|read| ReadOutcome { result: read.result.map_err(unify_code), ..read }).collect()
    }

    async fn read_each(&self, reads: Vec<RangeRead>) -> Vec<ReadOutcome> {
        let stale = || {
            Error::new(
                ErrorCode::LeaseExpired,
                "cannot read object: it was located before this setup; locate it again",
            )
        };
        // An object that another store located cannot be read with this one.
        let fits = |object: &Located| {
            matches!((self, object), (Self::Full(_), Located::Full(_)) | (Self::Ipc(_), Located::Ipc(_)))
        };
        if reads.iter().any(|read| !fits(&read.object)) {
            let refused = |read: RangeRead| ReadOutcome { result: Err(stale()), into: Some(read.into) };
            return reads.into_iter().map(refused).collect();
        }
        match self {
            Self::Full(client) => {
                let own = |read: RangeRead| match read.object {
                    Located::Full(object) => {
                        Some(client::RangeRead { object, offset: read.offset, into: read.into })
                    }
                    Located::Ipc(_) => None,
                };
                let reads = reads.into_iter().filter_map(own).collect();
                let read = client.ranges().read(reads).await.into_iter();
                read.map(|range| ReadOutcome { result: range.result, into: Some(range.into) }).collect()
            }
            Self::Ipc(client) => {
                let shared = |read: RangeRead| match read.object {
                    Located::Ipc(object) => Some(LocalRange { object, offset: read.offset, into: read.into }),
                    Located::Full(_) => None,
                };
                client.read_ranges(reads.into_iter().filter_map(shared).collect()).await
            }
        }
    }

    /// Reads values to the start of each memory and returns their lengths.
    pub(crate) async fn batch_get_into(
        &self,
        items: Vec<(String, SliceMut<TransportSet>)>,
    ) -> Result<Vec<Result<usize>>> {
        let missing = || Error::from(ErrorCode::ObjectNotFound);
        Ok(match self {
            Self::Full(client) => {
                let batch = client.batch_get_into(items).await;
                batch.located?;
                batch.reads.into_iter().map(|read| read.found().map_err(unify_code)).collect()
            }
            Self::Ipc(client) => {
                let outcomes = client.batch_get_into(items).await.into_iter();
                outcomes.map(|read| read.result?.ok_or_else(missing)).collect()
            }
        })
    }

    /// Removes the replicas that this client wrote. An IPC client has written none itself.
    pub(crate) async fn clear_replicas(&self, keys: &[String], segment: &str) -> Result<Vec<ObjectKey>> {
        match self {
            Self::Full(client) => client.replicas().clear(keys, segment).await,
            Self::Ipc(_) => Ok(Vec::new()),
        }
    }

    pub(crate) async fn close(&self) -> Result<()> {
        match self {
            Self::Full(client) => client.close().await,
            // An IPC client closes with its last handle.
            Self::Ipc(_) => Ok(()),
        }
    }
}

/// Maps every failed read of bytes to one code, as in Mooncake C++. The message names the cause.
fn unify_code(error: Error) -> Error {
    let is_it = matches!(error.code(), ErrorCode::ObjectNotFound | ErrorCode::TransferFail);
    match error.kind() {
        ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::NotFound if !is_it => {
            Error::new(ErrorCode::TransferFail, error.to_string()).with_source(error)
        }
        _ => error,
    }
}
