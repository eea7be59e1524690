//! Construction of a client, and its entry into the cluster.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
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
use mooncake_transport::bind_address::bind_address;
use mooncake_transport::engine::{Engine, EngineBuilder, HandshakePort, LocalCopies};
use mooncake_transport::net::HostPort;
use mooncake_transport::private_files::FileMode;
use mooncake_transport::{Directory, LoopbackNet, Transport};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::cache::HotCache;
use crate::config::{AddressPolicy, ClientConfig, OffloadConfig, PrefetchConfig, RPC_ONLY, SegmentFile};
use crate::deadline::Deadline;
use crate::disk::{Files, Prefetches};
use crate::metrics::Metrics;
use crate::names;
use crate::peers::Unreachable;
use crate::persistent_segment::PersistentSegment;
use crate::read_numbers::ReadNumbers;
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
        if let Some(cluster) = clusters.iter().find_map(|(at, c)| c.upgrade().filter(|_| *at == address)) {
            return Self(Kind::Embedded(cluster));
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

impl std::fmt::Display for MasterHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Kind::Remote(address) => write!(f, "the master at {address}"),
            Kind::Embedded(_) => f.write_str("the master in this process"),
            Kind::Custom(master) => write!(f, "the master of {master:?}"),
        }
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
    loopback: Option<LoopbackNet>,
    bound: Option<IpAddr>,
}

/// Built-in transports: those that the caller chose, or those that the configuration names.
#[derive(Clone, Debug, Default)]
pub struct BuiltIn(Option<TransportOptions>);

impl TransportSource for BuiltIn {
    type Transport = TransportSet;

    fn open(self, setting: &Setting<'_>) -> Result<Arc<TransportSet>> {
        let options = match (self.0, setting.config.protocol.as_str(), &setting.loopback) {
            (Some(options), _, _) => options,
            (None, "" | "loopback", Some(net)) => TransportOptions::in_process(net.clone()),
            (None, RPC_ONLY, _) => TransportOptions::in_process(LoopbackNet::new()),
            (None, protocol, _) => TransportOptions::for_protocol(protocol)?,
        };
        let options = if setting.config.share_memory { options } else { options.without_shared_memory() };
        options.bound_to(setting.bound).open(&Handle::current(), &setting.config.clock).map(Arc::new)
    }

    /// Is not generic, so that this crate compiles the tasks of a client once for all programs.
    fn connect(builder: ClientBuilder) -> Connecting<TransportSet> {
        Box::pin(builder.join())
    }
}

/// Transport that the caller supplies.
#[derive(Debug)]
pub struct SuppliedTransport<T>(Arc<T>);

impl<T: Transport> TransportSource for SuppliedTransport<T> {
    type Transport = T;

    fn open(self, _: &Setting<'_>) -> Result<Arc<T>> {
        Ok(self.0)
    }
}

/// Engine that the caller supplies, with its transport.
#[derive(Debug)]
pub struct SuppliedEngine<T: Transport>(Engine<T>);

impl<T: Transport> TransportSource for SuppliedEngine<T> {
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
    pub fn transport<T: Transport>(self, transport: Arc<T>) -> ClientBuilder<SuppliedTransport<T>> {
        let Self { config, master, directory, clock, source: _ } = self;
        ClientBuilder { config, master, directory, clock, source: SuppliedTransport(transport) }
    }

