//! The calling side: a pool of connections, each lent to one call at a time.
//!
//! A call writes its request in one piece and reads the answer in the caller's own task: no task of ours stands in
//! between. A call that is dropped half-way takes its connection with it. A connection that turns out to have been
//! closed while it lay idle costs one retry on a new one, and a new one that is closed without an answer two more; that is
//! safe because every call of the table may be repeated.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::error::{Error, ErrorCode, Reason, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::eager::Eager;
use super::frame::{self, DEFAULT_MAX_BODY, FIRST_SEQ, FrameError, Parsed, Status};
use super::message::{MASTER_VERSION, Ping, Request, TABLE_VERSION};
use super::meter::CallMeter;
use super::pack;
use super::place::Place;
use super::retry::RetryBudget;

/// How an [`RpcClient`] behaves.
#[derive(Clone, Debug)]
pub struct RpcOptions {
    /// Most connections at a time; a call that finds all of them busy waits.
    pub max_connections: usize,
    /// How long a connection may take to open.
    pub connect_timeout: Duration,
    /// How long a call may take in all: waiting for a connection, opening it, the retry and the answer.
    pub call_timeout: Duration,
    /// Longest answer that is taken, in bytes.
    pub max_body: usize,
    /// What counts the calls, if anything does.
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

/// Number of further connections that a call opens when new ones are closed without an answer.
const NEW_CONNECTIONS: usize = 2;

/// Calls one server. Opens no connection before the first call.
#[derive(Debug)]
pub struct RpcClient {
    place: Place,
    options: RpcOptions,
    calls: Lane,
    /// Heartbeats do not wait for connections that other calls keep busy, and the server can tell them apart.
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
    /// A client of the server at `host:port`.
    pub fn new(address: impl Into<String>, options: RpcOptions) -> Self {
        Self::at(Place::Fixed(address.into().into()), options)
    }

    /// A client of the server at that place.
    pub fn at(place: Place, options: RpcOptions) -> Self {
        let (calls, heartbeats) = (Lane::new(options.max_connections), Lane::new(1));
        Self { place, options, calls, heartbeats, retries: RetryBudget::default() }
    }

    /// Where the server is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Makes a call.
    ///
    /// # Errors
    /// The server's own refusals are inside the reply. The error outside it means there is none: `RPC_FAIL` when the
    /// server cannot be reached or breaks the protocol, `RPC_TIMEOUT` when it does not answer, `NOT_SUPPORTED` when it
    /// does not know the call (so that the caller can do without), `INVALID_VERSION` when it knows it in another shape.
    /// A call that Mooncake C++ lacks can always be done without: for such a call another shape is `NOT_SUPPORTED`, too.
    pub async fn call<R: Request + Sync>(&self, request: &R) -> Result<R::Reply> {
        self.call_as(R::FUNCTION, request).await
    }

    /// As [`RpcClient::call`], counted as the call of that number.
    pub(super) async fn call_as<R: Request + Sync>(&self, counted: u32, request: &R) -> Result<R::Reply> {
        let Some(meter) = &self.options.meter else { return self.exchange(request).await };
        let began = meter.begin();
        let answer = self.exchange(request).await;
        meter.end(counted, began, answer.is_ok());
        answer
    }

