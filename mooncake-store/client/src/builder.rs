//! Construction of a client, and its entry into the cluster.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use mooncake_core::clock::{Rng, SharedClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::host_port;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_core::meta::MemoryMetadata;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_metadata::{DirectoryOptions, open_etcd};
use mooncake_transport::engine::{Engine, EngineBuilder, HandshakePort, LocalCopies};
use mooncake_transport::net::HostPort;
use mooncake_transport::{Directory, LoopbackNet, Transport};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::cache::HotCache;
use crate::config::{ClientConfig, OffloadConfig, RPC_ONLY, SegmentFile};
use crate::deadline::Deadline;
use crate::disk::Files;
use crate::lasting::Opened;
use crate::metrics::Metrics;
use crate::names;
use crate::peers::Unreachable;
use crate::staging::Staging;
use crate::state::{Client, Inner};
use crate::version;
use mooncake_engine::transport_set::{TransportOptions, TransportSet};
use mooncake_protocol::client::{RpcClient, RpcOptions};
use mooncake_protocol::frame::FrameError;
use mooncake_protocol::master_client::{EmbeddedMaster, MasterClient, MasterConnection};
use mooncake_protocol::message::GetStorageConfig;
use mooncake_protocol::server_location::ServerLocation;

/// Cluster name of masters for which no other name is configured.
const DEFAULT_CLUSTER: &str = "mooncake_cluster";
/// Pause between two attempts to reach the master.
const RETRY: Duration = Duration::from_millis(100);
/// Interval at which an embedded master does its due work.
const TICK: Duration = Duration::from_millis(10);

impl Client {
    /// Returns a builder with the default settings. See [`ClientBuilder`].
    pub fn builder() -> ClientBuilder {
        ClientBuilder::new()
    }
}

/// Address or instance of the master of a client.
#[derive(Clone)]
pub struct MasterHandle(Kind);

#[derive(Clone)]
enum Kind {
    Remote(String),
    Embedded(Arc<Embedded>),
    Custom(Arc<dyn MasterConnection>),
}

/// A cluster inside this process.
struct Embedded {
    master: Arc<dyn EmbeddedMaster>,
    clock: SharedClock,
    net: LoopbackNet,
    directory: Arc<MemoryMetadata>,
}

impl MasterHandle {
    /// Returns a handle of the master at `host:port`, or of the leader among several masters.
    ///
    /// With the feature `metadata-etcd`, `etcd://host:port` follows the leader. Several addresses
    /// of etcd are separated by semicolons or commas. [`ClientConfig::cluster_id`] selects the
    /// cluster.
    pub fn remote(address: impl Into<String>) -> Self {
        Self(Kind::Remote(address.into()))
    }

    /// Returns a handle of a master in this process, which is called without sockets.
    ///
    /// Clients with handles of the same master find each other. They use the loopback network
    /// unless another transport is configured. The clock of the master becomes the clock of its
    /// clients. While one of the clients exists, [`do_due_work`](EmbeddedMaster::do_due_work) is
    /// called periodically.
    pub fn embedded<M: EmbeddedMaster>(master: Arc<M>) -> Self {
        static CLUSTERS: Mutex<Vec<(usize, Weak<Embedded>)>> = Mutex::new(Vec::new());
        let address = Arc::as_ptr(&master).addr();
        let mut clusters = CLUSTERS.lock();
        clusters.retain(|(_, cluster)| cluster.strong_count() > 0);
        // A cluster keeps its master alive, so no other master has the same address.
        if let Some(known) = clusters.iter().find_map(|(at, c)| c.upgrade().filter(|_| *at == address)) {
            return Self(Kind::Embedded(known));
        }
        let clock = master.clock().clone();
        let cluster = Arc::new(Embedded {
            net: LoopbackNet::with_clock(clock.clone()),
            clock,
            directory: Arc::default(),
            master,
        });
        clusters.push((address, Arc::downgrade(&cluster)));
        Self(Kind::Embedded(cluster))
    }

    /// Returns a handle of a master that is reached by a connection of the program.
    pub fn custom(connection: Arc<dyn MasterConnection>) -> Self {
        Self(Kind::Custom(connection))
    }
}

