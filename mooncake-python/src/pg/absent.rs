//! Build without the feature `pg`: the module has no process groups, and the import of
//! `mooncake.pg` says so.

use pyo3::prelude::*;

/// Adds nothing.
#[allow(clippy::unnecessary_wraps, reason = "as with the feature")]
pub(crate) fn add_to(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
