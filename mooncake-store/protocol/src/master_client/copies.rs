//! Calls about copies, moves, promotions and disks. Those of this project have numbers: a late or
//! repeated call of one copy has no effect on another.

use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::ClientId;
use mooncake_core::replica::{ReplicaList, ReplicaType};

use super::{MasterCall, MasterClient, Relaxed, is_missing_call};
use crate::api::{Caller, CopyToken};
use crate::call::{Reply, Request};
use crate::message::*;
use crate::wire::{CopyPlan, OffloadItem, PromotionPlan, StoredAt, TaskKind};

impl MasterClient {
    /// Makes a call of a numbered copy. Returns `None` if the copy has no number or the master
    /// lacks these calls. The call is counted as the function `counted` of Mooncake C++.
    async fn of_numbered_copy<R, T>(&self, attempt: u64, counted: u32, request: R) -> Result<Option<T>>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = Result<T>>,
    {
        if attempt == 0 || self.missing.numbered_copies.load(Relaxed) {
            return Ok(None);
        }
        let outcome = self.exchange(counted, request).await.and_then(|outcome| outcome);
        match outcome {
            Err(error) if error.code() == ErrorCode::NotSupported => {
                self.missing.numbered_copies.store(true, Relaxed);
                Ok(None)
            }
            outcome => outcome.map(Some).map_err(|error| error.context(R::NAME)),
        }
    }

    /// Grants space for copies in the named segments, or for a move to the first of them. `token`
    /// is that of the task for a copy of a hot object, and nil otherwise; the same holds for the
    /// end and the revoke. Returns the plan, and the number by which the master knows the copy:
    /// that of the caller, or 0 if the master does not number copies.
    pub async fn copy_start(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        (source, targets): (&str, &[&str]),
        token: CopyToken,
    ) -> Result<(CopyPlan, u64)> {
        let (Caller { client, tenant, attempt }, CopyToken { lease, epoch }) = (caller, token);
        if kind == TaskKind::Move {
            let target = targets.first().copied().unwrap_or_default();
            let request = StartMove { client, attempt, key, tenant, source, target };
            let numbered = self.of_numbered_copy(attempt, MoveStart::FUNCTION, request).await?;
            let (plan, attempt) = match numbered {
                Some(plan) => (plan, attempt),
                None => (self.call(MoveStart { client, key, tenant, source, target }).await?, 0),
            };
            let targets = plan.target.into_iter().collect();
            return Ok((CopyPlan { source: plan.source, targets }, attempt));
        }
        let listed = || targets.into();
        let request = StartCopy { client, attempt, key, tenant, source, targets: listed(), lease, epoch };
        let counted = if token.is_nil() { CopyStart::FUNCTION } else { DynamicReplicaCopyStart::FUNCTION };
        if let Some(plan) = self.of_numbered_copy(attempt, counted, request).await? {
            return Ok((plan, attempt));
        }
        let targets = listed();
        let plan = match token.is_nil() {
            true => self.call(CopyStart { client, key, tenant, source, targets }).await?,
            false => {
                self.call(DynamicReplicaCopyStart { client, key, tenant, source, targets, lease, epoch })
                    .await?
            }
        };
        Ok((plan, 0))
    }

    /// Marks a copy or move as completely written. The number of the caller is the one that
    /// [`copy_start`](Self::copy_start) returned.
    pub async fn replication_end(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let (Caller { client, tenant, attempt }, CopyToken { lease, epoch }) = (caller, token);
        match kind {
            TaskKind::Copy if attempt != 0 => {
                self.call(EndCopy { client, attempt, key, tenant, lease, epoch }).await
            }
            TaskKind::Move if attempt != 0 => self.call(EndMove { client, attempt, key, tenant }).await,
            TaskKind::Copy if token.is_nil() => self.call(CopyEnd { client, key, tenant }).await,
            TaskKind::Copy => self.call(DynamicReplicaCopyEnd { client, key, tenant, lease, epoch }).await,
            TaskKind::Move => self.call(MoveEnd { client, key, tenant }).await,
        }
    }

    /// Cancels a copy or move. A numbered one may be cancelled although its start was not answered.
    pub async fn replication_revoke(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let (Caller { client, tenant, attempt }, CopyToken { lease, epoch }) = (caller, token);
        match kind {
            TaskKind::Copy if attempt != 0 => {
                self.call(RevokeCopy { client, attempt, key, tenant, lease, epoch }).await
            }
            TaskKind::Move if attempt != 0 => self.call(RevokeMove { client, attempt, key, tenant }).await,
            TaskKind::Copy if token.is_nil() => self.call(CopyRevoke { client, key, tenant }).await,
            TaskKind::Copy => self.call(DynamicReplicaCopyRevoke { client, key, tenant, lease, epoch }).await,
            TaskKind::Move => self.call(MoveRevoke { client, key, tenant }).await,
        }
    }

