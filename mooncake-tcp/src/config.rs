//! Settings, with the existing system's defaults where it has them.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use mooncake_core::{Error, Result};

use crate::frame::Framing;

/// Settings of a [`TcpTransport`](crate::TcpTransport). Nothing here is read from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Address the data port is bound to; `None` is every address of both families.
    pub bind: Option<IpAddr>,
    /// Data ports to choose from at random; a range of one is a fixed port, and `0..=0` leaves it to the kernel.
    pub ports: RangeInclusive<u16>,
    /// Host to publish for the data port; empty lets peers use the host of the handshake port.
    pub data_host: String,
    /// Newest framing to ask a peer for; an older peer gets what it speaks.
    pub framing: Framing,
    /// Most connections to one peer, at least 1.
    pub connections: usize,
    /// How long to wait for a connection.
    pub connect_timeout: Duration,
    /// How long an asked peer may leave us without moving a byte, before its connection is given up.
    pub answer_timeout: Duration,
    /// How long a connection may stand still with requests on it before another one is tried beside it. If that one comes about while the first still
    /// stands, the requests move there: a network that was down for a while is noticed by a new connection long before an old one is repaired.
    pub probe_after: Duration,
    /// How long a peer that asked may stop half-way: a body it does not send on, an answer it does not read.
    pub progress_timeout: Duration,
    /// Requests that may be on the way on one connection; more wait in its queue.
    pub window: usize,
    /// Requests that may wait and be on the way on one connection; more are refused.
    pub max_queued: usize,
    /// Shortest transfer in bytes that is cut up for several connections.
    pub stripe_threshold: usize,
    /// Pieces it is cut into, at least 1 and as far as there are connections. Pays even for a runtime on one thread: what
    /// waits in each socket stays small enough for the processor's caches.
    pub stripes: usize,
    /// Connections served at a time, and no more than half of the descriptors that the process may open. One more takes the place of the connection that has
    /// waited longest for a request; it is closed where every connection is in the middle of one.
    pub max_served: usize,
    /// Kernel buffer for sending per connection in bytes; 0 lets the kernel adapt it.
    pub send_buffer: usize,
    /// Kernel buffer for receiving per connection in bytes; 0 lets the kernel adapt it.
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
            answer_timeout: Duration::from_secs(30),
            probe_after: Duration::from_secs(1),
            progress_timeout: Duration::from_secs(30),
            window: 256,
            max_queued: 65536,
            stripe_threshold: 2 << 20,
            stripes: 4,
            max_served: 4096,
            send_buffer: 0,
            receive_buffer: 0,
        }
    }
}

impl TcpConfig {
    /// Names the first setting that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let fault = if self.ports.is_empty() {
            "the range of data ports is empty"
        } else if !(1..=MAX_LANES).contains(&self.connections) {
            "connections must be 1 to 64"
        } else if self.window == 0 || self.max_queued == 0 || self.max_served == 0 || self.stripes == 0 {
            "window, max_queued, max_served and stripes must not be 0"
        } else if self.connect_timeout.is_zero()
            || self.answer_timeout.is_zero()
            || self.progress_timeout.is_zero()
            || self.probe_after.is_zero()
        {
            "a timeout of 0 would fail everything"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("tcp configuration"))
    }
}

/// Connections to one peer fit in the bits of one word.
pub(crate) const MAX_LANES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named() {
        let good = TcpConfig::default();
        good.check().unwrap();
        #[allow(clippy::reversed_empty_ranges)]
        let bad = [
            TcpConfig { ports: 2..=1, ..good.clone() },
            TcpConfig { connections: 0, ..good.clone() },
            TcpConfig { connections: 65, ..good.clone() },
            TcpConfig { window: 0, ..good.clone() },
            TcpConfig { answer_timeout: Duration::ZERO, ..good.clone() },
        ];
        for config in bad {
            config.check().unwrap_err();
        }
    }
}
