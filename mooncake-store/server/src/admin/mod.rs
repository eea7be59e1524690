//! Admin endpoints of the master, with the paths, parameters, statuses and JSON of Mooncake C++.
//! The endpoint `/openapi.json` describes them.

mod answers;
mod cluster;
mod curve;
mod drain;
mod key_lists;
mod objects;
mod pins;
mod query;
mod reply;
mod segments;
#[cfg(feature = "cli")]
pub(super) mod standby;
mod tenants;

use std::sync::Arc;

use axum::http::header;
use axum::routing::get;
use axum::{Extension, Router};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::state::State;
use mooncake_client::programs::openapi_document;
use mooncake_protocol::http::{JSON, nothing_here};
use mooncake_transport::http_server::BodyLimit;

/// Maximum length of a request body.
const MAX_BODY: BodyLimit =
    BodyLimit { bytes: 16 << 20, remedy: "send several requests with a part of the list each" };

#[derive(OpenApi)]
#[openapi(info(
    title = "mooncake_master",
    description = "Admin endpoints of the master of a cluster. No authentication: every client that reaches the port has full access.",
))]
struct Description;

/// Returns the routes of all endpoints in the description.
pub(super) fn pages(state: Arc<State>) -> Router {
    let (router, description) = OpenApiRouter::<Arc<State>>::with_openapi(Description::openapi())
        .routes(routes!(cluster::health))
        .routes(routes!(cluster::version))
        .routes(routes!(cluster::role))
        .routes(routes!(cluster::ha_status))
        .routes(routes!(cluster::leader))
        .routes(routes!(cluster::metrics))
        .routes(routes!(cluster::metrics_summary))
        .routes(routes!(curve::memory_curve))
        .routes(routes!(objects::query_key))
        .routes(routes!(key_lists::batch_query_keys, key_lists::post_batch_query_keys))
        .routes(routes!(key_lists::leases, key_lists::post_leases))
        .routes(routes!(objects::explain))
        .routes(routes!(objects::all_keys))
        .routes(routes!(objects::remove_all))
        .routes(routes!(pins::soft_pin))
        .routes(routes!(pins::soft_unpin))
        .routes(routes!(segments::all_segments))
        .routes(routes!(segments::segments_detail))
        .routes(routes!(segments::query_segment))
        .routes(routes!(segments::status))
        .routes(routes!(cluster::events))
        .routes(routes!(drain::start))
        .routes(routes!(drain::query))
        .routes(routes!(drain::cancel))
        .routes(routes!(tenants::quotas, tenants::set_quota, tenants::remove_quota))
        .split_for_parts();
    let description = openapi_document(&description);
    router
        .route("/openapi.json", get(async move || ([(header::CONTENT_TYPE, JSON)], description.clone())))
        // Mooncake C++ responds to every unknown path or method in this way.
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
        .layer(Extension(MAX_BODY))
        .with_state(state)
}
