//! Existence, size and removal of objects.

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::api::ProbePolicy;
use mooncake_store::client;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{NOT_SET_UP, Store};
use crate::args::{Uint, text, texts, truth};
use crate::runtime::wait;

/// Turns the removal of an absent key into its own error code.
pub(super) fn absent_as_error(outcome: Result<bool>) -> Result<()> {
    match outcome {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::from(ErrorCode::ObjectNotFound)),
        Err(error) => Err(error),
    }
}

/// Settings of an existence check.
#[pyclass(subclass, weakref, module = "mooncake.store", name = "ExistOptions")]
#[derive(Debug, Default)]
pub(crate) struct ExistOptions {
    prefetch_to_memory: bool,
}

#[pymethods]
impl ExistOptions {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// True if objects that are found only on disks return to memory, in the background.
    #[getter]
    fn prefetch_to_memory(&self) -> bool {
        self.prefetch_to_memory
    }

    #[setter]
    fn set_prefetch_to_memory(&mut self, #[pyo3(from_py_with = truth)] value: bool) {
        self.prefetch_to_memory = value;
    }

    fn __repr__(&self) -> String {
        let prefetches = if self.prefetch_to_memory { "True" } else { "False" };
        format!("ExistOptions(prefetch_to_memory={prefetches})")
    }
}

/// Converts an argument that is an [`ExistOptions`].
fn exist_options(value: &Bound<'_, PyAny>) -> PyResult<client::ExistOptions> {
    let options = value.cast::<ExistOptions>()?.try_borrow()?;
    Ok(client::ExistOptions::new().prefetch_to_memory(options.prefetch_to_memory))
}

#[pymethods]
impl Store {
    /// Returns 1 if the key is readable, 0 if not, or a negative code. A readable key gets a lease,
    /// which protects it from eviction.
    ///
    /// With `options.prefetch_to_memory`, an object that is only on a disk returns to memory in the
    /// background, if the setup has `enable_ssd_prefetch`.
    #[pyo3(signature = (key, options=client::ExistOptions::default()))]
    fn is_exist(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        #[pyo3(from_py_with = exist_options)] options: client::ExistOptions,
    ) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(-1) };
        Ok(self.count(wait(py, session.client.exist_with(key, &options)).map(u64::from)))
    }

    /// Runs `is_exist` for many keys.
    #[pyo3(signature = (keys, options=client::ExistOptions::default()))]
    fn batch_is_exist(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        #[pyo3(from_py_with = exist_options)] options: client::ExistOptions,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(vec![-1; keys.len()]) };
        let found = wait(py, session.client.batch_exist_with(&keys, &options));
        let found = found.map(|all| all.into_iter().map(|one| one.map(u64::from)).collect());
        Ok(self.counts(keys.len(), found))
    }

    /// Returns 1 if the key is readable, 0 if not, or a negative code. The key gets no lease.
    fn probe_key(&self, py: Python<'_>, #[pyo3(from_py_with = text)] key: String) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        Ok(self.count(wait(py, session.client.probe(key)).map(u64::from)))
    }

    /// Runs `probe_key` for many keys. With the policy `"LastHitOnly"` the keys are groups of
    /// `candidate_size`, and the last group that is wholly readable gets leases.
    #[pyo3(signature = (keys, policy="none", candidate_size=Uint(1)))]
    fn batch_probe_key(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        policy: &str,
        candidate_size: Uint,
    ) -> PyResult<Vec<i64>> {
        let policy = match policy {
            "none" => ProbePolicy::NONE,
            "LastHitOnly" => ProbePolicy::last_hit_only(candidate_size.0),
            other => return Err(PyValueError::new_err(format!("Unknown batch_probe_key policy: {other}"))),
        };
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; keys.len()]) };
        let found = wait(py, session.client.batch_probe(&keys, policy));
        let found = found.map(|all| all.into_iter().map(|one| one.map(u64::from)).collect());
        Ok(self.counts(keys.len(), found))
    }

    /// Returns the number of keys from the front that are readable, or a negative code. These keys
    /// get a lease, and later keys get none.
    fn prefix_hits(&self, py: Python<'_>, #[pyo3(from_py_with = texts)] keys: Vec<String>) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        Ok(self.count(wait(py, session.client.prefix_hits(&keys)).map(|hits| hits as u64)))
    }

    /// Returns the length of a value in bytes, or -704 if the key does not exist.
    fn get_size(&self, py: Python<'_>, #[pyo3(from_py_with = text)] key: String) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        let size = wait(py, session.client.size(key));
        Ok(self.count(size.and_then(|size| size.ok_or_else(|| ErrorCode::ObjectNotFound.into()))))
    }

    /// Removes a key. Returns 0, -704 if the key does not exist, or -706 while a lease protects it
    /// (`force` ignores leases).
    #[pyo3(signature = (key, force=false))]
    fn remove(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        #[pyo3(from_py_with = truth)] force: bool,
    ) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        Ok(self.code(absent_as_error(wait(py, session.client.remove(key, force)))))
    }

    /// Runs `remove` for many keys.
    #[pyo3(signature = (keys, force=false))]
    fn batch_remove(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        #[pyo3(from_py_with = truth)] force: bool,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; keys.len()]) };
        let outcomes = wait(py, session.client.batch_remove(&keys, force));
        let outcomes = outcomes.map(|all| all.into_iter().map(absent_as_error).collect());
        Ok(self.codes(keys.len(), outcomes))
    }

    /// Removes the keys that a regular expression matches in any part. Returns their number, or
    /// -600 for an invalid expression.
    #[pyo3(signature = (regex_pattern, force=false))]
    fn remove_by_regex(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] regex_pattern: String,
        #[pyo3(from_py_with = truth)] force: bool,
    ) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        Ok(self.count(wait(py, session.client.remove_matching(&regex_pattern, force))))
    }

    /// Removes every key and returns their number.
    #[pyo3(signature = (force=false))]
    fn remove_all(&self, py: Python<'_>, #[pyo3(from_py_with = truth)] force: bool) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        Ok(self.count(wait(py, session.client.remove_all(force))))
    }
}
