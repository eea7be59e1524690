//! HTTP endpoints of a client: health and metrics, in the format of Mooncake C++.

#[cfg_attr(not(feature = "disk"), path = "pages/absent.rs")]
mod disk;

use std::fmt;
use std::net::SocketAddr;
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

use crate::cache::{HotCache, HotCacheStats};
use crate::disk::{DiskReport, FileReport};
use crate::metrics::{Direction, Metrics};
use crate::state::{Client, Inner};
use mooncake_protocol::http;
use mooncake_protocol::metrics::{Labels, Page};

const TEXT: &str = "text/plain; version=0.0.4";

/// Gauges that a program adds to the metrics: name, description and value.
type More = dyn Fn() -> Vec<(&'static str, &'static str, u64)> + Send + Sync;

/// HTTP server of a client. Dropping this value stops the server.
#[derive(Debug)]
pub struct ClientPages {
    pages: http::Pages,
    at: SocketAddr,
}

impl ClientPages {
    /// Serves `/health`, `/metrics`, `/metrics/summary` and `/openapi.json` of a client. Port 0
    /// selects a free port. The server does not keep the client alive.
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
        let (listener, at) = http::bind(host, port, "http_port").await?;
        let about = About { client: Arc::new(Weak(Arc::downgrade(&client.inner))), more: more.into() };
        Ok(Self { pages: http::serve("pages", listener, router(about)), at })
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
    more: Arc<More>,
}

struct Weak<T: Transport>(std::sync::Weak<Inner<T>>);

/// Client with any transport.
#[async_trait::async_trait]
trait Subject: Send + Sync {
    async fn health(&self) -> Health;
    fn metrics(&self) -> Option<(Arc<Metrics>, String)>;
    fn hot_cache(&self) -> Option<HotCacheStats>;
    fn disk(&self) -> Option<DiskReport>;
    fn files(&self) -> Option<FileReport>;
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

    fn metrics(&self) -> Option<(Arc<Metrics>, String)> {
        let inner = self.0.upgrade()?;
        Some((inner.metrics.clone()?, inner.config.cluster_id.clone()))
    }

    fn hot_cache(&self) -> Option<HotCacheStats> {
        self.0.upgrade()?.cache.as_ref().map(HotCache::stats)
    }

    fn disk(&self) -> Option<DiskReport> {
        Client { inner: self.0.upgrade()? }.status().disk()
    }

