//! Metadata directory served over HTTP, as Mooncake C++ masters and metadata servers do. Keys are
//! decoded, so that the escaped and the raw form of a key name the same entry.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, RawQuery, State as Extract};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::{ErrorKind, Result};
use mooncake_transport::http_server::parameter;
use serde::Deserialize;
use tokio::net::TcpStream;

type Shared = Extract<Arc<State>>;

/// Information about the owner of a name, beside the results of the server's own probes.
pub trait Owners: Debug + Send + Sync + 'static {
    /// Returns whether the owner of this name is certainly dead, so that another process may take
    /// the name.
    fn is_gone(&self, name: &str) -> bool;

    /// Records that another process has this name now.
    fn taken(&self, name: &str);

    /// Records an entry that was refused because the directory is full.
    fn note_refused(&self) {}
}

/// No information about owners.
impl Owners for () {
    fn is_gone(&self, _name: &str) -> bool {
        false
    }

    fn taken(&self, _name: &str) {}
}

#[derive(Debug)]
struct State {
    metadata: Arc<dyn MetadataBackend>,
    owners: Arc<dyn Owners>,
}

/// Maximum length of an accepted value, in bytes. A descriptor of thousands of buffers is much
/// shorter.
const MAX_VALUE: usize = 16 << 20;

/// Timeout of the probe of a port.
const PROBE: Duration = Duration::from_millis(500);

/// Returns the routes: `GET`, `PUT` and `DELETE` of `/metadata?key=..`, and `GET` of `/health`.
pub fn pages(metadata: Arc<dyn MetadataBackend>, owners: Arc<dyn Owners>) -> Router {
    Router::new()
        .route("/metadata", get(read).put(write).delete(remove))
        .route("/health", get(async || "OK"))
        .layer(DefaultBodyLimit::max(MAX_VALUE))
        .with_state(Arc::new(State { metadata, owners }))
}

async fn read(Extract(state): Shared, RawQuery(query): RawQuery) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    match state.metadata.get(&key).await {
        Ok(Some(found)) => ([(header::CONTENT_TYPE, "application/json")], found.value).into_response(),
        Ok(None) => (StatusCode::NOT_FOUND, "metadata not found").into_response(),
        Err(error) => failed(&error),
    }
}

async fn write(Extract(state): Shared, RawQuery(query): RawQuery, body: Bytes) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    match put(&state, &key, body).await {
        Ok(said) => said.into_response(),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            (StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed").into_response()
        }
        Err(error) if error.kind() == ErrorKind::NoSpace => {
            state.owners.note_refused();
            tracing::warn!(%error, "metadata entry refused");
            (StatusCode::INSUFFICIENT_STORAGE, error.to_string()).into_response()
        }
        Err(error) => failed(&error),
    }
}

/// Sets an entry. Two nodes must not have one name: the first one to publish its address keeps the
/// name as long as it lives.
async fn put(state: &State, key: &str, value: Bytes) -> Result<&'static str> {
    const UPDATED: &str = "metadata updated";
    let Some((_, name)) = key.split_once("rpc_meta") else {
        return state.metadata.put(key, value, Expect::Any).await.map(|_| UPDATED);
    };
    let refused = match state.metadata.put(key, value.clone(), Expect::Absent).await {
        Err(refused) if refused.kind() == ErrorKind::AlreadyExists => refused,
        done => return done.map(|_| UPDATED),
    };
    let name = name.trim_start_matches('/');
    let Some(found) = state.metadata.get(key).await? else { return Err(refused) };
    if found.value == value {
        return Ok("metadata unchanged");
    }
    if !state.owners.is_gone(name) && !same_process_again(&found.value, &value).await {
        return Err(refused);
    }
    // Exactly one of several candidates succeeds.
    state.metadata.put(key, value, Expect::At(found.revision)).await?;
    state.owners.taken(name);
    tracing::info!(key, "name of a dead process taken over");
    Ok(UPDATED)
}

/// Address of a process, as far as it matters here.
#[derive(Deserialize)]
struct RpcMeta {
    ip_or_host_name: String,
    rpc_port: u16,
}

/// Returns whether the new entry has the host of the old one, and the process of the old one has
/// ended: no process listens at its port. A silent process of another host is never presumed dead,
/// because the host may return.
async fn same_process_again(old: &[u8], new: &[u8]) -> bool {
    let read = |value| serde_json::from_slice::<RpcMeta>(value).ok();
    let (Some(old), Some(new)) = (read(old), read(new)) else { return false };
    if old.ip_or_host_name != new.ip_or_host_name {
        return false;
    }
    let connect = TcpStream::connect((old.ip_or_host_name.as_str(), old.rpc_port));
    match tokio::time::timeout(PROBE, connect).await {
        Ok(Err(error)) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        Ok(Ok(_)) | Err(_) => false,
    }
}

async fn remove(Extract(state): Shared, RawQuery(query): RawQuery) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    match state.metadata.delete(&key).await {
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
