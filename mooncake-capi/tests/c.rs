//! C program, compiled with the system's compiler and linked with the library, in two processes.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "finds its compiler, and prints that it is skipped when there is none"
)]

use transfer_engine as _;

mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use common::run;

fn compile(folder: &Path) -> Option<PathBuf> {
    common::compile("peer.c", "transfer_engine", common::library().parent().unwrap(), folder)
}

#[test]
fn a_c_program_transfers_bytes_and_gets_codes() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path()) else { return };
    let mut server = run(&program).arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut name = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut name).unwrap();
    let user = run(&program).args(["use", name.trim()]).output().unwrap();
    let stderr = String::from_utf8_lossy(&user.stderr);
    if !user.status.success() {
        let _ = server.kill();
    }
    assert!(user.status.success(), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    // The end of its input stops the server.
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success(), "the server failed; its message is above");
}

/// Callers that know only COMPLETED and FAILED take every other final status for success.
#[test]
fn a_late_transfer_has_failed_for_callers_without_slice_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path()) else { return };
    let status = |expected: &str, slice_timeout: Option<&str>| {
        let mut command = run(&program);
        command.args(["stopped", expected]).env("MC_FORCE_TCP", "1").env("MC_TRANSFER_TIMEOUT", "5");
        command
            .env_remove("MC_SLICE_TIMEOUT")
            .envs(slice_timeout.map(|seconds| ("MC_SLICE_TIMEOUT", seconds)));
        let done = command.output().unwrap();
        assert!(done.status.success(), "{slice_timeout:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    status("6", None);
    status("5", Some("1"));
}

#[test]
fn the_header_is_one_for_cpp_too() {
    common::compile_cpp("transfer_engine_c.h", "closeSegment(nullptr, LOCAL_SEGMENT)");
}

#[test]
fn a_child_reaches_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path()) else { return };
    let done = run(&program).arg("fork").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
