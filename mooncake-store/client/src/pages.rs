//! HTTP endpoints of a client: health and metrics, in the format of Mooncake C++.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mooncake_core::Result;
use mooncake_transport::Transport;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::metrics::Metrics;
use crate::openapi::openapi_document;
use crate::scrape::ProgramGauge;
use crate::state::{Client, Inner};
use mooncake_protocol::http;
use mooncake_protocol::message::{DISPLAY_VERSION, MASTER_VERSION};
use prometheus::core::Collector;

/// Gauges that a program adds to the metrics.
type More = dyn Fn() -> Vec<ProgramGauge> + Send + Sync;

/// HTTP server of a client. Dropping this value stops the server.
#[derive(Debug)]
pub struct ClientPages {
    pages: http::Pages,
    at: SocketAddr,
}

impl ClientPages {
    /// Serves `/health`, `/version`, `/metrics`, `/metrics/summary` and `/openapi.json` of a
    /// client. Port 0 selects a free port. An empty host selects the address at which the client
    /// listens. The server does not keep the client alive.
    ///
    /// # Errors
    /// Returns `RPC_FAIL` if the port is in use or cannot be bound.
    pub async fn serve<T: Transport>(client: &Client<T>, host: &str, port: u16) -> Result<Self> {
        Self::serve_with(client, host, port, Box::new(Vec::new)).await
    }

    /// Starts the server as [`serve`](Self::serve) does, with additional gauges.
    #[doc(hidden)]
    pub async fn serve_with<T: Transport>(
        client: &Client<T>,
        host: &str,
        port: u16,
        more: Box<More>,
    ) -> Result<Self> {
        let any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let own = client.bound_address().unwrap_or(any).to_string();
        let host = if host.is_empty() { own.as_str() } else { host };
        let (listener, at) = http::bind(host, port, "http_port").await?;
        let config = &client.inner.config;
        let hosts = config.allowed_hosts.clone().with(&client.inner.name).with(host).with_own_name();
        let subject = Arc::new(Weak(Arc::downgrade(&client.inner)));
        let more: Arc<More> = more.into();
        let collector = Arc::new(client.status().metrics_collector_with({
            let more = more.clone();
            move || more()
        }));
        let about = About { client: subject, collector, more };
        Ok(Self { pages: http::serve("pages", listener, router(about), hosts), at })
    }

    /// Returns the address of the server.
    pub fn address(&self) -> SocketAddr {
        self.at
    }

    /// Stops accepting requests and waits for the responses to requests in progress.
    pub async fn stop(self) {
        self.pages.stop().await;
    }
}

/// Client that the server describes, and the gauges that the program adds.
#[derive(Clone)]
struct About {
    client: Arc<dyn Subject>,
    collector: Arc<dyn Collector>,
    more: Arc<More>,
}

struct Weak<T: Transport>(std::sync::Weak<Inner<T>>);

/// Client with any transport.
#[async_trait::async_trait]
trait Subject: Send + Sync {
    async fn health(&self) -> Health;
    fn metrics(&self) -> Option<Arc<Metrics>>;
}

#[async_trait::async_trait]
impl<T: Transport> Subject for Weak<T> {
    async fn health(&self) -> Health {
        let Some(inner) = self.0.upgrade() else { return Health::NOT_INITIALIZED };
        let client = Client { inner };
        match (client.inner.usable().is_ok(), client.status().is_healthy().await) {
            (false, _) => Health::NOT_INITIALIZED,
            (true, false) => Health { status: "master_unreachable", code: 2 },
            (true, true) => Health { status: "healthy", code: 0 },
        }
    }

    fn metrics(&self) -> Option<Arc<Metrics>> {
        self.0.upgrade()?.metrics.clone()
    }
}

impl fmt::Debug for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("About")
    }
}

#[derive(OpenApi)]
#[openapi(info(title = "mooncake client", description = "Read-only endpoints of a client."))]
struct Description;

fn router(about: About) -> axum::Router {
    let (router, description) = OpenApiRouter::<About>::with_openapi(Description::openapi())
        .routes(routes!(health))
        .routes(routes!(version))
        .routes(routes!(metrics))
        .routes(routes!(summary))
        .split_for_parts();
    let description = openapi_document(&description);
    router
        .route(
            "/openapi.json",
            get(async move || ([(header::CONTENT_TYPE, http::JSON)], description.clone())),
        )
        .fallback(http::nothing_here)
        .method_not_allowed_fallback(http::nothing_here)
        .with_state(about)
}

/// Health of the client.
#[derive(Clone, Copy, ToSchema)]
struct Health {
    /// Status: `healthy`, `not_initialized` or `master_unreachable`.
    status: &'static str,
    /// Status code: 0 (`healthy`), 1 (`not_initialized`) or 2 (`master_unreachable`).
    code: i32,
}

impl Health {
    const NOT_INITIALIZED: Self = Self { status: "not_initialized", code: 1 };
}

/// Reports whether the client is initialized and reaches its master.
#[utoipa::path(get, path = "/health", responses((status = 200, body = Health), (status = 503, body = Health)))]
async fn health(State(about): State<About>) -> Response {
    let health = about.client.health().await;
    let status = if health.code == 0 { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = format!(r#"{{"status":"{}","code":{}}}"#, health.status, health.code);
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Version of the client.
#[derive(ToSchema)]
#[allow(dead_code, reason = "the body of a response is a constant")]
struct Version {
    /// Version of the RPC protocol.
    version: &'static str,
    /// Version of the program, for people.
    display_version: &'static str,
}

/// Returns the versions of the RPC protocol and of the program.
#[utoipa::path(get, path = "/version", responses((status = 200, body = Version)))]
async fn version() -> Response {
    let body = format!(r#"{{"version":"{MASTER_VERSION}","display_version":"{DISPLAY_VERSION}"}}"#);
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Returns the metrics in the text format of Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = 503, body = String, content_type = "text/plain")
    )
)]
async fn metrics(State(about): State<About>) -> Response {
    if about.client.metrics().is_none() && (about.more)().is_empty() {
        return no_metrics();
    }
    match mooncake_protocol::metrics::text(&*about.collector) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Returns a summary of the metrics as text.
#[utoipa::path(
    get,
    path = "/metrics/summary",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = 503, body = String, content_type = "text/plain")
    )
)]
async fn summary(State(about): State<About>) -> Response {
    let mut text = about.client.metrics().map(|metrics| metrics.summary()).unwrap_or_default();
    for (_, help, value) in (about.more)() {
        text.push_str(&format!("{help}: {value}\n"));
    }
    if text.is_empty() { no_metrics() } else { plain(StatusCode::OK, text) }
}

fn no_metrics() -> Response {
    plain(StatusCode::SERVICE_UNAVAILABLE, "metrics not available".into())
}

fn plain(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain")], body).into_response()
}
