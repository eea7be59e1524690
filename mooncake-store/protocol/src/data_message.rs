//! Messages of bytes from one process to another, as `RpcInterface` of Mooncake C++ sends them: two
//! functions of coro_rpc, one for data and one for tensors.
//!
//! Short data travels in the body of a request, other bytes behind it. A tensor is its bytes,
//! without shape and type. The reply says that the receiver has handled the message.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_transport::admission::{ByteBudget, ByteReport, TransferRate};
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::connection::Connection;
use super::frame::{Refusal, Status};
use super::pack;
use super::server::{RunningServer, Server, ServerOptions, Service, Waiting};
use super::type_signature::function_id;

/// Function that takes data.
const DATA: u32 = function_id("mooncake::RpcCommunicator::handleDataTransfer");
/// Function that takes a tensor.
const TENSOR: u32 = function_id("mooncake::RpcCommunicator::handleTensorTransfer");
/// Longest data that travels in the body, in bytes.
const IN_BODY: usize = 1024;
/// Longest message in bytes.
pub const MAX_MESSAGE: usize = 1 << 30;
/// Time for which the connection to a process that does not listen yet is tried.
const CONNECT_PATIENCE: Duration = Duration::from_secs(4);
/// Pause between two attempts to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);
/// Unit of the space of messages in bytes.
const UNIT: u64 = 1 << 10;
/// Longest message that needs no space, in bytes. A connection has one at a time.
const WITHOUT_SPACE: usize = 64 << 10;
/// Minimum rate of a message, which has its space from the first byte on.
const RATE: TransferRate = TransferRate { grace: Duration::from_secs(10), bytes_per_second: 8 << 20 };
/// Interval of the search for connections that receivers have closed.
const SWEEP_INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 10_000 });

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// Bytes of the caller.
    Data,
    /// Bytes of a tensor.
    Tensor,
}

/// Received message. The sender waits until it is dropped. Its bytes count until then, whether its
/// connection is still open or not.
#[derive(Debug)]
pub struct Message {
    /// Kind of the message.
    pub kind: MessageKind,
    /// Bytes of the message.
    pub bytes: Vec<u8>,
    _handled: oneshot::Sender<()>,
    _space: Option<OwnedSemaphorePermit>,
}

/// Received messages, in the order of their arrival.
#[derive(Debug)]
pub struct Messages(mpsc::Receiver<Message>);

impl Messages {
    /// Waits for the next message. Returns `None` once the receiver has stopped.
    pub async fn next(&mut self) -> Option<Message> {
        self.0.recv().await
    }
}

/// Receiver of messages at a port. It stops when it is dropped.
#[derive(Debug)]
pub struct MessageReceiver {
    server: RunningServer,
    budget: ByteBudget,
    space: Space,
}

/// Space of messages that are being received or wait to be handled.
#[derive(Clone, Debug)]
struct Space {
    /// Permits, of which each stands for [`UNIT`].
    free: Arc<Semaphore>,
    units: u32,
}

impl Space {
    fn new(bytes: u64) -> Self {
        let most = u64::from(u32::MAX).min(Semaphore::MAX_PERMITS as u64);
        let units = bytes.div_ceil(UNIT).clamp(1, most) as u32;
        Self { free: Arc::new(Semaphore::new(units as usize)), units }
    }

    /// Returns the permits that a message of this length needs. One message may be longer than the
    /// space.
    fn of(&self, len: usize) -> u32 {
        u32::try_from((len as u64).div_ceil(UNIT)).map_or(self.units, |units| units.min(self.units))
    }

    fn limit(&self) -> u64 {
        u64::from(self.units) * UNIT
    }

    fn held(&self) -> u64 {
        self.limit().saturating_sub(self.free.available_permits() as u64 * UNIT)
    }
}

impl MessageReceiver {
    /// Listens at `host:port` on the current tokio runtime. At most `waiting` messages wait to be
    /// taken; the connections of further ones wait. All messages that have not been handled share
    /// the bytes of two of the longest ones, but at most a quarter of the memory that the process
    /// may use. A message for which there is no space is not received until earlier ones have been
    /// handled.
    ///
    /// # Errors
    /// `RPC_FAIL` with the address if it cannot be listened at.
    pub async fn listen(address: &str, waiting: usize) -> Result<(Self, Messages)> {
        let limit = ByteBudget::for_messages(MAX_MESSAGE as u64).report().limit;
        Self::listen_within(address, waiting, limit).await
    }

