//! Real metadata servers, started for one test and stopped with it (Debian: `etcd-server`,
//! `redis-server`).

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]
#![allow(clippy::disallowed_methods, reason = "CI says who it is in the environment")]
#![allow(clippy::print_stderr, reason = "a test that did not run says so")]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mooncake_core::meta::MetadataBackend;

/// A server of its own, killed when dropped.
pub struct Server {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    pub fn at(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Kills it for now.
    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The same again, after it was killed: same port, same files.
    pub fn restart(&mut self, command: fn(u16, &str) -> Command) {
        self.stop();
        self.child =
            command(self.port, &self.folder.path().to_string_lossy()).spawn().expect("it started before");
    }
}

pub fn etcd(port: u16, folder: &str) -> Command {
    let mut command = Command::new("etcd");
    let (client, peer) = (format!("http://127.0.0.1:{port}"), "http://127.0.0.1:0");
    command.args(["--data-dir", folder, "--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    // A killed process loses nothing that it has written. Leases must not wait for a disk that
    // other tests fill.
    command.arg("--unsafe-no-fsync");
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

pub fn redis(port: u16, folder: &str) -> Command {
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

pub fn redis_with_password(port: u16, folder: &str) -> Command {
    let mut command = redis(port, folder);
    command.args(["--requirepass", "open sesame"]);
    command
}

/// Starts a server at a port that is free now; `None` where it is not installed.
pub fn start(command: fn(u16, &str) -> Command) -> Option<Server> {
    let port = mooncake_core::testkit::free_port();
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = command(port, &folder.path().to_string_lossy());
    match command.spawn() {
        Ok(child) => Some(Server { child, port, folder }),
        Err(error) => {
            let missing = format!(
                "{:?} cannot be started ({error}): install it to run this test",
                command.get_program()
            );
            assert!(std::env::var_os("MOONCAKE_CI").is_none(), "{missing}");
            eprintln!("skipped: {missing}");
            None
        }
    }
}

/// Waits until the server answers.
pub async fn ready(backend: &dyn MetadataBackend) {
    for _ in 0..600 {
        if backend.get("ready").await.is_ok() {
            return;
        }
        // A server that starts has no event for us.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the server did not come up: {:?}", backend.get("ready").await);
}
