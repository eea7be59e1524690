//! Addresses that the ports of a client listen at: loopback for a loopback name, the address of
//! `--bind_address`, and a refusal of what cannot be.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::listeners::{Ports, field, master, start};
use crate::process::{Process, free_port};
use mooncake_transport::net::default_host;

/// Ports of a client with every kind of listener: data, handshake, disk, pages, and its own port.
const PORTS: usize = 5;

/// Returns the addresses at which a process listens.
fn listening(process: u32) -> Vec<SocketAddr> {
    let links = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let links: Vec<String> = links
        .filter_map(|link| std::fs::read_link(link.path()).ok()?.into_os_string().into_string().ok())
        .collect();
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            // The fourth word is the state, 0A for a listener; the tenth one is the inode.
            if words[3] == "0A" && links.contains(&format!("socket:[{}]", words[9])) {
                found.push(address(words[1]));
            }
        }
    }
    found
}

/// Parses an address of `/proc/net`: words of 32 bits in the order of the host, and the port.
fn address(text: &str) -> SocketAddr {
    let (host, port) = text.split_once(':').unwrap();
    let words = host.as_bytes().chunks(8).map(|word| std::str::from_utf8(word).unwrap());
    let bytes: Vec<u8> =
        words.flat_map(|word| u32::from_str_radix(word, 16).unwrap().to_le_bytes()).collect();
    let ip = match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(v4) => IpAddr::from(v4),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(&bytes[..]).unwrap()),
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).unwrap())
}

/// Returns the command of a client with every kind of port.
fn command(ports: &Ports, folder: &Path, metadata: &str, more: &[&str]) -> Vec<String> {
    let disk = folder.join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    let mut words = vec![
        format!("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH={}", disk.display()),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=16777216".into(),
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES=67108864".into(),
    ];
    let (variables, flags): (Vec<&str>, Vec<&str>) = more.iter().partition(|word| !word.starts_with("--"));
    words.extend(variables.into_iter().map(str::to_owned));
    words.push(env!("CARGO_BIN_EXE_mooncake_client").into());
    words.extend([
        format!("--metadata_server={metadata}"),
        "--global_segment_size=16 MB".into(),
        "--enable_http_server".into(),
        "--enable_offload=true".into(),
        format!("--master_server_address=127.0.0.1:{}", ports.rpc),
        format!("--ipc_socket_path={}", folder.join("owner.sock").display()),
        format!("--http_port={}", free_port()),
        format!("--port={}", free_port()),
    ]);
    words.extend(flags.into_iter().map(str::to_owned));
    words
}

/// Starts a client, and returns it, its name, and the addresses of its ports.
fn client(ports: &Ports, folder: &Path, metadata: &str, more: &[&str]) -> (Process, String, Vec<SocketAddr>) {
    let (process, log) = start("1024:1024", "env", &command(ports, folder, metadata, more), "ready");
    let name = field(log.lines().last().unwrap(), "name").unwrap().to_owned();
    let found = listening(process.0.id());
    assert!(found.len() >= PORTS, "{more:?}: {found:?}");
    (process, name, found)
}

/// Runs a client that does not start, and returns its log.
fn refused(ports: &Ports, folder: &Path, more: &[&str]) -> String {
    let words = command(ports, folder, "P2PHANDSHAKE", more);
    let output = Command::new("env").args(words).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success(), "{more:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn cluster() -> (Process, Ports, String) {
    let (process, ports) = master("1024:1024", &["--enable_offload=true".into()]);
    let metadata = format!("http://127.0.0.1:{}/metadata", ports.metadata);
    (process, ports, metadata)
}

#[test]
fn a_loopback_name_binds_every_port_to_loopback() {
    let (_master, ports, http) = cluster();
    for metadata in ["P2PHANDSHAKE", &http] {
        for name in ["127.0.0.1", "127.0.0.2", "localhost", "::1", "127.0.0.1:12399"] {
            let folder = tempfile::tempdir().unwrap();
            let host = format!("--host={name}");
            // The own port listens at the host itself, which has no port there.
            let more = if name.ends_with("12399") { vec!["--host=127.0.0.1"] } else { vec![host.as_str()] };
            let (_process, _, found) = client(&ports, folder.path(), metadata, &more);
            let wide: Vec<_> = found.iter().filter(|at| !at.ip().is_loopback()).collect();
            assert!(wide.is_empty(), "{name} with {metadata}: {wide:?}");
        }
    }
}

