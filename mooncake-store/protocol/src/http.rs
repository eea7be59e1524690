//! HTTP server of a program: listener, routes and shutdown.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use mooncake_core::fork::ParentOnly;
use mooncake_core::host_port;
use mooncake_core::web_origin::AllowedHosts;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::ListenerLimits;
use mooncake_transport::http_server::{self, http_limits};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Media type of JSON responses.
pub const JSON: &str = "application/json; charset=utf-8";

/// Responds to an unknown path or method, on every port.
pub async fn nothing_here() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 Not Found")
}

/// A running HTTP server.
#[derive(Debug)]
pub struct Pages {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Pages {
    /// Stops accepting requests and waits until those in progress are answered, at most
    /// [`http_server::STOP_PATIENCE`].
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }

    /// Stops at once. The port is free when this returns.
    pub async fn cut_off(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Binds a port. An error names the flag that sets the port.
pub async fn bind(host: &str, port: u16, flag: &str) -> Result<(ParentOnly<TcpListener>, SocketAddr)> {
    let address = host_port::join(host, port);
    let bound = async {
        let listener = TcpListener::bind(&address).await?;
        let at = listener.local_addr()?;
        std::io::Result::Ok((ParentOnly::new(listener), at))
    };
    bound.await.map_err(|error| {
        let text = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                format!("port {port} is in use ({address}): choose another with --{flag}, or stop the program that uses it")
            }
            _ => format!("cannot listen at {address} (--{flag}): {error}"),
        };
        Error::new(ErrorCode::RpcFail, text).with_source(error)
    })
}

/// Returns the connection limits of an HTTP port of the master, and its share of the file
/// descriptors.
fn limits(name: &'static str) -> ListenerLimits {
    match name {
        "metadata" => http_limits(name, 4096, 8),
        _ => http_limits(name, 256, 32),
    }
}

/// Serves routes on a bound port. `name` is the listener's name in metrics. Requests of websites
/// that change state are served for own pages only, by one of the names in `hosts`.
pub fn serve(
    name: &'static str,
    listener: ParentOnly<TcpListener>,
    pages: Router,
    hosts: AllowedHosts,
) -> Pages {
    let (stop, mut stopped) = watch::channel(false);
    let until = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let task = tokio::spawn(http_server::serve(listener, pages, limits(name), hosts, until));
    Pages { stop, task }
}