    /// Grants space for an object that returns from the disk of the caller. Returns the number by
    /// which the master knows the promotion, as [`copy_start`](Self::copy_start) does.
    pub async fn promotion_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        size: u64,
        preferred: &[&str],
    ) -> Result<(PromotionPlan, u64)> {
        let Caller { client, tenant, attempt } = caller;
        let listed = || preferred.into();
        let request = StartPromotion { client, attempt, key, tenant, size, preferred: listed() };
        match self.of_numbered_copy(attempt, PromotionAllocStart::FUNCTION, request).await? {
            Some(plan) => Ok((plan, attempt)),
            None => {
                let request = PromotionAllocStart { client, key, tenant, size, preferred: listed() };
                Ok((self.call(request).await?, 0))
            }
        }
    }

    /// Ends a promotion, which succeeded if `is_made`.
    pub async fn promotion_end(&self, caller: Caller<'_>, key: &[u8], is_made: bool) -> Result<()> {
        let Caller { client, tenant, attempt } = caller;
        match (attempt, is_made) {
            (0, true) => self.call(NotifyPromotionSuccess { client, key, tenant }).await,
            (0, false) => self.call(NotifyPromotionFailure { client, key, tenant }).await,
            (_, true) => self.call(EndPromotion { client, attempt, key, tenant }).await,
            (_, false) => self.call(RevokePromotion { client, attempt, key, tenant }).await,
        }
    }

    /// Returns the replicas of each object without a lease. The call counts as no read.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` if the master lacks prefetches, and an error if no valid response
    /// arrived.
    pub async fn list_replicas(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        self.can_prefetch()?;
        let request = BatchGetReplicaListForAdmin { keys: keys.into(), tenant };
        self.call_each(request, keys.len()).await.inspect_err(|error| self.note_prefetch(error))
    }

    /// Reserves the promotion of an object on the disk of the client, which the client then starts.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` if the master lacks prefetches, and the errors of the master.
    pub async fn register_prefetch(&self, client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.can_prefetch()?;
        let registered = self.call(RegisterPrefetchTask { client, key, tenant }).await;
        registered.inspect_err(|error| self.note_prefetch(error))
    }

    fn can_prefetch(&self) -> Result<()> {
        match self.missing.prefetches.load(Relaxed) {
            true => Err(Error::new(ErrorCode::NotSupported, "cannot prefetch: the master lacks the call")),
            false => Ok(()),
        }
    }

    /// Records from an error whether the master lacks prefetches.
    fn note_prefetch(&self, error: &Error) {
        if is_missing_call(error) {
            self.missing.prefetches.store(true, Relaxed);
        }
    }

    /// Reports objects that were written to the disk of the client. `work` is the number of the
    /// work that the client was given last, 0 for objects that it found on its disk; `None` if its
    /// work is not numbered.
    pub async fn report_offloaded(
        &self,
        client: ClientId,
        work: Option<u64>,
        offloaded: &[OffloadItem],
        places: &[StoredAt],
    ) -> Result<()> {
        if let Some(work) = work.filter(|_| !self.missing.numbered_copies.load(Relaxed)) {
            let (offloaded, places) = (offloaded.into(), places.into());
            match self.call(ReportOffloaded { client, work, offloaded, places }).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.missing.numbered_copies.store(true, Relaxed);
                }
                outcome => return outcome,
            }
        }
        self.call(NotifyOffloadSuccess { client, offloaded: offloaded.into(), places: places.into() }).await
    }

    /// Reports that copies of objects of a tenant left the client's disk, during the work with this
    /// number; see [`report_offloaded`](Self::report_offloaded).
    pub async fn report_dropped(
        &self,
        client: ClientId,
        work: Option<u64>,
        tenant: &str,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        if let Some(work) = work.filter(|_| !self.missing.numbered_copies.load(Relaxed)) {
            let request = ReportDropped { client, work, keys: keys.into(), tenant };
            match self.call_each(request, keys.len()).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.missing.numbered_copies.store(true, Relaxed);
                }
                outcomes => return outcomes,
            }
        }
        self.drop_from_disk(client, tenant, keys, ReplicaType::LocalDisk).await
    }
}
