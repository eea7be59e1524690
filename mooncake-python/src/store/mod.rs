//! `MooncakeDistributedStore`: the calls in Rust. `python/mooncake/store` builds the calls that
//! need torch on top of them.

mod bytes;
mod file_segment;
mod futures;
mod objects;
mod part_write;
mod ranges;
mod replicas;
mod segments;
mod sessions;
mod tensors;
mod zero_copy;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_core::settings::values::LONGEST_TIME;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::TransportSet;
use mooncake_engine::addressed::Regions;
use mooncake_store::client::{Client, ClientPages, MAX_TIMEOUT, StoreSetup};
use mooncake_store::config::{ClientEnvironment, MasterConfig};
use mooncake_store::local::{CallMemory, LocalClient, LocalConfig};
use mooncake_store::master::{DiskOptions, MasterOptions};
use mooncake_store::server::MasterServer;
use mooncake_transport::Engine;
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::Uint;
use crate::client::{Located, PythonClient, StoreClient};
use crate::engine::InnerTransferEngine;
use crate::error::{Errors, LastError};
use crate::exit;
use crate::host::huge_pages;
use crate::interpreter::detached;
use crate::lease::Arena;
use crate::runtime::{not_forked, runtime, wait};

pub(crate) use self::objects::ExistOptions;
pub(crate) use self::ranges::RangedReadSnapshot;
pub(crate) use self::replicas::{
    Descriptor, DiskDescriptor, MemoryDescriptor, QueryTaskResponse, ReplicaDescriptor,
};
pub(crate) use self::tensors::LocatedObject;

/// Result of calls that return a number, before setup and after close.
const NOT_SET_UP: i64 = -600;

/// Open sessions, which are closed when the interpreter ends.
static OPEN: Mutex<Vec<Weak<Session>>> = Mutex::new(Vec::new());

/// Client of a cluster, from setup to close.
pub(crate) struct Session {
    pub(crate) client: StoreClient,
    /// Master inside this process, if there is one.
    master: Mutex<Option<MasterServer>>,
    /// HTTP server of health and metrics, while it runs.
    pages: Mutex<Option<ClientPages>>,
    /// Memory of `alloc_from_mem_pool`.
    allocated: Mutex<Vec<HostMemory>>,
    pub(crate) regions: Arc<Regions>,
    /// Memory of the transfer engine that was given to setup.
    engine: Option<Arc<Regions>>,
    arena: OnceLock<Arc<Arena>>,
    arena_turn: Mutex<()>,
    reads: Mutex<HashMap<String, Located>>,
    writes: Mutex<HashMap<String, Arc<part_write::PartWrite>>>,
}

