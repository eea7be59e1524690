//! `mooncake_client`: process of a full client. Arguments in, exit status out.
#![allow(clippy::print_stderr, reason = "errors of the start go to the terminal")]

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::process::event_filter;
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::host_port;
use mooncake_core::settings::Environment;
use mooncake_core::settings::values::{bytes, number, seconds, switch, within};
use mooncake_core::web_origin::AllowedHosts;
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_engine::flags;
use mooncake_transport::admission::raise_descriptor_limit;
use mooncake_transport::bind_address::bind_address;
use mooncake_transport::net::default_host;
use mooncake_transport::private_files::FileMode;
use tokio::signal::unix::{SignalKind, signal};

use crate::client_port;
use crate::config::ClientEnvironment;
use mooncake_client::local::{DEFAULT_PORT, LocalServer, LocalServerConfig, default_path};
use mooncake_client::{Client, ClientPages, OffloadConfig};
use mooncake_protocol::server::RunningServer;
use mooncake_protocol::wire::DrainProgress;

/// Offers memory to a cluster and serves the processes of this host (Python: `setup_dummy`) over a
/// Unix socket with shared memory.
#[derive(Debug, Parser)]
#[command(name = "mooncake_client", version)]
struct Flags {
    /// Name or address of this host for other nodes, where the port is opened; 0.0.0.0 selects an
    /// address, and opens the port on all. host:port also fixes the name of the segment, which is
    /// otherwise the host with a random port
    #[arg(long, default_value = "0.0.0.0")]
    host: String,
    /// Address of this host at which every port listens; 0.0.0.0 or :: for all. Without it,
    /// loopback for a loopback --host, else all [environment: MC_BIND_ADDRESS]
    #[arg(long = "bind_address")]
    bind_address: Option<String>,
    /// Port that accepts connections once the process is ready, and number in the path of the
    /// socket: /tmp/mooncake_client_<port>.sock. Not opened if only --ipc_socket_path is given
    /// [default: 50052]
    #[arg(long, value_parser = number::<u16>)]
    port: Option<u16>,
    /// Path of the socket, instead of the one that --port selects
    #[arg(long = "ipc_socket_path")]
    socket_path: Option<PathBuf>,
    /// Permissions of the socket, in octal. With permissions for other users, the kernel's identity
    /// of a connecting process is not checked
    #[arg(long = "ipc_socket_mode", default_value = "600", value_parser = mode)]
    socket_mode: u32,
    /// Folders below which a master may name the folder for shared files, with commas or colons
    /// between [environment: MOONCAKE_FS_ROOTS]
    #[arg(long = "fs_roots", value_parser = ClientEnvironment::fs_roots)]
    // Without the path, the flag would take one folder at a time.
    fs_roots: Option<::std::vec::Vec<PathBuf>>,
    /// Permissions of shared files, in octal [environment: MOONCAKE_FILE_MODE]
    #[arg(long = "file_mode")]
    file_mode: Option<FileMode>,
    /// Memory offered to the cluster
    #[arg(long = "global_segment_size", default_value = "4 GB", value_parser = bytes)]
    segment: u64,
    /// Offer more memory than the host and the control groups of the process have [environment:
    /// MOONCAKE_ALLOW_OVERCOMMIT]
    #[arg(long = "allow_overcommit", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    allow_overcommit: bool,
    /// Maximum time in seconds for a graceful exit after SIGTERM: objects without another replica
    /// move to other clients with free space. Meanwhile objects stay readable, and none are added.
    /// A second signal ends the process at once. SIGINT does not wait
    #[arg(long = "drain_on_term", default_value = "5", value_parser = seconds)]
    drain: Duration,
    /// Memory for values outside of shared memory; not needed for serving
    #[arg(long = "local_buffer_size", default_value = "0", value_parser = bytes)]
    local_buffer: u64,
    /// Address of the master
    #[arg(long = "master_server_address", default_value = "127.0.0.1:50051")]
    master: String,
    /// Metadata service of the transfer engine: a URL, or P2PHANDSHAKE
    #[arg(long = "metadata_server", default_value = "http://127.0.0.1:8080/metadata")]
    metadata: String,
    /// Transport
    #[arg(long, default_value = "tcp")]
    protocol: String,
    /// Devices of the transport
    #[arg(long = "device_names", default_value = "")]
    devices: String,
    /// Minimum number of threads; at most one per processor is started
    #[arg(long, default_value = "1", value_parser = at_most_a_million)]
    threads: usize,
    /// Tenant of every key
    #[arg(long = "tenant_id", default_value = "default")]
    tenant: String,
    /// Maximum number of processes served at the same time
    #[arg(long = "max_clients", default_value = "256", value_parser = one_to_a_million)]
    max_clients: usize,
    /// Maximum size of the memory that one process may share
    #[arg(long = "max_client_memory", default_value = "1 TB", value_parser = some_bytes)]
    max_memory: u64,
    /// Maximum number of concurrent calls of one process
    #[arg(long = "max_client_requests", default_value_t = 64, value_parser = at_least_one)]
    max_calls: u32,
    /// Seconds without a heartbeat after which a process is forgotten
    #[arg(long = "client_ttl", default_value = "10", value_parser = seconds)]
    ttl: Duration,
    /// Move objects to an SSD when memory is full, as the MOONCAKE_OFFLOAD_* variables configure
    #[arg(long = "enable_offload", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    offload: bool,
    /// Serve reads from that SSD; no node could read its objects otherwise, so false is refused
    /// with `--enable_offload`
    #[arg(long = "start_offload_rpc_server", default_value = "true", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    offload_server: bool,
    /// Serve /health and /metrics over HTTP
    #[arg(long = "enable_http_server", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    http: bool,
    /// Port of the HTTP server
    #[arg(long = "http_port", default_value_t = 9300, value_parser = number::<u16>)]
    http_port: u16,
    /// Names, with commas between them, by which pages in browsers may call the HTTP server
    /// [environment: MC_ALLOWED_HOSTS]
    #[arg(long = "allowed_hosts")]
    allowed_hosts: Option<AllowedHosts>,
    /// Log levels in the syntax of RUST_LOG, which this flag overrides
    #[arg(long = "log", default_value = "")]
    log: String,
}

