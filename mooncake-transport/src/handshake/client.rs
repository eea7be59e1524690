//! The asking side. Closes right after the reply: peers of the existing kind serve nobody else until it does.

use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::frame::{HEADER, Kind, encode, parse_payload, payload_len};
use super::{HandshakeConfig, Notification};
use crate::net::HostPort;
use crate::segment::SegmentDesc;

/// Sends one request and returns the body of its reply.
pub async fn exchange(peer: &HostPort, kind: Kind, body: &[u8], config: &HandshakeConfig) -> Result<Vec<u8>> {
    let at = || format!("handshake port {peer}");
    let mut stream = connect(peer, config.connect_timeout).await.map_err(|e| e.context(at()))?;
    let reply = async {
        stream.write_all(&encode(kind, false, body)).await?;
        let mut header = [0; HEADER];
        stream.read_exact(&mut header).await?;
        let len = payload_len(header, config.max_len)?;
        let mut payload = Vec::new();
        // Grows with what comes, not with what is announced.
        (&mut stream).take(len as u64).read_to_end(&mut payload).await?;
        if payload.len() < len {
            return Err(Error::new(ErrorCode::RpcFail, "the connection ended inside the reply"));
        }
        let frame = parse_payload(&payload)?;
        if frame.kind != kind {
            return Err(Error::invalid(format!("asked for {kind:?}, answered with {:?}", frame.kind)));
        }
        Ok(frame.body.to_vec())
    };
    let late = |_| {
        Error::new(ErrorCode::RpcTimeout, format!("no reply to {kind:?} within {:?}", config.reply_timeout))
    };
    timeout(config.reply_timeout, reply).await.map_err(late).and_then(|r| r).map_err(|e| e.context(at()))
}

/// The descriptor of the engine that listens there. `own` is what it is told about us.
pub async fn fetch_descriptor(peer: &HostPort, own: &[u8], config: &HandshakeConfig) -> Result<SegmentDesc> {
    let reply = exchange(peer, Kind::Metadata, own, config).await?;
    if reply.trim_ascii() == b"null" {
        return Err(Error::new(
            ErrorCode::SegmentNotFound,
            format!("{peer} publishes its descriptor in a metadata directory, not at its handshake port"),
        ));
    }
    SegmentDesc::decode(&reply).map_err(|e| e.context(format!("handshake port {peer}")))
}

/// Delivers a notification; `NoSpace` when the other side rejects it.
pub async fn notify(peer: &HostPort, notification: &Notification, config: &HandshakeConfig) -> Result<()> {
    let body = json!({"name": notification.name, "notify_msg": notification.message}).to_string();
    let reply = exchange(peer, Kind::Notify, body.as_bytes(), config).await?;
    let reply: Value = serde_json::from_slice(&reply)
        .map_err(|e| Error::invalid(format!("handshake port {peer}: the reply is not JSON: {e}")))?;
    match reply["notify_msg"].as_str() {
        Some(message) if !message.is_empty() => Ok(()),
        _ => Err(Error::new(ErrorCode::BufferOverflow, format!("{peer} rejected the notification"))),
    }
}

/// Whether an engine answers there, within `patience`.
pub async fn probe(peer: &HostPort, patience: Duration, config: &HandshakeConfig) -> bool {
    let config = HandshakeConfig { connect_timeout: patience, reply_timeout: patience, ..config.clone() };
    exchange(peer, Kind::Probe, b"{}", &config).await.is_ok()
}

async fn connect(peer: &HostPort, patience: Duration) -> Result<TcpStream> {
    let connecting = TcpStream::connect((peer.host.as_str(), peer.port));
    match timeout(patience, connecting).await {
        Ok(Ok(stream)) => {
            stream.set_nodelay(true)?;
            Ok(stream)
        }
        Ok(Err(error)) => {
            Err(Error::new(ErrorCode::RpcFail, format!("cannot connect: {error}")).with_source(error))
        }
        Err(_) => Err(Error::new(ErrorCode::RpcTimeout, format!("no connection within {patience:?}"))),
    }
}
