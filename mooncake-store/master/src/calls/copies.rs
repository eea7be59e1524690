//! Copies and moves of a value between segments, as requested by the client that moves the bytes.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::{Error, Result};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::{CopyPlan, MovePlan, TaskKind};

use super::master::Master;
use crate::jobs::copy::CopyCall;
use crate::model::value::Writer;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Allocates space for another replica in each target segment (by name) without one. Until the
    /// end or revoke the object is neither replaced, removed nor evicted. After
    /// [`put_release`](crate::MasterOptions::put_release) a copy counts as revoked, and a copy is
    /// lost with its client, its source or its last target.
    ///
    /// A repeated start returns the same plan: one with the same number, or without a number one by
    /// the same client with the same source and targets.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_HAS_REPLICATION_TASK`; `REPLICA_NOT_FOUND` (no complete replica
    /// in `source`); `SEGMENT_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS`, `NO_AVAILABLE_HANDLE` (a
    /// target); `INVALID_VERSION` (a copy with this number has ended).
    pub fn copy_start(
        &self,
        copier: impl Into<Writer>,
        key: &[u8],
        source: &str,
        targets: &[&str],
    ) -> Result<CopyPlan> {
        self.hot_copy_start(copier, key, source, targets, CopyToken::default())
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
        copier: impl Into<Writer>,
        key: &[u8],
        source: &str,
        targets: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        self.jobs.begin_copy(call(copier, TaskKind::Copy, key, token), source, targets)
    }

    /// Begins a move, like [`Master::copy_start`] with one target. The end drops the replica in
    /// `source`.
    ///
    /// # Errors
    /// Those of [`Master::copy_start`]; `INVALID_PARAMS` if source and target are the same.
    pub fn move_start(
        &self,
        copier: impl Into<Writer>,
        key: &[u8],
        source: &str,
        target: &str,
    ) -> Result<MovePlan> {
        if source == target {
            return Err(Error::invalid("cannot start move: source and target are the same segment"));
        }
        let call = call(copier, TaskKind::Move, key, CopyToken::default());
        let plan = self.jobs.begin_copy(call, source, &[target])?;
        Ok(MovePlan { source: plan.source, target: plan.targets.into_iter().next() })
    }

    /// Ends a copy or move whose bytes are complete. Its replicas become readable, and the source
    /// of a move is dropped. Repeating the call of a numbered copy has no effect.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_NO_REPLICATION_TASK`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` (a copy
    /// instead of a move, or vice versa); `REPLICA_IS_GONE` (the copy was lost; a move then keeps
    /// its source); `INVALID_VERSION` (the copy in progress has another number).
    pub fn replication_end(&self, copier: impl Into<Writer>, kind: TaskKind, key: &[u8]) -> Result<()> {
        self.replication_end_at(copier.into(), kind, key, None)
    }

    /// Ends a copy that [`Master::hot_copy_start`] began, like [`Master::replication_end`].
    ///
    /// # Errors
    /// Those of [`Master::replication_end`]; `INVALID_VERSION` if the copy in progress has another
    /// token.
    pub fn hot_copy_end(&self, copier: impl Into<Writer>, key: &[u8], token: CopyToken) -> Result<()> {
        self.jobs.end_copy(call(copier, TaskKind::Copy, key, token))
    }

    /// Revokes a copy or move that failed. Its space is taken back, and the object is unchanged. A
    /// numbered copy does not begin afterwards, should its start arrive later.
    ///
    /// # Errors
    /// Those of [`Master::replication_end`].
    pub fn replication_revoke(&self, copier: impl Into<Writer>, kind: TaskKind, key: &[u8]) -> Result<()> {
        self.replication_revoke_at(copier.into(), kind, key, None)
    }

    /// Revokes a copy that [`Master::hot_copy_start`] began, like [`Master::replication_revoke`].
    ///
    /// # Errors
    /// Those of [`Master::replication_revoke`]; `INVALID_VERSION` if the copy in progress has
    /// another token.
    pub fn hot_copy_revoke(&self, copier: impl Into<Writer>, key: &[u8], token: CopyToken) -> Result<()> {
        self.jobs.revoke_copy(call(copier, TaskKind::Copy, key, token))
    }

    /// Ends a copy or move like [`Master::replication_end`]. The server had read the request at the
    /// logical time `receipt`; a copy that began later is another one.
    pub(super) fn replication_end_at(
        &self,
        copier: Writer,
        kind: TaskKind,
        key: &[u8],
        receipt: Option<u64>,
    ) -> Result<()> {
        self.jobs.end_copy(CopyCall { receipt, ..call(copier, kind, key, CopyToken::default()) })
    }

    /// Revokes a copy or move like [`Master::replication_revoke`], with a time as in
    /// [`replication_end_at`](Self::replication_end_at).
    pub(super) fn replication_revoke_at(
        &self,
        copier: Writer,
        kind: TaskKind,
        key: &[u8],
        receipt: Option<u64>,
    ) -> Result<()> {
        self.jobs.revoke_copy(CopyCall { receipt, ..call(copier, kind, key, CopyToken::default()) })
    }
}

fn call(copier: impl Into<Writer>, kind: TaskKind, key: &[u8], token: CopyToken) -> CopyCall<'_> {
    CopyCall { copier: copier.into(), kind, key, token, receipt: None }
}
