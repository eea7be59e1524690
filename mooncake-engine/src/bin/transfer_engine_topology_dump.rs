//! See [`mooncake_engine::cli::topology`].

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_engine::cli::topology::run(std::env::args_os()).into()
}
