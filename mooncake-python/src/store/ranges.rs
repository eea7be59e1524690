//! Reads of parts of values, directly into memory of the program.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock, SystemClock};
use mooncake_core::settings::values::LONGEST_TIME;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::client::Operation;
use mooncake_store::local::CallMemory;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{NOT_SET_UP, Session, Store, wait_until_unused};
use crate::args::{Uint, texts, texts_of_each};
use crate::client::{Located, PythonClient, RangeRead, ReadOutcome};
use crate::error::{exception, missing_result};
use crate::runtime::wait;

/// Clock of the times at which objects of snapshots are located again.
static CLOCK: LazyLock<SharedClock> = LazyLock::new(SystemClock::shared);

/// Numbers by buffer, key and fragment.
type Nested = Vec<Vec<Vec<Uint>>>;

/// Arguments of a `get_into_ranges` call.
struct RangeCall {
    buffers: Vec<Uint>,
    keys: Vec<Vec<String>>,
    to: Nested,
    from: Nested,
    sizes: Nested,
}

impl RangeCall {
    /// Builds a result in the shape of buffers, keys and fragments from `each`. A missing list
    /// counts as one of length 1.
    fn with_shape<T>(&self, mut each: impl FnMut(usize, usize, usize) -> T) -> Vec<Vec<Vec<T>>> {
        let mut of_key = |b: usize, k: usize| {
            let fragments = self.to.get(b).and_then(|keys| keys.get(k)).map_or(1, Vec::len);
            (0..fragments).map(|f| each(b, k, f)).collect()
        };
        let mut of_buffer = |b: usize| {
            let keys = self.keys.get(b).map_or(1, Vec::len);
            (0..keys).map(|k| of_key(b, k)).collect()
        };
        (0..self.buffers.len()).map(&mut of_buffer).collect()
    }

    /// Returns the keys of the call, each once.
    fn distinct_keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.keys.iter().flatten().map(String::as_str).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Returns whether the lists have matching numbers of buffers and keys.
    fn has_shape(&self) -> bool {
        let lists = [&self.to, &self.from, &self.sizes];
        self.keys.len() == self.buffers.len()
            && lists.iter().all(|list| {
                list.len() == self.keys.len()
                    && list.iter().zip(&self.keys).all(|(list, keys)| list.len() == keys.len())
            })
    }

    /// Returns a call about at most `count` keys of one buffer, from key `start` on.
    fn part(&self, buffer: usize, start: usize, count: usize) -> Self {
        let keys = &self.keys[buffer];
        let range = start..start.saturating_add(count).min(keys.len());
        let of = |list: &Nested| vec![list[buffer][range.clone()].to_vec()];
        Self {
            buffers: vec![self.buffers[buffer]],
            keys: vec![keys[range.clone()].to_vec()],
            to: of(&self.to),
            from: of(&self.from),
            sizes: of(&self.sizes),
        }
    }

    /// Calls `each` with every fragment whose lists have matching lengths. The others are rejected.
    fn plan(&self, mut each: impl FnMut(&Fragment<'_>) -> Result<usize>) -> Vec<Vec<Vec<Result<usize>>>> {
        let shape = || Error::invalid("cannot read ranges: the lists differ in shape");
        let lists = [self.keys.len(), self.to.len(), self.from.len(), self.sizes.len()];
        let outer = lists.iter().all(|len| *len == self.buffers.len());
        self.with_shape(|b, k, f| {
            let same = outer
                && [self.to[b].len(), self.from[b].len(), self.sizes[b].len()]
                    .iter()
                    .all(|len| *len == self.keys[b].len())
                && [self.from[b][k].len(), self.sizes[b][k].len()]
                    .iter()
                    .all(|len| *len == self.to[b][k].len());
            if !same {
                return Err(shape());
            }
            each(&Fragment {
                buffer: self.buffers[b].0,
                key: &self.keys[b][k],
                to: self.to[b][k][f].0,
                from: self.from[b][k][f].0,
                size: self.sizes[b][k][f],
            })
        })
    }
}

struct Fragment<'a> {
    buffer: u64,
    key: &'a str,
    to: u64,
    from: u64,
    size: Uint,
}

