//! Process of a master: arguments in, exit status out.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "output of the start goes to the terminal")]

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::return_large_buffers;
use mooncake_core::{Error, Result};
use mooncake_metadata::open_etcd;
use mooncake_transport::admission::raise_descriptor_limit;
use mooncake_transport::net::{HostPort, default_host};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::MasterServer;
use super::admin::standby;
use super::cli::{self, Run};
use super::leader::{Election, Leadership};
use crate::config::{MasterConfig, MastersConfig};
use mooncake_protocol::http;
use mooncake_protocol::message::{MASTER_VERSION, TABLE_VERSION};

/// Runs a master until it is interrupted or terminated. The first argument is the name of the
/// program. Returns the exit status: 0, 1 after a fatal error, another number for invalid
/// arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let (config, notes) = match cli::parse(arguments) {
        Ok(Run::Master { config, notes }) => (*config, notes),
        Ok(Run::Print(settings)) => {
            return print(&settings);
        }
        Err(error) => {
            // There is no other channel to report a failure here.
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
    return_large_buffers();
    match serve_until_stopped(config) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "master failed");
            1
        }
    }
}

/// Writes the settings to standard output and returns the exit status. A reader that closes the
/// pipe early, as `head` does, is not a failure.
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

macro_rules! features {
    ($($name:tt),*) => { [$(($name, cfg!(feature = $name))),*] };
}

/// Optional features that a flag may need, and whether this build has them.
const FEATURES: [(&str, bool); 4] = features!["metadata-etcd", "metadata-redis", "metadata-rocksdb", "disk"];

/// Logs the version and the security warning.
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
            "security: no authentication and no encryption; every client that reaches these ports can read, write and remove objects (SECURITY.md)"
        );
    }
}

/// Returns a filter of log events in the syntax of `RUST_LOG`, and a warning about text that has
/// another meaning than it seems to have. `origin` names the setting, `default` is its default.
///
/// The syntax takes any word for the name of a module, and then logs nothing else.
pub(crate) fn event_filter(text: &str, origin: &str, default: &str) -> (EnvFilter, Option<String>) {
    let filter = match EnvFilter::try_new(text) {
        Ok(filter) => filter,
        Err(error) => {
            let warning = format!("{origin}={text:?} is ignored: {error}; the filter is {default:?}");
            return (EnvFilter::new(default), Some(warning));
        }
    };
    let has_level = |part: &str| part.contains(['=', '[']) || part.parse::<LevelFilter>().is_ok();
    let parts = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
    if parts().any(|part| has_level(part) || part.starts_with("mooncake")) || parts().next().is_none() {
        return (filter, None);
    }
    let all = format!("{default},{text}");
    let warning = format!(
        "{origin}={text:?} names no level (off, error, warn, info, debug, trace) and no module of Mooncake; the filter is {all:?}"
    );
    (EnvFilter::new(all), Some(warning))
}

/// Opens the log: the file of `--log_dir`, or standard error.
fn log(config: &MasterConfig) -> Result<()> {
    let (filter, warning) = match config.log_filter.is_empty() {
        true => (EnvFilter::new(config.log_filter()), None),
        false => event_filter(&config.log_filter, "log_filter", config.log_level),
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    match &config.log_dir {
        None => log.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr).init(),
        Some(folder) => {
            let path = folder.join("mooncake_master.INFO");
            // Messages may name keys.
            let file =
                OpenOptions::new().create(true).append(true).mode(0o640).open(&path).map_err(|error| {
                    Error::invalid(format!("--log_dir: cannot write {}: {error}", path.display()))
                })?;
            log.with_ansi(false).with_writer(Mutex::new(file)).init();
        }
    }
    if let Some(warning) = warning {
        tracing::warn!("{warning}");
    }
    Ok(())
}

