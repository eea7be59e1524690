//! Sessions: values that are read and written in parts over several calls, as layer-wise caches do.

use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::client::{Operation, RangeWrite, Reservation};
use mooncake_store::local::CallMemory;
use pyo3::prelude::*;
use tokio::sync::RwLock;

use super::part_write::{PartWrite, TakenWrites};
use super::{NOT_SET_UP, Session, Store, wait_until_unused};
use crate::args::{Uint, texts};
use crate::client::{PythonClient, RangeRead};
use crate::config::{self, Config};
use crate::error::missing_result;
use crate::runtime::wait;

fn no_session(key: &str) -> Error {
    Error::invalid(format!("no session is open. key={key:?}"))
}

impl Session {
    async fn start_reads(&self, keys: &[String]) -> Result<Vec<Result<()>>> {
        // An IPC client has no sessions, as in Mooncake C++.
        self.client.full()?;
        let located = self.client.locate(keys).await?;
        let mut reads = self.reads.lock();
        let start = |(key, object): (&String, Result<Option<_>>)| {
            let object = object?.ok_or_else(|| Error::from(ErrorCode::ObjectNotFound))?;
            reads.insert(key.clone(), object);
            Ok(())
        };
        Ok(keys.iter().zip(located).map(start).collect())
    }

    async fn read_session(
        &self,
        memory: &CallMemory,
        keys: &[String],
        parts: &Parts,
    ) -> Result<Vec<Result<u64>>> {
        self.client.full()?;
        let mut reads = Vec::new();
        let mut plans = Vec::with_capacity(keys.len());
        for (i, key) in keys.iter().enumerate() {
            let object = self.reads.lock().get(key).cloned();
            let plan = object.ok_or_else(|| no_session(key)).and_then(|object| {
                parts
                    .of_key(i)?
                    .map(|(pointer, size, offset)| {
                        Ok(RangeRead { object: object.clone(), offset, into: memory.sink(pointer, size)? })
                    })
                    .collect::<Result<Vec<_>>>()
            });
            plans.push(plan.map(|plan| {
                let count = plan.len();
                reads.extend(plan);
                count
            }));
        }
        let lens: Vec<u64> = reads.iter().map(|read| read.into.len() as u64).collect();
        let started = self.client.begin(Operation::BatchGetIntoMultiBufferRanges);
        let read = self.client.counted(started, self.client.read(reads)).await;
        let outcomes = read.into_iter().map(|read| read.result);
        Ok(sum_parts(plans, outcomes.zip(lens)))
    }

    async fn start_writes(
        &self,
        keys: &[String],
        sizes: &[Uint],
        config: &mooncake_core::replica::ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        let own = self.client.full()?;
        let (free, unended): (Vec<bool>, Vec<Arc<PartWrite>>) = {
            let mut writes = self.writes.lock();
            let is_unended = |key: &&String| writes.get(*key).is_some_and(|write| write.has_unknown_end());
            let unended: Vec<&String> = keys.iter().filter(is_unended).collect();
            let unended = unended.into_iter().filter_map(|key| writes.remove(key)).collect();
            (keys.iter().map(|key| !writes.contains_key(key)).collect(), unended)
        };
        if !unended.is_empty() {
            // A new session replaces one whose end was lost.
            let spaces: Vec<&Reservation> = unended.iter().map(|write| &write.space).collect();
            own.ranges().give_back(&spaces).await;
        }
        let config = config.of_keys((0..keys.len()).filter(|at| free[*at]), keys.len());
        let wanted = keys.iter().zip(sizes).zip(&free).filter(|(_, free)| **free);
        let items: Vec<(&String, u64)> = wanted.map(|((key, size), _)| (key, size.0)).collect();
        let mut reserved = own.ranges().reserve(&items, &config).await?.into_iter();
        let mut writes = self.writes.lock();
        let start = |(key, free): (&String, &bool)| {
            if !free {
                return Err(Error::invalid(format!(
                    "cannot start session: one is already open. key={key:?}"
                )));
            }

            let writing =
                PartWrite { space: reserved.next().unwrap_or_else(missing_result)?, open: RwLock::new(true) };
            writes.insert(key.clone(), Arc::new(writing));
            Ok(())
        };
        Ok(keys.iter().zip(&free).map(start).collect())
    }

