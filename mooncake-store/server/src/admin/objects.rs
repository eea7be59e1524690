//! Objects: location, list and removal.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use mooncake_core::ErrorCode;
use mooncake_core::settings::values::switch;

use super::answers::{Explained, Failure, Found, MemoryReplica, Removed};
use super::query::{decoded, form_bytes, form_text, raw};
use super::reply::{Shared, bad_request, failure, page, text, text_failure, text_stream};
use crate::state::State as MasterState;
use mooncake_master::MissCause;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_transport::http_server::Turns;

/// Returns the replicas of an object in memory.
///
/// The request grants no lease and counts as no read, so it does not affect eviction. The key is
/// used as sent, and percent-decoded if no such object exists.
#[utoipa::path(
    get,
    path = "/query_key",
    params(
        ("key" = String, Query, description = "Key of the object"),
        ("tenant_id" = Option<String>, Query, description = "Tenant; `default` if absent")
    ),
    responses((status = 200, body = Found), (status = 404, body = Failure))
)]
pub(super) async fn query_key(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Some(key) = raw(query.as_deref(), "key") else {
        return failure(StatusCode::NOT_FOUND, ErrorCode::ObjectNotFound);
    };
    let tenant = tenant(query.as_deref());
    let peek = |key: &[u8]| state.master.peek(&state.master.scoped(&tenant, key)?);
    let found = peek(key.as_bytes()).or_else(|absent| {
        let decoded = decoded(key);
        if decoded == key.as_bytes() { Err(absent) } else { peek(&decoded) }
    });
    match found {
        Ok(replicas) => {
            page(&Found { success: true, data: replicas.iter().filter_map(MemoryReplica::of).collect() })
        }
        Err(_) => failure(StatusCode::NOT_FOUND, ErrorCode::ObjectNotFound),
    }
}

pub(super) fn tenant(query: Option<&str>) -> String {
    form_text(query, "tenant_id").unwrap_or_else(|| DEFAULT_TENANT.to_owned())
}

/// Returns whether an object can be read, and why not.
///
/// The request grants no lease and counts neither as a read nor as a miss. Mooncake C++ lacks this
/// endpoint.
#[utoipa::path(
    get,
    path = "/api/v1/explain",
    params(
        ("key" = String, Query, description = "Key of the object"),
        ("tenant_id" = Option<String>, Query, description = "Tenant; `default` if absent")
    ),
    responses((status = 200, body = Explained))
)]
pub(super) async fn explain(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let tenant = tenant(query.as_deref());
    let key = form_bytes(raw(query.as_deref(), "key").unwrap_or_default());
    let scoped = state.master.scoped(&tenant, &key);
    // A tenant that is not registered has no objects.
    let cause = scoped.as_ref().map_or(Some(MissCause::Unknown), |key| state.master.why_missing(key));
    let lease = scoped.ok().and_then(|key| state.master.leased_for(&key)).unwrap_or_default();
    page(&Explained {
        success: true,
        readable: cause.is_none(),
        cause: cause.map(MissCause::name),
        explanation: cause.map(MissCause::meaning),
        lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
    })
}

/// Returns every readable key, one per line. Invalid UTF-8 is replaced.
#[utoipa::path(
    get,
    path = "/get_all_keys",
    params(("tenant_id" = Option<String>, Query, description = "Tenant; `default` if absent")),
    responses((status = 200, body = String, content_type = "text/plain"), (status = 500, body = String, content_type = "text/plain"))
)]
pub(super) async fn all_keys(
    State(state): Shared,
    RawQuery(query): RawQuery,
    Extension(turns): Extension<Turns>,
) -> Response {
    let list = KeyList { state, tenant: tenant(query.as_deref()), turns };
    let (first, next) = match list.page(0).await {
        Ok(page) => page,
        Err(_) => return text_failure(StatusCode::INTERNAL_SERVER_ERROR, "Failed to get all keys"),
    };
    let Some(next) = next else { return text(first) };
    // The next page is made once the peer has read the earlier ones.
    let rest = futures::stream::try_unfold(Some(next), move |position| {
        let list = list.clone();
        async move {
            let Some(position) = position else { return Ok(None) };
            list.page(position).await.map(Some)
        }
    });
    let first = futures::stream::once(async { Ok::<_, std::io::Error>(first) });
    text_stream(Body::from_stream(futures::StreamExt::chain(first, rest)))
}

/// Length of a page of keys in bytes.
const KEYS_PAGE: usize = 256 << 10;

/// List of the keys of a tenant, by pages.
#[derive(Clone)]
struct KeyList {
    state: Arc<MasterState>,
    tenant: String,
    turns: Turns,
}

impl KeyList {
    /// Returns the lines of the keys from a position on, and the position of the next page.
    async fn page(&self, position: u64) -> std::io::Result<(String, Option<u64>)> {
        let Self { state, tenant, turns } = self.clone();
        let stopped = || std::io::Error::other("this master stops");
        let permit = turns.acquire(&self.state.long_calls.lists).await.ok_or_else(stopped)?;
        // A pass over many objects must not block the connections of a worker.
        let listed = tokio::task::spawn_blocking(move || {
            let mut lines = String::new();
            let next = state.master.list_keys(&tenant, position, KEYS_PAGE, |key| {
                lines.push_str(&String::from_utf8_lossy(key));
                lines.push('\n');
            });
            // A peer that closes its connection does not end the pass.
            drop(permit);
            (lines, next)
        });
        let page = listed.await.map_err(std::io::Error::other)?;
        match self.state.leadership.leads() {
            true => Ok(page),
            false => Err(std::io::Error::other("this master does not lead any more")),
        }
    }
}

/// Removes every object that is not in use.
#[utoipa::path(
    post,
    path = "/api/v1/remove_all",
    params(
        ("force" = Option<String>, Query, description = "`true` to remove objects with a lease, too"),
        ("tenant_id" = Option<String>, Query, description = "Tenant; all tenants if absent")
    ),
    responses((status = 200, body = Removed), (status = 400, body = Failure), (status = 500, body = Failure))
)]
pub(super) async fn remove_all(
    State(state): Shared,
    RawQuery(query): RawQuery,
    Extension(turns): Extension<Turns>,
) -> Response {
    let force = match form_text(query.as_deref(), "force").map(|text| (switch(&text), text)) {
        None => false,
        Some((Ok(force), _)) => force,
        Some((Err(reason), text)) => {
            return bad_request(&format!("cannot remove objects: {reason}. force={text}"));
        }
    };
    let tenant = form_text(query.as_deref(), "tenant_id");
    let Some(permit) = turns.acquire(&state.long_calls.removals).await else {
        return failure(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::InternalError);
    };
    let master = state.master.clone();
    let removed = tokio::task::spawn_blocking(move || {
        let removed = match tenant {
            Some(tenant) => master.remove_all_of(&tenant, force),
            None => master.remove_all(force),
        };
        // A peer that closes its connection does not end the pass.
        drop(permit);
        removed
    });
    match removed.await {
        Ok(removed_count) => {
            tracing::info!(removed_count, force, "all objects removed by request");
            page(&Removed { success: true, removed_count })
        }
        Err(_) => failure(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::InternalError),
    }
}
