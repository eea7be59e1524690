//! Server side. Each connection has a task of its own, so that a silent client does not delay
//! others.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::error::Reason;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::frame::{Frame, HEADER, Kind, encode, parse_payload, payload_len};
use super::{ConnectionDescriptor, HandshakeConfig, HandshakeService, INSTANCE, Notification};
use crate::admission::{ConnectionSlot, Connections, ListenerLimits};

/// Maximum number of bytes that a client may send after its request before the connection is
/// closed.
const MAX_DRAIN: u64 = 64 << 10;
/// Least time between two log lines about messages that are too long.
const LOG_PAUSE: Duration = Duration::from_secs(10);
/// Size of the first buffer for a request in bytes.
const PART: usize = 16 << 10;

/// Running handshake port. The drop stops it and closes its connections.
#[derive(Debug)]
pub struct HandshakeServer {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl HandshakeServer {
    /// Serves a listener (see [`net::listen`](crate::net::listen)) on the current tokio runtime.
    pub fn serve(
        listener: TcpListener,
        service: Arc<dyn HandshakeService>,
        config: HandshakeConfig,
    ) -> Result<Self> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| {
            Error::invalid("a handshake port is served on a tokio runtime, and there is none here")
        })?;
        let addr = listener.local_addr()?;
        let listener = ParentOnly::new(tokio::net::TcpListener::from_std(listener)?);
        Ok(Self { addr, task: runtime.spawn(accept(listener, service, Arc::new(config))) })
    }

    /// Stops the server, and returns when the port is free again.
    pub async fn stop(mut self) {
        self.task.abort();
        // The task was cancelled on purpose.
        let _ = (&mut self.task).await;
    }

    /// Returns the address of the listener.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for HandshakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: ParentOnly<tokio::net::TcpListener>,
    service: Arc<dyn HandshakeService>,
    config: Arc<HandshakeConfig>,
) {
    // The connections end with this task.
    let mut connections = Connections::new(ListenerLimits {
        request: Some(config.receive_timeout),
        idle: Some(config.receive_timeout),
        ..ListenerLimits::new("handshake", config.max_connections, 4)
    });
    loop {
        let (stream, peer) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let (service, config) = (service.clone(), config.clone());
        connections.admit(|slot| async move {
            slot.set_peer(peer);
            let mut stream = ParentOnly::new(stream);
            if let Err(error) = serve(&mut stream, &*service, &config, &slot).await {
                match error.reason() {
                    Some(Reason::TooLong) if may_log() => {
                        warn!(%peer, %error, "handshake connection closed: the message is too long");
                    }
                    _ => debug!(%peer, %error, "handshake connection closed without a reply"),
                }
            }
        });
    }
}

/// Returns whether a message that is too long is logged: one in [`LOG_PAUSE`].
fn may_log() -> bool {
    static CLOCK: LazyLock<SystemClock> = LazyLock::new(SystemClock::new);
    static LOGGED: Mutex<Option<Moment>> = Mutex::new(None);
    let (now, mut logged) = (CLOCK.now(), LOGGED.lock());
    let is_due = logged.is_none_or(|logged| now.since(logged) >= LOG_PAUSE);
    if is_due {
        *logged = Some(now);
    }
    is_due
}

async fn serve(
    stream: &mut TcpStream,
    service: &dyn HandshakeService,
    config: &HandshakeConfig,
    slot: &ConnectionSlot,
) -> Result<()> {
    stream.set_nodelay(true)?;
    let silent = |_| Error::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
    let request =
        timeout(config.receive_timeout, receive(stream, config.max_len, slot)).await.map_err(silent)??;
    if !slot.work() {
        return Ok(());
    }
    let frame = parse_payload(&request)?;
    let reply = answer(&frame, service).await?;
    let reply = encode(frame.kind, frame.legacy, &reply);
    drop(request);
    slot.end_transfer();
    slot.wait_for_reader(reply.len() as u64);
    slot.hold(reply.capacity());
    let rest = async {
        stream.write_all(&reply).await?;
        stream.shutdown().await?;
        // An early close would turn an unread response into a reset.
        tokio::io::copy(&mut (&mut *stream).take(MAX_DRAIN), &mut tokio::io::sink()).await
    };
    timeout(config.receive_timeout, rest).await.map_err(silent)??;
    Ok(())
}

async fn receive(stream: &mut TcpStream, max: usize, slot: &ConnectionSlot) -> Result<Vec<u8>> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).await?;
    let len = payload_len(header, max)?;
    let mut rest = stream.take(len as u64);
    let mut payload = Vec::new();
    while payload.len() < len {
        // The buffer grows with the received bytes, not with the announced length.
        payload.reserve((len - payload.len()).min(payload.len().max(PART)));
        slot.wait_within_request(len as u64);
        slot.hold(payload.capacity());
        if rest.read_buf(&mut payload).await? == 0 {
            return Err(Error::invalid("the connection ended inside a frame"));
        }
    }
    Ok(payload)
}

async fn answer(frame: &Frame<'_>, service: &dyn HandshakeService) -> Result<Vec<u8>> {
    let request: Value = serde_json::from_slice(frame.body)
        .map_err(|e| Error::invalid(format!("a {:?} request that is not JSON: {e}", frame.kind)))?;
    Ok(match frame.kind {
        Kind::Metadata => service.descriptor().await,
        Kind::Probe => {
            let mut response = json!({"status": "success"});
            if let Some(instance) = service.instance().filter(|_| request[INSTANCE] == true) {
                response[INSTANCE] = instance.into();
            }
            response.to_string().into_bytes()
        }
        Kind::Connection => {
            let response = service.connection(ConnectionDescriptor(request)).await;
            response.0.to_string().into_bytes()
        }
        Kind::Notify => {
            let text = |key: &str| request[key].as_str().unwrap_or_default().to_owned();
            let notification = Notification { name: text("name"), message: text("notify_msg") };
            let taken = service.notified(notification).await;
            let message = if taken { "success" } else { "" };
            json!({"name": "", "notify_msg": message}).to_string().into_bytes()
        }
    })
}
