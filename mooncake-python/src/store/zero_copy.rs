//! Values in memory of the program, named by address.

use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_engine::addressed::caller_memory;
use mooncake_store::client::Operation;
use mooncake_store::local::CallMemory;
use mooncake_transport::Slice;
use pyo3::prelude::*;

use super::{NOT_SET_UP, Session, Store, wait_until_unused};
use crate::args::{Uint, text, texts, truth};
use crate::client::{PythonClient, RangeRead};
use crate::config::{self, Config};
use crate::interpreter::detached;
use crate::runtime::wait;

/// Value in pieces, or the reason why it cannot be written.
pub(super) type Pieces = Result<Vec<Slice<TransportSet>>>;

/// Returns the pieces of a value.
pub(super) fn pieces(memory: &CallMemory, pointers: &[Uint], sizes: &[Uint]) -> Pieces {
    if pointers.len() != sizes.len() {
        return Err(Error::invalid(format!(
            "addresses and sizes differ in number. addresses={} sizes={}",
            pointers.len(),
            sizes.len()
        )));
    }
    memory.pieces(pointers.iter().zip(sizes).map(|(pointer, size)| (pointer.0, size.len())))
}

/// Returns each key with the address and the length of its memory.
pub(super) fn keyed_ranges(
    keys: Vec<String>,
    pointers: &[Uint],
    sizes: &[Uint],
) -> Vec<(String, (u64, usize))> {
    let ranges = pointers.iter().zip(sizes).map(|(pointer, size)| (pointer.0, size.len()));
    keys.into_iter().zip(ranges).collect()
}

impl Session {
    /// Reads whole objects, each into several buffers that are filled in their order. Together they
    /// may be longer than the object.
    async fn read_pieces(
        &self,
        memory: &CallMemory,
        keys: &[String],
        pointers: &[Vec<Uint>],
        sizes: &[Vec<Uint>],
    ) -> Result<Vec<Result<u64>>> {
        let at_once = self.client.located_at_once();
        if keys.len() <= at_once {
            return self.read_some_pieces(memory, keys, pointers, sizes).await;
        }
        let mut results = Vec::with_capacity(keys.len());
        for ((keys, pointers), sizes) in
            keys.chunks(at_once).zip(pointers.chunks(at_once)).zip(sizes.chunks(at_once))
        {
            match self.read_some_pieces(memory, keys, pointers, sizes).await {
                Ok(read) => results.extend(read),
                Err(error) if results.is_empty() => return Err(error),
                // The outcomes of the earlier keys are known.
                Err(error) => results.extend(keys.iter().map(|_| Err(error.clone()))),
            }
        }
        Ok(results)
    }

    /// Reads objects as [`read_pieces`](Self::read_pieces) does, after it has located all of them.
    async fn read_some_pieces(
        &self,
        memory: &CallMemory,
        keys: &[String],
        pointers: &[Vec<Uint>],
        sizes: &[Vec<Uint>],
    ) -> Result<Vec<Result<u64>>> {
        let started = self.client.begin(Operation::BatchGetIntoMultiBuffers);
        let located = self.client.locate(keys).await?;
        let mut reads = Vec::new();
        let mut plans = Vec::with_capacity(keys.len());
        for (i, object) in located.into_iter().enumerate() {
            let plan = object.and_then(|object| {
                let object = object.ok_or_else(|| Error::from(mooncake_core::ErrorCode::ObjectNotFound))?;
                if pointers[i].len() != sizes[i].len() {
                    let (addresses, sizes) = (pointers[i].len(), sizes[i].len());
                    return Err(Error::invalid(format!(
                        "cannot read object: addresses and sizes differ in number. addresses={addresses} sizes={sizes}"
                    )));
                }
                let total = sizes[i].iter().fold(0u64, |sum, size| sum.saturating_add(size.0));
                if total < object.size() {
                    return Err(Error::invalid(format!(
                        "cannot read object: the buffers are too short. buffers={total} object={}",
                        object.size()
                    )));
                }
                let mut offset = 0;
                let mut parts = Vec::with_capacity(sizes[i].len());
                for (pointer, size) in pointers[i].iter().zip(&sizes[i]) {
                    let len = size.0.min(object.size() - offset);
                    if len == 0 {
                        continue;
                    }
                    let into = memory.sink(pointer.0, Uint(len).len())?;
                    parts.push(RangeRead { object: object.clone(), offset, into });
                    offset += len;
                }
                Ok((object.size(), parts))
            });
            plans.push(plan.map(|(size, parts)| {
                let count = parts.len();
                reads.extend(parts);
                (size, count)
            }));
        }
        let read = self.client.counted(started, self.client.read_current(reads)).await;
        let mut outcomes = read.into_iter().map(|read| read.result);
        let total = |plan: Result<(u64, usize)>| {
            let (size, count) = plan?;
            // The outcomes of all parts are consumed, even after a failure.
            let parts: Vec<Result<()>> = outcomes.by_ref().take(count).collect();
            parts.into_iter().collect::<Result<()>>().map(|()| size)
        };
        Ok(plans.into_iter().map(total).collect())
    }
}

