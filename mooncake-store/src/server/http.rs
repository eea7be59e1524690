//! HTTP servers: the master's pages, and what serves a program's own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::ListenerLimits;
use mooncake_transport::http_server::{self, Owners, http_limits, pages as directory_pages};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::leader::Standing;
use super::{State, admin, join};

/// The kind of a body of JSON.
pub(crate) const JSON: &str = "application/json; charset=utf-8";

/// The answer to an unknown path or method, on every port.
pub(crate) async fn nothing_here() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 Not Found")
}

/// Pages being served.
#[derive(Debug)]
pub(crate) struct Pages {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Pages {
    /// Stops taking requests and waits until those at work are answered, for [`http_server::STOP_PATIENCE`] at most.
    pub(crate) async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }

    /// Stops at once; the port is free when this returns.
    #[cfg(all(feature = "cli", feature = "metadata-etcd"))]
    pub(crate) async fn cut_off(mut self) {
        self.task.abort();
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
    let mut pages = vec![serve("admin", admin, while_leading(admin::pages(state.clone()), state))];
    let metadata_at = metadata.as_ref().map(|(_, at)| *at);
    if let Some((listener, _)) = metadata {
        pages.push(serve("metadata", listener, while_leading(metadata_pages(state), state)));
    }
    Ok((pages, Some(admin_at), metadata_at))
}

/// What a master says of itself, whether it leads or not.
const OF_ITSELF: [&str; 4] = ["/health", "/role", "/ha_status", "/leader"];

/// Pages that are answered while the master leads, as calls are.
fn while_leading(pages: Router, state: &Arc<State>) -> Router {
    let standing = state.standing.clone();
    pages.layer(middleware::from_fn(move |request, next| answer(standing.clone(), request, next)))
}

/// Asks before, and before the answer leaves.
async fn answer(standing: Arc<Standing>, request: Request, next: Next) -> Response {
    let deposed = || (StatusCode::SERVICE_UNAVAILABLE, "this master does not lead").into_response();
    if OF_ITSELF.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    if !standing.leads() {
        return deposed();
    }
    let answer = next.run(request).await;
    if standing.leads() { answer } else { deposed() }
}

fn metadata_pages(state: &Arc<State>) -> Router {
    directory_pages(state.metadata.clone(), state.clone())
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
}

/// A name may be taken when the master saw its client die, and nobody has mounted anything under it since.
impl Owners for State {
    fn is_gone(&self, name: &str) -> bool {
        self.departed.has(name) && self.master.segment_status_named(name).is_err()
    }

    fn taken(&self, name: &str) {
        self.departed.forget(name);
    }

    fn note_refused(&self) {
        self.entries_refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Takes a port. The error names the flag that sets it.
pub(crate) async fn bind(host: &str, port: u16, flag: &str) -> Result<(ParentOnly<TcpListener>, SocketAddr)> {
    let address = join(host, port);
    let bound = async {
        let listener = TcpListener::bind(&address).await?;
        let at = listener.local_addr()?;
        std::io::Result::Ok((ParentOnly::new(listener), at))
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

/// Largest number of connections of an HTTP port of the master, and the part of the descriptors that they may take.
fn limits(name: &'static str) -> ListenerLimits {
    match name {
        "metadata" => http_limits(name, 4096, 8),
        _ => http_limits(name, 256, 32),
    }
}

/// Serves pages on a port that was taken, under the name that the listener has in metrics.
pub(crate) fn serve(name: &'static str, listener: ParentOnly<TcpListener>, pages: Router) -> Pages {
    let (stop, mut stopped) = watch::channel(false);
    let until = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let task = tokio::spawn(http_server::serve(listener, pages, limits(name), until));
    Pages { stop, task }
}
