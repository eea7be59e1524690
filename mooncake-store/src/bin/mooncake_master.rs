//! Master of a cluster.

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_store::server::process::run(std::env::args_os()).into()
}
