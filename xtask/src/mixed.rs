//! `cargo xtask mixed`: clusters of nodes of this version and of the last release.

use crate::run::{Result, cargo, command, counted, root, step, target_dir, test_program};

/// Name and commit of the last release.
const LAST_RELEASE: &str = include_str!("../last-release");
const TEST: &[&str] = &["test", "--workspace", "--all-features", "--test", "processes", "--no-run"];

/// Returns the name and the commit of the last release.
pub(crate) fn last_release() -> Result<(&'static str, &'static str)> {
    LAST_RELEASE
        .trim()
        .split_once(' ')
        .ok_or_else(|| "xtask/last-release is malformed: expected `<name> <commit>`".to_owned())
}

/// Builds the last release and this version, and runs the tests that mix both.
pub(crate) fn test() -> Result {
    let (name, commit) = last_release()?;
    step(&format!("mixed cluster: {name}"));
    if command("git", &["rev-parse", "--is-shallow-repository"]).output()?.trim() == "true" {
        println!("left out: a shallow clone does not contain {name}");
        return Ok(());
    }
    let programs = build(commit)?;
    let said = cargo(TEST).shown_output()?;
    let program = test_program(&said, "processes")?;
    let script = counted(&program, &["--ignored", "--nocapture", "--test-threads=1", "mixed::"])?;
    command("sh", &["-ec", &format!("export RUST_BACKTRACE=1\n{script}")])
        .env("MOONCAKE_LAST_RELEASE", &programs)
        .run()
        .map_err(|_| "a test of a mixed cluster failed".to_owned())
}

/// Builds the programs of a commit unless they exist, and returns their folder.
fn build(commit: &str) -> Result<String> {
    let folder = target_dir().join("last-release");
    let (source, programs) = (folder.join("source"), folder.join("target"));
    let (source_text, target) = (source.to_string_lossy(), programs.to_string_lossy());
    let there = command("git", &["-C", &source_text, "rev-parse", "HEAD"]).output();
    if !there.is_ok_and(|head| source.exists() && head.trim() == commit) {
        let _ = std::fs::remove_dir_all(&source);
        let root = root();
        // A clone of its own: git would keep a work tree in its list.
        command("git", &["clone", "--quiet", "--no-checkout", &root.to_string_lossy(), &source_text])
            .run()?;
        command("git", &["-C", &source_text, "checkout", "--quiet", "--detach", commit]).run()?;
    }
    let manifest = source.join("Cargo.toml");
    cargo(&["build", "--quiet", "--locked", "-p", "mooncake-store", "--features", "cli", "--bins"])
        .args(&["--manifest-path", &manifest.to_string_lossy()])
        .env("CARGO_TARGET_DIR", &target)
        .run()?;
    Ok(programs.join("debug").to_string_lossy().into_owned())
}