impl From<&str> for MasterHandle {
    fn from(address: &str) -> Self {
        Self::remote(address)
    }
}

impl From<String> for MasterHandle {
    fn from(address: String) -> Self {
        Self::remote(address)
    }
}

impl<M: EmbeddedMaster> From<Arc<M>> for MasterHandle {
    fn from(master: Arc<M>) -> Self {
        Self::embedded(master)
    }
}

impl std::fmt::Debug for MasterHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Kind::Remote(address) => write!(f, "MasterHandle({address})"),
            Kind::Embedded(_) => f.write_str("MasterHandle(embedded)"),
            Kind::Custom(master) => write!(f, "MasterHandle({master:?})"),
        }
    }
}

/// Source of the transport of a client.
pub trait TransportSource: Send + Sized + 'static {
    /// Type of the transport.
    type Transport: Transport;

    /// Opens the transport.
    ///
    /// # Errors
    /// Returns the error of the transport that cannot be opened, with its name.
    fn open(self, setting: &Setting<'_>) -> Result<Arc<Self::Transport>>;

    /// Returns the engine to use, if it exists already.
    fn engine(&self) -> Option<Engine<Self::Transport>> {
        None
    }

    /// Connects a client. Only the built-in transports override this method.
    #[doc(hidden)]
    fn connect(builder: ClientBuilder<Self>) -> Connecting<Self::Transport> {
        Box::pin(builder.join())
    }
}

/// Client that is being connected.
type Connecting<T> = BoxFuture<'static, Result<Client<T>>>;

/// Context in which a transport is opened.
#[derive(Debug)]
pub struct Setting<'a> {
    config: &'a ClientConfig,
    near: Option<LoopbackNet>,
}

/// Built-in transports: those that the caller chose, or those that the configuration names.
#[derive(Clone, Debug, Default)]
pub struct BuiltIn(Option<TransportOptions>);

impl TransportSource for BuiltIn {
    type Transport = TransportSet;

    fn open(self, setting: &Setting<'_>) -> Result<Arc<TransportSet>> {
        let options = match (self.0, setting.config.protocol.as_str(), &setting.near) {
            (Some(options), _, _) => options,
            (None, "" | "loopback", Some(net)) => TransportOptions::in_process(net.clone()),
            (None, RPC_ONLY, _) => TransportOptions::in_process(LoopbackNet::new()),
            (None, protocol, _) => TransportOptions::named(protocol)?,
        };
        let options = if setting.config.share_memory { options } else { options.without_shared_memory() };
        options.open(&Handle::current(), &setting.config.clock).map(Arc::new)
    }

    /// Is not generic, so that this crate compiles the tasks of a client once for all programs.
    fn connect(builder: ClientBuilder) -> Connecting<TransportSet> {
        Box::pin(builder.join())
    }
}

/// Transport that the caller supplies.
#[derive(Debug)]
pub struct Given<T>(Arc<T>);

impl<T: Transport> TransportSource for Given<T> {
    type Transport = T;

    fn open(self, _: &Setting<'_>) -> Result<Arc<T>> {
        Ok(self.0)
    }
}

/// Engine that the caller supplies, with its transport.
#[derive(Debug)]
pub struct Shared<T: Transport>(Engine<T>);

impl<T: Transport> TransportSource for Shared<T> {
    type Transport = T;

    fn open(self, _: &Setting<'_>) -> Result<Arc<T>> {
        Ok(self.0.transport().clone())
    }

    fn engine(&self) -> Option<Engine<T>> {
        Some(self.0.clone())
    }
}

/// Builder of a client. [`connect`](ClientBuilder::connect) makes the client.
#[derive(Debug)]
#[must_use = "nothing happens before `connect`"]
pub struct ClientBuilder<S: TransportSource = BuiltIn> {
    config: ClientConfig,
    master: MasterHandle,
    directory: Option<Directory>,
    clock: Option<SharedClock>,
    source: S,
}

