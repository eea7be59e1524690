//! Where objects lie, as Python sees it.

use mooncake_core::replica::{Replica, ReplicaLocation};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::Store;
use crate::runtime::wait;

/// One copy of an object.
#[pyclass(frozen, module = "mooncake.store", name = "ReplicaDescriptor")]
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
#[pyclass(frozen, module = "mooncake.store", name = "MemoryDescriptor")]
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
#[pyclass(frozen, get_all, module = "mooncake.store", name = "Descriptor")]
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
#[pyclass(frozen, get_all, module = "mooncake.store", name = "DiskDescriptor")]
pub(crate) struct DiskDescriptor {
    /// Path of the file.
    file_path: String,
    /// Length in bytes.
    object_size: u64,
}

fn descriptors(replicas: Vec<Replica>) -> Vec<ReplicaDescriptor> {
    replicas.into_iter().map(|replica| ReplicaDescriptor { replica }).collect()
}

#[pymethods]
impl Store {
    /// The copies of an object; empty when it is not there.
    fn get_replica_desc(&self, py: Python<'_>, key: String) -> PyResult<Vec<ReplicaDescriptor>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        Ok(match wait(py, session.client.replicas(key)) {
            Ok(found) => found.map(|list| descriptors(list.replicas)).unwrap_or_default(),
            Err(error) => {
                self.errors.note(&error);
                Vec::new()
            }
        })
    }

    /// The copies of many objects by key; those that are not there are left out.
    fn batch_get_replica_desc<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<String>,
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
}
