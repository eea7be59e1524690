//! Programs of this crate, as functions from arguments to an exit status.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to their terminal")]

pub mod bench;
pub mod metadata_server;
pub mod topology;

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::Parser;
use mooncake_core::Result;
use tracing_subscriber::EnvFilter;

use crate::summary::log_filter;

/// Parses the arguments of a program. Otherwise prints the help or the error, and returns the exit
/// status.
fn parse<A: Parser>(
    arguments: impl IntoIterator<Item = OsString>,
    switches: &[&str],
) -> std::result::Result<A, u8> {
    let normal = |argument| crate::flags::normal(argument, |name| switches.contains(&name));
    A::try_parse_from(arguments.into_iter().map(normal)).map_err(|error| {
        // Without standard error, no report is possible.
        let _ = error.print();
        u8::try_from(error.exit_code()).unwrap_or(2)
    })
}

/// Starts the log on standard error, at the given level, with the summaries that the environment
/// requests.
fn log(level: &str) -> Result<()> {
    let filter = EnvFilter::builder()
        .parse(log_filter(level))
        .map_err(|error| mooncake_core::Error::invalid(format!("--log_level={level}: {error}")))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.with_ansi(std::io::stderr().is_terminal()).init();
    Ok(())
}

/// Returns the exit status 0, or 1 after printing the error to standard error.
fn status(program: &str, outcome: Result<()>) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{program}: {error}");
            1
        }
    }
}

/// Waits until the process is interrupted or terminated.
async fn wait_for_stop_signal() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
