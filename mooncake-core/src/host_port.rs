//! Names of hosts with ports, by the rules of Mooncake C++.

use std::fmt;
use std::net::Ipv6Addr;

use crate::{Error, Result};

/// Splits `host`, `host:port`, `[v6]`, `[v6]:port`, `v6` or `v6%scope:port` into the host, without
/// brackets, and the port. The port is `None` if it is missing or no number.
pub fn split(name: &str) -> (&str, Option<u16>) {
    if let Some((host, rest)) = name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (host, rest.strip_prefix(':').and_then(|port| port.parse().ok()));
    }
    // A bare IPv6 address has no port. The scope of an address may be followed by one.
    let is_v6 = |text: &str| text.parse::<Ipv6Addr>().is_ok();
    let scope = name.split_once('%').filter(|(address, _)| is_v6(address)).map(|(_, scope)| scope);
    if is_v6(name) || scope.is_some_and(|scope| !scope.contains(':')) {
        return (name, None);
    }
    name.rsplit_once(':').map_or((name, None), |(host, port)| (host, port.parse().ok()))
}

/// Joins host and port, with brackets around an IPv6 address without them.
pub fn join(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Host, by name or address, and port. An IPv6 address is printed in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    /// Name or address, IPv6 without brackets.
    pub host: String,
    /// Port number.
    pub port: u16,
}

impl HostPort {
    /// Creates an address from a host and a port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// Parses `host:port`, `v6:port` or `[v6]:port`. The port must be present.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` with the faulty part.
    pub fn exact(text: &str) -> Result<Self> {
        let wrong =
            |what: &str| Error::invalid(format!("invalid address {text:?}: {what}; expected host:port"));
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let address = in_brackets.unwrap_or(host);
        if address.is_empty() {
            return Err(wrong("it has no host"));
        }
        let without_scope = address.split_once('%').map_or(address, |(address, _)| address);
        let is_v6 = without_scope.parse::<Ipv6Addr>().is_ok();
        let is_name = !address.contains(|c: char| c.is_whitespace() || c.is_control() || "[]:/".contains(c));
        if !is_v6 && (in_brackets.is_some() || !is_name) {
            return Err(wrong("its host is neither a name nor an address"));
        }
        match port.parse() {
            Ok(port) if port != 0 => Ok(Self::new(address, port)),
            _ => Err(wrong("its port is not a number from 1 to 65535")),
        }
    }

    /// Parses a name as [`split`] does. A missing or invalid port, or port 0, becomes `default`.
    pub fn parse(text: &str, default: u16) -> Self {
        let (host, port) = split(text);
        Self::new(host, port.filter(|port| *port != 0).unwrap_or(default))
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join(&self.host, self.port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: u16 = 12001;

    #[test]
    fn names_are_read_as_mooncake_cpp_reads_them() {
        for (text, host, port) in [
            ("node", "node", DEFAULT),
            ("node:7", "node", 7),
            ("node:x", "node", DEFAULT),
            ("node:", "node", DEFAULT),
            ("node:0", "node", DEFAULT),
            ("node:65536", "node", DEFAULT),
            ("10.0.0.1:16000", "10.0.0.1", 16000),
            ("::1", "::1", DEFAULT),
            ("[::1]", "::1", DEFAULT),
            ("[::1]:15918", "::1", 15918),
            ("fe80::1%eth0:9", "fe80::1%eth0", 9),
            ("fe80::1%eth0", "fe80::1%eth0", DEFAULT),
            ("", "", DEFAULT),
            ("[", "[", DEFAULT),
        ] {
            assert_eq!(HostPort::parse(text, DEFAULT), HostPort::new(host, port), "{text:?}");
        }
        assert_eq!(split("node:0"), ("node", Some(0)));
        assert_eq!(split("[::1]:x"), ("::1", None));
        for (text, host, port) in [
            ("node:7", "node", 7),
            ("a_b.c-d:65535", "a_b.c-d", 65535),
            ("10.0.0.1:50051", "10.0.0.1", 50051),
            ("[::1]:50051", "::1", 50051),
            ("::1:50051", "::1", 50051),
            ("[fe80::1%eth0]:9", "fe80::1%eth0", 9),
        ] {
            assert_eq!(HostPort::exact(text).unwrap(), HostPort::new(host, port), "{text:?}");
        }
        for (text, word) in [
            ("", "no port"),
            ("node", "no port"),
            ("127.0.0.1", "no port"),
            (":50051", "no host"),
            ("[]:50051", "no host"),
            ("node:", "not a number"),
            ("node:x", "not a number"),
            ("node:0", "not a number"),
            ("node:-1", "not a number"),
            ("node:65536", "not a number"),
            ("[::1]", "neither"),
            ("::1", "neither"),
            ("[::1:50051", "neither"),
            ("[node]:50051", "neither"),
            ("a b:1", "neither"),
            ("a/b:1", "neither"),
            ("a:1:2", "neither"),
            ("a\0:2", "neither"),
        ] {
            let error = HostPort::exact(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text:?}: {error}");
        }
        assert_eq!(HostPort::new("::1", 5).to_string(), "[::1]:5");
        assert_eq!(HostPort::new("h", 5).to_string(), "h:5");
        assert_eq!(join("[::1]", 5), "[::1]:5");
    }
}
