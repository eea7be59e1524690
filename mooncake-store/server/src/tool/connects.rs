//! Connections that only show whether a program listens.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Time for a connection that only shows whether a program listens.
const PROBE: Duration = Duration::from_secs(1);

/// Returns whether a program accepts connections at an address.
pub(super) fn listens(address: &str) -> bool {
    connects(address, PROBE).is_ok()
}

/// Connects to an address within `timeout`, and closes the connection.
pub(super) fn connects(address: &str, timeout: Duration) -> std::io::Result<()> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for at in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&at, timeout) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}
