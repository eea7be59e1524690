//! Data plane of a process: its listener, and one connection to each other process, which all
//! communicators share.
//!
//! To a process of the same host, messages go through a ring in shared memory, which the connection
//! introduces. A message that does not fit there goes through the connection. Each message of the
//! ring names the number of frames before it. The connection remains as the sign of life.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransferEngine;
use mooncake_transport::Protocol;
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use mooncake_transport::net;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::driver::{Driver, Mail};
use crate::message::{Endpoint, Envelope, Frame, HELLO_BYTES, Hello, Message};
use crate::nearby::{Bell, FileAddress, MAX_MESSAGES, Notice, RemoteBell, RingReader, RingWriter};
use crate::pause::Pauses;
use crate::staging::Pool;

#[cfg(test)]
pub(crate) mod tests;

/// Longest time for a new connection, and for its first bytes.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Largest number of connections from other processes.
const MAX_CONNECTIONS: usize = 1024;
/// Bytes that wait for one connection. Operations wait for each other long before this limit.
const MAX_QUEUED: usize = 256 << 20;
/// Time for the rest of the messages of a process after a connection to it has ended.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Free space of the receive buffer before each read.
const READ_BYTES: usize = 32 << 10;
/// Largest number of reads from a connection in a row.
const MAX_READS: usize = 256;

/// Receiver of messages: a communicator.
pub(crate) trait Recipient: Send + Sync {
    /// Takes a message of a process. Does not wait.
    fn deliver(self: Arc<Self>, process: u64, slot: u8, message: Message);

    /// Takes notice that a connection from or to a process has ended. Messages may be lost.
    fn lose(self: Arc<Self>, process: u64);

    /// Takes notice that a process has no communicator of this number.
    fn forget(self: Arc<Self>, process: u64, communicator: u32);
}

/// Time limits of a process, which may change at any time.
#[derive(Debug)]
pub struct Timeouts {
    collective_us: AtomicU64,
    p2p_us: AtomicU64,
}

impl Timeouts {
    /// Returns the time after which a collective operation examines the ranks that it waits for.
    pub fn collective(&self) -> Duration {
        Duration::from_micros(self.collective_us.load(Ordering::Relaxed))
    }

    /// Sets the time after which a collective operation examines the ranks that it waits for; 10 s
    /// by default.
    pub fn set_collective(&self, timeout: Duration) {
        self.collective_us.store(micros(timeout), Ordering::Relaxed);
    }

    /// Returns the time after which a point-to-point operation examines the other rank.
    pub fn p2p(&self) -> Duration {
        Duration::from_micros(self.p2p_us.load(Ordering::Relaxed))
    }

    /// Sets the time after which a point-to-point operation examines the other rank; 10 s by
    /// default.
    pub fn set_p2p(&self, timeout: Duration) {
        self.p2p_us.store(micros(timeout), Ordering::Relaxed);
    }
}

fn micros(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX)
}

/// Data plane of a process. Clones are handles of the same one. The drop of the last handle and of
/// the last communicator closes the listener and the connections.
#[derive(Clone)]
pub struct DataPlane {
    pub(crate) plane: Arc<Plane>,
}

impl DataPlane {
    /// Opens the listener at a free port of `host`, the address that other ranks connect to, and
    /// serves it on the current runtime.
    ///
    /// # Errors
    /// `INVALID_PARAMS` outside a runtime, or the error of the listener.
    pub fn start(engine: TransferEngine, host: &str) -> Result<Self> {
        let runtime = Handle::try_current()
            .map_err(|_| Error::invalid("cannot start data plane: no tokio runtime; start it inside one"))?;
        let mut rng = Rng::from_os();
        // The address of a translation is not one of this machine, and is only published.
        let wanted = host.parse().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let listener = net::listen(wanted, 0..=0, &mut rng).or_else(|_| net::listen(any, 0..=0, &mut rng))?;
        let listener = TcpListener::from_std(listener).map_err(Error::from)?;
        let port = listener.local_addr().map_err(Error::from)?.port();
        let uses_rdma = engine.descriptor().speaks(&Protocol::RDMA);
        let (bell, pauses) = (Bell::create()?, Pauses::start()?);
        let plane = Arc::new_cyclic(|weak: &Weak<Plane>| Plane {
            process: rng.next_u64(),
            host: host.to_owned(),
            port,
            pool: Pool::new(engine.clone()),
            reads_in_place: !uses_rdma,
            engine,
            timeouts: Timeouts { collective_us: 10_000_000.into(), p2p_us: 10_000_000.into() },
            recipients: Mutex::default(),
            next: AtomicU32::new(1),
            links: Mutex::default(),
            incoming: Mutex::default(),
            left: Notify::new(),
            visitors: RwLock::default(),
            without_ring: AtomicUsize::new(0),
            pauses,
            driver: Driver::new(runtime.clone(), bell, weak.clone()),
            accepting: runtime.spawn(accept(ParentOnly::new(listener), weak.clone())),
            runtime,
        });
        Ok(Self { plane })
    }

