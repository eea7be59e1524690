//! Client of a cluster that the processes of a host share.

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_store::local::process::run(std::env::args_os()).into()
}
