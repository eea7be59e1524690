//! Shared clients and their owner in one process, with real sockets and real memory. Tests with
//! deaths are in `processes/local_clients.rs`.

mod lent_memory;
mod limits;
mod pool;
mod strangers;
mod verbs;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::fork::ParentOnly;
use mooncake_ipc::socket::{RecordSocket, Trust};
use mooncake_store::client::Client;
use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig, LocalStats, hello};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::connection::Connection;
use tempfile::TempDir;
use tokio::net::UnixStream;

/// Owner with a cluster of its own.
struct Host {
    server: LocalServer,
    client: Client,
    folder: TempDir,
}

impl Host {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut LocalServerConfig)) -> Self {
        Self::with_clock(SystemClock::shared(), MasterOptions::default(), change).await
    }

    /// Starts an owner whose client has this clock.
    async fn with_clock(
        clock: SharedClock,
        options: MasterOptions,
        change: impl FnOnce(&mut LocalServerConfig),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let master: Arc<Master> = Arc::new(Master::new(options).unwrap());
        let builder = Client::builder().master(master).segment(64 << 20).clock(clock);
        let client = builder.connect().await.unwrap();
        let mut config =
            LocalServerConfig { path: folder.path().join("owner.sock"), ..LocalServerConfig::default() };
        change(&mut config);
        let server = LocalServer::start(client.clone(), config).unwrap();
        Self { server, client, folder }
    }

    fn config(&self) -> LocalConfig {
        LocalConfig { buffer: 4 << 20, ..LocalConfig::at(self.server.path().to_str().unwrap()) }
    }

    async fn connect(&self) -> LocalClient {
        LocalClient::connect(self.config()).await.unwrap()
    }

    /// Waits until the statistics of shared clients satisfy `fine`. The test has a time limit of
    /// its own.
    async fn until(&self, fine: impl Fn(&LocalStats) -> bool) {
        while !fine(&self.server.stats()) {
            tokio::task::yield_now().await;
        }
    }
}

/// Connects to an owner as a process that follows no other rule than the hello.
async fn stranger(path: &Path, file: Option<&std::fs::File>) -> Connection<ParentOnly<UnixStream>> {
    let socket = RecordSocket::new(UnixStream::connect(path).await.unwrap(), Trust::SameUser).unwrap();
    socket.send(&hello::encode(), file.map(AsFd::as_fd)).await.unwrap();
    hello::check(&socket.receive().await.unwrap().0).unwrap();
    Connection::new(socket.into_stream(), 1 << 20)
}

/// Returns a unique key.
fn key() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("key-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns bytes that depend on the seed and the position.
fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}