    async fn exchange<R: Request + Sync>(&self, request: &R) -> Result<R::Reply> {
        let body = |out: &mut Vec<u8>| {
            if R::HAS_ARGUMENTS {
                pack::encode(request, out);
            }
        };
        let round = async {
            let mut tries = 0;
            loop {
                let lent = self.round_trip(R::FUNCTION, &body).await?;
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
        let lent = match timeout(self.options.call_timeout, round).await {
            Ok(outcome) => outcome.map_err(|error: Error| error.context(R::NAME))?,
            Err(_) => return Err(self.timed_out(R::NAME)),
        };
        let decoded = lent.reply::<R>().and_then(|body| {
            pack::decode::<R::Reply>(body).map_err(|error| self.misread(R::NAME, error.into()))
        });
        lent.give_back();
        decoded
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
                    // The server that closed the connection before is not there any more.
                    (Err(_), Some(broken)) => return Err(self.broken(broken)),
                    (Err(error), None) => return Err(error),
                },
            };
            let to = connection.to.clone();
            let answered = tokio::select! {
                biased;
                answered = connection.exchange(function, body, self.options.max_body) => answered,
                // A leader that is frozen would keep the caller for all its time.
                () = self.place.left(&to) => Err(Broken { cause: Cause::Deposed, answered: false }),
            };
            // What a leader has answered that is none any more does not count.
            let answered = match answered {
                Ok(()) if !self.place.is(&to) => Err(Broken { cause: Cause::Deposed, answered: true }),
                answered => answered,
            };
            match answered {
                Ok(()) => return Ok(Lent { pool: self, lane, connection, _slot: slot.take() }),
                Err(broken) if reused && broken.closed_while_idle() => {
                    // Its neighbours most likely met the same end.
                    lane.idle.lock().clear();
                    tracing::debug!(server = %self.place, "an idle connection was closed; trying a new one");
                }
                // A server that has no place left may close a connection before its first request has come.
                Err(broken) if retries < NEW_CONNECTIONS && broken.closed_while_idle() => {
                    retries += 1;
                    closed = Some(broken);
                }
                Err(broken) => return Err(self.broken(broken)),
            }
        }
    }

    /// The connection used last: the others get the chance to grow old.
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
                () = self.place.left(&to) => Err(io::Error::other("it leads no more")),
            }
        };
        let stream = match timeout(self.options.connect_timeout, connecting).await {
            Ok(outcome) => outcome.map_err(|error| failed(&error).with_source(error))?,
            Err(_) => {
                let waited = self.options.connect_timeout;
                let text = format!("cannot connect to {to}: no answer within {waited:?}");
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
            eager: Eager::default(),
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
            Cause::Deposed => broke(&"it leads no more"),
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
                "the answer of {} is not the one of version {TABLE_VERSION} (master {MASTER_VERSION})",
                self.place
            ))
            .context(name)
    }

    /// What a reply that is no answer means to the caller.
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

/// Bytes of buffer an idle connection may keep.
const KEPT_BUFFER: usize = 64 << 10;
/// Bytes asked of the socket at a time, at least.
const READ_CHUNK: usize = 16 << 10;

/// A connection lent to a call. Dropped, it is closed; only [`Lent::give_back`] keeps it.
#[derive(Debug)]
struct Lent<'p> {
    pool: &'p RpcClient,
    lane: &'p Lane,
    connection: Connection,
    _slot: Option<SemaphorePermit<'p>>,
}

impl Lent<'_> {
    /// Whether the server has too much to do at the moment.
    fn is_refused_for_now(&self) -> bool {
        let reply = frame::parse_reply(&self.connection.inbox, self.pool.options.max_body);
        matches!(reply, Ok(Parsed::Whole(reply, _)) if reply.status == Status::Overloaded)
    }

    /// Body of the answer, or why there is none.
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

/// One connection with its buffers, which live as long as it does.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Whom it leads to.
    to: Arc<str>,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
    seq: u32,
    /// A request is out and not answered.
    asking: bool,
    eager: Eager,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.asking {
            // A request that nobody waits for any more must not arrive late: what the kernel still holds is thrown away.
            let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}

/// A connection is over, and why.
#[derive(Debug)]
struct Broken {
    cause: Cause,
    /// Whether any byte of the reply had come.
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
    /// Another one leads now.
    Deposed,
    /// The request is longer than what is taken; nothing was sent.
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
    /// Nothing has come in since the last answer, not even an end. Costs no system call unless something has.
    fn is_quiet(&self) -> bool {
        let mut byte = [0];
        matches!(self.stream.try_read(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// One request, one whole reply, which is then in `inbox`.
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
            let read = match self.eager.read(&self.stream, &mut self.inbox) {
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

/// Makes room for what is missing, but no more at a time than has come already: a length is only a claim.
pub(super) fn reserve(buffer: &mut Vec<u8>, missing: usize) {
    buffer.reserve(missing.min(buffer.len()).max(READ_CHUNK));
}
