//! The Python package: installed into a virtual environment of its own as users install it, and tested from there.

use std::path::PathBuf;

use crate::run::{Result, command, root, step, target_dir};

/// What the interpreter is asked before anything else: whether it is new enough and can make environments.
const USABLE: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";

/// Installs the package and runs its tests; `rest` goes to pytest. Without a Python it says so and does nothing.
pub(crate) fn test(rest: &[&str]) -> Result {
    step("python");
    if command("python3", &["-c", USABLE]).output().is_err() {
        println!(
            "skipped: the Python package needs `python3` 3.11 or newer with venv (Debian: python3-venv)"
        );
        return Ok(());
    }
    let environment = target_dir().join("python-venv");
    let python = environment.join("bin/python").to_string_lossy().into_owned();
    if !PathBuf::from(&python).exists() {
        command("python3", &["-m", "venv", &environment.to_string_lossy()]).run()?;
    }
    // Builds where everything else is built, so that dependencies are compiled once.
    let target = target_dir().to_string_lossy().into_owned();
    command(
        &python,
        &["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "./mooncake-python[test]"],
    )
    .env("CARGO_TARGET_DIR", &target)
    .run()?;
    let folder = root().join("mooncake-python").to_string_lossy().into_owned();
    command(&python, &["-m", "pytest", "-q"]).args(rest).dir("mooncake-python").run().map_err(|error| {
        format!(
            "{error}\n(the package is installed in {}, its tests are in {folder}/tests)",
            environment.display()
        )
    })
}