    /// Returns the time limits.
    pub fn timeouts(&self) -> &Timeouts {
        &self.plane.timeouts
    }

    /// Returns the bytes of staging memory that operations use, and those of the pool.
    pub fn staging_bytes(&self) -> (u64, u64) {
        (self.plane.pool.used(), self.plane.pool.capacity())
    }
}

/// Parts of a data plane.
pub(crate) struct Plane {
    /// Random number of this process.
    pub(crate) process: u64,
    host: String,
    port: u16,
    pub(crate) engine: TransferEngine,
    pub(crate) pool: Pool,
    pub(crate) timeouts: Timeouts,
    pub(crate) runtime: Handle,
    /// True if the transport reads into memory that is not registered.
    pub(crate) reads_in_place: bool,
    recipients: Mutex<HashMap<u32, Weak<dyn Recipient>>>,
    next: AtomicU32,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    /// Number of the present connection from each process.
    incoming: Mutex<HashMap<u64, u32>>,
    /// Wakes those that wait for the end of a connection from a process.
    left: Notify,
    /// Connections from processes, which their tasks own.
    visitors: RwLock<Vec<Weak<Visitor>>>,
    /// Number of these connections that have no ring.
    without_ring: AtomicUsize,
    pub(crate) pauses: Arc<Pauses>,
    pub(crate) driver: Arc<Driver>,
    accepting: JoinHandle<()>,
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.accepting.abort();
        for link in self.links.get_mut().values() {
            if let Some(task) = link.outbox.lock().task.take() {
                task.abort();
            }
        }
    }
}

impl Plane {
    /// Returns an unused number for a communicator.
    pub(crate) fn number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a receiver of messages under its number, until [`remove`](Self::remove).
    pub(crate) fn add(&self, number: u32, recipient: Weak<dyn Recipient>) {
        self.recipients.lock().insert(number, recipient);
    }

    pub(crate) fn remove(&self, number: u32) {
        self.recipients.lock().remove(&number);
    }

    /// Returns the endpoint of a communicator in this process.
    pub(crate) fn endpoint(&self, communicator: u32) -> Endpoint {
        let (host, engine) = (self.host.clone(), self.engine.name().to_owned());
        Endpoint { process: self.process, communicator, host, port: self.port, engine }
    }

    /// Returns the link to the process of an endpoint. Nothing is sent yet.
    pub(crate) fn link(self: &Arc<Self>, endpoint: &Endpoint) -> Arc<Link> {
        let mut links = self.links.lock();
        let link = links.entry(endpoint.process).or_insert_with(|| {
            Arc::new(Link {
                process: endpoint.process,
                host: endpoint.host.clone(),
                port: endpoint.port,
                plane: Arc::downgrade(self),
                outbox: Mutex::default(),
                wake: Notify::new(),
            })
        });
        link.clone()
    }

