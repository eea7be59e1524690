//! C program, compiled with the system's compiler and linked with the library, in two processes.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "finds its compiler, and prints that it is skipped when there is none"
)]

use transfer_engine as _;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the folder of the library that was built with this test.
fn library() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let folders = here.ancestors().skip(1).take(2);
    let found = folders.map(Path::to_owned).find(|folder| folder.join("libtransfer_engine.so").exists());
    found.expect("cargo builds the library before its tests")
}

fn compile(folder: &Path) -> Option<PathBuf> {
    let program = folder.join("peer");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    cc.args(["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program);
    cc.arg("-I").arg(here.join("include")).arg(here.join("tests/peer.c"));
    cc.arg("-L").arg(library()).arg("-ltransfer_engine").arg(format!("-Wl,-rpath,{}", library().display()));
    match cc.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            assert!(std::env::var_os("MOONCAKE_CI").is_none(), "no C compiler: {error}");
            eprintln!("skipped: no C compiler ({error})");
            None
        }
    }
}

/// Returns a command that runs the program with the library that it was linked with. Cargo sets
/// folders for libraries, too, and one of them may contain an older library.
fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

#[test]
fn a_c_program_transfers_bytes_and_gets_codes() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path()) else { return };
    let mut server = run(&program).arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut name = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut name).unwrap();
    let user = run(&program).args(["use", name.trim()]).output().unwrap();
    let said = String::from_utf8_lossy(&user.stderr);
    if !user.status.success() {
        let _ = server.kill();
    }
    assert!(user.status.success(), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    // The end of its input stops the server.
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success(), "the server failed; its message is above");
}

#[test]
fn the_header_is_one_for_cpp_too() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("include.cpp");
    std::fs::write(
        &source,
        "#include \"transfer_engine_c.h\"\nint main() { return closeSegment(nullptr, LOCAL_SEGMENT); }\n",
    )
    .unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let Ok(output) = Command::new("c++")
        .args(["-fsyntax-only", "-Wall", "-Werror", "-I"])
        .arg(include)
        .arg(&source)
        .output()
    else {
        eprintln!("skipped: no C++ compiler");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_child_reaches_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path()) else { return };
    let done = run(&program).arg("fork").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