impl Store {
    fn write_from(
        &self,
        py: Python<'_>,
        operation: Operation,
        keys: Vec<String>,
        pointers: &[Vec<Uint>],
        sizes: &[Vec<Uint>],
        config: (&Config<'_>, bool),
    ) -> PyResult<Vec<i64>> {
        let n = keys.len();
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; n]) };
        let checked = self.same_length(&[n, pointers.len(), sizes.len()]);
        let config = match checked.and_then(|()| config::for_call(config.0, n, config.1)) {
            Ok(config) => config,
            Err(error) => return Ok(vec![i64::from(self.errors.record(&error)); n]),
        };
        let memory = session.call_memory();
        // This may wait for a GPU.
        let values: Vec<Pieces> =
            detached(py, || pointers.iter().zip(sizes).map(|(p, s)| pieces(&memory, p, s)).collect());
        let outcomes = wait(py, session.client.write_valid(operation, keys.into_iter().zip(values), config));
        wait_until_unused(py, &memory);
        Ok(self.codes(n, outcomes))
    }

    fn write_one_from(
        &self,
        py: Python<'_>,
        operation: Operation,
        key: String,
        pieces: (&[Uint], &[Uint]),
        config: &Config<'_>,
    ) -> PyResult<i64> {
        let codes = self.write_from(
            py,
            operation,
            vec![key],
            &[pieces.0.to_vec()],
            &[pieces.1.to_vec()],
            (config, false),
        )?;
        Ok(codes.first().copied().unwrap_or(NOT_SET_UP))
    }

    fn write_buffer(
        &self,
        py: Python<'_>,
        operation: Operation,
        key: String,
        (pointer, size): (Uint, Uint),
        config: &Config<'_>,
    ) -> PyResult<i64> {
        self.write_one_from(py, operation, key, (&[pointer], &[size]), config)
    }
}

fn one_each(values: &[Uint]) -> Vec<Vec<Uint>> {
    values.iter().map(|&value| vec![value]).collect()
}

