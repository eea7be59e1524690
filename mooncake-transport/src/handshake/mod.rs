//! Handshake port: one request and one response per connection, JSON in small frames. It serves
//! descriptors, notifications, probes and the connection setup of transports.

mod client;
mod frame;
mod server;

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};

use crate::net::DEFAULT_PORT;

pub use client::{exchange, fetch_descriptor, notify, probe, probe_instance};
pub use frame::{Frame, Kind, encode, parse, parse_payload, payload_len};
pub use server::HandshakeServer;

/// Key in a probe and in its response: the request for the identity of the process, and the
/// identity.
const INSTANCE: &str = "instance";

/// Limits and timeouts of the handshake port, for both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeConfig {
    /// Port of a peer whose name has none.
    pub default_port: u16,
    /// Maximum length of a received frame, in bytes.
    pub max_len: usize,
    /// Time that a server waits for a request, and for the client to close after the response.
    pub receive_timeout: Duration,
    /// Time that a client waits for the connection.
    pub connect_timeout: Duration,
    /// Time that a client waits for the response.
    pub reply_timeout: Duration,
    /// Maximum number of connections, limited to a quarter of the descriptors that the process may
    /// open. A further connection replaces the one that has waited longest for its client. It is
    /// refused if every connection works on a request.
    pub max_connections: usize,
    /// Maximum number of queued notifications. Further ones are rejected.
    pub max_notifications: usize,
    /// Maximum size of the queued notifications in bytes, names and messages together. A single one
    /// may be larger.
    pub max_notification_bytes: usize,
}

impl Default for HandshakeConfig {
    fn default() -> Self {
        Self {
            default_port: DEFAULT_PORT,
            max_len: 1 << 20,
            receive_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
            max_connections: 1024,
            max_notifications: 1024,
            max_notification_bytes: 16 << 20,
        }
    }
}

/// Message from one engine to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Name, which identifies the subject.
    pub name: String,
    /// Message. Not empty, because an empty message is the form of a rejection.
    pub message: String,
}

impl Notification {
    /// Returns the length of both texts in bytes.
    pub(crate) fn len(&self) -> usize {
        self.name.len() + self.message.len()
    }
}

/// Handler of the requests to a [`HandshakeServer`].
#[async_trait]
pub trait HandshakeService: Send + Sync + 'static {
    /// Returns the local descriptor as JSON, or `null` if it is published elsewhere.
    async fn descriptor(&self) -> Vec<u8>;

    /// Returns the identity of this process, for a probe that asks for it. The default has none, as
    /// in Mooncake C++.
    fn instance(&self) -> Option<String> {
        None
    }

    /// Accepts a notification. Returns false to reject it.
    async fn notified(&self, notification: Notification) -> bool;

    /// Sets up a connection of a transport. The default has none to set up.
    async fn connection(&self, request: ConnectionDescriptor) -> ConnectionDescriptor {
        let _ = request;
        ConnectionDescriptor::default()
    }
}

/// Handler of connection requests of one transport.
#[async_trait]
pub trait AcceptConnection: Send + Sync {
    /// Sets up a connection that a peer requests at the handshake port.
    async fn accept(&self, request: ConnectionDescriptor) -> ConnectionDescriptor;
}

/// Request or response of a connection setup, in JSON as in Mooncake C++. Its fields belong to the
/// transport that sets up the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionDescriptor(pub Value);

impl Default for ConnectionDescriptor {
    /// Returns the response of an engine without connections to set up.
    fn default() -> Self {
        Self(json!({
            "local_gid": "", "local_lid": 0, "local_nic_path": "", "payload": "",
            "peer_nic_path": "", "qp_num": [], "reply_msg": "",
        }))
    }
}
