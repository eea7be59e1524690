//! The command line of a cluster's users and keepers.

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_store::tool::run(std::env::args_os()).into()
}
