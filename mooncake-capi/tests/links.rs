//! C programs that ask for transports and links, end by a signal, and name the whole interface.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "finds its compiler, and prints that it is skipped when there is none"
)]

use transfer_engine as _;

mod common;
mod metadata;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use common::run;
use metadata::MetadataServer;
use rustix::process::{Pid, Signal, kill_process};

fn compile(source: &str, folder: &Path) -> Option<PathBuf> {
    common::compile(source, "transfer_engine", common::library().parent().unwrap(), folder)
}

#[test]
fn the_header_has_every_name_of_mooncake_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("engine_abi.c", folder.path()) else { return };
    let done = run(&program).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn the_types_are_those_of_cpp_too() {
    common::compile_cpp("transfer_engine_c.h", "sizeof(segment_desc_t) + sizeof(nic_load_stat_t) > 64");
}

#[test]
fn a_c_program_sees_its_links() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("links.c", folder.path()) else { return };
    let done = run(&program).arg("links").env("MC_FORCE_TCP", "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && !stderr.contains("panicked"), "{stderr}");
}

/// Runs the program, sends it a signal when both engines are published, and returns its end and
/// the names that are still published.
fn signalled(how: &str, signal: Signal) -> Option<(ExitStatus, Vec<String>)> {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("links.c", folder.path())?;
    let server = MetadataServer::start();
    let mut command = run(&program);
    command.args(["wait", &server.url(), how]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n", "{:?}", child.wait());
    assert_eq!(server.segments(), ["first", "second"]);
    kill_process(Pid::from_child(&child), signal).unwrap();
    // A wait would end the input, and with it the program.
    let input = child.stdin.take().filter(|_| how != "ignored");
    let status = child.wait().unwrap();
    drop(input);
    Some((status, server.segments()))
}

#[test]
fn a_signal_closes_all_engines_and_ends_the_program() {
    for signal in [Signal::INT, Signal::TERM] {
        let Some((status, left)) = signalled("default", signal) else { return };
        assert_eq!((status.signal(), left), (Some(signal.as_raw()), vec![]));
    }
}

#[test]
fn signals_of_the_program_are_left_to_it() {
    let Some((status, left)) = signalled("handled", Signal::TERM) else { return };
    assert_eq!((status.code(), left.len()), (Some(7), 2));
    let Some((status, left)) = signalled("ignored", Signal::TERM) else { return };
    assert_eq!((status.code(), left.len()), (Some(0), 2), "the program ends with its input");
}
