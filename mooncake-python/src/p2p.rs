//! P2P Store under `mooncake.p2p.P2PStore`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, Result};
use mooncake_p2p::schedule::Limits;
use mooncake_p2p::{GetOptions, GetProgress, ObjectInfo, P2pOptions, RegisterOptions};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::args::{Keep, Uint, bytes_of, text, writable_bytes_of};
use crate::awaitable::awaitable;
use crate::delivery::deliver;
use crate::error::exception;
use crate::exit;
use crate::memory::object_source;
use crate::runtime::{not_forked, runtime, wait};

/// Stores that are closed when the interpreter ends.
static OPEN: Mutex<Vec<Weak<mooncake_p2p::P2pStore>>> = Mutex::new(Vec::new());

/// Object in the catalogue.
#[pyclass(frozen, get_all, module = "mooncake.p2p", name = "ObjectInfo")]
pub(crate) struct P2pObject {
    /// Name of the object.
    name: String,
    /// Length of the object in bytes.
    size: u64,
    /// Maximum length of a shard in bytes.
    max_shard_size: u64,
    /// Lengths of the ranges of memory that the object consists of, in bytes.
    sizes: Vec<u64>,
}

#[pymethods]
impl P2pObject {
    fn __repr__(&self) -> String {
        format!(
            "ObjectInfo(name={:?}, size={}, max_shard_size={}, sizes={:?})",
            self.name, self.size, self.max_shard_size, self.sizes
        )
    }
}

impl From<ObjectInfo> for P2pObject {
    fn from(info: ObjectInfo) -> Self {
        let ObjectInfo { name, max_shard_size, size, size_list } = info;
        Self { name, size, max_shard_size, sizes: size_list }
    }
}

/// Store with the calls that `mooncake.p2p` is built on. Each blocking call has a twin that
/// resolves a future.
#[pyclass(subclass, frozen, weakref, module = "mooncake._mooncake", name = "P2PStore")]
pub(crate) struct P2pStore {
    store: Arc<mooncake_p2p::P2pStore>,
}

impl Drop for P2pStore {
    fn drop(&mut self) {
        let store = self.store.clone();
        if let Ok(runtime) = runtime() {
            // The outcome is ignored. Remaining entries of the catalogue end with the lease.
            runtime.spawn(async move { store.close_with_engine().await });
        }
    }
}

#[pymethods]
impl P2pStore {
    #[new]
    #[pyo3(signature = (local_hostname, metadata_server, protocol="tcp", device_name="", *, streams=4, readers_per_source=4, lease=30.0, catalogue_timeout=30.0, stall_timeout=120.0))]
    #[expect(clippy::too_many_arguments, reason = "each is a setting that Python names")]
    fn new(
        py: Python<'_>,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        device_name: &str,
        streams: usize,
        readers_per_source: usize,
        lease: f64,
        catalogue_timeout: f64,
        stall_timeout: f64,
    ) -> PyResult<Self> {
        not_forked()?;
        let options = P2pOptions {
            limits: Limits { streams, readers_per_source },
            lease: seconds("lease", lease)?,
            catalogue_timeout: seconds("catalogue_timeout", catalogue_timeout)?,
            stall_timeout: seconds("stall_timeout", stall_timeout)?,
            ..P2pOptions::default()
        };
        // The environment is read while no other thread can change it.
        let builder = mooncake_p2p::engine_builder(local_hostname, metadata_server)
            .protocol(protocol)
            .devices(device_name);
        let opened = wait(py, async move {
            let engine = builder.start().await?;
            mooncake_p2p::P2pStore::open(engine, options).await
        });
        let store = Arc::new(opened.map_err(|error| exception(py, &error))?);
        exit::watch(store.engine().regions(), Some(store.engine().transport()));
        let mut open = OPEN.lock();
        open.retain(|store| store.strong_count() > 0);
        open.push(Arc::downgrade(&store));
        drop(open);
        Ok(Self { store })
    }

    /// Name of the segment of this node: host and port.
    #[getter]
    fn segment_name(&self) -> &str {
        self.store.segment_name()
    }

