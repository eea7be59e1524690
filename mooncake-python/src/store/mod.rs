//! `MooncakeDistributedStore`: the calls in Rust. What needs torch is in `python/mooncake/store.py`, on top of them.

mod bytes;
mod futures;
mod objects;
mod offered;
mod ranges;
mod replicas;
mod segments;
mod sessions;
mod tensors;
mod zero_copy;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::addressed::{Landing, Regions};
use mooncake_store::client::{Client, ClientConfig, ClientPages, HotCacheConfig, MAX_TIMEOUT};
use mooncake_store::config::ClientEnvironment;
use mooncake_store::local::{LocalClient, LocalConfig};
use mooncake_transport::engine::EngineCode;
use mooncake_transport::{Engine, Region, Slice, SliceMut};
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::Uint;
use crate::engine::InnerTransferEngine;
use crate::error::{Errors, LastError};
use crate::exit;
use crate::host::huge_pages;
use crate::lease::Arena;
use crate::member::{Located, Member};
use crate::memory::Wire;
use crate::runtime::{not_forked, runtime, wait};

pub(crate) use self::replicas::{
    Descriptor, DiskDescriptor, MemoryDescriptor, QueryTaskResponse, ReplicaDescriptor,
};
pub(crate) use self::tensors::LocatedObject;

/// What calls that give a number return before setup and after close.
const NOT_SET_UP: i64 = -600;
/// Longest time one call takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Stores that are set up, so that they leave their clusters when the interpreter ends.
static OPEN: Mutex<Vec<Weak<Session>>> = Mutex::new(Vec::new());

/// One client of a cluster, from setup to close.
pub(crate) struct Session {
    pub(crate) client: Member,
    /// Pages over HTTP, while they are served.
    pages: Mutex<Option<ClientPages>>,
    /// Memory of `alloc_from_mem_pool`.
    allocated: Mutex<Vec<HostMemory>>,
    pub(crate) regions: Arc<Regions>,
    /// Memory that a transfer engine registered, when one was given to setup.
    engine: Option<Arc<Regions>>,
    arena: OnceLock<Arc<Arena>>,
    arena_turn: Mutex<()>,
    reads: Mutex<HashMap<String, Located>>,
    writes: Mutex<HashMap<String, Arc<sessions::Writing>>>,
}

impl Session {
    fn new(client: Member, engine: Option<Arc<Regions>>) -> Arc<Self> {
        let regions = Arc::default();
        exit::watch(&regions);
        Arc::new(Self {
            client,
            pages: Mutex::default(),
            allocated: Mutex::default(),
            regions,
            engine,
            arena: OnceLock::new(),
            arena_turn: Mutex::default(),
            reads: Mutex::default(),
            writes: Mutex::default(),
        })
    }

    /// Registers memory for transfers. What the engine that we share has registered already is used as it is.
    fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<Wire>> {
        match self.client.register(memory.clone()) {
            Err(error)
                if self.engine.is_some()
                    && !self.client.needs_registration()
                    && error.engine_code() == EngineCode::AddressOverlapped
                    && self.regions.room(memory.span().addr()).is_err() =>
            {
                Region::unregistered(memory)
            }
            registered => registered,
        }
    }

    /// Memory to lend out.
    pub(crate) fn arena(&self) -> Result<&Arc<Arena>> {
        if let Some(arena) = self.arena.get() {
            return Ok(arena);
        }
        let _turn = self.arena_turn.lock();
        if let Some(arena) = self.arena.get() {
            return Ok(arena);
        }
        let made = Arc::new(Arena::new(&self.client, self.regions.clone())?);
        Ok(self.arena.get_or_init(|| made))
    }

    /// Registered memory to write from.
    fn source(&self, address: u64, len: usize) -> Result<Slice<Wire>> {
        let slice = match (&self.engine, self.regions.slice(address, len)) {
            (Some(engine), Err(error)) if is_unknown(&error) => engine.slice(address, len),
            (_, ours) => ours,
        }?;
        self.client.after_default_stream(slice.location())?;
        Ok(slice)
    }

    /// Registered memory to read into.
    fn sink(&self, address: u64, len: usize) -> Result<SliceMut<Wire>> {
        self.sink_until(address, len, None)
    }

