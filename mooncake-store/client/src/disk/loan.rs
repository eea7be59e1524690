//! Connections to clients that serve disks, and the buffers that they lend.

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_protocol::client::{RpcClient, RpcOptions};
use mooncake_protocol::message::ReturnObjects;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
use tokio::runtime::Handle;

use crate::issuer::Issuer;

/// Maximum number of cached connections. Above it, all of them are discarded.
const MAX_CONNECTIONS: usize = 1024;

/// Maximum number of objects that owners are asked for at a time because they did not lend them.
const MAX_VERIFICATIONS: usize = 64;

/// Endpoint of an owner of a disk, and key of an object that it did not lend.
type RefusedObject = (String, Vec<u8>);

/// Connections to owners of disks.
#[derive(Debug, Default)]
pub(crate) struct DiskOwners {
    pub(crate) by_endpoint: Mutex<HashMap<String, Arc<DiskOwner>>>,
    /// Number of objects that owners have lent.
    pub(crate) borrowed_objects: AtomicU64,
    /// Objects that owners are asked for because they did not lend them: endpoint and key.
    pub(crate) verifying: Arc<Mutex<HashSet<RefusedObject>>>,
}

/// The owner of a disk.
#[derive(Debug)]
pub(crate) struct DiskOwner {
    pub(crate) rpc: RpcClient,
    /// True if the owner is a client of Mooncake C++, which has other calls for parts of objects.
    pub(crate) is_foreign: AtomicBool,
    /// True if the owner is a client of Mooncake C++ 0.3.13, which lends whole objects only.
    pub(crate) lends_whole_objects: AtomicBool,
    /// True if the owner lacks the call for prefetches.
    pub(crate) lacks_prefetch: AtomicBool,
}

impl DiskOwners {
    pub(crate) fn get_or_create(&self, endpoint: &str, limit: Duration) -> Arc<DiskOwner> {
        let mut by_endpoint = self.by_endpoint.lock();
        if let Some(owner) = by_endpoint.get(endpoint) {
            return owner.clone();
        }
        if by_endpoint.len() >= MAX_CONNECTIONS {
            by_endpoint.clear();
        }
        let options = RpcOptions { connect_timeout: limit, call_timeout: limit, ..RpcOptions::default() };
        let owner = Arc::new(DiskOwner {
            rpc: RpcClient::new(endpoint, options),
            is_foreign: AtomicBool::new(false),
            lends_whole_objects: AtomicBool::new(false),
            lacks_prefetch: AtomicBool::new(false),
        });
        by_endpoint.insert(endpoint.to_owned(), owner.clone());
        owner
    }

    /// Records that an owner is asked for an object that it did not lend. Returns whether to ask:
    /// not if that is in progress, or if many are asked for.
    pub(crate) fn begin_verification(&self, endpoint: &str, key: &[u8]) -> bool {
        let mut verifying = self.verifying.lock();
        verifying.len() < MAX_VERIFICATIONS && verifying.insert((endpoint.to_owned(), key.to_owned()))
    }

    /// Closes the connections that owners have closed, and removes owners without connections and
    /// calls.
    pub(crate) fn close_departed(&self) {
        if !is_planted("departed-owners-stay") {
            self.by_endpoint
                .lock()
                .retain(|_, owner| owner.rpc.close_departed() || Arc::strong_count(owner) > 1);
        }
    }
}

/// Part of an object to read from a disk.
#[derive(Debug)]
pub(crate) struct PartToBorrow<'k> {
    pub(crate) key: &'k [u8],
    /// Length of the whole object.
    pub(crate) size: u64,
    pub(crate) range: Range<u64>,
}

/// Objects, or parts of objects, in the buffer of an owner. Dropping the loan returns them.
#[derive(Debug)]
pub(crate) struct Loan {
    pub(crate) owner: Arc<DiskOwner>,
    pub(crate) runtime: Handle,
    pub(crate) batch: u64,
    /// Address of each object or part.
    pub(crate) addresses: Vec<u64>,
    /// Version of each object, if the owner reports versions.
    pub(crate) versions: Vec<u64>,
    /// Endpoint to open for access to the buffer.
    pub(crate) endpoint: String,
    /// Owner of the buffer, as the issuer of the addresses.
    pub(crate) issuer: Issuer,
    /// Time until which the buffer may be read.
    pub(crate) until: Moment,
}

impl Drop for Loan {
    fn drop(&mut self) {
        let (owner, batch) = (self.owner.clone(), self.batch);
        self.runtime.spawn(async move {
            // After an error, the owner reclaims the buffer when the loan expires.
            let _ = owner.rpc.call(&ReturnObjects { batch }).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use mooncake_protocol::frame::{Refusal, Status};
    use mooncake_protocol::server::{Server, ServerOptions, Service};

    use super::*;

    /// Service that refuses every call.
    struct Refusing;

    impl Service for Refusing {
        fn call(&self, _: u32, _: &[u8], _: &mut Vec<u8>) -> Result<(), Refusal> {
            Err((Status::NotRegistered, String::new()))
        }
    }

    #[tokio::test]
    async fn connections_to_departed_owners_are_closed() {
        let owners = DiskOwners::default();
        let mut servers = Vec::new();
        for batch in 0..4 {
            let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
            let server = server.start(Arc::new(Refusing));
            let owner = owners.get_or_create(&server.local_addr().to_string(), Duration::from_secs(20));
            owner.rpc.call(&ReturnObjects { batch }).await.unwrap_err();
            servers.push(server);
        }
        owners.close_departed();
        assert_eq!(owners.by_endpoint.lock().len(), 4);
        for server in servers.drain(1..) {
            server.stop().await;
        }
        let closed = async {
            while owners.by_endpoint.lock().len() > 1 {
                owners.close_departed();
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), closed).await.expect("the connections are closed");
        assert!(owners.by_endpoint.lock().contains_key(&servers[0].local_addr().to_string()));
    }
}