    fn recipients(&self) -> Vec<Arc<dyn Recipient>> {
        self.recipients.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Tells every communicator that a connection with a process has ended.
    fn lose(&self, process: u64) {
        for recipient in self.recipients() {
            recipient.lose(process);
        }
    }

    /// Delivers a message. Returns false if no such communicator is here.
    fn deliver(&self, process: u64, envelope: Envelope) -> bool {
        let recipient = self.recipients.lock().get(&envelope.communicator).and_then(Weak::upgrade);
        let Some(recipient) = recipient else { return false };
        recipient.deliver(process, envelope.slot, envelope.message);
        true
    }

    /// Waits until no connection from a process is there. Returns whether there was one, whose end
    /// was noticed then.
    async fn wait_without(&self, process: u64) -> bool {
        let mut was_there = false;
        loop {
            let notified = self.left.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if !self.incoming.lock().contains_key(&process) {
                return was_there;
            }
            was_there = true;
            notified.await;
        }
    }

    /// Registers a connection from a process, in place of its earlier one, of which nothing counts
    /// any more. Returns false if a later one is here already.
    fn enter(&self, visitor: &Arc<Visitor>) -> bool {
        let process = visitor.process;
        let (earlier, is_later): (Vec<_>, _) = {
            let mut visitors = self.visitors.write();
            let mut incoming = self.incoming.lock();
            if incoming.get(&process).is_some_and(|present| *present > visitor.connection) {
                return false;
            }
            // The task of the earlier one may be about to end it.
            let is_later = incoming.insert(process, visitor.connection).is_some();
            self.without_ring.fetch_add(1, Ordering::SeqCst);
            let others = visitors.iter().filter_map(Weak::upgrade);
            let earlier = others.filter(|other| other.process == process).collect();
            visitors.push(Arc::downgrade(visitor));
            (earlier, is_later)
        };
        for other in &earlier {
            if !is_planted("pg-earlier-connection-goes-on") {
                self.supersede(other);
            }
        }
        if is_later {
            self.lose(process);
        }
        true
    }

    /// Ends a connection of whose process there is a later one. Its messages are taken now: later,
    /// they would contradict those of the other connection.
    fn supersede(&self, visitor: &Visitor) {
        let taken = self.read(visitor, |received| visitor.receive(received)).map(drop);
        let mut state = visitor.state.lock();
        if let Err(error) = taken.and_then(|()| self.drain(visitor, &mut state)) {
            tracing::debug!(%error, "messages lost");
        }
        state.is_superseded = true;
        drop(state);
        visitor.close();
    }

    /// Ends a connection from a process. The connection to the process is closed as well, so that
    /// both sides agree that messages may be lost.
    fn leave(&self, visitor: &Arc<Visitor>) {
        let process = visitor.process;
        {
            // The last messages of a process that has ended.
            let mut state = visitor.state.lock();
            if let Err(error) = self.drain(visitor, &mut state) {
                tracing::debug!(%error, "messages lost");
            }
            if state.ring.take().is_none() {
                self.without_ring.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.visitors.write().retain(|other| !std::ptr::eq(other.as_ptr(), &raw const **visitor));
        // The process may have ended before it sent a notice.
        self.driver.attend();
        {
            let mut incoming = self.incoming.lock();
            if incoming.get(&process) != Some(&visitor.connection) {
                return;
            }
            incoming.remove(&process);
        }
        self.left.notify_waiters();
        let link = self.links.lock().get(&process).cloned();
        if let Some(link) = link {
            link.close();
        }
        self.lose(process);
    }
}

/// Connection from another process.
struct Visitor {
    process: u64,
    /// Number of the connection. A process opens one after the other.
    connection: u32,
    socket: ParentOnly<TcpStream>,
    state: Mutex<VisitorState>,
}

#[derive(Default)]
struct VisitorState {
    /// Bytes of the connection that are not delivered yet: the start of a frame.
    received: BytesMut,
    /// True from the end of the connection, or a malformed message, on.
    has_ended: bool,
    /// True from the time on at which the process has opened another connection.
    is_superseded: bool,
    /// Number of frames that have been taken.
    frames: u64,
    ring: Option<RingReader>,
}

impl VisitorState {
    /// Returns whether the next message of the ring may be taken.
    fn has_message(&mut self) -> bool {
        let frames = self.frames;
        !self.is_superseded && self.ring.as_mut().is_some_and(|ring| ring.has_message(frames))
    }
}

impl Visitor {
    /// Reads without the runtime, which may not know yet that bytes are there.
    fn receive(&self, received: &mut BytesMut) -> io::Result<usize> {
        let mut buffer = [0; 4096];
        let (_, len) = recv(&*self.socket, &mut buffer[..], RecvFlags::DONTWAIT)?;
        received.extend_from_slice(&buffer[..len]);
        Ok(len)
    }

    /// Sends a response if there is space for it. A part of one would make the next ones
    /// unreadable.
    fn respond(&self, response: &[u8]) {
        if self.socket.try_write(response).is_ok_and(|sent| sent < response.len()) {
            self.close();
        }
    }

    /// Ends the connection. The task that serves it notices that.
    fn close(&self) {
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }
}

impl Plane {
    /// Delivers the messages of a ring that come next, at most as many as a ring has space for: a
    /// process that writes without end does not keep the thread.
    ///
    /// # Errors
    /// A malformed message. The connection cannot be used any more.
    fn drain(&self, visitor: &Visitor, state: &mut VisitorState) -> Result<()> {
        if state.is_superseded {
            return Ok(());
        }
        let Some(ring) = &mut state.ring else { return Ok(()) };
        let most = if is_planted("pg-ring-is-read-to-its-end") { usize::MAX } else { MAX_MESSAGES };
        for _ in 0..most {
            let Some(frame) = ring.take(state.frames)? else { break };
            self.deliver_or_refuse(visitor, Envelope::decode_frame(frame)?);
        }
        Ok(())
    }

    fn deliver_or_refuse(&self, visitor: &Visitor, envelope: Envelope) {
        let communicator = envelope.communicator;
        if !self.deliver(visitor.process, envelope) {
            // If this notice is lost, the next message of the sender causes another one.
            visitor.respond(&communicator.to_le_bytes());
        }
    }

    /// Takes a frame of a connection, with the messages of the ring before and after it. Returns
    /// whether it is a notice.
    ///
    /// # Errors
    /// A malformed message. The connection cannot be used any more.
    fn take_frame(&self, visitor: &Visitor, state: &mut VisitorState, frame: Frame) -> Result<bool> {
        self.drain(visitor, state)?;
        state.frames += 1;
        let is_notice = frame == Frame::Notice;
        match frame {
            Frame::Message(envelope) => self.deliver_or_refuse(visitor, envelope),
            Frame::Ring(address) => {
                let bell = match RingReader::open(address) {
                    Ok(ring) if state.ring.is_none() => {
                        state.ring = Some(ring);
                        self.without_ring.fetch_sub(1, Ordering::SeqCst);
                        self.driver.bell()
                    }
                    Ok(_) => FileAddress::NONE,
                    Err(error) => {
                        tracing::debug!(%error, "no shared memory with a process");
                        FileAddress::NONE
                    }
                };
                let mut answer = BytesMut::from(&[0; 4][..]);
                bell.encode(&mut answer);
                // If this answer is lost, messages go through the connection.
                visitor.respond(&answer);
            }
            Frame::Notice => {}
        }
        self.drain(visitor, state)?;
        Ok(is_notice)
    }

    /// Delivers the messages of a connection and its ring, until no bytes are there, or for the
    /// largest number of reads. Does not wait. Returns whether all were delivered.
    ///
    /// # Errors
    /// The end of the connection, or a malformed message. Nothing is read afterwards.
    fn read(&self, visitor: &Visitor, read: impl FnMut(&mut BytesMut) -> io::Result<usize>) -> Result<bool> {
        let (mut is_noticed, mut state) = (false, visitor.state.lock());
        let end = match state.has_ended || state.is_superseded {
            true => Err(closed_by_other()),
            false => self.read_frames(visitor, &mut state, read, &mut is_noticed),
        };
        state.has_ended |= end.is_err();
        drop(state);
        if is_noticed {
            self.driver.attend();
        }
        end
    }

    fn read_frames(
        &self,
        visitor: &Visitor,
        state: &mut VisitorState,
        mut read: impl FnMut(&mut BytesMut) -> io::Result<usize>,
        is_noticed: &mut bool,
    ) -> Result<bool> {
        self.drain(visitor, state)?;
        for _ in 0..MAX_READS {
            state.received.reserve(READ_BYTES);
            match read(&mut state.received) {
                Ok(0) => return Err(closed_by_other()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(!state.has_message()),
                Err(error) => return Err(error.into()),
            }
            while let Some(frame) = Frame::decode_next(&mut state.received)? {
                *is_noticed |= self.take_frame(visitor, state, frame)?;
            }
        }
        Ok(false)
    }

    /// Delivers the messages that have arrived at this host, also those that the runtime has not
    /// seen. Returns false if more may be there.
    pub(crate) fn take_all(&self) -> bool {
        if is_planted("pg-messages-wait-while-a-rank-finishes") {
            return true;
        }
        let visitors: Vec<_> = self.visitors.read().iter().filter_map(Weak::upgrade).collect();
        visitors.iter().fold(true, |all, visitor| {
            let taken = self.read(visitor, |received| visitor.receive(received));
            let is_all = taken.unwrap_or_else(|_| {
                visitor.close();
                true
            });
            is_all && all
        })
    }
}

fn closed_by_other() -> Error {
    Error::new(ErrorCode::RpcFail, "connection closed by the other process")
}

impl Mail for Plane {
    fn take(&self) {
        for visitor in self.visitors.read().iter().filter_map(Weak::upgrade) {
            let mut state = visitor.state.lock();
            if let Err(error) = self.drain(&visitor, &mut state) {
                tracing::debug!(%error, "connection closed");
                visitor.close();
            }
        }
    }

    fn is_waiting(&self) -> bool {
        let visitors = self.visitors.read();
        visitors.iter().filter_map(Weak::upgrade).any(|visitor| visitor.state.lock().has_message())
    }

    fn has_all(&self) -> bool {
        self.without_ring.load(Ordering::SeqCst) == 0 && !self.visitors.read().is_empty()
    }
}

/// Connection to another process, opened by the first message and again after it has ended.
pub(crate) struct Link {
    process: u64,
    host: String,
    port: u16,
    plane: Weak<Plane>,
    outbox: Mutex<Outbox>,
    wake: Notify,
}

#[derive(Default)]
struct Outbox {
    socket: Option<Arc<ParentOnly<TcpStream>>>,
    /// Number of frames that were sent or queued.
    frames: u64,
    /// Ring that the receiver has not opened yet.
    offered: Option<RingWriter>,
    ring: Option<(RingWriter, RemoteBell)>,
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Task that connects, writes the queue and notices the end of the connection.
    task: Option<JoinHandle<()>>,
    /// Number of the connection, counted from the first one.
    number: u64,
    /// True if the connection is to end because too many bytes wait.
    is_full: bool,
}

impl Outbox {
    /// Drops what belongs to the present connection, and returns its task.
    fn reset(&mut self) -> Option<JoinHandle<()>> {
        let next = Self { number: self.number + 1, ..Self::default() };
        std::mem::replace(self, next).task
    }
}

impl Link {
    /// Sends a message. Does not wait: bytes that the socket does not take at once are queued.
    /// Messages arrive in order. If the connection ends, every communicator is notified, and queued
    /// messages are lost.
    pub(crate) fn send(self: &Arc<Self>, envelope: &Envelope) {
        let frame = envelope.encode();
        let mut outbox = self.outbox.lock();
        let frames = outbox.frames;
        let rung = outbox.ring.as_mut().and_then(|(ring, bell)| {
            ring.push(frames, &frame).then(|| bell.ring(envelope.message.is_urgent()))
        });
        match rung {
            None => self.write(&mut outbox, frame),
            Some(Notice::OnConnection) => self.write(&mut outbox, Frame::Notice.encode()),
            Some(Notice::Unneeded) => {}
        }
    }

    /// Sends a frame through the connection.
    fn write(self: &Arc<Self>, outbox: &mut Outbox, mut frame: Bytes) {
        outbox.frames += 1;
        if outbox.queue.is_empty()
            && let Some(socket) = &outbox.socket
            && let Ok(sent) = socket.try_write(&frame)
        {
            frame.advance(sent);
            if frame.is_empty() {
                return;
            }
        }
        outbox.queued += frame.len();
        outbox.queue.push_back(frame);
        if outbox.queued > MAX_QUEUED {
            tracing::warn!(host = self.host, port = self.port, "connection closed: too many bytes wait");
            outbox.is_full = true;
        }
        self.run(outbox);
    }

    /// Connects, if there is no connection.
    pub(crate) fn open(self: &Arc<Self>) {
        let mut outbox = self.outbox.lock();
        if outbox.task.is_none() {
            self.run(&mut outbox);
        }
    }

    /// Returns whether there is a connection, or one is being opened.
    pub(crate) fn is_open(&self) -> bool {
        self.outbox.lock().task.is_some()
    }

    fn run(self: &Arc<Self>, outbox: &mut Outbox) {
        if outbox.task.is_some() {
            return self.wake.notify_one();
        }
        let Some(plane) = self.plane.upgrade() else { return };
        let (link, number, from) = (self.clone(), outbox.number, plane.process);
        outbox.task = Some(plane.runtime.spawn(async move {
            if let Err(error) = link.serve(from, number).await {
                tracing::debug!(host = link.host, port = link.port, %error, "connection ended");
            }
        }));
    }

    /// Ends the connection, if there is one. The next message opens another one.
    fn close(&self) {
        if let Some(task) = self.outbox.lock().reset() {
            task.abort();
        }
    }

    async fn serve(self: &Arc<Self>, from: u64, number: u64) -> Result<()> {
        let end = self.carry(from, number).await;
        {
            let mut outbox = self.outbox.lock();
            if outbox.number == number {
                outbox.reset();
            }
        }
        // Messages may still be read from the other direction, such as the last ones of a process
        // that has ended.
        let is_known = match self.plane.upgrade() {
            Some(plane) => timeout(LAST_WORDS, plane.wait_without(self.process)).await.unwrap_or(false),
            None => true,
        };
        if let Some(plane) = self.plane.upgrade()
            && !is_known
        {
            plane.lose(self.process);
        }
        end
    }

    /// Returns what belongs to the present connection.
    ///
    /// # Errors
    /// The connection of this number has been replaced.
    fn current(&self, number: u64) -> Result<MutexGuard<'_, Outbox>> {
        let outbox = self.outbox.lock();
        match outbox.number == number || is_planted("pg-replaced-connection-is-used") {
            true => Ok(outbox),
            false => Err(Error::new(ErrorCode::RpcFail, "connection was replaced")),
        }
    }

    async fn carry(&self, from: u64, number: u64) -> Result<()> {
        let late = || Error::new(ErrorCode::RpcTimeout, "cannot connect: no response in time");
        let connected = timeout(CONNECT_WITHIN, net::connect(&self.host, self.port)).await;
        let mut stream = ParentOnly::new(connected.map_err(|_| late())?.map_err(Error::from)?);
        net::keep_connection(&stream).map_err(Error::from)?;
        let hello = Hello { from, to: self.process }.encode();
        timeout(CONNECT_WITHIN, stream.write_all(&hello)).await.map_err(|_| late())?.map_err(Error::from)?;
        let stream = Arc::new(stream);
        {
            let mut outbox = self.current(number)?;
            outbox.socket = Some(stream.clone());
            if let Ok((ring, address)) = RingWriter::create() {
                outbox.offered = Some(ring);
                let offer = Frame::Ring(address).encode();
                outbox.frames += 1;
                outbox.queued += offer.len();
                outbox.queue.push_back(offer);
            }
        }
        let mut refused = BytesMut::new();
        loop {
            let waits = self.flush(&stream, number)?;
            tokio::select! {
                ready = stream.readable() => {
                    ready.map_err(Error::from)?;
                    self.read_refusals(&stream, number, &mut refused)?;
                }
                ready = stream.writable(), if waits => ready.map_err(Error::from)?,
                () = self.wake.notified() => {}
            }
        }
    }

    /// Uses the ring from now on, if the receiver has a bell.
    fn begin_ring(&self, number: u64, bell: FileAddress) -> Result<()> {
        let mut outbox = self.current(number)?;
        let Some(ring) = outbox.offered.take() else { return Ok(()) };
        if bell != FileAddress::NONE {
            match RemoteBell::open(bell) {
                Ok(bell) => outbox.ring = Some((ring, bell)),
                Err(error) => tracing::debug!(%error, "no shared memory with a process"),
            }
        }
        Ok(())
    }

    /// Writes queued bytes until the socket is full. Returns whether bytes remain.
    fn flush(&self, stream: &TcpStream, number: u64) -> Result<bool> {
        let mut outbox = self.current(number)?;
        if outbox.is_full {
            return Err(Error::new(ErrorCode::RpcFail, "too many bytes wait"));
        }
        while let Some(frame) = outbox.queue.front_mut() {
            match stream.try_write(frame) {
                Ok(sent) => {
                    frame.advance(sent);
                    let is_empty = frame.is_empty();
                    outbox.queued -= sent;
                    if is_empty {
                        outbox.queue.pop_front();
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Reads the numbers of communicators that the other process does not have, and its response to
    /// the offer of a ring.
    fn read_refusals(&self, stream: &TcpStream, number: u64, refused: &mut BytesMut) -> Result<()> {
        let mut bytes = [0; 64];
        match stream.try_read(&mut bytes) {
            Ok(0) => return Err(closed_by_other()),
            Ok(read) => refused.extend_from_slice(&bytes[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let Some(plane) = self.plane.upgrade() else { return Ok(()) };
        while let Some(communicator) = refused.first_chunk().copied().map(u32::from_le_bytes) {
            if communicator == 0 {
                let Some(answer) = refused.get(4..).and_then(|rest| rest.first_chunk()) else { break };
                self.begin_ring(number, FileAddress::decode(answer))?;
                refused.advance(4 + FileAddress::BYTES);
                continue;
            }
            refused.advance(4);
            for recipient in plane.recipients() {
                recipient.forget(self.process, communicator);
            }
        }
        Ok(())
    }
}

async fn accept(listener: ParentOnly<TcpListener>, plane: Weak<Plane>) {
    let mut connections = Connections::new(ListenerLimits {
        name: "process-group",
        slots: MAX_CONNECTIONS,
        descriptor_share: 2,
        request: Some(CONNECT_WITHIN),
        idle: Some(CONNECT_WITHIN),
    });
    for connection in 0.. {
        let (stream, peer) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let plane = plane.clone();
        connections.admit(|slot| async move {
            let Err(error) = receive(stream, connection, plane, slot).await else { return };
            tracing::debug!(%peer, %error, "connection ended");
        });
    }
}

/// Serves a connection of another process.
async fn receive(stream: TcpStream, connection: u32, plane: Weak<Plane>, slot: ConnectionSlot) -> Result<()> {
    let mut stream = ParentOnly::new(stream);
    net::keep_connection(&stream).map_err(Error::from)?;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).await.map_err(Error::from)?;
    let own = plane.upgrade().map(|plane| plane.process);
    let hello = Hello::decode(&hello).filter(|hello| Some(hello.to) == own);
    let Some(Hello { from, .. }) = hello else {
        return Err(Error::new(
            ErrorCode::RpcFail,
            "cannot serve connection: it is meant for another process",
        ));
    };
    // The connection of a rank is kept, even if others wait for a connection.
    if !slot.work() {
        return Ok(());
    }
    let visitor = Arc::new(Visitor { process: from, connection, socket: stream, state: Mutex::default() });
    if let Some(plane) = plane.upgrade()
        && !plane.enter(&visitor)
    {
        return Err(Error::new(ErrorCode::RpcFail, "cannot serve connection: a later one is here"));
    }
    let end = read_messages(&visitor, &plane).await;
    if let Some(plane) = plane.upgrade() {
        plane.leave(&visitor);
    }
    end
}

async fn read_messages(visitor: &Visitor, plane: &Weak<Plane>) -> Result<()> {
    loop {
        visitor.socket.readable().await.map_err(Error::from)?;
        let Some(plane) = plane.upgrade() else { return Ok(()) };
        let all = plane.read(visitor, |received| visitor.socket.try_read_buf(received))?;
        drop(plane);
        if !all {
            tokio::task::yield_now().await;
        }
    }
}
