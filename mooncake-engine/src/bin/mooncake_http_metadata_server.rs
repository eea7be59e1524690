//! See [`mooncake_engine::cli::metadata_server`].

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_engine::cli::metadata_server::run(std::env::args_os()).into()
}
