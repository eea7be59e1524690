//! A member of a cluster for the processes of its host, as a process.

use std::process::ExitCode;

fn main() -> ExitCode {
    mooncake_store::local::process::run(std::env::args_os()).into()
}
