//! Calls for asyncio. Each does the same as the call of its name without waiting, and resolves the
//! future it is given. It may be cancelled at any time.

use std::sync::Arc;

use mooncake_core::Result;
use mooncake_store::client::Operation;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::bytes::single_outcome;
use super::objects::absent_as_error;
use super::zero_copy::{Pieces, keyed_ranges, pieces};
use super::{NOT_SET_UP, Store};
use crate::args::{Keep, Uint, bytes_of, text, texts, truth};
use crate::awaitable::{awaitable, ready};
use crate::config::{self, Config};
use crate::error::Errors;
use crate::handle::BufferHandle;
use crate::interpreter::detached;
use crate::lease::Lease;

fn number<'py>(py: Python<'py>, errors: &Errors, outcome: Result<u64>) -> PyResult<Bound<'py, PyAny>> {
    let number = outcome
        .map_or_else(|error| i64::from(errors.record(&error)), |n| i64::try_from(n).unwrap_or(i64::MAX));
    Ok(number.into_pyobject(py)?.into_any())
}

fn numbers<'py>(
    py: Python<'py>,
    errors: &Errors,
    n: usize,
    outcome: Result<Vec<Result<u64>>>,
) -> PyResult<Bound<'py, PyAny>> {
    let numbers: Vec<i64> = match outcome {
        Ok(all) => all
            .into_iter()
            .map(|one| {
                one.map_or_else(|e| i64::from(errors.record(&e)), |n| i64::try_from(n).unwrap_or(i64::MAX))
            })
            .collect(),
        Err(error) => vec![i64::from(errors.record(&error)); n],
    };
    Ok(PyList::new(py, numbers)?.into_any())
}

fn zero(outcome: Result<()>) -> Result<u64> {
    outcome.map(|()| 0)
}

/// Copies a value out of its lease. Empty if the key does not exist.
fn value<'py>(
    py: Python<'py>,
    errors: &Errors,
    lease: Option<Result<Lease>>,
) -> PyResult<Bound<'py, PyBytes>> {
    match lease {
        Some(Ok(lease)) => BufferHandle::new(lease).to_bytes(py),
        Some(Err(error)) => {
            errors.record(&error);
            Ok(PyBytes::new(py, b""))
        }
        None => Ok(PyBytes::new(py, b"")),
    }
}

