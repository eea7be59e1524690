//! Where objects lie, as Python sees it.

use mooncake_core::ids::Uuid;
use mooncake_core::replica::{Replica, ReplicaLocation};
use mooncake_core::{Error, Result};
use mooncake_store::protocol::wire::TaskInfo;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{NOT_SET_UP, Store};
use crate::args::{Uint, text, texts};
use crate::runtime::wait;

/// One copy of an object.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "ReplicaDescriptor")]
pub(crate) struct ReplicaDescriptor {
    replica: Replica,
}

#[pymethods]
impl ReplicaDescriptor {
    /// Whether it can be read: a `ReplicaStatus`.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("mooncake._types")?.getattr("ReplicaStatus")?.call1((self.replica.status as i32,))
    }

    /// Whether it lies in a client's memory.
    fn is_memory_replica(&self) -> bool {
        matches!(self.replica.location, ReplicaLocation::Memory(_))
    }

    /// Whether it is a file on a shared file system.
    fn is_disk_replica(&self) -> bool {
        matches!(self.replica.location, ReplicaLocation::Disk { .. })
    }

    /// Whether it lies on a client's own disk.
    fn is_local_disk_replica(&self) -> bool {
        matches!(self.replica.location, ReplicaLocation::LocalDisk { .. })
    }

    /// Where in memory it lies; `RuntimeError` for a copy elsewhere.
    fn get_memory_descriptor(&self) -> PyResult<MemoryDescriptor> {
        let wrong = || PyRuntimeError::new_err("Expected MemoryDescriptor");
        let at = self.replica.location.memory().ok_or_else(wrong)?;
        Ok(MemoryDescriptor {
            buffer: Descriptor {
                size: at.size,
                buffer_address: at.address,
                transport_endpoint: at.endpoint.clone(),
            },
        })
    }

    /// Which file it is; `RuntimeError` for a copy elsewhere.
    fn get_disk_descriptor(&self) -> PyResult<DiskDescriptor> {
        match &self.replica.location {
            ReplicaLocation::Disk { path, size } => {
                Ok(DiskDescriptor { file_path: path.clone(), object_size: *size })
            }
            _ => Err(PyRuntimeError::new_err("Expected DiskDescriptor")),
        }
    }

    fn __repr__(&self) -> String {
        format!("<ReplicaDescriptor status={:?} {:?}>", self.replica.status, self.replica.location)
    }
}

/// A copy in memory.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "MemoryDescriptor")]
pub(crate) struct MemoryDescriptor {
    buffer: Descriptor,
}

#[pymethods]
impl MemoryDescriptor {
    /// Where it lies.
    #[getter]
    fn buffer_descriptor(&self) -> Descriptor {
        self.buffer.clone()
    }
}

/// A range of a member's memory.
#[pyclass(frozen, get_all, weakref, module = "mooncake.store", name = "Descriptor")]
#[derive(Clone)]
pub(crate) struct Descriptor {
    /// Length in bytes.
    size: u64,
    /// Address in the member's process.
    buffer_address: u64,
    /// How to reach the member.
    transport_endpoint: String,
}

#[pymethods]
impl Descriptor {
    fn __repr__(&self) -> String {
        format!(
            "<Descriptor size={} buffer_address={} transport_endpoint={}>",
            self.size, self.buffer_address, self.transport_endpoint
        )
    }
}

/// A copy in a file.
#[pyclass(frozen, get_all, weakref, module = "mooncake.store", name = "DiskDescriptor")]
pub(crate) struct DiskDescriptor {
    /// Path of the file.
    file_path: String,
    /// Length in bytes.
    object_size: u64,
}

/// Where a copy or move that was asked for stands.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "QueryTaskResponse")]
pub(crate) struct QueryTaskResponse {
    task: TaskInfo,
}

#[pymethods]
impl QueryTaskResponse {
    /// Its number, in two halves.
    #[getter]
    fn id(&self) -> (u64, u64) {
        halves(self.task.id)
    }