    /// Listens like [`listen`](Self::listen), with this limit in bytes.
    ///
    /// # Errors
    /// Returns the errors of [`listen`](Self::listen).
    pub async fn listen_within(address: &str, waiting: usize, limit: u64) -> Result<(Self, Messages)> {
        let (budget, space) = (ByteBudget::for_messages(MAX_MESSAGE as u64), Space::new(limit));
        // The space bounds the messages. Buffers grow in steps and may be longer.
        budget.set_limit(budget.report().limit.saturating_mul(3));
        let options = ServerOptions {
            listener: "data_message",
            max_connections: 1024,
            descriptor_share: 8,
            max_body: MAX_MESSAGE,
            request_timeout: Some(RATE.grace),
            rate: RATE,
            budget: budget.clone(),
            ..ServerOptions::default()
        };
        let (queue, messages) = mpsc::channel(waiting.max(1));
        let service = Deliveries { queue, space: space.clone() };
        let server = Server::bind(address, options).await?.start(Arc::new(service));
        Ok((Self { server, budget, space }, Messages(messages)))
    }

    /// Returns the bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Returns the bytes of messages that are being received or wait to be handled.
    pub fn bytes(&self) -> ByteReport {
        let ByteReport { closed, .. } = self.budget.report();
        ByteReport { held: self.space.held(), limit: self.space.limit(), closed }
    }

    /// Stops listening, and waits for the replies to messages that are being handled.
    pub async fn stop(self) {
        self.server.stop().await;
    }
}

/// Service that queues messages.
struct Deliveries {
    queue: mpsc::Sender<Message>,
    space: Space,
}

impl Service for Deliveries {
    fn call(&self, function: u32, _: &[u8], _: &mut Vec<u8>) -> Result<(), Refusal> {
        Err((Status::NotRegistered, format!("this port takes messages only. function={function:#010x}")))
    }

    fn space(&self, len: usize) -> Option<(&Arc<Semaphore>, u32)> {
        let needs_space = len > WITHOUT_SPACE && !is_planted("messages-without-space");
        needs_space.then(|| (&self.space.free, self.space.of(len)))
    }

    fn begin_attached(
        &self,
        function: u32,
        body: &[u8],
        attachment: &[u8],
        space: Option<OwnedSemaphorePermit>,
    ) -> Option<Waiting> {
        let kind = match function {
            DATA => MessageKind::Data,
            TENSOR => MessageKind::Tensor,
            _ => return None,
        };
        let bytes = if attachment.is_empty() && kind == MessageKind::Data {
            pack::decode::<&[u8]>(body).map(<[u8]>::to_vec)
        } else {
            Ok(attachment.to_vec())
        };
        let queue = self.queue.clone();
        Some(Box::pin(async move {
            let bytes = bytes.map_err(|error| (Status::InvalidArguments, error.to_string()))?;
            let (handled, done) = oneshot::channel();
            let stopped = |_| (Status::Canceled, "the receiver has stopped".to_owned());
            let message = Message { kind, bytes, _handled: handled, _space: space };
            queue.send(message).await.map_err(stopped)?;
            // The message is dropped when it has been handled.
            let _ = done.await;
            let mut reply = Vec::new();
            pack::encode_spelled(&(), &mut reply);
            Ok(reply)
        }))
    }
}

/// Options of a [`MessageSender`].
#[derive(Clone, Copy, Debug)]
pub struct SenderOptions {
    /// Maximum number of connections to one receiver. A message that finds all of them busy waits.
    pub max_connections: usize,
    /// Timeout of a message, from the first attempt to connect to the reply.
    pub timeout: Duration,
}

/// Sender of messages to any receiver. It keeps idle connections.
#[derive(Debug)]
pub struct MessageSender {
    options: SenderOptions,
    targets: Arc<Mutex<Targets>>,
    clock: SystemClock,
}

/// Receivers by address.
#[derive(Debug, Default)]
struct Targets {
    by_address: HashMap<String, Arc<Target>>,
    /// True if a task searches for closed connections.
    is_swept: bool,
}

impl Targets {
    /// Closes the idle connections that receivers have closed, and removes receivers without
    /// connections and messages.
    fn sweep(&mut self) {
        self.by_address.retain(|_, target| {
            let mut idle = target.idle.lock();
            idle.plain.retain(Connection::is_quiet);
            idle.attached.retain(Connection::is_quiet);
            !(idle.plain.is_empty() && idle.attached.is_empty()) || Arc::strong_count(target) > 1
        });
    }
}

