//! Ports for servers that tests start in other processes, and restart at the same port.

use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

/// Ports below those of outgoing connections (Linux: from 32768), and above those that engines
/// choose by themselves (to 17000).
const PORTS: Range<u16> = 20_000..32_000;

/// Reservations of the ports that this process has got.
static RESERVED: Mutex<Vec<UnixDatagram>> = Mutex::new(Vec::new());

/// Returns a free port, which no other test gets as long as this process lives.
///
/// A port that the system picks (port 0) may be given to an outgoing connection while no process
/// listens there: before a server has begun, or between its death and its restart. These ports are
/// not.
///
/// # Panics
/// Panics if no port is free.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes that run at the same time begin far from each other.
    let first = std::process::id().wrapping_mul(2_654_435_761) >> 8;
    for _ in PORTS {
        let number = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + (number % u32::from(PORTS.end - PORTS.start)) as u16;
        let Some(reservation) = reserve(port) else { continue };
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            RESERVED.lock().push(reservation);
            return port;
        }
    }
    panic!("no port of {PORTS:?} is free");
}

/// Reserves a port among the test processes of this network namespace. The reservation is a socket
/// of this name, which the kernel removes when the process dies. The Python tests use the same
/// names.
fn reserve(port: u16) -> Option<UnixDatagram> {
    let name = SocketAddr::from_abstract_name(format!("mooncake-test-port-{port}")).ok()?;
    UnixDatagram::bind_addr(&name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "no sockets there")]
    fn a_port_is_reserved_before_its_server_listens() {
        assert!(reserve(free_port()).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "no sockets there")]
    fn ports_differ_and_are_not_those_of_outgoing_connections() {
        let held: Vec<_> = (0..20).map(|_| TcpListener::bind(("127.0.0.1", free_port())).unwrap()).collect();
        for listener in held {
            let (listens, goes_out) =
                (listener.local_addr().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
            assert!(PORTS.contains(&listens.port()));
            assert!(!PORTS.contains(&goes_out.local_addr().unwrap().port()), "the system's range is another");
        }
    }
}
