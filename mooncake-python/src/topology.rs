//! Which devices are near which memory.

use std::path::PathBuf;

use mooncake_transport::topology::{Discovery, Topology};
use pyo3::prelude::*;

/// The priority matrix of this host as text: of devices that each non-empty list names, or what the file says instead.
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
