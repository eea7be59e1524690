//! RPC server: one task per connection reads, handles and writes by itself.
//!
//! A connection handles all requests that have arrived, then sends their responses in one write.
//! While a response waits for a slow reader, the connection reads nothing more. It therefore holds
//! at most one incomplete request and the responses of the complete ones. These bytes have a budget
//! and a minimum rate (`mooncake_transport::admission`).

mod oversized;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::host_port::split;
use mooncake_transport::admission::{
    ByteBudget, ConnectionSlot, Connections, ListenerLimits, SMALL_BUFFERS, TransferRate,
};
use mooncake_transport::net;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, watch};

use super::busy_poll::BusyPoll;
pub use super::frame::Refusal;
use super::frame::{self, DEFAULT_MAX_BODY, FIRST_SEQ, FrameError, Parsed, REQUEST_HEAD, Status, reserve};
pub use super::heartbeat::Class;
use super::heartbeat::{AbortOnDrop, HeartbeatThread, Overload};

/// Handler of calls. It runs on the task of the connection, so it must not block.
pub trait Service: Send + Sync + 'static {
    /// Appends the body of the response to `out`, or returns an error; what it had appended is then
    /// dropped.
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal>;

    /// Returns the logical time. A connection notes it when it has read requests.
    fn receipt(&self) -> u64 {
        0
    }

    /// Handles a call like [`call`](Self::call). The request was read at the logical time
    /// `receipt`; calls of other connections may have been handled since.
    fn call_received(
        &self,
        function: u32,
        body: &[u8],
        _receipt: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        self.call(function, body, out)
    }

    /// Begins a call that has to wait, for a disk for example. The future returns the body of the
    /// response.
    ///
    /// Later requests on the same connection wait with the call. The future is dropped if the
    /// caller closes the connection. Returns `None` for calls that [`call`](Self::call) handles at
    /// once.
    fn begin(&self, _function: u32, _body: &[u8]) -> Option<Waiting> {
        None
    }

    /// Begins a call like [`begin`](Self::begin), with the bytes behind the body of its request,
    /// and with the space that was reserved for it. Most calls have neither.
    fn begin_attached(
        &self,
        function: u32,
        body: &[u8],
        _attachment: &[u8],
        _space: Option<OwnedSemaphorePermit>,
    ) -> Option<Waiting> {
        self.begin(function, body)
    }

    /// Returns the space that a request of this length takes until it has been handled, and the
    /// number of permits that it needs there. The rest of a request is not received before.
    fn space(&self, _len: usize) -> Option<(&Arc<Semaphore>, u32)> {
        None
    }

    /// Returns whether some calls are heartbeats, which a separate thread serves.
    fn has_heartbeats(&self) -> bool {
        false
    }

    /// Returns the permits of calls that take long, if a call with a body of this length is one.
    /// Such a call waits for one of them before it begins, so that a few threads serve all calls of
    /// its kind.
    fn permits(&self, _function: u32, _body: usize) -> Option<&Semaphore> {
        None
    }

    /// Returns the treatment of a call under overload.
    fn class(&self, _function: u32) -> Class {
        Class::Critical
    }

    /// Records a call that was refused under overload.
    fn note_shed(&self) {}

    /// Returns whether finished responses may still be sent. If not, the connection closes, so that
    /// no caller acts on outdated state.
    fn may_answer(&self) -> bool {
        true
    }
}

/// Future of a call in progress.
pub type Waiting = BoxFuture<'static, Result<Vec<u8>, Refusal>>;

