//! C programs that use the store through `libmooncake_store.so`, the second name of the library,
//! with a master in another process.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "finds its compiler, prints that it is skipped when there is none, and talks to its child"
)]

use transfer_engine as _;

mod common;

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::run;
use mooncake_store::config::MasterConfig;
use mooncake_store::server::MasterServer;
use tempfile::TempDir;

/// Variable of the process that is a master.
const ROLE: &str = "MOONCAKE_CAPI_TEST_MASTER";
/// Begin of the line in which a master prints its address.
const AT: &str = "master listening at ";

/// Does nothing in a test run. In a child of another test, serves until the input ends.
#[test]
fn master_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        ..MasterConfig::default()
    };
    let server = runtime.block_on(MasterServer::start(config)).unwrap();
    println!("\n{AT}{}", server.addresses().rpc);
    let _ = std::io::stdin().read(&mut [0]);
    runtime.block_on(server.stop());
}

/// Process of a master. It is killed at the end.
struct Master {
    process: Child,
    address: String,
}

impl Master {
    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "master_process", "--nocapture"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let address = lines.find_map(|line| line.strip_prefix(AT).map(str::to_owned));
        Self { process, address: address.expect("the master starts") }
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Program, and the folder with the library under its second name.
struct Program {
    path: PathBuf,
    _folder: TempDir,
}

impl Program {
    fn compile(source: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let second = folder.path().join("libmooncake_store.so");
        std::os::unix::fs::symlink(common::library(), second).unwrap();
        let path = common::compile(source, "mooncake_store", folder.path(), folder.path())?;
        Some(Self { path, _folder: folder })
    }

    /// Runs the program, which must succeed and must not panic.
    fn check(&self, arguments: &[&str], variables: &[(&str, &str)]) {
        let done = run(&self.path).args(arguments).envs(variables.iter().copied()).output().unwrap();
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{:?} {stderr}", done.status);
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

/// Runs a part of `store.c` with a master, for which a setup looks for a few seconds at most.
fn with_master(part: &str) {
    let Some(program) = Program::compile("store.c") else { return };
    let master = Master::start();
    program.check(&[part, &master.address], &[("MC_RPC_CONNECT_TIMEOUT_MS", "3000")]);
}

/// Runs a part of `store.c` that sends signals to the master.
fn with_master_to_signal(part: &str, variables: &[(&str, &str)]) {
    let Some(program) = Program::compile("store.c") else { return };
    let master = Master::start();
    program.check(&[part, &master.address, &master.process.id().to_string()], variables);
}

#[test]
fn values_are_stored_and_read() {
    with_master("values");
}

#[test]
fn a_prefix_is_found_with_its_positions() {
    with_master("prefix");
}

#[test]
fn nonsense_is_refused() {
    with_master("nonsense");
}

#[test]
fn a_full_cluster_is_an_error() {
    with_master("full");
}

#[test]
fn threads_share_a_store() {
    with_master("threads");
}

#[test]
fn a_child_creates_a_store_of_its_own() {
    with_master("fork");
}

#[test]
fn a_store_ends_after_its_calls() {
    with_master_to_signal("ending", &[]);
}

#[test]
fn a_killed_master_is_an_error() {
    with_master_to_signal("killed", &[("MC_RPC_TIMEOUT_MS", "1000")]);
}

/// A setup fails without a master, and with another server or a silent one at its port. The same
/// store can then be set up.
#[test]
fn a_missing_master_is_an_error() {
    let Some(program) = Program::compile("store.c") else { return };
    let master = Master::start();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let rude = TcpListener::bind("127.0.0.1:0").unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = |at: &TcpListener| at.local_addr().unwrap().to_string();
    let (silent_at, rude_at, refused_at) = (address(&silent), address(&rude), address(&free));
    drop(free);
    std::thread::spawn(move || {
        use std::io::Write;
        for connection in rude.incoming() {
            let _ = connection.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let arguments = ["missing", &master.address, &refused_at, &silent_at, &rude_at];
    program.check(&arguments, &[("MC_RPC_CONNECT_TIMEOUT_MS", "700")]);
}

/// The master at `MOONCAKE_PEER_MASTER=host:port` serves all parts.
#[test]
#[ignore = "needs a master of Mooncake C++; cargo xtask interop runs it"]
fn a_mooncake_cpp_master_serves_c_programs() {
    let master = std::env::var("MOONCAKE_PEER_MASTER").expect("MOONCAKE_PEER_MASTER=host:port of a master");
    let Some(program) = Program::compile("store.c") else { return };
    for part in ["values", "nonsense", "full", "threads", "fork", "prefix of Mooncake C++"] {
        program.check(&[part, &master], &[("MC_RPC_CONNECT_TIMEOUT_MS", "3000")]);
    }
}

/// The functions have the names and types of Mooncake C++, so that its programs link and run.
#[test]
fn the_interface_is_that_of_mooncake_cpp() {
    let Some(program) = Program::compile("store_abi.c") else { return };
    program.check(&[], &[]);
}

#[test]
fn the_header_is_one_for_cpp_too() {
    common::compile_cpp("store_c.h", "mooncake_store_health_check(nullptr)");
}
