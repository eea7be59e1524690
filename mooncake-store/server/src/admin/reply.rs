//! Responses of the admin endpoints: JSON, plain text and failures.

use std::sync::Arc;

use axum::body::Body;
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

pub(super) fn text_stream(body: Body) -> Response {
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

/// Parses the body as a JSON object, or returns the response that describes the error.
pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Box<Response>> {
    // Parse a map first: serde would also accept a list as a struct.
    let object = serde_json::from_slice::<serde_json::Map<_, _>>(body);
    let request = object.and_then(|object| serde_json::from_value(object.into()));
    request.map_err(|error| Box::new(bad_request(&format!("Invalid JSON body: {error}"))))
}

/// Returns a failure whose message is the name of the error.
pub(super) fn failure(status: StatusCode, code: ErrorCode) -> Response {
    refusal(status, code, code.name())
}

/// Returns a failure with a message.
pub(super) fn refusal(status: StatusCode, code: ErrorCode, message: &str) -> Response {
    let body = Failure { success: false, error_code: code.number(), error_message: message.to_owned() };
    answer(status, &body)
}

pub(super) fn bad_request(message: &str) -> Response {
    refusal(StatusCode::BAD_REQUEST, ErrorCode::InvalidParams, message)
}

/// Returns the HTTP status of an error, as in Mooncake C++.
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
