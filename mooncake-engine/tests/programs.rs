//! The programs, as processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const BENCH: &str = env!("CARGO_BIN_EXE_transfer_engine_bench");
const METADATA: &str = env!("CARGO_BIN_EXE_mooncake_http_metadata_server");
const TOPOLOGY: &str = env!("CARGO_BIN_EXE_transfer_engine_topology_dump");

/// Program that runs until it is stopped.
struct RunningProgram {
    child: Child,
    /// First output of the program.
    first_line: String,
}

impl RunningProgram {
    fn start(program: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut first_line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
        Self { child, first_line: first_line.trim().to_owned() }
    }

    /// Terminates it; it must end by itself, and well.
    fn stop(mut self) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run_bench(arguments: &[&str]) -> Value {
    let output = run(BENCH, arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn two_processes_meet_at_the_handshake_port() {
    let target = RunningProgram::start(
        BENCH,
        &["--mode=target", "--local_server_name=127.0.0.1", "--protocol=tcp", "--buffer_size=4194304"],
    );
    let name = target.first_line.strip_prefix("segment ").unwrap();
    assert!(name.starts_with("127.0.0.1:"), "{name}");
    let segment = format!("-segment_id={name}");
    let base = [
        "--local_server_name=127.0.0.1",
        "--protocol=tcp",
        "--noauto_discovery",
        "--duration",
        "1",
        &segment,
    ];
    let with = |extra: &[&'static str]| [&base[..], extra].concat();
    let small = &["--block-size=4096", "--batch_size=8", "--threads=2", "--format=json", "--check"][..];
    for operation in ["--operation=write", "--operation=read"] {
        let results = run_bench(&with(&[small, &[operation]].concat()));
        let row = &results["rows"][0];
        assert!(row["bytes"].as_u64() >= Some(8 * 4096) && row["batches"].as_u64() > Some(0), "{results}");
        assert_eq!(row["bytes"].as_u64(), row["batches"].as_u64().map(|count| count * 8 * 4096));
    }
    let table = Command::new(BENCH)
        .args(with(&[
            "--block_size=4096",
            "--threads=1",
            "--batch_size=4",
            "--report_unit=MiB",
            "--reference",
        ]))
        .envs([("MC_TE_METRIC", "1"), ("MC_TE_METRIC_INTERVAL_SECONDS", "1")])
        .output()
        .unwrap();
    // The program lives for a while after the first second, for the reference lines.
    let log = text(&table.stderr);
    assert!(log.contains("MB/s read in"), "no summary of what was moved: {log}");
    let table = text(&table.stdout);
    for word in ["block 4096, batch 4, threads 1", "read ", "raw sockets", "memcpy", "MiB/s", "p99"] {
        assert!(table.contains(word), "{word} is not in {table}");
    }
    let large = run(BENCH, &with(&["--threads=4"]));
    assert!(
        !large.status.success() && text(&large.stderr).contains("--buffer_size"),
        "{}",
        text(&large.stderr)
    );
    target.stop();
}

#[test]
fn two_processes_meet_at_a_metadata_server() {
    let server = RunningProgram::start(METADATA, &["--host=127.0.0.1", "--port", "0", "--log_level=error"]);
    let metadata = format!("--metadata_server={}", server.first_line);
    let target = RunningProgram::start(
        BENCH,
        &["--mode=target", &metadata, "--local_server_name=owner", "--buffer_size=1048576", "--format=json"],
    );
    let first_line: Value = serde_json::from_str(&target.first_line).unwrap();
    assert_eq!(
        (first_line["segment"].as_str(), first_line["bytes"].as_u64()),
        (Some("owner"), Some(1048576))
    );
    let refused =
        run(BENCH, &["--mode=target", &metadata, "--local_server_name=owner", "--buffer_size=4096"]);
    assert!(text(&refused.stderr).contains("in use"), "{}", text(&refused.stderr));
    let results = run_bench(&[
        &metadata,
        "--local_server_name=user",
        "--segment_id=owner",
        "--duration=1",
        "--threads=1",
        "--batch_size=2",
        "--check",
        "--format=json",
    ]);
    assert!(results["rows"][0]["bytes"].as_u64() > Some(0));
    target.stop();
    let after_stop =
        run(BENCH, &[&metadata, "--local_server_name=user", "--segment_id=owner", "--threads=1"]);
    assert!(
        text(&after_stop.stderr).contains("owner"),
        "what stopped left its name: {}",
        text(&after_stop.stderr)
    );
    server.stop();
}

/// A server with a token serves engines with this token only, and a server without one does not
/// listen at addresses that other hosts reach.
#[test]
fn a_metadata_server_demands_its_token() {
    let start = |token: &str, arguments: &[&str]| {
        let mut command = Command::new(METADATA);
        command.args(arguments).env("MC_METADATA_HTTP_TOKEN", token);
        command
    };
    let open = start("", &["--port=0"]).output().unwrap();
    let stderr = text(&open.stderr);
    assert!(open.status.code() == Some(1) && stderr.contains("refuses to bind 0.0.0.0"), "{stderr}");
    let mut child =
        start("secret", &["--port=0", "--log_level=error"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut first_line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
    let server = RunningProgram { child, first_line: first_line.trim().replace("0.0.0.0", "127.0.0.1") };
    let metadata = format!("--metadata_server={}", server.first_line);
    let bench = |token: &str| {
        let arguments = [&metadata, "--mode=initiator", "--local_server_name=user", "--segment_id=owner"];
        let output =
            Command::new(BENCH).args(arguments).env("MC_METADATA_HTTP_TOKEN", token).output().unwrap();
        text(&output.stderr)
    };
    for wrong in ["", "wrong"] {
        assert!(bench(wrong).contains("401"), "{}", bench(wrong));
    }
    let right = bench("secret");
    assert!(right.contains("owner") && !right.contains("401"), "it is served, and finds no owner: {right}");
    server.stop();
}

#[test]
fn what_makes_no_sense_is_answered_with_what_would() {
    for (program, arguments, words) in [
        (BENCH, &["--blok_size=3"][..], &["--blok_size", "--block_size"][..]),
        (BENCH, &["--block_size=0"], &["--block_size", "at least 1"]),
        (BENCH, &["--mode=both"], &["--mode", "initiator", "target"]),
        (BENCH, &["--report_unit=GBit"], &["--report_unit", "GiB"]),
        (BENCH, &[], &["--segment_id"]),
        (BENCH, &["--segment_id=x", "--protocol=carrier-pigeon"], &["carrier-pigeon", "tcp"]),
        (BENCH, &["--segment_id=x", "--metadata_server=mysql://x"], &["mysql", "P2PHANDSHAKE"]),
        (BENCH, &["--mode=target", "--nic_priority_matrix=/no/such/file"], &["/no/such/file"]),
        (BENCH, &["--mode=target", "--log_level=lots=of"], &["--log_level"]),
        (METADATA, &["--port=70000"], &["--port"]),
        (METADATA, &["--host=no-such-host.invalid", "--port=0"], &["no-such-host.invalid"]),
        (TOPOLOGY, &["--custom_topo_json=/no/such/file"], &["/no/such/file"]),
    ] {
        let output = run(program, arguments);
        let stderr = text(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        for word in words {
            assert!(stderr.contains(word), "{arguments:?} was answered without {word}: {stderr}");
        }
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

#[test]
fn the_topology_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let root = format!("--root={}", folder.path().display());
    let shown = run(TOPOLOGY, &[&root]);
    assert_eq!(
        text(&shown.stdout),
        "Local topology [te/discover]: {\n\t\"cpu:0\" : \n\t[\n\t\t[],\n\t\t[]\n\t]\n}\n\n"
    );
    let file = folder.path().join("topology.json");
    std::fs::write(&file, r#"{"cpu:0": [["mlx5_0"], []]}"#).unwrap();
    let custom = run(TOPOLOGY, &["-json", &format!("--custom-topo-json={}", file.display())]);
    assert_eq!(text(&custom.stdout), "{\"cpu:0\":[[\"mlx5_0\"],[]]}\n");
    let by_environment =
        Command::new(TOPOLOGY).arg("--json").env("MC_CUSTOM_TOPO_JSON", &file).output().unwrap();
    assert_eq!(by_environment.stdout, custom.stdout);
}
