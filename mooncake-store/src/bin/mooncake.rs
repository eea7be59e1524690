//! Command line tool for users and operators of a cluster.

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_store::tool::run(std::env::args_os()).into()
}
