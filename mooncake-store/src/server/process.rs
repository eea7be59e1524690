//! The master as a process: arguments in, exit status out.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "what is asked for at the start goes to the terminal"
)]

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::IsTerminal;
use std::sync::Mutex;

use mooncake_core::{Error, Result};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::MasterServer;
use super::cli::{self, Run};
use crate::config::MasterConfig;

/// Runs a master as the arguments say (the first is the program's name), until it is interrupted or terminated. The exit
/// status: 0, 1 when it cannot go on, another for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let (config, notes) = match cli::parse(arguments) {
        Ok(Run::Master { config, notes }) => (*config, notes),
        Ok(Run::Print(settings)) => {
            print!("{settings}");
            return 0;
        }
        Err(error) => {
            // Nobody is left to be told when even this fails.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    if let Err(error) = log(&config) {
        eprintln!("mooncake_master: {error}");
        return 1;
    }
    for note in notes {
        tracing::warn!("{note}");
    }
    match serve_until_stopped(config) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "cannot go on");
            1
        }
    }
}

/// Opens the log: the file that `--log_dir` asks for, or standard error.
fn log(config: &MasterConfig) -> Result<()> {
    let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(config.log_filter()));
    match &config.log_dir {
        None => log.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr).init(),
        Some(folder) => {
            let path = folder.join("mooncake_master.INFO");
            let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|error| {
                Error::invalid(format!("--log_dir: cannot write {}: {error}", path.display()))
            })?;
            log.with_ansi(false).with_writer(Mutex::new(file)).init();
        }
    }
    Ok(())
}

fn serve_until_stopped(config: MasterConfig) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.worker_threads())
        .enable_all()
        .build()?;
    runtime.block_on(serve(config))
}

async fn serve(config: MasterConfig) -> Result<()> {
    // Taken first, so that a signal during the start is not lost.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let cluster = config.cluster_id.clone();
    let server = MasterServer::start(config).await?;
    let at = server.addresses();
    tracing::info!("Master service started on port {}", at.rpc.port());
    tracing::info!(cluster, rpc = %at.rpc, admin = ?at.admin, metadata = ?at.metadata, "ready");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopping");
    server.stop().await;
    Ok(())
}
