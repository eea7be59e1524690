//! State of the master: health, role, metrics, events.

use std::sync::Arc;

use axum::extract::{FromRef, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::answers::{Events, Health, Leader, Version};
use super::reply::{Shared, TEXT, page, text};
use crate::leader::{Leadership, LeadershipStatus};
use crate::{EventStats, scrape, summary};
use mooncake_protocol::message::{DISPLAY_VERSION, MASTER_VERSION};

/// Summary of the metrics of high availability, with the values of a single master.
const HA: &str = "HA Metrics Summary: last_seq=0, applied_seq=0, lag=0, pending=0, \
                  mutation_queue=0, batch_commits=0, sync_commits=0, skipped=0, \
                  checksum_fail=0, etcd_fail=0, watch_disconn=0, state=0";

/// Leadership of the master, extracted from the state of any endpoint.
#[derive(Clone)]
pub(super) struct ThisMaster(pub(super) Arc<Leadership>);

impl FromRef<Arc<crate::state::State>> for ThisMaster {
    fn from_ref(state: &Arc<crate::state::State>) -> Self {
        Self(state.leadership.clone())
    }
}

/// Returns the health of the master; always status 200.
#[utoipa::path(get, path = "/health", responses((status = 200, body = Health)))]
pub(super) async fn health(State(ThisMaster(leadership)): State<ThisMaster>) -> Response {
    let LeadershipStatus { state, leader } = leadership.status();
    let (leader_address, view_version) = leader.unzip();
    page(&Health {
        status: "ok",
        role: leadership.role(),
        ha_state: state,
        service_ready: leadership.leads(),
        leader_address,
        view_version,
    })
}

/// Returns the versions of the RPC protocol and of the program.
#[utoipa::path(get, path = "/version", responses((status = 200, body = Version)))]
pub(super) async fn version() -> Response {
    page(&Version { version: MASTER_VERSION, display_version: DISPLAY_VERSION })
}

/// Returns `leader` or `standby`.
#[utoipa::path(get, path = "/role", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn role(State(ThisMaster(leadership)): State<ThisMaster>) -> &'static str {
    leadership.role()
}

/// Returns `serving` or the step before it.
#[utoipa::path(get, path = "/ha_status", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn ha_status(State(ThisMaster(leadership)): State<ThisMaster>) -> &'static str {
    leadership.status().state
}

/// Returns the leader of a cluster of several masters.
#[utoipa::path(get, path = "/leader", responses((status = 200, body = Leader)))]
pub(super) async fn leader(State(ThisMaster(leadership)): State<ThisMaster>) -> Response {
    let (leader_address, view_version) = leadership.status().leader.unzip();
    page(&Leader { present: leader_address.is_some(), leader_address, view_version })
}

/// Returns the metrics in the text format of Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(state): Shared) -> Response {
    match mooncake_protocol::metrics::text(&scrape::of(&state)) {
        Ok(text) => ([(header::CONTENT_TYPE, TEXT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Returns a summary of the metrics in one line.
#[utoipa::path(
    get,
    path = "/metrics/summary",
    responses((status = 200, body = String, content_type = "text/plain"))
)]
pub(super) async fn metrics_summary(State(state): Shared) -> Response {
    let master = summary::line(&state);
    text(format!(
        "role={}, state={}, service_ready={}, master={{{master}}}, ha={{{}}}",
        state.leadership.role(),
        state.leadership.status().state,
        state.leadership.leads(),
        HA
    ))
}

/// Returns the counters of published events.
#[utoipa::path(get, path = "/kv_events/status", responses((status = 200, body = Events)))]
pub(super) async fn events(State(state): Shared) -> Response {
    let stats = state.event_stats();
    let EventStats { batches, events, dropped, without_hash } = stats.unwrap_or_default();
    page(&Events {
        enabled: stats.is_some(),
        published_batches: batches,
        published_events: events,
        dropped_events: dropped,
        skipped_unparsed_keys: without_hash,
    })
}