/// Parses a number of things of which a process has at least one.
fn one_to_a_million(text: &str) -> Result<usize, String> {
    within(text, 1, 1_000_000)
}

/// Parses a number of calls, at least one.
fn at_least_one(text: &str) -> Result<u32, String> {
    within(text, 1, u32::MAX)
}

/// Parses a size of at least one byte.
fn some_bytes(text: &str) -> Result<u64, String> {
    bytes(text).and_then(|size| if size > 0 { Ok(size) } else { Err("must be more than 0".into()) })
}

/// Parses a number of things of which a process has at most a million.
fn at_most_a_million(text: &str) -> Result<usize, String> {
    within(text, 0, 1_000_000)
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600);
    mode.ok_or_else(|| {
        "must be octal permissions that allow the user to read and write, such as 600 or 660".into()
    })
}

/// Runs a client process until it is interrupted or terminated. The first argument is the name of
/// the program. Returns the exit status: 0, 1 after a fatal error, another number for invalid
/// arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let (flags, notes) = match parse(arguments) {
        Ok(parsed) => parsed,
        Err(error) => {
            // There is no other channel to report a failure here.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let environment = ClientEnvironment::read();
    let (filter, warning) = match (&environment.log, flags.log.as_str()) {
        (Some(log), "") => event_filter(log, "RUST_LOG", "info"),
        (None, "") => event_filter("info", "RUST_LOG", "info"),
        (_, log) => event_filter(log, "--log", "info"),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    for note in notes.into_iter().chain(warning) {
        tracing::warn!("{note}");
    }
    raise_descriptor_limit();
    match serve_until_stopped(flags, environment) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "client failed");
            1
        }
    }
}