    async fn write_session(
        &self,
        memory: &CallMemory,
        keys: &[String],
        parts: &Parts,
    ) -> Result<Vec<Result<u64>>> {
        let objects: Vec<Option<Arc<PartWrite>>> = {
            let writes = self.writes.lock();
            keys.iter().map(|key| writes.get(key).cloned()).collect()
        };
        // A session that is about to end rejects new writes. A key may occur twice in the list.
        let open: Vec<_> = objects
            .iter()
            .map(|object| object.as_deref()?.open.try_read().ok().filter(|open| **open))
            .collect();
        let mut ranges = Vec::new();
        let mut plans = Vec::with_capacity(keys.len());
        for (i, key) in keys.iter().enumerate() {
            let object = objects[i].as_deref().filter(|_| open[i].is_some()).map(|object| &object.space);
            let plan = object.ok_or_else(|| no_session(key)).and_then(|object| {
                parts
                    .of_key(i)?
                    .map(|(pointer, size, offset)| {
                        Ok(RangeWrite { object, offset, from: memory.source(pointer, size)? })
                    })
                    .collect::<Result<Vec<_>>>()
            });
            plans.push(plan.map(|plan| {
                let count = plan.len();
                ranges.extend(plan);
                count
            }));
        }
        let lens: Vec<u64> = ranges.iter().map(|range| range.from.len() as u64).collect();
        let outcomes = self.client.full()?.ranges().write(ranges).await;
        Ok(sum_parts(plans, outcomes.into_iter().zip(lens)))
    }

    /// Removes the open writes of these keys from the table and waits until no part of them is
    /// being written.
    async fn take_writes<'a>(&'a self, keys: &'a [String]) -> TakenWrites<'a> {
        let writes = {
            let mut writes = self.writes.lock();
            keys.iter().map(|key| writes.remove(key).ok_or_else(|| no_session(key))).collect()
        };
        let taken = TakenWrites { table: &self.writes, keys, writes };
        for writing in taken.writes.iter().flatten() {
            *writing.open.write().await = false;
        }
        taken
    }

    /// Makes values readable. A session without a result stays open, so that it can be ended again
    /// or revoked.
    async fn end_writes(&self, keys: &[String]) -> Result<Vec<Result<()>>> {
        let taken = self.take_writes(keys).await;
        let objects = taken.spaces();
        let client = self.client.full()?;
        let mut ended = client.ranges().commit(&objects).await?.into_iter();
        // The missing parts of these objects can no longer be written.
        let incomplete: Vec<_> = objects.into_iter().filter(|object| object.is_incomplete()).collect();
        if !incomplete.is_empty() {
            client.ranges().give_back(&incomplete).await;
        }
        let result = |write: &Result<_>| match write {
            Ok(_) => ended.next().unwrap_or_else(missing_result),
            Err(error) => Err(Error::new(error.code(), error.message().to_owned())),
        };
        Ok(taken.writes.iter().map(result).collect())
    }

    async fn revoke_writes(&self, keys: &[String]) -> Result<Vec<Result<()>>> {
        let mut taken = self.take_writes(keys).await;
        self.client.full()?.ranges().give_back(&taken.spaces()).await;
        Ok(taken.writes.drain(..).map(|one| one.map(drop)).collect())
    }
}

/// Returns one outcome for each plan of so many parts: the sum of their bytes, or the first
/// failure.
fn sum_parts(
    plans: Vec<Result<usize>>,
    outcomes: impl Iterator<Item = (Result<()>, u64)>,
) -> Vec<Result<u64>> {
    let mut outcomes = outcomes;
    let sum = |plan: Result<usize>| {
        let parts: Vec<(Result<()>, u64)> = outcomes.by_ref().take(plan?).collect();
        parts.into_iter().map(|(outcome, len)| outcome.map(|()| len)).sum()
    };
    plans.into_iter().map(sum).collect()
}

/// Buffers of each key and their positions in its value.
struct Parts {
    pointers: Vec<Vec<Uint>>,
    sizes: Vec<Vec<Uint>>,
    offsets: Vec<Vec<Uint>>,
}