/// Options of a [`Server`].
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Name of the listener in metrics.
    pub listener: &'static str,
    /// Maximum number of connections. A further connection replaces the one that has been idle
    /// longest. The further connection is closed at once if every connection works on a request.
    pub max_connections: usize,
    /// Share of the process's file descriptors for connections: `1 / descriptor_share`.
    pub descriptor_share: u64,
    /// Maximum length of a request in bytes.
    pub max_body: usize,
    /// Time without any traffic after which a connection is closed; `None` for never.
    pub idle_timeout: Option<Duration>,
    /// Maximum pause inside a request or a response, after which the connection is closed; `None`
    /// for no limit.
    pub request_timeout: Option<Duration>,
    /// Minimum rate of requests and responses.
    pub rate: TransferRate,
    /// Budget of incomplete requests and unread responses.
    pub budget: ByteBudget,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            listener: "rpc",
            max_connections: 16 << 10,
            descriptor_share: 2,
            max_body: DEFAULT_MAX_BODY,
            idle_timeout: None,
            request_timeout: Some(REQUEST_TIMEOUT),
            rate: TransferRate::DEFAULT,
            budget: ByteBudget::of_process(),
        }
    }
}

/// A server with a bound port that does not accept connections yet.
#[derive(Debug)]
pub struct Server {
    listener: ParentOnly<std::net::TcpListener>,
    address: SocketAddr,
    options: ServerOptions,
}

/// A running server. On drop it stops without waiting.
#[derive(Debug)]
pub struct RunningServer {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
    _thread: Option<HeartbeatThread>,
}

impl Server {
    /// Binds `host:port`; port 0 selects a free port.
    ///
    /// # Errors
    /// `RPC_FAIL` with the address and a remedy.
    pub async fn bind(address: &str, options: ServerOptions) -> Result<Self> {
        let listener = TcpListener::bind(address).await.map_err(|error| bind_failed(address, error))?;
        let address = listener.local_addr()?;
        let listener = ParentOnly::new(listener).try_map(TcpListener::into_std)?;
        Ok(Self { listener, address, options })
    }

    /// Returns the bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Starts the server on the current tokio runtime.
    pub fn start(self, service: Arc<impl Service>) -> RunningServer {
        let (stop, stopped) = watch::channel(false);
        let address = self.address;
        let thread = if service.has_heartbeats() { HeartbeatThread::start() } else { None };
        let task = match &thread {
            Some(thread) => thread.handle.spawn(self.serve(service, stopped, Some(Handle::current()))),
            None => tokio::spawn(self.serve(service, stopped, None)),
        };
        RunningServer { address, stop, task, _thread: thread }
    }

    async fn serve(
        self,
        service: Arc<impl Service>,
        mut stop: watch::Receiver<bool>,
        requests: Option<Handle>,
    ) {
        let options = Arc::new(self.options);
        let listener = match self.listener.try_map(TcpListener::from_std) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "cannot accept connections any more"),
        };
        let runtime = requests.clone().unwrap_or_else(Handle::current);
        let shared = Arc::new(Shared { overload: Overload::default(), requests });
        let mut connections = Connections::new(options.limits());
        let measured = shared.clone();
        let _measuring = AbortOnDrop(runtime.spawn(async move { measured.overload.measure().await }));
        loop {
            let (stream, peer) = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                accepted = connections.accept(|cx| listener.poll_accept(cx)) => accepted,
            };
            let (service, options, stop) = (Arc::clone(&service), Arc::clone(&options), stop.clone());
            let shared = shared.clone();
            connections.admit(|slot| async move {
                slot.set_peer(peer);
                let connection = Connection {
                    stream: ParentOnly::new(stream),
                    peer,
                    slot,
                    inbox: Vec::new(),
                    receipt: 0,
                    done: 0,
                    outbox: Vec::new(),
                    space: None,
                    busy_poll: BusyPoll::default(),
                    lane: if shared.requests.is_some() { Lane::Heartbeats } else { Lane::Requests },
                };
                match serve_in_lanes(connection, service, options, stop, shared).await {
                    Ok(()) => tracing::debug!(%peer, "connection closed"),
                    Err(end) => tracing::debug!(%peer, %end, "connection ended"),
                }
            });
        }
        drop(listener);
        connections.finish(STOP_PATIENCE).await;
    }
}

impl ServerOptions {
    fn limits(&self) -> ListenerLimits {
        ListenerLimits {
            name: self.listener,
            slots: self.max_connections,
            descriptor_share: self.descriptor_share,
            request: self.request_timeout.into_iter().chain(self.idle_timeout).min(),
            idle: self.idle_timeout,
            rate: self.rate,
            budget: self.budget.clone(),
        }
    }
}

