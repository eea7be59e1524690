//! The transfer engine over every transport of the build, and its builder.

use std::net::IpAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_metadata::{DirectoryOptions, P2P, RedisLogin};
use mooncake_transport::admission::ByteBudget;
use mooncake_transport::bind_address::bind_address;
use mooncake_transport::config::{RdmaConfig, TcpConfig};
use mooncake_transport::engine::{Engine, HandshakePort, LocalCopies};
use mooncake_transport::net::HostPort;
use mooncake_transport::topology::{Discovery, Topology};
use mooncake_transport::{Directory, Region};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::AbortHandle;

use crate::addressed::{Regions, UNUSED_WITHIN, UnusedSignal, caller_memory, still_in_use_error};
use crate::batches::Batches;
use crate::built_in::StreamOrder;
use crate::failure_log::FailureLog;
use crate::managed::Managed;
use crate::summary::log_every;
use crate::transport_set::{TransportOptions, TransportSet};

/// Name that selects every device.
const AUTO: &str = "auto-discovery";

/// Transfer engine over every transport of the build. It has the methods of [`Engine`] and its own.
///
/// Clones are handles of the same engine. The drop of the last one removes the segment from the
/// metadata service in the background, if the runtime lives long enough; `close` waits for it.
#[derive(Clone, Debug)]
pub struct TransferEngine {
    engine: Engine<TransportSet>,
    pub(crate) parts: Arc<Parts>,
}

/// State of a transfer engine beside the inner engine.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) batches: Batches,
    pub(crate) managed: Managed,
    pub(crate) failures: Arc<FailureLog>,
    pub(crate) regions: Arc<Regions>,
    pub(crate) runtime: Handle,
    timeout: Duration,
    topology: Topology,
    max_timeout: Option<Duration>,
    summary: Option<AbortHandle>,
    fallback_reason: Option<Error>,
    bound: Option<IpAddr>,
    /// Stream order of the transfers, created by the first transfer that needs it.
    pub(crate) streams: OnceLock<StreamOrder>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        if let Some(summary) = &self.summary {
            summary.abort();
        }
    }
}

impl TransferEngine {
    /// Returns the error of the selected transport, if TCP replaces it
    /// ([`allow_tcp_fallback`](TransferEngineBuilder::allow_tcp_fallback)).
    pub fn fallback_reason(&self) -> Option<&Error> {
        self.parts.fallback_reason.as_ref()
    }

    /// Returns the address at which the ports of the engine listen. `None` stands for every
    /// address.
    pub fn bound_address(&self) -> Option<IpAddr> {
        self.parts.bound
    }

    /// Returns a builder; [`start`](TransferEngineBuilder::start) starts the engine.
    pub fn builder() -> TransferEngineBuilder {
        TransferEngineBuilder::default()
    }

    /// Returns the network devices near each memory location: those of the builder, or those found
    /// at the start.
    pub fn topology(&self) -> &Topology {
        &self.parts.topology
    }

    /// Returns the inner engine, for code that is generic in the transport.
    pub fn engine(&self) -> &Engine<TransportSet> {
        &self.engine
    }

    /// Returns the default time limit of a transfer: the engine's timeout and a nanosecond per
    /// byte.
    pub fn timeout_for(&self, bytes: u64) -> Duration {
        let timeout = self.parts.timeout.saturating_add(Duration::from_nanos(bytes));
        self.parts.max_timeout.map_or(timeout, |max| timeout.min(max))
    }

    /// Returns the maximum time limit of a transfer, if `MC_SLICE_TIMEOUT` or the builder set one.
    pub fn max_timeout(&self) -> Option<Duration> {
        self.parts.max_timeout
    }

    /// Returns the table of memory registered by address.
    pub fn regions(&self) -> &Arc<Regions> {
        &self.parts.regions
    }

    /// Registers memory of the caller by its address, for peers and for requests that name an
    /// address.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an empty or unmapped range, and for an overlap with memory that is open
    /// to peers, with [`EngineCode::AddressOverlapped`](mooncake_transport::engine::EngineCode).
    ///
    /// # Safety
    /// As [`register_raw_many`](Self::register_raw_many).
    pub async unsafe fn register_raw(&self, address: u64, len: usize) -> Result<()> {
        let ranges = [(address, len)];
        // SAFETY: passed on.
        unsafe { self.register_raw_many(&ranges) }.await
    }