#[pymethods]
impl Store {
    #[pyo3(signature = (future, key, value, config=None, upsert=false))]
    fn _async_put(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] key: String,
        value: &Bound<'_, PyAny>,
        config: Config<'_>,
        upsert: bool,
    ) -> PyResult<()> {
        let Some(session) = self.session()? else { return ready(future, NOT_SET_UP) };
        let mut keep = Keep::default();
        let spans = bytes_of(value, &mut keep)?.into_iter().collect();
        let keep = Arc::new(keep);
        let config = match config::for_call(&config, 1, false) {
            Ok(config) => config,
            Err(error) => return ready(future, self.errors.record(&error)),
        };
        let operation = if upsert { Operation::Upsert } else { Operation::Put };
        let errors = self.errors.clone();
        let work = async move {
            single_outcome(session.write_objects(operation, vec![(key, spans)], &keep, config).await?)
        };
        awaitable(future, work, move |py, outcome| number(py, &errors, zero(outcome)))
    }

    fn _async_get(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] key: String,
    ) -> PyResult<()> {
        let Some(session) = self.session()? else { return ready(future, PyBytes::new(future.py(), b"")) };
        let errors = self.errors.clone();
        let work = async move { session.read_leases(Operation::GetBuffer, &[key]).await };
        awaitable(future, work, move |py, outcome| {
            let lease = match outcome {
                Ok(mut leases) => leases.pop().flatten(),
                Err(error) => Some(Err(error)),
            };
            Ok(value(py, &errors, lease)?.into_any())
        })
    }

    fn _async_get_batch(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<()> {
        let nothing = || PyList::new(future.py(), [PyBytes::new(future.py(), b"")]);
        let Some(session) = self.session()? else { return ready(future, nothing()?) };
        if keys.is_empty() {
            return ready(future, nothing()?);
        }
        let errors = self.errors.clone();
        let work = async move { session.read_leases(Operation::BatchGetBuffer, &keys).await };
        awaitable(future, work, move |py, outcome| {
            let leases = outcome.unwrap_or_else(|error| vec![Some(Err(error))]);
            let values = leases.into_iter().map(|lease| value(py, &errors, lease));
            Ok(PyList::new(py, values.collect::<PyResult<Vec<_>>>()?)?.into_any())
        })
    }

    fn _async_is_exist(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] key: String,
    ) -> PyResult<()> {
        let Some(session) = self.session()? else { return ready(future, -1) };
        let errors = self.errors.clone();
        let work = async move { session.client.exist(key).await.map(u64::from) };
        awaitable(future, work, move |py, outcome| number(py, &errors, outcome))
    }

    fn _async_batch_is_exist(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<()> {
        let n = keys.len();
        let Some(session) = self.session()? else { return ready(future, vec![-1; n]) };
        let errors = self.errors.clone();
        let work = async move {
            let found = session.client.batch_exist(&keys).await?;
            Ok(found.into_iter().map(|one| one.map(u64::from)).collect())
        };
        awaitable(future, work, move |py, outcome| numbers(py, &errors, n, outcome))
    }

    fn _async_prefix_hits(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<()> {
        let Some(session) = self.session()? else { return ready(future, NOT_SET_UP) };
        let errors = self.errors.clone();
        let work = async move { session.client.prefix_hits(&keys).await.map(|hits| hits as u64) };
        awaitable(future, work, move |py, outcome| number(py, &errors, outcome))
    }

    #[pyo3(signature = (future, key, force=false))]
    fn _async_remove(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] key: String,
        #[pyo3(from_py_with = truth)] force: bool,
    ) -> PyResult<()> {
        let Some(session) = self.session()? else { return ready(future, NOT_SET_UP) };
        let errors = self.errors.clone();
        let work = async move { absent_as_error(session.client.remove(key, force).await) };
        awaitable(future, work, move |py, outcome| number(py, &errors, zero(outcome)))
    }

    /// Reads values like `batch_get_into`. With `landed`, or if some of the memory is not
    /// registered, the future resolves only when nothing writes to the memory any more. Returns
    /// whether it does so.
    #[pyo3(signature = (future, keys, buffer_ptrs, sizes, landed=false))]
    fn _async_batch_get_into(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        buffer_ptrs: Vec<Uint>,
        sizes: Vec<Uint>,
        landed: bool,
    ) -> PyResult<bool> {
        let n = keys.len();
        let Some(session) = self.session()? else {
            return ready(future, vec![NOT_SET_UP; n]).map(|()| false);
        };
        if let Err(error) = self.same_length(&[n, buffer_ptrs.len(), sizes.len()]) {
            return ready(future, vec![self.errors.record(&error); n]).map(|()| false);
        }
        let landed = landed || !session.is_registered(&buffer_ptrs, &sizes);
        let errors = self.errors.clone();
        let work = async move {
            let (operation, memory) = (Operation::BatchGetInto, session.call_memory());
            let items = keyed_ranges(keys, &buffer_ptrs, &sizes);
            if landed {
                return memory.read_landed(operation, items).await;
            }
            memory.read_into(operation, items).await
        };
        awaitable(future, work, move |py, outcome| numbers(py, &errors, n, outcome))?;
        Ok(landed)
    }

    /// Writes values like `batch_put_from`. If some of the memory is not registered, the future
    /// resolves only when no transfer uses the memory any more. Returns whether it does so.
    #[pyo3(signature = (future, keys, buffer_ptrs, sizes, config=None, upsert=false))]
    fn _async_batch_put_from(
        &self,
        future: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        buffer_ptrs: Vec<Uint>,
        sizes: Vec<Uint>,
        config: Config<'_>,
        upsert: bool,
    ) -> PyResult<bool> {
        let n = keys.len();
        let Some(session) = self.session()? else {
            return ready(future, vec![NOT_SET_UP; n]).map(|()| false);
        };
        let checked = self.same_length(&[n, buffer_ptrs.len(), sizes.len()]);
        let config = match checked.and_then(|()| config::for_call(&config, n, false)) {
            Ok(config) => config,
            Err(error) => return ready(future, vec![self.errors.record(&error); n]).map(|()| false),
        };
        let memory = session.call_memory();
        let of_value = |(pointer, size)| pieces(&memory, &[pointer], &[size]);
        let values: Vec<Pieces> =
            detached(future.py(), || buffer_ptrs.into_iter().zip(sizes).map(of_value).collect());
        let operation = if upsert { Operation::BatchUpsertFrom } else { Operation::BatchPutFrom };
        let errors = self.errors.clone();
        let is_waited_for = memory.has_unregistered();
        let work = async move {
            let outcomes = session.client.write_valid(operation, keys.into_iter().zip(values), config).await;
            memory.unused().await;
            Ok(outcomes?.into_iter().map(zero).collect())
        };
        awaitable(future, work, move |py, outcome| numbers(py, &errors, n, outcome))?;
        Ok(is_waited_for)
    }
}
