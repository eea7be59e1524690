//! Topology of this host: the devices that are near each memory.

use std::path::PathBuf;

use mooncake_transport::topology::{Discovery, Topology};
use pyo3::prelude::*;

/// Returns the priority matrix of this host as text. Each non-empty list of `only` restricts the
/// devices. The file `custom` replaces the discovered matrix.
#[pyfunction]
pub(crate) fn local_topology(
    py: Python<'_>,
    only: Vec<Vec<String>>,
    without: Vec<String>,
    custom: Option<PathBuf>,
) -> String {
    let discovery = only.into_iter().fold(Discovery::default().without(without), Discovery::only);
    py.detach(|| Topology::of_this_host(&discovery, custom.as_deref()).styled())
}