    fn _register(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] name: String,
        buffers: Vec<Bound<'_, PyAny>>,
        max_shard_size: Uint,
        force_create: bool,
    ) -> PyResult<()> {
        let work = self.register(&name, &buffers, max_shard_size, force_create)?;
        wait(py, work).map_err(|error| exception(py, &error))
    }

    fn _async_register(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] name: String,
        buffers: Vec<Bound<'_, PyAny>>,
        max_shard_size: Uint,
        force_create: bool,
    ) -> PyResult<()> {
        awaitable(future, self.register(&name, &buffers, max_shard_size, force_create)?, nothing)
    }

    fn _get_replica(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] name: String,
        buffers: Vec<Bound<'_, PyAny>>,
        resume: bool,
        on_progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let work = self.get_replica(&name, &buffers, resume, on_progress)?;
        wait(py, work).map_err(|error| exception(py, &error))
    }

    fn _async_get_replica(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] name: String,
        buffers: Vec<Bound<'_, PyAny>>,
        resume: bool,
        on_progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        awaitable(future, self.get_replica(&name, &buffers, resume, on_progress)?, nothing)
    }

    fn _unregister(&self, py: Python<'_>, #[pyo3(from_py_with = text)] name: String) -> PyResult<()> {
        self.waited(py, |store| async move { store.unregister(&name).await })
    }

    fn _async_unregister(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] name: String,
    ) -> PyResult<()> {
        let store = self.open()?;
        awaitable(future, async move { store.unregister(&name).await }, nothing)
    }

    fn _delete_replica(&self, py: Python<'_>, #[pyo3(from_py_with = text)] name: String) -> PyResult<()> {
        self.waited(py, |store| async move { store.delete_replica(&name).await })
    }

    fn _async_delete_replica(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] name: String,
    ) -> PyResult<()> {
        let store = self.open()?;
        awaitable(future, async move { store.delete_replica(&name).await }, nothing)
    }

    fn _list(&self, py: Python<'_>, #[pyo3(from_py_with = text)] prefix: String) -> PyResult<Vec<P2pObject>> {
        let objects = self.waited(py, |store| async move { store.list(&prefix).await })?;
        Ok(objects.into_iter().map(P2pObject::from).collect())
    }

    fn _async_list(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] prefix: String,
    ) -> PyResult<()> {
        let store = self.open()?;
        awaitable(future, async move { store.list(&prefix).await }, |py, objects| {
            let objects = objects.map_err(|error| exception(py, &error))?;
            let objects: Vec<_> = objects.into_iter().map(P2pObject::from).collect();
            objects.into_pyobject(py)
        })
    }

    fn _find(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] name: String,
    ) -> PyResult<Option<P2pObject>> {
        let found = self.waited(py, |store| async move { store.find(&name).await })?;
        Ok(found.map(P2pObject::from))
    }

    fn _async_find(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] name: String,
    ) -> PyResult<()> {
        let store = self.open()?;
        awaitable(future, async move { store.find(&name).await }, |py, found| {
            let found = found.map_err(|error| exception(py, &error))?.map(P2pObject::from);
            found.into_pyobject(py)
        })
    }

    fn _close(&self, py: Python<'_>) -> PyResult<()> {
        self.waited(py, |store| async move { store.close_with_engine().await })
    }

    fn _async_close(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        let store = self.open()?;
        awaitable(future, async move { store.close_with_engine().await }, nothing)
    }
}

impl P2pStore {
    fn open(&self) -> PyResult<Arc<mooncake_p2p::P2pStore>> {
        not_forked()?;
        Ok(self.store.clone())
    }

    fn waited<R, F>(&self, py: Python<'_>, call: impl FnOnce(Arc<mooncake_p2p::P2pStore>) -> F) -> PyResult<R>
    where
        R: Send,
        F: Future<Output = Result<R>> + Send,
    {
        wait(py, call(self.open()?)).map_err(|error| exception(py, &error))
    }

    fn register(
        &self,
        name: &str,
        buffers: &[Bound<'_, PyAny>],
        max_shard_size: Uint,
        force_create: bool,
    ) -> PyResult<impl Future<Output = Result<()>> + Send + use<>> {
        let store = self.open()?;
        let memory = sources(buffers, false)?;
        let options = RegisterOptions { max_shard_size: max_shard_size.0, force_create };
        let name = name.to_owned();
        Ok(async move { store.register(&name, memory, options).await })
    }

    fn get_replica(
        &self,
        name: &str,
        buffers: &[Bound<'_, PyAny>],
        resume: bool,
        on_progress: Option<Py<PyAny>>,
    ) -> PyResult<impl Future<Output = Result<()>> + Send + use<>> {
        let store = self.open()?;
        let memory = sources(buffers, true)?;
        let options = GetOptions { resume, on_progress: on_progress.map(progress) };
        let name = name.to_owned();
        Ok(async move { store.get_replica(&name, memory, options).await })
    }
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("cannot open P2P store: {error}. {name}={value}")))
}

/// Closes every open store.
pub(crate) async fn close_all() {
    let open = std::mem::take(&mut *OPEN.lock());
    let open: Vec<_> = open.iter().filter_map(Weak::upgrade).collect();
    // Remaining entries of the catalogue end with the lease.
    futures::future::join_all(open.iter().map(|store| store.close_with_engine())).await;
}

/// Returns the memory of Python objects. Memory that is read into must be writable.
fn sources(buffers: &[Bound<'_, PyAny>], is_written: bool) -> PyResult<Vec<Arc<dyn MemorySource>>> {
    let source = |object: &Bound<'_, PyAny>| {
        let mut keep = Keep::default();
        let span = match is_written {
            true => writable_bytes_of(object, &mut keep)?,
            false => bytes_of(object, &mut keep)?,
        };
        let span = span.ok_or_else(|| {
            exception(object.py(), &Error::invalid("cannot use memory: the buffer is empty"))
        })?;
        Ok(object_source(span, &Arc::new(keep)))
    };
    buffers.iter().map(source).collect()
}

/// Returns a function that passes progress to a Python function, on the thread for Python code.
fn progress(call: Py<PyAny>) -> Arc<dyn Fn(GetProgress) + Send + Sync> {
    // The last reference is dropped on the thread for Python code as well.
    let call = Arc::new(PythonFunction(Some(call)));
    Arc::new(move |progress: GetProgress| {
        let call = call.clone();
        let report = move |py: Python<'_>| {
            let Some(function) = &call.0 else { return };
            let arguments = (progress.arrived_bytes, progress.total_bytes);
            if let Err(error) = function.call1(py, arguments) {
                error.write_unraisable(py, Some(function.bind(py)));
            }
        };
        // At the end of the interpreter the progress is dropped.
        let _ = deliver(Box::new(report));
    })
}

/// Python function that the thread for Python code frees.
struct PythonFunction(Option<Py<PyAny>>);

impl Drop for PythonFunction {
    fn drop(&mut self) {
        let mut keep = Keep::default();
        if let Some(function) = self.0.take() {
            keep.object(function);
        }
    }
}

fn nothing<'py>(py: Python<'py>, outcome: Result<()>) -> PyResult<Bound<'py, PyAny>> {
    outcome.map_err(|error| exception(py, &error))?;
    Ok(py.None().into_bound(py))
}
