//! `cargo xtask features`: each crate with each of its features alone, so that no feature depends
//! on another by accident.

use crate::run::{Result, Run, command, counted, crate_folder, step, target_dir, test_program};

const CRATES: &[&str] = &[
    "mooncake-core",
    "mooncake-transport",
    "mooncake-ipc",
    "mooncake-metadata",
    "mooncake-disk",
    "mooncake-nvlink",
    "mooncake-rdma",
    "mooncake-shm",
    "mooncake-tcp",
    "mooncake-engine",
    "mooncake-capi",
    "mooncake-protocol",
    "mooncake-master",
    "mooncake-client",
    "mooncake-server",
    "mooncake-store",
];

pub(crate) fn each_alone() -> Result {
    for name in CRATES {
        check(name, None)?;
        for feature in features_of(name)? {
            check(name, Some(&feature))?;
        }
    }
    missing_feature_is_named()?;
    other_processor()
}

/// Returns a cargo command with a target directory of its own, so that it does not wait for other
/// builds.
fn cargo(args: &[&str]) -> Run {
    let target = target_dir().join("features");
    crate::run::cargo(args).env("CARGO_TARGET_DIR", &target.to_string_lossy())
}

/// Tests the message of a build that lacks a feature. The other tests run with all features.
fn missing_feature_is_named() -> Result {
    step("a master without RocksDB");
    let build = ["test", "--no-run", "-p", "mooncake-store", "--features", "cli", "--test", "processes"];
    let program = test_program(&cargo(&build).shown_output()?, "processes")?;
    command("sh", &["-ec", &counted(&program, &["without_rocksdb::"])?]).run()
}

/// Compiles the crates that assert layouts of libibverbs and libcuda for the other processor.
fn other_processor() -> Result {
    let target =
        if cfg!(target_arch = "x86_64") { "aarch64-unknown-linux-gnu" } else { "x86_64-unknown-linux-gnu" };
    step(&format!("mooncake-rdma and mooncake-nvlink for {target}"));
    let there = command("rustup", &["target", "list", "--installed"]).output()?;
    if !there.lines().any(|line| line.trim() == target) {
        command("rustup", &["target", "add", target]).run()?;
    }
    let args = ["check", "--quiet", "-p", "mooncake-rdma", "-p", "mooncake-nvlink", "--target", target];
    cargo(&args).env("RUSTFLAGS", "-D warnings").run()
}

fn check(package: &str, feature: Option<&str>) -> Result {
    step(&format!("{package} with {}", feature.unwrap_or("no feature")));
    let mut args = vec!["check", "--quiet", "-p", package, "--no-default-features"];
    if let Some(feature) = feature {
        args.extend(["--features", feature]);
    }
    cargo(&args).env("RUSTFLAGS", "-D warnings").run()
}

/// Returns the names under `[features]` in the manifest of a crate, one per line there.
fn features_of(package: &str) -> Result<Vec<String>> {
    let path = crate_folder(package).join("Cargo.toml");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let section = text.lines().skip_while(|line| line.trim() != "[features]").skip(1);
    Ok(section
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split_once('='))
        .map(|(name, _)| name.trim().to_owned())
        .filter(|name| !name.starts_with('#') && name != "default")
        .collect())
}