impl Session {
    fn new(client: StoreClient, engine: Option<Arc<Regions>>) -> Arc<Self> {
        let regions = Arc::default();
        exit::watch(&regions, client.as_full().map(|client| client.engine().transport()));
        Arc::new(Self {
            client,
            master: Mutex::default(),
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

    /// Returns the arena that leases come from, and creates it on first use.
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

    /// Creates the memory of a call that names it by its address.
    fn call_memory(&self) -> CallMemory {
        #[allow(unsafe_code)]
        // SAFETY: the program keeps the memory during the call, which waits at its end. Memory that
        // it has registered stays valid until it is unregistered.
        unsafe {
            CallMemory::new(&self.client, &self.regions, self.engine.as_ref())
        }
    }

    /// Returns whether all of this memory is registered, with this store or with the engine that
    /// was given to setup.
    fn is_registered(&self, pointers: &[Uint], sizes: &[Uint]) -> bool {
        pointers.iter().zip(sizes).all(|(pointer, size)| {
            let holds = |regions: &Regions| regions.slice(pointer.0, size.len()).is_ok();
            holds(&self.regions) || self.engine.as_deref().is_some_and(holds)
        })
    }

    /// Returns how many bytes are registered from an address on.
    fn registered_len(&self, address: u64) -> Result<usize> {
        let ours = self.regions.bytes_to_end(address);
        match (&self.engine, ours) {
            (Some(engine), Err(_)) => engine.bytes_to_end(address),
            (_, ours) => ours,
        }
    }

    /// Serves health and metrics at this port until the session is closed.
    async fn serve_pages(&self, port: u16) -> Result<()> {
        let pages = ClientPages::serve(self.client.full()?, "", port).await?;
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
        let master = self.master.lock().take();
        if let Some(master) = master {
            master.stop().await;
        }
        outcome
    }
}

/// Client of a cluster's store, without the calls that need Python packages.
#[pyclass(subclass, frozen, module = "mooncake._mooncake", name = "Store")]
#[derive(Default)]
pub(crate) struct Store {
    session: RwLock<Option<Arc<Session>>>,
    pub(crate) errors: Arc<Errors>,
}

impl Store {
    /// Returns the session. Without one, records that as the last error.
    pub(crate) fn session(&self) -> PyResult<Option<Arc<Session>>> {
        let session = self.current()?;
        if session.is_none() {
            self.errors
                .record(&Error::invalid("store is not set up: call setup() first; close() ends the setup"));
        }
        Ok(session)
    }

    /// Returns the session without recording an error.
    fn current(&self) -> PyResult<Option<Arc<Session>>> {
        not_forked()?;
        Ok(self.session.read().clone())
    }

    /// Replaces the session and closes the previous one.
    fn replace_session(&self, py: Python<'_>, session: Arc<Session>) {
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

    /// Closes the session, if there is one. The master detects a client that could not unmount.
    fn end_session(&self, py: Python<'_>) {
        let session = self.session.write().take();
        if let Some(session) = session
            && let Err(error) = wait(py, async move { session.close().await })
        {
            tracing::warn!("store closed without notifying the master: {error}");
            self.errors.record(&error);
        }
    }

    /// Returns 0, or records the error and returns its code.
    fn code<T>(&self, outcome: Result<T>) -> i64 {
        i64::from(self.errors.code(outcome))
    }

    /// Returns the number, or records the error and returns its code.
    fn count(&self, outcome: Result<u64>) -> i64 {
        match outcome {
            Ok(count) => i64::try_from(count).unwrap_or(i64::MAX),
            Err(error) => i64::from(self.errors.record(&error)),
        }
    }

    /// Returns one number for each of `n` items: its own result, or the code of the error of the
    /// whole call.
    fn counts(&self, n: usize, outcome: Result<Vec<Result<u64>>>) -> Vec<i64> {
        match outcome {
            Ok(outcomes) => outcomes.into_iter().map(|outcome| self.count(outcome)).collect(),
            Err(error) => vec![i64::from(self.errors.record(&error)); n],
        }
    }

    /// Returns the [`counts`](Self::counts) of outcomes without a value.
    fn codes(&self, n: usize, outcome: Result<Vec<Result<()>>>) -> Vec<i64> {
        self.counts(n, outcome.map(|all| all.into_iter().map(|one| one.map(|()| 0)).collect()))
    }

    /// Rejects lists of different lengths.
    fn same_length(&self, lengths: &[usize]) -> Result<()> {
        if lengths.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(Error::invalid(format!(
                "cannot run batch: the lists differ in length. lengths={lengths:?}"
            )));
        }
        Ok(())
    }
}

/// Waits until no transfer uses unregistered memory of a call, also if the call was interrupted.
fn wait_until_unused(py: Python<'_>, memory: &CallMemory) {
    if memory.has_unregistered() {
        detached(py, || memory.wait());
    }
}

/// Settings of [`Store::setup_native`].
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
    /// Port of the HTTP server for health and metrics, if there is to be one.
    http_port: Option<u16>,
    /// Directory of the disk tier, if there is one. Empty for the directory that the environment
    /// names.
    offload_path: Option<String>,
    /// Permission of existence checks to prefetch. `None` for that of the environment, as for the
    /// next two.
    prefetch: Option<bool>,
    /// Pause in seconds after a prefetch found no space.
    prefetch_cooldown: Option<Uint>,
    /// Time in seconds in which an object is prefetched once at most.
    prefetch_dedup: Option<Uint>,
    /// Longest time of a call in milliseconds. `None` for that of the environment.
    timeout_ms: Option<Uint>,
    /// Start of a master inside this process, in place of the one at `master_server_addr`.
    embedded_master: bool,
}

/// Starts a master at free ports of this host. With a disk, it offloads objects to disks.
async fn start_master(has_disk: bool) -> Result<MasterServer> {
    let disks = has_disk.then(DiskOptions::default);
    let config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        options: MasterOptions { disks, ..MasterOptions::default() },
        ..MasterConfig::default()
    };
    MasterServer::start(config).await.map_err(|error| error.context("master inside this process"))
}

impl Setup {
    /// Joins a cluster. Returns the master, too, if it is inside this process.
    async fn connect(
        mut self,
        environment: ClientEnvironment,
        engine: Option<Engine<TransportSet>>,
    ) -> Result<(Client, Option<MasterServer>)> {
        let mut config = environment.config.clone();
        let mut master = None;
        if self.embedded_master || environment.embedded_master {
            let server = start_master(self.offload_path.is_some()).await?;
            self.master_server_addr = server.addresses().rpc.to_string();
            master = Some(server);
        }
        let seconds = |given: Option<Uint>, default: Duration| {
            given.map_or(default, |seconds| Duration::from_secs(seconds.0).min(LONGEST_TIME))
        };
        let prefetch = &mut config.prefetch;
        prefetch.on_exist = self.prefetch.unwrap_or(prefetch.on_exist);
        prefetch.cooldown = seconds(self.prefetch_cooldown, prefetch.cooldown);
        prefetch.dedup = seconds(self.prefetch_dedup, prefetch.dedup);
        config.offload = self.offload_path.map(|path| environment.offload(&path));
        if let Some(ms) = self.timeout_ms {
            config.timeout = Duration::from_millis(ms.0).min(MAX_TIMEOUT);
        }
        let setup = StoreSetup {
            local_hostname: self.local_hostname,
            metadata_server: self.metadata_server,
            segment: self.global_segment_size.0,
            local_buffer: self.local_buffer_size.0,
            protocol: self.protocol,
            devices: self.rdma_devices,
            master: self.master_server_addr,
            tenant: self.tenant_id,
        };
        let builder = setup.builder(config)?;
        let client = match engine {
            Some(engine) => builder.engine(engine).connect().await?,
            None => builder.connect().await?,
        };
        Ok((client, master))
    }
}

#[pymethods]
impl Store {
    /// Accepts and ignores the arguments that the `__init__` of a subclass takes.
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self::default()
    }

