//! A master that answers on sockets: RPC, admin HTTP, and the transfer engine's metadata over HTTP.

#![deny(unsafe_code)]

#[cfg(feature = "http")]
mod admin;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(all(feature = "cli", feature = "local"))]
pub mod client_process;
pub mod config;
mod counting;
mod departed;
#[cfg(feature = "events-zmq")]
mod events;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod idle_metrics;
mod latency;
#[cfg_attr(
    not(all(feature = "cli", feature = "metadata-etcd")),
    allow(dead_code, reason = "a master that is alone needs a part of it")
)]
mod leader;
#[cfg(feature = "cli")]
pub mod process;
mod rpc;
#[cfg(feature = "http")]
mod scrape;
mod snapshots;
mod summary;
mod ticker;
#[cfg(feature = "cli")]
pub mod tool;

use std::net::SocketAddr;
use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::clock::{Rng, SharedClock, SystemClock};
use mooncake_core::meta::{MemoryMetadata, MetadataBackend};
use mooncake_transport::{directory, http::HttpMetadata};

use self::counting::Requests;
use self::departed::Departed;
use self::leader::Standing;
use self::rpc::Counted;
use self::snapshots::{Photographer, Taken};
use self::summary::Rates;
use self::ticker::Ticker;
use crate::config::{MasterConfig, tenants};
use mooncake_master::Master;
#[cfg(feature = "http")]
use mooncake_protocol::http::Pages;
use mooncake_protocol::place::join;
use mooncake_protocol::server::{RunningServer, Server, ServerOptions};

/// A master at work on its ports. Dropped, it stops without waiting.
#[derive(Debug)]
pub struct MasterServer {
    state: Arc<State>,
    rpc: RunningServer,
    #[cfg(feature = "http")]
    pages: Vec<Pages>,
    #[cfg(feature = "events-zmq")]
    _publisher: Option<events::Publisher>,
    ticker: Ticker,
    photographer: Option<Photographer>,
    addresses: Addresses,
}

/// Where a [`MasterServer`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Calls.
    pub rpc: SocketAddr,
    /// Admin pages and metrics; `None` without feature `http`.
    pub admin: Option<SocketAddr>,
    /// The transfer engine's metadata, if it is switched on.
    pub metadata: Option<SocketAddr>,
    /// Events, if they are published.
    pub events: Option<SocketAddr>,
}

/// What the servers share.
#[derive(Debug)]
struct State {
    master: Arc<Master>,
    metadata: Arc<dyn MetadataBackend>,
    /// Where clients publish themselves: `metadata`, or a server elsewhere.
    published: Arc<dyn MetadataBackend>,
    departed: Departed,
    #[cfg(feature = "events-zmq")]
    events: Option<Arc<events::Feed>>,
    requests: Requests,
    rates: Rates,
    snapshots: Taken,
    standing: Arc<Standing>,
    config: MasterConfig,
    /// Where the tenants' policy lies, if there are tenants.
    #[cfg(feature = "http")]
    policy: Option<tenants::Store>,
    /// Held while tenants are changed.
    #[cfg(feature = "http")]
    policy_changes: parking_lot::Mutex<()>,
}

/// What a master has published about its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventStats {
    /// Messages.
    pub batches: u64,
    /// Events in them.
    pub events: u64,
    /// Events that were lost because too many waited.
    pub dropped: u64,
    /// Events about keys that are no hash.
    pub without_hash: u64,
}

impl State {
    fn event_stats(&self) -> Option<EventStats> {
        #[cfg(feature = "events-zmq")]
        return self.events.as_ref().map(|feed| feed.stats());
        #[cfg(not(feature = "events-zmq"))]
        None
    }
}

impl MasterServer {
    /// Takes all ports and starts to answer, on the current tokio runtime and the machine's clock.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when the configuration contradicts itself; `RPC_FAIL` when a port cannot be had, naming it and its flag;
    /// `NOT_SUPPORTED` when a metadata server is asked for and feature `http` is off, or events and feature `events-zmq` is.
    pub async fn start(config: MasterConfig) -> Result<Self> {
        Self::start_with_clock(config, SystemClock::shared()).await
    }

    /// As [`MasterServer::start`], by another clock.
    ///
    /// # Errors
    /// As for [`MasterServer::start`].
    pub async fn start_with_clock(config: MasterConfig, clock: SharedClock) -> Result<Self> {
        let standing = Arc::new(Standing::alone(clock.clone()));
        Self::start_as(config, clock, standing).await
    }

