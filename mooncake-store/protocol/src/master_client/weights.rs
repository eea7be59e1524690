//! Calls about managed weights.
//!
//! Each returns two results. The outer one fails if no valid response arrived, such as from a
//! master without these calls (`NOT_SUPPORTED`). The inner one is that of the call.

use mooncake_core::error::{Error, Result};

use super::{MasterCall, MasterClient};
use crate::call::Reply;
use crate::message::*;
use crate::wire::{
    WeightChange, WeightCommit, WeightError, WeightId, WeightImport, WeightLease, WeightLeaseRelease,
    WeightLeaseRenewal, WeightLeaseRequest, WeightList, WeightMoveRequest, WeightOperation,
    WeightOperationQuery, WeightPage, WeightQuery, WeightRevision, WeightView,
};

/// Result of a call about managed weights.
type WeightResult<T> = Result<std::result::Result<T, WeightError>>;

impl MasterClient {
    async fn call_of_weights<R, T>(&self, request: R) -> WeightResult<T>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = std::result::Result<T, WeightError>>,
    {
        self.exchange(R::FUNCTION, request).await.map_err(|error: Error| error.context(R::NAME))
    }

    /// Begins to import a revision of weights. The caller then puts the objects into the group that
    /// the record names.
    pub async fn begin_weight_import(
        &self,
        tenant: &str,
        import: WeightImport,
    ) -> WeightResult<WeightRevision> {
        self.call_of_weights(BeginWeightImport { import, tenant }).await
    }

    /// Completes an import.
    pub async fn commit_weight_import(
        &self,
        tenant: &str,
        commit: WeightCommit,
    ) -> WeightResult<WeightRevision> {
        self.call_of_weights(CommitWeightImport { commit, tenant }).await
    }

    /// Cancels an import and removes its objects.
    pub async fn abort_weight_import(
        &self,
        tenant: &str,
        change: WeightChange,
    ) -> WeightResult<WeightRevision> {
        self.call_of_weights(AbortWeightImport { change, tenant }).await
    }

    /// Returns the record of a revision, and its leases.
    pub async fn weight_revision(&self, tenant: &str, id: WeightId) -> WeightResult<WeightView> {
        self.call_of_weights(GetWeightRevision { query: WeightQuery { id }, tenant }).await
    }

    /// Returns some revisions of a resource.
    pub async fn weight_revisions(&self, tenant: &str, list: WeightList) -> WeightResult<WeightPage> {
        self.call_of_weights(ListWeightRevisions { list, tenant }).await
    }

    /// Grants a lease on a revision.
    pub async fn lease_weights(
        &self,
        tenant: &str,
        request: WeightLeaseRequest,
    ) -> WeightResult<WeightLease> {
        self.call_of_weights(AcquireWeightRevisionLease { request, tenant }).await
    }

    /// Extends a lease on a revision.
    pub async fn renew_weight_lease(
        &self,
        tenant: &str,
        renewal: WeightLeaseRenewal,
    ) -> WeightResult<WeightLease> {
        self.call_of_weights(RenewWeightRevisionLease { renewal, tenant }).await
    }

    /// Ends a lease on a revision.
    pub async fn release_weight_lease(&self, tenant: &str, release: WeightLeaseRelease) -> WeightResult<()> {
        self.call_of_weights(ReleaseWeightRevisionLease { release, tenant }).await
    }

    /// Removes the objects of a revision.
    pub async fn delete_weights(&self, tenant: &str, change: WeightChange) -> WeightResult<WeightRevision> {
        self.call_of_weights(DeleteWeightRevision { change, tenant }).await
    }

    /// Begins to move the objects of a revision between memory and disk.
    pub async fn start_weight_move(
        &self,
        tenant: &str,
        movement: WeightMoveRequest,
    ) -> WeightResult<WeightOperation> {
        self.call_of_weights(StartWeightResidencyOperation { movement, tenant }).await
    }

    /// Returns the state of a move.
    pub async fn weight_move(
        &self,
        tenant: &str,
        operation: WeightOperationQuery,
    ) -> WeightResult<WeightOperation> {
        self.call_of_weights(QueryWeightOperation { operation, tenant }).await
    }
}
