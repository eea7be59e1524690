//! Data plane of a process: its listener, and one connection to each other process, which all
//! communicators share.
//!
//! To a process of the same host, messages go through a ring in shared memory, which the connection
//! introduces. A message that does not fit there goes through the connection. Each message of the
//! ring names the number of frames before it. The connection remains as the sign of life.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::host_port;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransferEngine;
use mooncake_transport::Protocol;
use mooncake_transport::bind_address::loopback_address;
use mooncake_transport::net;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use self::greeting::{CONNECT_WITHIN, greet, log_end, refusal};
pub use self::timeouts::Timeouts;
use crate::driver::{Driver, MessageSource};
use crate::intra_host::{
    Doorbell, FileAddress, MAX_MESSAGES, Notice, RemoteDoorbell, RingReader, RingWriter,
};
use crate::message::{Endpoint, Envelope, Frame, Message};
use crate::pause::PauseCounter;
use crate::secret::Secret;
use crate::staging::Pool;

mod greeting;
mod serving;
#[cfg(test)]
pub(crate) mod tests;
mod timeouts;

/// Largest number of connections from other processes.
const MAX_CONNECTIONS: usize = 1024;
/// Bytes that wait for one connection. Operations wait for each other long before this limit.
const MAX_QUEUED: usize = 256 << 20;
/// Time for the rest of the messages of a process after a connection to it has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
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
        Self::start_with_secret(engine, host, None)
    }

    /// Opens the listener like [`start`](Self::start). With a secret, other processes prove that
    /// they know it.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn start_with_secret(engine: TransferEngine, host: &str, secret: Option<Secret>) -> Result<Self> {
        let runtime = Handle::try_current()
            .map_err(|_| Error::invalid("cannot start data plane: no tokio runtime; start it inside one"))?;
        let mut rng = Rng::from_os();
        // The address of a translation is not one of this machine, and is only published.
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let listener = match engine.bound_address().or_else(|| loopback_address(host)) {
            Some(bound) => net::listen(bound, 0..=0, &mut rng)?,
            None => {
                let requested = host.parse().unwrap_or(any);
                net::listen(requested, 0..=0, &mut rng).or_else(|_| net::listen(any, 0..=0, &mut rng))?
            }
        };
        let listener = TcpListener::from_std(listener).map_err(Error::from)?;
        let port = listener.local_addr().map_err(Error::from)?.port();
        let uses_rdma = engine.descriptor().supports(&Protocol::RDMA);
        let (doorbell, pauses) = (Doorbell::create()?, PauseCounter::start()?);
        let plane = Arc::new_cyclic(|weak: &Weak<Plane>| Plane {
            process: rng.next_u64(),
            secret,
            host: host.to_owned(),
            port,
            pool: Pool::new(engine.clone()),
            reads_in_place: !uses_rdma,
            engine,
            timeouts: Timeouts::default(),
            recipients: Mutex::default(),
            next: AtomicU32::new(1),
            links: Mutex::default(),
            incoming: Mutex::default(),
            incoming_ended: Notify::new(),
            incoming_links: RwLock::default(),
            without_ring: AtomicUsize::new(0),
            pauses,
            driver: Driver::new(runtime.clone(), doorbell, weak.clone()),
            accepting: runtime.spawn(Plane::accept(ParentOnly::new(listener), weak.clone())),
            runtime,
        });
        Ok(Self { plane })
    }

    /// Returns the time limits.
    pub fn timeouts(&self) -> &Timeouts {
        &self.plane.timeouts
    }

    /// Returns the address at which the ports of the engine listen. `None` stands for every
    /// address.
    pub fn bound_address(&self) -> Option<IpAddr> {
        self.plane.engine.bound_address()
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
    secret: Option<Secret>,
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
    incoming_ended: Notify,
    /// Connections from processes, which their tasks own.
    incoming_links: RwLock<Vec<Weak<IncomingLink>>>,
    /// Number of these connections that have no ring.
    without_ring: AtomicUsize,
    pub(crate) pauses: Arc<PauseCounter>,
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
        let mut was_connected = false;
        loop {
            let notified = self.incoming_ended.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if !self.incoming.lock().contains_key(&process) {
                return was_connected;
            }
            was_connected = true;
            notified.await;
        }
    }

    /// Registers a connection from a process, in place of its earlier one, of which nothing counts
    /// any more. Returns false if a later one is here already.
    fn add_incoming(&self, incoming_link: &Arc<IncomingLink>) -> bool {
        let process = incoming_link.process;
        let (earlier, had_earlier): (Vec<_>, _) = {
            let mut incoming_links = self.incoming_links.write();
            let mut incoming = self.incoming.lock();
            if incoming.get(&process).is_some_and(|present| *present > incoming_link.connection) {
                return false;
            }
            // The task of the earlier one may be about to end it.
            let had_earlier = incoming.insert(process, incoming_link.connection).is_some();
            self.without_ring.fetch_add(1, Ordering::SeqCst);
            let open_links = incoming_links.iter().filter_map(Weak::upgrade);
            let earlier = open_links.filter(|other| other.process == process).collect();
            incoming_links.push(Arc::downgrade(incoming_link));
            (earlier, had_earlier)
        };
        for other in &earlier {
            if !is_planted("pg-earlier-connection-goes-on") {
                self.supersede(other);
            }
        }
        if had_earlier {
            self.lose(process);
        }
        true
    }

    /// Ends a connection of whose process there is a later one. Its messages are taken now: later,
    /// they would contradict those of the other connection.
    fn supersede(&self, incoming_link: &IncomingLink) {
        let outcome = self.read(incoming_link, |received| incoming_link.receive(received)).map(drop);
        let mut state = incoming_link.state.lock();
        if let Err(error) = outcome.and_then(|()| self.drain(incoming_link, &mut state)) {
            tracing::debug!(%error, "messages lost");
        }
        state.is_superseded = true;
        drop(state);
        incoming_link.close();
    }

    /// Ends a connection from a process. The connection to the process is closed as well, so that
    /// both sides agree that messages may be lost.
    fn remove_incoming(&self, incoming_link: &Arc<IncomingLink>) {
        let process = incoming_link.process;
        {
            // The last messages of a process that has ended.
            let mut state = incoming_link.state.lock();
            if let Err(error) = self.drain(incoming_link, &mut state) {
                tracing::debug!(%error, "messages lost");
            }
            if state.ring.take().is_none() {
                self.without_ring.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.incoming_links.write().retain(|other| !std::ptr::eq(other.as_ptr(), &raw const **incoming_link));
        // The process may have ended before it sent a notice.
        self.driver.poll_messages();
        {
            let mut incoming = self.incoming.lock();
            if incoming.get(&process) != Some(&incoming_link.connection) {
                return;
            }
            incoming.remove(&process);
        }
        self.incoming_ended.notify_waiters();
        let link = self.links.lock().get(&process).cloned();
        if let Some(link) = link {
            link.close();
        }
        self.lose(process);
    }
}

/// Connection from another process.
struct IncomingLink {
    process: u64,
    /// Number of the connection. A process opens one after the other.
    connection: u32,
    socket: ParentOnly<TcpStream>,
    state: Mutex<IncomingState>,
}

#[derive(Default)]
struct IncomingState {
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

impl IncomingState {
    /// Returns whether the next message of the ring may be taken.
    fn has_message(&mut self) -> bool {
        let frames = self.frames;
        !self.is_superseded && self.ring.as_mut().is_some_and(|ring| ring.has_message(frames))
    }
}

impl IncomingLink {
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
    fn drain(&self, incoming_link: &IncomingLink, state: &mut IncomingState) -> Result<()> {
        if state.is_superseded {
            return Ok(());
        }
        let Some(ring) = &mut state.ring else { return Ok(()) };
        let max_messages = if is_planted("pg-ring-is-read-to-its-end") { usize::MAX } else { MAX_MESSAGES };
        for _ in 0..max_messages {
            let Some(frame) = ring.take(state.frames)? else { break };
            self.deliver_or_refuse(incoming_link, Envelope::decode_frame(frame)?);
        }
        Ok(())
    }

    fn deliver_or_refuse(&self, incoming_link: &IncomingLink, envelope: Envelope) {
        let communicator = envelope.communicator;
        if !self.deliver(incoming_link.process, envelope) {
            // If this notice is lost, the next message of the sender causes another one.
            incoming_link.respond(&communicator.to_le_bytes());
        }
    }

    /// Takes a frame of a connection, with the messages of the ring before and after it. Returns
    /// whether it is a notice.
    ///
    /// # Errors
    /// A malformed message. The connection cannot be used any more.
    fn take_frame(
        &self,
        incoming_link: &IncomingLink,
        state: &mut IncomingState,
        frame: Frame,
    ) -> Result<bool> {
        self.drain(incoming_link, state)?;
        state.frames += 1;
        let is_notice = frame == Frame::Notice;
        match frame {
            Frame::Message(envelope) => self.deliver_or_refuse(incoming_link, envelope),
            Frame::Ring(address) => {
                let doorbell = match RingReader::open(address) {
                    Ok(ring) if state.ring.is_none() => {
                        state.ring = Some(ring);
                        self.without_ring.fetch_sub(1, Ordering::SeqCst);
                        self.driver.doorbell()
                    }
                    Ok(_) => FileAddress::NONE,
                    Err(error) => {
                        tracing::debug!(%error, "no shared memory with a process");
                        FileAddress::NONE
                    }
                };
                let mut response = BytesMut::from(&[0; 4][..]);
                doorbell.encode(&mut response);
                // If this answer is lost, messages go through the connection.
                incoming_link.respond(&response);
            }
            Frame::Notice => {}
        }
        self.drain(incoming_link, state)?;
        Ok(is_notice)
    }

    /// Delivers the messages of a connection and its ring, until no bytes are there, or for the
    /// largest number of reads. Does not wait. Returns whether all were delivered.
    ///
    /// # Errors
    /// The end of the connection, or a malformed message. Nothing is read afterwards.
    fn read(
        &self,
        incoming_link: &IncomingLink,
        read: impl FnMut(&mut BytesMut) -> io::Result<usize>,
    ) -> Result<bool> {
        let (mut is_noticed, mut state) = (false, incoming_link.state.lock());
        let end = match state.has_ended || state.is_superseded {
            true => Err(closed_by_other()),
            false => self.read_frames(incoming_link, &mut state, read, &mut is_noticed),
        };
        state.has_ended |= end.is_err();
        drop(state);
        if is_noticed {
            self.driver.poll_messages();
        }
        end
    }

    fn read_frames(
        &self,
        incoming_link: &IncomingLink,
        state: &mut IncomingState,
        mut read: impl FnMut(&mut BytesMut) -> io::Result<usize>,
        is_noticed: &mut bool,
    ) -> Result<bool> {
        self.drain(incoming_link, state)?;
        for _ in 0..MAX_READS {
            state.received.reserve(READ_BYTES);
            match read(&mut state.received) {
                Ok(0) => return Err(closed_by_other()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(!state.has_message()),
                Err(error) => return Err(error.into()),
            }
            while let Some(frame) = Frame::decode_next(&mut state.received)? {
                *is_noticed |= self.take_frame(incoming_link, state, frame)?;
            }
        }
        Ok(false)
    }

    /// Delivers the messages that have arrived at this host, also those that the runtime has not
    /// seen. Returns false if more may be there.
    pub(crate) fn deliver_all(&self) -> bool {
        if is_planted("pg-messages-wait-while-a-rank-finishes") {
            return true;
        }
        let incoming_links: Vec<_> = self.incoming_links.read().iter().filter_map(Weak::upgrade).collect();
        incoming_links.iter().fold(true, |delivered_all, incoming_link| {
            let outcome = self.read(incoming_link, |received| incoming_link.receive(received));
            let delivered = outcome.unwrap_or_else(|_| {
                incoming_link.close();
                true
            });
            delivered && delivered_all
        })
    }
}

fn closed_by_other() -> Error {
    Error::new(ErrorCode::RpcFail, "connection closed by the other process")
}

impl MessageSource for Plane {
    fn take(&self) {
        for incoming_link in self.incoming_links.read().iter().filter_map(Weak::upgrade) {
            let mut state = incoming_link.state.lock();
            if let Err(error) = self.drain(&incoming_link, &mut state) {
                tracing::debug!(%error, "connection closed");
                incoming_link.close();
            }
        }
    }

    fn has_messages(&self) -> bool {
        let incoming_links = self.incoming_links.read();
        incoming_links
            .iter()
            .filter_map(Weak::upgrade)
            .any(|incoming_link| incoming_link.state.lock().has_message())
    }

    fn covers_all_peers(&self) -> bool {
        self.without_ring.load(Ordering::SeqCst) == 0 && !self.incoming_links.read().is_empty()
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
    ring: Option<(RingWriter, RemoteDoorbell)>,
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
        let notice = outbox.ring.as_mut().and_then(|(ring, doorbell)| {
            ring.push(frames, &frame).then(|| doorbell.ring(envelope.message.is_urgent()))
        });
        match notice {
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
                log_end(&host_port::join(&link.host, link.port), &error);
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
        let end = self.run_connection(from, number).await;
        {
            let mut outbox = self.outbox.lock();
            if outbox.number == number {
                outbox.reset();
            }
        }
        // Messages may still be read from the other direction, such as the last ones of a process
        // that has ended.
        let is_known = match self.plane.upgrade() {
            Some(plane) => timeout(DRAIN_TIMEOUT, plane.wait_without(self.process)).await.unwrap_or(false),
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

    async fn run_connection(&self, from: u64, number: u64) -> Result<()> {
        let timed_out = || Error::new(ErrorCode::RpcTimeout, "cannot connect: no response in time");
        let connected = timeout(CONNECT_WITHIN, net::connect(&self.host, self.port)).await;
        let mut stream = ParentOnly::new(connected.map_err(|_| timed_out())?.map_err(Error::from)?);
        net::keep_connection(&stream).map_err(Error::from)?;
        let secret = self.plane.upgrade().and_then(|plane| plane.secret.clone());
        greet(&mut stream, from, self.process, secret.as_ref()).await?;
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
        let mut received = BytesMut::new();
        loop {
            let is_blocked = self.flush(&stream, number)?;
            tokio::select! {
                ready = stream.readable() => {
                    ready.map_err(Error::from)?;
                    self.read_refusals(&stream, number, &mut received)?;
                }
                ready = stream.writable(), if is_blocked => ready.map_err(Error::from)?,
                () = self.wake.notified() => {}
            }
        }
    }

    /// Uses the ring from now on, if the receiver has a doorbell.
    fn begin_ring(&self, number: u64, doorbell: FileAddress) -> Result<()> {
        let mut outbox = self.current(number)?;
        let Some(ring) = outbox.offered.take() else { return Ok(()) };
        if doorbell != FileAddress::NONE {
            match RemoteDoorbell::open(doorbell) {
                Ok(doorbell) => outbox.ring = Some((ring, doorbell)),
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
    fn read_refusals(&self, stream: &TcpStream, number: u64, received: &mut BytesMut) -> Result<()> {
        let mut bytes = [0; 64];
        match stream.try_read(&mut bytes) {
            Ok(0) => return Err(closed_by_other()),
            Ok(read) => received.extend_from_slice(&bytes[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let Some(plane) = self.plane.upgrade() else { return Ok(()) };
        while let Some(communicator) = received.first_chunk().copied().map(u32::from_le_bytes) {
            match refusal(received) {
                Ok(None) => {}
                Ok(Some(error)) => return Err(error),
                Err(_) => break,
            }
            if communicator == 0 {
                let Some(response) = received.get(4..).and_then(|rest| rest.first_chunk()) else { break };
                self.begin_ring(number, FileAddress::decode(response))?;
                received.advance(4 + FileAddress::BYTES);
                continue;
            }
            received.advance(4);
            for recipient in plane.recipients() {
                recipient.forget(self.process, communicator);
            }
        }
        Ok(())
    }
}
