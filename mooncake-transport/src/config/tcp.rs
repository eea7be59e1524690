//! Settings of the TCP transport. Defaults are those of Mooncake C++ where it has the setting.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use mooncake_core::{Error, Result};

use super::TransportConfig;

/// Framing of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Framing {
    /// Version 1: a write has no response, a response to a read is only its bytes, and a refusal is
    /// a closed connection.
    Plain,
    /// Version 2: every response begins with a status frame.
    Acknowledged,
}

/// Settings of the TCP transport (crate `mooncake-tcp`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Address that the data port is bound to. `None` stands for every address of both families.
    pub bind: Option<IpAddr>,
    /// Data ports to choose from at random. A range of one is a fixed port, and `0..=0` leaves the
    /// choice to the kernel.
    pub ports: RangeInclusive<u16>,
    /// Host to publish for the data port. With an empty host, peers use the host of the handshake
    /// port.
    pub data_host: String,
    /// Newest framing to request. An older peer gets the framing that it supports.
    pub framing: Framing,
    /// Maximum number of connections to one peer, 1 to 64.
    pub connections: usize,
    /// Timeout of a connection attempt.
    pub connect_timeout: Duration,
    /// Time after which a connection is closed on which the peer moves no byte while requests are
    /// pending.
    pub response_timeout: Duration,
    /// Time without progress on a connection with pending requests, after which a second connection
    /// is tried beside it. If the second one is established while the first still makes no
    /// progress, the requests move there. After an outage of the network, a new connection works
    /// long before an old one recovers.
    pub probe_after: Duration,
    /// Time for which a peer may stop half-way: in the body of its write, or before it reads a
    /// response.
    pub progress_timeout: Duration,
    /// Maximum number of requests in flight on one connection. More wait in its queue.
    pub window: usize,
    /// Maximum number of requests that wait or are in flight on one connection. More are refused.
    /// The callers hold the memory of waiting requests, so that the default is larger than any
    /// batch.
    pub max_queued: usize,
    /// Shortest transfer in bytes that is split over several connections.
    pub stripe_threshold: usize,
    /// Number of pieces of a split transfer, at least 1 and at most the number of connections.
    /// Splitting pays even for a runtime on one thread: the data in each socket stays small enough
    /// for the caches of the processor.
    pub stripes: usize,
    /// Maximum number of connections served at a time, at most half of the descriptors that the
    /// process may open. A further connection replaces the one that has waited longest for a
    /// request. It is closed if every connection is in the middle of a request.
    pub max_served: usize,
    /// Send buffer of the kernel per connection in bytes. 0 lets the kernel adapt it.
    pub send_buffer: usize,
    /// Receive buffer of the kernel per connection in bytes. 0 lets the kernel adapt it.
    pub receive_buffer: usize,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: None,
            ports: 15000..=17000,
            data_host: String::new(),
            framing: Framing::Acknowledged,
            connections: 4,
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(30),
            probe_after: Duration::from_secs(1),
            progress_timeout: Duration::from_secs(30),
            window: 256,
            max_queued: 1 << 24,
            stripe_threshold: 2 << 20,
            stripes: 4,
            max_served: 4096,
            send_buffer: 0,
            receive_buffer: 0,
        }
    }
}

impl TcpConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the name of the first invalid setting.
    pub fn check(&self) -> Result<()> {
        let fault = if self.ports.is_empty() {
            "the range of data ports is empty"
        } else if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            "connections must be 1 to 64"
        } else if self.window == 0 || self.max_queued == 0 || self.max_served == 0 || self.stripes == 0 {
            "window, max_queued, max_served and stripes must not be 0"
        } else if self.connect_timeout.is_zero()
            || self.response_timeout.is_zero()
            || self.progress_timeout.is_zero()
            || self.probe_after.is_zero()
        {
            "connect_timeout, response_timeout, progress_timeout and probe_after must not be 0"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("cannot use TcpConfig"))
    }
}

impl TransportConfig for TcpConfig {
    const TRANSPORT: &'static str = "tcp";
}

/// Maximum number of connections to one peer: the number of bits of a word.
const MAX_CONNECTIONS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_setting_is_refused() {
        let valid = TcpConfig::default();
        valid.check().unwrap();
        #[allow(clippy::reversed_empty_ranges)]
        let invalid = [
            TcpConfig { ports: 2..=1, ..valid.clone() },
            TcpConfig { connections: 0, ..valid.clone() },
            TcpConfig { connections: 65, ..valid.clone() },
            TcpConfig { window: 0, ..valid.clone() },
            TcpConfig { response_timeout: Duration::ZERO, ..valid.clone() },
        ];
        for config in invalid {
            config.check().unwrap_err();
        }
    }
}
