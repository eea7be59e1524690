//! `cargo xtask features`: each crate with each of its features alone, so that no feature depends
//! on another by accident. With `--sets`, fewer builds find a feature that depends on one other.

use std::collections::{BTreeMap, BTreeSet};

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
    "mooncake-p2p",
    "mooncake-capi",
    "mooncake-protocol",
    "mooncake-master",
    "mooncake-client",
    "mooncake-server",
    "mooncake-store",
];

/// Features of a crate, each with the features of the crate that it enables.
type Features = BTreeMap<String, BTreeSet<String>>;

/// Checks each feature alone. `in_sets` builds [`separating_sets`] instead, and features of the
/// client and the server only through `mooncake-store`, which has a feature for each of them.
pub(crate) fn check_each(in_sets: bool) -> Result {
    for name in CRATES {
        check(name, "")?;
        if in_sets && ["mooncake-client", "mooncake-server"].contains(name) {
            continue;
        }
        let features = features_of(name)?;
        let alone = || features.keys().map(|feature| BTreeSet::from([feature.clone()])).collect();
        for set in if in_sets { separating_sets(&features) } else { alone() } {
            check(name, &set.into_iter().collect::<Vec<_>>().join(","))?;
        }
    }
    if !in_sets {
        missing_feature_is_named()?;
    }
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
    let build =
        ["test", "--no-run", "-p", "mooncake-store", "--features", "cli", "--test", "without_features"];
    // The test computes nothing, so the optimization of the other tests is left out.
    let plain = ["core", "master"].map(|name| format!("profile.dev.package.mooncake-{name}.opt-level=0"));
    let said = cargo(&build).args(&plain.each_ref().map(|one| ["--config", one]).concat()).shown_output()?;
    let program = test_program(&said, "without_features")?;
    command("sh", &["-ec", &counted(&program, &[])?]).run()
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

fn check(package: &str, features: &str) -> Result {
    let shown = if features.is_empty() { "no feature" } else { features };
    step(&format!("{package} with {shown}"));
    let args = ["check", "--quiet", "-p", package, "--no-default-features", "--features", features];
    cargo(&args).env("RUSTFLAGS", "-D warnings").run()
}

/// Returns sets such that for any two features, one of the sets has the first and not the second,
/// unless the first enables the second.
fn separating_sets(features: &Features) -> Vec<BTreeSet<String>> {
    let mut pairs: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (one, enabled) in features {
        let others = features.keys().filter(|other| *other != one && !enabled.contains(*other));
        pairs.extend(others.map(|other| (one.as_str(), other.as_str())));
    }
    let is_separated =
        |set: &BTreeSet<String>, (one, other): (&str, &str)| set.contains(one) && !set.contains(other);
    let mut sets = Vec::new();
    while !pairs.is_empty() {
        let gain = |set: &BTreeSet<String>| pairs.iter().filter(|pair| is_separated(set, **pair)).count();
        let mut set = BTreeSet::new();
        loop {
            let larger = features.iter().filter(|(one, _)| !set.contains(*one)).map(|(one, enabled)| {
                let mut larger: BTreeSet<String> = set.union(enabled).cloned().collect();
                larger.insert(one.clone());
                larger
            });
            match larger.max_by_key(|larger| gain(larger)) {
                Some(larger) if gain(&larger) > gain(&set) => set = larger,
                _ => break,
            }
        }
        pairs.retain(|pair| !is_separated(&set, *pair));
        sets.push(set);
    }
    // A single feature has no pair.
    if sets.is_empty() { features.keys().map(|one| BTreeSet::from([one.clone()])).collect() } else { sets }
}

/// Returns the features under `[features]` in the manifest of a crate, one per line there, without
/// the default.
fn features_of(package: &str) -> Result<Features> {
    let path = crate_folder(package).join("Cargo.toml");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let section = text.lines().skip_while(|line| line.trim() != "[features]").skip(1);
    let direct: Features = section
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split_once('='))
        .map(|(name, enabled)| {
            let names = enabled.split('"').skip(1).step_by(2).filter(|name| !name.contains(['/', ':']));
            (name.trim().to_owned(), names.map(str::to_owned).collect())
        })
        .filter(|(name, _): &(String, _)| !name.starts_with('#') && name != "default")
        .collect();
    Ok(direct.keys().map(|name| (name.clone(), enabled_by(&direct, name))).collect())
}

/// Returns what a feature enables, through others, too.
fn enabled_by(direct: &Features, name: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![name.to_owned()];
    while let Some(name) = waiting.pop() {
        for enabled in direct.get(&name).into_iter().flatten() {
            if found.insert(enabled.clone()) {
                waiting.push(enabled.clone());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[(&str, &[&str])]) -> Features {
        let direct: Features = lines
            .iter()
            .map(|(name, enabled)| ((*name).into(), enabled.iter().map(|one| (*one).into()).collect()))
            .collect();
        direct.keys().map(|name| (name.clone(), enabled_by(&direct, name))).collect()
    }

    #[test]
    fn sets_separate_every_two_features() {
        let names: Vec<String> = (0..12).map(|i| format!("f{i}")).collect();
        let mut lines: Vec<(&str, &[&str])> = names.iter().map(|name| (name.as_str(), &[][..])).collect();
        lines.extend([("all", &["some", "f0"][..]), ("some", &["f1", "f2"])]);
        let features = of(&lines);
        let sets = separating_sets(&features);
        assert!(sets.len() < 10, "{sets:?}");
        for (one, enabled) in &features {
            for other in features.keys().filter(|other| *other != one && !enabled.contains(*other)) {
                let apart = sets.iter().any(|set| set.contains(one) && !set.contains(other));
                assert!(apart, "{one} without {other}: {sets:?}");
            }
        }
        for set in &sets {
            assert!(set.iter().all(|one| features[one].is_subset(set)), "{set:?} enables more");
        }
    }

    #[test]
    fn one_feature_is_one_set() {
        assert_eq!(separating_sets(&of(&[("f", &[])])), [BTreeSet::from(["f".to_owned()])]);
        assert!(separating_sets(&of(&[])).is_empty());
    }
}
