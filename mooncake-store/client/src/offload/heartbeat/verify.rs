//! Replicas on disks whose files may be gone: readers ask the owner, and the owner lets the master
//! drop the replicas.

use std::sync::{Arc, Weak};

use futures::FutureExt;
use futures::future::BoxFuture;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::ReplicaType;
use mooncake_core::{ErrorCode, Result};
use mooncake_transport::Transport;

use crate::disk::own::{Disk, VerifiedKeys, VerifyOwn};
use crate::disk::scoped;
use crate::errors::display_key;
use crate::state::Inner;
use mooncake_protocol::message::{EvictDiskReplica, EvictDiskReplicaIfCurrent};
use mooncake_protocol::pack::Byte;
use mooncake_protocol::wire::VerifiedReplicas;

/// Client that verifies replicas on its disk.
pub(super) struct Verifier<T: Transport>(pub(super) Weak<Inner<T>>);

impl<T: Transport> VerifyOwn<T> for Verifier<T> {
    fn verify(
        &self,
        disk: Arc<Disk<T>>,
        request: VerifiedKeys,
    ) -> BoxFuture<'static, Result<VerifiedReplicas>> {
        let client = self.0.upgrade();
        let verified = async move {
            let client = client.ok_or(ErrorCode::UnavailableInCurrentStatus)?;
            client.verify_own_replicas(&disk, request).await
        };
        verified.boxed()
    }
}

impl<T: Transport> Inner<T> {
    /// Checks objects on the own disk, and lets the master drop the replicas of those that are
    /// gone.
    async fn verify_own_replicas(
        &self,
        disk: &Arc<Disk<T>>,
        request: VerifiedKeys,
    ) -> Result<VerifiedReplicas> {
        let mut states = Vec::with_capacity(request.keys.len());
        for (key, replica) in &request.keys {
            states.push(match disk.has(&scoped(&request.tenant, key)).await {
                Some(true) => VerifiedReplicas::PRESENT,
                Some(false) => self.drop_own_replica(&request.tenant, key, *replica).await,
                None => VerifiedReplicas::UNKNOWN,
            });
        }
        Ok(VerifiedReplicas { states })
    }

    /// Lets the master drop a replica on the own disk, whose file is gone. Returns the state of the
    /// object.
    async fn drop_own_replica(&self, tenant: &str, key: &[u8], replica: Option<ReplicaId>) -> Byte {
        // Without its number, the replica may be one that is being written.
        let Some(replica) = replica else { return VerifiedReplicas::UNKNOWN };
        let (client, replicas) = (self.id, ReplicaType::LocalDisk);
        let drop = self.master.call(EvictDiskReplicaIfCurrent { client, key, tenant, replicas, replica });
        let mut dropped =
            self.deadline().bound("end of a replica on disk", drop).await.map(|_was_current| ());
        if dropped.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            let drop = self.master.call(EvictDiskReplica { client, key, tenant, replicas });
            dropped = self.deadline().bound("end of a replica on disk", drop).await;
        }
        match dropped {
            Ok(()) => {
                tracing::warn!(key = %display_key(key), "file of an object is gone from the disk");
                VerifiedReplicas::MISSING
            }
            Err(error) if error.code() == ErrorCode::ObjectNotFound => VerifiedReplicas::MISSING,
            Err(error) => {
                tracing::debug!(key = %display_key(key), "replica not dropped: {error}");
                VerifiedReplicas::UNKNOWN
            }
        }
    }
}
