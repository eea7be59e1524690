//! The master as a process: arguments in, exit status out.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};

use mooncake_core::Result;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::{MasterServer, cli};
use crate::config::MasterConfig;

/// Runs a master as the arguments say (the first is the program's name), until it is interrupted or terminated. The exit status: 0,
/// 1 when it cannot go on, 2 for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let config = match cli::parse(arguments) {
        Ok(config) => config,
        Err(error) => {
            // Nobody is left to be told when even this fails.
            let _ = error.print();
            let _ = std::io::stdout().flush();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let logging = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(config.log_filter()))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .try_init();
    if let Err(error) = logging {
        tracing::debug!("the log of this process goes elsewhere: {error}");
    }
    match serve_until_stopped(config) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "cannot go on");
            1
        }
    }
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
