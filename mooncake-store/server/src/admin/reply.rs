//! Responses of the admin endpoints: JSON, plain text and failures.

use std::sync::Arc;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use mooncake_core::{Error, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::answers::Failure;
use crate::state::State;
use mooncake_protocol::http::JSON;

/// Media type of the metrics.
pub(super) const TEXT: &str = "text/plain; version=0.0.4";

/// Extractor of the state of the master.
pub(super) type Shared = axum::extract::State<Arc<State>>;

pub(super) fn page(body: &impl Serialize) -> Response {
    answer(StatusCode::OK, body)
}

pub(super) fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], body).into_response()
}

pub(super) fn text_failure(status: StatusCode, body: &'static str) -> Response {
    (status, [(header::CONTENT_TYPE, TEXT)], body).into_response()
}

pub(super) fn answer(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, JSON)], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// A JSON object, or why the body is none.
pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Box<Response>> {
    // By way of a map: a list would pass for an object otherwise.
    let object = serde_json::from_slice::<serde_json::Map<_, _>>(body);
    let request = object.and_then(|object| serde_json::from_value(object.into()));
    request.map_err(|error| Box::new(bad_request(&format!("Invalid JSON body: {error}"))))
}

/// A failure that is told by its name alone.
pub(super) fn failure(status: StatusCode, code: ErrorCode) -> Response {
    refusal(status, code, code.name())
}

/// A failure with a sentence.
pub(super) fn refusal(status: StatusCode, code: ErrorCode, message: &str) -> Response {
    let body = Failure { success: false, error_code: code.number(), error_message: message.to_owned() };
    answer(status, &body)
}

pub(super) fn bad_request(message: &str) -> Response {
    refusal(StatusCode::BAD_REQUEST, ErrorCode::InvalidParams, message)
}

/// The status that goes with an error, as the existing master chooses it.
pub(super) fn status_of(error: &Error) -> StatusCode {
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
