//! HTTP connections of one listener: limits on number, time, rate and bytes, and a stop that does
//! not wait for peers.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode};
use axum::response::IntoResponse;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::web_origin::{AllowedHosts, Guard, RequestHead};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower_service::Service;

use super::limits::{MAX_HEADER, MAX_HEADER_FIELDS, Refusal};
use crate::admission::{ConnectionSlot, Connections, ListenerLimits, Turn};

/// Maximum time between the first byte of a request and the end of its header, and between two
/// parts of its body.
const REQUEST: Duration = Duration::from_secs(10);
/// Longest time between two requests of a connection. Clients keep idle connections for less.
const IDLE: Duration = Duration::from_secs(75);
/// Time for the responses to pending requests once the server stops.
pub const STOP_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of bytes that a peer may send after its request has been refused. Without them,
/// the kernel would reset the connection, and the peer would not see the response.
const MAX_DISCARDED: u64 = 64 << 20;

/// Returns the bounds of an HTTP listener of that name.
pub fn http_limits(name: &'static str, slots: usize, descriptor_share: u64) -> ListenerLimits {
    ListenerLimits {
        request: Some(REQUEST),
        idle: Some(IDLE),
        ..ListenerLimits::new(name, slots, descriptor_share)
    }
}

/// Serves the routes until the future is ready. Requests with a complete header by then are
/// answered within [`STOP_PATIENCE`]; then every connection is closed.
///
/// Requests that change state are refused with 403 if the page of another origin sends them.
/// `hosts` has the names by which own pages may call the server.
pub async fn serve(
    listener: ParentOnly<TcpListener>,
    pages: Router,
    limits: ListenerLimits,
    hosts: AllowedHosts,
    until: impl Future<Output = ()> + Send,
) {
    let (mut connections, hosts) = (Connections::new(limits), Arc::new(hosts));
    let (stop, stopped) = watch::channel(false);
    let mut until = std::pin::pin!(until);
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            () = &mut until => break,
            accepted = connections.accept(|cx| listener.poll_accept(cx)) => accepted,
        };
        let (pages, hosts, stopped) = (pages.clone(), hosts.clone(), stopped.clone());
        connections.admit(|slot| async move {
            slot.set_peer(peer);
            if let Err(error) = serve_connection(stream, pages, hosts, slot, stopped).await {
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
    hosts: Arc<AllowedHosts>,
    slot: ConnectionSlot,
    mut stopped: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let exchange = Arc::new(Exchange::new(slot));
    let io = TokioIo::new(Watched {
        stream: ParentOnly::new(stream),
        exchange: exchange.clone(),
        refusal: Bytes::new(),
        discarded: 0,
    });
    let idle = exchange.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (exchange, mut pages) = (exchange.clone(), pages.clone());
        request.extensions_mut().insert(Turns(exchange.clone()));
        let refusal = refusal(&request, &hosts);
        async move {
            // A connection that has been closed is aborted at the next await, before a route sees
            // the request.
            if !exchange.slot.work() {
                std::future::pending::<()>().await;
            }
            let _working = Working(&exchange);
            exchange.is_cut.store(false, Relaxed);
            let body = |body| Body::new(WatchedBody::new(body, exchange.clone()));
            let response = match refusal {
                Some(text) => (StatusCode::FORBIDDEN, text).into_response(),
                // A router is always ready.
                None => pages.call(request.map(body)).await?,
            };
            Ok::<_, Infallible>(response.map(|body| WatchedResponse::new(body, exchange.clone())))
        }
    });
    let mut server = http1::Builder::new();
    server.max_buf_size(MAX_HEADER).max_header_size(MAX_HEADER).max_headers(MAX_HEADER_FIELDS);
    let mut connection = std::pin::pin!(server.serve_connection(io, service));
    tokio::select! {
        biased;
        ended = connection.as_mut() => return ended,
        _ = stopped.wait_for(|stop| *stop) => {
            // A peer without a request in progress is not waited for.
            idle.is_cut.store(false, Relaxed);
            connection.as_mut().graceful_shutdown();
        }
    }
    connection.await
}

/// Returns why a request is refused, if it is one of a website that may not send it.
fn refusal(request: &Request<Incoming>, hosts: &AllowedHosts) -> Option<String> {
    let headers = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let refusal =
        RequestHead::new(request.method().as_str(), authority, headers).refusal(hosts, Guard::Changes);
    refusal.inspect(|text| {
        tracing::debug!(path = request.uri().path(), reason = text.trim_end(), "request refused")
    })
}

/// Turns of the requests of a connection, as an extension of each request.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Exchange>);

