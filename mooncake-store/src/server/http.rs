//! Admin pages of the master, and what all pages share.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, State as Shared};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mooncake_core::replica::{Replica, ReplicaLocation};
use mooncake_core::{Error, ErrorCode, Result};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::{State, join, metadata, scrape};

const JSON: &str = "application/json; charset=utf-8";

/// Pages being served.
#[derive(Debug)]
pub(super) struct Pages {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Pages {
    /// Stops taking requests and waits until those at work are answered.
    pub(super) async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Started = (Vec<Pages>, Option<SocketAddr>, Option<SocketAddr>);

/// Takes the ports of all pages before any is served.
pub(super) async fn start_all(state: &Arc<State>) -> Result<Started> {
    let config = &state.config;
    let (admin, admin_at) = bind(&config.metrics_host, config.metrics_port, "metrics_port").await?;
    let metadata = match &config.metadata {
        None => None,
        Some(server) => Some(bind(&server.host, server.port, "http_metadata_server_port").await?),
    };
    let mut pages = vec![serve(admin, admin_pages(state.clone()))];
    let metadata_at = metadata.as_ref().map(|(_, at)| *at);
    if let Some((listener, _)) = metadata {
        pages.push(serve(listener, metadata::pages(state.metadata.clone())));
    }
    Ok((pages, Some(admin_at), metadata_at))
}

async fn bind(host: &str, port: u16, flag: &str) -> Result<(TcpListener, SocketAddr)> {
    let address = join(host, port);
    let bound = async {
        let listener = TcpListener::bind(&address).await?;
        let at = listener.local_addr()?;
        std::io::Result::Ok((listener, at))
    };
    bound.await.map_err(|error| {
        let text = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                format!("port {port} is in use ({address}): choose another with --{flag}, or stop who has it")
            }
            _ => format!("cannot listen at {address} (--{flag}): {error}"),
        };
        Error::new(ErrorCode::RpcFail, text).with_source(error)
    })
}

fn serve(listener: TcpListener, pages: Router) -> Pages {
    let (stop, mut stopped) = watch::channel(false);
    let until = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let task = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, pages).with_graceful_shutdown(until).await {
            tracing::error!(%error, "HTTP server ended");
        }
    });
    Pages { stop, task }
}

fn admin_pages(state: Arc<State>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/role", get(async || "leader"))
        .route("/ha_status", get(async || "serving"))
        .route("/metrics", get(metrics))
        .route("/metrics/summary", get(summary))
        .route("/get_all_keys", get(all_keys))
        .route("/get_all_segments", get(all_segments))
        .route("/get_segments_detail", get(segments_detail))
        .route("/query_key", get(query_key))
        .route("/query_segment", get(query_segment))
        .with_state(state)
}

async fn health() -> Response {
    page(json!({ "status": "ok", "role": "leader", "ha_state": "serving", "service_ready": true }))
}

