//! Request of a reader to verify replicas on a disk, whose files may be gone.

use std::sync::Arc;

use futures::future::BoxFuture;
use mooncake_core::ids::ReplicaId;
use mooncake_core::{Error, Result};
use mooncake_protocol::message::VerifyReplicas;
use mooncake_protocol::wire::VerifiedReplicas;
use mooncake_transport::Transport;

use super::owner::Disk;

/// Maximum number of objects that are checked together.
const MAX_BATCH: usize = 4096;

/// Objects that a reader could not read from the disk of this client.
#[derive(Debug)]
pub(crate) struct VerifiedKeys {
    pub(crate) tenant: String,
    /// Keys, and the number of the replica of each.
    pub(crate) keys: Vec<(Vec<u8>, Option<ReplicaId>)>,
}

/// Owner of a disk that checks objects there, and lets the master drop the replicas of those that
/// are gone.
pub(crate) trait VerifyOwn<T: Transport>: Send + Sync {
    fn verify(
        &self,
        disk: Arc<Disk<T>>,
        request: VerifiedKeys,
    ) -> BoxFuture<'static, Result<VerifiedReplicas>>;
}

impl VerifiedKeys {
    /// Returns the objects of a request.
    pub(crate) fn of(request: &VerifyReplicas<'_>) -> Result<Self> {
        let ids = request.replica_ids.as_deref();
        if request.keys.len() > MAX_BATCH || ids.is_some_and(|ids| ids.len() != request.keys.len()) {
            return Err(Error::invalid(format!(
                "cannot verify replicas: {} numbers for {} keys; at most {MAX_BATCH}",
                ids.map_or(0, <[u64]>::len),
                request.keys.len()
            )));
        }
        let id = |at: usize| ids.and_then(|ids| ids.get(at)).map(|id| ReplicaId(*id));
        let keys = request.keys.iter().enumerate().map(|(at, key)| (key.to_vec(), id(at))).collect();
        let tenant = request.resolved_tenant.as_deref().unwrap_or(request.tenant).to_owned();
        Ok(Self { tenant, keys })
    }
}
