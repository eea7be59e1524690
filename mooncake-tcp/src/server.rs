//! Data port: serves reads and writes of registered memory by peers, one task per connection.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::{Connections, ListenerLimits};
use mooncake_transport::config::TcpConfig;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::hello::Instance;
use crate::session::{Session, Settings};
use crate::socket::{self, Buffers};
use crate::staging_pool;
use crate::table::{MemoryTable, View};

const BIND_ATTEMPTS: usize = 500;

/// Data port. Dropping it closes the port and every connection.
#[derive(Debug)]
pub(crate) struct Server {
    local_addr: SocketAddr,
    accept_task: AbortHandle,
}

impl Server {
    /// Binds a data port and serves it on `runtime`.
    pub(crate) fn start(
        config: &TcpConfig,
        instance: Instance,
        table: Arc<MemoryTable>,
        runtime: &Handle,
    ) -> Result<Self> {
        let listener = bind(config)?;
        let local_addr = listener.local_addr().map_err(Error::from)?;
        let _guard = runtime.enter();
        let listener = TcpListener::from_std(listener).map_err(Error::from)?;
        let settings = Settings {
            instance,
            progress_timeout: config.progress_timeout,
            buffers: Buffers { send: config.send_buffer, receive: config.receive_buffer },
            max_connections: config.max_served,
        };
        let accept_task = runtime.spawn(accept(ParentOnly::new(listener), table, settings)).abort_handle();
        Ok(Self { local_addr, accept_task })
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accept_task.abort();
    }
}

fn bind(config: &TcpConfig) -> Result<std::net::TcpListener> {
    let (first, last) = (*config.ports.start(), *config.ports.end());
    let mut rng = Rng::from_os();
    let attempts = if first == last { 1 } else { BIND_ATTEMPTS };
    let mut failure = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..attempts {
        let port = rng.range(u64::from(first)..u64::from(last) + 1);
        match socket::listen(config.bind, u16::try_from(port).unwrap_or(first)) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => failure = error,
            Err(error) => {
                failure = error;
                break;
            }
        }
    }
    let host = config.bind.map_or("every address".into(), |addr| addr.to_string());
    let ports = if first == last { first.to_string() } else { format!("{first}-{last}") };
    let advice = match failure.kind() {
        io::ErrorKind::AddrInUse => "port is in use; stop its owner or choose other data ports",
        io::ErrorKind::AddrNotAvailable => "this machine has no such address",
        io::ErrorKind::PermissionDenied => "not permitted; ports below 1024 need a privilege",
        _ => "the system refused",
    };
    let message = format!("cannot listen for data on {host}, port {ports}: {advice}");
    Err(Error::new(ErrorCode::InvalidParams, message).with_source(failure))
}

async fn accept(listener: ParentOnly<TcpListener>, table: Arc<MemoryTable>, settings: Settings) {
    let staging_pool = Arc::new(staging_pool::staging_pool());
    // Each session limits the pauses of its peer by itself.
    let mut connections = Connections::new(ListenerLimits::new("data", settings.max_connections, 2));
    loop {
        let (stream, peer) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let (view, staging_pool) = (View::new(table.clone()), staging_pool.clone());
        connections.admit(|slot| async move {
            let end = Session::new(stream, view, staging_pool, settings, slot).run().await;
            tracing::debug!(%peer, ?end, "data connection closed");
        });
    }
}
