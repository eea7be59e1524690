//! Programs of this crate, as functions from arguments to an exit status.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to their terminal")]

pub mod bench;
pub mod metadata_server;
pub mod topology;

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::Parser;
use clap::error::ErrorKind;
use mooncake_core::Result;
use mooncake_core::settings::Environment;
use tracing_subscriber::EnvFilter;

use crate::flags;
use crate::summary::log_filter;

/// Parses the arguments of a program. Otherwise prints the help or the error, and returns the exit
/// status.
fn parse<A: Parser>(arguments: impl IntoIterator<Item = OsString>) -> std::result::Result<A, u8> {
    parse_in(arguments, &Environment::of_process()).map_err(|error| {
        // Without standard error, no report is possible.
        let _ = error.print();
        u8::try_from(error.exit_code()).unwrap_or(2)
    })
}

fn parse_in<A: Parser>(
    arguments: impl IntoIterator<Item = OsString>,
    environment: &Environment,
) -> std::result::Result<A, clap::Error> {
    let mut command = flags::command(A::command());
    let expanded = flags::expand(arguments, environment, flags::kinds(&command))
        .map_err(|error| command.error(ErrorKind::ValueValidation, error.message()))?;
    for note in expanded.notes {
        eprintln!("{}: {note}", command.get_name());
    }
    A::from_arg_matches(&command.try_get_matches_from_mut(expanded.arguments)?)
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
