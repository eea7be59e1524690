//! Clients that fork and die while their children live on: ports and files are free for the next
//! process.

use std::path::{Path, PathBuf};

use mooncake_core::testkit::{ForkedChild, fork_child};
use mooncake_store::client::{ClientConfig, ClientPages, OffloadConfig, SegmentFile};
use mooncake_store::config::MasterConfig;
use mooncake_store::local::{LocalServer, LocalServerConfig};
use mooncake_store::server::MasterServer;

use crate::cluster::{SEGMENT, argument, builder_with, master, master_address, start, until_end_of_input};
use crate::process::{Process, free_port};

/// Process of a client with a segment file or a disk. It forks if its arguments say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn client() {
    let (Some(master), Some(folder)) = (master_address(), argument::<PathBuf>("TEST_FOLDER")) else { return };
    let builder = match argument::<u8>("TEST_DISK") {
        None => {
            let segment_file = Some(SegmentFile::new(folder.join("segment")));
            builder_with(ClientConfig { segment_file, ..ClientConfig::default() }, &master, SEGMENT)
        }
        Some(_) => {
            let disk = OffloadConfig { capacity: 64 << 20, buffer: 16 << 20, ..OffloadConfig::new(folder) };
            builder_with(ClientConfig::default(), &master, SEGMENT).offload(disk)
        }
    };
    let client = match builder.connect().await {
        Ok(client) => client,
        Err(error) => return println!("\nsaid {error}"),
    };
    match argument::<u8>("TEST_FORK") {
        Some(_) => println!("\nsaid child {}", fork_child().unwrap()),
        None => println!("\nsaid ready"),
    }
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

fn start_client(port: u16, arguments: &[(&str, String)], fork: bool) -> (Process, String) {
    let fork: &[(&str, String)] = if fork { &[("TEST_FORK", "1".into())] } else { &[] };
    let mut client = start("forked::client", port, &[arguments, fork].concat());
    let said = client.lines_after("said ").next().unwrap_or_default();
    (client, said)
}

#[test]
fn the_segment_file_of_a_killed_process_is_free_while_its_child_lives_on() {
    let port = free_port();
    let _master = master(port, &["--enable_offload"]);
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let arguments = [("TEST_FOLDER", folder.path().display().to_string())];
    let (owner, said) = start_client(port, &arguments, true);
    let child = said.strip_prefix("child ").and_then(|number| number.parse().ok());
    let child = ForkedChild(child.unwrap_or_else(|| panic!("{said}")));
    let (_, said) = start_client(port, &arguments, false);
    let in_use = format!("process {} holds it; stop that process", owner.0.id());
    assert!(said.contains(&in_use), "the owner is alive: {said}");
    owner.kill();
    let (_, said) = start_client(port, &arguments, false);
    assert_eq!(said, "ready");
    drop(child);
}

#[test]
fn the_disk_of_a_killed_process_is_free_while_its_child_lives_on() {
    let port = free_port();
    let _master = master(port, &["--enable_offload"]);
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let arguments = [("TEST_FOLDER", folder.path().display().to_string()), ("TEST_DISK", "1".into())];
    let holder = |folder: &Path| std::fs::read_to_string(folder.join("lock")).unwrap_or_default();
    let (owner, said) = start_client(port, &arguments, true);
    let child = said.strip_prefix("child ").and_then(|number| number.parse().ok());
    let child = ForkedChild(child.unwrap_or_else(|| panic!("{said}")));
    let (second, said) = start_client(port, &arguments, false);
    assert_eq!(said, "ready");
    assert_eq!(holder(folder.path()), owner.0.id().to_string(), "the owner is alive");
    assert_eq!(holder(&folder.path().join("worker-1")), second.0.id().to_string());
    owner.kill();
    let (third, said) = start_client(port, &arguments, false);
    assert_eq!(said, "ready");
    assert_eq!(holder(folder.path()), third.0.id().to_string());
    drop(child);
}

/// Process of a client and a master with every kind of listener. It forks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn listening() {
    let (Some(master), Some(folder)) = (master_address(), argument::<PathBuf>("TEST_FOLDER")) else { return };
    let second = MasterConfig::from_flags([
        ("rpc_address", "127.0.0.1"),
        ("rpc_port", "auto"),
        ("metrics_host", "127.0.0.1"),
        ("metrics_port", "0"),
        ("enable_http_metadata_server", "true"),
        ("http_metadata_server_host", "127.0.0.1"),
        ("http_metadata_server_port", "0"),
        ("enable_kv_events", "true"),
        ("kv_events_backend_id", "cache"),
        ("kv_events_bind_endpoint", "tcp://127.0.0.1:0"),
    ]);
    let second = MasterServer::start(second.unwrap()).await.unwrap();
    let disk =
        OffloadConfig { capacity: 64 << 20, buffer: 16 << 20, ..OffloadConfig::new(folder.join("disk")) };
    let client =
        builder_with(ClientConfig::default(), &master, SEGMENT).offload(disk).connect().await.unwrap();
    let pages = ClientPages::serve(&client, "127.0.0.1", 0).await.unwrap();
    let local = LocalServerConfig { path: folder.join("owner.sock"), ..LocalServerConfig::default() };
    let local = LocalServer::start(client.clone(), local).unwrap();
    println!("\nsaid child {}", fork_child().unwrap());
    let _ = until_end_of_input().await;
    drop((local, pages, second));
    client.close().await.unwrap();
}

/// Returns the number of listening sockets of a process: of TCP, and of this host alone.
fn listening_sockets(process: u32) -> (usize, usize) {
    let links = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let own: Vec<_> = links.filter_map(|link| std::fs::read_link(link.path()).ok()).collect();
    let count = |table: &str, state: (usize, &str), inode: usize| {
        let table = std::fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        let listens = |line: &&str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.get(state.0) == Some(&state.1)
                && words.get(inode).is_some_and(|inode| {
                    own.iter().any(|link| link == Path::new(&format!("socket:[{inode}]")))
                })
        };
        table.lines().filter(listens).count()
    };
    let tcp = ["tcp", "tcp6"].map(|table| count(table, (3, "0A"), 9));
    (tcp.iter().sum(), count("unix", (3, "00010000"), 6))
}

#[test]
fn no_listener_is_inherited() {
    let port = free_port();
    let _master = master(port, &["--enable_offload"]);
    let folder = tempfile::tempdir().unwrap();
    let arguments = [("TEST_FOLDER", folder.path().display().to_string())];
    let mut owner = start("forked::listening", port, &arguments);
    let said = owner.lines_after("said ").next().unwrap_or_default();
    let child = said.strip_prefix("child ").and_then(|number| number.parse().ok());
    let child = ForkedChild(child.unwrap_or_else(|| panic!("{said}")));
    // RPC, admin, metadata, events; data, handshake, HTTP, disk; the socket for shared clients, and
    // that for transfers on the same host.
    assert_eq!(listening_sockets(owner.0.id()), (8, 2));
    assert_eq!(listening_sockets(child.0), (0, 0));
    owner.kill();
    drop(child);
}
