//! The headers of the C interface, made from the code by cbindgen.

use std::path::Path;

use crate::run::{Result, cargo, command, root, step, target_dir};

const VERSION: &str = "0.29.4";
const FOLDER: &str = "mooncake-capi/include";
/// Each header, and the folder of `mooncake-capi/src` that it describes.
const HEADERS: &[(&str, &str)] = &[("transfer_engine_c.h", "engine"), ("store_c.h", "store")];

/// Writes them.
pub(crate) fn write() -> Result {
    HEADERS.iter().try_for_each(|(name, of)| generate(of, &root().join(FOLDER).join(name)))
}

/// Compares what is checked in with what the code makes.
pub(crate) fn check() -> Result {
    step("headers of the C interface");
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
    };
    for (name, of) in HEADERS {
        let made = target_dir().join(name);
        generate(of, &made)?;
        if read(&made)? != read(&root().join(FOLDER).join(name))? {
            return Err(format!("{FOLDER}/{name} is not what the code makes: run `cargo xtask header`"));
        }
    }
    Ok(())
}

fn generate(of: &str, into: &Path) -> Result {
    let tools = target_dir().join("tools");
    let tool = tools.join("bin/cbindgen").to_string_lossy().into_owned();
    let wanted = format!("cbindgen {VERSION}");
    if command(&tool, &["--version"]).output().map(|out| out.trim() == wanted) != Ok(true) {
        cargo(&[
            "install",
            "cbindgen",
            "--quiet",
            "--locked",
            "--version",
            VERSION,
            "--root",
            &tools.to_string_lossy(),
        ])
        .run()?;
    }
    // A file as the input: the header has the modules below it and no others.
    let (config, module) = (format!("src/{of}/cbindgen.toml"), format!("src/{of}/mod.rs"));
    let into = into.to_string_lossy();
    command(&tool, &["--quiet", "--config", &config, "--output", &into, &module]).dir("mooncake-capi").run()
}
