//! Connection of a peer to the data port.
//!
//! Requests of a connection are served strictly in order. They may be pipelined: all requests
//! received in one read are served before their responses leave together in one write. Bytes go
//! directly between the socket and registered memory. Only the bytes that came along with a header
//! pass through the inbox of the connection, which has a fixed size.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Error;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_transport::admission::ConnectionSlot;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::frame::{ADDRESS_REFUSED, DEVICE_FAILED, Direction, Framing, Request, STATUS_LEN, Status};
use crate::hello::{self, HelloResponse, Instance};
use crate::inbox::Inbox;
use crate::socket::{self, Buffers, IoList};
use crate::staging_pool::PortStagingPool;
use crate::table::{Range, View};

/// Number of responses gathered into one write.
const GATHER: usize = 16;
/// Maximum number of bytes moved inside the gate of a region at once: a fraction of a millisecond
/// for a deregistration.
const GATE_BYTES: usize = 1 << 20;
/// Maximum part of a body in one receive. More at once is slower (a fifth, for 1 MiB from one
/// peer): during a receive, the bytes of the peer cannot enter the socket, and the copied bytes do
/// not stay in the caches of the processor.
const RECEIVE_BYTES: usize = 64 << 10;
/// Time for sending the last bytes to a refused peer, before the connection is closed.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Settings of the connections of a data port.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) instance: Instance,
    pub(crate) progress_timeout: Duration,
    pub(crate) buffers: Buffers,
    pub(crate) max_connections: usize,
}

/// Reason for which a connection ended.
#[derive(Debug)]
#[allow(dead_code, reason = "the fields are for the log")]
pub(crate) enum End {
    /// Closed by the peer or by the network.
    Peer(io::Error),
    /// Stalled half-way by the peer.
    Stalled,
    /// Meant for another process.
    OtherInstance(Instance),
    /// Request for a range that is not registered, or not any more.
    Refused(Request),
    /// Failure of a device, before any byte of the response.
    Device(Error),
    /// Failure of a device in the middle of a response.
    Broken(Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut => End::Stalled,
            _ => End::Peer(error),
        }
    }
}

/// Response in progress: a status frame in acknowledged framing, then the requested bytes.
struct PendingResponse {
    status: Option<[u8; STATUS_LEN]>,
    payload: Option<Range>,
    request: Request,
}

impl PendingResponse {
    fn len(&self) -> usize {
        self.status.map_or(0, |s| s.len()) + self.payload.as_ref().map_or(0, Range::len)
    }
}

/// Connection of a peer.
pub(crate) struct Session {
    /// Not inherited by children: a child that kept the socket would keep the peer waiting after
    /// the end of this process.
    stream: ParentOnly<TcpStream>,
    settings: Settings,
    staging_pool: Arc<PortStagingPool>,
    view: View,
    inbox: Inbox,
    responses: Vec<PendingResponse>,
    /// Number of sent bytes of the first reply.
    sent: usize,
    /// True if the last request for device memory asked for acknowledged framing.
    acknowledges: bool,
    slot: ConnectionSlot,
}