/// Task that searches for closed connections, until there are no receivers. All messages of a
/// sender are sent on one runtime.
struct Sweeper(Weak<Mutex<Targets>>);

impl Sweeper {
    async fn run(self) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            let Some(targets) = self.0.upgrade() else { return };
            let mut targets = targets.lock();
            targets.sweep();
            if targets.by_address.is_empty() {
                targets.is_swept = false;
                return;
            }
        }
    }
}

/// Connections to one receiver.
#[derive(Debug)]
struct Target {
    idle: Mutex<Idle>,
    slots: Semaphore,
}

/// Idle connections. A receiver of Mooncake C++ keeps the attachment of a request, and takes it for
/// the data of a later request without one. So requests with attachments have connections of their
/// own.
#[derive(Debug, Default)]
struct Idle {
    plain: Vec<Connection<TcpStream>>,
    attached: Vec<Connection<TcpStream>>,
}

impl Idle {
    fn of(&mut self, has_attachment: bool) -> &mut Vec<Connection<TcpStream>> {
        if has_attachment { &mut self.attached } else { &mut self.plain }
    }
}

impl MessageSender {
    /// Creates a sender without connections.
    pub fn new(options: SenderOptions) -> Self {
        Self { options, targets: Arc::default(), clock: SystemClock::new() }
    }

    /// Sends a message to `host:port`, and waits until the receiver has handled it. A message is
    /// sent at most once.
    ///
    /// # Errors
    /// `RPC_FAIL` if no process listens there within some seconds, or if the connection breaks.
    /// `RPC_TIMEOUT` after the timeout; the receiver may handle the message all the same.
    /// `NOT_SUPPORTED` if the receiver takes no messages. `INVALID_PARAMS` for a message longer
    /// than [`MAX_MESSAGE`].
    pub async fn send(&self, to: &str, kind: MessageKind, bytes: &[u8]) -> Result<()> {
        if bytes.len() > MAX_MESSAGE - IN_BODY {
            return Err(Error::invalid(format!(
                "cannot send message: it is too long. len={} max={}",
                bytes.len(),
                MAX_MESSAGE - IN_BODY
            )));
        }
        let sent = timeout(self.options.timeout, self.exchange(to, kind, bytes)).await;
        sent.unwrap_or_else(|_| {
            let text = format!("cannot send message: {to} did not reply within {:?}", self.options.timeout);
            Err(Error::new(ErrorCode::RpcTimeout, text))
        })
    }

