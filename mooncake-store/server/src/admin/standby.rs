//! Endpoints of a master that does not lead.

use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use mooncake_protocol::http::nothing_here;

use super::cluster::{ThisMaster, ha_status, health, leader, role, version};
use crate::leader::Leadership;

/// Returns the endpoints of a master that does not lead.
pub(crate) fn pages(leadership: Arc<Leadership>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/version", get(version))
        .route("/role", get(role))
        .route("/ha_status", get(ha_status))
        .route("/leader", get(leader))
        .with_state(ThisMaster(leadership))
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
}