impl Session {
    /// Returns the read of a fragment, or `None` if the fragment is empty.
    fn fragment(
        &self,
        memory: &CallMemory,
        fragment: &Fragment<'_>,
        object: &Located,
    ) -> Result<Option<RangeRead>> {
        let Fragment { buffer, to, from, size, .. } = *fragment;
        let beyond = || Error::invalid(format!("range exceeds the buffer. len={} offset={to}", size.0));
        if from.checked_add(size.0).is_none_or(|end| end > object.size()) {
            let text =
                format!("range exceeds the object. len={} offset={from} object={}", size.0, object.size());
            return Err(Error::invalid(text));
        }
        let end = to.checked_add(size.0).ok_or_else(beyond)?;
        if end > self.registered_len(buffer)? as u64 {
            return Err(beyond());
        }
        if size.0 == 0 {
            return Ok(None);
        }
        let into = memory.sink(buffer.checked_add(to).ok_or_else(beyond)?, size.len())?;
        Ok(Some(RangeRead { object: object.clone(), offset: from, into }))
    }

    async fn read_fragments(
        &self,
        memory: &CallMemory,
        call: &RangeCall,
    ) -> Result<Vec<Vec<Vec<Result<u64>>>>> {
        let at_once = self.client.located_at_once();
        if call.keys.iter().map(Vec::len).fold(0, usize::saturating_add) <= at_once || !call.has_shape() {
            return self.read_some_fragments(memory, call).await;
        }
        let (mut results, mut is_any_known) = (Vec::with_capacity(call.buffers.len()), false);
        for buffer in 0..call.buffers.len() {
            let mut of_buffer = Vec::with_capacity(call.keys[buffer].len());
            while of_buffer.len() < call.keys[buffer].len() {
                let part = call.part(buffer, of_buffer.len(), at_once);
                match self.read_some_fragments(memory, &part).await {
                    Ok(read) => of_buffer.extend(read.into_iter().flatten()),
                    Err(error) if !is_any_known => return Err(error),
                    // The outcomes of the earlier keys are known.
                    Err(error) => {
                        of_buffer.extend(part.with_shape(|_, _, _| Err(error.clone())).into_iter().flatten());
                    }
                }
                is_any_known = true;
            }
            results.push(of_buffer);
        }
        Ok(results)
    }

    /// Reads fragments as [`read_fragments`](Self::read_fragments) does, after it has located all
    /// of their objects.
    async fn read_some_fragments(
        &self,
        memory: &CallMemory,
        call: &RangeCall,
    ) -> Result<Vec<Vec<Vec<Result<u64>>>>> {
        let keys = call.distinct_keys();
        let started = self.client.begin(Operation::GetIntoRanges);
        let located = self.client.locate(&keys).await?;
        let located: HashMap<&str, Result<Option<Located>>> = keys.into_iter().zip(located).collect();
        let read = |reads| self.client.counted(started, self.client.read_current(reads));
        Ok(self.read_located(memory, call, &located, read).await)
    }

