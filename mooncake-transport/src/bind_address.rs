//! Address at which the ports of a node listen, and its relation to the published host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
use socket2::{Domain, Protocol, Socket, Type};

/// Returns the loopback address that a host stands for: an address of 127.0.0.0/8, `::1`, or a name
/// of the local host. `None` for every other host.
pub fn loopback_address(host: &str) -> Option<IpAddr> {
    let host = host.trim_matches(['[', ']']);
    if let Ok(ip) = host.parse::<IpAddr>() {
        let ip = ip.to_canonical();
        return ip.is_loopback().then_some(ip);
    }
    let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    match &*name {
        "ip6-localhost" | "ip6-loopback" | "localhost6" | "localhost6.localdomain6" => {
            Some(Ipv6Addr::LOCALHOST.into())
        }
        "localhost" | "localhost4" | "localhost.localdomain" | "localhost4.localdomain4" => {
            Some(local_host())
        }
        _ if name.ends_with(".localhost") => Some(local_host()),
        // The resolver takes 127.1 for 127.0.0.1.
        _ if name.starts_with("127.") && name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => {
            (name, 0).to_socket_addrs().ok()?.map(|at| at.ip()).find(IpAddr::is_loopback)
        }
        _ => None,
    }
}

/// Returns 127.0.0.1, or `::1` on a host without IPv4.
fn local_host() -> IpAddr {
    let v4 = IpAddr::from(Ipv4Addr::LOCALHOST);
    if try_bind(v4).is_ok() { v4 } else { Ipv6Addr::LOCALHOST.into() }
}

/// Binds a socket to an address, without listening.
fn try_bind(ip: IpAddr) -> io::Result<()> {
    let at = SocketAddr::new(ip, 0);
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&at.into())
}

/// Returns the address at which the ports of a node listen: that of the setting `bind_address`; if
/// it is empty, the loopback address that the published host stands for; else `None`, for every
/// address.
///
/// # Errors
/// Returns `INVALID_PARAMS` if the setting is not an address of this host, or if the published host
/// does not lead to it: one of both is loopback, and the other one is not.
pub fn bind_address(setting: &str, published: Option<&str>) -> Result<Option<IpAddr>> {
    if setting.is_empty() {
        let published = published.filter(|_| !is_planted("loopback-name-binds-all"));
        return Ok(published.and_then(loopback_address));
    }
    let refuse = |reason: &str, more: &str, advice: &str| {
        Error::invalid(format!(
            "cannot bind ports: {reason}. bind_address={setting}{more}; {advice} (--bind_address, MC_BIND_ADDRESS)"
        ))
    };
    let parsed = setting.trim_matches(['[', ']']).parse::<IpAddr>().map(|ip| ip.to_canonical()).ok();
    let Some(ip) = parsed.or_else(|| loopback_address(setting)) else {
        return Err(refuse("the setting is not an IP address", "", "give an address of this host"));
    };
    match try_bind(ip) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            return Err(refuse("it is not an address of this host", "", "give an address of this host"));
        }
        Err(error) => return Err(refuse(&error.to_string(), "", "give an address of this host")),
    }
    if let Some(published) = published.filter(|published| !leads_to(published, ip)) {
        let more = format!(" published={published}");
        let advice = "publish the same address, or listen at every one: 0.0.0.0";
        return Err(refuse("the published host does not lead to the address", &more, advice));
    }
    Ok(Some(ip))
}

/// Returns whether connections to a published host may reach ports at an address. A translation may
/// lie between two addresses, but not between a loopback address and another one.
fn leads_to(published: &str, ip: IpAddr) -> bool {
    let is_address = published.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    match loopback_address(published) {
        _ if ip.is_unspecified() => true,
        Some(loopback) if is_address => ip == loopback,
        Some(_) => ip.is_loopback(),
        None => !ip.is_loopback(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn loopback_hosts_are_recognised() {
        for (host, loopback) in [
            ("127.0.0.1", Some(V4)),
            ("127.9.8.7", Some(IpAddr::from([127, 9, 8, 7]))),
            ("127.1", Some(V4)),
            ("::1", Some(V6)),
            ("[::1]", Some(V6)),
            ("::ffff:127.0.0.1", Some(V4)),
            ("LocalHost", Some(V4)),
            ("localhost.", Some(V4)),
            ("a.localhost", Some(V4)),
            ("ip6-localhost", Some(V6)),
            ("", None),
            ("0.0.0.0", None),
            ("::", None),
            ("10.0.0.1", None),
            ("128.0.0.1", None),
            ("localhost.example", None),
            ("127.0.0.1.example", None),
            ("node", None),
        ] {
            assert_eq!(loopback_address(host), loopback, "{host:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn the_setting_and_the_published_host_agree() {
        let bind = |setting, published| bind_address(setting, published).map_err(|error| error.to_string());
        assert_eq!(bind("", None), Ok(None));
        assert_eq!(bind("", Some("node")), Ok(None));
        assert_eq!(bind("", Some("localhost")), Ok(Some(V4)));
        assert_eq!(bind("", Some("::1")), Ok(Some(V6)));
        assert_eq!(bind("127.0.0.1", Some("localhost")), Ok(Some(V4)));
        assert_eq!(bind("localhost", Some("127.0.0.1")), Ok(Some(V4)));
        assert_eq!(bind("[::1]", None), Ok(Some(V6)));
        assert_eq!(bind("0.0.0.0", Some("127.0.0.1")), Ok(Some(Ipv4Addr::UNSPECIFIED.into())));
        for (setting, published, says) in [
            ("198.51.100.7", None, "not an address of this host"),
            ("eth0", None, "not an IP address"),
            ("10.0.0", None, "not an IP address"),
            ("127.0.0.1", Some("10.0.0.1"), "published=10.0.0.1"),
            ("127.0.0.1", Some("node"), "published=node"),
            ("127.0.0.1", Some("127.0.0.2"), "published=127.0.0.2"),
            ("127.0.0.1", Some("::1"), "published=::1"),
        ] {
            let error = bind(setting, published).unwrap_err();
            assert!(error.contains(says) && error.contains(setting), "{setting}: {error}");
        }
    }
}
