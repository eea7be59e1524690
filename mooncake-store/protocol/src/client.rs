//! RPC client: a pool of connections, each lent to one call at a time.
//!
//! A call writes its request in one piece and reads the response in the task of the caller, so that
//! no other task is involved. A dropped call closes its connection. A connection that was closed
//! while it was idle costs one retry on a new connection. A new connection that is closed without a
//! response costs two more. Retries are safe because every call of the table may be repeated.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mooncake_core::error::{Error, ErrorCode, Reason, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::busy_poll::BusyPoll;
use super::frame::{self, DEFAULT_MAX_BODY, FIRST_SEQ, FrameError, Parsed, Status};
use super::message::{MASTER_VERSION, Ping, Request, TABLE_VERSION};
use super::meter::CallMeter;
use super::pack;
use super::retry::RetryBudget;
use super::server_location::ServerLocation;

/// Options of an [`RpcClient`].
#[derive(Clone, Debug)]
pub struct RpcOptions {
    /// Maximum number of connections. A call that finds all of them busy waits.
    pub max_connections: usize,
    /// Timeout for opening a connection.
    pub connect_timeout: Duration,
    /// Timeout of a whole call: waiting for a connection, opening it, the retry and the response.
    pub call_timeout: Duration,
    /// Maximum length of a response in bytes.
    pub max_body: usize,
    /// Counter of the calls.
    pub meter: Option<Arc<CallMeter>>,
}

impl Default for RpcOptions {
    fn default() -> Self {
        Self {
            max_connections: 32,
            connect_timeout: Duration::from_secs(3),
            call_timeout: Duration::from_secs(10),
            max_body: DEFAULT_MAX_BODY,
            meter: None,
        }
    }
}

/// Number of further connections that a call opens if new ones are closed without a response.
const NEW_CONNECTIONS: usize = 2;

/// Client of one server. The first call opens the first connection.
#[derive(Debug)]
pub struct RpcClient {
    place: ServerLocation,
    options: RpcOptions,
    calls: Lane,
    /// Separate connections for heartbeats, so that they never wait for other calls and the server
    /// can tell them apart.
    heartbeats: Lane,
    retries: RetryBudget,
}

/// Connections for calls of one kind.
#[derive(Debug)]
struct Lane {
    idle: Mutex<Vec<Connection>>,
    slots: Semaphore,
}

impl Lane {
    fn new(connections: usize) -> Self {
        Self { idle: Mutex::new(Vec::new()), slots: Semaphore::new(connections.max(1)) }
    }
}

impl RpcClient {
    /// Creates a client of the server at `host:port`.
    pub fn new(address: impl Into<String>, options: RpcOptions) -> Self {
        Self::at(ServerLocation::Fixed(address.into().into()), options)
    }

    /// Creates a client of the server at `place`.
    pub fn at(place: ServerLocation, options: RpcOptions) -> Self {
        let (calls, heartbeats) = (Lane::new(options.max_connections), Lane::new(1));
        Self { place, options, calls, heartbeats, retries: RetryBudget::default() }
    }

    /// Returns the location of the server.
    pub fn location(&self) -> &ServerLocation {
        &self.place
    }

    /// Makes a call.
    ///
    /// # Errors
    /// The reply contains the errors of the server. The outer error means that there is no reply:
    /// - `RPC_FAIL` if the server cannot be reached or violates the protocol.
    /// - `RPC_TIMEOUT` if the server does not respond in time.
    /// - `NOT_SUPPORTED` if the server lacks the call.
    /// - `INVALID_VERSION` if the server has the call with another signature. A call that Mooncake
    ///   C++ lacks is optional for every caller, so that its error is `NOT_SUPPORTED` instead.
    pub async fn call<R: Request + Sync>(&self, request: &R) -> Result<R::Reply> {
        self.call_as(R::FUNCTION, request).await
    }

    /// Makes a call like [`RpcClient::call`], and counts it as function `counted`.
    pub(super) async fn call_as<R: Request + Sync>(&self, counted: u32, request: &R) -> Result<R::Reply> {
        let body = |out: &mut Vec<u8>| {
            if R::HAS_ARGUMENTS {
                pack::encode(request, out);
            }
        };
        let Some(meter) = &self.options.meter else {
            return self.send(R::FUNCTION, R::NAME, &body).await.and_then(|lent| self.decode::<R>(lent));
        };
        let began = meter.begin();
        let sent = self.send(R::FUNCTION, R::NAME, &body).await;
        let answer = sent.and_then(|lent| self.decode::<R>(lent));
        meter.end(counted, began, answer.is_ok());
        answer
    }

