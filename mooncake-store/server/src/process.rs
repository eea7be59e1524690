//! The master as a process: arguments in, exit status out.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "what is asked for at the start goes to the terminal"
)]

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::pin::Pin;
#[cfg(feature = "metadata-etcd")]
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
#[cfg(feature = "metadata-etcd")]
use mooncake_core::{clock::SystemClock, meta::master_view};
use mooncake_transport::admission::raise_descriptor_limit;
#[cfg(feature = "metadata-etcd")]
use mooncake_transport::{
    etcd::EtcdMetadata,
    net::{HostPort, default_host},
};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::MasterServer;
use super::cli::{self, Run};
#[cfg(feature = "metadata-etcd")]
use super::{
    admin::standby_pages,
    leader::{Election, Standing},
};
use crate::config::{MasterConfig, MastersConfig};
#[cfg(feature = "metadata-etcd")]
use mooncake_protocol::http;
use mooncake_protocol::message::{MASTER_VERSION, TABLE_VERSION};

/// Runs a master as the arguments say (the first is the program's name), until it is interrupted or terminated. The exit
/// status: 0, 1 when it cannot go on, another for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let (config, notes) = match cli::parse(arguments) {
        Ok(Run::Master { config, notes }) => (*config, notes),
        Ok(Run::Print(settings)) => {
            return print(&settings);
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
    announce(&config);
    for note in notes {
        tracing::warn!("{note}");
    }
    raise_descriptor_limit();
    match serve_until_stopped(config) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "cannot go on");
            1
        }
    }
}

/// Writes the settings to standard output; the exit status. A reader that closes the pipe early, as `head` does, is no failure.
fn print(settings: &impl std::fmt::Display) -> u8 {
    if is_planted("panic-on-broken-pipe") {
        print!("{settings}");
        return 0;
    }
    let mut out = std::io::stdout().lock();
    match write!(out, "{settings}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("mooncake_master: cannot write to standard output: {error}");
            1
        }
        _ => 0,
    }
}

/// Features of this build that a command line can ask for.
const FEATURES: [(&str, bool); 4] = [
    ("metadata-etcd", cfg!(feature = "metadata-etcd")),
    ("metadata-redis", cfg!(feature = "metadata-redis")),
    ("metadata-rocksdb", cfg!(feature = "metadata-rocksdb")),
    ("disk", cfg!(feature = "disk")),
];

/// Logs the version, and that nothing asks clients who they are.
fn announce(config: &MasterConfig) {
    if is_planted("silent-start") {
        return;
    }
    let features: Vec<&str> = FEATURES.iter().filter(|(_, built)| *built).map(|(name, _)| *name).collect();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        speaks = TABLE_VERSION,
        rpc_version = MASTER_VERSION,
        features = features.join(","),
        "mooncake_master of mooncake-rs"
    );
    let is_local =
        |host: &str| host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    let open = !(is_local(&config.rpc_address) && is_local(&config.metrics_host));
    if open {
        tracing::warn!(
            rpc_address = config.rpc_address,
            metrics_host = config.metrics_host,
            "security: no authentication and no encryption; whoever reaches these ports reads, writes and removes objects (SECURITY.md)"
        );
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

/// Time that work on other threads has to end in after the master has stopped: questions to a directory that does not answer.
const LAST_WORK: Duration = Duration::from_secs(2);

fn serve_until_stopped(config: MasterConfig) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.worker_threads())
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve(config));
    runtime.shutdown_timeout(LAST_WORK);
    outcome
}

async fn serve(config: MasterConfig) -> Result<()> {
    // Taken first, so that a signal during the start is not lost.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    if let Some(masters) = config.masters.clone() {
        let told_to_stop = std::pin::pin!(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        return serve_while_leading(config, &masters, told_to_stop).await;
    }
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

/// Stands by, serves while it leads, and stands by again.
#[cfg(feature = "metadata-etcd")]
async fn serve_while_leading(
    config: MasterConfig,
    masters: &MastersConfig,
    mut told_to_stop: Pin<&mut impl Future<Output = ()>>,
) -> Result<()> {
    let clock = SystemClock::shared();
    let host = match config.rpc_address.as_str() {
        "" | "0.0.0.0" | "::" | "[::]" => default_host().to_string(),
        host => host.to_owned(),
    };
    if config.rpc_port == 0 {
        return Err(Error::invalid(
            "--rpc_port=auto: of several masters each needs a port that others can be told",
        ));
    }
    let own = HostPort::new(host, config.rpc_port).to_string();
    let directory = Arc::new(EtcdMetadata::new(&masters.etcd)?);
    let key = master_view(&config.cluster_id);
    loop {
        // Of this term only: what was begun in one is not answered in the next.
        let standing = Arc::new(Standing::one_of_several(clock.clone()));
        let election = Election::new(directory.clone(), key.clone(), own.clone(), standing.clone());
        let (listener, _) = http::bind(&config.metrics_host, config.metrics_port, "metrics_port").await?;
        let pages = http::serve("admin", listener, standby_pages(standing.clone()));
        let hold = tokio::select! {
            hold = election.win() => hold,
            () = &mut told_to_stop => return Ok(()),
        };
        pages.cut_off().await;
        // A large snapshot takes its time, in which the lease must not run out.
        let started = tokio::select! {
            started = MasterServer::start_as(config.clone(), clock.clone(), standing.clone()) => started,
            () = election.lead(&hold) => continue,
            () = &mut told_to_stop => {
                election.resign(hold).await;
                return Ok(());
            }
        };
        match started {
            Ok(server) => {
                tracing::info!(rpc = %server.addresses().rpc, "leads");
                tokio::select! {
                    () = election.lead(&hold) => {}
                    () = &mut told_to_stop => {
                        tracing::info!("stopping");
                        election.resign_after(hold, server.stop()).await;
                        return Ok(());
                    }
                }
                tracing::warn!("leads no more; what it knew is forgotten");
                // Nothing more is answered anyhow.
                server.cut_off().await;
            }
            Err(error) => {
                election.resign(hold).await;
                return Err(error);
            }
        }
    }
}

#[cfg(not(feature = "metadata-etcd"))]
async fn serve_while_leading(
    _: MasterConfig,
    _: &MastersConfig,
    _: Pin<&mut impl Future<Output = ()>>,
) -> Result<()> {
    Err(Error::new(
        mooncake_core::ErrorCode::NotSupported,
        "--enable_ha needs a build with feature `metadata-etcd`",
    ))
}
