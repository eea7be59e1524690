//! `mooncake_client`: an owner as a process. Arguments in, exit status out.
#![allow(clippy::print_stderr, reason = "what is wrong at the start goes to the terminal")]

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use mooncake_engine::flags::normal;
use mooncake_transport::admission::raise_descriptor_limit;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{ClientEnvironment, bytes, switch};
use mooncake_client::local::{DEFAULT_PORT, LocalServer, LocalServerConfig, default_path};
use mooncake_client::{Client, ClientConfig, ClientPages, OffloadConfig};

/// Offers memory to a cluster, and serves the processes of this host (Python: `setup_dummy`) over a Unix socket, with memory they share.
#[derive(Debug, Parser)]
#[command(name = "mooncake_client", version, args_override_self = true)]
struct Flags {
    /// Name or address that others know this host by; 0.0.0.0 finds it out
    #[arg(long, default_value = "0.0.0.0")]
    host: String,
    /// Number that names the socket: /tmp/mooncake_client_<port>.sock. No port is opened
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// Path of the socket, in place of the one --port names
    #[arg(long = "ipc_socket_path")]
    socket_path: Option<PathBuf>,
    /// Permissions of the socket, in octal. With any for others than its user, the kernel is not asked who connects
    #[arg(long = "ipc_socket_mode", default_value = "600", value_parser = mode)]
    socket_mode: u32,
    /// Memory offered to the cluster
    #[arg(long = "global_segment_size", default_value = "4 GB", value_parser = bytes)]
    segment: u64,
    /// Offer more memory than the host and the control groups of the process have [environment: MOONCAKE_ALLOW_OVERCOMMIT]
    #[arg(long = "allow_overcommit", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    allow_overcommit: bool,
    /// Seconds between SIGTERM and the end: objects here stay readable, and none are added. A second signal ends at once. SIGINT does not wait
    #[arg(long = "drain_on_term", default_value_t = 5)]
    drain: u32,
    /// Memory for values that are in no shared memory; none is needed to serve
    #[arg(long = "local_buffer_size", default_value = "0", value_parser = bytes)]
    local_buffer: u64,
    /// Address of the master
    #[arg(long = "master_server_address", default_value = "127.0.0.1:50051")]
    master: String,
    /// Where members find each other: a URL, or P2PHANDSHAKE
    #[arg(long = "metadata_server", default_value = "http://127.0.0.1:8080/metadata")]
    metadata: String,
    /// Wire
    #[arg(long, default_value = "tcp")]
    protocol: String,
    /// Devices of that wire
    #[arg(long = "device_names", default_value = "")]
    devices: String,
    /// Threads, at least; one for each processor are started at most
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Tenant of every key
    #[arg(long = "tenant_id", default_value = "default")]
    tenant: String,
    /// Processes served at once
    #[arg(long = "max_clients", default_value_t = 256)]
    max_clients: usize,
    /// Memory that one of them may share
    #[arg(long = "max_client_memory", default_value = "1 TB", value_parser = bytes)]
    max_memory: u64,
    /// Calls of one of them under way at once
    #[arg(long = "max_client_requests", default_value_t = 64)]
    max_calls: u32,
    /// Seconds of silence after which one is forgotten
    #[arg(long = "client_ttl", default_value_t = 10)]
    ttl: u32,
    /// Keep objects that memory has no room for on an SSD; where and how MOONCAKE_OFFLOAD_* says
    #[arg(long = "enable_offload", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    offload: bool,
    /// Serve reads from that SSD; without it nobody can read there
    #[arg(long = "start_offload_rpc_server", default_value = "true", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    offload_server: bool,
    /// Serve /health and /metrics over HTTP
    #[arg(long = "enable_http_server", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, action = ArgAction::Set)]
    http: bool,
    /// At this port, of every address
    #[arg(long = "http_port", default_value_t = 9300)]
    http_port: u16,
    /// Levels of the log, as in RUST_LOG, which it goes before
    #[arg(long = "log", default_value = "")]
    log: String,
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600);
    mode.ok_or_else(|| {
        "must be octal permissions that leave reading and writing to the user, such as 600 or 660".into()
    })
}

/// Runs an owner as the arguments say (the first is the program's name), until it is interrupted or terminated. The exit status: 0, 1
/// when it cannot go on, another for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let flags = match parse(arguments) {
        Ok(flags) => flags,
        Err(error) => {
            // Nobody is left to be told when even this fails.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let environment = ClientEnvironment::read();
    let log = if flags.log.is_empty() {
        environment.log.clone().unwrap_or_else(|| "info".into())
    } else {
        flags.log.clone()
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(log))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    raise_descriptor_limit();
    match serve_until_stopped(flags, environment) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "cannot go on");
            1
        }
    }
}

fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Flags, clap::Error> {
    let mut command = Flags::command();
    let switches: Vec<String> = command
        .get_arguments()
        .filter(|argument| argument.get_num_args().is_some_and(|n| n.min_values() == 0))
        .filter_map(|argument| argument.get_long().map(str::to_owned))
        .collect();
    let is_switch = |name: &str| switches.iter().any(|switch| switch == name);
    let arguments = arguments.into_iter().map(|argument| normal(argument, is_switch));
    Flags::from_arg_matches(&command.try_get_matches_from_mut(arguments)?)
}