    /// Joins a cluster. Returns 0, -600 for invalid settings, or -1 if the cluster cannot be
    /// reached.
    #[pyo3(name = "_setup", signature = (config, engine=None))]
    fn setup_native(
        &self,
        py: Python<'_>,
        config: Setup,
        engine: Option<PyRef<'_, InnerTransferEngine>>,
    ) -> PyResult<i64> {
        not_forked()?;
        let regions = engine.as_ref().map(|engine| engine.regions());
        // An engine with another metadata service cannot reach the cluster's segments. It lends
        // only its memory.
        let shared = engine.filter(|engine| engine.metadata() == config.metadata_server);
        let shared = shared.map(|engine| engine.engine().engine().clone());
        let http_port = config.http_port;
        if config.offload_path.is_some() {
            // A disk tier has one owner at a time, which may be the previous session.
            self.end_session(py);
        }
        // The environment is read while no other thread can change it.
        let environment = StoreSetup::environment();
        let session = wait(py, async move {
            let is_shared = shared.is_some();
            let (client, master) = config.connect(environment, shared).await?;
            let client = StoreClient::Full(client);
            // Memory that another transport registered is usable only if ours needs no
            // registration.
            let regions = regions.filter(|_| is_shared || !client.needs_registration());
            let session = Session::new(client, regions);
            *session.master.lock() = master;
            Ok(session)
        });
        let session = match session {
            Ok(session) => session,
            Err(error) => {
                let number = self.errors.record(&error);
                return Ok(if error.kind() == ErrorKind::Invalid { i64::from(number) } else { -1 });
            }
        };
        // This closes the HTTP server of the previous session.
        self.replace_session(py, session.clone());
        self.errors.clear();
        if let Some(port) = http_port {
            // Mooncake C++ goes on without the server as well.
            if let Err(error) = wait(py, session.serve_pages(port)) {
                tracing::warn!(port, "cannot serve health and metrics over HTTP: {error}");
            }
        }
        Ok(0)
    }

