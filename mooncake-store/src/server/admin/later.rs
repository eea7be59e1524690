//! Tenants: not built. What is asked is checked as the existing master checks it, and answered as it answers where they are off.

use axum::body::Bytes;
use axum::extract::RawQuery;
use axum::http::StatusCode;
use axum::response::Response;
use mooncake_core::ErrorCode;

use super::answers::{Failure, QuotaRequest};
use super::query::{form_text, raw};
use super::{bad_request, failure, read};

/// The quota of a tenant, or of all. There are no tenants: 409.
#[utoipa::path(
    get,
    path = "/api/v1/tenant_quotas",
    params(("tenant_id" = Option<String>, Query, description = "Which tenant; all, if absent")),
    responses((status = 400, body = Failure), (status = 409, body = Failure))
)]
pub(super) async fn quotas(RawQuery(query): RawQuery) -> Response {
    match raw(query.as_deref(), "tenant_id") {
        None | Some("") => off(),
        Some(_) if tenant(query.as_deref()).is_some() => off(),
        Some(_) => bad_request("Invalid tenant_id"),
    }
}

/// Sets the quota of a tenant. There are no tenants: 409.
#[utoipa::path(
    put,
    path = "/api/v1/tenant_quotas",
    params(("tenant_id" = String, Query, description = "Which tenant")),
    request_body = QuotaRequest,
    responses((status = 400, body = Failure), (status = 409, body = Failure))
)]
pub(super) async fn set_quota(RawQuery(query): RawQuery, body: Bytes) -> Response {
    if tenant(query.as_deref()).is_none() {
        return bad_request("Missing or invalid tenant_id");
    }
    let request: QuotaRequest = match read(&body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    if i64::try_from(request.requested_quota_bytes).map_or(true, |bytes| bytes == 0) {
        return bad_request("Tenant quota must be in [1, 2^63 - 1] bytes");
    }
    off()
}

/// Removes the quota of a tenant. There are no tenants: 409.
#[utoipa::path(
    delete,
    path = "/api/v1/tenant_quotas",
    params(("tenant_id" = String, Query, description = "Which tenant")),
    responses((status = 400, body = Failure), (status = 409, body = Failure))
)]
pub(super) async fn remove_quota(RawQuery(query): RawQuery) -> Response {
    if tenant(query.as_deref()).is_none() {
        return bad_request("Missing or invalid tenant_id");
    }
    off()
}

/// The tenant that is asked about, if that can be one.
fn tenant(query: Option<&str>) -> Option<String> {
    form_text(query, "tenant_id")
        .filter(|tenant| !tenant.starts_with('_') && !tenant.chars().any(char::is_control))
}

fn off() -> Response {
    failure(StatusCode::CONFLICT, ErrorCode::UnavailableInCurrentMode)
}
