//! The admin pages of the master: paths, parameters, statuses and JSON of the existing one, described at `/openapi.json`.

mod answers;
mod cluster;
mod drain;
mod objects;
mod query;
mod segments;
mod tenants;

#[cfg(all(feature = "cli", feature = "metadata-etcd"))]
pub(super) use self::cluster::standby_pages;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mooncake_core::{Error, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::answers::Failure;
use super::State;
use mooncake_protocol::http::{JSON, nothing_here};

const TEXT: &str = "text/plain; version=0.0.4";

/// Largest body that is read, in bytes.
const MAX_BODY: usize = 1 << 20;

type Shared = axum::extract::State<Arc<State>>;

#[derive(OpenApi)]
#[openapi(info(
    title = "mooncake_master",
    description = "Admin pages of the master of a cluster. No authentication: whoever reaches the port may do all of it.",
))]
struct Description;

/// All pages, behind the paths that the description names.
pub(super) fn pages(state: Arc<State>) -> Router {
    let (router, description) = OpenApiRouter::<Arc<State>>::with_openapi(Description::openapi())
        .routes(routes!(cluster::health))
        .routes(routes!(cluster::role))
        .routes(routes!(cluster::ha_status))
        .routes(routes!(cluster::leader))
        .routes(routes!(cluster::metrics))
        .routes(routes!(cluster::figures))
        .routes(routes!(objects::query_key))
        .routes(routes!(objects::batch_query_keys))
        .routes(routes!(objects::all_keys))
        .routes(routes!(objects::remove_all))
        .routes(routes!(segments::all_segments))
        .routes(routes!(segments::segments_detail))
        .routes(routes!(segments::query_segment))
        .routes(routes!(segments::status))
        .routes(routes!(cluster::events))
        .routes(routes!(drain::start))
        .routes(routes!(drain::query))
        .routes(routes!(drain::cancel))
        .routes(routes!(tenants::quotas, tenants::set_quota, tenants::remove_quota))
        .split_for_parts();
    let description = description.to_json().unwrap_or_default();
    router
        .route("/openapi.json", get(async move || ([(header::CONTENT_TYPE, JSON)], description.clone())))
        // The existing master knows no other answer to a path or a method that it does not have.
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(state)
}

fn page(body: &impl Serialize) -> Response {
    answer(StatusCode::OK, body)
}

fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], body).into_response()
}

fn text_failure(status: StatusCode, body: &'static str) -> Response {
    (status, [(header::CONTENT_TYPE, TEXT)], body).into_response()
}

fn answer(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, JSON)], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// A JSON object, or why the body is none.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Box<Response>> {
    // By way of a map: a list would pass for an object otherwise.
    let object = serde_json::from_slice::<serde_json::Map<_, _>>(body);
    let request = object.and_then(|object| serde_json::from_value(object.into()));
    request.map_err(|error| Box::new(bad_request(&format!("Invalid JSON body: {error}"))))
}

/// A failure that is told by its name alone.
fn failure(status: StatusCode, code: ErrorCode) -> Response {
    refusal(status, code, code.name())
}

/// A failure with a sentence.
fn refusal(status: StatusCode, code: ErrorCode, message: &str) -> Response {
    let body = Failure { success: false, error_code: code.number(), error_message: message.to_owned() };
    answer(status, &body)
}

fn bad_request(message: &str) -> Response {
    refusal(StatusCode::BAD_REQUEST, ErrorCode::InvalidParams, message)
}

/// The status that goes with an error, as the existing master chooses it.
fn status_of(error: &Error) -> StatusCode {
    match error.code() {
        ErrorCode::InvalidParams => StatusCode::BAD_REQUEST,
        ErrorCode::SegmentNotFound | ErrorCode::JobNotFound | ErrorCode::ObjectNotFound => {
            StatusCode::NOT_FOUND
        }
        ErrorCode::UnavailableInCurrentMode
        | ErrorCode::UnavailableInCurrentStatus
        | ErrorCode::TenantNotEmpty => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