#[pymethods]
impl Store {
    /// Registers memory for calls that name memory by address. The memory must stay allocated until
    /// it is unregistered. It may overlap registered memory; each registration is ended by an
    /// `unregister_buffer` of its own. Returns 0, or -600 for invalid memory.
    fn register_buffer(&self, py: Python<'_>, buffer_ptr: Uint, size: Uint) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        let registered = detached(py, || {
            #[allow(unsafe_code)]
            // SAFETY: the program guarantees that the memory stays valid until it is unregistered,
            // which waits for `signal`.
            let (memory, signal) = unsafe { caller_memory(buffer_ptr.0, size.len()) }?;
            session.regions.add(session.client.register_now(memory)?, signal);
            Ok(())
        });
        if session.client.as_ipc().is_some() {
            // As in Mooncake C++, every failure has the same code here.
            let refused = registered.map_err(|error| self.errors.record(&error)).is_err();
            return Ok(if refused { -1 } else { 0 });
        }
        Ok(self.code(registered))
    }

    /// Unregisters memory after waiting for transfers that use it. Memory that another registration
    /// covers stays registered; of several that begin at the address, the shortest is ended.
    /// Returns 0, or -600 if none begins there.
    fn unregister_buffer(&self, py: Python<'_>, buffer_ptr: Uint) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        Ok(self.code(wait(py, session.regions.remove(buffer_ptr.0))))
    }

    /// Stores a value from memory of the program like `put`, without a copy. Memory that is not
    /// registered is accepted where the transport needs no registration, as over TCP.
    #[pyo3(signature = (key, buffer_ptr, size, config=None))]
    fn put_from(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        buffer_ptr: Uint,
        size: Uint,
        config: Config<'_>,
    ) -> PyResult<i64> {
        self.write_buffer(py, Operation::PutFrom, key, (buffer_ptr, size), &config)
    }

    /// Stores a value from memory of the program like `upsert`.
    #[pyo3(signature = (key, buffer_ptr, size, config=None))]
    fn upsert_from(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        buffer_ptr: Uint,
        size: Uint,
        config: Config<'_>,
    ) -> PyResult<i64> {
        self.write_buffer(py, Operation::UpsertFrom, key, (buffer_ptr, size), &config)
    }

    /// Stores metadata and data from memory of the program as one value, metadata first.
    #[pyo3(signature = (key, buffer_ptr, metadata_buffer_ptr, size, metadata_size, config=None))]
    #[allow(clippy::too_many_arguments, reason = "interface of Mooncake C++")]
    fn put_from_with_metadata(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        buffer_ptr: Uint,
        metadata_buffer_ptr: Uint,
        size: Uint,
        metadata_size: Uint,
        config: Config<'_>,
    ) -> PyResult<i64> {
        let pieces = ([metadata_buffer_ptr, buffer_ptr], [metadata_size, size]);
        self.write_one_from(py, Operation::PutFrom, key, (&pieces.0, &pieces.1), &config)
    }

    /// Stores many values like `put_from`. Returns a code for each.
    #[pyo3(signature = (keys, buffer_ptrs, sizes, config=None))]
    fn batch_put_from(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        buffer_ptrs: Vec<Uint>,
        sizes: Vec<Uint>,
        config: Config<'_>,
    ) -> PyResult<Vec<i64>> {
        self.write_from(
            py,
            Operation::BatchPutFrom,
            keys,
            &one_each(&buffer_ptrs),
            &one_each(&sizes),
            (&config, false),
        )
    }

    /// Stores many values like `upsert_from`. Returns a code for each.
    #[pyo3(signature = (keys, buffer_ptrs, sizes, config=None))]
    fn batch_upsert_from(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        buffer_ptrs: Vec<Uint>,
        sizes: Vec<Uint>,
        config: Config<'_>,
    ) -> PyResult<Vec<i64>> {
        self.write_from(
            py,
            Operation::BatchUpsertFrom,
            keys,
            &one_each(&buffer_ptrs),
            &one_each(&sizes),
            (&config, false),
        )
    }

    /// Stores many values like `put_from`, each from several consecutive buffers. Returns a code
    /// for each.
    #[pyo3(signature = (keys, all_buffer_ptrs, all_sizes, config=None))]
    fn batch_put_from_multi_buffers(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        all_buffer_ptrs: Vec<Vec<Uint>>,
        all_sizes: Vec<Vec<Uint>>,
        config: Config<'_>,
    ) -> PyResult<Vec<i64>> {
        self.write_from(
            py,
            Operation::BatchPutFromMultiBuffers,
            keys,
            &all_buffer_ptrs,
            &all_sizes,
            (&config, true),
        )
    }

    /// Reads a value into memory of the program. Returns its length, -704 if the key does not
    /// exist, or -600 if the memory is too short.
    fn get_into(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        buffer_ptr: Uint,
        size: Uint,
    ) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(NOT_SET_UP) };
        let memory = session.call_memory();
        let range = (buffer_ptr.0, size.len());
        let outcome = wait(py, memory.read_into(Operation::GetInto, [(key, range)]));
        wait_until_unused(py, &memory);
        Ok(self.counts(1, outcome).first().copied().unwrap_or(NOT_SET_UP))
    }

    /// Runs `get_into` for many keys.
    fn batch_get_into(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        buffer_ptrs: Vec<Uint>,
        sizes: Vec<Uint>,
    ) -> PyResult<Vec<i64>> {
        let n = keys.len();
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; n]) };
        if let Err(error) = self.same_length(&[n, buffer_ptrs.len(), sizes.len()]) {
            return Ok(self.counts(n, Err(error)));
        }
        let memory = session.call_memory();
        let items = keyed_ranges(keys, &buffer_ptrs, &sizes);
        let outcomes = wait(py, memory.read_into(Operation::BatchGetInto, items));
        wait_until_unused(py, &memory);
        Ok(self.counts(n, outcomes))
    }

    /// Reads values, each into several buffers that are filled in order. Returns the length of each
    /// value, or -600 if the buffers together are too short.
    #[pyo3(signature = (keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node=false))]
    fn batch_get_into_multi_buffers(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        all_buffer_ptrs: Vec<Vec<Uint>>,
        all_sizes: Vec<Vec<Uint>>,
        #[pyo3(from_py_with = truth)] prefer_alloc_in_same_node: bool,
    ) -> PyResult<Vec<i64>> {
        // The nearest replica is read in any case.
        let _ = prefer_alloc_in_same_node;
        let n = keys.len();
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; n]) };
        if let Err(error) = self.same_length(&[n, all_buffer_ptrs.len(), all_sizes.len()]) {
            return Ok(self.counts(n, Err(error)));
        }
        let memory = session.call_memory();
        let outcomes = wait(py, session.read_pieces(&memory, &keys, &all_buffer_ptrs, &all_sizes));
        wait_until_unused(py, &memory);
        Ok(self.counts(n, outcomes))
    }
}
