//! Python's view of the client behind a store: waits on the caller's thread, and codes as in
//! Mooncake C++.

use std::sync::Arc;

use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_store::client::Client;
use mooncake_store::local::{LocalRead, unify_read_error};
pub(crate) use mooncake_store::local::{StoreClient, StoreObject as Located};
use mooncake_transport::Region;

use crate::runtime::runtime;

/// Part of an object to read.
pub(crate) type RangeRead = mooncake_store::local::StoreRange<TransportSet>;

/// Outcome of a read and its memory. The memory is `None` while `mooncake_client` may still write
/// to it.
pub(crate) type ReadOutcome = LocalRead<(), TransportSet>;

/// Calls of a [`StoreClient`] with the behavior that Python expects.
pub(crate) trait PythonClient {
    /// Returns the full client, for calls that an IPC client does not have.
    fn full(&self) -> Result<&Client>;
    /// Registers memory. For an IPC client, this waits until `mooncake_client` has mapped it.
    fn register_now(&self, memory: Arc<dyn MemorySource>) -> Result<Region<TransportSet>>;
    /// Reads ranges, with the codes of Mooncake C++.
    async fn read(&self, reads: Vec<RangeRead>) -> Vec<ReadOutcome>;
    /// Reads ranges of objects that the same call has located. Objects whose leases have ended are
    /// located again.
    async fn read_current(&self, reads: Vec<RangeRead>) -> Vec<ReadOutcome>;
}

impl PythonClient for StoreClient {
    fn full(&self) -> Result<&Client> {
        self.as_full().ok_or_else(|| {
            Error::invalid(
                "cannot make this call: a store of setup_dummy() has no full client; use mooncake_client or setup()",
            )
        })
    }

    fn register_now(&self, memory: Arc<dyn MemorySource>) -> Result<Region<TransportSet>> {
        let client = match self {
            Self::Full(client) => return client.memory().register(memory),
            Self::Ipc(client) => client.clone(),
        };
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        runtime()?.spawn(async move {
            // The receiver is gone only if the caller's thread is.
            let _ = sender.send(client.register(memory).await);
        });
        let lost = |_| Error::internal("cannot register memory: the task that registers it has stopped");
        tokio::task::block_in_place(|| receiver.recv()).map_err(lost)?
    }

    async fn read(&self, reads: Vec<RangeRead>) -> Vec<ReadOutcome> {
        unified(self.read_ranges(reads).await)
    }

    async fn read_current(&self, reads: Vec<RangeRead>) -> Vec<ReadOutcome> {
        unified(self.read_current_ranges(reads).await)
    }
}

fn unified(ended: Vec<ReadOutcome>) -> Vec<ReadOutcome> {
    let unify = |read: ReadOutcome| ReadOutcome { result: read.result.map_err(unify_read_error), ..read };
    ended.into_iter().map(unify).collect()
}
