//! Replicas of objects, as Python sees them.

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

/// Replica of an object.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "ReplicaDescriptor")]
pub(crate) struct ReplicaDescriptor {
    replica: Replica,
}

#[pymethods]
impl ReplicaDescriptor {
    /// State of the replica, as a `ReplicaStatus`.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("mooncake._types")?.getattr("ReplicaStatus")?.call1((self.replica.status as i32,))
    }

    /// Returns whether the replica is in a client's memory.
    fn is_memory_replica(&self) -> bool {
        matches!(self.replica.location, ReplicaLocation::Memory(_))
    }

    /// Returns whether the replica is a file on a shared file system.
    fn is_disk_replica(&self) -> bool {
        matches!(self.replica.location, ReplicaLocation::Disk { .. })
    }

    /// Returns whether the replica is on a client's own disk.
    fn is_local_disk_replica(&self) -> bool {
        matches!(self.replica.location, ReplicaLocation::LocalDisk { .. })
    }

    /// Returns the location of a replica in memory. Raises `RuntimeError` for any other replica.
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

    /// Returns the file of a replica on a shared file system. Raises `RuntimeError` for any other
    /// replica.
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

/// Replica in memory.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "MemoryDescriptor")]
pub(crate) struct MemoryDescriptor {
    buffer: Descriptor,
}

#[pymethods]
impl MemoryDescriptor {
    /// Location of the replica.
    #[getter]
    fn buffer_descriptor(&self) -> Descriptor {
        self.buffer.clone()
    }
}

/// Range of a client's memory.
#[pyclass(frozen, get_all, weakref, module = "mooncake.store", name = "Descriptor")]
#[derive(Clone)]
pub(crate) struct Descriptor {
    /// Length in bytes.
    size: u64,
    /// Address in the client's process.
    buffer_address: u64,
    /// Endpoint of the client.
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

/// Replica in a file.
#[pyclass(frozen, get_all, weakref, module = "mooncake.store", name = "DiskDescriptor")]
pub(crate) struct DiskDescriptor {
    /// Path of the file.
    file_path: String,
    /// Length in bytes.
    object_size: u64,
}

/// State of a copy or move task.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "QueryTaskResponse")]
pub(crate) struct QueryTaskResponse {
    task: TaskInfo,
}

#[pymethods]
impl QueryTaskResponse {
    /// ID of the task, in two halves.
    #[getter]
    fn id(&self) -> (u64, u64) {
        halves(self.task.id)
    }

    /// Kind of the task, as a `TaskType`.
    #[getter]
    fn r#type<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("mooncake._types")?.getattr("TaskType")?.call1((self.task.kind as i32,))
    }

    /// Progress of the task, as a `TaskStatus`.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("mooncake._types")?.getattr("TaskStatus")?.call1((self.task.status as i32,))
    }

    /// Creation time, in milliseconds since 1970.
    #[getter]
    fn created_at_ms_epoch(&self) -> i64 {
        self.task.created_ms
    }

    /// Time of the last change, in milliseconds since 1970.
    #[getter]
    fn last_updated_at_ms_epoch(&self) -> i64 {
        self.task.updated_ms
    }

    /// ID of the client that runs the task, in two halves.
    #[getter]
    fn assigned_client(&self) -> (u64, u64) {
        halves(self.task.client.0)
    }

    /// Description of the task's outcome.
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
    /// Returns the replicas of an object. Empty if the key does not exist.
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
                    self.errors.record(&error);
                    Vec::new()
                }
            },
        )
    }

    /// Returns the replicas of many objects by key. Absent keys are left out.
    fn batch_get_replica_desc<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let result = PyDict::new(py);
        let Some(session) = self.session()? else { return Ok(result) };
        match wait(py, session.client.batch_replicas(&keys)) {
            Ok(found) => {
                for (key, list) in keys.iter().zip(found) {
                    if let Ok(Some(list)) = list {
                        result.set_item(key, descriptors(list.replicas))?;
                    }
                }
            }
            Err(error) => drop(self.errors.record(&error)),
        }
        Ok(result)
    }

    /// Returns the replicas of each object that `prefix_hits` counts, in the order of the keys.
    /// Empty after an error.
    fn get_prefix_replica_desc(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Vec<Vec<ReplicaDescriptor>>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        Ok(match wait(py, session.client.list_prefix(&keys)) {
            Ok(lists) => lists.into_iter().map(|list| descriptors(list.replicas)).collect(),
            Err(error) => {
                self.errors.record(&error);
                Vec::new()
            }
        })
    }

    /// Removes replicas of objects that this store wrote and that have no lease: those in a
    /// segment, or all. Returns the affected keys.
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
                self.errors.record(&error);
                Vec::new()
            }
        })
    }

    /// Creates a task that copies an object to each of these segments. Returns the task's ID and 0,
    /// or a negative code.
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

    /// Creates a task that moves the replica in one segment to another. Returns the task's ID and
    /// 0, or a negative code.
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

    /// Returns the state of a task and 0, or `None` and a negative code.
    fn query_task(&self, py: Python<'_>, task_id: [Uint; 2]) -> PyResult<(Option<QueryTaskResponse>, i64)> {
        let Some(session) = self.session()? else { return Ok((None, NOT_SET_UP)) };
        let id = Uuid::new(task_id[0].0, task_id[1].0);
        Ok(match wait(py, session.client.task(id)) {
            Ok(task) => (Some(QueryTaskResponse { task }), 0),
            Err(error) => (None, i64::from(self.errors.record(&error))),
        })
    }
}

impl Store {
    fn created(&self, task: Result<Uuid>) -> ((u64, u64), i64) {
        task.map_or_else(|error: Error| ((0, 0), i64::from(self.errors.record(&error))), |id| (halves(id), 0))
    }
}
