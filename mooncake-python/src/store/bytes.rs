//! Values as Python objects: put and get of bytes, one at a time and in batches.

use std::sync::Arc;

use mooncake_core::memory::MemorySpan;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_store::client::{Operation, StartedCall};
use mooncake_transport::Slice;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::{NOT_SET_UP, Session, Store};
use crate::args::{Keep, bytes_of, new_bytes, part_of, text, texts};
use crate::client::{Located, PythonClient, RangeRead};
use crate::config::{self, Config};
use crate::error::missing_result;
use crate::handle::BufferHandle;
use crate::lease::Lease;
use crate::memory::{object_slice, object_slice_mut};
use crate::runtime::wait;

/// Consecutive pieces of a value.
type Spans = Vec<MemorySpan>;

/// Value of each key, `None` for one that is absent or unreadable.
type Values<'py> = Vec<Option<Bound<'py, PyBytes>>>;

impl Session {
    /// Writes every item. Each succeeds or fails independently.
    pub(super) async fn write_objects(
        &self,
        operation: Operation,
        items: Vec<(String, Spans)>,
        keep: &Arc<Keep>,
        config: ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        let slices = |spans: Spans| -> Result<Vec<Slice<TransportSet>>> {
            spans.into_iter().map(|span| object_slice(&self.client, span, keep)).collect()
        };
        let items: Vec<_> =
            items.into_iter().map(|(key, spans)| Ok((key, slices(spans)?))).collect::<Result<_>>()?;
        self.client.write(operation, &items, config).await
    }

    /// Reads values into leased memory. Absent keys are `None`.
    pub(super) async fn read_leases(
        &self,
        operation: Operation,
        keys: &[String],
    ) -> Result<Vec<Option<Result<Lease>>>> {
        if let Some(client) = self.client.as_ipc() {
            let values = client.batch_get_buf(keys).await?;
            return Ok(values
                .into_iter()
                .map(|value| value.transpose().map(|value| value.map(Lease::shared)))
                .collect());
        }
        let mut values = Vec::new();
        for part in keys.chunks(self.client.located_at_once()) {
            match self.read_some_leases(operation, part).await {
                Ok(read) if part.len() == keys.len() => return Ok(read),
                Ok(read) => values.extend(read),
                Err(error) if values.is_empty() => return Err(error),
                Err(error) => {
                    // The values of the earlier keys are known.
                    values.resize_with(keys.len(), || Some(Err(error.clone())));
                    break;
                }
            }
        }
        Ok(values)
    }

    /// Reads values as [`read_leases`](Self::read_leases) does, after it has located all of them.
    async fn read_some_leases(
        &self,
        operation: Operation,
        keys: &[String],
    ) -> Result<Vec<Option<Result<Lease>>>> {
        let started = self.client.begin(operation);
        let located = self.client.locate(keys).await?;
        let arena = self.arena()?;
        let (mut leases, mut reads): (Vec<Option<Result<Lease>>>, Vec<RangeRead>) = Default::default();
        for object in located {
            let object = match object.transpose() {
                Some(Ok(object)) => object,
                missing => {
                    leases.push(missing.map(|failed| failed.and_then(|_| missing_result())));
                    continue;
                }
            };
            let memory = usize::try_from(object.size())
                .map_err(|_| Error::invalid("object is larger than the address space"))
                .and_then(|len| arena.take(&self.client, len))
                .and_then(|lease| Ok((lease.slice_mut()?, lease)));
            // The others may be shorter.
            leases.push(Some(memory.map(|(into, lease)| {
                reads.push(RangeRead { object, offset: 0, into });
                lease
            })));
        }
        let mut outcomes = self.read_whole(started, reads).await.into_iter();
        let mut filled = |lease: Result<Lease>| {
            let lease = lease?;
            outcomes.next().unwrap_or_else(missing_result).map(|()| lease)
        };
        Ok(leases.into_iter().map(|lease| lease.map(&mut filled)).collect())
    }