/// Parses the arguments. Returns the flags, and remarks for the log.
fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<(Flags, Vec<String>), clap::Error> {
    let mut command = flags::command(Flags::command());
    let expanded = flags::expand(arguments, &Environment::of_process(), flags::kinds(&command))
        .map_err(|error| command.error(clap::error::ErrorKind::ValueValidation, error.message()))?;
    let flags = Flags::from_arg_matches(&command.try_get_matches_from_mut(expanded.arguments)?)?;
    Ok((flags, expanded.notes))
}

/// Maximum time for work on other threads after the client has left.
const LAST_WORK: Duration = Duration::from_secs(2);

fn serve_until_stopped(flags: Flags, environment: ClientEnvironment) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.min(8).max(flags.threads.min(64)))
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve(flags, environment));
    runtime.shutdown_timeout(LAST_WORK);
    outcome
}

async fn serve(flags: Flags, environment: ClientEnvironment) -> Result<()> {
    // Install the signal handlers first, so that a signal during the start is not lost.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let Started { client, server, pages, port } = tokio::select! {
        started = start(&flags, &environment) => started?,
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    tracing::info!(socket = %server.path().display(), name = client.hostname(), segment = flags.segment, "ready");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => if !flags.drain.is_zero() && !is_planted("no-drain-on-term") {
            let grace = flags.drain;
            let stays = environment.config.segment_file.is_some();
            tokio::select! {
                () = take_no_more(&client, grace), if stays => {}
                () = drain(&client, grace), if !stays => {}
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        },
    }
    tracing::info!("stopping");
    drop(port);
    if let Some(pages) = pages {
        pages.stop().await;
    }
    if let Some(server) = Arc::into_inner(server) {
        server.stop().await;
    }
    client.close().await
}

/// Interval between two requests for the progress of the drain.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Stops accepting objects, and requests that the master moves objects without another replica to
/// other clients. Returns when that is done and no lease on the objects holds, or at the end of
/// `grace`.
async fn drain(client: &Client, grace: Duration) {
    if client.segments().ids().is_empty() {
        return;
    }
    tracing::info!(seconds = grace.as_secs(), "draining; a second SIGTERM ends the process at once");
    let mut over = std::pin::pin!(tokio::time::sleep(grace));
    let moved = tokio::select! {
        moved = move_away(client) => moved,
        () = &mut over => {
            let left = client.segments().drain().await.map_or_else(|_| "an unknown number".into(), |now| now.left.to_string());
            tracing::warn!(seconds = grace.as_secs(), left, "drain timed out; objects without another replica are lost; raise --drain_on_term");
            return;
        }
    };
    match moved {
        Ok(done) if done.left > 0 => {
            tracing::warn!(
                objects = done.moved,
                left = done.left,
                "drain ended early; objects that no other client has space for are lost"
            );
        }
        Ok(done) => tracing::info!(objects = done.moved, bytes = done.bytes, "drained"),
        Err(error) => {
            tracing::info!(%error, "the master cannot move objects away from this client");
            if leave_after(client, grace).await {
                over.await;
            }
        }
    }
}