    /// [`sink`](Self::sink). A clone of `landing` is kept until nothing is written there any more.
    fn sink_until(&self, address: u64, len: usize, landing: Option<&Arc<Landing>>) -> Result<SliceMut<Wire>> {
        let of = |regions: &Regions| match landing {
            Some(landing) => regions.slice_mut_until(address, len, landing),
            None => regions.slice_mut(address, len),
        };
        let slice = match (&self.engine, of(&self.regions)) {
            (Some(engine), Err(error)) if is_unknown(&error) => of(engine),
            (_, ours) => ours,
        }?;
        self.client.after_default_stream(slice.location())?;
        Ok(slice)
    }

    /// How much is registered from an address on.
    fn room(&self, address: u64) -> Result<usize> {
        let ours = self.regions.room(address);
        match (&self.engine, ours) {
            (Some(engine), Err(_)) => engine.room(address),
            (_, ours) => ours,
        }
    }

    /// Serves pages at this port, until it is closed.
    async fn serve_pages(&self, port: u16) -> Result<()> {
        let pages = self.client.own()?.serve_pages("0.0.0.0", port).await?;
        *self.pages.lock() = Some(pages);
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        let pages = self.pages.lock().take();
        if let Some(pages) = pages {
            pages.stop().await;
        }
        let outcome = self.client.close().await;
        self.regions.clear().await;
        outcome
    }
}

/// A member of a cluster's store, the part of it that needs no Python packages.
#[pyclass(subclass, frozen, module = "mooncake._mooncake", name = "Store")]
#[derive(Default)]
pub(crate) struct Store {
    session: RwLock<Option<Arc<Session>>>,
    pub(crate) errors: Arc<Errors>,
}

impl Store {
    /// The client, while there is one; that there is none is what went wrong last.
    pub(crate) fn session(&self) -> PyResult<Option<Arc<Session>>> {
        let session = self.current()?;
        if session.is_none() {
            self.errors
                .note(&Error::invalid("the store is not set up: setup() was not called, or close() was"));
        }
        Ok(session)
    }

    /// The client, while there is one, for those who only ask.
    fn current(&self) -> PyResult<Option<Arc<Session>>> {
        not_forked()?;
        Ok(self.session.read().clone())
    }

    /// Goes on with another session, and ends the one before.
    fn set(&self, py: Python<'_>, session: Arc<Session>) {
        {
            let mut open = OPEN.lock();
            open.retain(|session| session.strong_count() > 0);
            open.push(Arc::downgrade(&session));
        }
        let before = self.session.write().replace(session);
        if let Some(before) = before {
            let _ = wait(py, async move { before.close().await });
        }
    }

    /// Ends the session, if there is one. A master that is not told finds out.
    fn end(&self, py: Python<'_>) {
        let session = self.session.write().take();
        if let Some(session) = session
            && let Err(error) = wait(py, async move { session.close().await })
        {
            tracing::warn!("a store was closed without its master: {error}");
            self.errors.note(&error);
        }
    }

    /// Zero, or the number of the error.
    fn code<T>(&self, outcome: Result<T>) -> i64 {
        i64::from(self.errors.code(outcome))
    }

    /// The number, or that of the error.
    fn count(&self, outcome: Result<u64>) -> i64 {
        match outcome {
            Ok(count) => i64::try_from(count).unwrap_or(i64::MAX),
            Err(error) => i64::from(self.errors.note(&error)),
        }
    }

    /// One number for each of `n` items: their own, or that of what went wrong with all of them.
    fn counts(&self, n: usize, outcome: Result<Vec<Result<u64>>>) -> Vec<i64> {
        match outcome {
            Ok(outcomes) => outcomes.into_iter().map(|outcome| self.count(outcome)).collect(),
            Err(error) => vec![i64::from(self.errors.note(&error)); n],
        }
    }

    /// [`counts`](Self::counts) of outcomes that carry nothing.
    fn codes(&self, n: usize, outcome: Result<Vec<Result<()>>>) -> Vec<i64> {
        self.counts(n, outcome.map(|all| all.into_iter().map(|one| one.map(|()| 0)).collect()))
    }

    /// Refuses lists of different lengths.
    fn same_length(&self, lengths: &[usize]) -> Result<()> {
        if lengths.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(Error::invalid(format!("lists of different lengths: {lengths:?}")));
        }
        Ok(())
    }
}

/// Whether the memory is none that this client has been told of; its engine may have been.
fn is_unknown(error: &Error) -> bool {
    error.engine_code() == EngineCode::AddressNotRegistered
}

