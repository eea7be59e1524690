//! Drain jobs: move all objects out of segments, so that their owners can leave.

use axum::extract::{RawQuery, State};
use axum::response::Response;
use mooncake_core::Error;
use mooncake_core::ids::Uuid;

use super::answers::{DrainChanged, DrainJob, DrainRequest, Failure};
use super::query::form_text;
use super::reply::{Shared, bad_request, failure, page, read, status_of};
use mooncake_master::DrainStatus;
use mooncake_transport::http_server::Content;

/// Drains segments: moves their objects without an interruption for readers.
///
/// The segments take no new objects from now on. Objects move to the targets, or to the segments
/// with the most free space. When no object is left, the segments are DRAINED, and unmounting them
/// loses nothing.
#[utoipa::path(
    post,
    path = "/api/v1/drain_jobs",
    request_body = DrainRequest,
    responses(
        (status = 200, body = DrainChanged),
        (status = 400, body = Failure, description = "Invalid request"),
        (status = 404, body = Failure, description = "Unknown segment"),
        (status = 409, body = Failure, description = "A segment is not in state OK")
    )
)]
pub(super) async fn start(State(state): Shared, Content(body): Content) -> Response {
    let request: DrainRequest = match read(&body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    let started = state.master.drain_start(&mooncake_master::DrainRequest {
        segments: &request.segments,
        targets: &request.target_segments,
        max_concurrency: request.max_concurrency,
    });
    changed(started, "CREATED")
}

/// Returns the progress of a drain job.
#[utoipa::path(
    get,
    path = "/api/v1/drain_jobs/query",
    params(("job_id" = String, Query, description = "Id of the job: two decimal numbers joined by `-`")),
    responses((status = 200, body = DrainJob), (status = 400, body = Failure), (status = 404, body = Failure))
)]
pub(super) async fn query(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Some(id) = job_id(query.as_deref()) else { return bad_request(NO_ID) };
    match state.master.drain(id) {
        Err(error) => refused(&error),
        Ok(job) => page(&DrainJob {
            success: true,
            job_id: job.id.to_string(),
            kind: 0,
            type_name: "DRAIN",
            status: job.status as i32,
            status_name: status_name(job.status),
            created_at_ms_epoch: job.created_ms,
            last_updated_at_ms_epoch: job.updated_ms,
            segments: job.segments,
            succeeded_units: job.succeeded,
            failed_units: job.failed,
            blocked_units: job.blocked,
            active_units: job.active,
            migrated_bytes: job.migrated_bytes,
            message: job.message,
            error_code: 0,
            error_message: "",
        }),
    }
}

/// Cancels a drain job, unless objects are moving at the moment. The job then begins no new moves
/// for ten seconds, so that a repeated request succeeds.
#[utoipa::path(
    post,
    path = "/api/v1/drain_jobs/cancel",
    params(("job_id" = String, Query, description = "Id of the job: two decimal numbers joined by `-`")),
    responses(
        (status = 200, body = DrainChanged),
        (status = 400, body = Failure),
        (status = 404, body = Failure),
        (status = 409, body = Failure, description = "The job has ended, or moves are in progress")
    )
)]
pub(super) async fn cancel(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Some(id) = job_id(query.as_deref()) else { return bad_request(NO_ID) };
    changed(state.master.drain_cancel(id).map(|()| id), "CANCELED")
}

const NO_ID: &str = "Missing or invalid job_id";

fn job_id(query: Option<&str>) -> Option<Uuid> {
    form_text(query, "job_id")?.parse().ok()
}

fn changed(outcome: Result<Uuid, Error>, status: &'static str) -> Response {
    match outcome {
        Ok(id) => page(&DrainChanged {
            success: true,
            job_id: id.to_string(),
            status,
            error_code: 0,
            error_message: "",
        }),
        Err(error) => refused(&error),
    }
}

fn refused(error: &Error) -> Response {
    failure(status_of(error), error.code())
}

fn status_name(status: DrainStatus) -> &'static str {
    match status {
        DrainStatus::Created => "CREATED",
        DrainStatus::Planning => "PLANNING",
        DrainStatus::Running => "RUNNING",
        DrainStatus::Succeeded => "SUCCEEDED",
        DrainStatus::Failed => "FAILED",
        DrainStatus::Canceled => "CANCELED",
    }
}