    fn decode<R: Request>(&self, lent: Lent<'_>) -> Result<R::Reply> {
        let decoded = lent.reply::<R>().and_then(|body| {
            pack::decode::<R::Reply>(body).map_err(|error| self.misread(R::NAME, error.into()))
        });
        lent.give_back();
        decoded
    }

    /// Sends one request and reads its reply, within the time of a call.
    ///
    /// The future is boxed and independent of the type of the request, so that this crate compiles
    /// it once for all calls of all programs.
    fn send<'a>(
        &'a self,
        function: u32,
        name: &'static str,
        body: &'a (dyn Fn(&mut Vec<u8>) + Sync),
    ) -> BoxFuture<'a, Result<Lent<'a>>> {
        let round = async move {
            let mut tries = 0;
            loop {
                let lent = self.round_trip(function, body).await?;
                if !lent.is_refused_for_now() {
                    self.retries.earn();
                    return Ok(lent);
                }
                let Some(pause) = self.retries.spend(tries) else { return Ok(lent) };
                tries += 1;
                lent.give_back();
                tokio::time::sleep(pause).await;
            }
        };
        Box::pin(async move {
            match timeout(self.options.call_timeout, round).await {
                Ok(outcome) => outcome.map_err(|error: Error| error.context(name)),
                Err(_) => Err(self.timed_out(name)),
            }
        })
    }

    /// Sends one request and reads its reply, which stays in the connection's buffer.
    async fn round_trip(&self, function: u32, body: &(dyn Fn(&mut Vec<u8>) + Sync)) -> Result<Lent<'_>> {
        let lane = match function {
            Ping::FUNCTION if !is_planted("heartbeats-in-line") => &self.heartbeats,
            _ => &self.calls,
        };
        let slot =
            lane.slots.acquire().await.map_err(|_| Error::internal("the connection pool is closed"))?;
        let mut slot = Some(slot);
        let mut idle = self.take_idle(lane);
        let (mut retries, mut closed) = (0, None);
        loop {
            let (mut connection, reused) = match idle.take() {
                Some(connection) => (connection, true),
                None => match (self.connect().await, closed.take()) {
                    (Ok(connection), _) => (connection, false),
                    // The server that closed the previous connection has gone.
                    (Err(_), Some(broken)) => return Err(self.broken(broken)),
                    (Err(error), None) => return Err(error),
                },
            };
            let to = connection.to.clone();
            let answered = tokio::select! {
                biased;
                answered = connection.exchange(function, body, self.options.max_body) => answered,
                // A frozen leader would block the caller until the timeout.
                () = self.place.left(&to) => Err(Broken { cause: Cause::Deposed, answered: false }),
            };
            // A response of a deposed leader does not count.
            let answered = match answered {
                Ok(()) if !self.place.is(&to) => Err(Broken { cause: Cause::Deposed, answered: true }),
                answered => answered,
            };
            match answered {
                Ok(()) => return Ok(Lent { pool: self, lane, connection, _slot: slot.take() }),
                Err(broken) if reused && broken.closed_while_idle() => {
                    // The other idle connections were most likely closed, too.
                    lane.idle.lock().clear();
                    tracing::debug!(server = %self.place, "an idle connection was closed; trying a new one");
                }
                // A server at its connection limit may close a connection before the first request
                // arrives.
                Err(broken) if retries < NEW_CONNECTIONS && broken.closed_while_idle() => {
                    retries += 1;
                    closed = Some(broken);
                }
                Err(broken) => return Err(self.broken(broken)),
            }
        }
    }

    /// Prefer the connection used last, so that surplus connections age.
    fn take_idle(&self, lane: &Lane) -> Option<Connection> {
        loop {
            let connection = lane.idle.lock().pop()?;
            if connection.is_quiet() && self.place.is(&connection.to) {
                return Some(connection);
            }
        }
    }

    async fn connect(&self) -> Result<Connection> {
        let to = self.place.now(self.options.connect_timeout).await?;
        let failed = |error: &io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::ConnectionRefused => ": is mooncake_master running there?",
                _ => "",
            };
            Error::new(ErrorCode::RpcFail, format!("cannot connect to {to}: {error}{hint}"))
        };
        let connecting = async {
            tokio::select! {
                connected = TcpStream::connect(&*to) => connected,
                () = self.place.left(&to) => Err(io::Error::other("the leader was deposed")),
            }
        };
        let stream = match timeout(self.options.connect_timeout, connecting).await {
            Ok(outcome) => outcome.map_err(|error| failed(&error).with_source(error))?,
            Err(_) => {
                let waited = self.options.connect_timeout;
                let text = format!("cannot connect to {to}: timed out after {waited:?}");
                return Err(Error::new(ErrorCode::RpcTimeout, text));
            }
        };
        net::keep_connection(&stream)?;
        Ok(Connection {
            stream,
            to,
            outbox: Vec::new(),
            inbox: Vec::new(),
            seq: FIRST_SEQ,
            asking: false,
            busy_poll: BusyPoll::default(),
        })
    }

    fn timed_out(&self, name: &'static str) -> Error {
        let text = format!("{} did not answer within {:?}", self.place, self.options.call_timeout);
        Error::new(ErrorCode::RpcTimeout, text).context(name)
    }

    fn broken(&self, broken: Broken) -> Error {
        let broke = |cause: &dyn std::fmt::Display| {
            let text = format!("the connection to {} broke: {cause}", self.place);
            Error::new(ErrorCode::RpcFail, text).with_reason(Reason::ConnectionBroken)
        };
        match broken.cause {
            Cause::Oversized(len) => Error::invalid(format!(
                "a request of {len} bytes; at most {} are sent",
                self.options.max_body
            )),
            Cause::Deposed => broke(&"the leader was deposed"),
            Cause::Closed => broke(&"closed by the other side"),
            Cause::Io(error) => broke(&error).with_source(error),
            Cause::Frame(error) => broke(&error).with_source(error),
            Cause::Seq { sent, got } => {
                let (sent, got) = (sent & !FIRST_SEQ, got & !FIRST_SEQ);
                broke(&format!("asked {sent}, answered {got}"))
            }
        }
    }

    fn misread(&self, name: &'static str, error: Error) -> Error {
        error
            .context(format!(
                "cannot decode the response of {}: expected version {TABLE_VERSION} (master {MASTER_VERSION})",
                self.place
            ))
            .context(name)
    }

    /// Converts an error status into the error of the call.
    fn refused<R: Request>(&self, status: Status, body: &[u8]) -> Error {
        let said = pack::decode::<&[u8]>(body).unwrap_or_default();
        let said = String::from_utf8_lossy(&said[..said.len().min(512)]).into_owned();
        let code = match status {
            Status::NotRegistered => ErrorCode::NotSupported,
            Status::InvalidArguments | Status::UnknownVersion
                if R::IS_EXTENSION && !is_planted("require-extension-version") =>
            {
                ErrorCode::NotSupported
            }
            Status::InvalidArguments | Status::UnknownVersion => ErrorCode::InvalidVersion,
            Status::Timeout => ErrorCode::RpcTimeout,
            _ => ErrorCode::RpcFail,
        };
        let ours = match code {
            ErrorCode::InvalidVersion => format!(" (this side speaks version {TABLE_VERSION})"),
            _ => String::new(),
        };
        let status = format!("{} ({})", status.text(), status.number());
        Error::new(code, format!("{} refused the call: {status}: {said}{ours}", self.place)).context(R::NAME)
    }
}