/// What [`Store::setup_native`] is told beside names.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Setup {
    local_hostname: String,
    metadata_server: String,
    global_segment_size: Uint,
    local_buffer_size: Uint,
    protocol: String,
    rdma_devices: String,
    master_server_addr: String,
    tenant_id: String,
    /// Ports to draw from when the hostname has none.
    first_port: u16,
    last_port: u16,
    /// Whether values are stored with checksums and compared with them.
    checksum: bool,
    /// Whether members on this host may share memory.
    share_memory: bool,
    /// Whether what is done is counted, seconds between two summaries of that in the log, and a label of it.
    metrics: bool,
    metrics_interval: u32,
    cluster_id: String,
    /// Port of its pages, if it is to have any.
    http_port: Option<u16>,
    /// Whether bytes inside of this process take no wire, and whether replicas on faster wires are read first.
    copy_in_process: bool,
    score_replicas: bool,
    /// Node of its memory.
    numa_node: Option<u32>,
    /// Longest time of a call, and of joining, in milliseconds.
    timeout_ms: Option<u32>,
    connect_timeout_ms: Option<u32>,
    /// Of what is read from other members.
    hot_bytes: u64,
    hot_longest: u64,
    hot_admission: u32,
    /// Whether more memory may be offered than there is.
    allow_overcommit: bool,
    /// Directory of its disk, if it is to have one; empty for the one the environment names.
    offload_path: Option<String>,
}

impl Setup {
    async fn connect(self, engine: Option<Engine<Wire>>) -> Result<Client> {
        let protocol = match self.protocol.as_str() {
            "" => "tcp",
            other => other,
        };
        if !self.rdma_devices.is_empty() && protocol != "rdma" {
            tracing::warn!(devices = self.rdma_devices, "devices are not used with {protocol}");
        }
        let tenant = if self.tenant_id.is_empty() { "default" } else { &self.tenant_id };
        let millis = |ms: u32| Duration::from_millis(ms.into());
        let mut config = ClientConfig {
            ports: self.first_port..=self.last_port,
            checksum: self.checksum,
            share_memory: self.share_memory,
            allow_overcommit: self.allow_overcommit,
            memory: HostMemoryOptions {
                huge_pages: huge_pages(),
                numa_node: self.numa_node,
                ..Default::default()
            },
            copy_in_process: self.copy_in_process,
            score_replicas: self.score_replicas,
            metrics: self.metrics,
            metrics_interval: Duration::from_secs(self.metrics_interval.into()),
            cluster_id: self.cluster_id,
            hot_cache: HotCacheConfig {
                bytes: self.hot_bytes,
                longest: self.hot_longest,
                admission: self.hot_admission,
            },
            segment_file: ClientEnvironment::read().segment_file.filter(|_| self.global_segment_size.0 > 0),
            offload: self.offload_path.map(|path| ClientEnvironment::read().offload(&path)),
            ..ClientConfig::default()
        };
        config.timeout = self.timeout_ms.map_or(TIMEOUT, millis).min(MAX_TIMEOUT);
        config.connect_timeout = self.connect_timeout_ms.map_or(config.connect_timeout, millis);
        (config.directory, config.handshake) = ClientEnvironment::meeting(&self.metadata_server);
        let builder = Client::builder()
            .config(config)
            .local_hostname(self.local_hostname)
            .metadata(self.metadata_server)
            .master(self.master_server_addr)
            .segment(self.global_segment_size.0)
            .local_buffer(self.local_buffer_size.0)
            .protocol(protocol)
            .wires(ClientEnvironment::wires(protocol, &self.rdma_devices)?)
            .tenant(tenant);
        match engine {
            Some(engine) => builder.engine(engine).connect().await,
            None => builder.connect().await,
        }
    }
}

