//! HTTP servers of the master.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use mooncake_core::Result;
use mooncake_metadata::HttpToken;
use mooncake_metadata::http_routes::{Owners, PageOptions, pages_with as directory_pages};
pub(super) use mooncake_protocol::http::Pages;
use mooncake_protocol::http::{bind, nothing_here, serve};

use super::admin;
use super::leader::Leadership;
use super::state::State;

type Started = (Vec<Pages>, Option<SocketAddr>, Option<SocketAddr>);

/// Binds the ports of all HTTP servers before any of them serves.
pub(super) async fn start_all(state: &Arc<State>) -> Result<Started> {
    let config = &state.config;
    let (admin, admin_at) = bind(&config.metrics_host, config.metrics_port, "metrics_port").await?;
    let metadata = match &config.metadata {
        None => None,
        Some(server) => Some(bind(&server.host, server.port, "http_metadata_server_port").await?),
    };
    let mut pages =
        vec![serve("admin", admin, while_leading(admin::pages(state.clone()), state), config.own_hosts())];
    let metadata_at = metadata.as_ref().map(|(_, at)| *at);
    if let Some((listener, _)) = metadata {
        pages.push(serve(
            "metadata",
            listener,
            while_leading(metadata_pages(state), state),
            config.own_hosts(),
        ));
    }
    Ok((pages, Some(admin_at), metadata_at))
}

/// Endpoints that a master serves whether it leads or not.
const OF_ITSELF: [&str; 5] = ["/health", "/version", "/role", "/ha_status", "/leader"];

/// Restricts endpoints to the time in which the master leads, as for calls.
fn while_leading(pages: Router, state: &Arc<State>) -> Router {
    let leadership = state.leadership.clone();
    pages.layer(middleware::from_fn(move |request, next| answer(leadership.clone(), request, next)))
}

/// Checks the leadership before the request and before the response is sent.
async fn answer(leadership: Arc<Leadership>, request: Request, next: Next) -> Response {
    let deposed = || (StatusCode::SERVICE_UNAVAILABLE, "this master does not lead").into_response();
    if OF_ITSELF.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    if !leadership.leads() {
        return deposed();
    }
    let answer = next.run(request).await;
    if leadership.leads() { answer } else { deposed() }
}

fn metadata_pages(state: &Arc<State>) -> Router {
    let token = state.config.metadata.as_ref().map_or_else(HttpToken::default, |server| server.token.clone());
    directory_pages(state.metadata.clone(), state.clone(), &PageOptions { token, ..PageOptions::default() })
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
}

/// Owners of names. A name is free if the client that had it has expired and no client has mounted
/// a segment under it since.
impl Owners for State {
    fn is_dead(&self, name: &str) -> bool {
        self.endpoints.expired_clients.has(name) && self.master.segment_status_by_name(name).is_err()
    }

    fn taken(&self, name: &str) {
        self.endpoints.expired_clients.forget(name);
    }

    fn note_refused(&self) {
        self.endpoints.entries_refused.fetch_add(1, Ordering::Relaxed);
    }
}