    /// Registers several ranges, all or none, and publishes them once.
    ///
    /// # Errors
    /// As [`register_raw`](Self::register_raw).
    ///
    /// # Safety
    /// The bytes stay allocated, readable and writable until
    /// [`unregister_raw`](Self::unregister_raw) has returned without an error, or the engine and
    /// everything taken from it is dropped. The caller expects peers and requests to read and write
    /// them at any time.
    pub async unsafe fn register_raw_many(&self, ranges: &[(u64, usize)]) -> Result<()> {
        let (mut sources, mut signals) = (Vec::new(), Vec::new());
        for &(address, len) in ranges {
            // SAFETY: promised by the caller; `unregister_raw` waits for the signal.
            let (source, signal) = unsafe { caller_memory(address, len) }?;
            sources.push(source);
            signals.push(signal);
        }
        let regions = self.engine.register_many(sources).await?;
        for (region, signal) in regions.into_iter().zip(signals) {
            self.parts.regions.add(region, signal);
        }
        Ok(())
    }

    /// Registers several ranges for the local side of transfers only, all or none. Peers are
    /// refused. The memory may overlap other memory of this engine.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an empty or unmapped range, and the errors of the transport.
    ///
    /// # Safety
    /// As [`register_raw_many`](Self::register_raw_many), without peers.
    pub unsafe fn register_raw_local(&self, ranges: &[(u64, usize)]) -> Result<()> {
        let mut regions = Vec::with_capacity(ranges.len());
        for &(address, len) in ranges {
            // SAFETY: promised by the caller; `unregister_raw` waits for the signal.
            let (source, signal) = unsafe { caller_memory(address, len) }?;
            regions.push((self.engine.register_local(source)?, signal));
        }
        regions.into_iter().for_each(|(region, signal)| self.parts.regions.add(region, signal));
        Ok(())
    }

    /// Unregisters memory by its addresses, all or none, and waits until no transfer uses it.
    ///
    /// # Errors
    /// [`EngineCode::AddressNotRegistered`](mooncake_transport::engine::EngineCode) if no
    /// registered memory begins at an address. `OBJECT_REPLICA_BUSY` if a transfer does not end
    /// within a minute: the memory must stay allocated for ever then.
    pub async fn unregister_raw(&self, addresses: &[u64]) -> Result<()> {
        let mut all_unused = true;
        for signal in self.parts.regions.take(addresses)? {
            all_unused &= signal.within(UNUSED_WITHIN).await;
        }
        let published = self.engine.settle_publication().await;
        // Memory in use must not be freed, so that this error precedes one of the publication.
        if all_unused { published } else { Err(still_in_use_error()) }
    }

    /// Registers memory of the caller while `work` runs. Returns when the memory is unregistered
    /// and its last slice is dropped; a slice that is never dropped blocks the caller for ever.
    ///
    /// The call blocks the thread, so that a runtime around it needs several threads. `work` may
    /// begin transfers and wait for their tickets.
    ///
    /// # Panics
    /// In a task of a `LocalSet`, which cannot be blocked.
    ///
    /// # Errors
    /// Those of [`register_raw`](Self::register_raw), and `INVALID_PARAMS` on a single-threaded
    /// runtime. `work` has not run then.
    pub fn with_registered<R>(
        &self,
        bytes: &mut [u8],
        work: impl FnOnce(&Region<TransportSet>) -> R,
    ) -> Result<R> {
        let span = NonNull::from(&mut *bytes).cast::<u8>();
        // SAFETY: `wait_guard` holds the borrow until the signal is set, even if `work` panics.
        let (source, signal) =
            unsafe { caller_memory(span.as_ptr().expose_provenance() as u64, bytes.len()) }?;
        let wait_guard = WaitUntilUnused(signal);
        let region = self.block_on(self.engine.register(source))??;
        let result = work(&region);
        drop(region);
        drop(wait_guard);
        self.block_on(self.engine.settle_publication())??;
        Ok(result)
    }

