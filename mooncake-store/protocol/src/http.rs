//! HTTP pages of a program: a port, the pages, and their end.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::ListenerLimits;
use mooncake_transport::http_server::{self, http_limits};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::place::join;

/// The kind of a body of JSON.
pub const JSON: &str = "application/json; charset=utf-8";

/// The answer to an unknown path or method, on every port.
pub async fn nothing_here() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 Not Found")
}

/// Pages being served.
#[derive(Debug)]
pub struct Pages {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Pages {
    /// Stops taking requests and waits until those at work are answered, for [`http_server::STOP_PATIENCE`] at most.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }

    /// Stops at once; the port is free when this returns.
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

/// Takes a port. The error names the flag that sets it.
pub async fn bind(host: &str, port: u16, flag: &str) -> Result<(TcpListener, SocketAddr)> {
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

/// Largest number of connections of an HTTP port of the master, and the part of the descriptors that they may take.
fn limits(name: &'static str) -> ListenerLimits {
    match name {
        "metadata" => http_limits(name, 4096, 8),
        _ => http_limits(name, 256, 32),
    }
}

/// Serves pages on a port that was taken, under the name that the listener has in metrics.
pub fn serve(name: &'static str, listener: TcpListener, pages: Router) -> Pages {
    let (stop, mut stopped) = watch::channel(false);
    let until = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let task = tokio::spawn(http_server::serve(listener, pages, limits(name), until));
    Pages { stop, task }
}