/// Maximum buffer size that an idle connection keeps, in bytes.
const KEPT_BUFFER: usize = 64 << 10;
/// Minimum size of a read from the socket, in bytes.
const READ_CHUNK: usize = 16 << 10;

/// A connection lent to a call. It is closed on drop; only [`Lent::give_back`] returns it to the
/// pool.
#[derive(Debug)]
struct Lent<'p> {
    pool: &'p RpcClient,
    lane: &'p Lane,
    connection: Connection,
    _slot: Option<SemaphorePermit<'p>>,
}

impl Lent<'_> {
    /// Returns whether the server is overloaded.
    fn is_refused_for_now(&self) -> bool {
        let reply = frame::parse_reply(&self.connection.inbox, self.pool.options.max_body);
        matches!(reply, Ok(Parsed::Whole(reply, _)) if reply.status == Status::Overloaded)
    }

    /// Returns the body of the response, or the error status.
    fn reply<R: Request>(&self) -> Result<&[u8]> {
        match frame::parse_reply(&self.connection.inbox, self.pool.options.max_body) {
            Ok(Parsed::Whole(reply, _)) if reply.status == Status::Ok => Ok(reply.body),
            Ok(Parsed::Whole(reply, _)) => Err(self.pool.refused::<R>(reply.status, reply.body)),
            _ => Err(Error::internal("a reply that was whole is not any more")),
        }
    }

    fn give_back(mut self) {
        for buffer in [&mut self.connection.inbox, &mut self.connection.outbox] {
            buffer.clear();
            buffer.shrink_to(KEPT_BUFFER);
        }
        self.lane.idle.lock().push(self.connection);
    }
}

