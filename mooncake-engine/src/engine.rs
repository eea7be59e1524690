//! The engine over all built-in wires, and how it is started.

use std::net::Ipv6Addr;
use std::ops::Deref;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_transport::directory::{DirectoryOptions, P2P, RedisLogin};
use mooncake_transport::engine::{Engine, HandshakePort, LocalCopies};
use mooncake_transport::net::default_host_v6;
use mooncake_transport::topology::{Discovery, Topology};
use mooncake_transport::{Directory, Region};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::AbortHandle;

use crate::addressed::{Gone, Regions, UNUSED_WITHIN, foreign, still_in_use};
use crate::environment::own_port;
use crate::ids::Batches;
use crate::managed::Managed;
use crate::summary::log_every;
use crate::transport_set::{TransportOptions, TransportSet};

/// What stands for the devices there are.
const AUTO: &str = "auto-discovery";

/// A transfer engine. A handle: clones are the same engine; the last one withdraws its segment in the background, if the runtime lives that
/// long; `close` waits until the directory has forgotten it.
///
/// What it can do is what [`Engine`] can, over all built-in wires.
#[derive(Clone, Debug)]
pub struct TransferEngine {
    engine: Engine<TransportSet>,
    pub(crate) parts: Arc<Parts>,
}

/// What an engine has beside the one inside.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) batches: Batches,
    pub(crate) managed: Managed,
    pub(crate) regions: Arc<Regions>,
    pub(crate) runtime: Handle,
    timeout: Duration,
    topology: Topology,
    longest: Option<Duration>,
    summary: Option<AbortHandle>,
    instead: Option<Error>,
    #[cfg(feature = "transport-nvlink")]
    pub(crate) streams: crate::on_stream::Streams,
}

impl Drop for Parts {
    fn drop(&mut self) {
        if let Some(summary) = &self.summary {
            summary.abort();
        }
    }
}

impl TransferEngine {
    /// Why it has TCP alone, if it was to have another wire ([`or_tcp`](TransferEngineBuilder::or_tcp)).
    pub fn instead(&self) -> Option<&Error> {
        self.parts.instead.as_ref()
    }

    /// Settings; [`start`](TransferEngineBuilder::start) starts it.
    pub fn builder() -> TransferEngineBuilder {
        TransferEngineBuilder::default()
    }

    /// Which network devices are near which memory of this host: what the builder was told, or what was found at the start.
    pub fn topology(&self) -> &Topology {
        &self.parts.topology
    }

    /// The engine inside, for what is generic in the wire.
    pub fn engine(&self) -> &Engine<TransportSet> {
        &self.engine
    }

    /// How long a transfer of that many bytes may take when nothing else is said: the engine's timeout, and a nanosecond per byte.
    pub fn patience(&self, bytes: u64) -> Duration {
        let patience = self.parts.timeout.saturating_add(Duration::from_nanos(bytes));
        self.parts.longest.map_or(patience, |longest| patience.min(longest))
    }

    /// Memory registered by address, for those who look ranges up themselves.
    pub fn regions(&self) -> &Arc<Regions> {
        &self.parts.regions
    }

    /// Registers memory of the caller's by its address, for peers and for requests that name it by address.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: no bytes, not mapped, or ([`EngineCode::AddressOverlapped`](mooncake_transport::engine::EngineCode)) an overlap.
    ///
    /// # Safety
    /// As [`register_raw_many`](Self::register_raw_many).
    pub async unsafe fn register_raw(&self, address: u64, len: usize) -> Result<()> {
        let pieces = [(address, len)];
        // SAFETY: passed on.
        unsafe { self.register_raw_many(&pieces) }.await
    }

