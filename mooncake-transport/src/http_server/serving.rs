//! HTTP connections of one listener: limits on number and time, and a stop that does not wait for
//! peers.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tower_service::Service;

use crate::admission::{ConnectionSlot, Connections, ListenerLimits};

/// Maximum time between the first byte of a request and the end of its header, and between two
/// parts of its body.
const REQUEST: Duration = Duration::from_secs(10);
/// Longest time between two requests of a connection. Clients keep idle connections for less.
const IDLE: Duration = Duration::from_secs(75);
/// Time for the responses to pending requests once the server stops.
pub const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// Returns the bounds of an HTTP listener of that name.
pub fn http_limits(name: &'static str, slots: usize, descriptor_share: u64) -> ListenerLimits {
    ListenerLimits { name, slots, descriptor_share, request: Some(REQUEST), idle: Some(IDLE) }
}

/// Serves the routes until the future is ready. Requests with a complete header by then are
/// answered within [`STOP_PATIENCE`]; then every connection is closed.
pub async fn serve(
    listener: ParentOnly<TcpListener>,
    pages: Router,
    limits: ListenerLimits,
    until: impl Future<Output = ()> + Send,
) {
    let mut connections = Connections::new(limits);
    let (stop, stopped) = watch::channel(false);
    let mut until = std::pin::pin!(until);
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            () = &mut until => break,
            accepted = connections.accept(|cx| listener.poll_accept(cx)) => accepted,
        };
        let (pages, stopped) = (pages.clone(), stopped.clone());
        connections.admit(|slot| async move {
            if let Err(error) = serve_connection(stream, pages, slot, stopped).await {
                tracing::debug!(%peer, %error, "HTTP connection ended");
            }
        });
    }
    drop(listener);
    stop.send_replace(true);
    let patience = if is_planted("pages-stop-waits-for-peers") { Duration::MAX } else { STOP_PATIENCE };
    connections.finish(patience).await;
}

async fn serve_connection(
    stream: TcpStream,
    pages: Router,
    slot: ConnectionSlot,
    mut stopped: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let slot = Arc::new(slot);
    let io = TokioIo::new(Watched { stream: ParentOnly::new(stream), slot: slot.clone() });
    let service = service_fn(move |request: Request<Incoming>| {
        let (slot, mut pages) = (slot.clone(), pages.clone());
        async move {
            // A connection that has been closed is aborted at the next await, before a route sees
            // the request.
            if !slot.work() {
                std::future::pending::<()>().await;
            }
            let _working = Working(&slot);
            let body = |body| Body::new(WatchedBody { body, slot: slot.clone() });
            // A router is always ready.
            pages.call(request.map(body)).await
        }
    });
    let mut connection = std::pin::pin!(http1::Builder::new().serve_connection(io, service));
    tokio::select! {
        biased;
        ended = connection.as_mut() => return ended,
        _ = stopped.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

/// Guard of a request in progress. Afterwards the connection waits for its peer.
struct Working<'a>(&'a ConnectionSlot);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.wait_for_request();
    }
}

/// Stream whose first bytes begin a request.
struct Watched {
    stream: ParentOnly<TcpStream>,
    slot: Arc<ConnectionSlot>,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut *self.stream).poll_read(cx, buf))?;
        self.slot.begin_request();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Body of a request. The connection counts as waiting while a part of the body is missing.
struct WatchedBody {
    body: Incoming,
    slot: Arc<ConnectionSlot>,
}

impl hyper::body::Body for WatchedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Pending => {
                self.slot.wait_within_request();
                Poll::Pending
            }
            frame if self.slot.work() => frame,
            // The connection has been closed, and its task is about to be dropped.
            _ => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
