//! `mooncake_http_metadata_server`: a metadata directory in memory, over HTTP.

use std::ffi::OsString;
use std::sync::Arc;

use clap::Parser;
use mooncake_core::fork::ParentOnly;
use mooncake_core::memory::return_large_buffers;
use mooncake_core::meta::MemoryMetadata;
use mooncake_core::settings::{Environment, apply};
use mooncake_core::web_origin::AllowedHosts;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_metadata::http_routes::{self, ServerSettings, VARIABLES};
use mooncake_transport::admission::raise_descriptor_limit;
use mooncake_transport::bind_address::loopback_address;
use mooncake_transport::http_server;
use mooncake_transport::net::HostPort;
use tokio::net::TcpListener;

/// Maximum number of connections.
const CONNECTIONS: usize = 4096;

/// Serves the addresses and descriptors of transfer engines, which find each other at
/// http://HOST:PORT/metadata.
#[derive(Debug, Parser)]
#[command(name = "mooncake_http_metadata_server", version)]
struct Arguments {
    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    host: String,
    /// Port to listen on. 0 selects a free one, which is printed.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Names, with commas between them, by which pages in browsers may call the server.
    #[arg(long = "allowed_hosts", default_value = "")]
    allowed_hosts: AllowedHosts,
    /// Log level.
    #[arg(long = "log_level", default_value = "info")]
    log_level: String,
}

/// Runs the server until it is interrupted or terminated. Returns the exit status: 0, 1 for a
/// failure, or 2 for invalid arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    match super::parse::<Arguments>(arguments) {
        Ok(arguments) => super::status("mooncake_http_metadata_server", serve(&arguments)),
        Err(status) => status,
    }
}

fn serve(arguments: &Arguments) -> Result<()> {
    super::log(&arguments.log_level)?;
    let mut settings = ServerSettings::default();
    for ignored in apply(VARIABLES, &mut settings, &Environment::of_process()) {
        tracing::warn!("{ignored}");
    }
    settings.check(&arguments.host)?;
    if settings.pages.token.is_empty() && loopback_address(&arguments.host).is_none() {
        tracing::warn!(host = arguments.host, "metadata server listens without a token");
    }
    raise_descriptor_limit();
    return_large_buffers();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let at = HostPort::new(arguments.host.as_str(), arguments.port).to_string();
        let listener = TcpListener::bind(&at).await.map_err(|error| {
            Error::new(ErrorCode::RpcFail, format!("cannot listen at {at} (--host, --port): {error}"))
        })?;
        println!("http://{}/metadata", listener.local_addr()?);
        let metadata = Arc::new(MemoryMetadata::with_limits(settings.limits));
        let limits = http_server::http_limits("metadata", CONNECTIONS, 2);
        http_server::serve(
            ParentOnly::new(listener),
            http_routes::pages_with(metadata, Arc::new(()), &settings.pages),
            limits,
            arguments.allowed_hosts.clone().with(&arguments.host).with_own_name(),
            async {
                if let Err(error) = super::wait_for_stop_signal().await {
                    tracing::error!(%error, "no signals");
                }
            },
        )
        .await;
        Ok(())
    })
}
