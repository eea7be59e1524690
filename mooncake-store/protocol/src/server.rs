//! The answering side: one task per connection, which reads, answers and writes by itself.
//!
//! All requests that have come are answered before anything is written, and their answers leave in one write. While an
//! answer waits for a slow reader nothing more is read from it, so a connection holds at most one request that is not
//! whole, and the answers of those that were.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_transport::admission::{Connections, ListenerLimits, Place};
use mooncake_transport::net;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::client::reserve;
use super::eager::Eager;
use super::frame::{self, DEFAULT_MAX_BODY, FIRST_SEQ, FrameError, Parsed, Status};
pub use super::heartbeat::Class;
use super::heartbeat::{AbortOnDrop, HeartbeatThread, Overload};

/// Answers calls. It runs on the connection's task, so it must not block.
pub trait Service: Send + Sync + 'static {
    /// Appends the body of the answer to `out`, or says why there is none; what it had appended is then dropped.
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal>;

    /// Begins a call that has to wait, for a disk for example: what it comes to is the body of the answer. Requests behind it on the same connection wait
    /// with it. It is dropped when the caller closes the connection: nobody waits for it any more. `None` for those that [`call`](Self::call) answers at once.
    fn begin(&self, _function: u32, _body: &[u8]) -> Option<Waiting> {
        None
    }

    /// Whether some calls are heartbeats, which are served by a thread of their own.
    fn has_heartbeats(&self) -> bool {
        false
    }

    /// How a call is treated when there are more than can be answered.
    fn class(&self, _function: u32) -> Class {
        Class::Kept
    }

    /// Takes note of a call that was refused because there were more than could be answered.
    fn note_shed(&self) {}

    /// Whether answers that are ready may still leave. If not, the connection ends: nobody is to act on what is not so any more.
    fn may_answer(&self) -> bool {
        true
    }
}

/// A call under way.
pub type Waiting = BoxFuture<'static, Result<Vec<u8>, Refusal>>;

/// Why a call was not made: what the RPC layer answers, and a sentence.
pub type Refusal = (Status, String);

/// How a [`Server`] behaves.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Name of the listener in metrics.
    pub listener: &'static str,
    /// Largest number of connections. One more takes the place of the connection that has waited longest for its peer; it is
    /// closed at once where every connection works on a request.
    pub max_connections: usize,
    /// Part of the process's descriptors that connections may take: `1 / descriptor_share`.
    pub descriptor_share: u64,
    /// Longest request that is taken, in bytes.
    pub max_body: usize,
    /// A connection is closed when nothing has moved on it for this long. Never, if absent.
    pub idle_timeout: Option<Duration>,
    /// A connection is closed when a request pauses for this long. Never, if absent.
    pub request_timeout: Option<Duration>,
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
        }
    }
}

/// A server that has its port and does not answer yet.
#[derive(Debug)]
pub struct Server {
    listener: std::net::TcpListener,
    address: SocketAddr,
    options: ServerOptions,
}

/// A server at work. Dropped, it stops without waiting.
#[derive(Debug)]
pub struct RunningServer {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
    _thread: Option<HeartbeatThread>,
}

impl Server {
    /// Takes the port of `host:port`; port 0 takes a free one.
    ///
    /// # Errors
    /// `RPC_FAIL` with the address and what to do about it.
    pub async fn bind(address: &str, options: ServerOptions) -> Result<Self> {
        let listener = TcpListener::bind(address).await.map_err(|error| bind_failed(address, error))?;
        let address = listener.local_addr()?;
        Ok(Self { listener: listener.into_std()?, address, options })
    }

    /// The address it has.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers from now on, on the current tokio runtime.
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
        let listener = match TcpListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "cannot listen any more"),
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
            connections.admit(|place| async move {
                let connection = Connection {
                    stream,
                    place,
                    inbox: Vec::new(),
                    done: 0,
                    outbox: Vec::new(),
                    eager: Eager::default(),
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
            places: self.max_connections,
            descriptor_share: self.descriptor_share,
            request: self.request_timeout.into_iter().chain(self.idle_timeout).min(),
            idle: self.idle_timeout,
        }
    }
}

impl RunningServer {
    /// The address it answers at.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Stops at once, whatever is not answered; the port is free when this returns.
    pub async fn cut_off(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Stops taking connections and requests, and waits until those at work are answered.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        // Ends the accepting task and with it, through its JoinSet, every connection.
        self.task.abort();
    }
}

