//! Transfer engines beside those of the existing system.

use crate::peer::{in_own_network, install, path};
use crate::run::{Programs, Result, step};

/// Part of `cargo xtask interop`.
pub(crate) fn interop(python: &str, programs: Programs) -> Result {
    step("two engines");
    let words = [
        ("--python", python.to_owned()),
        ("--master", programs.path("mooncake_master")),
        ("--metadata-server", programs.path("mooncake_http_metadata_server")),
    ];
    let words = words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    let words: Vec<String> = std::iter::once(programs.path("engine_interop")).chain(words).collect();
    in_own_network(&words)
}

/// `cargo xtask bench --engine [--peer]`.
pub(crate) fn bench(peer: bool) -> Result {
    let python = if peer { Some(install()?) } else { None };
    let [bench, engine, metadata] =
        ["engine_bench", "transfer_engine_bench", "mooncake_http_metadata_server"];
    let programs = Programs::fast(&[bench, engine, metadata])?;
    let mut words = vec![programs.path(bench)];
    words.extend(["--bench".into(), programs.path(engine)]);
    words.extend(["--metadata-server".into(), programs.path(metadata)]);
    if let Some(python) = python {
        words.extend(["--peer".into(), path(&python)]);
    }
    in_own_network(&words)
}
