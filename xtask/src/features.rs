//! Each crate with each of its features alone: a feature must not lean on another by accident.

use crate::run::{Result, Run, command, crate_folder, step, target_dir};

const CRATES: &[&str] = &[
    "mooncake-core",
    "mooncake-transport",
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
    said_by_name()?;
    elsewhere()
}

/// Builds where nobody else builds, so that neither waits for the other.
fn cargo(args: &[&str]) -> Run {
    let target = target_dir().join("features");
    crate::run::cargo(args).env("CARGO_TARGET_DIR", &target.to_string_lossy())
}

/// What a build says that lacks a feature. The other tests run with all of them.
fn said_by_name() -> Result {
    step("a master without RocksDB");
    cargo(&["test", "--quiet", "-p", "mooncake-store", "--features", "cli", "--test", "without_rocksdb"])
        .run()
}

/// Layouts of the structures of libibverbs and libcuda are asserted when the crates are compiled, so for the processor that is not here, too.
fn elsewhere() -> Result {
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

/// Names under `[features]` of a crate's manifest; our own manifests are plain enough to read line by line.
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