    fn block_on<F: Future>(&self, future: F) -> Result<F::Output> {
        match Handle::try_current() {
            Ok(handle) if handle.runtime_flavor() == RuntimeFlavor::CurrentThread => {
                Err(Error::invalid("cannot block: the runtime has one thread; call from another thread"))
            }
            Ok(_) => Ok(tokio::task::block_in_place(|| self.parts.runtime.block_on(future))),
            Err(_) => Ok(self.parts.runtime.block_on(future)),
        }
    }

    /// Allocates a buffer of registered memory from larger regions, and returns its address.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a length of 0, or the error of the allocation or registration.
    pub async fn allocate_managed(&self, len: u64) -> Result<u64> {
        self.parts.managed.allocate(&self.engine, &self.parts.regions, len).await
    }

    /// Frees a buffer of [`allocate_managed`](Self::allocate_managed). Its memory is reused when no
    /// transfer uses it.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if no managed buffer of that length begins there. Nothing is freed then.
    pub fn free_managed(&self, address: u64, len: u64) -> Result<()> {
        self.parts.managed.free(&self.parts.regions, address, len)
    }
}

/// Guard that waits on drop until nothing uses the borrowed memory.
struct WaitUntilUnused(Arc<UnusedSignal>);

impl Drop for WaitUntilUnused {
    fn drop(&mut self) {
        while !self.0.wait(UNUSED_WITHIN) {
            tracing::warn!("borrowed memory is still in use; waiting until its slices are dropped");
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
#[must_use = "the engine begins with `start`"]
pub struct TransferEngineBuilder {
    name: String,
    metadata: String,
    pub(crate) options: DirectoryOptions,
    directory: Option<Directory>,
    protocol: String,
    devices: Vec<String>,
    allow_tcp_fallback: bool,
    transports: Option<TransportOptions>,
    pub(crate) handshake: HandshakePort,
    local_copies: Option<LocalCopies>,
    topology: Option<Topology>,
    clock: SharedClock,
    pub(crate) timeout: Duration,
    pub(crate) max_timeout: Option<Duration>,
    /// Limit of the bytes of incomplete requests and unread responses of the process.
    pub(crate) connection_bytes: Option<u64>,
    pub(crate) cache_descriptors: bool,
    pub(crate) refresh: Option<Duration>,
    unused_after: Option<Duration>,
    // Set by the environment only.
    pub(crate) port_of_name: bool,
    /// Address to publish, if the environment sets one.
    pub(crate) published_host: Option<String>,
    pub(crate) bind_address: String,
    pub(crate) ports: (Option<u16>, Option<u16>),
    pub(crate) force_tcp: bool,
    pub(crate) force_rdma: bool,
    pub(crate) topology_file: Option<PathBuf>,
    pub(crate) discovery: Discovery,
    pub(crate) summary: bool,
    pub(crate) summary_interval: Duration,
    pub(crate) rdma: Option<RdmaConfig>,
    pub(crate) partners: (bool, Vec<(String, Vec<String>)>),
    pub(crate) gpu: Gpu,
    pub(crate) tcp: Option<TcpConfig>,
}

/// NVLink settings of the environment.
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
            allow_tcp_fallback: false,
            transports: None,
            handshake: HandshakePort::default(),
            local_copies: None,
            topology: None,
            clock: SystemClock::shared(),
            timeout: Duration::from_secs(30),
            max_timeout: None,
            connection_bytes: None,
            cache_descriptors: true,
            refresh: None,
            unused_after: None,
            port_of_name: false,
            published_host: None,
            bind_address: String::new(),
            ports: (None, None),
            force_tcp: false,
            force_rdma: false,
            topology_file: None,
            discovery: Discovery::default(),
            summary: false,
            summary_interval: Duration::from_secs(5),
            rdma: None,
            partners: (false, Vec::new()),
            gpu: Gpu::default(),
            tcp: None,
        }
    }
}