/// Requests that the master moves objects without another replica away, until no object is left to
/// move.
async fn move_away(client: &Client) -> Result<DrainProgress> {
    let mut last = None;
    loop {
        match client.segments().drain().await {
            Ok(now) if now.done => return Ok(now),
            Ok(now) => {
                if last.as_ref() != Some(&now) {
                    tracing::info!(objects = now.moved, bytes = now.bytes, left = now.left, "moved");
                }
                last = Some(now);
            }
            // The master, or the next one, may respond to the next request.
            Err(error) if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => {
                tracing::debug!(%error, "cannot query the progress of the drain");
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
    }
}

/// Stops accepting objects. Returns false if the master cannot be reached.
async fn leave_after(client: &Client, grace: Duration) -> bool {
    // Segments end with the process, not by their own timeout at the same time.
    let beyond = grace + Duration::from_secs(60);
    for segment in client.segments().ids() {
        if let Err(error) = client.segments().unmount_after(segment, beyond).await {
            tracing::warn!(%segment, %error, "cannot drain segment");
            return false;
        }
    }
    true
}

/// Stops accepting objects, and returns at the end of `grace`. Returns at once if the master cannot
/// be reached.
async fn take_no_more(client: &Client, grace: Duration) {
    if leave_after(client, grace).await {
        tokio::time::sleep(grace).await;
    }
}

/// Parts of the process that serve.
struct Started {
    client: Client,
    server: Arc<LocalServer>,
    pages: Option<ClientPages>,
    port: Option<RunningServer>,
}

/// Returns the settings of the disk, if there is to be one.
///
/// # Errors
/// `INVALID_PARAMS` for a disk without a server, whose objects no node could read.
fn offload(flags: &Flags, environment: &ClientEnvironment) -> Result<Option<OffloadConfig>> {
    if flags.offload && !flags.offload_server {
        return Err(Error::invalid(
            "cannot offer disk: no node could read the objects on it. enable_offload=true \
             start_offload_rpc_server=false; leave out one of the two flags",
        ));
    }
    Ok(flags.offload.then(|| environment.offload("")))
}

async fn start(flags: &Flags, environment: &ClientEnvironment) -> Result<Started> {
    if !flags.devices.is_empty() && flags.protocol != "rdma" {
        tracing::warn!(devices = flags.devices, "transport {} ignores --devices", flags.protocol);
    }
    let mut config = environment.config.clone();
    if let Some(address) = &flags.bind_address {
        config.bind_address.clone_from(address);
    }
    if let Some(hosts) = &flags.allowed_hosts {
        config.allowed_hosts = hosts.clone();
    }
    let bound = bind_address(&config.bind_address, None)?.filter(|address| !address.is_unspecified());
    let (host, name_port) = host_port::split(&flags.host);
    let name = match host {
        // Other nodes could not connect to these names.
        "" | "0.0.0.0" | "::" => bound.unwrap_or_else(default_host).to_string(),
        host => host.to_owned(),
    };
    let name = match name_port {
        Some(port) => host_port::join(&name, port),
        None => name,
    };
    config.allow_overcommit |= flags.allow_overcommit;
    config.fs_roots = flags.fs_roots.clone().unwrap_or(config.fs_roots);
    config.file_mode = flags.file_mode.unwrap_or(config.file_mode);
    let local = LocalServerConfig {
        path: flags.socket_path.clone().unwrap_or_else(|| default_path(flags.port.unwrap_or(DEFAULT_PORT))),
        mode: flags.socket_mode,
        max_clients: flags.max_clients,
        max_memory: flags.max_memory,
        max_calls: flags.max_calls.max(1),
        silence: flags.ttl.max(Duration::from_secs(1)),
    };
    (config.directory, config.handshake) = ClientEnvironment::meeting(&flags.metadata);
    config.offload = offload(flags, environment)?;
    let client = Client::builder()
        .config(config)
        .local_hostname(name)
        .metadata(&flags.metadata)
        .master(flags.master.as_str())
        .segment(flags.segment)
        .local_buffer(flags.local_buffer)
        .protocol(&flags.protocol)
        .transports(ClientEnvironment::transports(&flags.protocol, &flags.devices)?)
        .tenant(&flags.tenant)
        .connect()
        .await
        .map_err(|error| {
            if flags.metadata.contains("://") && error.to_string().contains(&flags.metadata) {
                return error.context(
                    "if the cluster has no metadata server, give every node \
                     --metadata_server=P2PHANDSHAKE",
                );
            }
            error
        })?;
    let server = Arc::new(LocalServer::start(client.clone(), local)?);
    let pages = match flags.http {
        true => {
            let served = Arc::downgrade(&server);
            let more = Box::new(move || local_gauges(&served));
            let pages = ClientPages::serve_with(&client, "", flags.http_port, more).await?;
            tracing::info!(at = %pages.address(), "HTTP");
            Some(pages)
        }
        false => None,
    };
    // The port is last, because it says that the process is ready.
    let port = match (flags.port, &flags.socket_path) {
        (None, Some(_)) => None,
        (port, _) => {
            let host = client.bound_address().map_or_else(|| host.to_owned(), |address| address.to_string());
            let port = client_port::listen(&host, port.unwrap_or(DEFAULT_PORT), server.path()).await?;
            tracing::info!(at = %port.local_addr(), "port");
            Some(port)
        }
    };
    Ok(Started { client, server, pages, port })
}

/// Metrics of the server for local processes, as gauges.
fn local_gauges(server: &Weak<LocalServer>) -> Vec<(&'static str, &'static str, u64)> {
    let stats = server.upgrade().map(|server| server.stats()).unwrap_or_default();
    vec![
        ("mooncake_client_local_clients", "Connected processes", stats.clients as u64),
        ("mooncake_client_local_memories", "Shared memory segments", stats.memories as u64),
        ("mooncake_client_local_shared_bytes", "Size of the shared memory in bytes", stats.bytes),
        ("mooncake_client_local_connections", "Connections for calls", stats.connections as u64),
        ("mooncake_client_local_requests", "Calls in progress", stats.calls as u64),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Flags, String> {
        let all = std::iter::once("mooncake_client").chain(arguments.iter().copied());
        parse(all.map(OsString::from)).map(|(flags, _)| flags).map_err(|error| error.to_string())
    }

    #[test]
    fn a_disk_without_server_is_refused() {
        let environment = ClientEnvironment::read();
        let disk = |arguments: &[&str]| offload(&parsed(arguments).unwrap(), &environment);
        assert!(disk(&["--start_offload_rpc_server=false"]).unwrap().is_none());
        assert!(disk(&["--enable_offload"]).unwrap().is_some());
        let error = disk(&["--enable_offload", "--start_offload_rpc_server=false"]).unwrap_err();
        assert!(error.to_string().contains("start_offload_rpc_server=false"), "{error}");
    }

    #[test]
    fn times_have_units() {
        let flags = parsed(&["--client_ttl=20 s", "--drain_on_term=1m"]).unwrap();
        assert_eq!((flags.ttl, flags.drain), (Duration::from_secs(20), Duration::from_secs(60)));
        assert!(parsed(&["--client_ttl=soon"]).is_err());
    }

    #[test]
    fn flags_in_every_form() {
        let flags = parsed(&[]).unwrap();
        assert_eq!((flags.port, flags.segment, flags.socket_mode, flags.http), (None, 4 << 30, 0o600, false));
        for form in [
            &["--port=7"][..],
            &["-port=7"],
            &["--port", "7"],
            &["--port=8", "--port=7"],
            &["--port=0x7"],
            &["--port=+7"],
        ] {
            assert_eq!(parsed(form).unwrap().port, Some(7), "{form:?}");
        }
        assert_eq!(parsed(&["--global_segment_size=0x2000000"]).unwrap().segment, 32 << 20);
        assert_eq!(parsed(&["--global-segment-size=512 MB"]).unwrap().segment, 512 << 20);
        for (form, on) in [
            ("--enable_http_server", true),
            ("-enable_http_server=true", true),
            ("--enable_http_server=false", false),
            ("--noenable_http_server", false),
        ] {
            assert_eq!(parsed(&[form]).unwrap().http, on, "{form}");
        }
    }

    #[test]
    fn invalid_arguments_error_states_cause() {
        for (arguments, says) in [
            (&["--prot=7"][..], "--port"),
            (&["--port=x"], "--port"),
            (&["--global_segment_size=lots"], "must be a size"),
            (&["--ipc_socket_mode=077"], "octal"),
            (&["--enable_offload=perhaps"], "--enable_offload"),
        ] {
            let error = parsed(arguments).unwrap_err();
            assert!(error.contains(says), "{arguments:?}: {error}");
        }
    }
}