    /// Reads whole objects, each into memory of its length.
    async fn read_whole(&self, started: Option<StartedCall>, reads: Vec<RangeRead>) -> Vec<Result<()>> {
        let read = self.client.counted(started, self.client.read_current(reads)).await;
        read.into_iter().map(|read| read.result).collect()
    }
}

impl Store {
    /// Returns the objects that were found. Records the errors of failed look-ups.
    pub(super) fn present(&self, located: Vec<Result<Option<Located>>>) -> Vec<Option<Located>> {
        let found = |one: Result<Option<Located>>| {
            one.unwrap_or_else(|error| {
                self.errors.record(&error);
                None
            })
        };
        located.into_iter().map(found).collect()
    }

    fn write(
        &self,
        py: Python<'_>,
        operation: Operation,
        values: impl FnOnce(&mut Keep) -> PyResult<Vec<(String, Spans)>>,
        config: &Config<'_>,
    ) -> PyResult<Option<Result<Vec<Result<()>>>>> {
        let Some(session) = self.session()? else { return Ok(None) };
        let mut keep = Keep::default();
        let items = values(&mut keep)?;
        let keep = Arc::new(keep);
        let config = match config::for_call(config, items.len(), false) {
            Ok(config) => config,
            Err(error) => return Ok(Some(Err(error))),
        };
        Ok(Some(wait(py, session.write_objects(operation, items, &keep, config))))
    }

    fn write_one(
        &self,
        py: Python<'_>,
        operation: Operation,
        key: String,
        spans: impl FnOnce(&mut Keep) -> PyResult<Spans>,
        config: &Config<'_>,
    ) -> PyResult<i64> {
        let outcome = self.write(py, operation, |keep| Ok(vec![(key, spans(keep)?)]), config)?;
        Ok(outcome.map_or(NOT_SET_UP, |outcome| self.code(outcome.and_then(single_outcome))))
    }

