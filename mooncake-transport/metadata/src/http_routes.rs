//! Metadata directory served over HTTP, as Mooncake C++ masters and metadata servers do. Keys are
//! decoded, so that the escaped and the raw form of a key name the same entry.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{RawQuery, Request, State as Extract};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use mooncake_core::meta::{Expect, MemoryLimits, MetadataBackend};
use mooncake_core::settings::Setting;
use mooncake_core::settings::values::{Parsed, any, bytes_within, switch, within};
use mooncake_core::{Error, ErrorKind, Result, set, settings};
use mooncake_transport::bind_address::loopback_address;
use mooncake_transport::http_server::{BodyLimit, Content, Refusal, parameter};
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::token::HttpToken;

type Shared = Extract<Arc<State>>;

/// Information about the owner of a name, beside the results of the server's own probes.
pub trait Owners: Debug + Send + Sync + 'static {
    /// Returns whether the owner of this name is certainly dead, so that another process may take
    /// the name.
    fn is_dead(&self, name: &str) -> bool;

    /// Records that another process has this name now.
    fn taken(&self, name: &str);

    /// Records an entry that was refused because the directory is full.
    fn note_refused(&self) {}
}

/// No information about owners.
impl Owners for () {
    fn is_dead(&self, _name: &str) -> bool {
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
    pages_with(metadata, owners, &PageOptions::default())
}

/// Returns the routes as [`pages`] does, with options. `/health` needs no token.
pub fn pages_with(
    metadata: Arc<dyn MetadataBackend>,
    owners: Arc<dyn Owners>,
    options: &PageOptions,
) -> Router {
    let mut entries = get(read).put(write).delete(remove);
    if let Some(count) = options.concurrent_puts {
        let permits = Arc::new(Semaphore::new(count.clamp(1, Semaphore::MAX_PERMITS)));
        entries = entries.layer(from_fn_with_state(permits, limit_puts));
    }
    if !options.token.is_empty() {
        entries = entries.layer(from_fn_with_state(options.token.clone(), authorize));
    }
    Router::new()
        .route("/metadata", entries)
        .route("/health", get(async || "OK"))
        .layer(Extension(BodyLimit {
            bytes: options.max_value,
            remedy: "publish fewer buffers, or raise MC_METADATA_MAX_BODY_BYTES of a server of its own",
        }))
        .with_state(Arc::new(State { metadata, owners }))
}

/// Options of the routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageOptions {
    /// Token that each request for an entry must have (none).
    pub token: HttpToken,
    /// Maximum length of a value in bytes (16 MiB).
    pub max_value: usize,
    /// Maximum number of `PUT` requests in progress (no limit). Others wait.
    pub concurrent_puts: Option<usize>,
}

impl Default for PageOptions {
    fn default() -> Self {
        Self { token: HttpToken::default(), max_value: MAX_VALUE, concurrent_puts: None }
    }
}

/// Settings of a metadata server that is a program of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// Options of the routes.
    pub pages: PageOptions,
    /// Limits of the entries.
    pub limits: MemoryLimits,
    /// True if a server without a token may listen at addresses that other hosts reach (false).
    pub allow_insecure: bool,
}

impl Default for ServerSettings {
    fn default() -> Self {
        Self { pages: PageOptions::default(), limits: MemoryLimits::SERVER, allow_insecure: false }
    }
}

impl ServerSettings {
    /// Checks that a server may listen at a host.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a host that is not loopback, without a token and without
    /// [`allow_insecure`](Self::allow_insecure); and for a token that no header can carry.
    pub fn check(&self, host: &str) -> Result<()> {
        self.pages.token.check()?;
        if !self.pages.token.is_empty() || self.allow_insecure || loopback_address(host).is_some() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the metadata server refuses to bind {host}: other hosts could read and change every \
             entry; set a token in MC_METADATA_HTTP_TOKEN, listen at --host=127.0.0.1, or set \
             MC_METADATA_HTTP_ALLOW_INSECURE=1"
        )))
    }
}

/// Every variable of a metadata server that is a program of its own.
pub const VARIABLES: &[Setting<ServerSettings>] = settings! {
    /// Token that requests for entries must have, as `Authorization: Bearer <token>`
    MC_METADATA_HTTP_TOKEN: "" => set!(pages.token = any),
    /// Listen without a token at addresses that other hosts reach
    MC_METADATA_HTTP_ALLOW_INSECURE: "" => set!(allow_insecure = switch),
    /// Maximum number of entries
    MC_METADATA_MAX_KEYS: "262144" => set!(limits.entries = positive),
    /// Maximum number of bytes of all keys and values
    MC_METADATA_MAX_TOTAL_BYTES: "1073741824" => set!(limits.bytes = size),
    /// Maximum number of bytes of a value
    MC_METADATA_MAX_BODY_BYTES: "16777216" => set!(pages.max_value = size),
    /// Maximum number of values that are received at once; others wait; no limit without it
    MC_METADATA_MAX_CONCURRENT_PUTS: ""
        => set!(|server, text| server.pages.concurrent_puts = Some(positive(text)?)),
};

fn positive(text: &str) -> Parsed<usize> {
    within(text, 1, usize::MAX)
}

fn size(text: &str) -> Parsed<usize> {
    bytes_within(text, 1, usize::MAX)
}

/// Refuses a request without the token, before its key is examined.
async fn authorize(Extract(token): Extract<HttpToken>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    if token.accepts(given) {
        return next.run(request).await;
    }
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "unauthorized").into_response()
}

/// Lets a `PUT` request wait until fewer are in progress.
async fn limit_puts(Extract(permits): Extract<Arc<Semaphore>>, request: Request, next: Next) -> Response {
    let is_put = request.method() == Method::PUT;
    // The semaphore is never closed.
    let _permit = if is_put { permits.acquire().await.ok() } else { None };
    next.run(request).await
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

async fn write(
    Extract(state): Shared,
    RawQuery(query): RawQuery,
    body: Result<Content, Refusal>,
) -> Response {
    let key = match key(query) {
        Ok(key) => key,
        Err(refusal) => return refusal,
    };
    let Content(body) = match body {
        Ok(body) => body,
        Err(refused) => return refused.into_response(),
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
    if !state.owners.is_dead(name) && !same_process_again(&found.value, &value).await {
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
