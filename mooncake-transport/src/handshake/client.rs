//! Client side. It closes the connection right after the response, because a peer with Mooncake C++
//! serves no other client until then.

use std::io::ErrorKind;
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::frame::{HEADER, Kind, encode, parse_payload, payload_len};
use super::{HandshakeConfig, INSTANCE, Notification};
use crate::net::{self, HostPort};
use crate::segment::{MAX_DESC_BYTES, SegmentDesc};

/// Sends one request and returns the body of its response. A peer that closes the connection after
/// a [`Kind::Connection`] may not know type bytes, so the request is repeated without one.
pub async fn exchange(peer: &HostPort, kind: Kind, body: &[u8], config: &HandshakeConfig) -> Result<Vec<u8>> {
    let at = |error: Error| error.context(format!("handshake port {peer}"));
    match send_request(peer, kind, false, body, config).await {
        Err(Failure::HungUp) if kind == Kind::Connection => {
            send_request(peer, kind, true, body, config).await
        }
        reply => reply,
    }
    .map_err(|failure| at(failure.into()))
}

enum Failure {
    /// The connection ended before a response.
    HungUp,
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Other(error.into())
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::HungUp => Error::new(ErrorCode::RpcFail, "the connection ended without a reply"),
            Failure::Other(error) => error,
        }
    }
}

async fn send_request(
    peer: &HostPort,
    kind: Kind,
    legacy: bool,
    body: &[u8],
    config: &HandshakeConfig,
) -> Result<Vec<u8>, Failure> {
    let mut stream = connect(peer, config.connect_timeout).await?;
    let reply = async {
        stream.write_all(&encode(kind, legacy, body)).await?;
        let mut header = [0; HEADER];
        match stream.read_exact(&mut header).await {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
                return Err(Failure::HungUp);
            }
            Err(error) => return Err(error.into()),
        }
        // A descriptor has a limit of its own, so that engines with many regions are found.
        let max = match kind {
            Kind::Metadata => config.max_len.max(MAX_DESC_BYTES + 1),
            _ => config.max_len,
        };
        let len = payload_len(header, max)?;
        let mut payload = Vec::new();
        // The buffer grows with the received bytes, not with the announced length.
        (&mut stream).take(len as u64).read_to_end(&mut payload).await?;
        if payload.len() < len {
            return Err(Error::new(ErrorCode::RpcFail, "the connection ended inside the reply").into());
        }
        let frame = parse_payload(&payload)?;
        if frame.kind != kind {
            return Err(Error::invalid(format!("asked for {kind:?}, answered with {:?}", frame.kind)).into());
        }
        Ok(frame.body.to_vec())
    };
    match timeout(config.reply_timeout, reply).await {
        Ok(reply) => reply,
        Err(_) => {
            let patience = config.reply_timeout;
            Err(Error::new(ErrorCode::RpcTimeout, format!("no reply to {kind:?} within {patience:?}")).into())
        }
    }
}

/// Requests the descriptor of the engine at that address. `own` is the local descriptor, which the
/// peer receives.
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

/// Delivers a notification. Returns `NoSpace` if the other side rejects it.
pub async fn notify(peer: &HostPort, notification: &Notification, config: &HandshakeConfig) -> Result<()> {
    let body = json!({"name": notification.name, "notify_msg": notification.message}).to_string();
    let too_long = |error: Error| match body.len() > config.max_len {
        true => error.context(format!(
            "{} bytes, where frames have {} at most (MC_HANDSHAKE_MAX_LENGTH)",
            body.len(),
            config.max_len
        )),
        false => error,
    };
    let reply = exchange(peer, Kind::Notify, body.as_bytes(), config).await.map_err(too_long)?;
    let reply: Value = serde_json::from_slice(&reply)
        .map_err(|e| Error::invalid(format!("handshake port {peer}: the reply is not JSON: {e}")))?;
    match reply["notify_msg"].as_str() {
        Some(message) if !message.is_empty() => Ok(()),
        _ => Err(Error::new(ErrorCode::BufferOverflow, format!("{peer} rejected the notification"))),
    }
}

/// Returns whether an engine responds at that address within `patience`.
pub async fn probe(peer: &HostPort, patience: Duration, config: &HandshakeConfig) -> bool {
    let config = HandshakeConfig { connect_timeout: patience, reply_timeout: patience, ..config.clone() };
    exchange(peer, Kind::Probe, b"{}", &config).await.is_ok()
}

/// Returns the identity of the process that responds at an address; `None` if it has none, as in
/// Mooncake C++ and in version 0.2.0.
///
/// # Errors
/// Those of [`exchange`]; `Invalid` if the response is not JSON.
pub async fn probe_instance(peer: &HostPort, config: &HandshakeConfig) -> Result<Option<String>> {
    let request = json!({INSTANCE: true}).to_string();
    let reply = exchange(peer, Kind::Probe, request.as_bytes(), config).await?;
    let reply: Value = serde_json::from_slice(&reply)
        .map_err(|e| Error::invalid(format!("handshake port {peer}: the response is not JSON: {e}")))?;
    Ok(reply[INSTANCE].as_str().map(str::to_owned))
}

async fn connect(peer: &HostPort, patience: Duration) -> Result<TcpStream> {
    match timeout(patience, net::connect(&peer.host, peer.port)).await {
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