    /// Writes all items and returns the code of the first failure. If a key or a value is empty,
    /// nothing is stored.
    fn write_all(
        &self,
        py: Python<'_>,
        operation: Operation,
        keys: Vec<String>,
        values: &[Bound<'_, PyAny>],
        config: &Config<'_>,
    ) -> PyResult<i64> {
        if keys.len() != values.len() {
            let text =
                format!("keys and values differ in number. keys={} values={}", keys.len(), values.len());
            return Ok(self.code::<()>(Err(Error::invalid(text))));
        }
        let mut empty = false;
        let outcome = self.write(
            py,
            operation,
            |keep| {
                let spans: Vec<Spans> = values
                    .iter()
                    .map(|value| Ok(bytes_of(value, keep)?.into_iter().collect()))
                    .collect::<PyResult<_>>()?;
                empty = spans.iter().any(Vec::is_empty) || keys.iter().any(String::is_empty);
                Ok(if empty { Vec::new() } else { keys.into_iter().zip(spans).collect() })
            },
            // The number of group ids is checked against the items to write.
            config,
        )?;
        if empty {
            return Ok(self.code::<()>(Err(Error::invalid(
                "cannot put batch: a key or value is empty; nothing was stored",
            ))));
        }
        Ok(outcome.map_or(NOT_SET_UP, |outcome| {
            self.code(outcome.and_then(|all| all.into_iter().collect::<Result<()>>()))
        }))
    }

    fn write_parts(
        &self,
        py: Python<'_>,
        operation: Operation,
        key: String,
        parts: &Bound<'_, PyTuple>,
        config: &Config<'_>,
    ) -> PyResult<i64> {
        let mut keep = Keep::default();
        let mut spans = Vec::with_capacity(parts.len());
        for part in parts {
            spans.extend(part_of(&part, &mut keep)?);
        }
        self.write_one(
            py,
            operation,
            key,
            |all| {
                *all = keep;
                Ok(spans)
            },
            config,
        )
    }

    /// Reads the values of keys. Absent and unreadable ones are `None`.
    fn read<'py>(
        &self,
        py: Python<'py>,
        session: &Session,
        operation: Operation,
        keys: &[String],
    ) -> PyResult<Option<Values<'py>>> {
        let mut values = Vec::new();
        for part in keys.chunks(session.client.located_at_once()) {
            match self.read_some(py, session, operation, part)? {
                Some(read) if part.len() == keys.len() => return Ok(Some(read)),
                Some(read) => values.extend(read),
                None if values.is_empty() => return Ok(None),
                None => {
                    // The values of the earlier keys are known.
                    values.resize_with(keys.len(), || None);
                    break;
                }
            }
        }
        Ok(Some(values))
    }

    /// Reads values as [`read`](Self::read) does, after it has located all of them.
    fn read_some<'py>(
        &self,
        py: Python<'py>,
        session: &Session,
        operation: Operation,
        keys: &[String],
    ) -> PyResult<Option<Values<'py>>> {
        if session.client.needs_registration() || session.client.as_ipc().is_some() {
            // Such a transport cannot write into Python's own memory, and mooncake_client cannot
            // access it.
            let handles = self.read_handles(py, session, operation, keys).into_iter();
            let copy = |handle: BufferHandle| handle.to_bytes(py);
            return handles.map(|handle| handle.map(copy).transpose()).collect::<PyResult<_>>().map(Some);
        }
        let started = session.client.begin(operation);
        let located = match wait(py, session.client.locate(keys)) {
            Ok(located) => located,
            Err(error) => {
                self.errors.record(&error);
                return Ok(None);
            }
        };
        let mut keep = Keep::default();
        let (mut values, mut wanted) = (Vec::with_capacity(keys.len()), Vec::new());
        for object in self.present(located) {
            let Some(object) = object else {
                values.push(None);
                continue;
            };
            let (value, span) = new_bytes(py, usize::try_from(object.size())?)?;
            keep.object(value.clone().into_any().unbind());
            wanted.extend(span.map(|span| (values.len(), object, span)));
            values.push(Some(value));
        }
        let keep = Arc::new(keep);
        let outcome = wait(py, async {
            let mut reads = Vec::with_capacity(wanted.len());
            for (_, object, span) in &wanted {
                reads.push(RangeRead {
                    object: object.clone(),
                    offset: 0,
                    into: object_slice_mut(*span, &keep)?,
                });
            }
            Ok(session.read_whole(started, reads).await)
        });
        let outcomes = match outcome {
            Ok(outcomes) => outcomes,
            Err(error) => {
                self.errors.record(&error);
                return Ok(None);
            }
        };
        for ((at, ..), outcome) in wanted.iter().zip(outcomes) {
            if let Err(error) = outcome {
                self.errors.record(&error);
                values[*at] = None;
            }
        }
        Ok(Some(values))
    }

    /// Reads values into the local buffer.
    fn read_handles(
        &self,
        py: Python<'_>,
        session: &Session,
        operation: Operation,
        keys: &[String],
    ) -> Vec<Option<BufferHandle>> {
        let leases = wait(py, session.read_leases(operation, keys)).unwrap_or_else(|error| {
            self.errors.record(&error);
            keys.iter().map(|_| None).collect()
        });
        let handle = |lease: Option<Result<Lease>>| match lease? {
            Ok(lease) => Some(BufferHandle::new(lease)),
            Err(error) => {
                self.errors.record(&error);
                None
            }
        };
        leases.into_iter().map(handle).collect()
    }
}

pub(super) fn single_outcome(mut outcomes: Vec<Result<()>>) -> Result<()> {
    outcomes.pop().unwrap_or_else(missing_result)
}

