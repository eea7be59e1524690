//! Connections, and listeners on a port of a range, with the rules of Mooncake C++.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use mooncake_core::clock::Rng;
pub use mooncake_core::host_port::HostPort;
use mooncake_core::{Error, ErrorCode, Result};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpStream, lookup_host};

/// Port of a name without a port.
pub const DEFAULT_PORT: u16 = 12001;
/// Ports that handshake and data listeners choose from.
pub const DEFAULT_PORTS: RangeInclusive<u16> = 15000..=17000;
/// Maximum number of connections that the kernel queues for a listener.
const BACKLOG: i32 = 1024;
const ATTEMPTS: usize = 500;

/// Configures a connection that is kept between requests. Small messages are sent at once. A
/// connection whose peer has vanished is closed after 40 s.
///
/// # Errors
/// Returns the errors of the system.
pub fn keep_connection(stream: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(20))
        .with_interval(Duration::from_secs(5))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)
}

/// Interval of connection attempts. The kernel alone repeats an attempt after 1, 3 and 7 s.
const ANEW: Duration = Duration::from_millis(500);

/// Connects to a host and port, over the first of its addresses that answers. The caller sets the
/// time limit. Until then a new attempt starts every half second, at the addresses in turn, while
/// earlier attempts continue.
///
/// # Errors
/// Returns the last error, once every address has refused.
pub async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = lookup_host((host, port)).await?.collect();
    connect_to_any(&addresses).await
}