impl TransferEngineBuilder {
    /// Sets the name of the segment. With `P2PHANDSHAKE`, only its host is used and the handshake
    /// port is added: [`Engine::name`] returns the result.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the metadata service, as Mooncake C++ spells it: `P2PHANDSHAKE` (the default),
    /// `http://host:port/metadata`, `etcd://host:port,host:port` or `redis://host:port` (features
    /// `metadata-etcd`, `metadata-redis`), or `rocksdb:///path` for the engines of one process
    /// (`metadata-rocksdb`).
    pub fn metadata(mut self, text: impl Into<String>) -> Self {
        self.metadata = text.into();
        self
    }

    /// Sets the prefix of this cluster's keys in the metadata service (`MC_METADATA_CLUSTER_ID`).
    pub fn cluster_id(mut self, id: impl Into<String>) -> Self {
        self.options.cluster_id = id.into();
        self
    }

    /// Sets the login of a metadata service in Redis (`MC_REDIS_USERNAME`, `MC_REDIS_PASSWORD`,
    /// `MC_REDIS_DB_INDEX`).
    pub fn redis_login(mut self, login: RedisLogin) -> Self {
        self.options.redis = login;
        self
    }

    /// Sets a metadata service of the caller, in place of [`metadata`](Self::metadata).
    pub fn directory(mut self, directory: Directory) -> Self {
        self.directory = Some(directory);
        self
    }

    /// Sets the transport between hosts by its name, such as `tcp`. Empty selects the first one of
    /// the build. Shared memory is used beside it.
    pub fn protocol(mut self, protocol: impl Into<String>) -> Self {
        self.protocol = protocol.into();
        self
    }

    /// Sets the devices of the transport, separated by commas. Empty or `auto-discovery` selects
    /// all. Only RDMA has devices, and every named device must work.
    pub fn devices(mut self, names: &str) -> Self {
        let selected = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        self.devices = if names.trim() == AUTO { Vec::new() } else { selected.map(str::to_owned).collect() };
        self
    }

    /// Uses TCP alone if the selected transport cannot be opened: the build lacks it, or it has no
    /// device. [`TransferEngine::fallback_reason`] and the log have the error. Without this call
    /// the start fails. The start fails in any case with `MC_FORCE_HCA` and for invalid settings.
    pub fn allow_tcp_fallback(mut self) -> Self {
        self.allow_tcp_fallback = true;
        self
    }

    /// Sets the transports one by one, in place of [`protocol`](Self::protocol).
    pub fn transports(mut self, transports: TransportOptions) -> Self {
        self.transports = Some(transports);
        self
    }

    /// Sets the handshake port: host, address and ports to choose from.
    pub fn handshake(mut self, port: HandshakePort) -> Self {
        self.handshake = port;
        self
    }

    /// Sets the address of this host at which every port of the engine listens
    /// (`MC_BIND_ADDRESS`). Empty, the default, selects loopback if the name is loopback, else
    /// every address. `0.0.0.0` or `::` selects every address.
    pub fn bind_address(mut self, address: impl Into<String>) -> Self {
        self.bind_address = address.into();
        self
    }

    /// Selects the transfers that are plain copies; by default those inside this process.
    pub fn local_copies(mut self, which: LocalCopies) -> Self {
        self.local_copies = Some(which);
        self
    }

    /// Sets the devices near each memory location, in place of those found on this host.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Sets the clock of deadlines.
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the time limit of a transfer without a deadline, beside a nanosecond per byte; 30 s by
    /// default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets whether descriptors are cached: a segment is looked up once, and again after a failed
    /// transfer (the default). Otherwise each opening looks it up.
    pub fn cache_descriptors(mut self, yes: bool) -> Self {
        self.cache_descriptors = yes;
        self
    }

    /// Looks up all opened segments at this interval, at least 1 ms.
    pub fn refresh_every(mut self, interval: Duration) -> Self {
        self.refresh = Some(interval);
        self
    }

    /// Sets the time after which an opened segment is closed that no request uses and to whose
    /// process there is no connection, at least a millisecond. The default is 10 s.
    pub fn close_unused_after(mut self, time: Duration) -> Self {
        self.unused_after = Some(time);
        self
    }

