//! The handshake port: one request and one response per connection, JSON in small frames. It serves
//! descriptors, notifications, probes and the connection setup of transports.

mod client;
mod frame;
mod server;

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};

use crate::net::DEFAULT_PORT;

pub use client::{exchange, fetch_descriptor, notify, probe};
pub use frame::{Frame, Kind, encode, parse, parse_payload, payload_len};
pub use server::HandshakeServer;

/// Limits and patience of the handshake port, both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeConfig {
    /// Port of a peer whose name has none.
    pub default_port: u16,
    /// Longest frame that is read, in bytes.
    pub max_len: usize,
    /// How long a server waits for a request, and for the client to close after the reply.
    pub receive_timeout: Duration,
    /// How long a client waits for the connection.
    pub connect_timeout: Duration,
    /// How long a client waits for the reply.
    pub reply_timeout: Duration,
    /// Largest number of connections, and no more than a quarter of the descriptors that the process may open. One more takes the
    /// place of the connection that has waited longest for its client; it is closed where every connection works on a request.
    pub max_connections: usize,
    /// Notifications kept until somebody takes them; further ones are rejected.
    pub max_notifications: usize,
    /// Bytes of theirs that are kept, in names and messages; one alone may have more.
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

/// A message of one engine to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// What it is about.
    pub name: String,
    /// The message. Not empty: an empty one is how a rejection looks.
    pub message: String,
}

impl Notification {
    /// Bytes of both.
    pub(crate) fn len(&self) -> usize {
        self.name.len() + self.message.len()
    }
}

/// What a [`HandshakeServer`] answers.
#[async_trait]
pub trait HandshakeService: Send + Sync + 'static {
    /// Our descriptor, as JSON; `null` where it is published elsewhere.
    async fn descriptor(&self) -> Vec<u8>;

    /// Takes a notification, or rejects it.
    async fn notified(&self, notification: Notification) -> bool;

    /// Sets up a connection of a transport. By default there is none to set up.
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