impl Session {
    pub(crate) fn new(
        stream: TcpStream,
        view: View,
        staging_pool: Arc<PortStagingPool>,
        settings: Settings,
        slot: ConnectionSlot,
    ) -> Self {
        Self {
            stream: ParentOnly::new(stream),
            settings,
            staging_pool,
            view,
            inbox: Inbox::new(),
            responses: Vec::new(),
            sent: 0,
            acknowledges: false,
            slot,
        }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(crate) fn staging_pool(&self) -> &PortStagingPool {
        &self.staging_pool
    }

    pub(crate) fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    /// Returns the time for which the peer may stall half-way.
    pub(crate) fn progress_timeout(&self) -> Duration {
        self.settings.progress_timeout
    }

    pub(crate) async fn run(mut self) -> End {
        if let Err(error) = socket::set_options(&self.stream, self.settings.buffers) {
            return End::Peer(error);
        }
        if let Err(error) = self.resume() {
            return error.into();
        }
        if let Err(end) = self.receive_hello().await {
            return end;
        }
        loop {
            if let Err(end) = self.serve_received().await {
                // Earlier requests get their responses first.
                if matches!(end, End::Device(_)) && self.flush().await.is_err() {
                    return end;
                }
                let code = match end {
                    End::Refused(Request { framing: Framing::Acknowledged, .. }) => Some(ADDRESS_REFUSED),
                    End::Device(_) if self.acknowledges => Some(DEVICE_FAILED),
                    _ => None,
                };
                if let Some(code) = code {
                    // Nothing is lost if the refusal does not arrive: the peer then sees a closed
                    // connection.
                    let _ =
                        timeout(LAST_RESPONSE_TIMEOUT, self.send_and_drain(&Status::Refused(code).encode()))
                            .await;
                }
                return end;
            }
            if let Err(error) = self.fill().await {
                return error.into();
            }
            // A peer that always sends more must not keep the thread to itself.
            tokio::task::coop::consume_budget().await;
        }
    }

    /// Answers the hello, if the connection begins with one. Connections of Mooncake C++ begin with
    /// a request.
    async fn receive_hello(&mut self) -> Result<(), End> {
        let hello = loop {
            match self.inbox.hello() {
                Some(None) => return Ok(()),
                Some(Some(hello)) => break hello,
                None => self.fill().await?,
            }
        };
        let instance = self.settings.instance;
        let accepted = hello.instance == instance || is_planted("tcp-hello-for-any-instance");
        let response = HelloResponse { accepted, instance }.encode();
        if accepted {
            let sent = timeout(self.settings.progress_timeout, hello::send(&self.stream, &response)).await;
            return Ok(sent.map_err(io::Error::from)??);
        }
        // No request of the connection is read, whether one has already arrived or not.
        let _ = timeout(LAST_RESPONSE_TIMEOUT, self.send_and_drain(&response)).await;
        Err(End::OtherInstance(hello.instance))
    }

    /// Serves every request whose header is complete, and sends every response before it returns.
    async fn serve_received(&mut self) -> Result<(), End> {
        while let Some(request) = self.inbox.next_request() {
            let writes = request.direction == Direction::Write;
            let found = self.view.find(request.addr, request.len);
            let Some(range) = found.filter(|range| !(writes && range.is_read_only())) else {
                self.flush().await?;
                return Err(End::Refused(request));
            };
            match request.direction {
                Direction::Read if range.is_device() => {
                    self.acknowledges = request.framing == Framing::Acknowledged;
                    self.flush().await?;
                    self.send_from_device(request, &range).await?;
                }
                Direction::Read => {
                    let status = (request.framing == Framing::Acknowledged).then_some(Status::Ok.encode());
                    self.responses.push(PendingResponse { status, payload: Some(range), request });
                }
                Direction::Write => {
                    if self.responses.iter().any(|response| response.payload.is_some()) {
                        // An earlier read must not see a later write.
                        self.flush().await?;
                    }
                    if range.is_device() {
                        self.acknowledges = request.framing == Framing::Acknowledged;
                        self.receive_body_to_device(request, &range).await?;
                    } else {
                        self.receive_body(request, &range).await?;
                    }
                    if request.framing == Framing::Acknowledged {
                        let status = Some(Status::Ok.encode());
                        self.responses.push(PendingResponse { status, payload: None, request });
                    }
                }
            }
            if self.responses.len() >= GATHER {
                self.flush().await?;
            }
        }
        self.flush().await
    }

    /// Receives the body of a write into registered memory.
    async fn receive_body(&mut self, request: Request, range: &Range) -> Result<(), End> {
        let len = range.len();
        let buffered = self.inbox.payload(request.len);
        let mut done = buffered.len();
        let open = range.enter().is_some_and(|access| {
            // SAFETY: the address is inside the gate, and `buffered` is no longer than the range.
            unsafe {
                if range.may_be_unmapped() {
                    return socket::copy_if_mapped(buffered, access.at(0));
                }
                socket::copy_to(buffered, access.at(0));
            }
            true
        });
        if !open {
            self.flush().await?;
            return Err(End::Refused(request));
        }
        while done < len {
            let received = {
                let Some(access) = range.enter() else { break };
                let mut list = IoList::<2>::new();
                let part = (len - done).min(RECEIVE_BYTES);
                list.push(access.at(done), part);
                if part == len - done {
                    let space = self.inbox.space();
                    list.push(space.as_mut_ptr(), space.len());
                }
                // SAFETY: the first part is inside the gate and within the range, the second is the
                // inbox of this session.
                unsafe { socket::receive(&self.stream, &mut list) }
            };
            match received {
                Ok(n) => {
                    let body = n.min(len - done);
                    done += body;
                    self.inbox.received(n - body);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // The peer may wait for earlier responses before it sends more.
                    self.flush().await?;
                    self.slot.wait_for_more();
                    readable(&self.stream, Some(self.settings.progress_timeout)).await?;
                    self.resume()?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if done < len {
            // The memory is deregistered. Earlier requests get their responses before the refusal.
            self.flush().await?;
            return Err(End::Refused(request));
        }
        Ok(())
    }

    /// Sends every response.
    pub(crate) async fn flush(&mut self) -> Result<(), End> {
        while !self.responses.is_empty() {
            match self.send_some() {
                Some(Ok(n)) => self.advance(n),
                Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.slot.wait_for_request();
                    timeout(self.settings.progress_timeout, self.stream.writable())
                        .await
                        .map_err(io::Error::from)??;
                    self.resume()?;
                }
                Some(Err(error)) => return Err(error.into()),
                None => {
                    let mut request = self.responses[0].request;
                    if self.sent > 0 {
                        // Half a response is sent: a status frame now would be taken for its bytes.
                        request.framing = Framing::Plain;
                    }
                    return Err(End::Refused(request));
                }
            }
        }
        Ok(())
    }

    /// Sends as many responses as fit into one call. Returns `None` if the memory of the first one
    /// is deregistered.
    fn send_some(&mut self) -> Option<io::Result<usize>> {
        let mut list = IoList::<{ 2 * GATHER }>::new();
        let mut gates = [const { None }; GATHER];
        let mut skip = self.sent;
        for (response, gate) in self.responses.iter().take(GATHER).zip(&mut gates) {
            let access = match &response.payload {
                None => None,
                Some(range) => match range.enter() {
                    None => break,
                    access => access,
                },
            };
            if let Some(status) = &response.status {
                let from = skip.min(status.len());
                list.push(status[from..].as_ptr().cast_mut(), status.len() - from);
                skip -= from;
            }
            if let (Some(access), Some(range)) = (access, &response.payload) {
                let part = (range.len() - skip).min(GATE_BYTES.saturating_sub(list.bytes()));
                list.push(access.at(skip), part);
                *gate = Some(access);
                if part < range.len() - skip {
                    break;
                }
                skip = 0;
            }
        }
        if list.bytes() == 0 {
            return None;
        }
        // SAFETY: the parts are status frames in `self.responses`, and memory whose gates are held.
        Some(unsafe { socket::send(&self.stream, &mut list) })
    }

    fn advance(&mut self, n: usize) {
        self.sent += n;
        let mut complete = 0;
        for response in &self.responses {
            let len = response.len();
            if self.sent < len {
                break;
            }
            self.sent -= len;
            complete += 1;
        }
        self.responses.drain(..complete);
    }

    /// Receives at least one more byte into the inbox.
    async fn fill(&mut self) -> io::Result<()> {
        loop {
            let received = {
                let mut list = IoList::<1>::new();
                let space = self.inbox.space();
                list.push(space.as_mut_ptr(), space.len());
                // SAFETY: the part is the inbox of this session.
                unsafe { socket::receive(&self.stream, &mut list) }
            };
            match received {
                Ok(n) => {
                    self.inbox.received(n);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Between requests a peer may be silent for ever, inside one it may not.
                    let limit = (!self.inbox.is_empty()).then_some(self.settings.progress_timeout);
                    match limit {
                        None => self.slot.wait_for_request(),
                        Some(_) => self.slot.wait_for_more(),
                    }
                    readable(&self.stream, limit).await?;
                    self.resume()?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Resumes after a wait for the peer.
    ///
    /// # Errors
    ///
    /// Fails if another connection has taken the slot of this one meanwhile.
    fn resume(&self) -> io::Result<()> {
        if self.slot.work() { Ok(()) } else { Err(io::ErrorKind::ConnectionAborted.into()) }
    }

    /// Sends a refusal, then reads the remaining bytes of the peer: closing over unread bytes would
    /// destroy the response.
    async fn send_and_drain(&mut self, frame: &[u8]) -> io::Result<()> {
        hello::send(&self.stream, frame).await?;
        socket2::SockRef::from(&*self.stream).shutdown(std::net::Shutdown::Write)?;
        let mut discarded = [0; 4096];
        loop {
            self.stream.readable().await?;
            match self.stream.try_read(&mut discarded) {
                Ok(0) => return Ok(()),
                Ok(_) => tokio::task::coop::consume_budget().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

pub(crate) async fn readable(stream: &TcpStream, limit: Option<Duration>) -> io::Result<()> {
    match limit {
        Some(limit) => timeout(limit, stream.readable()).await?,
        None => stream.readable().await,
    }
}