impl ClientBuilder {
    /// Returns a builder for a master on this host. The client offers 16 MiB and has 16 MiB of
    /// local buffer.
    pub fn new() -> Self {
        Self {
            config: ClientConfig::default(),
            master: MasterHandle::remote("127.0.0.1:50051"),
            directory: None,
            clock: None,
            source: BuiltIn::default(),
        }
    }

    /// Chooses the built-in transports one by one, instead of by [`protocol`](Self::protocol).
    pub fn transports(mut self, options: TransportOptions) -> Self {
        self.source = BuiltIn(Some(options));
        self
    }

    /// Uses a transport of the caller instead of the built-in ones. The transport must take
    /// deadlines as times of the clock of the client.
    pub fn transport<T: Transport>(self, transport: Arc<T>) -> ClientBuilder<Given<T>> {
        let Self { config, master, directory, clock, source: _ } = self;
        ClientBuilder { config, master, directory, clock, source: Given(transport) }
    }

    /// Uses an engine of the caller with its registered memory, ports, directory and clock. The
    /// client leaves the engine open when it closes.
    pub fn engine<T: Transport>(self, engine: Engine<T>) -> ClientBuilder<Shared<T>> {
        let Self { config, master, source: _, .. } = self;
        let (directory, clock) = (Some(engine.directory().clone()), Some(engine.clock().clone()));
        ClientBuilder { config, master, directory, clock, source: Shared(engine) }
    }
}

impl Default for ClientBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: TransportSource> ClientBuilder<S> {
    /// Sets all settings. The clock in `config` is used only with masters outside this process.
    pub fn config(mut self, config: ClientConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets the master: an address `host:port`, an embedded master, or another [`MasterHandle`].
    pub fn master(mut self, master: impl Into<MasterHandle>) -> Self {
        self.master = master.into();
        self
    }

    /// Sets [`ClientConfig::metadata`]. An embedded master needs no metadata service.
    pub fn metadata(mut self, metadata: impl Into<String>) -> Self {
        self.config.metadata = metadata.into();
        self
    }

    /// Sets [`ClientConfig::directory`].
    pub fn directory_options(mut self, options: DirectoryOptions) -> Self {
        self.config.directory = options;
        self
    }

    /// Sets [`ClientConfig::handshake`].
    pub fn handshake(mut self, port: HandshakePort) -> Self {
        self.config.handshake = port;
        self
    }

    /// Uses a directory of the caller in place of [`metadata`](Self::metadata).
    pub fn directory(mut self, directory: Directory) -> Self {
        self.directory = Some(directory);
        self
    }

    /// Sets [`ClientConfig::local_hostname`].
    pub fn local_hostname(mut self, name: impl Into<String>) -> Self {
        self.config.local_hostname = name.into();
        self
    }

    /// Sets [`ClientConfig::advertise`].
    pub fn advertise(mut self, address: IpAddr) -> Self {
        self.config.advertise = Some(address);
        self
    }

    /// Sets [`ClientConfig::segment`].
    pub fn segment(mut self, bytes: u64) -> Self {
        self.config.segment = bytes;
        self
    }

    /// Sets [`ClientConfig::local_buffer`].
    pub fn local_buffer(mut self, bytes: u64) -> Self {
        self.config.local_buffer = bytes;
        self
    }

    /// Sets [`ClientConfig::memory`].
    pub fn memory(mut self, options: HostMemoryOptions) -> Self {
        self.config.memory = options;
        self
    }

    /// Sets [`ClientConfig::allow_overcommit`].
    pub fn allow_overcommit(mut self, yes: bool) -> Self {
        self.config.allow_overcommit = yes;
        self
    }

    /// Sets [`ClientConfig::protocol`].
    pub fn protocol(mut self, protocol: impl Into<String>) -> Self {
        self.config.protocol = protocol.into();
        self
    }

    /// Sets [`ClientConfig::copy_in_process`].
    pub fn copy_in_process(mut self, yes: bool) -> Self {
        self.config.copy_in_process = yes;
        self
    }

    /// Sets [`ClientConfig::checksum`].
    pub fn checksum(mut self, yes: bool) -> Self {
        self.config.checksum = yes;
        self
    }

    /// Sets [`ClientConfig::outlive_master`].
    pub fn outlive_master(mut self, yes: bool) -> Self {
        self.config.outlive_master = yes;
        self
    }

    /// Sets [`ClientConfig::segment_file`]. The index lies beside the file.
    pub fn segment_file(mut self, path: impl Into<std::path::PathBuf>) -> Self {
        self.config.segment_file = Some(SegmentFile::new(path));
        self
    }

    /// Sets the size of [`ClientConfig::hot_cache`] in bytes.
    pub fn hot_cache(mut self, bytes: u64) -> Self {
        self.config.hot_cache.bytes = bytes;
        self
    }

    /// Sets [`ClientConfig::offload`].
    pub fn offload(mut self, disk: OffloadConfig) -> Self {
        self.config.offload = Some(disk);
        self
    }

    /// Sets [`ClientConfig::share_memory`].
    pub fn share_memory(mut self, yes: bool) -> Self {
        self.config.share_memory = yes;
        self
    }

    /// Sets [`ClientConfig::cluster_id`].
    pub fn cluster_id(mut self, id: impl Into<String>) -> Self {
        self.config.cluster_id = id.into();
        self
    }

    /// Sets [`ClientConfig::tenant`].
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.config.tenant = tenant.into();
        self
    }

