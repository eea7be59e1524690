//! Drain jobs, tenants and events: not built. What is asked is checked as the existing master checks it, and answered as it
//! answers where these are off.

use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use mooncake_core::ErrorCode;
use mooncake_core::ids::Uuid;
use serde::de::DeserializeOwned;

use super::answers::{DrainRequest, Events, Failure, QuotaRequest};
use super::query::{form_text, raw};
use super::{Shared, bad_request, failure, page, status_of};

/// Publishing of events: there is none.
#[utoipa::path(get, path = "/kv_events/status", responses((status = 200, body = Events)))]
pub(super) async fn events() -> Response {
    page(&Events {
        enabled: false,
        published_batches: 0,
        published_events: 0,
        dropped_events: 0,
        skipped_unparsed_keys: 0,
    })
}

/// Empties segments, object by object. Not built: what is asked for rightly is refused with 409.
#[utoipa::path(
    post,
    path = "/api/v1/drain_jobs",
    request_body = DrainRequest,
    responses(
        (status = 400, body = Failure, description = "No such request"),
        (status = 404, body = Failure, description = "A segment is not known"),
        (status = 409, body = Failure, description = "Not possible in this mode")
    )
)]
pub(super) async fn drain(State(state): Shared, body: Bytes) -> Response {
    let request: DrainRequest = match read(&body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    let mut names = request.segments.clone();
    names.sort();
    names.dedup();
    if names.is_empty() || names.len() != request.segments.len() || request.max_concurrency == 0 {
        return failure(StatusCode::BAD_REQUEST, ErrorCode::InvalidParams);
    }
    for name in request.segments.iter().chain(&request.target_segments) {
        if let Err(error) = state.master.segment_status_named(name) {
            return failure(status_of(&error), error.code());
        }
    }
    off()
}

/// How a drain job is getting on. There are none.
#[utoipa::path(
    get,
    path = "/api/v1/drain_jobs/query",
    params(("job_id" = String, Query, description = "Its id, two decimal numbers joined by `-`")),
    responses((status = 400, body = Failure), (status = 404, body = Failure))
)]
pub(super) async fn drain_job(RawQuery(query): RawQuery) -> Response {
    job(query.as_deref())
}

/// Ends a drain job. There are none.
#[utoipa::path(
    post,
    path = "/api/v1/drain_jobs/cancel",
    params(("job_id" = String, Query, description = "Its id, two decimal numbers joined by `-`")),
    responses((status = 400, body = Failure), (status = 404, body = Failure))
)]
pub(super) async fn cancel_drain_job(RawQuery(query): RawQuery) -> Response {
    job(query.as_deref())
}

fn job(query: Option<&str>) -> Response {
    match form_text(query, "job_id").map(|id| id.parse::<Uuid>()) {
        Some(Ok(_)) => failure(StatusCode::NOT_FOUND, ErrorCode::JobNotFound),
        _ => bad_request("Missing or invalid job_id"),
    }
}

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

/// A JSON object, or why the body is none.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Box<Response>> {
    // By way of a map: a list would pass for an object otherwise.
    let object = serde_json::from_slice::<serde_json::Map<_, _>>(body);
    let request = object.and_then(|object| serde_json::from_value(object.into()));
    request.map_err(|error| Box::new(bad_request(&format!("Invalid JSON body: {error}"))))
}

fn off() -> Response {
    failure(StatusCode::CONFLICT, ErrorCode::UnavailableInCurrentMode)
}
