//! `mooncake`: operates a cluster, reads and writes objects, measures, and diagnoses.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool talks to its terminal")]

mod admin;
mod args;
mod bench;
mod connects;
mod curve;
mod doctor;
mod finding;
mod interrupt;
mod keys;
mod local;
mod misses;
mod objects;
mod output;
mod p2p;
mod prefetch;
mod progress;
mod session;
mod status;
mod subscriber;
mod top;
mod trace;

use std::ffi::OsString;

use clap::Parser;
use mooncake_core::{Error, Result};
use serde_json::{Value, json};
use tracing_subscriber::EnvFilter;

pub use self::args::VARIABLES;
use self::args::{Args, Task, default_of};
use self::session::Session;

/// Runs the tool; the first argument is the name of the program. Returns the exit status: 0; 1
/// after a failure, a failed check of `doctor`, or `explain` of a key that cannot be read; 2 for
/// invalid arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let args = match Args::try_parse_from(arguments) {
        Ok(args) => args,
        Err(error) => {
            // There is no other channel to report a failure here.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(default_of("RUST_LOG")))
        .with_writer(std::io::stderr)
        .init();
    let json = args.to.json;
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Error::from)
        .and_then(|runtime| run_task(&Session::new(args.to, runtime), args.task));
    match outcome {
        Ok(true) => 0,
        Ok(false) => 1,
        // A reader that closes the pipe early, as `head` does, is not a failure.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) if json => {
            eprintln!("{}", error_document(&error));
            1
        }
        Err(error) => {
            eprintln!("mooncake: {error}");
            1
        }
    }
}

/// Returns an error as a JSON document.
fn error_document(error: &Error) -> Value {
    let code = error.code();
    json!({"error": {"code": code.number(), "name": code.name(), "message": error.to_string()}})
}

fn is_broken_pipe(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    source.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Runs a command. Returns whether it succeeded.
fn run_task(session: &Session, task: Task) -> Result<bool> {
    match task {
        Task::Status => status::show(session).map(|()| true),
        Task::Ls(args) => objects::list(session, &args).map(|()| true),
        Task::Get(args) => objects::get(session, &args).map(|()| true),
        Task::Explain(args) => misses::explain(session, &args),
        Task::Put(args) => objects::put(session, &args).map(|()| true),
        Task::Rm(args) => objects::remove(session, &args),
        Task::Prefetch(args) => prefetch::request(session, &args),
        Task::Curve => curve::show(session).map(|()| true),
        Task::Top(args) => top::show(session, &args).map(|()| true),
        Task::Bench(args) => bench::run(session, &args).map(|()| true),
        Task::Doctor(args) => doctor::examine(session, &args),
        Task::P2p(task) => p2p::run(session, &task).map(|()| true),
        Task::Trace(task) => trace::run(session, &task).map(|()| true),
    }
}
