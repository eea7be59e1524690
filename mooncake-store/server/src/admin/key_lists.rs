//! Queries about lists of keys: in the address, or in the body of a `POST`, which has space for
//! longer lists.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use mooncake_core::replica::{Replica, ReplicaLocation};
use mooncake_core::{ErrorCode, Result};
use serde::Deserialize;
use utoipa::ToSchema;

use super::answers::{
    DiskReplica, Failure, FoundMany, Leases, LocalDiskReplica, MemoryReplica, NoKeys, OneOfMany,
};
use super::objects::tenant;
use super::query::{form_bytes, raw};
use super::reply::{Shared, answer, failure, page, read, strings_within};
use crate::state::State as MasterState;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_transport::http_server::{Content, Refusal, Turns};

/// Maximum number of keys in a body.
const MAX_KEYS: usize = 65_536;

/// List of keys in a body.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct KeysRequest {
    /// Keys of at most 65,536 objects.
    #[serde(deserialize_with = "strings_within::<_, MAX_KEYS>")]
    keys: Vec<String>,
    /// Tenant; `default` if absent.
    tenant_id: Option<String>,
}

/// Returns the replicas of several objects without a lease, like `/query_key`.
///
/// Keys are separated by commas and percent-decoded one by one, so that a key may contain a comma
/// as `%2C`.
#[utoipa::path(
    get,
    path = "/batch_query_keys",
    params(
        ("keys" = String, Query, description = "Keys, separated by commas"),
        ("tenant_id" = Option<String>, Query, description = "Tenant; `default` if absent")
    ),
    responses((status = 200, body = FoundMany), (status = 400, body = NoKeys))
)]
pub(super) async fn batch_query_keys(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Some(keys) = raw(query.as_deref(), "keys").filter(|keys| !keys.is_empty()) else {
        let error = "No keys provided. Use ?keys=key1,key2,...";
        return answer(StatusCode::BAD_REQUEST, &NoKeys { success: false, error });
    };
    page(&found_many(&state, &tenant(query.as_deref()), keys.split(',').map(form_bytes)))
}

/// Returns the replicas of several objects without a lease. The keys are in the body.
///
/// The response is that of `GET`. Mooncake C++ lacks this form.
#[utoipa::path(
    post,
    path = "/batch_query_keys",
    request_body = KeysRequest,
    responses(
        (status = 200, body = FoundMany),
        (status = 400, body = Failure),
        (status = 413, body = Failure, description = "The body or the list is too long"),
        (status = 500, body = Failure)
    )
)]
pub(super) async fn post_batch_query_keys(
    State(state): Shared,
    Extension(turns): Extension<Turns>,
    Content(body): Content,
) -> Response {
    answer_list(state, turns, body, |state, tenant, keys| page(&found_many(state, tenant, keys.into_iter())))
        .await
}

/// Returns the time until the leases of readers on objects end. Objects without a lease are left
/// out.
///
/// Keys are separated by commas and percent-decoded one by one. Mooncake C++ lacks this endpoint.
#[utoipa::path(
    get,
    path = "/api/v1/leases",
    params(
        ("keys" = String, Query, description = "Keys, separated by commas"),
        ("tenant_id" = Option<String>, Query, description = "Tenant; `default` if absent")
    ),
    responses((status = 200, body = Leases))
)]
pub(super) async fn leases(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let keys = raw(query.as_deref(), "keys").unwrap_or_default();
    page(&leases_of(&state, &tenant(query.as_deref()), keys.split(',').map(form_bytes)))
}

/// Returns the time until the leases of readers on objects end. The keys are in the body.
///
/// The response is that of `GET`. Mooncake C++ lacks this endpoint.
#[utoipa::path(
    post,
    path = "/api/v1/leases",
    request_body = KeysRequest,
    responses(
        (status = 200, body = Leases),
        (status = 400, body = Failure),
        (status = 413, body = Failure, description = "The body or the list is too long"),
        (status = 500, body = Failure)
    )
)]
pub(super) async fn post_leases(
    State(state): Shared,
    Extension(turns): Extension<Turns>,
    Content(body): Content,
) -> Response {
    answer_list(state, turns, body, |state, tenant, keys| page(&leases_of(state, tenant, keys.into_iter())))
        .await
}

/// Reads a list of keys and answers it outside of the connections' threads.
async fn answer_list(
    state: Arc<MasterState>,
    turns: Turns,
    body: Bytes,
    respond: impl FnOnce(&MasterState, &str, Vec<Vec<u8>>) -> Response + Send + 'static,
) -> Response {
    let stopped = || failure(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::InternalError);
    let Some(permit) = turns.acquire(&state.long_calls.lists).await else { return stopped() };
    let answered = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let KeysRequest { keys, tenant_id } = match read(&body) {
            Ok(request) => request,
            Err(refused) => return *refused,
        };
        if keys.len() > MAX_KEYS {
            return Refusal::many_keys(MAX_KEYS).into_response();
        }
        let tenant = tenant_id.as_deref().unwrap_or(DEFAULT_TENANT);
        respond(&state, tenant, keys.into_iter().map(String::into_bytes).collect())
    });
    answered.await.unwrap_or_else(|_| stopped())
}

fn found_many(state: &MasterState, tenant: &str, keys: impl Iterator<Item = Vec<u8>>) -> FoundMany {
    let peek = |key: &[u8]| match state.master.scoped(tenant, key) {
        Ok(key) => state.master.peek(&key),
        Err(_) => Err(ErrorCode::ObjectNotFound.into()),
    };
    let data: BTreeMap<_, _> =
        keys.map(|key| (String::from_utf8_lossy(&key).into_owned(), one_of_many(peek(&key)))).collect();
    FoundMany { success: true, data }
}

fn leases_of(state: &MasterState, tenant: &str, keys: impl Iterator<Item = Vec<u8>>) -> Leases {
    let lease_ms = keys.filter_map(|key| {
        let left = state.master.leased_for(&state.master.scoped(tenant, &key).ok()?)?;
        let ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        Some((String::from_utf8_lossy(&key).into_owned(), ms))
    });
    Leases { success: true, lease_ms: lease_ms.collect() }
}

fn one_of_many(found: Result<Vec<Replica>>) -> OneOfMany {
    let none = OneOfMany {
        ok: true,
        error: None,
        values: None,
        disk_values: None,
        local_disk_values: None,
        nof_values: None,
    };
    let replicas = match found {
        Ok(replicas) => replicas,
        Err(error) => return OneOfMany { ok: false, error: Some(error.code().name().into()), ..none },
    };
    let mut all = none;
    for replica in &replicas {
        match &replica.location {
            ReplicaLocation::Memory(_) => {
                all.values.get_or_insert_default().extend(MemoryReplica::of(replica));
            }
            ReplicaLocation::NofSsd(at) => all.nof_values.get_or_insert_default().push(MemoryReplica {
                size_: at.size,
                buffer_address_: at.address,
                protocol_: at.protocol.clone(),
                transport_endpoint_: at.endpoint.clone(),
            }),
            ReplicaLocation::Disk { path, size } => all
                .disk_values
                .get_or_insert_default()
                .push(DiskReplica { file_path: path.clone(), object_size: *size }),
            ReplicaLocation::LocalDisk { client, size, endpoint } => {
                all.local_disk_values.get_or_insert_default().push(LocalDiskReplica {
                    client_id: client.to_string(),
                    object_size: *size,
                    transport_endpoint: endpoint.clone(),
                });
            }
            // Mooncake C++ lists none of these.
            ReplicaLocation::Dfs { .. } => {}
        }
    }
    all
}
