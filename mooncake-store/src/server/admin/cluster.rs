//! How the master is: health, role, figures. There is one master, and it serves.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::answers::{Events, Health, Leader};
use super::{Shared, page, text};
use crate::server::{EventStats, scrape, summary};

/// Whether the master is there; always 200.
#[utoipa::path(get, path = "/health", responses((status = 200, body = Health)))]
pub(super) async fn health() -> Response {
    page(&Health {
        status: "ok",
        role: "leader",
        ha_state: "serving",
        service_ready: true,
        leader_address: None,
        view_version: None,
    })
}

/// `leader` or `standby`.
#[utoipa::path(get, path = "/role", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn role() -> &'static str {
    "leader"
}

/// `serving`, or what the master does to get there.
#[utoipa::path(get, path = "/ha_status", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn ha_status() -> &'static str {
    "serving"
}

/// Who leads, in a cluster of several masters.
#[utoipa::path(get, path = "/leader", responses((status = 200, body = Leader)))]
pub(super) async fn leader() -> Response {
    page(&Leader { present: false, leader_address: None, view_version: None })
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(state): Shared) -> Response {
    match scrape::text(&state) {
        Ok(text) => ([(header::CONTENT_TYPE, super::TEXT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// The figures in a line.
#[utoipa::path(
    get,
    path = "/metrics/summary",
    responses((status = 200, body = String, content_type = "text/plain"))
)]
pub(super) async fn figures(State(state): Shared) -> Response {
    let master = summary::line(&state);
    text(format!(
        "role=leader, state=serving, service_ready=true, master={{{master}}}, ha={{{}}}",
        summary::HA
    ))
}

/// Publishing of events.
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