    /// Sets [`ClientConfig::timeout`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.config.timeout = timeout;
        self
    }

    /// Sets [`ClientConfig::room_patience`].
    pub fn room_patience(mut self, patience: Duration) -> Self {
        self.config.room_patience = patience;
        self
    }

    /// Sets [`ClientConfig::connect_timeout`].
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// Sets the clock of the client in place of [`ClientConfig::clock`].
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Connects to the master, opens the transports, and mounts the segment. The client and its
    /// tasks run on the current tokio runtime.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for invalid settings and for a port in use. Returns
    /// `INVALID_VERSION` for a master of another version. Returns an error of kind `Unavailable` or
    /// `Timeout` if no master responds within [`ClientConfig::connect_timeout`]. Each error text
    /// says what to do.
    pub async fn connect(self) -> Result<Client<S::Transport>> {
        S::connect(self).await
    }

    async fn join(self) -> Result<Client<S::Transport>> {
        let Self { mut config, master, directory, clock, source } = self;
        let runtime = Handle::try_current().map_err(|_| {
            Error::invalid("a client is connected on a tokio runtime, and there is none here")
        })?;
        let embedded = match &master.0 {
            Kind::Embedded(cluster) => Some(cluster.clone()),
            _ => None,
        };
        if let Some(clock) = clock.or_else(|| embedded.as_ref().map(|cluster| cluster.clock.clone())) {
            config.clock = clock;
        }
        config.validate()?;
        if config.is_rpc_only() {
            config.hot_cache.bytes = 0;
        }
        config.check_memory(0, config.segment.saturating_add(config.local_buffer))?;
        let deadline = Deadline::after(&config.clock, config.connect_timeout);
        let metrics = config.metrics.then(|| Arc::new(Metrics::new(config.clock.clone())));
        let master_client = master.client(&config, metrics.as_deref())?;
        find(&master_client, &deadline).await.map_err(|error| error.context(format!("{master:?}")))?;

        let files = shared_files(&master_client, &deadline).await;

        let mut rng = Rng::from_os();
        // The file is mapped before other memory can occupy the earlier address of the segment.
        let lasting = take_file(&config, ClientId(Uuid::new(rng.next_u64(), rng.next_u64()))).await?;
        let between = embedded.is_none() || !matches!(config.protocol.as_str(), "" | "loopback");
        let (name, reserved) = names::choose(&config, between, &mut rng)?;
        let near = embedded.as_ref().map(|cluster| cluster.net.clone());
        let shared = source.engine();
        let transport = source.open(&Setting { config: &config, near })?;
        let protocol = transport.protocol().as_str().to_owned();
        let directory = match (directory, &embedded) {
            (Some(directory), _) => directory,
            // Nothing is published, and no peer is looked up.
            _ if config.is_rpc_only() => Directory::new(Arc::<MemoryMetadata>::default()),
            (None, Some(cluster)) => Directory::new(cluster.directory.clone()),
            (None, None) => mooncake_metadata::connect(&config.metadata, &config.directory)?,
        };
        let p2p = directory.is_p2p();
        let keeps_engine = shared.is_some();
        if p2p
            && embedded.is_none()
            && !keeps_engine
            && config.advertise.is_none()
            && config.handshake.host.is_none()
        {
            resolve_own(&name, &deadline).await?;
        }
        let engine = match shared {
            Some(engine) => {
                engine.expect_mount();
                engine
            }
            None => {
                let engine = Engine::builder(transport).name(&name).directory(directory.clone());
                let with_port = (embedded.is_none() || p2p) && !config.is_rpc_only();
                deadline.bound("starting the engine", start(engine, &config, with_port)).await?
            }
        };
        let staging = match usize::try_from(config.local_buffer) {
            Ok(len) if len > 0 => {
                let memory = HostMemory::with(len, &config.memory).map_err(|e| e.context("local buffer"))?;
                Some(Staging::new(engine.register_local(Arc::new(memory))?)?)
            }
            _ => None,
        };
        let cache = HotCache::new(config.hot_cache, &config.memory, &engine, rng.next_u64())?;
        let client = Client {
            inner: Arc::new(Inner {
                id: lasting
                    .as_ref()
                    .map_or_else(|| ClientId(Uuid::new(rng.next_u64(), rng.next_u64())), Opened::client),
                endpoint: engine.name().to_owned(),
                name,
                protocol,
                master: master_client,
                segments: Mutex::default(),
                moving: Mutex::default(),
                inventory: tokio::sync::Mutex::default(),
                promises: Default::default(),
                announcing: Mutex::default(),
                announcing_turn: AtomicU64::new(0),
                announcing_stopped: Default::default(),
                mounting: tokio::sync::Mutex::default(),
                working: tokio::sync::Semaphore::new(crate::tasks::AT_ONCE),
                disk: Default::default(),
                files,
                staging,
                cache,
                engine,
                keeps_engine,
                directory,
                unreachable: Unreachable::new(config.clock.clone(), config.peer_cooldown),
                owners: Default::default(),
                metrics,
                rng: Mutex::new(rng),
                turn: AtomicUsize::new(0),
                runtime,
                closed: watch::Sender::new(false),
                heart: Mutex::default(),
                _reserved: reserved,
                config,
            }),
        };
        if let Some(cluster) = embedded {
            client.inner.runtime.spawn(keep_ticking(cluster, client.inner.closed.subscribe()));
        }
        client.start_summaries();
        match lasting {
            Some(opened) => drop(client.mount_lasting(opened).await?),
            None if client.inner.config.segment > 0 => {
                client.segments().mount(client.inner.config.segment).await?;
            }
            None => {}
        }
        client.start_disk().await?;
        Ok(client)
    }
}

