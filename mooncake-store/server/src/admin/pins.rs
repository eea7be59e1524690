//! Soft pins of stored objects.

use std::time::Duration;

use axum::response::Response;
use mooncake_core::Error;
use mooncake_master::is_tenant;
use mooncake_protocol::api::DEFAULT_TENANT;
use serde::Deserialize;
use utoipa::ToSchema;

use super::answers::{Failure, Pin, Pins};
use super::reply::{Shared, bad_request, page, read, strings_within};
use crate::state::State;
use mooncake_transport::http_server::Content;

/// Maximum number of keys of a request.
const MAX_KEYS: usize = 4096;

const EXPECTED: &str = "Expected 1..4096 keys, a valid tenant, and ttl_ms only for soft_pin";

/// Request for soft pins.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PinRequest {
    /// Keys of 1 to 4096 objects.
    #[serde(deserialize_with = "strings_within::<_, MAX_KEYS>")]
    keys: Vec<String>,
    /// Time of the pins in milliseconds, at most `--max_kv_soft_pin_ttl`.
    ttl_ms: Option<u64>,
    /// Tenant; `default` if absent.
    tenant_id: Option<String>,
}

/// Request to end soft pins.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "both requests are read as one type, so that their errors are the same")]
pub(super) struct UnpinRequest {
    /// Keys of 1 to 4096 objects.
    keys: Vec<String>,
    /// Tenant; `default` if absent.
    tenant_id: Option<String>,
}

/// Pins stored objects softly for a time from now on.
///
/// A pin replaces an earlier one. The response has an error code for each key: 0, -704 if there is
/// no such object, -703 while it cannot be read, -600 if the time is too long.
#[utoipa::path(
    post,
    path = "/api/v1/soft_pin",
    request_body = PinRequest,
    responses((status = 200, body = Pins), (status = 400, body = Failure))
)]
pub(super) async fn soft_pin(axum::extract::State(state): Shared, Content(body): Content) -> Response {
    match read::<PinRequest>(&body) {
        Ok(PinRequest { keys, ttl_ms: Some(ttl), tenant_id }) => {
            set_pins(&state, keys, Some(Duration::from_millis(ttl)), tenant_id)
        }
        Ok(_) => bad_request(EXPECTED),
        Err(refused) => *refused,
    }
}

/// Ends the soft pins of stored objects.
#[utoipa::path(
    post,
    path = "/api/v1/soft_unpin",
    request_body = UnpinRequest,
    responses((status = 200, body = Pins), (status = 400, body = Failure))
)]
pub(super) async fn soft_unpin(axum::extract::State(state): Shared, Content(body): Content) -> Response {
    match read::<PinRequest>(&body) {
        Ok(PinRequest { keys, ttl_ms: None, tenant_id }) => set_pins(&state, keys, None, tenant_id),
        Ok(_) => bad_request(EXPECTED),
        Err(refused) => *refused,
    }
}

fn set_pins(state: &State, keys: Vec<String>, ttl: Option<Duration>, tenant: Option<String>) -> Response {
    let tenant = tenant.as_deref().unwrap_or(DEFAULT_TENANT);
    if !(1..=MAX_KEYS).contains(&keys.len()) || !is_tenant(tenant) {
        return bad_request(EXPECTED);
    }
    let set = |key: &str| {
        let scoped = state.master.scoped(tenant, key.as_bytes())?;
        state.master.soft_pin(&scoped, ttl)
    };
    let code = |error: Error| error.code().number();
    let results = keys.into_iter().map(|key| Pin { error_code: set(&key).map_or_else(code, |()| 0), key });
    page(&Pins { results: results.collect() })
}
