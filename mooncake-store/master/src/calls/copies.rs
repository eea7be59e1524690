//! Copies and moves of a value between segments, as requested by the client that moves the bytes.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, Result};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::{CopyPlan, MovePlan, TaskKind};

use super::master::Master;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Allocates space for another replica in each target segment (by name) without one. Until the
    /// end or revoke the object is neither replaced, removed nor evicted. After
    /// [`put_release`](crate::MasterOptions::put_release) a copy counts as revoked.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_HAS_REPLICATION_TASK`; `REPLICA_NOT_FOUND` (no complete replica
    /// in `source`); `SEGMENT_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS`, `NO_AVAILABLE_HANDLE` (a
    /// target).
    pub fn copy_start(
        &self,
        client: ClientId,
        key: &[u8],
        source: &str,
        targets: &[&str],
    ) -> Result<CopyPlan> {
        self.jobs.begin_copy(client, TaskKind::Copy, key, source, targets, CopyToken::default())
    }

    /// Begins a copy like [`Master::copy_start`] for a hot object for which this master requested
    /// it. The token is in the task; end and revoke repeat it. A nil token stands for an ordinary
    /// copy.
    ///
    /// # Errors
    /// Those of [`Master::copy_start`]; `UNAVAILABLE_IN_CURRENT_STATUS` if the master did not
    /// request the copy, or no longer wants it.
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

    /// Begins a move, like [`Master::copy_start`] with one target. The end drops the replica in
    /// `source`.
    ///
    /// # Errors
    /// Those of [`Master::copy_start`]; `INVALID_PARAMS` if source and target are the same.
    pub fn move_start(&self, client: ClientId, key: &[u8], source: &str, target: &str) -> Result<MovePlan> {
        if source == target {
            return Err(Error::invalid("cannot start move: source and target are the same segment"));
        }
        let plan =
            self.jobs.begin_copy(client, TaskKind::Move, key, source, &[target], CopyToken::default())?;
        Ok(MovePlan { source: plan.source, target: plan.targets.into_iter().next() })
    }

    /// Ends a copy or move whose bytes are complete. Its replicas become readable, and the source
    /// of a move is dropped.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_NO_REPLICATION_TASK`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` (a copy
    /// instead of a move, or vice versa); `REPLICA_IS_GONE` (every target segment is gone; a move
    /// then keeps its source).
    pub fn replication_end(&self, client: ClientId, kind: TaskKind, key: &[u8]) -> Result<()> {
        self.jobs.end_copy(client, kind, key, CopyToken::default())
    }

    /// Ends a copy that [`Master::hot_copy_start`] began, like [`Master::replication_end`].
    ///
    /// # Errors
    /// Those of [`Master::replication_end`]; `INVALID_VERSION` if the copy in progress has another
    /// token.
    pub fn hot_copy_end(&self, client: ClientId, key: &[u8], token: CopyToken) -> Result<()> {
        self.jobs.end_copy(client, TaskKind::Copy, key, token)
    }

    /// Revokes a copy or move that failed. Its space is taken back, and the object is unchanged.
    ///
    /// # Errors
    /// Those of [`Master::replication_end`].
    pub fn replication_revoke(&self, client: ClientId, kind: TaskKind, key: &[u8]) -> Result<()> {
        self.jobs.revoke_copy(client, kind, key, CopyToken::default())
    }

    /// Revokes a copy that [`Master::hot_copy_start`] began, like [`Master::replication_revoke`].
    ///
    /// # Errors
    /// Those of [`Master::replication_revoke`]; `INVALID_VERSION` if the copy in progress has
    /// another token.
    pub fn hot_copy_revoke(&self, client: ClientId, key: &[u8], token: CopyToken) -> Result<()> {
        self.jobs.revoke_copy(client, TaskKind::Copy, key, token)
    }
}
