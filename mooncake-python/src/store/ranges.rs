//! Reads of parts of values, directly into memory of the program.

use std::collections::HashMap;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::client::Operation;
use mooncake_store::local::CallMemory;
use pyo3::prelude::*;

use super::{NOT_SET_UP, Session, Store, wait_until_unused};
use crate::args::{Uint, texts_of_each};
use crate::client::{Located, PythonClient, RangeRead};
use crate::error::missing_result;
use crate::runtime::wait;

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
        let mut keys: Vec<&str> = call.keys.iter().flatten().map(String::as_str).collect();
        keys.sort_unstable();
        keys.dedup();
        let begun = self.client.begin(Operation::GetIntoRanges);
        let located = self.client.locate(&keys).await?;
        let located: HashMap<&str, Result<Option<Located>>> = keys.into_iter().zip(located).collect();
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
        let read = self.client.counted(begun, self.client.read(reads)).await;
        let mut outcomes = read.into_iter().map(|read| read.result);
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
        Ok(settled.collect())
    }
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
            Ok(read) => {
                let of_key = |key: Vec<Result<u64>>| key.into_iter().map(|one| self.count(one)).collect();
                let of_buffer = |buffer: Vec<Vec<Result<u64>>>| buffer.into_iter().map(of_key).collect();
                read.into_iter().map(of_buffer).collect()
            }
            Err(error) => everywhere(i64::from(self.errors.record(&error))),
        })
    }
}
