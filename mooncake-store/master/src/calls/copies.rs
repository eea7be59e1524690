//! Copies and moves of a value between segments, as the client that moves the bytes calls them.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, Result};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::{CopyPlan, MovePlan, TaskKind};

use super::master::Master;

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Grants space for another replica in each target segment (by name) that has none yet. Until the end or revoke the object is
    /// neither replaced, removed nor evicted; after [`put_release`](super::MasterOptions::put_release) a copy counts as revoked.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_HAS_REPLICATION_TASK`; `REPLICA_NOT_FOUND` (no complete replica in `source`);
    /// `SEGMENT_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS`, `NO_AVAILABLE_HANDLE` (a target).
    pub fn copy_start(
        &self,
        client: ClientId,
        key: &[u8],
        source: &str,
        targets: &[&str],
    ) -> Result<CopyPlan> {
        self.jobs.begin_copy(client, TaskKind::Copy, key, source, targets, CopyToken::default())
    }

    /// As [`Master::copy_start`] for a copy of a hot object that this master asked for: the token is in the task. End and revoke
    /// repeat it. A nil token is an ordinary copy.
    ///
    /// # Errors
    /// As [`Master::copy_start`]; `UNAVAILABLE_IN_CURRENT_STATUS` when the master did not ask for it, or not any more.
    pub fn hot_copy_start(
        &self,
        client: ClientId,
        key: &[u8],
        source: &str,
        targets: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        self.jobs.begin_copy(client, TaskKind::Copy, key, source, targets, token)
    }

    /// As [`Master::copy_start`] with one target; the end drops the replica in `source`.
    ///
    /// # Errors
    /// As [`Master::copy_start`]; `INVALID_PARAMS` when source and target are the same.
    pub fn move_start(&self, client: ClientId, key: &[u8], source: &str, target: &str) -> Result<MovePlan> {
        if source == target {
            return Err(Error::invalid("source and target of a move are the same segment"));
        }
        let plan =
            self.jobs.begin_copy(client, TaskKind::Move, key, source, &[target], CopyToken::default())?;
        Ok(MovePlan { source: plan.source, target: plan.targets.into_iter().next() })
    }

    /// The bytes of a copy or move have landed: its replicas are readable, and a move's source is dropped.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_NO_REPLICATION_TASK`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` (it is of the other kind);
    /// `REPLICA_IS_GONE` (every segment it was made in is gone; a move then keeps its source).
    pub fn replication_end(&self, client: ClientId, kind: TaskKind, key: &[u8]) -> Result<()> {
        self.jobs.end_copy(client, kind, key, CopyToken::default())
    }

    /// As [`Master::replication_end`] for what [`Master::hot_copy_start`] began.
    ///
    /// # Errors
    /// As [`Master::replication_end`]; `INVALID_VERSION` when what is under way has another token.
    pub fn hot_copy_end(&self, client: ClientId, key: &[u8], token: CopyToken) -> Result<()> {
        self.jobs.end_copy(client, TaskKind::Copy, key, token)
    }

    /// A copy or move failed: its space is taken back, and the object is as it was.
    ///
    /// # Errors
    /// As [`Master::replication_end`].
    pub fn replication_revoke(&self, client: ClientId, kind: TaskKind, key: &[u8]) -> Result<()> {
        self.jobs.revoke_copy(client, kind, key, CopyToken::default())
    }

    /// As [`Master::replication_revoke`] for what [`Master::hot_copy_start`] began.
    ///
    /// # Errors
    /// As [`Master::replication_revoke`]; `INVALID_VERSION` when what is under way has another token.
    pub fn hot_copy_revoke(&self, client: ClientId, key: &[u8], token: CopyToken) -> Result<()> {
        self.jobs.revoke_copy(client, TaskKind::Copy, key, token)
    }
}
