//! Process of the master: its settings from command line, environment and file, and its messages.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mooncake_core::fault_injection::VARIABLE;

const MASTER: &str = env!("CARGO_BIN_EXE_mooncake_master");

/// Process that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the planted bug of this process, for its children.
#[allow(clippy::disallowed_methods, reason = "bugs are planted through the environment")]
fn planted() -> Option<(&'static str, std::ffi::OsString)> {
    Some((VARIABLE, std::env::var_os(VARIABLE)?))
}

fn master() -> Command {
    let mut command = Command::new(MASTER);
    command.env_clear().envs(planted()).stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn said(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

/// Waits for a line of the log that contains `what`.
fn wait_for(log: &Path, what: &str) -> String {
    for _ in 0..2000 {
        let text = std::fs::read_to_string(log).unwrap_or_default();
        if let Some(line) = text.lines().find(|line| line.contains(what)) {
            return line.to_owned();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("no {what:?} in {}: {:?}", log.display(), std::fs::read_to_string(log));
}

fn get(at: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn file_environment_and_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("master.yaml");
    std::fs::write(
        &file,
        "rpc_port: auto\nrpc_interface: lo\nmetrics_host: 127.0.0.1\nmetrics_port: 1\ncluster_id: from_file\n\
         default_kv_lease_ttl: 3s\nclient_live_ttl_sec: 60\nlogbufsecs: 0\n",
    )
    .unwrap();
    let with = |command: &mut Command| {
        command.env("MC_MASTER_CONFIG_PATH", &file).env("MC_MASTER_METRICS_PORT", "2");
        command.env("MC_MASTER_CLUSTER_ID", "from_environment").arg("--metrics_port=0");
    };
    let mut command = master();
    with(&mut command);
    let (status, printed) = said(command.arg("--print_config"));
    assert_eq!(status, Some(0), "{printed}");
    for line in [
        "metrics_port: 0  # command line",
        "cluster_id: \"from_environment\"  # environment MC_MASTER_CLUSTER_ID",
        &format!("default_kv_lease_ttl: \"3s\"  # file {}", file.display()),
        "eviction_policy: \"gittins\"  # default",
    ] {
        assert!(printed.lines().any(|have| have == line), "no {line:?} in\n{printed}");
    }

    let mut command = master();
    with(&mut command);
    let log = folder.path().join("mooncake_master.INFO");
    let mut running = Running(command.arg("--log_dir").arg(folder.path()).spawn().unwrap());
    wait_for(&log, "Master service started on port ");
    let ready = wait_for(&log, "ready");
    assert!(ready.contains("from_environment") && ready.contains("rpc=127.0.0.1:"), "{ready}");
    wait_for(&log, "logbufsecs (file ");
    let first = std::fs::read_to_string(&log).unwrap().lines().next().unwrap().to_owned();
    for part in ["mooncake-rs", env!("CARGO_PKG_VERSION"), "0.3.13", "features="] {
        assert!(first.contains(part), "no {part:?} in the first line: {first}");
    }
    assert!(!std::fs::read_to_string(&log).unwrap().contains("security:"), "it serves this host only");
    let admin = ready.split("admin=").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap();
    assert!(get(admin.parse().unwrap(), "/health").contains("\"status\":\"ok\""));
    let pid = running.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(running.0.wait().unwrap().success());
    wait_for(&log, "stopping");
}

#[test]
fn what_is_wrong_ends_the_start_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("master.json");
    std::fs::write(&file, "{\"eviction_ration\": 0.1}").unwrap();
    let path = format!("--config_path={}", file.display());
    for (arguments, says) in [
        (vec![path.as_str()], "did you mean eviction_ratio?"),
        (vec!["--eviction_ration=0.1"], "--eviction_ratio"),
        (vec!["--enable_ha=true"], "--enable_ha needs --etcd_endpoints"),
        (vec!["--enable_ha=true", "--etcd_endpoints=e:1", "--ha_backend_type=k8s"], "supports etcd only"),
        (vec!["--log_dir=/dev/null/logs"], "/dev/null/logs"),
        (vec!["--metrics_host=192.0.2.1"], "--metrics_port"),
    ] {
        let (status, text) = said(master().args(&arguments).arg("--rpc_port=auto"));
        assert!(status.is_some_and(|status| status != 0), "{arguments:?}: {status:?}");
        assert!(text.contains(says), "{arguments:?}: {text}");
    }
}

#[test]
fn a_master_that_serves_every_user_warns() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("mooncake_master.INFO");
    let mut command = master();
    command.args([
        "--rpc_address=0.0.0.0",
        "--rpc_port=auto",
        "--metrics_host=127.0.0.1",
        "--metrics_port=0",
    ]);
    let _running = Running(command.arg("--log_dir").arg(folder.path()).spawn().unwrap());
    wait_for(&log, "ready");
    let line = wait_for(&log, "security:");
    assert!(
        line.contains("no authentication") && line.contains("0.0.0.0") && line.contains("WARN"),
        "{line}"
    );
}