impl RunningServer {
    /// Returns the bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Stops at once and drops unanswered requests. The port is free when this returns.
    pub async fn cut_off(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Stops accepting connections and requests, and waits until those in progress are answered.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        // Dropping the accept task ends every connection through its JoinSet.
        self.task.abort();
    }
}

fn bind_failed(address: &str, error: io::Error) -> Error {
    let text = match error.kind() {
        io::ErrorKind::AddrInUse => {
            let port = split(address).1.map_or_else(|| address.to_owned(), |port| port.to_string());
            format!(
                "port {port} is in use ({address}): choose another with --rpc_port (mooncake_client: --port), or stop the program that uses it"
            )
        }
        io::ErrorKind::AddrNotAvailable => format!("{address} is not an address of this machine"),
        io::ErrorKind::PermissionDenied => format!("no permission to listen at {address}"),
        _ => format!("cannot listen at {address}: {error}"),
    };
    Error::new(ErrorCode::RpcFail, text).with_source(error)
}

/// Maximum pause inside a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time that a stopping server waits for readers to take their responses.
const STOP_PATIENCE: Duration = Duration::from_secs(2);
/// Size of pending responses in bytes at which they are sent even if more requests have arrived.
const FLUSH_AT: usize = 256 << 10;
/// Maximum number of requests that one connection handles before it yields to others.
const AT_ONCE: usize = 64;
/// Length of the requests that one connection handles before it yields to others, in bytes.
const BYTES_AT_ONCE: usize = 64 << 10;
/// Size of reads behind a waiting request, in bytes.
const READ_AHEAD: usize = 4 << 10;
/// Bytes of a request with space of its own that have to arrive next, at the minimum rate.
const STEP: usize = 8 << 20;
/// Maximum buffer size that a connection keeps between requests, in bytes.
const MAX_IDLE_BUFFER: usize = 256 << 10;

/// State that the connections of a server share.
#[derive(Debug)]
struct Shared {
    overload: Overload,
    /// Runtime that handles requests, if another thread accepts connections.
    requests: Option<Handle>,
}

/// Lane of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    /// On the thread for heartbeats, until another request arrives.
    Heartbeats,
    /// On the runtime of the server, until the connection closes.
    Requests,
}

/// Serves a connection on the thread for heartbeats as long as it sends only heartbeats, then on
/// the runtime of the server.
async fn serve_in_lanes<S: Service>(
    mut connection: Connection,
    service: Arc<S>,
    options: Arc<ServerOptions>,
    stop: watch::Receiver<bool>,
    shared: Arc<Shared>,
) -> Result<(), End> {
    net::keep_connection(&connection.stream).map_err(End::Io)?;
    let exit = connection.run(&*service, &options, stop.clone(), &shared.overload).await?;
    let requests = match (exit, &shared.requests) {
        (Exit::Moves, Some(requests)) => requests.clone(),
        _ => return Ok(()),
    };
    connection.lane = Lane::Requests;
    let parts = connection.into_parts().map_err(End::Io)?;
    let served = requests.spawn(async move {
        let mut connection = Connection::from_parts(parts).map_err(End::Io)?;
        connection.run(&*service, &options, stop, &shared.overload).await
    });
    AbortOnDrop(served).outcome().await.map_err(End::Io)?.map(drop)
}

/// A connection that is not registered with any runtime.
type Parts = (ParentOnly<std::net::TcpStream>, Connection<()>);

/// A connection. `S` is `()` while it moves from one runtime to another.
struct Connection<S = ParentOnly<TcpStream>> {
    stream: S,
    peer: SocketAddr,
    slot: ConnectionSlot,
    inbox: Vec<u8>,
    /// Logical time of the last read.
    receipt: u64,
    /// Number of handled bytes in `inbox`.
    done: usize,
    outbox: Vec<u8>,
    /// Space of the next request.
    space: Option<OwnedSemaphorePermit>,
    busy_poll: BusyPoll,
    lane: Lane,
}

