//! See [`mooncake_engine::cli::bench`].

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_engine::cli::bench::run(std::env::args_os()).into()
}