/// A connection with its buffers.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Address of the server.
    to: Arc<str>,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
    seq: u32,
    /// True while a request is sent and not yet answered.
    asking: bool,
    busy_poll: BusyPoll,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.asking {
            // A request without a waiting caller must not arrive late: discard the bytes that the
            // kernel still holds.
            let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}

/// End of a connection, with its cause.
#[derive(Debug)]
struct Broken {
    cause: Cause,
    /// True if any byte of the reply had arrived.
    answered: bool,
}

#[derive(Debug)]
enum Cause {
    Closed,
    Io(io::Error),
    Frame(FrameError),
    Seq {
        sent: u32,
        got: u32,
    },
    /// Another master leads now.
    Deposed,
    /// The request exceeds the maximum length; nothing was sent.
    Oversized(usize),
}

impl Broken {
    fn closed_while_idle(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
        !self.answered
            && match &self.cause {
                Cause::Closed => true,
                Cause::Io(error) => {
                    matches!(error.kind(), BrokenPipe | ConnectionReset | ConnectionAborted | NotConnected)
                }
                Cause::Frame(_) | Cause::Seq { .. } | Cause::Oversized(_) | Cause::Deposed => false,
            }
    }
}

impl Connection {
    /// Returns whether nothing, not even an end of stream, has arrived since the last response.
    /// Makes a system call only if something has arrived.
    fn is_quiet(&self) -> bool {
        let mut byte = [0];
        matches!(self.stream.try_read(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends one request and reads one complete reply into `inbox`.
    async fn exchange(
        &mut self,
        function: u32,
        body: &(dyn Fn(&mut Vec<u8>) + Sync),
        max_body: usize,
    ) -> Result<(), Broken> {
        self.seq = self.seq.wrapping_add(1) | FIRST_SEQ;
        self.outbox.clear();
        self.inbox.clear();
        self.asking = true;
        frame::write_request(&mut self.outbox, self.seq, function, body);
        if self.outbox.len() - frame::REQUEST_HEAD > max_body {
            return Err(Broken { cause: Cause::Oversized(self.outbox.len()), answered: false });
        }
        let sent = self.stream.write_all(&self.outbox).await;
        sent.map_err(|error| Broken { cause: Cause::Io(error), answered: false })?;
        loop {
            let answered = !self.inbox.is_empty();
            let broken = |cause| Broken { cause, answered };
            let missing = match frame::parse_reply(&self.inbox, max_body) {
                Ok(Parsed::Whole(reply, used)) if reply.seq == self.seq && used == self.inbox.len() => {
                    self.asking = false;
                    return Ok(());
                }
                Ok(Parsed::Whole(reply, _)) => {
                    return Err(broken(Cause::Seq { sent: self.seq, got: reply.seq }));
                }
                Ok(Parsed::Partial(missing)) => missing,
                Err(error) => return Err(broken(Cause::Frame(error))),
            };
            reserve(&mut self.inbox, missing);
            let read = match self.busy_poll.read(&self.stream, &mut self.inbox) {
                Some(read) => read,
                None => self.stream.read_buf(&mut self.inbox).await,
            };
            match read {
                Ok(0) => return Err(broken(Cause::Closed)),
                Ok(_) => {}
                Err(error) => return Err(broken(Cause::Io(error))),
            }
        }
    }
}

/// Reserves buffer space for missing bytes, at most as much as has arrived already, because the
/// announced length is not trusted.
pub(super) fn reserve(buffer: &mut Vec<u8>, missing: usize) {
    buffer.reserve(missing.min(buffer.len()).max(READ_CHUNK));
}