/// Reason for the end of a connection in its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Closed,
    /// The next request belongs to another lane.
    Moves,
}

/// Next step of a connection after its responses are sent.
enum Next {
    /// Read at least this many bytes.
    Read(usize),
    /// Handle more requests.
    Answer,
    /// Move to another lane for the next request.
    Move,
    /// Wait for the response to the request with this sequence number and length.
    Wait(u32, usize, Waiting),
    /// Wait for a permit for the next call, which has this function and length of its body.
    Permit(u32, usize),
    /// Wait for the space of the next request, which has this length.
    Space(usize),
    /// Discard a request that was refused for its length, of which this many bytes are left.
    Discard(u64),
}

/// Cause of the end of a connection, other than a regular close by the client.
#[derive(Debug)]
enum End {
    Io(io::Error),
    Frame(FrameError),
    /// Another server leads.
    Deposed,
    /// The client closed the connection with this many bytes of a request missing.
    Torn(usize),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Io(error) => error.fmt(f),
            End::Frame(error) => error.fmt(f),
            End::Deposed => f.write_str("this server was deposed"),
            End::Torn(missing) => write!(f, "closed with {missing} bytes of a request missing"),
        }
    }
}

impl Connection {
    fn into_parts(self) -> io::Result<Parts> {
        let Self { stream, peer, slot, inbox, receipt, done, outbox, space, busy_poll, lane } = self;
        let stream = stream.try_map(TcpStream::into_std)?;
        Ok((
            stream,
            Connection { stream: (), peer, slot, inbox, receipt, done, outbox, space, busy_poll, lane },
        ))
    }

    /// Restores a connection on the current runtime.
    fn from_parts((stream, connection): Parts) -> io::Result<Self> {
        let Connection { stream: (), peer, slot, inbox, receipt, done, outbox, space, busy_poll, lane } =
            connection;
        let stream = stream.try_map(TcpStream::from_std)?;
        Ok(Self { stream, peer, slot, inbox, receipt, done, outbox, space, busy_poll, lane })
    }