    /// The same for several pieces, all or none, published once.
    ///
    /// # Errors
    /// As [`register_raw`](Self::register_raw).
    ///
    /// # Safety
    /// Until [`unregister_raw`](Self::unregister_raw) has returned without an error, or the engine and all that was taken from it is dropped, the bytes stay
    /// allocated, readable and writable, and the caller expects peers and requests to read and write them at any time.
    pub async unsafe fn register_raw_many(&self, pieces: &[(u64, usize)]) -> Result<()> {
        let (mut sources, mut signs) = (Vec::new(), Vec::new());
        for &(address, len) in pieces {
            // SAFETY: promised by the caller; unregistering waits for the sign.
            let (source, gone) = unsafe { foreign(address, len) }?;
            sources.push(source);
            signs.push(gone);
        }
        let regions = self.engine.register_many(sources).await?;
        for (at, (region, gone)) in regions.into_iter().zip(signs).enumerate() {
            if let Err(error) = self.parts.regions.add(region, gone) {
                pieces[..at].iter().for_each(|(start, _)| self.parts.regions.forget(*start));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Closes memory that was registered by its address, all pieces or none, and waits until no transfer uses it any more.
    ///
    /// # Errors
    /// [`EngineCode::AddressNotRegistered`](mooncake_transport::engine::EngineCode) when no registered memory begins at an address. `OBJECT_REPLICA_BUSY` when a transfer does not
    /// end within a minute: then the memory must stay allocated for good.
    pub async fn unregister_raw(&self, addresses: &[u64]) -> Result<()> {
        let mut all_gone = true;
        for gone in self.parts.regions.take(addresses)? {
            all_gone &= gone.within(UNUSED_WITHIN).await;
        }
        let published = self.engine.settle_publication().await;
        // Whatever became of the directory: who hears that the memory is in use must not free it.
        if all_gone { published } else { Err(still_in_use()) }
    }

    /// Registers memory of the caller's for as long as `work` runs. Returns when it is closed again and the last slice of it is
    /// gone; a slice that is kept for ever keeps the caller here for ever.
    ///
    /// Blocks the thread: on a runtime it must be one with several threads. `work` may begin transfers and wait for their tickets.
    ///
    /// # Panics
    /// In a task of a `LocalSet`, which cannot be blocked.
    ///
    /// # Errors
    /// As [`register_raw`](Self::register_raw), and `INVALID_PARAMS` on a runtime of one thread. `work` has not run then.
    pub fn lend<R>(&self, bytes: &mut [u8], work: impl FnOnce(&Region<TransportSet>) -> R) -> Result<R> {
        let span = NonNull::from(&mut *bytes).cast::<u8>();
        // SAFETY: `until_gone` does not let go of the borrow before the sign is set, even when `work` panics.
        let (source, gone) = unsafe { foreign(span.as_ptr().expose_provenance() as u64, bytes.len()) }?;
        let until_gone = UntilGone(gone);
        let region = self.block_on(self.engine.register(source))??;
        let result = work(&region);
        drop(region);
        drop(until_gone);
        self.block_on(self.engine.settle_publication())??;
        Ok(result)
    }

    fn block_on<F: Future>(&self, future: F) -> Result<F::Output> {
        match Handle::try_current() {
            Ok(here) if here.runtime_flavor() == RuntimeFlavor::CurrentThread => Err(Error::invalid(
                "this call blocks, and would block the one thread of this runtime; make it on a thread of its own",
            )),
            Ok(_) => Ok(tokio::task::block_in_place(|| self.parts.runtime.block_on(future))),
            Err(_) => Ok(self.parts.runtime.block_on(future)),
        }
    }

    /// A new buffer of registered memory, cut from larger regions; its address.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for no bytes; whatever keeps memory from being allocated or registered.
    pub async fn allocate_managed(&self, len: u64) -> Result<u64> {
        self.parts.managed.allocate(&self.engine, &self.parts.regions, len).await
    }

    /// Gives back what [`allocate_managed`](Self::allocate_managed) gave. Its memory is used again when no transfer uses it any more.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when no managed buffer of that length begins there: nothing is freed.
    pub fn free_managed(&self, address: u64, len: u64) -> Result<()> {
        self.parts.managed.free(&self.parts.regions, address, len)
    }
}

/// Holds on to borrowed memory until nothing uses it.
struct UntilGone(Arc<Gone>);

impl Drop for UntilGone {
    fn drop(&mut self) {
        while !self.0.wait(UNUSED_WITHIN) {
            tracing::warn!(
                "memory that was lent for a while is still in use; waiting for who kept a part of it"
            );
        }
    }
}

impl Deref for TransferEngine {
    type Target = Engine<TransportSet>;

    fn deref(&self) -> &Engine<TransportSet> {
        &self.engine
    }
}

/// Settings of a [`TransferEngine`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `start`"]
pub struct TransferEngineBuilder {
    name: String,
    metadata: String,
    pub(crate) options: DirectoryOptions,
    directory: Option<Directory>,
    protocol: String,
    devices: Vec<String>,
    or_tcp: bool,
    wires: Option<TransportOptions>,
    pub(crate) handshake: HandshakePort,
    local_copies: Option<LocalCopies>,
    topology: Option<Topology>,
    clock: SharedClock,
    pub(crate) timeout: Duration,
    pub(crate) longest: Option<Duration>,
    pub(crate) caches: bool,
    pub(crate) refresh: Option<Duration>,
    // Said by the environment only.
    pub(crate) port_of_name: bool,
    /// The address others are told, where the environment says it.
    pub(crate) told: Option<String>,
    pub(crate) ipv6: bool,
    pub(crate) ports: (Option<u16>, Option<u16>),
    pub(crate) force_tcp: bool,
    pub(crate) force_rdma: bool,
    pub(crate) topology_file: Option<PathBuf>,
    pub(crate) discovery: Discovery,
    pub(crate) summary: bool,
    pub(crate) summary_interval: Duration,
    #[cfg(feature = "transport-rdma")]
    pub(crate) rdma: Option<mooncake_rdma::RdmaConfig>,
    #[cfg(feature = "transport-rdma")]
    pub(crate) partners: (bool, Vec<(String, Vec<String>)>),
    #[cfg(feature = "transport-nvlink")]
    pub(crate) gpu: Gpu,
    #[cfg(feature = "transport-tcp")]
    pub(crate) tcp: Option<mooncake_tcp::TcpConfig>,
}

/// What the environment says of NVLink.
#[cfg(feature = "transport-nvlink")]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gpu {
    pub(crate) force: bool,
    pub(crate) intra_node: bool,
    pub(crate) ipc: bool,
}

impl Default for TransferEngineBuilder {
    fn default() -> Self {
        Self {
            name: String::new(),
            metadata: P2P.into(),
            options: DirectoryOptions::default(),
            directory: None,
            protocol: String::new(),
            devices: Vec::new(),
            or_tcp: false,
            wires: None,
            handshake: HandshakePort::default(),
            local_copies: None,
            topology: None,
            clock: SystemClock::shared(),
            timeout: Duration::from_secs(30),
            longest: None,
            caches: true,
            refresh: None,
            port_of_name: false,
            told: None,
            ipv6: false,
            ports: (None, None),
            force_tcp: false,
            force_rdma: false,
            topology_file: None,
            discovery: Discovery::default(),
            summary: false,
            summary_interval: Duration::from_secs(5),
            #[cfg(feature = "transport-rdma")]
            rdma: None,
            #[cfg(feature = "transport-rdma")]
            partners: (false, Vec::new()),
            #[cfg(feature = "transport-nvlink")]
            gpu: Gpu::default(),
            #[cfg(feature = "transport-tcp")]
            tcp: None,
        }
    }
}

impl TransferEngineBuilder {
    /// The segment's name, under which others open it. With `P2PHANDSHAKE` only its host counts, and the handshake port is added:
    /// see [`Engine::name`] of what was started.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Where segments are found, as the existing system spells it: `P2PHANDSHAKE` (the default), `http://host:port/metadata`,
    /// `etcd://host:port,host:port` or `redis://host:port` (features `metadata-etcd`, `metadata-redis`); `rocksdb:///path` for the engines of one process (`metadata-rocksdb`).
    pub fn metadata(mut self, text: impl Into<String>) -> Self {
        self.metadata = text.into();
        self
    }

    /// What tells the keys of this cluster from those of others in the same directory (`MC_METADATA_CLUSTER_ID`).
    pub fn cluster_id(mut self, id: impl Into<String>) -> Self {
        self.options.cluster_id = id.into();
        self
    }

    /// Who we are to a directory in Redis (`MC_REDIS_USERNAME`, `MC_REDIS_PASSWORD`, `MC_REDIS_DB_INDEX`).
    pub fn redis_login(mut self, login: RedisLogin) -> Self {
        self.options.redis = login;
        self
    }

    /// A directory of the caller's, in place of [`metadata`](Self::metadata).
    pub fn directory(mut self, directory: Directory) -> Self {
        self.directory = Some(directory);
        self
    }

    /// The wire between hosts by its name (`tcp`); the best one built in when empty. Shared memory is used beside it.
    pub fn protocol(mut self, protocol: impl Into<String>) -> Self {
        self.protocol = protocol.into();
        self
    }

    /// The devices of that wire, with commas between them; all there are when empty or `auto-discovery`. Only RDMA has devices, and
    /// each one named must work.
    pub fn devices(mut self, names: &str) -> Self {
        let named = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        self.devices = if names.trim() == AUTO { Vec::new() } else { named.map(str::to_owned).collect() };
        self
    }

    /// Goes on with TCP alone where the wire of that name cannot be had: it is not built in, or there is no device for it. The log
    /// says so, and [`TransferEngine::instead`]. By default that is an error, and with `MC_FORCE_HCA` it stays one, as do settings of the wire
    /// that cannot work.
    pub fn or_tcp(mut self) -> Self {
        self.or_tcp = true;
        self
    }

    /// The wires one by one, in place of [`protocol`](Self::protocol).
    pub fn wires(mut self, wires: TransportOptions) -> Self {
        self.wires = Some(wires);
        self
    }

    /// The handshake port: host, address and ports to choose from.
    pub fn handshake(mut self, port: HandshakePort) -> Self {
        self.handshake = port;
        self
    }

    /// Which transfers are plain copies; by default those inside this process.
    pub fn local_copies(mut self, which: LocalCopies) -> Self {
        self.local_copies = Some(which);
        self
    }

    /// Which devices are near which memory, in place of what is found on this host.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// The clock of deadlines.
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = clock;
        self
    }

    /// How long a transfer may take when it is given no deadline, beside a nanosecond per byte; 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Whether an opened segment is looked up once, and again when a transfer with it fails (the default), or at each opening.
    pub fn cache_descriptors(mut self, yes: bool) -> Self {
        self.caches = yes;
        self
    }

    /// Looks all opened segments up at this interval, a millisecond at least.
    pub fn refresh_every(mut self, interval: Duration) -> Self {
        self.refresh = Some(interval);
        self
    }

    /// Logs what was moved, a line at this interval (a millisecond at least) if there was anything; by default it does not.
    pub fn summary_every(mut self, interval: Duration) -> Self {
        (self.summary, self.summary_interval) = (true, interval.max(Duration::from_millis(1)));
        self
    }

    /// Opens the wires and the handshake port, takes the name and publishes an empty segment. All runs on the current tokio runtime.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a wire or directory that is not built in, `INVALID_PARAMS` outside a runtime, `SEGMENT_ALREADY_EXISTS`
    /// for a name in use; a port that is in use, or a directory that does not answer, by name.
    pub async fn start(mut self) -> Result<TransferEngine> {
        let runtime = Handle::try_current().map_err(|_| {
            Error::invalid("a transfer engine is started on a tokio runtime, and there is none here")
        })?;
        let directory = match self.directory.take() {
            Some(directory) => directory,
            None => Directory::connect_with(&self.metadata, &self.options)?,
        };
        self.settle_port(&directory);
        let (transport, instead) = self.open_wires(&runtime)?;
        let transport = Arc::new(transport);
        let mut engine = Engine::builder(transport)
            .name(self.name)
            .directory(directory)
            .handshake(self.handshake)
            .cache_descriptors(self.caches)
            .clock(self.clock);
        if let Some(which) = self.local_copies {
            engine = engine.local_copies(which);
        }
        if let Some(interval) = self.refresh {
            engine = engine.refresh_every(interval);
        }
        let engine = engine.start().await?;
        let interval = self.summary.then_some(self.summary_interval);
        let summary =
            interval.map(|interval| runtime.spawn(log_every(engine.clone(), interval)).abort_handle());
        let parts = Parts {
            batches: Batches::default(),
            managed: Managed::default(),
            regions: Arc::default(),
            runtime,
            timeout: self.timeout,
            topology: self
                .topology
                .unwrap_or_else(|| Topology::of_this_host(&self.discovery, self.topology_file.as_deref())),
            longest: self.longest,
            summary,
            instead,
            #[cfg(feature = "transport-nvlink")]
            streams: crate::on_stream::Streams::default(),
        };
        Ok(TransferEngine { engine, parts: Arc::new(parts) })
    }

    fn open_wires(&mut self, runtime: &Handle) -> Result<(TransportSet, Option<Error>)> {
        if let Some(wires) = self.wires.take() {
            return Ok((wires.open(runtime, &self.clock)?, None));
        }
        match self.transport_options().and_then(|wires| wires.open(runtime, &self.clock)) {
            // Settings that are wrong stay wrong, and whoever made them is to know.
            Err(error)
                if self.or_tcp
                    && !self.force_rdma
                    && self.protocol != "tcp"
                    && error.kind() != ErrorKind::Invalid =>
            {
                self.protocol = "tcp".into();
                let wires = self.transport_options()?;
                tracing::warn!("{error}; going on with tcp");
                Ok((wires.open(runtime, &self.clock)?, Some(error)))
            }
            opened => Ok((opened?, None)),
        }
    }

    /// The wires of the [protocol](Self::protocol) with its devices, and what the environment says of them: what `start` opens.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a wire that is not built in.
    pub fn transport_options(&self) -> Result<TransportOptions> {
        let protocol = match (self.force_tcp, self.force_rdma) {
            (true, _) => "tcp",
            (_, true) => "rdma",
            #[cfg(feature = "transport-nvlink")]
            _ if self.gpu.intra_node => "nvlink_intra",
            #[cfg(feature = "transport-nvlink")]
            _ if self.gpu.force => "nvlink",
            _ => &self.protocol,
        };
        #[allow(unused_mut, reason = "without a wire there is nothing to change")]
        let mut wires = TransportOptions::named(protocol)?;
        #[cfg(not(feature = "transport-rdma"))]
        let _ = &self.devices;
        #[cfg(feature = "transport-rdma")]
        if let Some(rdma) = &mut wires.rdma {
            *rdma = self.rdma.clone().unwrap_or_default();
            rdma.discovery = self.discovery.clone();
            rdma.topology = self.custom_topology();
            if !self.devices.is_empty() {
                rdma.devices.clone_from(&self.devices);
            }
            if let (true, partners) = &self.partners {
                rdma.partners.clone_from(partners);
            }
        }
        #[cfg(feature = "transport-nvlink")]
        if let Some(nvlink) = &mut wires.nvlink {
            nvlink.fabric &= !self.gpu.ipc;
        }
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = &mut wires.tcp {
            *tcp = self.tcp.clone().unwrap_or_default();
            if let Some(ports) = self.drawn_ports() {
                tcp.ports = ports;
            }
        }
        Ok(if self.force_tcp { wires.without_shared_memory() } else { wires })
    }

    #[cfg(feature = "transport-rdma")]
    fn custom_topology(&self) -> Option<Topology> {
        let read = |path: &PathBuf| {
            let read = Topology::read(path);
            read.inspect_err(|error| tracing::warn!(%error, "the custom topology is not used")).ok()
        };
        let said = self.topology.clone().filter(|topology| !topology.devices().is_empty());
        said.or_else(|| self.topology_file.as_ref().and_then(read))
    }

    /// How members find each other and where they answer, as the environment has it: for who starts an [`Engine`] without this builder. That a
    /// port is the name's (`MC_LEGACY_RPC_PORT_BINDING`) is not in it.
    pub fn meeting(mut self) -> (DirectoryOptions, HandshakePort) {
        self.settle_addresses(self.metadata == P2P && !self.name.is_empty());
        (self.options, self.handshake)
    }

    /// Host and ports of the handshake port, where the environment has a say in them.
    fn settle_port(&mut self, directory: &Directory) {
        self.settle_addresses(directory.is_p2p() && !self.name.is_empty());
        if !self.port_of_name {
            return;
        }
        match own_port(&self.name) {
            Ok((host, port)) => {
                self.handshake.host = Some(host);
                self.handshake.ports = port..=port;
            }
            Err(error) => tracing::warn!(%error, "one is drawn"),
        }
    }

    fn settle_addresses(&mut self, named: bool) {
        if let Some(ports) = self.drawn_ports() {
            self.handshake.ports = ports;
        }
        // Who is found by a name that is an address is told to others as that.
        if !named {
            let first = || self.ipv6.then(|| default_host_v6().to_string());
            self.handshake.host = self.told.take().or(self.handshake.host.take()).or_else(first);
        }
        if self.ipv6 && self.handshake.bind.is_none() {
            // Both families.
            self.handshake.bind = Some(Ipv6Addr::UNSPECIFIED.into());
        }
    }
}

#[cfg(all(test, feature = "transport-rdma", feature = "transport-tcp"))]
mod tests {
    use super::*;
    use mooncake_rdma::RdmaConfig;

    /// No device, no library: TCP. Settings that cannot work: an error, with a device or without.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn tcp_stands_in_for_what_is_missing_and_not_for_what_is_wrong() {
        let with = |rdma: RdmaConfig| {
            let builder =
                TransferEngine::builder().name("127.0.0.1").protocol("rdma").devices("no such device");
            TransferEngineBuilder { rdma: Some(rdma), ..builder.or_tcp() }.start()
        };
        let engine = with(RdmaConfig::default()).await.unwrap();
        assert!(engine.instead().is_some());
        let error = with(RdmaConfig { mtu: 1500, ..RdmaConfig::default() }).await.unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("mtu"), "{error}");
    }
}