/// Maximum time for work on other threads after the master has stopped, such as requests to a
/// directory that does not respond.
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
    // Install the signal handlers first, so that a signal during the start is not lost.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    if let Some(masters) = config.masters.clone() {
        let stop_requested = std::pin::pin!(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        return serve_while_leading(config, &masters, stop_requested).await;
    }
    let cluster = config.cluster_id.clone();
    let server = MasterServer::start(config).await?;
    let at = server.addresses();
    tracing::info!("Master service started on port {}", at.rpc.port());
    tracing::info!(cluster, rpc = %at.rpc, admin = at.admin.map(display), metadata = at.metadata.map(display), "ready");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopping");
    server.stop().await;
    Ok(())
}

/// Runs as a standby, serves while the master leads, and becomes a standby again.
async fn serve_while_leading(
    config: MasterConfig,
    masters: &MastersConfig,
    mut stop_requested: Pin<&mut impl Future<Output = ()>>,
) -> Result<()> {
    let clock = SystemClock::shared();
    let host = match config.rpc_address.as_str() {
        "" | "0.0.0.0" | "::" | "[::]" => default_host().to_string(),
        host => host.to_owned(),
    };
    if config.rpc_port == 0 {
        return Err(Error::invalid("--rpc_port=auto: each of several masters needs a fixed port"));
    }
    let own = HostPort::new(host, config.rpc_port).to_string();
    let directory = open_etcd(&masters.etcd).map_err(|error| error.context("--enable_ha"))?;
    loop {
        // State of this term only: a request that began in one term is not answered in the next.
        let leadership = Arc::new(Leadership::among_several(clock.clone(), masters.lease));
        let election = Election::new(directory.clone(), &config.cluster_id, own.clone(), leadership.clone());
        let (listener, _) = http::bind(&config.metrics_host, config.metrics_port, "metrics_port").await?;
        let pages = http::serve("admin", listener, standby::pages(leadership.clone()), config.own_hosts());
        let hold = tokio::select! {
            hold = election.win() => hold,
            () = &mut stop_requested => return Ok(()),
        };
        pages.cut_off().await;
        let start = async {
            let promise = election.store_promise(config.options.longest_promise()).await;
            let server =
                MasterServer::start_as(config.clone(), clock.clone(), leadership.clone(), promise.earlier);
            Ok((server.await?, promise))
        };
        // A large snapshot takes long, and the lease must not expire meanwhile.
        let started = tokio::select! {
            started = start => started,
            () = election.lead(&hold) => continue,
            () = &mut stop_requested => {
                election.resign(hold).await;
                return Ok(());
            }
        };
        match started {
            Ok((server, promise)) => {
                tracing::info!(rpc = %server.addresses().rpc, "leads");
                tokio::select! {
                    () = election.lead(&hold) => {}
                    () = election.lower_promise(promise) => {}
                    () = &mut stop_requested => {
                        tracing::info!("stopping");
                        election.resign_after(hold, server.stop()).await;
                        return Ok(());
                    }
                }
                tracing::warn!("lost leadership; dropping in-memory state");
                // Responses are blocked already.
                server.cut_off().await;
            }
            Err(error) => {
                election.resign(hold).await;
                return Err(error);
            }
        }
    }
}

impl MasterServer {
    /// Stops at once. The ports are free when this returns.
    async fn cut_off(self) {
        self.ticker.stop();
        self.rpc.cut_off().await;
        for pages in self.pages {
            pages.cut_off().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_that_empties_log_warns() {
        for fine in ["", "debug", "WARN", "info,hyper=off", "mooncake_master", "[span]=trace", "tokio=debug"]
        {
            assert_eq!(event_filter(fine, "--log", "info").1, None, "{fine}");
        }
        for (odd, fallback) in
            [("nonsense", "info"), ("a,b", "info"), ("=,=", "info"), ("a=nonsense", "info")]
        {
            let (filter, warning) = event_filter(odd, "--log", "info");
            let warning = warning.unwrap();
            assert!(warning.contains("--log") && warning.contains(odd), "{warning}");
            assert!(filter.to_string().contains(fallback), "{filter}");
        }
    }
}
