//! RPC client: a pool of connections, each used by one call at a time.
//!
//! A call writes its request in one piece and reads the response in the task of the caller, so that
//! no other task is involved. A dropped call closes its connection. A connection that was closed
//! while it was idle costs one retry on a new connection. A new connection that is closed without a
//! response costs a few more, the later ones after pauses: a server at its limit may close it
//! before it reads the request. Retries are safe because every call of the table may be repeated.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::connection::{Broken, Connection, body_of};
use super::frame::{DEFAULT_MAX_BODY, Status};
use super::message::{Ping, Request};
use super::meter::CallMeter;
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

/// Number of further connections that a call opens at once if new ones are closed without a
/// response.
const NEW_CONNECTIONS: u32 = 2;
/// Number of connections that a call opens after these, each after a pause.
const LATE_CONNECTIONS: u32 = 4;

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
    idle: Mutex<Vec<Pooled>>,
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

    /// Closes the idle connections that the server has closed. Returns whether idle connections
    /// remain.
    pub fn close_departed(&self) -> bool {
        let is_used = |lane: &Lane| {
            let mut idle = lane.idle.lock();
            idle.retain(|pooled| pooled.connection.is_quiet());
            !idle.is_empty()
        };
        is_used(&self.calls) | is_used(&self.heartbeats)
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
        let body = body_of(request);
        let counted = self.options.meter.as_ref().map(|meter| (meter, meter.begin(), counted));
        let sent = self.send(R::FUNCTION, R::NAME, &body).await;
        let answer = sent.and_then(|checked_out| self.decode::<R>(checked_out));
        if let Some((meter, began, function)) = counted {
            meter.end(function, began, answer.is_ok());
        }
        answer
    }

    fn decode<R: Request>(&self, checked_out: CheckedOut<'_>) -> Result<R::Reply> {
        let reply = checked_out.pooled.connection.reply::<R>(&self.place);
        checked_out.check_in();
        reply
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
    ) -> BoxFuture<'a, Result<CheckedOut<'a>>> {
        Box::pin(async move {
            let mut tries = 0;
            let round = async {
                let mut turn = None;
                loop {
                    let checked_out = self.round_trip(function, body).await?;
                    if !checked_out.pooled.connection.is_refused_for_now() {
                        self.retries.earn();
                        return Ok(checked_out);
                    }
                    if is_planted("refused-calls-give-up") && self.retries.spend(tries).is_none() {
                        return Ok(checked_out);
                    }
                    checked_out.check_in();
                    self.retries.await_retry(tries, &mut turn).await;
                    tries += 1;
                }
            };
            match timeout(self.options.call_timeout, round).await {
                Ok(outcome) => outcome.map_err(|error: Error| error.context(name)),
                Err(_) if tries > 0 => Err(self.overloaded(name)),
                Err(_) => Err(self.timed_out(name)),
            }
        })
    }

    /// Sends one request and reads its reply, which stays in the connection's buffer.
    async fn round_trip(
        &self,
        function: u32,
        body: &(dyn Fn(&mut Vec<u8>) + Sync),
    ) -> Result<CheckedOut<'_>> {
        let lane = match function {
            Ping::FUNCTION if !is_planted("heartbeats-in-line") => &self.heartbeats,
            _ => &self.calls,
        };
        let slot =
            lane.slots.acquire().await.map_err(|_| Error::internal("the connection pool is closed"))?;
        let mut slot = Some(slot);
        let mut idle = self.take_idle(lane);
        let (mut retries, mut closed) = (0, None::<Broken>);
        loop {
            let (mut pooled, reused) = match idle.take() {
                Some(pooled) => (pooled, true),
                None => match (self.connect().await, closed.take()) {
                    (Ok(pooled), _) => (pooled, false),
                    // The server that closed the previous connection has gone.
                    (Err(_), Some(broken)) => return Err(broken.into_error(&self.place)),
                    (Err(error), None) => return Err(error),
                },
            };
            let answered = tokio::select! {
                biased;
                answered = pooled.connection.exchange(function, body) => answered,
                // A frozen leader would block the caller until the timeout.
                () = self.place.left(&pooled.to) => Err(Broken::deposed(false)),
            };
            // A response of a deposed leader does not count.
            let answered = match answered {
                Ok(()) if !self.place.is(&pooled.to) => Err(Broken::deposed(true)),
                answered => answered,
            };
            match answered {
                Ok(()) => return Ok(CheckedOut { lane, pooled, _slot: slot.take() }),
                Err(broken) if reused && broken.closed_while_idle() => {
                    // The other idle connections were most likely closed, too.
                    lane.idle.lock().clear();
                    tracing::debug!(server = %self.place, "an idle connection was closed; trying a new one");
                }
                // A server at its connection limit may close a connection before it reads the first
                // request.
                Err(broken) if retries < NEW_CONNECTIONS + LATE_CONNECTIONS && broken.closed_while_idle() => {
                    drop(pooled);
                    if let Some(late) = retries.checked_sub(NEW_CONNECTIONS) {
                        let Some(pause) = self.retries.spend(late) else {
                            return Err(broken.into_error(&self.place));
                        };
                        tokio::time::sleep(pause).await;
                    }
                    retries += 1;
                    closed = Some(broken);
                }
                Err(broken) => return Err(broken.into_error(&self.place)),
            }
        }
    }

    /// Prefer the connection used last, so that surplus connections age.
    fn take_idle(&self, lane: &Lane) -> Option<Pooled> {
        loop {
            let pooled = lane.idle.lock().pop()?;
            if pooled.connection.is_quiet() && self.place.is(&pooled.to) {
                return Some(pooled);
            }
        }
    }

    async fn connect(&self) -> Result<Pooled> {
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
        Ok(Pooled { connection: Connection::new(stream, self.options.max_body), to })
    }

    fn overloaded(&self, name: &'static str) -> Error {
        let (status, waited) = (Status::Overloaded, self.options.call_timeout);
        let text = format!(
            "{} refused the call for {waited:?}: {} ({})",
            self.place,
            status.text(),
            status.number()
        );
        Error::new(ErrorCode::RpcFail, text).context(name)
    }

    fn timed_out(&self, name: &'static str) -> Error {
        let text = format!("{} did not answer within {:?}", self.place, self.options.call_timeout);
        Error::new(ErrorCode::RpcTimeout, text).context(name)
    }
}

/// Connection to the server at an address.
#[derive(Debug)]
struct Pooled {
    connection: Connection<TcpStream>,
    to: Arc<str>,
}

/// Pooled connection that a call uses. It is closed on drop; only [`CheckedOut::check_in`] returns
/// it to the pool.
#[derive(Debug)]
struct CheckedOut<'p> {
    lane: &'p Lane,
    pooled: Pooled,
    _slot: Option<SemaphorePermit<'p>>,
}

impl CheckedOut<'_> {
    fn check_in(mut self) {
        self.pooled.connection.clear();
        self.lane.idle.lock().push(self.pooled);
    }
}
