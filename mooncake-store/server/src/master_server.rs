//! A master with its servers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::clock::{Rng, SharedClock, SystemClock};
use mooncake_core::host_port;
use mooncake_core::meta::{MemoryLimits, MemoryMetadata, MetadataBackend};
use mooncake_metadata::{http::HttpMetadata, open_folder};
use prometheus::core::Collector;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::counting::Requests;
use super::dial_back;
use super::endpoint_state::EndpointState;
use super::event_stats::EventStats;
use super::events;
use super::http::{self, Pages};
use super::leader::Leadership;
use super::rates::Rates;
use super::rpc::Counted;
use super::scrape;
use super::snapshot_stats::SnapshotStats;
use super::snapshots::{self, SnapshotWriter};
use super::state::{LongCalls, State};
use super::ticker::Ticker;
use crate::config::{MasterConfig, tenants};
use mooncake_master::Master;
use mooncake_protocol::server::{RunningServer, Server, ServerOptions};
use mooncake_transport::admission::ByteBudget;

/// A running master with its servers. On drop it stops without waiting.
#[derive(Debug)]
pub struct MasterServer {
    pub(super) state: Arc<State>,
    pub(super) rpc: RunningServer,
    pub(super) pages: Vec<Pages>,
    _publisher: Option<events::Publisher>,
    pub(super) ticker: Ticker,
    snapshot_writer: Option<SnapshotWriter>,
    addresses: Addresses,
}

/// Addresses of a [`MasterServer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// RPC server.
    pub rpc: SocketAddr,
    /// Admin endpoints and metrics; `None` without feature `http`.
    pub admin: Option<SocketAddr>,
    /// Metadata service of the transfer engine, if enabled.
    pub metadata: Option<SocketAddr>,
    /// Publisher of events, if enabled.
    pub events: Option<SocketAddr>,
}

impl MasterServer {
    /// Binds all ports and starts the servers, on the current tokio runtime and the system clock.
    ///
    /// # Errors
    /// - `INVALID_PARAMS` if the configuration contradicts itself.
    /// - `RPC_FAIL` if a port cannot be bound, with the port and its flag.
    /// - `NOT_SUPPORTED` if the metadata service is enabled without feature `http`, or events
    ///   without feature `events-zmq`.
    pub async fn start(config: MasterConfig) -> Result<Self> {
        Self::start_with_clock(config, SystemClock::shared()).await
    }

    /// Starts a master like [`MasterServer::start`], with another clock.
    ///
    /// # Errors
    /// Those of [`MasterServer::start`].
    pub async fn start_with_clock(config: MasterConfig, clock: SharedClock) -> Result<Self> {
        let leadership = Arc::new(Leadership::single(clock.clone()));
        Self::start_as(config, clock, leadership, Duration::ZERO).await
    }

    /// Starts a master with a given leadership. `promised` is the longest promise of earlier
    /// leaders.
    pub(super) async fn start_as(
        config: MasterConfig,
        clock: SharedClock,
        leadership: Arc<Leadership>,
        promised: Duration,
    ) -> Result<Self> {
        let mut options = config.options.clone();
        let policy = config.tenant_policy.as_ref().map(tenants::Store::open).transpose()?;
        if let Some(policy) = &policy {
            options.tenants = Some(policy.read().await?);
        }
        let (allocator, eviction) = (&config.allocator, &config.eviction);
        let seed = Rng::from_os().next_u64();
        let master = Arc::new(Master::with_parts(options, allocator, eviction, clock, seed)?);
        master.note_promise(promised, &"metadata service");
        if let Some(snapshots) = config.snapshots.as_ref().filter(|snapshots| snapshots.restore) {
            snapshots::restore(snapshots, &config.cluster_id, &master).await?;
        }
        if let Some(limit) = config.connection_bytes {
            ByteBudget::of_process().set_limit(limit);
        }
        let options = ServerOptions { idle_timeout: config.rpc_idle, ..ServerOptions::default() };
        let address = host_port::join(&config.rpc_address, config.rpc_port);
        let rpc = Server::bind(&address, options).await?;
        let metadata = match config.metadata.as_ref().and_then(|server| server.storage_url.as_deref()) {
            Some(url) => open_folder(url).map_err(|error| error.context("--http_metadata_server_kept_in"))?,
            None => Arc::new(MemoryMetadata::with_limits(MemoryLimits::SERVER)),
        };
        let service_to_clean =
            config.clean_up.as_ref().and_then(|to| Some((to.server.as_deref()?, &to.token)));
        let published = match service_to_clean {
            Some((url, token)) => Arc::new(HttpMetadata::with_token(url, token)?),
            None => metadata.clone(),
        };
        let (feed, publisher, events) = match &config.events {
            None => (None, None, None),
            Some(wanted) => {
                let (feed, publisher, at) = events::start(wanted, master.clock().clone()).await?;
                let journal: Arc<dyn mooncake_master::Journal> = feed.clone();
                master.set_journal(&journal);
                (Some(feed), Some(publisher), Some(at))
            }
        };
        let rates = Rates::from(master.clock().now());
        let state = Arc::new(State {
            master,
            rates,
            snapshots: SnapshotStats::default(),
            metadata,
            published,
            events: feed,
            requests: Requests::default(),
            leadership,
            endpoints: EndpointState::new(policy),
            long_calls: LongCalls::new(Handle::current().metrics().num_workers()),
            dial_backs: Arc::new(Semaphore::new(dial_back::MAX_CONCURRENT)),
            config,
        });
        let (pages, admin, metadata) = http::start_all(&state).await?;
        let addresses = Addresses { rpc: rpc.local_addr(), admin, metadata, events };
        Ok(Self {
            rpc: rpc.start(Arc::new(Counted::new(state.clone()))),
            pages,
            _publisher: publisher,
            ticker: Ticker::start(state.clone())?,
            snapshot_writer: SnapshotWriter::start(&state).await?,
            addresses,
            state,
        })
    }

    /// Returns the bound addresses.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the counters of published events, if events are enabled.
    pub fn event_stats(&self) -> Option<EventStats> {
        self.state.event_stats()
    }

    /// Returns a collector of the metrics of this master, for the registry of a program that embeds
    /// it. The metrics are those of `/metrics`. The collector does not keep the server alive.
    ///
    /// ```
    /// fn register(server: &mooncake_server::MasterServer) -> prometheus::Result<()> {
    ///     prometheus::register(Box::new(server.metrics_collector()))
    /// }
    /// ```
    pub fn metrics_collector(&self) -> impl Collector + use<> {
        scrape::of(&self.state)
    }

    /// Returns the master.
    pub fn master(&self) -> &Arc<Master> {
        &self.state.master
    }

    /// Returns the metadata that the server holds.
    pub fn metadata(&self) -> &Arc<dyn MetadataBackend> {
        &self.state.metadata
    }

    /// Stops the server.
    ///
    /// The server stops accepting requests and waits at most two seconds for those in progress. If
    /// snapshots are enabled, it then waits for a last one. Connections with an incomplete request
    /// or an unread response are closed.
    pub async fn stop(self) {
        self.ticker.stop();
        // Both servers stop before the last snapshot: it must include every answered removal.
        let pages = futures::future::join_all(self.pages.into_iter().map(Pages::stop));
        futures::future::join(pages, self.rpc.stop()).await;
        if let Some(snapshot_writer) = self.snapshot_writer {
            let _ = tokio::task::spawn_blocking(move || snapshot_writer.finish()).await;
        }
    }
}