    /// Reads fragments of located objects with `read`.
    async fn read_located<F: Future<Output = Vec<ReadOutcome>>>(
        &self,
        memory: &CallMemory,
        call: &RangeCall,
        located: &HashMap<&str, Result<Option<Located>>>,
        read: impl FnOnce(Vec<RangeRead>) -> F,
    ) -> Vec<Vec<Vec<Result<u64>>>> {
        let mut reads = Vec::new();
        let mut places = Vec::new();
        let plan = call.plan(|fragment| {
            let object = match located.get(fragment.key) {
                Some(Ok(Some(object))) => object,
                Some(Err(error)) => return Err(Error::new(error.code(), error.message().to_owned())),
                _ => return Err(Error::from(ErrorCode::ObjectNotFound)),
            };
            let read = self.fragment(memory, fragment, object)?;
            places.push(read.is_some());
            reads.extend(read);
            Ok(fragment.size.len())
        });
        let mut outcomes = read(reads).await.into_iter().map(|read| read.result);
        let mut places = places.into_iter();
        let mut settle = |planned: Result<usize>| {
            let len = planned? as u64;
            if places.next().unwrap_or(false) {
                outcomes.next().unwrap_or_else(missing_result)?;
            }
            Ok(len)
        };
        let settled = plan
            .into_iter()
            .map(|buffer| buffer.into_iter().map(|key| key.into_iter().map(&mut settle).collect()).collect());
        settled.collect()
    }

    /// Reads fragments of the objects of a snapshot. Objects are located again after half of their
    /// leases.
    async fn read_snapshot(
        &self,
        memory: &CallMemory,
        call: &RangeCall,
        snapshot: &RangedReadSnapshot,
    ) -> Vec<Vec<Vec<Result<u64>>>> {
        let keys = call.distinct_keys();
        let started = self.client.begin(Operation::GetIntoRanges);
        let now = CLOCK.now();
        let due: Vec<&str> = {
            let objects = snapshot.objects.lock();
            let is_due = |key: &&str| objects.get(*key).is_some_and(|entry| entry.renew_at <= now);
            keys.iter().copied().filter(is_due).collect()
        };
        let renewed = self.locate_for_snapshot(&due).await;
        let located: HashMap<&str, Result<Option<Located>>> = {
            let mut objects = snapshot.objects.lock();
            objects.extend(due.into_iter().map(str::to_owned).zip(renewed));
            let absent = || Error::invalid("cannot read ranges: the key is not in the snapshot");
            let located = keys.into_iter().map(|key| {
                let entry = objects.get(key);
                (key, entry.map_or_else(|| Err(absent()), |entry| entry.object.clone()))
            });
            located.collect()
        };
        let read = |reads| self.client.counted(started, self.client.read(reads));
        self.read_located(memory, call, &located, read).await
    }

    /// Locates objects, and grants leases on them.
    async fn locate_for_snapshot(&self, keys: &[&str]) -> Vec<SnapshotObject> {
        let mut objects = Vec::with_capacity(keys.len());
        for some in keys.chunks(self.client.located_at_once()) {
            let located = match self.client.locate(some).await {
                Ok(located) => located,
                Err(error) => some.iter().map(|_| Err(error.clone())).collect(),
            };
            let now = CLOCK.now();
            objects.extend(located.into_iter().map(|object| {
                // A key without an object stays without. A failed look-up is repeated.
                let left = match &object {
                    Ok(Some(object)) => self.client.half_lease(object),
                    Ok(None) => LONGEST_TIME,
                    Err(_) => Duration::ZERO,
                };
                SnapshotObject { object, renew_at: now.after(left) }
            }));
        }
        objects
    }
}

/// Located objects, for several reads of ranges.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "RangedReadSnapshot")]
pub(crate) struct RangedReadSnapshot {
    /// Setup of the store that has located the objects.
    session: Weak<Session>,
    objects: Mutex<HashMap<String, SnapshotObject>>,
}

/// Object of a snapshot.
struct SnapshotObject {
    object: Result<Option<Located>>,
    /// Time from which on the object is located again before a read.
    renew_at: Moment,
}

