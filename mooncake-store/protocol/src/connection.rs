//! Client side of a connection for calls: one request and its response at a time, over TCP or over
//! a Unix socket.

use std::fmt::Display;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use mooncake_core::error::{Error, ErrorCode, Reason, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::busy_poll::BusyPoll;
use super::call::{Request, TABLE_VERSION};
use super::frame::{self, FIRST_SEQ, FrameError, Parsed, Status, reserve};
use super::message::MASTER_VERSION;
use super::pack;

/// Maximum buffer size that an idle connection keeps, in bytes.
const MAX_IDLE_BUFFER: usize = 64 << 10;

/// Socket that carries calls.
pub trait Carrier: AsFd + Send {
    /// Stream of the socket.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send;

    /// Returns the stream.
    fn stream(&mut self) -> &mut Self::Stream;
}

impl Carrier for TcpStream {
    type Stream = Self;

    fn stream(&mut self) -> &mut Self {
        self
    }
}

impl Carrier for ParentOnly<UnixStream> {
    type Stream = UnixStream;

    fn stream(&mut self) -> &mut UnixStream {
        self
    }
}

/// A connection with its buffers.
#[derive(Debug)]
pub struct Connection<C: Carrier> {
    carrier: C,
    max_body: usize,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
    seq: u32,
    /// True while a request is sent and not yet answered.
    is_awaiting_reply: bool,
    busy_poll: BusyPoll,
}

impl<C: Carrier> Drop for Connection<C> {
    fn drop(&mut self) {
        if self.is_awaiting_reply {
            // A request without a waiting caller must not arrive late: discard the bytes that the
            // kernel still holds.
            let _ = socket2::SockRef::from(&self.carrier).set_linger(Some(Duration::ZERO));
        }
    }
}

/// Returns the encoder of a request as a body.
pub fn body_of<R: Request>(request: &R) -> impl Fn(&mut Vec<u8>) {
    |out| {
        if R::HAS_ARGUMENTS {
            pack::encode(request, out);
        }
    }
}

impl<C: Carrier> Connection<C> {
    /// Creates a connection whose messages have at most `max_body` bytes.
    pub fn new(carrier: C, max_body: usize) -> Self {
        Self {
            carrier,
            max_body,
            outbox: Vec::new(),
            inbox: Vec::new(),
            seq: FIRST_SEQ,
            is_awaiting_reply: false,
            busy_poll: BusyPoll::default(),
        }
    }

    /// Lets the thread of the caller sleep at the socket for up to `limit` while it waits for a
    /// response.
    #[must_use]
    pub fn sleeping(mut self, limit: Duration) -> Self {
        self.busy_poll = BusyPoll::sleeping(limit);
        self
    }

    /// Makes a call. `server` is the name of the server in errors.
    ///
    /// # Errors
    /// Returns an error if there is no response.
    pub async fn call<R: Request + Sync>(
        &mut self,
        request: &R,
        server: &(dyn Display + Sync),
    ) -> Result<R::Reply> {
        self.exchange(R::FUNCTION, &body_of(request)).await.map_err(|broken| broken.into_error(server))?;
        let reply = self.reply::<R>(server);
        self.clear();
        reply
    }

    /// Sends one request and reads one complete reply, which stays in the buffer.
    pub(super) async fn exchange(
        &mut self,
        function: u32,
        body: &(dyn Fn(&mut Vec<u8>) + Sync),
    ) -> Result<(), Broken> {
        self.send(function, body).await?;
        self.receive().await
    }

    /// Sends one request.
    ///
    /// # Errors
    /// Returns the cause of the end of the connection.
    pub async fn send(&mut self, function: u32, body: &(dyn Fn(&mut Vec<u8>) + Sync)) -> Result<(), Broken> {
        self.send_attached(function, body, &[]).await
    }

    /// Sends one request, and the attachment behind it.
    ///
    /// # Errors
    /// Returns the cause of the end of the connection.
    pub(super) async fn send_attached(
        &mut self,
        function: u32,
        body: &(dyn Fn(&mut Vec<u8>) + Sync),
        attachment: &[u8],
    ) -> Result<(), Broken> {
        self.seq = self.seq.wrapping_add(1) | FIRST_SEQ;
        self.outbox.clear();
        self.inbox.clear();
        self.is_awaiting_reply = true;
        let attached = u32::try_from(attachment.len()).unwrap_or(u32::MAX);
        frame::begin_attached(&mut self.outbox, self.seq, function, body, attached);
        let len = self.outbox.len().saturating_add(attachment.len());
        if len - frame::REQUEST_HEAD > self.max_body {
            let cause = Cause::Oversized { len, max: self.max_body };
            return Err(Broken { cause, answered: false });
        }
        let stream = self.carrier.stream();
        let sent = async {
            stream.write_all(&self.outbox).await?;
            if attachment.is_empty() { Ok(()) } else { stream.write_all(attachment).await }
        };
        sent.await.map_err(|error| Broken { cause: Cause::Io(error), answered: false })
    }

    /// Reads the reply of the request that was sent. The future may be dropped and called again.
    ///
    /// # Errors
    /// Returns the cause of the end of the connection.
    pub async fn receive(&mut self) -> Result<(), Broken> {
        loop {
            let answered = !self.inbox.is_empty();
            let broken = |cause| Broken { cause, answered };
            let missing = match frame::parse_reply(&self.inbox, self.max_body) {
                Ok(Parsed::Whole(reply, used)) if reply.seq == self.seq && used == self.inbox.len() => {
                    self.is_awaiting_reply = false;
                    return Ok(());
                }
                Ok(Parsed::Whole(reply, _)) => {
                    return Err(broken(Cause::Seq { sent: self.seq, got: reply.seq }));
                }
                Ok(Parsed::Partial(missing)) => missing,
                Err(error) => return Err(broken(Cause::Frame(error))),
            };
            reserve(&mut self.inbox, missing);
            let read = match self.busy_poll.read(&self.carrier, &mut self.inbox) {
                Some(read) => read,
                None => self.carrier.stream().read_buf(&mut self.inbox).await,
            };
            match read {
                Ok(0) => return Err(broken(Cause::Closed)),
                Ok(_) => {}
                Err(error) => return Err(broken(Cause::Io(error))),
            }
        }
    }

    /// Waits until an idle connection ends. Bytes without a request end it, too.
    pub async fn ended(&mut self) -> Broken {
        let cause = match self.carrier.stream().read_buf(&mut self.inbox).await {
            Ok(0) => Cause::Closed,
            Ok(_) => Cause::Io(io::Error::other("response without a request")),
            Err(error) => Cause::Io(error),
        };
        Broken { cause, answered: false }
    }

    /// Returns whether the server is overloaded, according to the reply in the buffer.
    pub(super) fn is_refused_for_now(&self) -> bool {
        let reply = frame::parse_reply(&self.inbox, self.max_body);
        matches!(reply, Ok(Parsed::Whole(reply, _)) if reply.status == Status::Overloaded)
    }

    /// Returns an error unless the reply in the buffer says that the call was made. Its body is
    /// ignored.
    pub(super) fn is_accepted(&self, server: &dyn Display) -> Result<()> {
        match frame::parse_reply(&self.inbox, self.max_body) {
            Ok(Parsed::Whole(reply, _)) if reply.status == Status::Ok => Ok(()),
            Ok(Parsed::Whole(reply, _)) => {
                let code = match reply.status {
                    Status::NotRegistered => ErrorCode::NotSupported,
                    Status::InvalidArguments => ErrorCode::InvalidParams,
                    _ => ErrorCode::RpcFail,
                };
                Err(refusal(code, (reply.status, reply.body), server, ""))
            }
            _ => Err(Error::internal("a reply that was whole is not any more")),
        }
    }

    /// Decodes the reply in the buffer.
    ///
    /// # Errors
    /// Returns an error if the server refused the call, or if the reply is malformed.
    pub fn reply<R: Request>(&self, server: &dyn Display) -> Result<R::Reply> {
        match frame::parse_reply(&self.inbox, self.max_body) {
            Ok(Parsed::Whole(reply, _)) if reply.status == Status::Ok => {
                pack::decode(reply.body).map_err(|error| misread(error.into(), R::NAME, server))
            }
            Ok(Parsed::Whole(reply, _)) => Err(refused::<R>(reply.status, reply.body, server)),
            _ => Err(Error::internal("a reply that was whole is not any more")),
        }
    }

    /// Clears the buffers after a call.
    pub fn clear(&mut self) {
        for buffer in [&mut self.inbox, &mut self.outbox] {
            buffer.clear();
            buffer.shrink_to(MAX_IDLE_BUFFER);
        }
    }
}

impl Connection<TcpStream> {
    /// Returns whether nothing, not even an end of stream, has arrived since the last response.
    /// Makes a system call only if something has arrived.
    pub(super) fn is_quiet(&self) -> bool {
        let mut byte = [0];
        matches!(self.carrier.try_read(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

fn misread(error: Error, name: &'static str, server: &dyn Display) -> Error {
    error
        .context(format!(
            "cannot decode the response of {server}: expected version {TABLE_VERSION} (master {MASTER_VERSION})"
        ))
        .context(name)
}

/// Converts an error status into the error of the call.
fn refused<R: Request>(status: Status, body: &[u8], server: &dyn Display) -> Error {
    let code = match status {
        Status::NotRegistered => ErrorCode::NotSupported,
        Status::InvalidArguments | Status::UnknownVersion
            if R::IS_EXTENSION && !is_planted("require-extension-version") =>
        {
            ErrorCode::NotSupported
        }
        Status::InvalidArguments | Status::UnknownVersion => ErrorCode::InvalidVersion,
        Status::Timeout => ErrorCode::RpcTimeout,
        Status::TooLarge => ErrorCode::InvalidParams,
        _ => ErrorCode::RpcFail,
    };
    let ours = match code {
        ErrorCode::InvalidVersion => format!(" (this side speaks version {TABLE_VERSION})"),
        _ => String::new(),
    };
    let error = refusal(code, (status, body), server, &ours).context(R::NAME);
    if status == Status::TooLarge { error.with_reason(Reason::TooLong) } else { error }
}

fn refusal(code: ErrorCode, (status, body): (Status, &[u8]), server: &dyn Display, more: &str) -> Error {
    let said = pack::decode::<&[u8]>(body).unwrap_or_default();
    let said = String::from_utf8_lossy(&said[..said.len().min(512)]);
    let status = format!("{} ({})", status.text(), status.number());
    Error::new(code, format!("{server} refused the call: {status}: {said}{more}"))
}

/// End of a connection, with its cause.
#[derive(Debug)]
pub struct Broken {
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
    Oversized {
        len: usize,
        max: usize,
    },
}

impl Broken {
    pub(super) fn deposed(answered: bool) -> Self {
        Self { cause: Cause::Deposed, answered }
    }

    /// Returns whether the server closed the connection before it received a request.
    pub fn closed_while_idle(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
        !self.answered
            && match &self.cause {
                Cause::Closed => true,
                Cause::Io(error) => {
                    matches!(error.kind(), BrokenPipe | ConnectionReset | ConnectionAborted | NotConnected)
                }
                Cause::Frame(_) | Cause::Seq { .. } | Cause::Oversized { .. } | Cause::Deposed => false,
            }
    }

    /// Converts the end of the connection to `server` into the error of a call.
    pub fn into_error(self, server: &dyn Display) -> Error {
        let broke = |cause: &dyn Display| {
            let text = format!("the connection to {server} broke: {cause}");
            Error::new(ErrorCode::RpcFail, text).with_reason(Reason::ConnectionBroken)
        };
        match self.cause {
            Cause::Oversized { len, max } => {
                Error::invalid(format!("a request of {len} bytes; at most {max} are sent"))
                    .with_reason(Reason::TooLong)
            }
            Cause::Deposed => broke(&"the leader was deposed"),
            Cause::Closed => broke(&"closed by the other side"),
            Cause::Io(error) => broke(&error).with_source(error),
            Cause::Frame(error @ FrameError::TooLong { .. }) => {
                broke(&error).with_source(error).with_reason(Reason::ResponseTooLong)
            }
            Cause::Frame(error) => broke(&error).with_source(error),
            Cause::Seq { sent, got } => {
                let (sent, got) = (sent & !FIRST_SEQ, got & !FIRST_SEQ);
                broke(&format!("asked {sent}, answered {got}"))
            }
        }
    }
}