async fn metrics(Shared(state): Shared<Arc<State>>) -> Response {
    match scrape::text(&state) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn summary(Shared(state): Shared<Arc<State>>) -> String {
    let master = super::counting::summary(&state);
    format!("role=leader, state=serving, service_ready=true, master={{{master}}}, ha={{}}")
}

/// One key per line; bytes that are no text are shown as their nearest.
async fn all_keys(Shared(state): Shared<Arc<State>>) -> String {
    let keys = state.master.keys();
    keys.iter().map(|key| format!("{}\n", String::from_utf8_lossy(key.as_bytes()))).collect()
}

async fn all_segments(Shared(state): Shared<Arc<State>>) -> String {
    state.master.segment_stats().iter().map(|at| format!("{}\n", at.segment.name)).collect()
}

async fn segments_detail(Shared(state): Shared<Arc<State>>) -> Response {
    let stats = state.master.segment_stats();
    let segments: Vec<_> = stats
        .iter()
        .map(|at| {
            let gib = at.segment.size as f64 / (1u64 << 30) as f64;
            json!({
                "segment_name": at.segment.name,
                "segment_id": at.segment.id.to_string(),
                "client_id": at.client.to_string(),
                "base_address": format!("{:#x}", at.segment.base),
                "size_bytes": at.segment.size,
                "size_human": format!("{gib:.2} GiB"),
                "te_endpoint": at.segment.endpoint,
                "protocol": at.segment.protocol,
                "status": format!("{:?}", at.status).to_uppercase(),
                "allocator_used_bytes": at.used,
                "allocator_capacity_bytes": at.segment.size,
                "allocator_usage_percent": at.used as f64 * 100.0 / at.segment.size as f64,
            })
        })
        .collect();
    page(json!({ "total_segments": segments.len(), "segments": segments }))
}

/// Looks without a lease and without counting: asking must not change what is kept.
async fn query_key(Shared(state): Shared<Arc<State>>, RawQuery(query): RawQuery) -> Response {
    let Some(key) = parameter(query.as_deref(), "key") else {
        return failure(StatusCode::NOT_FOUND, &Error::invalid("missing parameter key"));
    };
    match state.master.peek(&key) {
        Ok(replicas) => {
            let data: Vec<_> = replicas.iter().filter_map(memory).collect();
            page(json!({ "success": true, "data": data }))
        }
        Err(error) => failure(StatusCode::NOT_FOUND, &error),
    }
}

async fn query_segment(Shared(state): Shared<Arc<State>>, RawQuery(query): RawQuery) -> Response {
    let failed = || (StatusCode::INTERNAL_SERVER_ERROR, "Failed to query segment").into_response();
    let Some(name) = parameter(query.as_deref(), "segment").and_then(|name| String::from_utf8(name).ok())
    else {
        return failed();
    };
    let stats = state.master.segment_stats();
    let (mut count, mut used, mut capacity) = (0, 0, 0);
    for at in stats.iter().filter(|at| at.segment.name == name) {
        (count, used, capacity) = (count + 1, used + at.used, capacity + at.segment.size);
    }
    if count == 0 {
        return failed();
    }
    format!("{name}\nUsed(bytes): {used}\nCapacity(bytes) : {capacity}\n").into_response()
}

fn memory(replica: &Replica) -> Option<Value> {
    let ReplicaLocation::Memory(at) = &replica.location else { return None };
    Some(json!({
        "size_": at.size,
        "buffer_address_": at.address,
        "protocol_": at.protocol,
        "transport_endpoint_": at.endpoint,
    }))
}

fn page(body: Value) -> Response {
    ([(header::CONTENT_TYPE, JSON)], body.to_string()).into_response()
}

fn failure(status: StatusCode, error: &Error) -> Response {
    let code = error.code();
    let body = json!({ "success": false, "error_code": code.number(), "error_message": code.name() });
    (status, [(header::CONTENT_TYPE, JSON)], body.to_string()).into_response()
}

/// A parameter of a query, percent-decoded. A `+` stays one: keys are no forms. What only looks like an escape stays too.
pub fn parameter(query: Option<&str>, name: &str) -> Option<Vec<u8>> {
    let value = query?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then_some(value)
    })?;
    let mut decoded = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [byte, tail @ ..] = rest {
        let hex = |at: usize| tail.get(at).and_then(|digit| (*digit as char).to_digit(16));
        if *byte == b'%'
            && let (Some(high), Some(low)) = (hex(0), hex(1))
        {
            decoded.push((high * 16 + low) as u8);
            rest = &tail[2..];
        } else {
            decoded.push(*byte);
            rest = tail;
        }
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::parameter;

    #[test]
    fn parameters_are_decoded_once() {
        let key = |query| parameter(Some(query), "key");
        assert_eq!(key("a=1&key=mooncake%2Fram%2fn%3A1").as_deref(), Some(&b"mooncake/ram/n:1"[..]));
        assert_eq!(key("key=a+b%25%2").as_deref(), Some(&b"a+b%%2"[..]));
        assert_eq!(key("key=%00%ff").as_deref(), Some(&[0, 0xff][..]));
        assert_eq!(key("key=").as_deref(), Some(&b""[..]));
        assert_eq!(key("keys=1&x"), None);
        assert_eq!(parameter(None, "key"), None);
    }
}
