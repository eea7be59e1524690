//! The master of a cluster, as a process.

use std::io::IsTerminal;
use std::process::ExitCode;

use mooncake_core::Result;
use mooncake_store::config::MasterConfig;
use mooncake_store::server::{MasterServer, cli};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let config = match cli::parse(std::env::args_os()) {
        Ok(config) => config,
        Err(error) => error.exit(),
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(config.log_filter()))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn run(config: MasterConfig) -> Result<()> {
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