fn bind_failed(address: &str, error: io::Error) -> Error {
    let text = match error.kind() {
        io::ErrorKind::AddrInUse => {
            let port = address.rsplit(':').next().unwrap_or(address);
            format!("port {port} is in use ({address}): choose another with --rpc_port, or stop who has it")
        }
        io::ErrorKind::AddrNotAvailable => format!("{address} is no address of this machine"),
        io::ErrorKind::PermissionDenied => format!("no permission to listen at {address}"),
        _ => format!("cannot listen at {address}: {error}"),
    };
    Error::new(ErrorCode::RpcFail, text).with_source(error)
}

/// Longest pause inside a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a stopping server waits for readers to take the answers they are owed.
const STOP_PATIENCE: Duration = Duration::from_secs(2);
/// Answers are sent when they take this many bytes, even if more requests have come.
const FLUSH_AT: usize = 256 << 10;
/// Requests of one connection that are answered before others have their turn.
const AT_ONCE: usize = 256;
/// Bytes taken at a time of what comes behind a request that waits.
const READ_AHEAD: usize = 4 << 10;
/// Bytes of buffer a connection keeps between requests.
const KEPT_BUFFER: usize = 256 << 10;

/// State that the connections of a server share.
#[derive(Debug)]
struct Shared {
    overload: Overload,
    /// Where requests are answered, if connections are accepted elsewhere.
    requests: Option<Handle>,
}

/// Where a connection is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    /// On the thread for heartbeats, until it asks something else.
    Heartbeats,
    /// On the runtime of the server, for as long as it lives.
    Requests,
}

/// Serves a connection on the thread for heartbeats for as long as it asks nothing else, and then on the runtime of the server.
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

/// A connection that no runtime has.
type Parts = (std::net::TcpStream, Connection<()>);

/// `S` is `()` while the connection moves from one runtime to another.
struct Connection<S = TcpStream> {
    stream: S,
    place: Place,
    inbox: Vec<u8>,
    /// Bytes of `inbox` that are answered.
    done: usize,
    outbox: Vec<u8>,
    eager: Eager,
    lane: Lane,
}

/// Why a connection is not served here any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Closed,
    /// The next request of the connection belongs to another lane.
    Moves,
}

/// What a connection does once its answers are sent.
enum Next {
    /// It reads on: so many bytes are missing.
    Read(usize),
    /// There may be more to answer.
    Answer,
    /// The next request belongs to another lane.
    Move,
    /// It waits for the answer to the request of that number.
    Wait(u32, Waiting),
}

/// Why a connection ended, when the other side did not just close it.
#[derive(Debug)]
enum End {
    Io(io::Error),
    Frame(FrameError),
    /// There is another server in charge.
    Deposed,
    /// Closed with this many bytes of a request missing.
    Torn(usize),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Io(error) => error.fmt(f),
            End::Frame(error) => error.fmt(f),
            End::Deposed => f.write_str("this server is not in charge any more"),
            End::Torn(missing) => write!(f, "closed with {missing} bytes of a request missing"),
        }
    }
}

impl Connection {
    fn into_parts(self) -> io::Result<Parts> {
        let Self { stream, place, inbox, done, outbox, eager, lane } = self;
        Ok((stream.into_std()?, Connection { stream: (), place, inbox, done, outbox, eager, lane }))
    }

    /// Call on the runtime that is to serve the connection.
    fn from_parts((stream, connection): Parts) -> io::Result<Self> {
        let Connection { stream: (), place, inbox, done, outbox, eager, lane } = connection;
        Ok(Self { stream: TcpStream::from_std(stream)?, place, inbox, done, outbox, eager, lane })
    }

