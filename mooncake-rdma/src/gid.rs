//! Choice of the global address (GID) of a port.
//!
//! In order of preference: an IPv4 address on a network interface, any other routable address on
//! one, the same without an interface, addresses of an overlay network (by the name of the
//! interface), link-local addresses, and RoCE version 1. Within one class the lowest index wins.
//!
//! Mooncake C++ counts all of 10/8, 172.16/12 and 100.64/10 as overlay addresses, and so prefers
//! any other address on a network with such numbers, as most networks have. Here a private address
//! has no special rank.

use std::net::Ipv6Addr;

use crate::verbs::{Gid, GidKind};

/// Prefixes of the interface names of overlay networks.
const OVERLAYS: &[&str] = &["flannel", "cni", "cali", "vxlan", "docker", "tunl", "br-", "weave", "cilium"];

/// Returns the usable addresses, best first. `interface` returns the name of a network interface by
/// its number.
pub fn ranked(gids: &[Gid], interface: impl Fn(u32) -> Option<String>) -> Vec<Gid> {
    let mut ranked: Vec<(u8, Gid)> = gids
        .iter()
        .filter(|gid| !gid.addr.is_unspecified())
        .map(|gid| (class(gid, &interface), *gid))
        .collect();
    ranked.sort_by_key(|(class, gid)| (*class, gid.index));
    ranked.into_iter().map(|(_, gid)| gid).collect()
}

fn class(gid: &Gid, interface: impl Fn(u32) -> Option<String>) -> u8 {
    if gid.kind == GidKind::RoceV1 {
        return 5;
    }
    // On InfiniBand every address has this prefix.
    if gid.kind == GidKind::RoceV2 && is_link_local(gid.addr) {
        return 4;
    }
    match (gid.interface != 0).then(|| interface(gid.interface)).flatten() {
        Some(name) if OVERLAYS.iter().any(|start| name.starts_with(start)) => 3,
        Some(_) if gid.addr.to_ipv4_mapped().is_some() => 0,
        Some(_) => 1,
        None if gid.kind == GidKind::Infiniband => 1,
        None => 2,
    }
}

fn is_link_local(addr: Ipv6Addr) -> bool {
    match addr.to_ipv4_mapped() {
        Some(v4) => v4.is_link_local(),
        None => addr.is_unicast_link_local(),
    }
}

/// Formats an address as descriptors and handshakes do: `xx:xx:..`, sixteen bytes.
pub fn text(addr: Ipv6Addr) -> String {
    addr.octets().map(|byte| format!("{byte:02x}")).join(":")
}

/// Parses the output of [`text`].
pub fn parse(text: &str) -> Option<Ipv6Addr> {
    let mut octets = [0; 16];
    let mut parts = text.split(':');
    for octet in &mut octets {
        let part =
            parts.next().filter(|part| part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit()))?;
        *octet = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then(|| Ipv6Addr::from(octets))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, addr: &str, kind: GidKind, interface: u32) -> Gid {
        Gid { index, addr: addr.parse().unwrap(), kind, interface }
    }

    fn order(gids: &[Gid]) -> Vec<u8> {
        let name = |number| match number {
            1 => Some("eth0".into()),
            2 => Some("docker0".into()),
            _ => None,
        };
        ranked(gids, name).iter().map(|gid| gid.index).collect()
    }

    #[test]
    fn private_addresses_have_no_special_rank() {
        use GidKind::{RoceV1, RoceV2};
        let gids = [
            gid(0, "fe80::1", RoceV1, 1),
            gid(1, "fe80::1", RoceV2, 1),
            gid(2, "::ffff:10.0.0.1", RoceV1, 1),
            gid(3, "::ffff:172.17.0.1", RoceV2, 2),
            gid(4, "2001:db8::1", RoceV2, 0),
            gid(5, "2001:db8::1", RoceV2, 1),
            gid(6, "::ffff:10.0.0.1", RoceV2, 1),
            gid(7, "::ffff:8.8.8.8", RoceV2, 1),
            gid(8, "::", RoceV2, 1),
        ];
        assert_eq!(order(&gids), [6, 7, 5, 4, 3, 1, 0, 2]);
    }

    #[test]
    fn on_infiniband_the_first_address_is_chosen() {
        let gids = [gid(0, "fe80::2", GidKind::Infiniband, 0), gid(1, "fec0::2", GidKind::Infiniband, 0)];
        assert_eq!(order(&gids), [0, 1]);
        assert!(order(&[]).is_empty());
    }

    #[test]
    fn text_and_back() {
        let addr: Ipv6Addr = "::ffff:10.77.0.2".parse().unwrap();
        assert_eq!(text(addr), "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02");
        assert_eq!(parse(&text(addr)), Some(addr));
        for bad in [
            "",
            "00",
            &text(addr)[3..],
            &format!("{}:00", text(addr)),
            &text(addr).replace("ff", "fg"),
            &text(addr).replace("4d", "+d"),
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
