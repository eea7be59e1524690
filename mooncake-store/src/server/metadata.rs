//! The transfer engine's metadata over HTTP, as the existing master serves it. Keys are decoded, so that the escaped and the raw
//! form of a key name the same entry.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, RawQuery, State as Shared};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mooncake_core::ErrorKind;
use mooncake_core::meta::{Expect, MetadataBackend};

use super::admin::{nothing_here, parameter};

type Backend = Arc<dyn MetadataBackend>;

/// Largest value taken, in bytes; a descriptor of thousands of buffers is far below.
const MAX_VALUE: usize = 16 << 20;

pub(super) fn pages(backend: Backend) -> Router {
    Router::new()
        .route("/metadata", get(read).put(write).delete(remove))
        .route("/health", get(async || "OK"))
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
        .layer(DefaultBodyLimit::max(MAX_VALUE))
        .with_state(backend)
}

async fn read(Shared(backend): Shared<Backend>, RawQuery(query): RawQuery) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    match backend.get(&key).await {
        Ok(Some(found)) => ([(header::CONTENT_TYPE, "application/json")], found.value).into_response(),
        Ok(None) => (StatusCode::NOT_FOUND, "metadata not found").into_response(),
        Err(error) => failed(&error),
    }
}

async fn write(Shared(backend): Shared<Backend>, RawQuery(query): RawQuery, body: Bytes) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    // Two nodes must not answer to one name: the first to say where it is reached keeps it.
    let unique = key.contains("rpc_meta");
    let expect = if unique { Expect::Absent } else { Expect::Any };
    match backend.put(&key, body.clone(), expect).await {
        Ok(_) => "metadata updated".into_response(),
        Err(error) if unique && error.kind() == ErrorKind::AlreadyExists => match backend.get(&key).await {
            Ok(Some(same)) if same.value == body => "metadata unchanged".into_response(),
            Ok(_) => (StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed").into_response(),
            Err(error) => failed(&error),
        },
        Err(error) => failed(&error),
    }
}

async fn remove(Shared(backend): Shared<Backend>, RawQuery(query): RawQuery) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    match backend.delete(&key).await {
        Ok(true) => "metadata deleted".into_response(),
        Ok(false) => (StatusCode::NOT_FOUND, "metadata not found").into_response(),
        Err(error) => failed(&error),
    }
}

#[allow(clippy::result_large_err, reason = "the refusal is the response")]
fn key(query: Option<String>) -> Result<String, Response> {
    let refuse = |why: &'static str| (StatusCode::BAD_REQUEST, why).into_response();
    match parameter(query.as_deref(), "key") {
        None => Err(refuse("Missing key parameter")),
        Some(key) if key.is_empty() => Err(refuse("Missing key parameter")),
        Some(key) => String::from_utf8(key).map_err(|_| refuse("The key is not UTF-8")),
    }
}

fn failed(error: &mooncake_core::Error) -> Response {
    tracing::warn!(%error, "metadata request failed");
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}