    /// What it does: a `TaskType`.
    #[getter]
    fn r#type<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("mooncake._types")?.getattr("TaskType")?.call1((self.task.kind as i32,))
    }

    /// How it goes: a `TaskStatus`.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("mooncake._types")?.getattr("TaskStatus")?.call1((self.task.status as i32,))
    }

    /// When it was asked for, in milliseconds since 1970.
    #[getter]
    fn created_at_ms_epoch(&self) -> i64 {
        self.task.created_ms
    }

    /// When it last changed, in milliseconds since 1970.
    #[getter]
    fn last_updated_at_ms_epoch(&self) -> i64 {
        self.task.updated_ms
    }

    /// The client that does it, in two halves.
    #[getter]
    fn assigned_client(&self) -> (u64, u64) {
        halves(self.task.client.0)
    }

    /// A sentence about it.
    #[getter]
    fn message(&self) -> &str {
        &self.task.message
    }

    fn __repr__(&self) -> String {
        format!(
            "<QueryTaskResponse id={} status={:?} message={:?}>",
            self.task.id, self.task.status, self.task.message
        )
    }
}

fn halves(id: Uuid) -> (u64, u64) {
    (id.first, id.second)
}

fn descriptors(replicas: Vec<Replica>) -> Vec<ReplicaDescriptor> {
    replicas.into_iter().map(|replica| ReplicaDescriptor { replica }).collect()
}

#[pymethods]
impl Store {
    /// The copies of an object; empty when it is not there.
    fn get_replica_desc(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
    ) -> PyResult<Vec<ReplicaDescriptor>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        Ok(
            match wait(py, session.client.batch_replicas(&[key]))
                .and_then(|mut found| found.pop().transpose())
            {
                Ok(found) => found.flatten().map(|list| descriptors(list.replicas)).unwrap_or_default(),
                Err(error) => {
                    self.errors.note(&error);
                    Vec::new()
                }
            },
        )
    }

    /// The copies of many objects by key; those that are not there are left out.
    fn batch_get_replica_desc<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let answer = PyDict::new(py);
        let Some(session) = self.session()? else { return Ok(answer) };
        match wait(py, session.client.batch_replicas(&keys)) {
            Ok(found) => {
                for (key, list) in keys.iter().zip(found) {
                    if let Ok(Some(list)) = list {
                        answer.set_item(key, descriptors(list.replicas))?;
                    }
                }
            }
            Err(error) => drop(self.errors.note(&error)),
        }
        Ok(answer)
    }

    /// Drops copies of objects that this store wrote and nobody reads: those in a segment, or all. The keys of which some were.
    #[pyo3(signature = (keys, segment_name=String::new()))]
    fn batch_replica_clear(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        #[pyo3(from_py_with = text)] segment_name: String,
    ) -> PyResult<Vec<String>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        Ok(match wait(py, session.client.clear_replicas(&keys, &segment_name)) {
            Ok(cleared) => {
                cleared.iter().map(|key| String::from_utf8_lossy(key.as_bytes()).into_owned()).collect()
            }
            Err(error) => {
                self.errors.note(&error);
                Vec::new()
            }
        })
    }

    /// Asks for another copy of an object in each of these segments: the task's id and 0, or a negative code.
    fn create_copy_task(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        #[pyo3(from_py_with = texts)] targets: Vec<String>,
    ) -> PyResult<((u64, u64), i64)> {
        let Some(session) = self.session()? else { return Ok(((0, 0), NOT_SET_UP)) };
        let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
        Ok(self.created(wait(py, session.client.copy_task(key, &targets))))
    }

    /// Asks for the copy in one segment to be moved to another: the task's id and 0, or a negative code.
    fn create_move_task(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        #[pyo3(from_py_with = text)] source: String,
        #[pyo3(from_py_with = text)] target: String,
    ) -> PyResult<((u64, u64), i64)> {
        let Some(session) = self.session()? else { return Ok(((0, 0), NOT_SET_UP)) };
        Ok(self.created(wait(py, session.client.move_task(key, &source, &target))))
    }

    /// Where a task stands and 0, or `None` and a negative code.
    fn query_task(&self, py: Python<'_>, task_id: [Uint; 2]) -> PyResult<(Option<QueryTaskResponse>, i64)> {
        let Some(session) = self.session()? else { return Ok((None, NOT_SET_UP)) };
        let id = Uuid::new(task_id[0].0, task_id[1].0);
        Ok(match wait(py, session.client.task(id)) {
            Ok(task) => (Some(QueryTaskResponse { task }), 0),
            Err(error) => (None, i64::from(self.errors.note(&error))),
        })
    }
}

impl Store {
    fn created(&self, task: Result<Uuid>) -> ((u64, u64), i64) {
        task.map_or_else(|error: Error| ((0, 0), i64::from(self.errors.note(&error))), |id| (halves(id), 0))
    }
}
