//! Owner and its shared clients as processes that die, freeze and return. The shared clients are
//! this test program, started again for one test that takes its arguments from the environment.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{Process, deadline, free_port, metric};
use mooncake_core::ErrorKind;
use mooncake_core::clock::Rng;
use mooncake_store::client::PutOptions;
use mooncake_store::local::{LocalClient, LocalConfig};
use tempfile::TempDir;

/// Longest permitted duration of a call of a shared client.
const LIMIT: Duration = Duration::from_secs(5);
/// Additional time on a machine that is busy with other tests.
const SLACK: Duration = Duration::from_secs(5);

/// Master and owner.
struct Host {
    master: u16,
    http: u16,
    socket: PathBuf,
    owner: Process,
    _master: Process,
    _folder: TempDir,
}

impl Host {
    fn new(flags: &[&str]) -> Self {
        let (master, http) = (free_port(), free_port());
        let process = Command::new(env!("CARGO_BIN_EXE_mooncake_master"))
            .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--metrics_port=0"])
            .arg(format!("--rpc_port={master}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("owner.sock");
        let owner = start_owner(master, http, &socket, flags);
        Self { master, http, socket, owner, _master: Process(process), _folder: folder }
    }

    fn start_client(&self, what: &str) -> Process {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "local_clients::shared_client", "--ignored", "--nocapture"])
            .env("TEST_OWNER", &self.socket)
            .env("TEST_WHAT", what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Process(child)
    }

    fn config(&self) -> LocalConfig {
        LocalConfig { timeout: LIMIT, buffer: 4 << 20, ..LocalConfig::at(self.socket.to_str().unwrap()) }
    }

    /// Returns a metric of the owner.
    fn metric(&self, name: &str) -> Option<u64> {
        metric(self.http, &format!("mooncake_client_local_{name}"))
    }

    /// Waits until a metric of the owner has this value.
    fn until(&mut self, name: &str, value: u64) {
        let late = deadline();
        loop {
            let seen = self.metric(name);
            if seen == Some(value) {
                return;
            }
            self.owner.assert_alive();
            late(&format!("{name} is {value}; it is {seen:?}"));
            std::thread::yield_now();
        }
    }
}

fn start_owner(master: u16, http: u16, socket: &Path, flags: &[&str]) -> Process {
    let child = Command::new(env!("CARGO_BIN_EXE_mooncake_client"))
        .args(["--metadata_server=P2PHANDSHAKE", "--global_segment_size=256 MB", "--host=127.0.0.1"])
        .arg(format!("--master_server_address=127.0.0.1:{master}"))
        .arg(format!("--ipc_socket_path={}", socket.display()))
        .args(["--enable_http_server".to_owned(), format!("--http_port={http}")])
        .args(flags)
        // The output of the tests contains the warnings of the owner.
        .arg("--log=warn")
        .spawn()
        .unwrap();
    Process(child)
}

/// Connects to an owner that may still be starting.
async fn connect(config: LocalConfig) -> LocalClient {
    let late = deadline();
    loop {
        match LocalClient::connect(config.clone()).await {
            Ok(client) => return client,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        late("an owner serves");
        tokio::task::yield_now().await;
    }
}

fn value_of(key: &str, len: usize) -> Vec<u8> {
    let seed = key.bytes().fold(7u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
    (0..len).map(|i| (i % 253) as u8 ^ seed).collect()
}

/// Process of a shared client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
#[allow(clippy::disallowed_methods, reason = "arguments come from the environment")]
async fn shared_client() {
    let (Ok(owner), Ok(what)) = (std::env::var("TEST_OWNER"), std::env::var("TEST_WHAT")) else { return };
    let client = connect(LocalConfig { buffer: 4 << 20, ..LocalConfig::at(owner) }).await;
    println!("\njoined");
    match what.as_str() {
        "mixed" => mixed(&client).await,
        "put" => loop {
            let key = format!("dying-{}", std::process::id());
            client.put_with(&key, value_of(&key, 6 << 20), &PutOptions::new().upsert()).await.unwrap();
            println!("done");
        },
        "get" => loop {
            assert!(client.get("shared").await.unwrap().unwrap() == value_of("shared", 3 << 20));
            println!("done");
        },
        // The loop runs as long as the parent reads the output; a call that fails is repeated.
        "steady" => loop {
            if client.exist("shared").await.is_ok() {
                println!("done");
            }
        },
        other => panic!("{other}"),
    }
}

async fn mixed(client: &LocalClient) {
    let mut rng = Rng::seeded(u64::from(std::process::id()));
    let mut kept = Vec::new();
    for round in 0..300 {
        let key = format!("k{}", rng.range(0..40));
        let len = 1 + key.len() * [1, 100, 10_000, 100_000][(key.len() + key.as_bytes()[1] as usize) & 3];
        match rng.range(0..5) {
            0 => drop(client.put(&key, value_of(&key, len)).await.unwrap()),
            1 => drop(client.batch_remove(&[&key], true).await.unwrap()),
            _ => {
                if let Some(value) = client.get(&key).await.unwrap() {
                    assert!(value == value_of(&key, len), "{key} in round {round}");
                    kept.push(value);
                }
            }
        }
        if kept.len() > 20 {
            kept.clear();
        }
    }
    println!("fine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_share_one_client() {
    let mut host = Host::new(&[]);
    let watcher = connect(host.config()).await;
    let mut processes: Vec<Process> = (0..8).map(|_| host.start_client("mixed")).collect();
    for process in &mut processes {
        assert!(process.lines_after("fine").next().is_some(), "a shared client with wrong bytes");
    }
    drop(processes);
    host.until("clients", 1);
    drop(watcher);
    for name in ["clients", "memories", "shared_bytes", "connections", "requests"] {
        host.until(name, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_leaves_nothing_and_harms_no_other() {
    let mut host = Host::new(&[]);
    let other = connect(host.config()).await;
    other.put("shared", value_of("shared", 3 << 20)).await.unwrap();
    for round in 0..6 {
        let mut process = host.start_client(["put", "get"][round % 2]);
        // The kill comes in the middle of a call, because calls follow each other without a pause.
        let mut done = process.lines_after("done");
        assert!(done.by_ref().take(3).count() == 3);
        process.kill();
        assert!(other.get("shared").await.unwrap().unwrap() == value_of("shared", 3 << 20));
        host.until("clients", 1);
    }
    // Each client wrote values as long as its shared memory, all of which is free again.
    assert_eq!(host.metric("memories"), Some(1));
    let key = "after";
    other.put(key, value_of(key, 32 << 20)).await.unwrap();
    assert!(other.get(key).await.unwrap().unwrap() == value_of(key, 32 << 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_process_is_forgotten_and_finds_back() {
    let mut host = Host::new(&["--client_ttl=2"]);
    let other = connect(host.config()).await;
    let mut process = host.start_client("steady");
    let mut done = process.lines_after("done");
    done.next().unwrap();
    host.until("clients", 2);
    process.freeze();
    host.until("clients", 1);
    assert_eq!(host.metric("memories"), Some(1), "its memory is let go of");
    other.put("shared", "value").await.unwrap();
    process.thaw();
    host.until("clients", 2);
    // The first lines are from before the stop, the next ones from after it.
    for _ in 0..3 {
        done.next().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "how long a call may take is what is tested")]
async fn an_owner_that_dies_or_freezes_is_missed_in_time() {
    let mut host = Host::new(&[]);
    let client = connect(host.config()).await;
    client.put("shared", "value").await.unwrap();
    let mut buffer = client.alloc(1 << 20).await.unwrap();
    buffer.fill(7);
    host.owner.freeze();
    for _ in 0..3 {
        let began = Instant::now();
        client.get("shared").await.unwrap_err();
        assert!(began.elapsed() < LIMIT + SLACK, "{:?}", began.elapsed());
    }
    host.owner.thaw();
    let late = deadline();
    while client.get("shared").await.is_err() {
        late("the owner responds again");
    }
    host.owner.signal("-9");
    host.owner.ended();
    let began = Instant::now();
    let error = client.get("shared").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
    // The next owner replaces the socket of the killed one.
    host.owner = start_owner(host.master, host.http, &host.socket, &[]);
    client.connected().await;
    let late = deadline();
    while client.put_buf("later", client.alloc(3).await.unwrap(), &Default::default()).await.is_err() {
        late("the next owner takes values");
    }
    assert!(buffer.iter().all(|byte| *byte == 7));
    client.put_buf("buffer", buffer, &Default::default()).await.unwrap();
    assert!(client.get("buffer").await.unwrap().unwrap().iter().all(|byte| *byte == 7));
    drop(client);
    host.until("clients", 0);
    host.owner.signal("-TERM");
    assert!(host.owner.ended().success());
    assert!(!host.socket.exists(), "it takes its socket with it");
}

/// Objects are readable while the owner drains, and a second signal ends it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_is_terminated_drains_first() {
    let mut host = Host::new(&["--drain_on_term=600"]);
    let client = connect(host.config()).await;
    client.put("kept", value_of("kept", 1 << 20)).await.unwrap();
    let cluster = mooncake_store::client::Client::builder()
        .master(format!("127.0.0.1:{}", host.master))
        .segment(0)
        .connect()
        .await
        .unwrap();
    host.owner.signal("-TERM");
    // A draining owner accepts no objects, and there is no other segment.
    let (mut n, late) = (0, deadline());
    loop {
        late("the owner accepts no objects any more");
        match cluster.put(format!("new-{n}"), [1; 1000]).await {
            Ok(_) => n += 1,
            Err(error) if error.kind() == ErrorKind::NoSpace => break,
            Err(error) => panic!("the owner is gone: {error}"),
        }
    }
    let read = cluster.get("kept").await.unwrap().expect("objects stay while the owner drains");
    assert!(read == value_of("kept", 1 << 20));
    assert!(host.owner.0.try_wait().unwrap().is_none(), "it drains for 600 s");
    host.owner.signal("-TERM");
    assert!(host.owner.ended().success());
    assert!(cluster.get("kept").await.map_or(true, |value| value.is_none()));
    cluster.close().await.unwrap();
}

/// Objects of a terminated owner move to the other owner, and the owner ends long before its time
/// limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_an_owner_that_is_terminated_move_to_another() {
    let mut host = Host::new(&["--drain_on_term=600"]);
    let client = connect(host.config()).await;
    let keys: Vec<String> = (0..20).map(|n| format!("kept-{n}")).collect();
    for key in &keys {
        client.put(key, value_of(key, 100_000)).await.unwrap();
    }
    drop(client);
    let socket = host.socket.with_file_name("second.sock");
    let _second = start_owner(host.master, free_port(), &socket, &[]);
    // The owner accepts connections when its memory is mounted.
    drop(connect(LocalConfig::at(socket.to_str().unwrap())).await);
    host.owner.signal("-TERM");
    assert!(host.owner.ended().success());
    let cluster = mooncake_store::client::Client::builder()
        .master(format!("127.0.0.1:{}", host.master))
        .segment(0)
        .connect()
        .await
        .unwrap();
    for key in &keys {
        let read = cluster.get(key).await.unwrap().expect("the object was moved");
        assert!(read == value_of(key, 100_000), "{key}");
    }
    cluster.close().await.unwrap();
}

/// Start scripts and probes wait for the port of `mooncake_client`, which opens last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_opens_its_port_when_it_is_ready() {
    let port = free_port();
    let mut host = Host::new(&[&format!("--port={port}")]);
    let at = format!("127.0.0.1:{port}");
    let late = deadline();
    while std::net::TcpStream::connect(&at).is_err() {
        host.owner.assert_alive();
        late("the owner listens");
        std::thread::yield_now();
    }
    let client = LocalClient::connect(host.config()).await.expect("the owner serves");
    client.put("key", b"value".to_vec()).await.unwrap();
    let mut second =
        start_owner(host.master, free_port(), &host.socket.with_file_name("2"), &[&format!("--port={port}")]);
    assert_eq!(second.ended().code(), Some(1), "the port is in use");
    host.owner.signal("-INT");
    assert!(host.owner.ended().success());
    assert!(std::net::TcpStream::connect(&at).is_err());
}

/// A put can prefer an owner across restarts if the name of the owner is a setting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_has_the_name_that_its_flag_gives() {
    let (port, name) = (free_port(), format!("127.0.0.1:{}", free_port()));
    let mut host = Host::new(&[&format!("--port={port}"), &format!("--host={name}")]);
    let other = start_owner(host.master, free_port(), &host.socket.with_file_name("2"), &[]);
    let late = deadline();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        host.owner.assert_alive();
        late("the owner listens");
        std::thread::yield_now();
    }
    let client = crate::cluster::connect(&format!("127.0.0.1:{}", host.master), 0).await;
    for i in 0..16 {
        let key = format!("k{i}");
        client.put_with(&key, &b"value"[..], &PutOptions::new().prefer_segment(&name)).await.unwrap();
        assert_eq!(client.get(&key).await.unwrap().unwrap(), &b"value"[..]);
    }
    // Only the owner of that name has them.
    host.owner.signal("-KILL");
    host.owner.ended();
    for i in 0..16 {
        assert_eq!(client.get(format!("k{i}")).await.unwrap(), None);
    }
    drop(other);
}

#[test]
fn an_owner_refuses_memory_that_there_is_not() {
    let output = Command::new(env!("CARGO_BIN_EXE_mooncake_client"))
        .args(["--metadata_server=P2PHANDSHAKE", "--global_segment_size=900 TB", "--local_buffer_size=0"])
        .args(["--host=127.0.0.1", "--master_server_address=127.0.0.1:1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot offer memory") && said.contains("allow_overcommit"), "{said}");
}