    /// Uses an engine of the caller with its registered memory, ports, directory and clock. The
    /// client leaves the engine open when it closes.
    pub fn engine<T: Transport>(self, engine: Engine<T>) -> ClientBuilder<SuppliedEngine<T>> {
        let Self { config, master, source: _, .. } = self;
        let (directory, clock) = (Some(engine.directory().clone()), Some(engine.clock().clone()));
        ClientBuilder { config, master, directory, clock, source: SuppliedEngine(engine) }
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

    /// Sets [`ClientConfig::bind_address`].
    pub fn bind_address(mut self, address: impl Into<String>) -> Self {
        self.config.bind_address = address.into();
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

    /// Sets [`ClientConfig::prefetch`].
    pub fn prefetch(mut self, config: PrefetchConfig) -> Self {
        self.config.prefetch = config;
        self
    }

    /// Sets [`ClientConfig::fs_roots`].
    pub fn fs_roots(mut self, roots: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.config.fs_roots = roots.into_iter().map(Into::into).collect();
        self
    }

    /// Sets [`ClientConfig::file_mode`].
    pub fn file_mode(mut self, mode: FileMode) -> Self {
        self.config.file_mode = mode;
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

    /// Sets [`ClientConfig::address_check`].
    pub fn address_check(mut self, policy: AddressPolicy) -> Self {
        self.config.address_check = policy;
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

    /// Sets [`ClientConfig::space_timeout`].
    pub fn space_timeout(mut self, timeout: Duration) -> Self {
        self.config.space_timeout = timeout;
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
        config.check_setup_memory()?;
        let deadline = Deadline::after(&config.clock, config.connect_timeout);
        let metrics = config.metrics.then(|| Arc::new(Metrics::new(config.clock.clone())));
        let master_client = master.client(&config, metrics.as_deref())?;
        find_or_fail(&master_client, &deadline, &master).await?;

        let files = shared_files(&master_client, &config, &deadline).await;

        let mut rng = Rng::from_os();
        // The file is mapped before other memory can occupy the earlier address of the segment.
        let persistent =
            open_segment_file(&config, ClientId(Uuid::new(rng.next_u64(), rng.next_u64()))).await?;
        let crosses_processes = embedded.is_none() || !matches!(config.protocol.as_str(), "" | "loopback");
        let (name, reserved) = names::choose(&config, crosses_processes, &mut rng)?;
        let loopback = embedded.as_ref().map(|cluster| cluster.net.clone());
        let shared = source.engine();
        let directory = match (directory, &embedded) {
            (Some(directory), _) => directory,
            // Nothing is published, and no peer is looked up.
            _ if config.is_rpc_only() => Directory::new(Arc::<MemoryMetadata>::default()),
            (None, Some(cluster)) => Directory::new(cluster.directory.clone()),
            (None, None) => mooncake_metadata::connect(&config.metadata, &config.directory)?,
        };
        let p2p = directory.is_p2p();
        let published = published_host(&config, &name, p2p);
        let bound = bind_address(&config.bind_address, published.as_deref())?;
        let transport = source.open(&Setting { config: &config, loopback, bound })?;
        let protocol = transport.protocol().as_str().to_owned();
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
                let engine = Engine::builder(transport).name(&name).directory(directory);
                let with_port = (embedded.is_none() || p2p) && !config.is_rpc_only();
                deadline.bound("starting the engine", start(engine, &config, with_port, bound)).await?
            }
        };
        let staging = match usize::try_from(config.local_buffer) {
            Ok(len) if len > 0 => {
                let memory = config.memory.clone();
                let memory = tokio::task::spawn_blocking(move || HostMemory::with(len, &memory)).await;
                let memory = memory.map_err(|error| {
                    Error::internal(format!("allocating the local buffer failed: {error}"))
                })?;
                let memory = memory.map_err(|error| error.context("local buffer"))?;
                Some(Staging::new(engine.register_local(Arc::new(memory))?)?)
            }
            _ => None,
        };
        let cache = HotCache::new(config.hot_cache, &config.memory, &engine, rng.next_u64())?;
        let prefetches = Prefetches::new(config.prefetch, config.clock.clone(), rng.next_u64());
        let client = Client {
            inner: Arc::new(Inner {
                id: persistent.as_ref().map_or_else(
                    || ClientId(Uuid::new(rng.next_u64(), rng.next_u64())),
                    PersistentSegment::client,
                ),
                endpoint: engine.name().to_owned(),
                name,
                protocol,
                master: master_client,
                segments: Mutex::default(),
                moving: Mutex::default(),
                inventory: tokio::sync::Mutex::default(),
                promises: Default::default(),
                announcing: Mutex::default(),
                announcing_generation: AtomicU64::new(0),
                announcing_stopped: Default::default(),
                mounting: Default::default(),
                task_permits: tokio::sync::Semaphore::new(crate::tasks::MAX_RUNNING),
                disk: Default::default(),
                files,
                staging,
                cache,
                engine,
                keeps_engine,
                address_state: Mutex::default(),
                unreachable: Unreachable::new(config.clock.clone(), config.peer_cooldown),
                disk_owners: Default::default(),
                prefetches: Arc::new(prefetches),
                metrics,
                read_numbers: ReadNumbers::new(&mut rng),
                rng: Mutex::new(rng),
                reserved: Default::default(),
                has_stored: AtomicBool::new(false),
                zeroes_nothing: AtomicBool::new(false),
                next_replica: AtomicUsize::new(0),
                runtime,
                closed: watch::Sender::new(false),
                heartbeat_task: Mutex::default(),
                _reserved: reserved,
                bound,
                config,
            }),
        };
        if let Some(cluster) = embedded {
            client.inner.runtime.spawn(keep_ticking(cluster, client.inner.closed.subscribe()));
        }
        client.start_summaries();
        match persistent {
            Some(segment) => drop(client.mount_persistent(segment).await?),
            None if client.inner.config.segment > 0 => {
                client.segments().mount(client.inner.config.segment).await?;
            }
            None => {}
        }
        if let Err(error) = client.require_own_address(&deadline).await {
            let _ = client.close().await;
            return Err(error);
        }
        client.start_disk().await?;
        Ok(client)
    }
}

/// Returns the directory of the files that all clients share, or `None` if the master names none.
async fn shared_files(
    master: &MasterClient,
    config: &ClientConfig,
    deadline: &Deadline,
) -> Option<Arc<Files>> {
    if !cfg!(feature = "disk") {
        return None;
    }
    match deadline.bound("where files lie", master.call(GetStorageConfig {})).await {
        Ok(storage) => Files::new(storage, config),
        Err(error) => {
            tracing::debug!("the master does not say where files lie: {error}");
            None
        }
    }
}

/// Opens the file of the segment, if one is configured.
async fn open_segment_file(config: &ClientConfig, client: ClientId) -> Result<Option<PersistentSegment>> {
    let Some(settings) = config.segment_file.clone() else { return Ok(None) };
    let config = config.clone();
    let opened =
        tokio::task::spawn_blocking(move || PersistentSegment::open(&settings, &config, client)).await;
    opened.map_err(|error| Error::internal(format!("taking the segment's file failed: {error}")))?.map(Some)
}

/// Returns the settings of the handshake port.
fn handshake(config: &ClientConfig) -> HandshakePort {
    let mut port = config.handshake.clone();
    port.host = config.advertise.map(|ip| ip.to_string()).or(port.host);
    port
}

/// Returns the host at which other nodes reach a client, unless it is detected.
fn published_host(config: &ClientConfig, name: &str, p2p: bool) -> Option<String> {
    handshake(config).configured_host(name, p2p)
}

async fn start<T: Transport>(
    mut engine: EngineBuilder<T>,
    config: &ClientConfig,
    with_port: bool,
    bound: Option<IpAddr>,
) -> Result<Engine<T>> {
    engine = engine.clock(config.clock.clone()).expect_mount();
    if !config.copy_in_process {
        engine = engine.local_copies(LocalCopies::Never);
    }
    if with_port {
        let mut port = handshake(config);
        port.bind = port.bind.or(bound);
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

/// Waits until a master of a supported version responds. The master may still be starting. A
/// directory of masters that cannot be reached is reported early.
async fn find_or_fail(client: &MasterClient, deadline: &Deadline, master: &MasterHandle) -> Result<()> {
    let found = tokio::select! {
        found = find(client, deadline, master) => found,
        error = client.unreachable_directory() => Err(error),
    };
    found.map_err(|error| error.context(format!("cannot connect to {master}")))
}

async fn find(master: &MasterClient, deadline: &Deadline, at: &MasterHandle) -> Result<()> {
    let mut last: Option<Error> = None;
    let early = deadline.portion(1, 6);
    let mut is_reported = false;
    while !deadline.is_over() {
        if let Some(error) = last.as_ref().filter(|_| !is_reported && deadline.has_passed(early)) {
            let seconds = deadline.left().as_secs();
            tracing::warn!("cannot connect to {at} yet: {error}; waiting for {seconds} s more");
            is_reported = true;
        }
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
    Err(match last {
        Some(error) if error.code() != ErrorCode::RpcTimeout => error,
        _ => Error::new(
            ErrorCode::RpcTimeout,
            "it did not respond in time; give the host and the RPC port of a running mooncake_master",
        ),
    })
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