impl Turns {
    /// Waits for a permit. Until then, the connection may be closed for a new one. Returns `None`
    /// if the semaphore is closed.
    pub async fn acquire(&self, permits: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = permits.clone().try_acquire_owned() {
            return Some(permit);
        }
        let exchange = &*self.0;
        let turn = InTurn { exchange, turn: exchange.slot.begin_turn() };
        let mut acquired = std::pin::pin!(permits.clone().acquire_owned());
        let permit = std::future::poll_fn(|cx| {
            exchange.is_in_turn.store(true, Relaxed);
            let polled = acquired.as_mut().poll(cx);
            if polled.is_pending() && !is_planted("turns-count-as-work") {
                exchange.slot.wait_for_turn();
                exchange.hold();
            }
            polled
        });
        let permit = permit.await.ok();
        drop(turn);
        // A connection that has been closed is aborted at the next await.
        if !exchange.slot.work() {
            std::future::pending::<()>().await;
        }
        permit
    }
}

/// Guard of a wait for a turn.
struct InTurn<'a> {
    exchange: &'a Exchange,
    turn: Turn,
}

impl Drop for InTurn<'_> {
    fn drop(&mut self) {
        self.exchange.is_in_turn.store(false, Relaxed);
        self.exchange.slot.end_turn(self.turn);
    }
}

/// Request and response of a connection that are in progress.
#[derive(Debug)]
struct Exchange {
    slot: ConnectionSlot,
    /// Bytes of the request that have arrived.
    received: AtomicUsize,
    /// Bytes of the response that have been produced and not been sent.
    unsent: AtomicUsize,
    /// Bytes of the response that have been produced.
    produced: AtomicUsize,
    /// True while more of the response is produced.
    is_open: AtomicBool,
    /// True until the response has been sent.
    is_responding: AtomicBool,
    /// True while the request waits for its turn.
    is_in_turn: AtomicBool,
    /// Bytes of the request line that have arrived.
    line: AtomicUsize,
    /// True if the request line has arrived.
    has_line: AtomicBool,
    /// True if a request was answered before all of it had arrived.
    is_cut: AtomicBool,
}

impl Exchange {
    fn new(slot: ConnectionSlot) -> Self {
        let (received, unsent, produced, line) = Default::default();
        let (is_open, is_responding, is_in_turn, has_line, is_cut) = Default::default();
        Self { slot, received, unsent, produced, is_open, is_responding, is_in_turn, line, has_line, is_cut }
    }

    /// Accounts for the bytes of a connection that waits for its peer.
    fn hold(&self) {
        self.slot.hold(self.received.load(Relaxed) + self.unsent.load(Relaxed));
    }

    /// Marks the connection as waiting for its peer to read the response.
    fn wait_for_reader(&self) {
        self.slot.wait_for_reader(self.produced.load(Relaxed) as u64);
        self.hold();
    }

    /// Records the outcome of a write to the stream.
    fn record_write(&self, written: &Poll<io::Result<usize>>) {
        match written {
            Poll::Pending => self.wait_for_reader(),
            // Heads and lengths of parts leave with the bytes of the body.
            Poll::Ready(Ok(count)) if !is_planted("sent-bytes-stay") => {
                let unsent = self.unsent.load(Relaxed);
                self.unsent.store(unsent.saturating_sub(*count), Relaxed);
            }
            Poll::Ready(_) => {}
        }
    }

    /// Records that everything that was produced has been sent.
    fn record_flush(&self) {
        if self.unsent.load(Relaxed) != 0 {
            self.unsent.store(0, Relaxed);
            self.hold();
        }
        if self.is_responding.load(Relaxed) && !self.is_open.load(Relaxed) {
            self.is_responding.store(false, Relaxed);
            self.produced.store(0, Relaxed);
            self.slot.end_transfer();
        }
    }
}

/// Guard of a request in progress. Afterwards the connection waits for its peer.
struct Working<'a>(&'a Exchange);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.received.store(0, Relaxed);
        self.0.line.store(0, Relaxed);
        self.0.has_line.store(false, Relaxed);
        self.0.hold();
        self.0.slot.end_transfer();
        self.0.slot.wait_for_request();
    }
}

/// Stream whose first bytes begin a request.
struct Watched {
    stream: ParentOnly<TcpStream>,
    exchange: Arc<Exchange>,
    /// Rest of the refusal that replaces the empty response of the parser.
    refusal: Bytes,
    /// Number of bytes discarded after a refusal.
    discarded: u64,
}