/// Returns the directory of the files that all clients share, or `None` if the master names none.
async fn shared_files(master: &MasterClient, deadline: &Deadline) -> Option<Arc<Files>> {
    if !cfg!(feature = "disk") {
        return None;
    }
    match deadline.bound("where files lie", master.call(GetStorageConfig {})).await {
        Ok(storage) => Files::new(storage),
        Err(error) => {
            tracing::debug!("the master does not say where files lie: {error}");
            None
        }
    }
}

/// Opens the file of the segment, if one is configured.
async fn take_file(config: &ClientConfig, client: ClientId) -> Result<Option<Opened>> {
    let Some(wanted) = config.segment_file.clone() else { return Ok(None) };
    let len =
        usize::try_from(config.segment).map_err(|_| Error::invalid("a segment beyond all addresses"))?;
    let node = config.memory.numa_node;
    let taken = tokio::task::spawn_blocking(move || Opened::take(&wanted, len, node, client)).await;
    taken.map_err(|error| Error::internal(format!("taking the segment's file failed: {error}")))?.map(Some)
}

async fn start<T: Transport>(
    mut engine: EngineBuilder<T>,
    config: &ClientConfig,
    with_port: bool,
) -> Result<Engine<T>> {
    engine = engine.clock(config.clock.clone()).expect_mount();
    if !config.copy_in_process {
        engine = engine.local_copies(LocalCopies::Never);
    }
    if with_port {
        let mut port = config.handshake.clone();
        port.host = config.advertise.map(|ip| ip.to_string()).or(port.host);
        engine = engine.handshake(port);
    }
    engine.start().await
}

