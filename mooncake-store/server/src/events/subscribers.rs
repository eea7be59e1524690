//! The publishing end of ZeroMQ's wire (ZMTP 3, mechanism NULL). One topic, the empty one.
//!
//! Not a crate: those in Rust let one slow subscriber hold up all others and believe any length a peer sends.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_transport::admission::{Connections, ListenerLimits, Place};
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// Largest number of connections of subscribers.
pub(super) const MOST: usize = 256;
/// How long a peer may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Largest frame that a subscriber may send, in bytes.
const MAX_FRAME: u64 = 4096;
/// Bytes that may wait for one subscriber; what comes then is lost to it, which it sees by the numbers of messages.
const BACKLOG: usize = 64 << 20;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Everybody who listens.
#[derive(Clone, Debug, Default)]
pub(super) struct Subscribers(Arc<Mutex<Vec<Arc<Subscriber>>>>);

#[derive(Debug, Default)]
struct Subscriber {
    waiting: Mutex<Waiting>,
    filled: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    /// How often it has subscribed to the empty topic.
    subscribed: usize,
    messages: VecDeque<Bytes>,
    bytes: usize,
}

impl Subscribers {
    /// Hands a message to all who want it. Never waits.
    pub(super) fn send(&self, message: &Bytes) {
        for subscriber in self.0.lock().iter() {
            let mut waiting = subscriber.waiting.lock();
            if waiting.subscribed > 0 && waiting.bytes + message.len() <= BACKLOG {
                waiting.bytes += message.len();
                waiting.messages.push_back(message.clone());
                subscriber.filled.notify_one();
            }
        }
    }

    /// Serves one subscriber until it goes. A subscriber is as long idle as it has neither asked for anything nor taken a
    /// message.
    async fn serve(&self, stream: TcpStream, place: &Place) -> io::Result<()> {
        net::keep_connection(&stream)?;
        let (mut input, mut output) = stream.into_split();
        let shaken = tokio::time::timeout(HANDSHAKE, handshake(&mut input, &mut output));
        shaken.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let subscriber = Arc::new(Subscriber::default());
        self.0.lock().push(subscriber.clone());
        let _listed = Listed { all: self, subscriber: &subscriber };
        tokio::select! {
            outcome = listen(&subscriber, &mut input, place) => outcome,
            outcome = write(&subscriber, &mut output, place) => outcome,
        }
    }
}

/// A subscriber in the list, until its connection ends, also where that is closed for another.
struct Listed<'a> {
    all: &'a Subscribers,
    subscriber: &'a Arc<Subscriber>,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.all.0.lock().retain(|other| !Arc::ptr_eq(other, self.subscriber));
    }
}

/// Accepts subscribers, and serves each.
pub(super) async fn accept(listener: TcpListener, subscribers: Subscribers, most: usize) {
    let mut connections = Connections::new(ListenerLimits {
        name: "events",
        places: most,
        descriptor_share: 16,
        request: None,
        idle: None,
    });
    loop {
        let (stream, from) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let subscribers = subscribers.clone();
        connections.admit(|place| async move {
            if let Err(error) = subscribers.serve(stream, &place).await {
                tracing::debug!(%from, %error, "a subscriber to events went");
            }
        });
    }
}

async fn handshake(input: &mut OwnedReadHalf, output: &mut OwnedWriteHalf) -> io::Result<()> {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    output.write_all(&greeting).await?;
    let mut theirs = [0; 64];
    input.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || &theirs[12..17] != b"NULL\0" {
        return Err(wrong("no ZMTP 3 greeting with mechanism NULL"));
    }
    output.write_all(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB").await?;
    let (flags, body) = frame(input).await?;
    if flags & COMMAND == 0 || !body.starts_with(b"\x05READY") {
        return Err(wrong("no READY"));
    }
    Ok(())
}

/// Heeds what a subscriber wants.
async fn listen(subscriber: &Subscriber, input: &mut OwnedReadHalf, place: &Place) -> io::Result<()> {
    loop {
        let (flags, body) = frame(input).await?;
        place.wait_for_request();
        // Version 3.0 subscribes by a message, 3.1 by a command.
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

async fn write(subscriber: &Subscriber, output: &mut OwnedWriteHalf, place: &Place) -> io::Result<()> {
    loop {
        let next = subscriber.waiting.lock().messages.pop_front();
        match next {
            Some(message) => {
                output.write_all(&message).await?;
                place.wait_for_request();
                subscriber.waiting.lock().bytes -= message.len();
            }
            None => subscriber.filled.notified().await,
        }
    }
}

/// Flags and body of the next frame.
async fn frame(input: &mut OwnedReadHalf) -> io::Result<(u8, Vec<u8>)> {
    let flags = input.read_u8().await?;
    let len = if flags & LONG == 0 { u64::from(input.read_u8().await?) } else { input.read_u64().await? };
    if len > MAX_FRAME {
        return Err(wrong("a frame too long for a subscriber"));
    }
    let mut body = vec![0; len as usize];
    input.read_exact(&mut body).await?;
    Ok((flags, body))
}

fn wrong(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
