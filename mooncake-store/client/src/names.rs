//! Name of a client, and the reservation of its port.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::host_port;
use mooncake_core::{Error, ErrorCode, Result};
use socket2::{Domain, Socket, Type};

use crate::config::ClientConfig;

/// Number of random ports that are tried.
const DRAWS: usize = 500;

/// Chooses the name of a client. Also returns the socket that reserves its port. `unique` reserves
/// the port on the host. A client that is reachable only inside its process needs a number that is
/// unique in the process.
pub(crate) fn choose(
    config: &ClientConfig,
    unique: bool,
    rng: &mut Rng,
) -> Result<(String, Option<ParentOnly<Socket>>)> {
    let (host, port) = host_port::split(&config.local_hostname);
    if let Some(port) = port {
        return Ok((host_port::join(host, port), None));
    }
    if !unique {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Numbers above all ports are valid here: the result is a name, not an address.
        let port = u64::from(*config.ports.start()) + u64::from(number);
        return Ok((format!("{}:{port}", join_host(host)), None));
    }
    let span = u64::from(*config.ports.start())..u64::from(*config.ports.end()) + 1;
    for _ in 0..DRAWS {
        let Ok(port) = u16::try_from(rng.range(span.clone())) else { continue };
        if let Some(socket) = reserve(port)? {
            return Ok((host_port::join(host, port), Some(socket)));
        }
    }
    Err(Error::invalid(format!(
        "no free port in {:?} for this client's name; free one, or give the name one: local_hostname = \"{host}:<port>\"",
        config.ports
    )))
}

fn join_host(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// Binds a port without listening on it. Returns `None` if the port is in use.
fn reserve(port: u16) -> Result<Option<ParentOnly<Socket>>> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    match socket.bind(&address.into()) {
        Ok(()) => Ok(Some(ParentOnly::new(socket))),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(Error::new(ErrorCode::InvalidParams, format!("cannot bind port {port}: {error}"))
            .with_source(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str, ports: std::ops::RangeInclusive<u16>) -> ClientConfig {
        ClientConfig { local_hostname: name.into(), ports, ..ClientConfig::default() }
    }

    #[test]
    fn given_port_stays_drawn_is_reserved() {
        let mut rng = Rng::seeded(1);
        let (name, socket) = choose(&config("node:7", 12300..=14300), true, &mut rng).unwrap();
        assert_eq!((name.as_str(), socket.is_none()), ("node:7", true));
        let (name, socket) = choose(&config("node", 12300..=14300), true, &mut rng).unwrap();
        let (host, port) = host_port::split(&name);
        assert!(host == "node" && (12300..=14300).contains(&port.unwrap()) && socket.is_some());
        let error = choose(&config("node", port.unwrap()..=port.unwrap()), true, &mut rng).unwrap_err();
        assert!(error.to_string().contains("no free port"), "{error}");
    }

    #[test]
    fn names_inside_a_process_differ() {
        let mut rng = Rng::seeded(1);
        let mut name = || choose(&config("::1", 12300..=14300), false, &mut rng).unwrap().0;
        let (a, b) = (name(), name());
        assert!(a != b && a.starts_with("[::1]:"), "{a} {b}");
    }
}
