//! Whom a store's calls go through: a member of the cluster in this process, or the one of a `mooncake_client` on this host.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, Location, MemorySource};
use mooncake_core::replica::{ReplicaList, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::on_stream::after_default_stream;
use mooncake_store::client::{self, Begun, Client, Operation};
use mooncake_store::local::{LocalClient, LocalRange, LocatedLocal};
use mooncake_store::protocol::wire::TaskInfo;
use mooncake_transport::{Region, Slice, SliceMut, Transport};

use crate::memory::Wire;
use crate::runtime::runtime;

/// One of the two.
pub(crate) enum Member {
    /// A member of its own.
    Own(Client),
    /// That of a `mooncake_client`.
    Shared(LocalClient),
}

/// An object that was located.
#[derive(Clone)]
pub(crate) enum Located {
    Own(client::Located),
    Shared(LocatedLocal),
}

/// A part of an object to read.
pub(crate) struct RangeRead {
    pub(crate) object: Located,
    pub(crate) offset: u64,
    pub(crate) into: SliceMut<Wire>,
}

/// How a read ended, and its memory, unless `mooncake_client` may still be writing to it.
pub(crate) type Ended<R> = (Result<R>, Option<SliceMut<Wire>>);

impl Located {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Own(object) => object.size(),
            Self::Shared(object) => object.size(),
        }
    }
}

/// Calls that both have, under the same name.
macro_rules! both {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        pub(crate) async fn $name(&self, $($argument: $type),*) -> $answer {
            match self {
                Self::Own(client) => client.$name($($argument),*).await,
                Self::Shared(client) => client.$name($($argument),*).await,
            }
        }
    )*};
}

impl Member {
    both! {
        exist(key: String) -> Result<bool>;
        batch_exist(keys: &[String]) -> Result<Vec<Result<bool>>>;
        size(key: String) -> Result<Option<u64>>;
        batch_replicas(keys: &[String]) -> Result<Vec<Result<Option<ReplicaList>>>>;
        remove(key: String, force: bool) -> Result<bool>;
        batch_remove(keys: &[String], force: bool) -> Result<Vec<Result<bool>>>;
        remove_matching(pattern: &str, force: bool) -> Result<u64>;
        remove_all(force: bool) -> Result<u64>;
        copy_task(key: String, targets: &[&str]) -> Result<Uuid>;
        move_task(key: String, source: &str, target: &str) -> Result<Uuid>;
        task(task: Uuid) -> Result<TaskInfo>;
        is_healthy() -> bool;
        batch_put_pieces(items: &[(String, Vec<Slice<Wire>>)], config: &ReplicateConfig) -> Result<Vec<Result<client::PutOutcome>>>;
        batch_upsert_pieces(items: &[(String, Vec<Slice<Wire>>)], config: &ReplicateConfig) -> Result<Vec<Result<()>>>;
    }

    /// Begins a call as Python has it. Those of a light client are counted by `mooncake_client`, as it makes them.
    pub(crate) fn begin(&self, operation: Operation) -> Option<Begun> {
        match self {
            Self::Own(client) => Some(client.begin(operation)),
            Self::Shared(_) => None,
        }
    }

    /// Makes calls that are counted as that one.
    pub(crate) async fn counted<F: Future>(&self, begun: Option<Begun>, calls: F) -> F::Output {
        match (self, begun) {
            (Self::Own(client), Some(begun)) => client.counted(begun, calls).await,
            _ => calls.await,
        }
    }

    /// The member of its own, for what only such a one can do.
    pub(crate) fn own(&self) -> Result<&Client> {
        match self {
            Self::Own(client) => Ok(client),
            Self::Shared(_) => Err(Error::invalid(
                "a store of setup_dummy has no member of its own; this is for mooncake_client, or a store of setup()",
            )),
        }
    }

    /// The light client, if it is one.
    pub(crate) fn shared(&self) -> Option<&LocalClient> {
        match self {
            Self::Own(_) => None,
            Self::Shared(client) => Some(client),
        }
    }

    /// Its name in the cluster; a light client has none.
    pub(crate) fn hostname(&self) -> &str {
        match self {
            Self::Own(client) => client.hostname(),
            Self::Shared(_) => "",
        }
    }

    /// Whether the wire moves registered memory only.
    pub(crate) fn needs_registration(&self) -> bool {
        match self {
            Self::Own(client) => client.engine().transport().capabilities().needs_registration,
            Self::Shared(_) => false,
        }
    }

    /// Has what is moved now come after what the default stream of a device has been given; see the function of that name.
    pub(crate) fn after_default_stream(&self, location: Location) -> Result<()> {
        if !location.is_device() {
            return Ok(());
        }
        let wires = match self {
            Self::Own(client) => Some(&**client.engine().transport()),
            // A light client copies by itself.
            Self::Shared(_) => None,
        };
        // What the stream waits for may need this very thread.
        tokio::task::block_in_place(|| after_default_stream(wires, location))
    }