    /// Whether the other side has given up. What it had sent before stays readable, but nobody waits for the answer.
    fn is_reset(&self) -> bool {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        let seen = socket2::SockRef::from(&self.stream).peek(&mut byte);
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
        if !self.place.work() {
            return Ok(Exit::Closed);
        }
        loop {
            if !self.inbox.is_empty()
                && overload.is_late()
                && !is_planted("serve-abandoned-requests")
                && self.is_reset()
            {
                return Ok(Exit::Closed);
            }
            let answered = self.answer(service, options.max_body, overload);
            if !self.outbox.is_empty() {
                if !service.may_answer() {
                    return Err(End::Deposed);
                }
                if !self.send().await? {
                    return Ok(Exit::Closed);
                }
                self.outbox.clear();
                self.outbox.shrink_to(KEPT_BUFFER);
            }
            let missing = match answered.map_err(End::Frame)? {
                Next::Read(missing) => missing,
                Next::Answer => {
                    // Others wait, too.
                    tokio::task::yield_now().await;
                    continue;
                }
                Next::Move => return Ok(Exit::Moves),
                Next::Wait(seq, waiting) => {
                    let outcome = tokio::select! {
                        biased;
                        outcome = waiting => outcome,
                        ended = closed(&self.stream, &mut self.inbox) => return ended.map(|()| Exit::Closed),
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    frame::write_reply(&mut self.outbox, seq, |out| outcome.map(|body| out.extend(body)));
                    continue;
                }
            };
            self.make_room(missing);
            let count = match self.eager.read(&self.stream, &mut self.inbox) {
                Some(outcome) => outcome.map_err(End::Io)?,
                None => {
                    match self.inbox.is_empty() {
                        true => self.place.wait_for_request(),
                        false => self.place.wait_for_more(),
                    }
                    let count = tokio::select! {
                        biased;
                        count = self.stream.read_buf(&mut self.inbox) => count.map_err(End::Io)?,
                        _ = &mut stopped => return Ok(Exit::Closed),
                    };
                    if !self.place.work() {
                        return Ok(Exit::Closed);
                    }
                    count
                }
            };
            if count == 0 {
                return if self.inbox.is_empty() { Ok(Exit::Closed) } else { Err(End::Torn(missing)) };
            }
        }
    }

    /// Sends the answers. Returns whether the connection still has its place.
    async fn send(&mut self) -> Result<bool, End> {
        // Most answers leave at once, which is no wait.
        let sent = match self.stream.try_write(&self.outbox) {
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(End::Io(error)),
        };
        if sent == self.outbox.len() {
            return Ok(true);
        }
        self.place.wait_for_request();
        self.stream.write_all(&self.outbox[sent..]).await.map_err(End::Io)?;
        Ok(self.place.work())
    }

    /// Answers the whole requests that are there, up to one that has to wait.
    fn answer(
        &mut self,
        service: &impl Service,
        max_body: usize,
        overload: &Overload,
    ) -> Result<Next, FrameError> {
        let mut left = AT_ONCE;
        while self.outbox.len() < FLUSH_AT && left > 0 {
            left -= 1;
            match frame::parse_request(&self.inbox[self.done..], max_body)? {
                Parsed::Partial(missing) => return Ok(Next::Read(missing)),
                Parsed::Whole(request, used) => {
                    if self.lane == Lane::Heartbeats && service.class(request.function) != Class::Heartbeat {
                        return Ok(Next::Move);
                    }
                    self.done += used;
                    if request.seq >= FIRST_SEQ
                        && overload.sheds()
                        && service.class(request.function) == Class::Sheddable
                    {
                        service.note_shed();
                        frame::write_reply(&mut self.outbox, request.seq, |_| {
                            Err((Status::Overloaded, "try again later".to_owned()))
                        });
                        continue;
                    }
                    if let Some(waiting) = service.begin(request.function, request.body) {
                        return Ok(Next::Wait(request.seq, waiting));
                    }
                    frame::write_reply(&mut self.outbox, request.seq, |out| {
                        service.call(request.function, request.body, out)
                    });
                }
            }
        }
        Ok(Next::Answer)
    }

    /// Forgets what is answered and makes room for what is missing.
    fn make_room(&mut self, missing: usize) {
        self.inbox.drain(..self.done);
        self.done = 0;
        if self.inbox.is_empty() {
            self.inbox.shrink_to(KEPT_BUFFER);
        }
        reserve(&mut self.inbox, missing);
    }
}

/// Returns when the other side has closed the connection. What it sends meanwhile is kept; with much of that nothing is noticed any more.
async fn closed(stream: &TcpStream, inbox: &mut Vec<u8>) -> Result<(), End> {
    let most = inbox.len() + FLUSH_AT;
    while inbox.len() < most {
        stream.readable().await.map_err(End::Io)?;
        inbox.reserve(READ_AHEAD);
        match stream.try_read_buf(inbox) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(End::Io(error)),
        }
    }
    std::future::pending().await
}