    async fn start_as(config: MasterConfig, clock: SharedClock, standing: Arc<Standing>) -> Result<Self> {
        let mut options = config.options.clone();
        let policy = config.tenant_policy.as_ref().map(tenants::Store::open).transpose()?;
        if let Some(policy) = &policy {
            options.tenants = Some(policy.read().await?);
        }
        let master = Master::with_parts(
            options,
            &config.allocator,
            &config.eviction,
            clock,
            Rng::from_os().next_u64(),
        )?;
        let master = Arc::new(master);
        if let Some(snapshots) = config.snapshots.as_ref().filter(|snapshots| snapshots.restore) {
            snapshots::restore(snapshots, &config.cluster_id, &master).await?;
        }
        let options = ServerOptions { idle_timeout: config.rpc_idle, ..ServerOptions::default() };
        let address = join(&config.rpc_address, config.rpc_port);
        let rpc = Server::bind(&address, options).await?;
        let metadata = match config.metadata.as_ref().and_then(|server| server.kept_in.as_deref()) {
            Some(url) => {
                directory::own(url).map_err(|error| error.context("--http_metadata_server_kept_in"))?
            }
            None => Arc::new(MemoryMetadata::new()),
        };
        let elsewhere = config.clean_up.as_ref().and_then(|clean_up| clean_up.server.as_deref());
        let published = match elsewhere {
            Some(url) => Arc::new(HttpMetadata::new(url)?),
            None => metadata.clone(),
        };
        #[cfg(feature = "events-zmq")]
        let (feed, publisher, events) = match &config.events {
            None => (None, None, None),
            Some(wanted) => {
                let (feed, publisher, at) = events::start(wanted, master.clock().clone()).await?;
                let journal: Arc<dyn mooncake_master::Journal> = feed.clone();
                master.set_journal(&journal);
                (Some(feed), Some(publisher), Some(at))
            }
        };
        #[cfg(not(feature = "events-zmq"))]
        let events = no_events(&config)?;
        let rates = Rates::from(master.clock().now());
        let state = Arc::new(State {
            master,
            rates,
            snapshots: Taken::default(),
            metadata,
            published,
            departed: Departed::default(),
            #[cfg(feature = "events-zmq")]
            events: feed,
            requests: Requests::default(),
            standing,
            #[cfg(feature = "http")]
            policy,
            #[cfg(feature = "http")]
            policy_changes: parking_lot::Mutex::default(),
            config,
        });
        #[cfg(feature = "http")]
        let (pages, admin, metadata) = http::start_all(&state).await?;
        #[cfg(not(feature = "http"))]
        let (admin, metadata) = no_pages(&state.config)?;
        let addresses = Addresses { rpc: rpc.local_addr(), admin, metadata, events };
        Ok(Self {
            rpc: rpc.start(Arc::new(Counted::new(state.clone()))),
            #[cfg(feature = "http")]
            pages,
            #[cfg(feature = "events-zmq")]
            _publisher: publisher,
            ticker: Ticker::start(state.clone())?,
            photographer: Photographer::start(&state).await?,
            addresses,
            state,
        })
    }

    /// Where it answers.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// What it has published, if it publishes events.
    pub fn event_stats(&self) -> Option<EventStats> {
        self.state.event_stats()
    }

    /// The master behind it.
    pub fn master(&self) -> &Arc<Master> {
        &self.state.master
    }

    /// The metadata it serves.
    pub fn metadata(&self) -> &Arc<dyn MetadataBackend> {
        &self.state.metadata
    }

    /// Stops at once; its ports are free when this returns.
    #[cfg(all(feature = "cli", feature = "metadata-etcd"))]
    async fn cut_off(self) {
        self.ticker.stop();
        self.rpc.cut_off().await;
        for pages in self.pages {
            pages.cut_off().await;
        }
    }

    /// Stops taking requests and waits until those at work are answered, for two seconds at most, then until the last snapshot
    /// is written, if snapshots are taken. Connections with half a request, or with an answer that nobody reads, are closed.
    pub async fn stop(self) {
        self.ticker.stop();
        // Both before the last snapshot: a page that removes objects must not be answered after it.
        #[cfg(feature = "http")]
        let pages = futures::future::join_all(self.pages.into_iter().map(Pages::stop));
        #[cfg(not(feature = "http"))]
        let pages = std::future::ready(());
        futures::future::join(pages, self.rpc.stop()).await;
        if let Some(photographer) = self.photographer {
            let _ = tokio::task::spawn_blocking(move || photographer.finish()).await;
        }
    }
}

#[cfg(not(feature = "http"))]
fn no_pages(config: &MasterConfig) -> Result<(Option<SocketAddr>, Option<SocketAddr>)> {
    match config.metadata {
        None => Ok((None, None)),
        Some(_) => Err(mooncake_core::Error::new(
            mooncake_core::ErrorCode::NotSupported,
            "--enable_http_metadata_server needs a build with feature `http`",
        )),
    }
}

#[cfg(not(feature = "events-zmq"))]
fn no_events(config: &MasterConfig) -> Result<Option<SocketAddr>> {
    match config.events {
        None => Ok(None),
        Some(_) => Err(mooncake_core::Error::new(
            mooncake_core::ErrorCode::NotSupported,
            "--enable_kv_events needs a build with feature `events-zmq`",
        )),
    }
}
