//! The fuzz targets on a stable compiler: every corpus file, then mutations of them for a while.

use crate::run::{Result, cargo, step};

pub(crate) fn run(seconds: u64) -> Result {
    step(&format!("fuzz targets, {seconds} s each"));
    let target = crate::run::target_dir().join("fuzz");
    cargo(&["run", "--release", "--bin", "smoke", "--", &seconds.to_string()])
        .env("CARGO_TARGET_DIR", &target.to_string_lossy())
        .dir("fuzz")
        .run()
}
