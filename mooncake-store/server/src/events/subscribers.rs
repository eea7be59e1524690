//! Publisher of the ZeroMQ protocol (ZMTP 3, mechanism NULL) with one topic, the empty one.
//!
//! No crate is used: in the Rust crates one slow subscriber blocks all others, and they trust every
//! length that a subscriber sends.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::fork::ParentOnly;
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::zmtp::{COMMAND, MORE, handshake, read_frame};

/// Maximum number of subscribers.
pub(super) const MAX_SUBSCRIBERS: usize = 256;
/// Timeout of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum length of a frame from a subscriber, in bytes.
const MAX_FRAME: u64 = 4096;
/// Maximum number of bytes that wait for one subscriber. Later messages are lost for it, which it
/// notices by their numbers.
const BACKLOG: usize = 64 << 20;

/// All connected subscribers.
#[derive(Clone, Debug, Default)]
pub(super) struct Subscribers(Arc<Mutex<Vec<Arc<Subscriber>>>>);

#[derive(Debug)]
struct Subscriber {
    slot: ConnectionSlot,
    waiting: Mutex<Waiting>,
    filled: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Number of subscriptions to the empty topic.
    subscribed: usize,
    messages: VecDeque<Bytes>,
    bytes: usize,
}

impl Subscribers {
    /// Queues a message for all subscribers. Never waits.
    pub(super) fn send(&self, message: &Bytes) {
        for subscriber in self.0.lock().iter() {
            let mut waiting = subscriber.waiting.lock();
            if waiting.subscribed > 0 && waiting.bytes + message.len() <= BACKLOG {
                waiting.bytes += message.len();
                waiting.messages.push_back(message.clone());
                subscriber.slot.hold(waiting.bytes);
                subscriber.filled.notify_one();
            }
        }
    }

    /// Serves one subscriber until its connection ends. A subscriber is idle while it neither sends
    /// a request nor receives a message.
    async fn serve(&self, mut stream: ParentOnly<TcpStream>, slot: ConnectionSlot) -> io::Result<()> {
        net::keep_connection(&stream)?;
        let (mut input, mut output) = stream.split();
        let shaken = tokio::time::timeout(HANDSHAKE, handshake(&mut input, &mut output, b"PUB"));
        shaken.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let (waiting, filled) = Default::default();
        let subscriber = Arc::new(Subscriber { slot, waiting, filled });
        self.0.lock().push(subscriber.clone());
        let _listed = Listed { all: self, subscriber: &subscriber };
        tokio::select! {
            outcome = listen(&subscriber, &mut input) => outcome,
            outcome = write(&subscriber, &mut output) => outcome,
        }
    }
}

/// Entry of a subscriber in the list. Dropping it removes the subscriber, also if the connection is
/// closed for another one.
struct Listed<'a> {
    all: &'a Subscribers,
    subscriber: &'a Arc<Subscriber>,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.all.0.lock().retain(|other| !Arc::ptr_eq(other, self.subscriber));
    }
}

/// Accepts subscribers and serves each of them.
pub(super) async fn accept(listener: ParentOnly<TcpListener>, subscribers: Subscribers, most: usize) {
    let mut connections = Connections::new(ListenerLimits::new("events", most, 16));
    loop {
        let (stream, from) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let subscribers = subscribers.clone();
        connections.admit(|slot| async move {
            slot.set_peer(from);
            if let Err(error) = subscribers.serve(ParentOnly::new(stream), slot).await {
                tracing::debug!(%from, %error, "subscriber of events disconnected");
            }
        });
    }
}

/// Handles the subscriptions of a subscriber.
async fn listen(subscriber: &Subscriber, input: &mut ReadHalf<'_>) -> io::Result<()> {
    loop {
        let (flags, body) = read_frame(input, MAX_FRAME).await?;
        subscriber.slot.wait_for_request();
        // Version 3.0 subscribes by a message, version 3.1 by a command.
        let (wants, topic) = if flags & COMMAND == 0 {
            match body.split_first() {
                Some((1, topic)) if flags & MORE == 0 => (true, topic),
                Some((0, topic)) if flags & MORE == 0 => (false, topic),
                _ => continue,
            }
        } else if let Some(topic) = body.strip_prefix(b"\x09SUBSCRIBE") {
            (true, topic)
        } else if let Some(topic) = body.strip_prefix(b"\x06CANCEL") {
            (false, topic)
        } else {
            continue;
        };
        if topic.is_empty() {
            let mut waiting = subscriber.waiting.lock();
            waiting.subscribed =
                if wants { waiting.subscribed + 1 } else { waiting.subscribed.saturating_sub(1) };
        }
    }
}

async fn write(subscriber: &Subscriber, output: &mut WriteHalf<'_>) -> io::Result<()> {
    let slot = &subscriber.slot;
    loop {
        let next = subscriber.waiting.lock().messages.pop_front();
        match next {
            Some(message) => {
                slot.begin_next();
                let mut sent = 0;
                while sent < message.len() {
                    slot.wait_for_reader(message.len() as u64);
                    sent += output.write(&message[sent..]).await?;
                }
                let mut waiting = subscriber.waiting.lock();
                waiting.bytes -= message.len();
                if waiting.bytes == 0 {
                    slot.end_transfer();
                }
                slot.wait_for_request();
                slot.hold(waiting.bytes);
            }
            None => subscriber.filled.notified().await,
        }
    }
}