    /// Returns whether the client has reset the connection. Earlier bytes stay readable, but no
    /// caller waits for a response.
    fn is_reset(&self) -> bool {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        let seen = socket2::SockRef::from(&*self.stream).peek(&mut byte);
        seen.is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock)
    }

    async fn run(
        &mut self,
        service: &impl Service,
        options: &ServerOptions,
        mut stop: watch::Receiver<bool>,
        overload: &Overload,
    ) -> Result<Exit, End> {
        let mut stopped = std::pin::pin!(stop.wait_for(|stop| *stop));
        if !self.slot.work() {
            return Ok(Exit::Closed);
        }
        let mut permit = None;
        loop {
            if !self.inbox.is_empty()
                && overload.is_late()
                && !is_planted("serve-abandoned-requests")
                && self.is_reset()
            {
                return Ok(Exit::Closed);
            }
            let answered = self.answer(service, options.max_body, overload, permit.take());
            if !self.outbox.is_empty() {
                if !service.may_answer() {
                    return Err(End::Deposed);
                }
                if !self.send().await? {
                    return Ok(Exit::Closed);
                }
                self.outbox.clear();
                self.outbox.shrink_to(MAX_IDLE_BUFFER);
            }
            let missing = match answered.map_err(End::Frame)? {
                Next::Read(missing) => missing,
                Next::Answer => {
                    // Yield to the other connections.
                    tokio::task::yield_now().await;
                    continue;
                }
                Next::Move => return Ok(Exit::Moves),
                Next::Space(len) => {
                    let Some((space, permits)) = service.space(len) else { continue };
                    let space = space.clone().acquire_many_owned(permits);
                    self.slot.wait_for_turn();
                    let acquired = tokio::select! {
                        biased;
                        acquired = space => acquired.ok(),
                        ended = self.closed() => return ended.map(|()| Exit::Closed),
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    if acquired.is_none() || !self.slot.work() {
                        return Ok(Exit::Closed);
                    }
                    // The time of the request begins now.
                    self.slot.end_transfer();
                    self.space = acquired;
                    continue;
                }
                Next::Discard(left) => {
                    let all = tokio::select! {
                        biased;
                        all = self.discard(left) => all?,
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    match all {
                        true => continue,
                        false => return Ok(Exit::Closed),
                    }
                }
                Next::Permit(function, body) => {
                    let Some(permits) = service.permits(function, body) else { continue };
                    // The call has not begun: the connection may be closed for a new one, and for
                    // the bytes of its request.
                    self.slot.wait_for_turn();
                    permit = tokio::select! {
                        biased;
                        // A semaphore that is closed limits nothing any more.
                        acquired = permits.acquire() => acquired.ok(),
                        ended = self.closed() => return ended.map(|()| Exit::Closed),
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    if permit.is_none() || !self.slot.work() {
                        return Ok(Exit::Closed);
                    }
                    continue;
                }
                Next::Wait(seq, request, waiting) => {
                    // The call has a copy of the bytes that it needs.
                    self.reserve_space(0);
                    let outcome = tokio::select! {
                        biased;
                        outcome = waiting => outcome,
                        ended = self.closed_beside(request) => return ended.map(|()| Exit::Closed),
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    frame::write_reply(&mut self.outbox, seq, |out| outcome.map(|body| out.extend(body)));
                    continue;
                }
            };
            self.reserve_space(missing);
            let count = match self.busy_poll.read(&self.stream, &mut self.inbox) {
                Some(outcome) => outcome.map_err(End::Io)?,
                None => {
                    self.wait_for_bytes(missing);
                    let count = tokio::select! {
                        biased;
                        // After a short read it waits without another system call.
                        count = self.stream.read_buf(&mut self.inbox) => count.map_err(End::Io)?,
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    if !self.slot.work() {
                        return Ok(Exit::Closed);
                    }
                    count
                }
            };
            self.receipt = service.receipt();
            if count == 0 {
                return if self.inbox.is_empty() { Ok(Exit::Closed) } else { Err(End::Torn(missing)) };
            }
        }
    }

    /// Marks the connection as waiting for a request, or for `missing` bytes of one, and accounts
    /// for its buffers. An idle connection keeps large buffers only while there is space.
    fn wait_for_bytes(&mut self, missing: usize) {
        if self.inbox.is_empty() {
            self.slot.wait_for_request();
            if !self.slot.may_keep(self.buffered()) {
                self.inbox.shrink_to(SMALL_BUFFERS / 2);
                self.outbox.shrink_to(SMALL_BUFFERS / 2);
            }
        } else {
            // A request that others wait for has to arrive at its rate from the first byte on.
            let missing = if self.space.is_some() { missing.min(STEP) } else { missing };
            self.slot.wait_in_transfer((self.inbox.len() + missing) as u64);
        }
        self.slot.hold(self.buffered());
    }

    /// Returns the size of the buffers in bytes.
    fn buffered(&self) -> usize {
        self.inbox.capacity() + self.outbox.capacity()
    }

    /// Sends the responses. Returns whether the connection may continue.
    async fn send(&mut self) -> Result<bool, End> {
        // Most responses leave at once without a wait.
        let mut sent = self.try_send(0)?;
        if sent == self.outbox.len() {
            return Ok(true);
        }
        self.slot.end_transfer();
        while sent < self.outbox.len() {
            self.slot.wait_for_reader(self.outbox.len() as u64);
            self.slot.hold(self.buffered());
            self.stream.writable().await.map_err(End::Io)?;
            if !self.slot.work() {
                return Ok(false);
            }
            sent += self.try_send(sent)?;
        }
        self.slot.end_transfer();
        Ok(true)
    }

    /// Sends as much as the socket takes. Returns the number of sent bytes.
    fn try_send(&self, from: usize) -> Result<usize, End> {
        match self.stream.try_write(&self.outbox[from..]) {
            Ok(sent) => Ok(sent),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(End::Io(error)),
        }
    }

    /// Handles the complete requests in the buffer, up to one that has to wait. `permit` is that of
    /// the first one, if it needs one.
    fn answer(
        &mut self,
        service: &impl Service,
        max_body: usize,
        overload: &Overload,
        mut permit: Option<SemaphorePermit<'_>>,
    ) -> Result<Next, FrameError> {
        let (mut left, mut bytes_left) = (AT_ONCE, BYTES_AT_ONCE);
        while self.outbox.len() < FLUSH_AT && left > 0 && bytes_left > 0 {
            left -= 1;
            let parsed = match frame::parse_request(&self.inbox[self.done..], max_body) {
                Err(error @ FrameError::TooLong { .. }) => return self.refuse_oversized(error),
                parsed => parsed?,
            };
            match parsed {
                Parsed::Partial(missing) => {
                    let arrived = self.inbox.len() - self.done;
                    if arrived >= REQUEST_HEAD && self.needs_space(service, arrived + missing) {
                        return Ok(Next::Space(arrived + missing));
                    }
                    return Ok(Next::Read(missing));
                }
                Parsed::Whole(request, used) => {
                    if self.lane == Lane::Heartbeats && service.class(request.function) != Class::Heartbeat {
                        return Ok(Next::Move);
                    }
                    self.slot.end_transfer();
                    if request.seq >= FIRST_SEQ
                        && overload.sheds()
                        && service.class(request.function) == Class::Sheddable
                    {
                        self.done += used;
                        service.note_shed();
                        frame::write_reply(&mut self.outbox, request.seq, |_| {
                            Err((Status::Overloaded, "try again later".to_owned()))
                        });
                        continue;
                    }
                    if self.needs_space(service, used) {
                        return Ok(Next::Space(used));
                    }
                    // Held until the call has ended.
                    let mut permitted = permit.take();
                    if permitted.is_none()
                        && let Some(permits) = service.permits(request.function, request.body.len())
                    {
                        permitted = permits.try_acquire().ok();
                        if permitted.is_none() {
                            return Ok(Next::Permit(request.function, request.body.len()));
                        }
                    }
                    self.done += used;
                    bytes_left = bytes_left.saturating_sub(used);
                    let (function, space) = (request.function, self.space.take());
                    let begun = service.begin_attached(function, request.body, request.attachment, space);
                    if let Some(waiting) = begun {
                        return Ok(Next::Wait(request.seq, used, waiting));
                    }
                    let status = frame::write_reply(&mut self.outbox, request.seq, |out| {
                        service.call_received(request.function, request.body, self.receipt, out)
                    });
                    if status == Status::TooLarge {
                        self.log_too_large("response", request.function);
                    }
                }
            }
        }
        Ok(Next::Answer)
    }

    /// Returns whether the next request, which has this length, waits for its space.
    fn needs_space(&self, service: &impl Service, len: usize) -> bool {
        self.space.is_none() && service.space(len).is_some()
    }

    /// Returns when the client has closed the connection. Bytes that arrive meanwhile are kept;
    /// with many of them a close goes unnoticed.
    async fn closed(&mut self) -> Result<(), End> {
        self.closed_beside(0).await
    }

    /// Does the same as [`closed`](Self::closed) beside a call that has that many bytes of its
    /// request.
    async fn closed_beside(&mut self, request: usize) -> Result<(), End> {
        let most = self.inbox.len() + FLUSH_AT;
        loop {
            self.slot.hold(self.buffered() + request);
            if self.inbox.len() >= most {
                return std::future::pending().await;
            }
            self.stream.readable().await.map_err(End::Io)?;
            self.inbox.reserve(READ_AHEAD);
            match self.stream.try_read_buf(&mut self.inbox) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(End::Io(error)),
            }
        }
    }

    /// Drops handled bytes and reserves space for missing ones.
    fn reserve_space(&mut self, missing: usize) {
        self.inbox.drain(..self.done);
        self.done = 0;
        if self.inbox.is_empty() {
            self.inbox.shrink_to(MAX_IDLE_BUFFER);
        }
        if missing > 0 {
            reserve(&mut self.inbox, missing);
        }
    }
}
