//! The header of the C interface, made from the code by cbindgen.

use std::path::Path;

use crate::run::{Result, cargo, command, root, step, target_dir};

const VERSION: &str = "0.29.4";
const HEADER: &str = "mooncake-capi/include/transfer_engine_c.h";

/// Writes it.
pub(crate) fn write() -> Result {
    generate(&root().join(HEADER))
}

/// Compares what is checked in with what the code makes.
pub(crate) fn check() -> Result {
    step("header of the C interface");
    let made = target_dir().join("transfer_engine_c.h");
    generate(&made)?;
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
    };
    if read(&made)? == read(&root().join(HEADER))? {
        return Ok(());
    }
    Err(format!("{HEADER} is not what the code makes: run `cargo xtask header`"))
}

fn generate(into: &Path) -> Result {
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
    let into = into.to_string_lossy();
    command(
        &tool,
        &["--quiet", "--config", "cbindgen.toml", "--crate", "mooncake-capi", "--output", &into, "."],
    )
    .dir("mooncake-capi")
    .run()
}