    fn files(&self) -> Option<FileReport> {
        Client { inner: self.0.upgrade()? }.status().files()
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
        .routes(routes!(metrics))
        .routes(routes!(summary))
        .split_for_parts();
    let description = description.to_json().unwrap_or_default();
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
    let (mut page, more) = (Page::default(), (about.more)());
    match about.client.metrics() {
        Some((metrics, cluster)) => metrics.show(&mut page, &cluster),
        None if more.is_empty() => return no_metrics(),
        None => {}
    }
    if let Some(kept) = about.client.hot_cache() {
        page.counter("mooncake_client_hot_cache_hits_total", "Reads served from the hot cache", kept.hits);
        page.counter(
            "mooncake_client_hot_cache_fills_total",
            "Values that entered the hot cache",
            kept.fills,
        );
        page.gauge("mooncake_client_hot_cache_objects", "Values in the hot cache", kept.objects);
        page.gauge("mooncake_client_hot_cache_bytes", "Bytes of values in the hot cache", kept.bytes);
    }
    if let Some(report) = about.client.disk() {
        disk::show(&report, &mut page);
    }
    if let Some(files) = about.client.files() {
        show_files(&files, &mut page);
    }
    page.connections("mooncake_client");
    for (name, help, value) in more {
        page.gauge(name, help, value);
    }
    match page.text() {
        Ok(text) => ([(header::CONTENT_TYPE, TEXT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Adds the metrics of files on a shared file system to a page.
fn show_files(report: &FileReport, page: &mut Page) {
    for (name, help, value) in [
        ("mooncake_client_files_written_total", "Values written to shared files", report.written),
        (
            "mooncake_client_files_written_bytes_total",
            "Bytes of values written to shared files",
            report.written_bytes,
        ),
        ("mooncake_client_files_refused_total", "Values without a file", report.refused),
        ("mooncake_client_files_evicted_total", "Evicted shared files", report.evicted),
        ("mooncake_client_files_read_total", "Values and parts read from shared files", report.read),
        ("mooncake_client_files_read_bytes_total", "Bytes read from shared files", report.read_bytes),
        (
            "mooncake_client_files_unread_total",
            "Shared files that were missing, changed, of another length, or too slow",
            report.unread,
        ),
    ] {
        page.counter(name, help, value);
    }
    page.gauge("mooncake_client_files_used_bytes", "Bytes of known shared files", report.used);
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
    let mut text = about.client.metrics().map(|(metrics, _)| metrics.summary()).unwrap_or_default();
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

impl Metrics {
    /// Adds all metrics to a page, under the names that dashboards for Mooncake C++ use.
    fn show(&self, page: &mut Page, cluster: &str) {
        page.label("client_mode", "real");
        if !cluster.is_empty() {
            page.label("cluster_id", cluster);
        }
        page.counter("mooncake_transfer_read_bytes", "Bytes read", self.read.bytes());
        page.counter(
            "mooncake_transfer_write_bytes",
            "Bytes written, once per replica",
            self.written.bytes(),
        );
        for (name, latency) in [
            ("batch_put", &self.written.batch),
            ("batch_get", &self.read.batch),
            ("get", &self.read.single),
            ("put", &self.written.single),
        ] {
            let help = "Transfer time of a call in microseconds";
            let none: Labels<'_> = &[];
            page.histograms(&format!("mooncake_transfer_{name}_latency"), help, 1.0, [(none, latency)]);
        }
        self.show_calls(page);
        self.show_operations(page, Direction::Read, "read");
        self.show_operations(page, Direction::Write, "write");
        let outcomes = |name: &str, help: &str, of: [u64; 3], names: [&str; 3], page: &mut Page| {
            let labels = names.map(|name| [("outcome", name)]);
            page.counters(name, help, labels.iter().map(|labels| labels as Labels<'_>).zip(of));
        };
        let help = "Objects and parts read, by outcome";
        let names = ["found", "missing", "failed"];
        outcomes("mooncake_client_reads_total", help, self.read.outcomes(), names, page);
        let help = "Objects and parts written, by outcome";
        let names = ["stored", "existed", "failed"];
        outcomes("mooncake_client_writes_total", help, self.written.outcomes(), names, page);
    }

    fn show_calls(&self, page: &mut Page) {
        let made: Vec<_> = self.calls.made().map(|call| ([("rpc_name", call.name)], call)).collect();
        let each = || made.iter().map(|(labels, call)| (labels as Labels<'_>, call));
        let counts = each().map(|(labels, call)| (labels, call.latency.count()));
        page.counters("mooncake_client_rpc_count", "RPCs to the master", counts);
        let unanswered = each().map(|(labels, call)| (labels, call.unanswered()));
        page.counters("mooncake_client_rpc_unanswered", "Calls without a response", unanswered);
        let latencies = each().map(|(labels, call)| (labels, &call.latency));
        page.histograms("mooncake_client_rpc_latency", "Microseconds until the response", 1.0, latencies);
    }

    fn show_operations(&self, page: &mut Page, direction: Direction, way: &str) {
        let made: Vec<_> =
            self.operations(direction).map(|(name, counts)| ([("op_name", name)], counts)).collect();
        let each = || made.iter().map(|(labels, counts)| (labels as Labels<'_>, *counts));
        let prefix = format!("mooncake_transfer_{way}_operation");
        let counts = each().map(|(labels, counts)| (labels, counts.latency.count()));
        page.counters(&format!("{prefix}_count"), "Calls of the store", counts);
        let bytes = each().map(|(labels, counts)| (labels, counts.bytes()));
        page.counters(&format!("{prefix}_bytes"), "Bytes of the values", bytes);
        let latencies = each().map(|(labels, counts)| (labels, &counts.latency));
        page.histograms(&format!("{prefix}_latency"), "Microseconds of a call", 1.0, latencies);
    }
}
