//! The answering side: every connection on its own, so that a silent client costs nobody else anything.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::frame::{Frame, HEADER, Kind, encode, parse_payload, payload_len};
use super::{HandshakeConfig, HandshakeService, Notification};
use crate::silent::{Busy, Silent, within_descriptors};

/// Bytes a client may send after its request before it is cut off.
const MAX_DRAIN: u64 = 64 << 10;

/// A handshake port being served; stops when dropped, connections and all.
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

    /// Stops, and returns when the port is free again.
    pub async fn stop(mut self) {
        self.task.abort();
        // Cancelled, as was the idea.
        let _ = (&mut self.task).await;
    }

    /// Where it listens.
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
    // Ends with this task, and its connections with it.
    let mut connections = JoinSet::new();
    let mut silent = Silent::default();
    let most = within_descriptors(config.max_connections, 4);
    loop {
        let accepted = listener.accept().await;
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, peer)) => {
                if connections.len() >= most && !silent.end_oldest() {
                    warn!(%peer, max = most, "too many handshake connections: one is turned away");
                    continue;
                }
                let (service, config, busy) = (service.clone(), config.clone(), Busy::default());
                let about = busy.clone();
                let task = connections.spawn(async move {
                    if let Err(error) = serve(stream, &*service, &config, &busy).await {
                        debug!(%peer, %error, "handshake connection closed without a reply");
                    }
                });
                silent.add(task, about);
            }
            Err(error) => {
                warn!(%error, "cannot accept on the handshake port");
                // Out of file descriptors, mostly: no event says when there are some again.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve(
    mut stream: TcpStream,
    service: &dyn HandshakeService,
    config: &HandshakeConfig,
    busy: &Busy,
) -> Result<()> {
    stream.set_nodelay(true)?;
    let silent = |_| Error::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
    let request =
        timeout(config.receive_timeout, receive(&mut stream, config.max_len)).await.map_err(silent)??;
    busy.set(true);
    let frame = parse_payload(&request)?;
    let reply = answer(&frame, service).await?;
    let reply = encode(frame.kind, frame.legacy, &reply);
    let rest = async {
        stream.write_all(&reply).await?;
        stream.shutdown().await?;
        // It may make room now.
        busy.set(false);
        // Closing first would turn a reply not yet read into a reset.
        tokio::io::copy(&mut (&mut stream).take(MAX_DRAIN), &mut tokio::io::sink()).await
    };
    timeout(config.receive_timeout, rest).await.map_err(silent)??;
    Ok(())
}

async fn receive(stream: &mut TcpStream, max: usize) -> Result<Vec<u8>> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).await?;
    let len = payload_len(header, max)?;
    let mut payload = Vec::new();
    // Grows with what comes, not with what is announced.
    stream.take(len as u64).read_to_end(&mut payload).await?;
    if payload.len() < len {
        return Err(Error::invalid("the connection ended inside a frame"));
    }
    Ok(payload)
}

async fn answer(frame: &Frame<'_>, service: &dyn HandshakeService) -> Result<Vec<u8>> {
    let request: Value = serde_json::from_slice(frame.body)
        .map_err(|e| Error::invalid(format!("a {:?} request that is not JSON: {e}", frame.kind)))?;
    Ok(match frame.kind {
        Kind::Metadata => service.descriptor().await,
        Kind::Probe => json!({"status": "success"}).to_string().into_bytes(),
        Kind::Connection => service.connection(request).await.to_string().into_bytes(),
        Kind::Notify => {
            let text = |key: &str| request[key].as_str().unwrap_or_default().to_owned();
            let notification = Notification { name: text("name"), message: text("notify_msg") };
            let taken = service.notified(notification).await;
            let message = if taken { "success" } else { "" };
            json!({"name": "", "notify_msg": message}).to_string().into_bytes()
        }
    })
}