#[test]
fn one_setting_binds_every_port() {
    let (_master, ports, http) = cluster();
    let outward = default_host();
    let addresses = [IpAddr::from([127, 0, 0, 3]), Ipv6Addr::LOCALHOST.into(), outward];
    for metadata in ["P2PHANDSHAKE", &http] {
        for bound in addresses {
            for setting in [format!("--bind_address={bound}"), format!("MC_BIND_ADDRESS={bound}")] {
                let folder = tempfile::tempdir().unwrap();
                let (_process, name, found) = client(&ports, folder.path(), metadata, &[&setting]);
                let others: Vec<_> = found.iter().filter(|at| at.ip() != bound).collect();
                assert!(others.is_empty(), "{setting} with {metadata}: {others:?}");
                // Without a host, the address is also the published one.
                assert!(name.trim_start_matches('[').starts_with(&bound.to_string()), "{setting}: {name}");
            }
        }
    }
}

/// The flag takes precedence over the variable, and an explicit setting over a loopback name.
#[test]
fn an_explicit_setting_takes_precedence() {
    let (_master, ports, _) = cluster();
    let bind = |bound: IpAddr, more: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let (_process, _, found) = client(&ports, folder.path(), "P2PHANDSHAKE", more);
        let others: Vec<_> = found.iter().filter(|at| at.ip() != bound).collect();
        assert!(others.is_empty(), "{more:?}: {others:?}");
    };
    bind([127, 0, 0, 4].into(), &["MC_BIND_ADDRESS=127.0.0.3", "--bind_address=127.0.0.4"]);
    bind(Ipv4Addr::UNSPECIFIED.into(), &["--host=127.0.0.1", "--bind_address=0.0.0.0"]);
}

#[test]
fn addresses_that_cannot_be_bound_or_reached_are_refused() {
    let (_master, ports, _) = cluster();
    let folder = tempfile::tempdir().unwrap();
    for (more, says) in [
        (
            &["--bind_address=198.51.100.7"][..],
            &["bind_address=198.51.100.7", "not an address of this host"][..],
        ),
        (&["MC_BIND_ADDRESS=198.51.100.7"], &["bind_address=198.51.100.7", "not an address of this host"]),
        (&["--bind_address=2001:db8::1"], &["bind_address=2001:db8::1", "not an address of this host"]),
        (&["--bind_address=eth0:5"], &["eth0:5", "IP address"]),
        (&["MC_BIND_ADDRESS=10.0.0"], &["10.0.0", "IP address"]),
        (&["--host=192.0.2.1", "--bind_address=127.0.0.1"], &["192.0.2.1", "bind_address=127.0.0.1"]),
        (&["--host=127.0.0.1", "--bind_address=127.0.0.2"], &["127.0.0.1", "bind_address=127.0.0.2"]),
        (&["--host=127.0.0.1", "--bind_address=::1"], &["127.0.0.1", "bind_address=::1"]),
    ] {
        let log = refused(&ports, folder.path(), more);
        for word in says {
            assert!(log.contains(word), "{more:?}: {word}: {log}");
        }
    }
}

/// Every port of a master has a setting, IPv6 included.
#[test]
fn every_port_of_a_master_listens_where_it_is_told() {
    for host in ["127.0.0.1", "[::1]"] {
        let plain = host.trim_matches(['[', ']']);
        let more = [
            format!("--rpc_address={plain}"),
            format!("--metrics_host={plain}"),
            format!("--http_metadata_server_host={plain}"),
            format!("--kv_events_bind_endpoint=tcp://{host}:{}", free_port()),
        ];
        let (process, _) = master("1024:1024", &more);
        let found = listening(process.0.id());
        assert_eq!(found.len(), 4, "{found:?}");
        let bound: IpAddr = plain.parse().unwrap();
        assert!(found.iter().all(|at| at.ip() == bound), "{host}: {found:?}");
    }
}