#[pymethods]
impl Store {
    /// Stores a value under a new key. Returns 0, also if the key already exists (its value does
    /// not change), or a negative code.
    #[pyo3(signature = (key, value, config=None))]
    fn put(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        value: &Bound<'_, PyAny>,
        config: Config<'_>,
    ) -> PyResult<i64> {
        let spans = |keep: &mut Keep| Ok(bytes_of(value, keep)?.into_iter().collect());
        self.write_one(py, Operation::Put, key, spans, &config)
    }

    /// Stores many values like `put`. Returns the code of the first failure.
    #[pyo3(signature = (keys, values, config=None))]
    fn put_batch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        values: Vec<Bound<'_, PyAny>>,
        config: Config<'_>,
    ) -> PyResult<i64> {
        self.write_all(py, Operation::PutBatch, keys, &values, &config)
    }

    /// Stores a value that is given in consecutive parts, like `put`.
    #[pyo3(signature = (key, *parts, config=None))]
    fn put_parts(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        parts: &Bound<'_, PyTuple>,
        config: Config<'_>,
    ) -> PyResult<i64> {
        self.write_parts(py, Operation::PutParts, key, parts, &config)
    }

    /// Stores a value and replaces the previous one, if any.
    #[pyo3(signature = (key, value, config=None))]
    fn upsert(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        value: &Bound<'_, PyAny>,
        config: Config<'_>,
    ) -> PyResult<i64> {
        let spans = |keep: &mut Keep| Ok(bytes_of(value, keep)?.into_iter().collect());
        self.write_one(py, Operation::Upsert, key, spans, &config)
    }

    /// Stores many values like `upsert`. Returns the code of the first failure.
    #[pyo3(signature = (keys, values, config=None))]
    fn upsert_batch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        values: Vec<Bound<'_, PyAny>>,
        config: Config<'_>,
    ) -> PyResult<i64> {
        self.write_all(py, Operation::UpsertBatch, keys, &values, &config)
    }

    /// Stores a value that is given in consecutive parts, like `upsert`.
    #[pyo3(signature = (key, *parts, config=None))]
    fn upsert_parts(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
        parts: &Bound<'_, PyTuple>,
        config: Config<'_>,
    ) -> PyResult<i64> {
        self.write_parts(py, Operation::UpsertParts, key, parts, &config)
    }

    /// Returns the value of a key. Empty if the key does not exist or cannot be read.
    fn get<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = text)] key: String,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let empty = || PyBytes::new(py, b"");
        let Some(session) = self.session()? else { return Ok(empty()) };
        let values = self.read(py, &session, Operation::GetBuffer, &[key])?;
        Ok(values.and_then(|mut values| values.pop().flatten()).unwrap_or_else(empty))
    }

    /// Returns the values of many keys, empty where a key does not exist. Returns a single empty
    /// value if the call fails as a whole.
    fn get_batch<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Bound<'py, PyList>> {
        let empty = || PyBytes::new(py, b"");
        let values = match self.session()? {
            Some(session) if !keys.is_empty() => self.read(py, &session, Operation::BatchGetBuffer, &keys)?,
            _ => None,
        };
        let values = values.unwrap_or_else(|| vec![None]);
        PyList::new(py, values.into_iter().map(|value| value.unwrap_or_else(empty)))
    }

    /// Returns the value of a key in the local buffer, without a copy. `None` if the key does not
    /// exist.
    fn get_buffer(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] key: String,
    ) -> PyResult<Option<BufferHandle>> {
        let Some(session) = self.session()? else { return Ok(None) };
        Ok(self.read_handles(py, &session, Operation::GetBuffer, &[key]).pop().flatten())
    }

    /// Runs `get_buffer` for many keys.
    fn batch_get_buffer(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<Vec<Option<BufferHandle>>> {
        let Some(session) = self.session()? else { return Ok(keys.iter().map(|_| None).collect()) };
        Ok(self.read_handles(py, &session, Operation::BatchGetBuffer, &keys))
    }
}