    /// Logs a summary of the transfers at this interval, at least 1 ms, if there were any. Without
    /// this call there is none.
    pub fn summary_every(mut self, interval: Duration) -> Self {
        (self.summary, self.summary_interval) = (true, interval.max(Duration::from_millis(1)));
        self
    }

    /// Opens the transports and the handshake port, claims the name and publishes an empty segment.
    /// The engine runs on the current tokio runtime.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a transport or metadata service that the build lacks, `INVALID_PARAMS`
    /// outside a runtime, `SEGMENT_ALREADY_EXISTS` for a name in use, or the error of a port or of
    /// the metadata service.
    pub async fn start(mut self) -> Result<TransferEngine> {
        let runtime = Handle::try_current().map_err(|_| {
            Error::invalid("cannot start transfer engine: no tokio runtime; start it inside one")
        })?;
        let directory = match self.directory.take() {
            Some(directory) => directory,
            None => mooncake_metadata::connect(&self.metadata, &self.options)?,
        };
        if let Some(limit) = self.connection_bytes {
            ByteBudget::of_process().set_limit(limit);
        }
        self.settle_port(&directory);
        let published = self.handshake.configured_host(&self.name, directory.is_p2p());
        let bound = bind_address(&self.bind_address, published.as_deref())?;
        self.handshake.bind = self.handshake.bind.or(bound);
        let (transport, fallback_reason) = self.open_transports(&runtime, bound)?;
        let transport = Arc::new(transport);
        let mut engine = Engine::builder(transport)
            .name(self.name)
            .directory(directory)
            .handshake(self.handshake)
            .cache_descriptors(self.cache_descriptors)
            .clock(self.clock);
        if let Some(which) = self.local_copies {
            engine = engine.local_copies(which);
        }
        if let Some(interval) = self.refresh {
            engine = engine.refresh_every(interval);
        }
        if let Some(time) = self.unused_after {
            engine = engine.close_unused_after(time);
        }
        let engine = engine.start().await?;
        let interval = self.summary.then_some(self.summary_interval);
        let summary =
            interval.map(|interval| runtime.spawn(log_every(engine.clone(), interval)).abort_handle());
        let parts = Parts {
            batches: Batches::default(),
            managed: Managed::default(),
            failures: Arc::new(FailureLog::new(engine.clock().clone())),
            regions: Arc::default(),
            runtime,
            timeout: self.timeout,
            topology: self
                .topology
                .unwrap_or_else(|| Topology::of_this_host(&self.discovery, self.topology_file.as_deref())),
            max_timeout: self.max_timeout,
            summary,
            fallback_reason,
            bound,
            streams: OnceLock::new(),
        };
        Ok(TransferEngine { engine, parts: Arc::new(parts) })
    }

    fn open_transports(
        &mut self,
        runtime: &Handle,
        bound: Option<IpAddr>,
    ) -> Result<(TransportSet, Option<Error>)> {
        let clock = self.clock.clone();
        let open = |transports: TransportOptions| transports.bound_to(bound).open(runtime, &clock);
        if let Some(transports) = self.transports.take() {
            return Ok((open(transports)?, None));
        }
        match self.transport_options().and_then(open) {
            // Invalid settings are reported, not replaced.
            Err(error)
                if self.allow_tcp_fallback
                    && !self.force_rdma
                    && self.protocol != "tcp"
                    && error.kind() != ErrorKind::Invalid =>
            {
                self.protocol = "tcp".into();
                let transports = self.transport_options()?;
                tracing::warn!(%error, "transport unavailable; using tcp");
                Ok((open(transports)?, Some(error)))
            }
            Ok(opened) => Ok((opened, None)),
            Err(error) => Err(match self.protocol_and_variable().1 {
                Some(variable) => error.context(variable),
                None => error,
            }),
        }
    }

