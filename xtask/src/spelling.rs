//! Spelling of code and documents, by `typos` (`typos.toml`).

use crate::python;
use crate::run::{Result, command, step, target_dir};

/// Version of the checker: a later one knows more words.
const TYPOS: &str = "typos==1.52.0";

/// Checks the spelling. Without a Python that installs the checker, says so.
pub(crate) fn check() -> Result {
    step("spelling");
    if !python::is_usable() {
        println!("skipped: `typos` is installed with python3 3.11 or newer with venv (Debian: python3-venv)");
        return Ok(());
    }
    let environment = target_dir().join("typos-venv");
    let program = |name: &str| environment.join("bin").join(name).to_string_lossy().into_owned();
    let is_installed = |program: &str| command(program, &["--version"]).output().is_ok();
    if !is_installed(&program("typos")) {
        command("python3", &["-m", "venv", &environment.to_string_lossy()]).run()?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", TYPOS];
        command(&program("python"), &pip).run()?;
    }
    command(&program("typos"), &["--format", "brief"]).run()
}
