//! Topology of this host: the devices that are near each memory.

use mooncake_engine::TransferEngine;
use mooncake_transport::topology::Topology;
use pyo3::prelude::*;

use crate::interpreter::detached;

/// Returns the priority matrix of this host as text. Names in `devices`, separated by commas,
/// restrict the devices, as the environment does.
#[pyfunction]
pub(crate) fn local_topology(py: Python<'_>, devices: &str) -> String {
    let (discovery, file) = TransferEngine::builder().environment().topology_source();
    let discovery = discovery.only(devices.split(','));
    detached(py, || Topology::of_this_host(&discovery, file.as_deref()).styled())
}