/// Time that work on other threads has to end in after the client has left.
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
    // Taken first, so that a signal during the start is not lost.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (client, server, pages) = tokio::select! {
        started = start(&flags, &environment) => started?,
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    tracing::info!(socket = %server.path().display(), name = client.hostname(), segment = flags.segment, "ready");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => if flags.drain > 0 && !is_planted("no-drain-on-term") {
            let grace = Duration::from_secs(flags.drain.into());
            tokio::select! {
                () = drain(&client, grace) => {}
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        },
    }
    tracing::info!("stopping");
    if let Some(pages) = pages {
        pages.stop().await;
    }
    if let Some(server) = Arc::into_inner(server) {
        server.stop().await;
    }
    client.close().await
}

/// Takes no more objects, and returns when readers have had the time to go elsewhere. Returns at once if the master cannot be told.
async fn drain(client: &Client, grace: Duration) {
    tracing::info!(
        seconds = grace.as_secs(),
        "draining: objects stay readable, a second SIGTERM ends at once"
    );
    // Segments go when the process does, and not by themselves at the same moment.
    let beyond = grace + Duration::from_secs(60);
    for segment in client.segments() {
        if let Err(error) = client.unmount_after(segment, beyond).await {
            tracing::warn!(%segment, %error, "cannot drain");
            return;
        }
    }
    tokio::time::sleep(grace).await;
}

type Started = (Client, Arc<LocalServer>, Option<ClientPages>);

async fn start(flags: &Flags, environment: &ClientEnvironment) -> Result<Started> {
    if !flags.devices.is_empty() && flags.protocol != "rdma" {
        tracing::warn!(devices = flags.devices, "devices are not used with {}", flags.protocol);
    }
    let host = match flags.host.as_str() {
        // Nobody else could find us by these.
        "" | "0.0.0.0" | "::" | "[::]" => mooncake_transport::net::default_host().to_string(),
        host => host.to_owned(),
    };
    let mut config = ClientConfig::default();
    environment.apply(&mut config);
    config.allow_overcommit |= flags.allow_overcommit;
    let local = LocalServerConfig {
        path: flags.socket_path.clone().unwrap_or_else(|| default_path(flags.port)),
        mode: flags.socket_mode,
        max_clients: flags.max_clients,
        max_memory: flags.max_memory,
        max_calls: flags.max_calls.max(1),
        silence: Duration::from_secs(u64::from(flags.ttl.max(1))),
    };
    (config.directory, config.handshake) = ClientEnvironment::meeting(&flags.metadata);
    config.offload =
        flags.offload.then(|| OffloadConfig { serve: flags.offload_server, ..environment.offload("") });
    let client = Client::builder()
        .config(config)
        .local_hostname(host)
        .metadata(&flags.metadata)
        .master(flags.master.as_str())
        .segment(flags.segment)
        .local_buffer(flags.local_buffer)
        .protocol(&flags.protocol)
        .wires(ClientEnvironment::wires(&flags.protocol, &flags.devices)?)
        .tenant(&flags.tenant)
        .connect()
        .await?;
    let server = Arc::new(LocalServer::start(client.clone(), local)?);
    let pages = match flags.http {
        true => {
            let served = Arc::downgrade(&server);
            let figures = Box::new(move || figures(&served));
            let pages = client.serve_pages_with("0.0.0.0", flags.http_port, figures).await?;
            tracing::info!(at = %pages.address(), "HTTP");
            Some(pages)
        }
        false => None,
    };
    Ok((client, server, pages))
}

/// What is served, as gauges.
fn figures(server: &Weak<LocalServer>) -> Vec<(&'static str, &'static str, u64)> {
    let stats = server.upgrade().map(|server| server.stats()).unwrap_or_default();
    vec![
        ("mooncake_client_local_clients", "Processes served", stats.clients as u64),
        ("mooncake_client_local_memories", "Pieces of memory they share", stats.memories as u64),
        ("mooncake_client_local_shared_bytes", "Bytes they share", stats.bytes),
        ("mooncake_client_local_connections", "Connections for their calls", stats.connections as u64),
        ("mooncake_client_local_requests", "Calls of theirs under way", stats.calls as u64),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Flags, String> {
        let all = std::iter::once("mooncake_client").chain(arguments.iter().copied());
        parse(all.map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_in_every_form() {
        let flags = parsed(&[]).unwrap();
        assert_eq!(
            (flags.port, flags.segment, flags.socket_mode, flags.http),
            (50052, 4 << 30, 0o600, false)
        );
        for form in [&["--port=7"][..], &["-port=7"], &["--port", "7"], &["--port=8", "--port=7"]] {
            assert_eq!(parsed(form).unwrap().port, 7, "{form:?}");
        }
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
    fn what_is_wrong_is_named() {
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