impl MasterHandle {
    fn client(&self, config: &ClientConfig, metrics: Option<&Metrics>) -> Result<MasterClient> {
        match &self.0 {
            Kind::Remote(address) => {
                let options = RpcOptions {
                    connect_timeout: config.timeout,
                    call_timeout: config.timeout,
                    meter: metrics.map(|metrics| metrics.calls.clone()),
                    ..RpcOptions::default()
                };
                Ok(MasterClient::over(RpcClient::at(locate_master(address, &config.cluster_id)?, options)))
            }
            Kind::Embedded(cluster) => Ok(MasterClient::embedded(cluster.master.clone())),
            Kind::Custom(connection) => Ok(MasterClient::custom(connection.clone())),
        }
    }
}

/// Returns the location of the master at an address, or of the leader of a cluster.
pub fn locate_master(address: &str, cluster: &str) -> Result<ServerLocation> {
    let Some((scheme, _)) = address.split_once("://") else {
        HostPort::exact(address).map_err(|error| error.context("the master"))?;
        return Ok(ServerLocation::Fixed(address.into()));
    };
    if scheme != "etcd" {
        let text = format!(
            "master {address:?}: {scheme:?} is not built in; there is host:port, and with feature \
             `metadata-etcd` etcd://host:port for the one of several that leads"
        );
        return Err(Error::new(ErrorCode::NotSupported, text));
    }
    let cluster = if cluster.is_empty() { DEFAULT_CLUSTER } else { cluster };
    let directory = open_etcd(address).map_err(|error| error.context(format!("master {address:?}")))?;
    Ok(ServerLocation::following(directory, mooncake_core::meta::master_view(cluster)))
}

/// Returns whether an HTTP server responded to an RPC.
fn speaks_http(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    matches!(source, Some(FrameError::Magic(b'H')))
}

/// Checks that the host name of this client resolves. Other nodes cannot find the client otherwise.
async fn resolve_own(name: &str, deadline: &Deadline) -> Result<()> {
    let host = host_port::split(name).0;
    if is_planted("unresolved-name") || host.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let found =
        async { Ok(tokio::net::lookup_host((host, 0)).await.map(|mut found| found.next().is_some())) };
    let why = match deadline.bound("resolving the own host name", found).await? {
        Ok(true) => return Ok(()),
        Ok(false) => "it has no address".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Error::invalid(format!(
        "cannot join: the own host name does not resolve ({why}). local_hostname={host:?}; give a name in DNS or an address that other nodes reach"
    )))
}

/// Waits until a master of a supported version responds. The master may still be starting.
async fn find(master: &MasterClient, deadline: &Deadline) -> Result<()> {
    let mut last = None;
    while !deadline.is_over() {
        match deadline.bound("the master's version", master.version()).await {
            Ok(version) => return version::check(&version),
            Err(error) if speaks_http(&error) && !is_planted("patient-with-http") => {
                let text = "the master's address speaks HTTP: give its RPC port (--rpc_port, usually 50051), not its admin port";
                return Err(Error::invalid(text).with_source(error));
            }
            Err(error) if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) => {
                // At the deadline, an earlier error is kept, because it names the reason.
                if last.is_none() || !deadline.is_over() {
                    last = Some(error);
                }
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(RETRY.min(deadline.left())).await;
    }
    Err(last.unwrap_or_else(|| Error::from(ErrorCode::RpcTimeout)))
}

/// Calls the tick function of an embedded master, which has no thread of its own.
async fn keep_ticking(cluster: Arc<Embedded>, mut closed: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            // An error means that the client was dropped.
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(TICK) => cluster.master.do_due_work(),
        }
    }
}
