//! C programs that are compiled with the system's compiler and linked with the library.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the library that was built with this test.
pub(crate) fn library() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let folders = executable.ancestors().skip(1).take(2);
    let library = folders.map(|folder| folder.join("libtransfer_engine.so")).find(|library| library.exists());
    library.expect("cargo builds the library before its tests")
}

/// Compiles a program of `tests`, and links it with a library of this name in a folder. Returns its
/// path, or `None` without a compiler.
pub(crate) fn compile(source: &str, name: &str, library: &Path, into: &Path) -> Option<PathBuf> {
    let program = into.join(Path::new(source).with_extension(""));
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    cc.args(["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program);
    cc.arg("-I").arg(manifest_dir.join("include")).arg(manifest_dir.join("tests").join(source));
    cc.arg("-L").arg(library).arg(format!("-l{name}")).arg("-ldl");
    cc.arg(format!("-Wl,-rpath,{}", library.display()));
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
pub(crate) fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

/// Compiles a program in C++ that includes a header and calls one function of it.
pub(crate) fn compile_cpp(header: &str, call: &str) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("include.cpp");
    let text = format!("#include \"{header}\"\nint main() {{ return {call}; }}\n");
    std::fs::write(&source, text).unwrap();
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