#[pymethods]
impl Store {
    /// Reads ranges of values into registered memory. The lists are by buffer, key and fragment,
    /// and so is the result: bytes read, or a negative code.
    fn get_into_ranges(
        &self,
        py: Python<'_>,
        buffer_ptrs: Vec<Uint>,
        #[pyo3(from_py_with = texts_of_each)] all_keys: Vec<Vec<String>>,
        all_dst_offsets: Nested,
        all_src_offsets: Nested,
        all_sizes: Nested,
    ) -> PyResult<Vec<Vec<Vec<i64>>>> {
        let call = RangeCall {
            buffers: buffer_ptrs,
            keys: all_keys,
            to: all_dst_offsets,
            from: all_src_offsets,
            sizes: all_sizes,
        };
        let everywhere = |number: i64| call.with_shape(|_, _, _| number);
        let Some(session) = self.session()? else { return Ok(everywhere(NOT_SET_UP)) };
        let memory = session.call_memory();
        let read = wait(py, session.read_fragments(&memory, &call));
        wait_until_unused(py, &memory);
        Ok(match read {
            Ok(read) => self.range_codes(read),
            Err(error) => everywhere(i64::from(self.errors.record(&error))),
        })
    }

    /// Locates objects for several reads of their ranges, and grants leases on them. The snapshot
    /// also has the keys without an object.
    fn prepare_get_into_ranges_snapshot(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
    ) -> PyResult<RangedReadSnapshot> {
        let session = self.session()?.ok_or_else(|| {
            let text = "cannot locate objects: the store is not set up; call setup() first";
            exception(py, &Error::invalid(text))
        })?;
        let mut distinct: Vec<&str> = keys.iter().map(String::as_str).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let located = wait(py, async { Ok(session.locate_for_snapshot(&distinct).await) });
        let located = located.map_err(|error| exception(py, &error))?;
        let objects = distinct.into_iter().map(str::to_owned).zip(located).collect();
        Ok(RangedReadSnapshot { session: Arc::downgrade(&session), objects: Mutex::new(objects) })
    }

    /// Reads ranges of the objects of a snapshot into registered memory, like `get_into_ranges`.
    /// The master is asked again once half of a lease is over. A key that is not in the snapshot
    /// is -600.
    #[allow(clippy::too_many_arguments, reason = "as Python gives them")]
    fn get_into_ranges_from_snapshot(
        &self,
        py: Python<'_>,
        snapshot: &Bound<'_, RangedReadSnapshot>,
        buffer_ptrs: Vec<Uint>,
        #[pyo3(from_py_with = texts_of_each)] all_keys: Vec<Vec<String>>,
        all_dst_offsets: Nested,
        all_src_offsets: Nested,
        all_sizes: Nested,
    ) -> PyResult<Vec<Vec<Vec<i64>>>> {
        let call = RangeCall {
            buffers: buffer_ptrs,
            keys: all_keys,
            to: all_dst_offsets,
            from: all_src_offsets,
            sizes: all_sizes,
        };
        let Some(session) = self.session()? else { return Ok(call.with_shape(|_, _, _| NOT_SET_UP)) };
        let snapshot = snapshot.get();
        if !std::ptr::eq(snapshot.session.as_ptr(), Arc::as_ptr(&session)) {
            return Err(PyValueError::new_err("Ranged-read snapshot belongs to another Store"));
        }
        let memory = session.call_memory();
        let read = wait(py, async { Ok(session.read_snapshot(&memory, &call, snapshot).await) });
        wait_until_unused(py, &memory);
        Ok(match read {
            Ok(read) => self.range_codes(read),
            Err(error) => {
                let code = i64::from(self.errors.record(&error));
                call.with_shape(|_, _, _| code)
            }
        })
    }
}

impl Store {
    /// Returns the results of reads of ranges as numbers.
    fn range_codes(&self, read: Vec<Vec<Vec<Result<u64>>>>) -> Vec<Vec<Vec<i64>>> {
        let of_key = |key: Vec<Result<u64>>| key.into_iter().map(|one| self.count(one)).collect();
        let of_buffer = |buffer: Vec<Vec<Result<u64>>>| buffer.into_iter().map(of_key).collect();
        read.into_iter().map(of_buffer).collect()
    }
}