    /// Bytes of its local buffer.
    pub(crate) fn local_buffer(&self) -> u64 {
        match self {
            Self::Own(client) => client.config().local_buffer,
            Self::Shared(client) => client.config().buffer,
        }
    }

    /// New memory that calls need not copy from.
    pub(crate) fn memory(&self, len: usize) -> Result<HostMemory> {
        match self {
            Self::Own(client) => HostMemory::with(len, &client.config().memory),
            Self::Shared(client) => {
                let shared = Some("mooncake_shm".to_owned());
                HostMemory::with(len, &HostMemoryOptions { shared, ..client.config().memory.clone() })
            }
        }
    }

    /// Registers memory. A `mooncake_client` has to be told, which is waited for here.
    pub(crate) fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<Wire>> {
        let client = match self {
            Self::Own(client) => return client.register(memory),
            Self::Shared(client) => client.clone(),
        };
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        runtime()?.spawn(async move {
            // Nobody waits only when the caller's thread is gone.
            let _ = tell.send(client.register(memory).await);
        });
        let lost = |_| Error::internal("nobody registers memory any more");
        tokio::task::block_in_place(|| told.recv()).map_err(lost)?
    }

    pub(crate) async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Located>>>> {
        Ok(match self {
            Self::Own(client) => {
                let found = client.locate(keys).await?;
                found.into_iter().map(|one| one.map(|object| object.map(Located::Own))).collect()
            }
            Self::Shared(client) => {
                let found = client.locate(keys).await?;
                found.into_iter().map(|one| one.map(|object| object.map(Located::Shared))).collect()
            }
        })
    }

    pub(crate) async fn read_ranges(&self, reads: Vec<RangeRead>) -> Vec<Ended<()>> {
        let ended = self.read_as_they_end(reads).await.into_iter();
        ended.map(|(end, into)| (end.map_err(one_number), into)).collect()
    }

    async fn read_as_they_end(&self, reads: Vec<RangeRead>) -> Vec<Ended<()>> {
        let stale = || Error::new(ErrorCode::LeaseExpired, "the object was located before this setup");
        // What was located by another store cannot be read with this one.
        let fits = |object: &Located| {
            matches!((self, object), (Self::Own(_), Located::Own(_)) | (Self::Shared(_), Located::Shared(_)))
        };
        if reads.iter().any(|read| !fits(&read.object)) {
            return reads.into_iter().map(|read| (Err(stale()), Some(read.into))).collect();
        }
        match self {
            Self::Own(client) => {
                let own = |read: RangeRead| match read.object {
                    Located::Own(object) => {
                        Some(client::RangeRead { object, offset: read.offset, into: read.into })
                    }
                    Located::Shared(_) => None,
                };
                let reads = reads.into_iter().filter_map(own).collect();
                client.read_ranges(reads).await.into_iter().map(|(end, into)| (end, Some(into))).collect()
            }
            Self::Shared(client) => {
                let shared = |read: RangeRead| match read.object {
                    Located::Shared(object) => {
                        Some(LocalRange { object, offset: read.offset, into: read.into })
                    }
                    Located::Own(_) => None,
                };
                client.read_ranges(reads.into_iter().filter_map(shared).collect()).await
            }
        }
    }

    /// Lengths of values, read to the front of memory.
    pub(crate) async fn batch_get_into(
        &self,
        items: Vec<(String, SliceMut<Wire>)>,
    ) -> Result<Vec<Result<usize>>> {
        let missing = || Error::from(ErrorCode::ObjectNotFound);
        Ok(match self {
            Self::Own(client) => {
                let (asked, outcomes) = client.batch_read_into(items).await;
                asked?;
                outcomes.into_iter().map(|(end, _)| end.map_err(one_number)).collect()
            }
            Self::Shared(client) => {
                let outcomes = client.batch_get_into(items).await.into_iter();
                outcomes.map(|(end, _)| end?.ok_or_else(missing)).collect()
            }
        })
    }

    /// Copies that this member wrote; a light client has written none itself.
    pub(crate) async fn clear_replicas(&self, keys: &[String], segment: &str) -> Result<Vec<ObjectKey>> {
        match self {
            Self::Own(client) => client.clear_replicas(keys, segment).await,
            Self::Shared(_) => Ok(Vec::new()),
        }
    }

    pub(crate) async fn close(&self) -> Result<()> {
        match self {
            Self::Own(client) => client.close().await,
            // It ends with its last handle.
            Self::Shared(_) => Ok(()),
        }
    }
}

/// What keeps bytes from coming has one number here, as in the existing package; its message says what it was.
fn one_number(error: Error) -> Error {
    let is_it = matches!(error.code(), ErrorCode::ObjectNotFound | ErrorCode::TransferFail);
    match error.kind() {
        ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::NotFound if !is_it => {
            Error::new(ErrorCode::TransferFail, error.to_string()).with_source(error)
        }
        _ => error,
    }
}