#[pymethods]
impl Store {
    /// Takes what the `__init__` of a class made from this one takes.
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self::default()
    }

    /// Joins a cluster. 0, -600 for what cannot work, -1 when there is no such cluster.
    #[pyo3(name = "_setup", signature = (config, engine=None))]
    fn setup_native(
        &self,
        py: Python<'_>,
        config: Setup,
        engine: Option<PyRef<'_, InnerTransferEngine>>,
    ) -> PyResult<i64> {
        not_forked()?;
        let regions = engine.as_ref().map(|engine| engine.regions());
        // Members are found where the cluster's are; an engine that is known elsewhere lends its memory only.
        let shared = engine.filter(|engine| engine.metadata() == config.metadata_server);
        let shared = shared.map(|engine| engine.engine().engine().clone());
        let http_port = config.http_port;
        if config.offload_path.is_some() {
            // A disk has one owner at a time, and it may be the one there was.
            self.end(py);
        }
        let session = wait(py, async move {
            let is_shared = shared.is_some();
            let client = Member::Own(config.connect(shared).await?);
            // Registered with another wire, it is of use only where ours asks for no registration.
            let regions = regions.filter(|_| is_shared || !client.needs_registration());
            Ok(Session::new(client, regions))
        });
        let session = match session {
            Ok(session) => session,
            Err(error) => {
                let number = self.errors.note(&error);
                return Ok(if error.kind() == ErrorKind::Invalid { i64::from(number) } else { -1 });
            }
        };
        // Whoever was set up before has closed its pages then.
        self.set(py, session.clone());
        self.errors.clear();
        if let Some(port) = http_port {
            // The existing one goes on without, too.
            if let Err(error) = wait(py, session.serve_pages(port)) {
                tracing::warn!(port, "no health and metrics over HTTP: {error}");
            }
        }
        Ok(0)
    }

    /// Attaches to the `mooncake_client` of this host at `host:port`, or at the path of its socket: 0, or -1 when it cannot be reached. It serves
    /// values from `local_buffer_size` bytes of memory that both see; memory of `alloc_from_mem_pool` is made as it is asked for.
    fn _setup_dummy(&self, py: Python<'_>, local_buffer_size: Uint, server_address: String) -> PyResult<i64> {
        not_forked()?;
        let config = LocalConfig {
            buffer: local_buffer_size.0,
            memory: HostMemoryOptions { huge_pages: huge_pages(), ..Default::default() },
            timeout: TIMEOUT,
            ..LocalConfig::at(server_address)
        };
        let joined = wait(py, LocalClient::connect(config));
        Ok(match joined {
            Ok(client) => {
                self.set(py, Session::new(Member::Shared(client), None));
                0
            }
            Err(error) => {
                self.errors.note(&error);
                -1
            }
        })
    }

    /// Leaves the cluster; objects in this client's memory are gone. 0, also when the master cannot be told; may be repeated.
    fn close(&self, py: Python<'_>) -> PyResult<i64> {
        not_forked()?;
        self.end(py);
        Ok(0)
    }

    /// 0 when the master answers, 1 before setup and after close, 2 when it does not answer.
    fn health_check(&self, py: Python<'_>) -> PyResult<i64> {
        let Some(session) = self.current()? else { return Ok(1) };
        let healthy = wait(py, async { Ok(session.client.is_healthy().await) });
        Ok(if healthy.unwrap_or(false) { 0 } else { 2 })
    }

    /// The name others know this client by, `host:port`; empty before setup.
    fn get_hostname(&self) -> PyResult<String> {
        Ok(self.current()?.map(|session| session.client.hostname().to_owned()).unwrap_or_default())
    }

    /// What went wrong last on this store: code, name, message and peer; `None` when nothing has.
    fn last_error(&self) -> Option<LastError> {
        self.errors.last()
    }

    /// Raises what went wrong last, as an exception of `mooncake.MooncakeError`'s family; nothing when nothing has.
    fn raise_last_error(&self, py: Python<'_>) -> PyResult<()> {
        self.errors.last().map_or(Ok(()), |error| Err(error.exception(py)))
    }

    /// This object while it is set up, else `None`.
    fn _get_pyclient_capsule(slf: PyRef<'_, Self>) -> PyResult<Option<Py<Self>>> {
        let set_up = slf.current()?.is_some();
        Ok(set_up.then(|| slf.into()))
    }

    /// Notes an error that the Python part of the package found, and gives its number back.
    fn _note(&self, code: i32, message: String) -> i32 {
        self.errors.note(&Error::new(ErrorCode::from_number(code), message))
    }
}

/// Leaves every cluster and waits for transfers that use memory of the program, for the end of the interpreter.
#[pyfunction]
pub(crate) fn _close_all(py: Python<'_>) {
    if not_forked().is_err() {
        return;
    }
    crate::delivery::stop(py);
    let open = std::mem::take(&mut *OPEN.lock());
    let open: Vec<Arc<Session>> = open.iter().filter_map(Weak::upgrade).collect();
    let watched = exit::take_watched();
    if watched.is_empty() || runtime().is_err() {
        return;
    }
    // A master that does not answer must not keep the interpreter.
    const LIMIT: Duration = Duration::from_secs(2);
    let _ = wait(py, async move {
        let all = ::futures::future::join_all(open.iter().map(|session| session.close()));
        let _ = tokio::time::timeout(LIMIT, all).await;
        // Python frees memory of the program now: what travels there must have landed.
        exit::wait_until_unused(watched).await;
        Ok(())
    });
}
