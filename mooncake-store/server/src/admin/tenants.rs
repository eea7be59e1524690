//! Tenants: quotas and their use.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use mooncake_core::{Error, ErrorCode, Result};

use super::answers::{Failure, Quota, QuotaData, QuotaRequest, Quotas};
use super::query::{form_text, raw};
use super::reply::{Shared, bad_request, failure, page, read, status_of};
use crate::state::State as ServerState;
use mooncake_master::{TenantInfo, TenantQuota, is_tenant};
use mooncake_transport::http_server::Content;

/// Returns the quota of a tenant or of all tenants, and its use.
#[utoipa::path(
    get,
    path = "/api/v1/tenant_quotas",
    params(("tenant_id" = Option<String>, Query, description = "Name of the tenant; all tenants if absent")),
    responses(
        (status = 200, body = Quotas),
        (status = 400, body = Failure),
        (status = 404, body = Failure, description = "The tenant is not registered"),
        (status = 409, body = Failure, description = "This master has no tenants")
    )
)]
pub(super) async fn quotas(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    if matches!(raw(query.as_deref(), "tenant_id"), None | Some("")) {
        if state.master.options().tenants.is_none() {
            return failure(StatusCode::CONFLICT, ErrorCode::UnavailableInCurrentMode);
        }
        let data = state.master.tenants().iter().map(quota).collect();
        return page(&Quotas { success: true, data: QuotaData::Many(data) });
    }
    match tenant(query.as_deref()) {
        Some(name) => one(state.master.tenant(&name).map(Some)),
        None => bad_request("Invalid tenant_id"),
    }
}

/// Registers a tenant or sets its quota. The change is written to the source of the policy.
#[utoipa::path(
    put,
    path = "/api/v1/tenant_quotas",
    params(("tenant_id" = String, Query, description = "Name of the tenant")),
    request_body = QuotaRequest,
    responses(
        (status = 200, body = Quotas),
        (status = 400, body = Failure),
        (status = 409, body = Failure, description = "This master has no tenants"),
        (status = 500, body = Failure, description = "The policy could not be written; nothing has changed")
    )
)]
pub(super) async fn set_quota(
    State(state): Shared,
    RawQuery(query): RawQuery,
    Content(body): Content,
) -> Response {
    let Some(name) = tenant(query.as_deref()) else { return bad_request(NO_TENANT) };
    let request: QuotaRequest = match read(&body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    let quota = TenantQuota { name, bytes: request.requested_quota_bytes };
    if quota.check().is_err() {
        return bad_request("Tenant quota must be in [1, 2^63 - 1] bytes");
    }
    change(state, move |state| {
        let before = state.master.tenant(&quota.name).ok();
        let set = state.master.set_tenant(&quota)?;
        keep(state).inspect_err(|_| {
            // Undo the change.
            let _ = match before {
                Some(before) => {
                    let before = TenantQuota { name: before.name, bytes: before.requested };
                    state.master.set_tenant(&before).map(drop)
                }
                None => state.master.remove_tenant(&quota.name),
            };
        })?;
        Ok(Some(set))
    })
    .await
}

/// Removes a tenant without objects. The change is written to the source of the policy.
#[utoipa::path(
    delete,
    path = "/api/v1/tenant_quotas",
    params(("tenant_id" = String, Query, description = "Name of the tenant")),
    responses(
        (status = 200, body = Quotas),
        (status = 400, body = Failure),
        (status = 404, body = Failure, description = "The tenant is not registered"),
        (status = 409, body = Failure, description = "The tenant has objects, or this master has no tenants"),
        (status = 500, body = Failure, description = "The policy could not be written; nothing has changed")
    )
)]
pub(super) async fn remove_quota(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Some(name) = tenant(query.as_deref()) else { return bad_request(NO_TENANT) };
    change(state, move |state| {
        let before = state.master.tenant(&name)?;
        state.master.remove_tenant(&name)?;
        keep(state).inspect_err(|_| {
            let _ = state.master.set_tenant(&TenantQuota { name: before.name, bytes: before.requested });
        })?;
        Ok(None)
    })
    .await
}

const NO_TENANT: &str = "Missing or invalid tenant_id";

/// Runs a change outside of the connections' threads, one at a time.
async fn change(
    state: Arc<ServerState>,
    make: impl FnOnce(&ServerState) -> Result<Option<TenantInfo>> + Send + 'static,
) -> Response {
    let made = tokio::task::spawn_blocking(move || {
        let _one = state.endpoints.policy_changes.lock();
        make(&state)
    });
    one(made.await.unwrap_or_else(|_| Err(ErrorCode::InternalError.into())))
}

/// Writes the tenants to the source of the policy. The response contains only the error code, so
/// the log contains the reason.
fn keep(state: &ServerState) -> Result<()> {
    let Some(policy) = &state.endpoints.policy else { return Ok(()) };
    policy.write(&state.master.tenants()).inspect_err(|error| tracing::warn!("{error}"))
}

fn one(outcome: Result<Option<TenantInfo>, Error>) -> Response {
    match outcome {
        Ok(info) => page(&Quotas { success: true, data: QuotaData::One(info.as_ref().map(quota)) }),
        Err(error) => failure(status_of(&error), error.code()),
    }
}

fn quota(info: &TenantInfo) -> Quota {
    Quota {
        tenant_id: info.name.clone(),
        requested_quota_bytes: info.requested,
        effective_quota_bytes: info.effective,
        charged_bytes: info.charged,
        admission_closed: false,
        over_quota: info.charged > info.effective,
        has_explicit_policy: true,
    }
}

/// Returns the requested tenant, if its name is valid.
fn tenant(query: Option<&str>) -> Option<String> {
    form_text(query, "tenant_id").filter(|tenant| is_tenant(tenant))
}