    /// Returns the protocol, and the variable of the environment that chose it.
    fn protocol_and_variable(&self) -> (&str, Option<&'static str>) {
        match (self.force_tcp, self.force_rdma) {
            (true, _) => ("tcp", Some("MC_FORCE_TCP")),
            (_, true) => ("rdma", Some("MC_FORCE_HCA")),
            _ if self.gpu.intra_node => ("nvlink_intra", Some("MC_INTRANODE_NVLINK")),
            _ if self.gpu.force => ("nvlink", Some("MC_FORCE_MNNVL")),
            _ => (&self.protocol, None),
        }
    }

    /// Returns the transports that `start` opens: those of the [protocol](Self::protocol) with its
    /// devices and the settings of the environment.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a transport that the build lacks.
    pub fn transport_options(&self) -> Result<TransportOptions> {
        let mut transports = TransportOptions::for_protocol(self.protocol_and_variable().0)?;
        if let Some(rdma) = &mut transports.rdma {
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
        if let Some(nvlink) = &mut transports.nvlink {
            nvlink.fabric &= !self.gpu.ipc;
        }
        if let Some(tcp) = &mut transports.tcp {
            *tcp = self.tcp.clone().unwrap_or_default();
            if let Some(ports) = self.drawn_ports() {
                tcp.ports = ports;
            }
        }
        Ok(if self.force_tcp { transports.without_shared_memory() } else { transports })
    }

    fn custom_topology(&self) -> Option<Topology> {
        let read = |path: &PathBuf| {
            let read = Topology::read(path);
            read.inspect_err(|error| tracing::warn!(%error, "the custom topology is not used")).ok()
        };
        let configured = self.topology.clone().filter(|topology| !topology.devices().is_empty());
        configured.or_else(|| self.topology_file.as_ref().and_then(read))
    }

    /// Returns the settings of the metadata service and the handshake port, for an [`Engine`] that
    /// is started without this builder. `MC_LEGACY_RPC_PORT_BINDING` has no effect on them.
    pub fn meeting(mut self) -> (DirectoryOptions, HandshakePort) {
        self.settle_addresses(self.metadata == P2P && !self.name.is_empty());
        (self.options, self.handshake)
    }

    /// Applies the environment to the host and the ports of the handshake port.
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
            Err(error) => tracing::warn!(%error, "the engine name has no port; choosing one"),
        }
    }

    fn settle_addresses(&mut self, is_name_address: bool) {
        if let Some(ports) = self.drawn_ports() {
            self.handshake.ports = ports;
        }
        // An engine whose name is an address publishes that address.
        if !is_name_address {
            self.handshake.host = self.published_host.take().or(self.handshake.host.take());
        }
    }
}

/// Returns the host and the port of an engine name.
///
/// # Errors
/// `INVALID_PARAMS` if the name has no port.
fn own_port(name: &str) -> Result<(String, u16)> {
    let at = HostPort::parse(name, 0);
    if at.host.is_empty() || at.port == 0 {
        return Err(Error::invalid(format!(
            "cannot take the handshake port from the engine name: {name:?} is not host:port; unset MC_LEGACY_RPC_PORT_BINDING or change the name"
        )));
    }
    Ok((at.host, at.port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_name_needs_a_port() {
        assert_eq!(own_port("10.0.0.1:123").unwrap(), ("10.0.0.1".into(), 123));
        for name in ["", "10.0.0.1", ":5", "[::1]"] {
            assert!(own_port(name).is_err(), "{name}");
        }
    }

    /// TCP replaces RDMA without a device or library. Invalid settings fail with or without a
    /// device.
    #[cfg(all(feature = "transport-rdma", feature = "transport-tcp"))]
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn tcp_replaces_a_missing_transport_and_not_an_invalid_one() {
        let with = |rdma: RdmaConfig| {
            let builder =
                TransferEngine::builder().name("127.0.0.1").protocol("rdma").devices("no such device");
            TransferEngineBuilder { rdma: Some(rdma), ..builder.allow_tcp_fallback() }.start()
        };
        let engine = with(RdmaConfig::default()).await.unwrap();
        assert!(engine.fallback_reason().is_some());
        let error = with(RdmaConfig { mtu: 1500, ..RdmaConfig::default() }).await.unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("mtu"), "{error}");
    }
}