async fn connect_to_any(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut attempts = FuturesUnordered::new();
    let mut refused = 0;
    for address in addresses.iter().cycle() {
        attempts.push(TcpStream::connect(address));
        match tokio::time::timeout(ANEW, attempts.next()).await {
            Ok(Some(Err(_))) if refused + 1 < addresses.len() => refused += 1,
            Ok(Some(outcome)) => return outcome,
            // If a round trip takes longer than the interval, the early attempts succeed.
            Ok(None) | Err(_) => {}
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
}

/// Listens on `ip` at a random free port of the range, or on exactly one port if the range has one.
/// The socket is non-blocking, ready for `tokio::net::TcpListener::from_std`.
///
/// # Errors
/// The message lists the ports that were tried and a remedy.
pub fn listen(ip: IpAddr, ports: RangeInclusive<u16>, rng: &mut Rng) -> Result<TcpListener> {
    if ports.is_empty() {
        return Err(Error::invalid(format!("port range {}-{} is empty", ports.start(), ports.end())));
    }
    if ports.start() == ports.end() {
        let addr = SocketAddr::new(ip, *ports.start());
        return listen_at(addr, true).map_err(|e| taken(&format!("port {} of {ip}", addr.port()), e));
    }
    let mut last = None;
    for attempt in 0..ATTEMPTS {
        // Ports of departed processes stay reserved for a minute. They are used if no other port is
        // found.
        let reuses = attempt >= ATTEMPTS / 2;
        let port = rng.range(u64::from(*ports.start())..u64::from(*ports.end()) + 1);
        match listen_at(SocketAddr::new(ip, u16::try_from(port).unwrap_or(*ports.end())), reuses) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = Some(error),
            Err(error) => return Err(taken(&format!("a port of {ip}"), error)),
        }
    }
    let error = last.unwrap_or_else(|| io::ErrorKind::AddrInUse.into());
    Err(taken(&format!("any of {ATTEMPTS} ports in {}-{} of {ip}", ports.start(), ports.end()), error))
}

/// Listens at an address. With `reuses`, connections of an earlier listener that are still closing
/// are ignored.
fn listen_at(addr: SocketAddr, reuses: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // With SO_REUSEADDR a port that another process is about to use looks free.
    socket.set_reuse_address(reuses)?;
    socket.bind(&addr.into())?;
    // Connections inherit the option, so that the next listener at this port succeeds.
    socket.set_reuse_address(true)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn taken(what: &str, error: io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => "it is in use; stop what listens there, or choose another port",
        io::ErrorKind::PermissionDenied => "not permitted; ports below 1024 need privileges",
        io::ErrorKind::AddrNotAvailable => "no interface has that address",
        _ => "the system refused",
    };
    Error::new(ErrorCode::RpcFail, format!("cannot listen on {what}: {advice}")).with_source(error)
}

/// Returns the default address to advertise: the first IPv4 address of an interface that is up and
/// not loopback, else the first reachable IPv6 address, else 127.0.0.1.
pub fn default_host() -> IpAddr {
    first_non_loopback(IpAddr::is_ipv4).or_else(first_non_loopback_v6).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// Returns the default IPv6 address to advertise, for a node that uses IPv6. Link-local addresses
/// are excluded.
pub fn default_host_v6() -> IpAddr {
    first_non_loopback_v6().unwrap_or(Ipv6Addr::LOCALHOST.into())
}

fn first_non_loopback_v6() -> Option<IpAddr> {
    first_non_loopback(|address| matches!(address, IpAddr::V6(v6) if !v6.is_unicast_link_local()))
}

fn first_non_loopback(fits: fn(&IpAddr) -> bool) -> Option<IpAddr> {
    let addresses = interface_addresses();
    addresses.into_iter().map(|(_, address)| address).find(|address| fits(address) && !address.is_loopback())
}

/// Returns the first IPv4 address of the interface of this name.
///
/// # Errors
/// Returns `INVALID_PARAMS`, with the names of the available interfaces, if the interface has none
/// or is not up.
pub fn address_of(interface: &str) -> Result<Ipv4Addr> {
    let v4 = |(name, address)| if let IpAddr::V4(address) = address { Some((name, address)) } else { None };
    let all: Vec<(String, Ipv4Addr)> = interface_addresses().into_iter().filter_map(v4).collect();
    if let Some((_, address)) = all.iter().find(|(name, _)| name == interface) {
        return Ok(*address);
    }
    let mut names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    Err(Error::invalid(format!(
        "no interface {interface:?} with an IPv4 address is up; there are {}",
        names.join(", ")
    )))
}

/// Returns names and addresses of interfaces that are up and running.
#[allow(unsafe_code)]
fn interface_addresses() -> Vec<(String, IpAddr)> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call stores a list's head, or fails.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: entries of the list, which lives until it is freed below. The last `ifa_next` is
    // null.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let required = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
        // SAFETY: null, or the entry's own address, whose type follows from its family.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|a| i32::from(a.sa_family));
        if entry.ifa_flags & required == required {
            let address: IpAddr = match family {
                Some(libc::AF_INET) => {
                    // SAFETY: AF_INET marks a `sockaddr_in`. It is read unaligned, because its
                    // alignment is not guaranteed.
                    let addr = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                    Ipv4Addr::from(u32::from_be(addr.sin_addr.s_addr)).into()
                }
                Some(libc::AF_INET6) => {
                    // SAFETY: as above, for a `sockaddr_in6`.
                    let addr = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                    Ipv6Addr::from(addr.sin6_addr.s6_addr).into()
                }
                _ => continue,
            };
            // SAFETY: an entry's name is a C string that lives as long as the list.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            let name = name.to_string_lossy().into_owned();
            found.push((name, address));
        }
    }
    // SAFETY: the list came from `getifaddrs`, and no entry is used any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn port_in_use_error_states_port() {
        let mut rng = Rng::seeded(1);
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let first = listen(ip, 15000..=17000, &mut rng).unwrap();
        let port = first.local_addr().unwrap().port();
        assert!((15000..=17000).contains(&port));
        let error = listen(ip, port..=port, &mut rng).unwrap_err();
        assert!(error.message().contains(&format!("port {port} of 127.0.0.1")), "{error}");
        assert!(error.message().contains("in use"), "{error}");
        #[allow(clippy::reversed_empty_ranges)]
        let empty = listen(ip, 5..=4, &mut rng).unwrap_err();
        assert!(empty.message().contains("5-4"), "{empty}");
    }

    /// After a crash, the remains of old connections do not keep a process from listening again.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_port_is_to_be_had_again_at_once() {
        let (mut rng, ip) = (Rng::seeded(2), IpAddr::from(Ipv4Addr::LOCALHOST));
        let first = listen(ip, 15000..=17000, &mut rng).unwrap();
        first.set_nonblocking(false).unwrap();
        let at = first.local_addr().unwrap();
        let mut peer = std::net::TcpStream::connect(at).unwrap();
        // The side that closes first keeps the connection state.
        drop(first.accept().unwrap());
        assert_eq!(io::Read::read(&mut peer, &mut [0]).unwrap(), 0);
        drop((peer, first));
        assert!(listen_at(at, false).is_err(), "nothing is left of it");
        listen(ip, at.port()..=at.port(), &mut rng).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "getifaddrs")]
    fn there_is_always_an_address_to_advertise() {
        assert!(!default_host().is_unspecified());
    }

    #[test]
    #[cfg_attr(miri, ignore = "getifaddrs")]
    fn interfaces_have_names() {
        assert!(address_of("lo").is_ok_and(|address| address.is_loopback()));
        let error = address_of("no-such-if0").unwrap_err();
        assert!(error.message().contains("no-such-if0") && error.message().contains("lo"), "{error}");
    }

    #[tokio::test]
    #[cfg_attr(miri, ignore = "sockets")]
    async fn an_address_that_is_dead_keeps_nobody_from_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        // This address is unassigned: there is no route to it, or no response from it.
        let silent = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 9);
        for addresses in [&[good][..], &[closed, good], &[silent, good], &[silent, closed, good]] {
            let stream = connect_to_any(addresses).await.unwrap();
            assert_eq!(stream.peer_addr().unwrap(), good);
        }
        let refused = connect_to_any(&[closed, closed]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(connect_to_any(&[]).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