impl Watched {
    /// Sends a refusal in place of the empty response that the parser writes to a request that it
    /// cannot read. `None` for every other write.
    fn poll_refuse(&mut self, cx: &mut Context<'_>, written: &[u8]) -> Option<Poll<io::Result<()>>> {
        if self.refusal.is_empty() {
            // A response of a route is marked before it is written.
            let status = written.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5));
            let status: u16 = std::str::from_utf8(status?).ok()?.parse().ok()?;
            if status < 400 || self.exchange.is_responding.load(Relaxed) {
                return None;
            }
            let Exchange { line, received, .. } = &*self.exchange;
            let refusal = Refusal::of_header(status, line.load(Relaxed), received.load(Relaxed));
            tracing::debug!(?refusal, "request refused");
            self.refusal = refusal.to_message();
            self.exchange.is_cut.store(true, Relaxed);
        }
        while !self.refusal.is_empty() {
            match Pin::new(&mut *self.stream).poll_write(cx, &self.refusal) {
                Poll::Ready(Ok(count)) => drop(self.refusal.split_to(count)),
                Poll::Ready(Err(error)) => return Some(Poll::Ready(Err(error))),
                Poll::Pending => return Some(Poll::Pending),
            }
        }
        Some(Poll::Ready(Ok(())))
    }

    /// Discards the rest of a refused request until the peer closes its side.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (mut scratch, before) = ([0; 8 << 10], self.discarded);
        while self.discarded < MAX_DISCARDED {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut *self.stream).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    self.discarded += buf.filled().len() as u64;
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending if self.discarded > before => {
                    self.exchange.slot.wait_in_transfer(self.discarded);
                    return Poll::Pending;
                }
                Poll::Pending => {
                    self.exchange.slot.wait_within_request(self.discarded);
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(())
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut *self.stream).poll_read(cx, buf)?;
        if polled.is_pending() {
            self.exchange.hold();
            return Poll::Pending;
        }
        let arrived = &buf.filled()[before..];
        self.exchange.received.fetch_add(arrived.len(), Relaxed);
        if !self.exchange.has_line.load(Relaxed) {
            let end = arrived.iter().position(|byte| *byte == b'\n');
            self.exchange.line.fetch_add(end.unwrap_or(arrived.len()), Relaxed);
            self.exchange.has_line.store(end.is_some(), Relaxed);
        }
        // A later request does not begin before this one has had its turn.
        if !self.exchange.is_in_turn.load(Relaxed) {
            self.exchange.slot.begin_request();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(refused) = self.poll_refuse(cx, buf) {
            return refused.map_ok(|()| buf.len());
        }
        let polled = Pin::new(&mut *self.stream).poll_write(cx, buf);
        self.exchange.record_write(&polled);
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The server flushes the stream once it has written everything to it.
        self.exchange.record_flush();
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut *self.stream).poll_shutdown(cx);
        if !self.exchange.is_cut.load(Relaxed) || !matches!(polled, Poll::Ready(Ok(()))) {
            return polled;
        }
        self.poll_discard(cx).map(Ok)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // The parser's response is the only slice.
        if let Some(refused) = bufs.first().and_then(|buf| self.poll_refuse(cx, buf)) {
            return refused.map_ok(|()| bufs[0].len());
        }
        let polled = Pin::new(&mut *self.stream).poll_write_vectored(cx, bufs);
        self.exchange.record_write(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Body of a request. The connection counts as waiting while a part of the body is missing.
struct WatchedBody {
    body: Incoming,
    exchange: Arc<Exchange>,
    has_ended: bool,
}

impl WatchedBody {
    fn new(body: Incoming, exchange: Arc<Exchange>) -> Self {
        let has_ended = hyper::body::Body::is_end_stream(&body);
        Self { body, exchange, has_ended }
    }
}

impl hyper::body::Body for WatchedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.has_ended = matches!(polled, Poll::Ready(None)) || self.body.is_end_stream();
        match polled {
            Poll::Pending => {
                let missing = self.body.size_hint().upper().unwrap_or(0);
                let len = missing.saturating_add(self.exchange.received.load(Relaxed) as u64);
                self.exchange.slot.wait_within_request(len);
                self.exchange.hold();
                Poll::Pending
            }
            frame if self.exchange.slot.work() => frame,
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

impl Drop for WatchedBody {
    fn drop(&mut self) {
        if !self.has_ended {
            self.exchange.is_cut.store(true, Relaxed);
        }
    }
}

/// Body of a response. The connection counts as working while more of it is produced.
struct WatchedResponse {
    body: Body,
    exchange: Arc<Exchange>,
}

impl WatchedResponse {
    fn new(body: Body, exchange: Arc<Exchange>) -> Self {
        exchange.is_open.store(true, Relaxed);
        exchange.is_responding.store(true, Relaxed);
        Self { body, exchange }
    }
}

impl hyper::body::Body for WatchedResponse {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if !self.exchange.slot.work() {
            // The connection has been closed, and its task is about to be dropped.
            return Poll::Pending;
        }
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            let len = frame.data_ref().map_or(0, Bytes::len);
            self.exchange.unsent.fetch_add(len, Relaxed);
            self.exchange.produced.fetch_add(len, Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for WatchedResponse {
    fn drop(&mut self) {
        self.exchange.is_open.store(false, Relaxed);
        self.exchange.slot.wait_for_request();
    }
}