impl Parts {
    /// Returns address, length and offset of each part of one key that is not empty.
    fn of_key(&self, key: usize) -> Result<impl Iterator<Item = (u64, usize, u64)>> {
        let (pointers, sizes, offsets) = (&self.pointers[key], &self.sizes[key], &self.offsets[key]);
        if pointers.len() != sizes.len() || sizes.len() != offsets.len() {
            return Err(Error::invalid("addresses, sizes and offsets of a key differ in number"));
        }
        let all = pointers.iter().zip(sizes).zip(offsets);
        Ok(all
            .map(|((pointer, size), offset)| (pointer.0, size.len(), offset.0))
            .filter(|(_, size, _)| *size > 0))
    }
}

#[pymethods]
impl Store {
    /// Looks up the replicas of each key once, for reads of parts. Returns 0, -704 for an absent
    /// key, or -702 for an object that is not in memory.
    fn batch_get_session_start(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        let outcomes = wait(py, session.start_reads(&keys));
        Ok(self.codes(keys.len(), outcomes))
    }

    /// Reads parts of values whose session is open. Returns the bytes read per key, or -707 if the
    /// lease of the session has expired.
    fn batch_get_into_multi_buffer_ranges(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        all_buffer_ptrs: Vec<Vec<Uint>>,
        all_sizes: Vec<Vec<Uint>>,
        all_src_offsets: Vec<Vec<Uint>>,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        let n = keys.len();
        if let Err(error) =
            self.same_length(&[n, all_buffer_ptrs.len(), all_sizes.len(), all_src_offsets.len()])
        {
            return Ok(self.counts(n, Err(error)));
        }
        let parts = Parts { pointers: all_buffer_ptrs, sizes: all_sizes, offsets: all_src_offsets };
        let memory = session.call_memory();
        let outcomes = wait(py, session.read_session(&memory, &keys, &parts));
        wait_until_unused(py, &memory);
        Ok(self.counts(n, outcomes))
    }

    /// Ends read sessions.
    fn batch_get_session_end(&self, #[pyo3(from_py_with = texts)] keys: Vec<String>) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(-1) };
        if let Err(error) = session.client.full() {
            return Ok(i64::from(self.errors.record(&error)));
        }
        let mut reads = session.reads.lock();
        for key in &keys {
            reads.remove(key);
        }
        Ok(0)
    }

    /// Allocates space for values of these sizes, to be written in parts. Returns -705 for a key
    /// that already exists.
    #[pyo3(signature = (keys, sizes, config=None))]
    fn batch_put_session_start(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        sizes: Vec<Uint>,
        config: Config<'_>,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        let n = keys.len();
        let checked = self.same_length(&[n, sizes.len()]);
        let config = match checked.and_then(|()| config::for_call(&config, n, true)) {
            Ok(config) => config,
            Err(error) => return Ok(self.codes(n, Err(error))),
        };
        Ok(self.codes(n, wait(py, session.start_writes(&keys, &sizes, &config))))
    }

    /// Writes parts of values whose session is open. Returns the bytes written per key.
    fn batch_put_from_multi_buffer_ranges(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        all_buffer_ptrs: Vec<Vec<Uint>>,
        all_sizes: Vec<Vec<Uint>>,
        all_dst_offsets: Vec<Vec<Uint>>,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        let n = keys.len();
        if let Err(error) =
            self.same_length(&[n, all_buffer_ptrs.len(), all_sizes.len(), all_dst_offsets.len()])
        {
            return Ok(self.counts(n, Err(error)));
        }
        let parts = Parts { pointers: all_buffer_ptrs, sizes: all_sizes, offsets: all_dst_offsets };
        let memory = session.call_memory();
        let outcomes = wait(py, session.write_session(&memory, &keys, &parts));
        wait_until_unused(py, &memory);
        Ok(self.counts(n, outcomes))
    }

    /// Makes values readable after all their bytes have been written. Returns -1010 for a value
    /// with a range that was never written, and frees its space; `last_error` names the range.
    /// Returns -900 or -901 if the master does not answer: end the session again, or revoke it.
    fn batch_put_session_end(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(Vec::new()) };
        Ok(self.codes(keys.len(), wait(py, session.end_writes(&keys))))
    }

    /// Frees the space of values that are not to be completed.
    fn batch_put_session_revoke(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Vec<i64>> {
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; keys.len()]) };
        Ok(self.codes(keys.len(), wait(py, session.revoke_writes(&keys))))
    }
}
