//! Transfer engines beside those of the existing system.

use crate::peer::{in_own_network, install, path};
use crate::run::{Result, cargo, step, target_dir};

fn release(name: &str) -> String {
    path(&target_dir().join("release").join(name))
}

fn build(program: &str) -> Result {
    cargo(&["build", "--release", "-p", "mooncake-benches", "--bin", program]).run()?;
    cargo(&["build", "--release", "-p", "mooncake-engine", "--features", "cli", "--bins"]).run()
}

/// Part of `cargo xtask interop`; our master is built already.
pub(crate) fn interop(python: &str) -> Result {
    build("engine_interop")?;
    step("two engines");
    let words = [
        ("--python", python.to_owned()),
        ("--master", release("mooncake_master")),
        ("--metadata-server", release("mooncake_http_metadata_server")),
    ];
    let words = words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    let words: Vec<String> = std::iter::once(release("engine_interop")).chain(words).collect();
    in_own_network(&words)
}

/// `cargo xtask bench --engine [--peer]`.
pub(crate) fn bench(peer: bool) -> Result {
    let python = if peer { Some(install()?) } else { None };
    build("engine_bench")?;
    let mut words = vec![
        release("engine_bench"),
        "--bench".into(),
        release("transfer_engine_bench"),
        "--metadata-server".into(),
        release("mooncake_http_metadata_server"),
    ];
    if let Some(python) = python {
        words.extend(["--peer".into(), path(&python)]);
    }
    in_own_network(&words)
}
