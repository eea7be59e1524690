//! `cargo xtask gpu-test`: the tests of GPU memory, as one program.

use std::process::{Command, ExitCode};

use crate::run::{Result, cargo, target_dir};

/// Builds the program and runs it, with `--fake` on a fake libcuda; `--build` only builds it.
/// Returns the exit code of the program, which is 3 without a GPU.
pub(crate) fn test(words: &[&str]) -> ExitCode {
    let built = build(words.contains(&"--fake"));
    let outcome = built.and_then(|program| {
        if words.contains(&"--build") {
            println!("{program}");
            return Ok(0);
        }
        let status = Command::new(&program).args(words).status();
        let status = status.map_err(|error| format!("cannot run {program}: {error}"))?;
        Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    });
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the program and returns its path. Measurements need an optimised build; the fake has
/// none.
fn build(for_fake: bool) -> Result<String> {
    let build = cargo(&["build", "-p", "mooncake-benches", "--features", "gpu", "--bin", "gpu_test"]);
    let (build, folder) = if for_fake { (build, "debug") } else { (build.args(&["--release"]), "release") };
    build.run()?;
    Ok(target_dir().join(folder).join("gpu_test").to_string_lossy().into_owned())
}