    async fn exchange(&self, to: &str, kind: MessageKind, bytes: &[u8]) -> Result<()> {
        let target = self.target(to);
        let closed = |_| Error::internal("the connection pool is closed");
        let _slot = target.slots.acquire().await.map_err(closed)?;
        let (function, body, attachment) = match kind {
            MessageKind::Data if bytes.len() <= IN_BODY => (DATA, Some(bytes), &[][..]),
            MessageKind::Data => (DATA, Some(&[][..]), bytes),
            MessageKind::Tensor => (TENSOR, None, bytes),
        };
        let has_attachment = !attachment.is_empty();
        let idle = loop {
            let idle = target.idle.lock().of(has_attachment).pop();
            match idle {
                Some(connection) if !connection.is_quiet() => {}
                idle => break idle,
            }
        };
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.connect(to).await?,
        };
        let write = |out: &mut Vec<u8>| {
            if let Some(body) = body {
                pack::encode_spelled(&body, out);
            }
        };
        let broke = |broken: super::connection::Broken| broken.into_error(&to);
        connection.send_attached(function, &write, attachment).await.map_err(broke)?;
        connection.receive().await.map_err(broke)?;
        connection.is_accepted(&to)?;
        connection.clear();
        target.idle.lock().of(has_attachment).push(connection);
        Ok(())
    }

    /// Returns the connections to a receiver. A task closes those that the receiver has closed.
    fn target(&self, to: &str) -> Arc<Target> {
        let mut targets = self.targets.lock();
        if let Some(target) = targets.by_address.get(to) {
            return target.clone();
        }
        if !std::mem::replace(&mut targets.is_swept, true) && !is_planted("closed-receivers-stay") {
            tokio::spawn(Sweeper(Arc::downgrade(&self.targets)).run());
        }
        let slots = Semaphore::new(self.options.max_connections.clamp(1, Semaphore::MAX_PERMITS));
        let target = Arc::new(Target { idle: Mutex::default(), slots });
        targets.by_address.insert(to.to_owned(), target.clone());
        target
    }

    async fn connect(&self, to: &str) -> Result<Connection<TcpStream>> {
        let began = self.clock.now();
        let stream = loop {
            let error = match TcpStream::connect(to).await {
                Ok(stream) => break stream,
                Err(error) => error,
            };
            let is_lasting = error.kind() == std::io::ErrorKind::InvalidInput;
            if is_lasting || self.clock.now().since(began) >= CONNECT_PATIENCE {
                let text = format!("cannot send message: cannot connect to {to}: {error}");
                return Err(Error::new(ErrorCode::RpcFail, text).with_source(error));
            }
            tokio::time::sleep(CONNECT_PAUSE).await;
        };
        net::keep_connection(&stream)?;
        Ok(Connection::new(stream, MAX_MESSAGE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{self, Parsed};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const OPTIONS: SenderOptions = SenderOptions { max_connections: 4, timeout: Duration::from_secs(20) };

    #[test]
    fn functions_have_the_numbers_of_mooncake_cpp() {
        assert_eq!((DATA, TENSOR), (0x2576_4c34, 0x0169_7aab));
    }

    #[tokio::test]
    async fn messages_arrive_in_either_form() {
        let (receiver, mut messages) = MessageReceiver::listen("127.0.0.1:0", 1).await.unwrap();
        let at = receiver.local_addr().to_string();
        let sender = MessageSender::new(OPTIONS);
        let large: Vec<u8> = (0..3 << 20).map(|i: u32| (i % 251) as u8).collect();
        let sizes = [0, 1, 255, 256, 1024, 1025, 3 << 20, 7];
        for (kind, len) in
            [MessageKind::Data, MessageKind::Tensor].iter().flat_map(|k| sizes.map(|len| (*k, len)))
        {
            let (sent, message) = tokio::join!(sender.send(&at, kind, &large[..len]), async {
                let message = messages.next().await.unwrap();
                (message.kind, message.bytes.len(), message.bytes == large[..len])
            });
            sent.unwrap();
            assert_eq!(message, (kind, len, true));
        }
        assert_eq!(sender.targets.lock().by_address[&at].idle.lock().plain.len(), 1);
        receiver.stop().await;
        assert!(messages.next().await.is_none());
        let refused = sender.send(&at, MessageKind::Data, b"x").await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::RpcFail, "{refused}");
    }

    /// The sender waits for the message to be dropped.
    #[tokio::test]
    async fn a_reply_says_that_the_message_was_handled() {
        let (receiver, mut messages) = MessageReceiver::listen("127.0.0.1:0", 1).await.unwrap();
        let at = receiver.local_addr().to_string();
        let sender = MessageSender::new(SenderOptions { timeout: Duration::from_millis(200), ..OPTIONS });
        let held = sender.send(&at, MessageKind::Data, b"held");
        assert_eq!(held.await.unwrap_err().code(), ErrorCode::RpcTimeout);
        assert_eq!(messages.next().await.unwrap().bytes, b"held");
        let text = sender.send("127.0.0.1", MessageKind::Data, b"").await.unwrap_err().to_string();
        assert!(text.contains("cannot connect to 127.0.0.1"), "{text}");
        drop(receiver);
    }

    /// A message for which there is no space waits, and is not refused.
    #[tokio::test]
    async fn messages_wait_for_space() {
        const LONG: usize = 4 << 20;
        let (receiver, mut messages) =
            MessageReceiver::listen_within("127.0.0.1:0", 8, 2 * LONG as u64 + 10_000).await.unwrap();
        let at = receiver.local_addr().to_string();
        let sender = Arc::new(MessageSender::new(SenderOptions { max_connections: 8, ..OPTIONS }));
        let sends: Vec<_> = (0..6)
            .map(|_| {
                let (sender, at) = (sender.clone(), at.clone());
                tokio::spawn(async move { sender.send(&at, MessageKind::Tensor, &vec![7; LONG]).await })
            })
            .collect();
        // Short messages need no space.
        let (short, first) = tokio::join!(sender.send(&at, MessageKind::Data, b"short"), async {
            let mut taken = Vec::new();
            loop {
                let message = messages.next().await.unwrap();
                if message.bytes == b"short" {
                    return taken;
                }
                taken.push(message);
            }
        });
        short.unwrap();
        assert!(first.len() <= 2, "further ones wait");
        drop(first);
        let mut arrived = 0;
        while sends.iter().any(|send| !send.is_finished()) {
            assert!(receiver.bytes().held <= 2 * LONG as u64 + 16_384, "{:?}", receiver.bytes());
            tokio::select! {
                message = messages.next() => {
                    assert_eq!(message.unwrap().bytes.len(), LONG);
                    arrived += 1;
                }
                () = tokio::task::yield_now() => {}
            }
        }
        assert!((4..=6).contains(&arrived));
        for send in sends {
            send.await.unwrap().unwrap();
        }
        assert_eq!((receiver.bytes().held, receiver.bytes().closed), (0, 0));
    }

    /// The bytes of a message count until it is dropped, although its sender is gone.
    #[tokio::test]
    async fn messages_of_closed_connections_count() {
        const LONG: usize = 4 << 20;
        let (receiver, mut messages) = MessageReceiver::listen("127.0.0.1:0", 8).await.unwrap();
        let at = receiver.local_addr().to_string();
        let sender = MessageSender::new(SenderOptions { timeout: Duration::from_millis(500), ..OPTIONS });
        let late = sender.send(&at, MessageKind::Data, &vec![7; LONG]).await.unwrap_err();
        assert_eq!(late.code(), ErrorCode::RpcTimeout);
        drop(sender);
        let message = timeout(Duration::from_secs(20), messages.next()).await.unwrap().unwrap();
        let ended = async {
            while !message._handled.is_closed() {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), ended).await.expect("the server sees the end of the connection");
        assert!(receiver.bytes().held >= LONG as u64, "{:?}", receiver.bytes());
        drop(message);
        assert_eq!(receiver.bytes().held, 0);
    }

    /// A sender of messages to many processes keeps no connections to those that have stopped.
    #[tokio::test]
    async fn connections_to_stopped_receivers_are_closed() {
        let sender = MessageSender::new(OPTIONS);
        let mut receivers = Vec::new();
        for _ in 0..5 {
            let (receiver, mut messages) = MessageReceiver::listen("127.0.0.1:0", 1).await.unwrap();
            let at = receiver.local_addr().to_string();
            for len in [10, 10_000] {
                let bytes = vec![1; len];
                let (sent, ()) = tokio::join!(sender.send(&at, MessageKind::Data, &bytes), async {
                    drop(messages.next().await);
                });
                sent.unwrap();
            }
            receivers.push((receiver, messages));
        }
        assert_eq!(sender.targets.lock().by_address.len(), 5);
        for (receiver, messages) in receivers.drain(1..) {
            drop(messages);
            receiver.stop().await;
        }
        let swept = async {
            while sender.targets.lock().by_address.len() > 1 {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), swept).await.expect("the connections are closed");
        // The receiver that is still there is reached through the same connections.
        let (receiver, messages) = &mut receivers[0];
        let at = receiver.local_addr().to_string();
        let (sent, message) = tokio::join!(sender.send(&at, MessageKind::Data, b"later"), async {
            messages.next().await.unwrap().bytes.clone()
        });
        sent.unwrap();
        assert_eq!(message, b"later");
    }

    #[tokio::test]
    async fn other_calls_are_refused() {
        let (receiver, _messages) = MessageReceiver::listen("127.0.0.1:0", 1).await.unwrap();
        let mut stream = TcpStream::connect(receiver.local_addr()).await.unwrap();
        let mut requests = Vec::new();
        frame::write_request(&mut requests, 1, 0x1234, |_| {});
        frame::write_request(&mut requests, 2, DATA, |body| body.extend(b"no string"));
        stream.write_all(&requests).await.unwrap();
        let mut received = Vec::new();
        for expected in [Status::NotRegistered, Status::InvalidArguments] {
            let used = loop {
                match frame::parse_reply(&received, MAX_MESSAGE).unwrap() {
                    Parsed::Whole(reply, used) => {
                        assert_eq!(reply.status, expected);
                        break used;
                    }
                    Parsed::Partial(_) => assert!(stream.read_buf(&mut received).await.unwrap() > 0),
                }
            };
            received.drain(..used);
        }
    }
}
