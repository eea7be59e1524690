//! `cargo xtask release`: checks of the crates before a release. CI leaves them out, because they
//! build two further programs and every package once more.

use crate::run::{Result, cargo, command, step, target_dir};
use crate::{features, mixed};

/// Programs that the checks install with cargo, and their versions.
const DENY: (&str, &str) = ("cargo-deny", "0.20.2");
const SEMVER: (&str, &str) = ("cargo-semver-checks", "0.51.0");

/// Checks dependencies, packages and, beside the last release, public interfaces.
pub(crate) fn check() -> Result {
    step("dependencies");
    let deny = installed(DENY)?;
    command(&deny, &["deny", "check", "bans", "licenses", "sources"]).run()?;
    features::check_each(false)?;
    step("packages");
    cargo(&["publish", "--workspace", "--dry-run"]).run()?;
    let (name, commit) = mixed::last_release()?;
    step(&format!("public interfaces beside {name}"));
    let program = installed(SEMVER)?;
    command(&program, &["semver-checks", "--workspace", "--all-features", "--baseline-rev", commit]).run()?;
    // Last: the list of advisories is on GitHub, which not every machine reaches.
    step("advisories");
    command(&deny, &["deny", "check", "advisories"]).run()
}

/// Installs a program unless it is there, and returns its path.
fn installed((name, version): (&str, &str)) -> Result<String> {
    let folder = target_dir().join("tools");
    let program = folder.join("bin").join(name).to_string_lossy().into_owned();
    if command(&program, &["--version"]).output().is_ok_and(|said| said.contains(version)) {
        return Ok(program);
    }
    step(&format!("install {name} {version}"));
    let root = folder.to_string_lossy();
    cargo(&["install", "--quiet", "--locked", "--root", &root, "--version", version, name]).run()?;
    Ok(program)
}