    /// Connects to the `mooncake_client` of this host at `host:port` or at the path of its socket.
    /// Returns 0, or -1 if it cannot be reached. Values travel through `local_buffer_size` bytes of
    /// shared memory. Memory of `alloc_from_mem_pool` is allocated on request.
    fn _setup_dummy(&self, py: Python<'_>, local_buffer_size: Uint, server_address: String) -> PyResult<i64> {
        not_forked()?;
        let config = LocalConfig {
            buffer: local_buffer_size.0,
            memory: HostMemoryOptions { huge_pages: huge_pages(), ..Default::default() },
            allow_overcommit: crate::host::allow_overcommit(),
            timeout: StoreSetup::TIMEOUT,
            ..LocalConfig::at(server_address)
        };
        let joined = wait(py, LocalClient::connect(config));
        Ok(match joined {
            Ok(client) => {
                self.replace_session(py, Session::new(StoreClient::Ipc(client), None));
                0
            }
            Err(error) => {
                self.errors.record(&error);
                -1
            }
        })
    }

    /// Leaves the cluster, which removes the objects in this client's memory. Returns 0, also if
    /// the master cannot be notified. Can be called again.
    fn close(&self, py: Python<'_>) -> PyResult<i64> {
        not_forked()?;
        self.end_session(py);
        Ok(0)
    }

    /// Returns 0 if the master responds, 1 before setup and after close, 2 if the master does not
    /// respond.
    fn health_check(&self, py: Python<'_>) -> PyResult<i64> {
        let Some(session) = self.current()? else { return Ok(1) };
        let healthy = wait(py, async { Ok(session.client.is_healthy().await) });
        Ok(if healthy.unwrap_or(false) { 0 } else { 2 })
    }

    /// Returns the name of this client in the cluster, `host:port`. Empty before setup.
    fn get_hostname(&self) -> PyResult<String> {
        Ok(self.current()?.map(|session| session.client.hostname().to_owned()).unwrap_or_default())
    }

    /// Returns the last error of this store: code, name, message and peer. `None` if there was
    /// none.
    fn last_error(&self) -> Option<LastError> {
        self.errors.last()
    }

    /// Raises the last error of this store as a subclass of `mooncake.MooncakeError`. Does nothing
    /// if there was none.
    fn raise_last_error(&self, py: Python<'_>) -> PyResult<()> {
        self.errors.last().map_or(Ok(()), |error| Err(error.exception(py)))
    }

    /// Returns this object while it is set up, else `None`.
    fn _get_pyclient_capsule(slf: PyRef<'_, Self>) -> PyResult<Option<Py<Self>>> {
        let set_up = slf.current()?.is_some();
        Ok(set_up.then(|| slf.into()))
    }

    /// Records an error that the Python half has found, and returns its code.
    fn _note(&self, code: i32, message: String) -> i32 {
        self.errors.record(&Error::new(ErrorCode::from_number(code), message))
    }
}

/// Closes every store and waits for transfers that use memory of the program. Called when the
/// interpreter ends.
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
    let _ = wait(py, async move {
        let closing = async {
            let stores = ::futures::future::join_all(open.iter().map(|session| session.close()));
            ::futures::future::join(stores, crate::p2p::close_all()).await;
        };
        // Python now frees memory of the program, so transfers into it must have ended. Neither an
        // unresponsive master nor an unresponsive peer delays the end for long.
        exit::end_transfers(watched, closing).await;
        Ok(())
    });
}
