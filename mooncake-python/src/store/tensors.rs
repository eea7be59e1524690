//! Data movement for the tensor calls of `python/mooncake/_tensors.py`: heads of objects, and
//! strips of bytes at regular distances. A part of a tensor along one dimension consists of such
//! strips.

use std::sync::Arc;

use mooncake_core::memory::{MemorySpan, copy_memory};
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_store::client::Operation;
use mooncake_store::local::CallMemory;
use mooncake_transport::{Slice, SliceMut};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::ptr::NonNull;

use super::{NOT_SET_UP, Session, Store, wait_until_unused};
use crate::args::{Keep, Uint, bytes_of, bytes_with, text, texts};
use crate::client::{Located, PythonClient, RangeRead};
use crate::config::{self, Config};
use crate::lease::Lease;
use crate::memory::{object_slice, object_slice_mut};
use crate::runtime::wait;

/// Length below which many strips go through one buffer. One request costs more than copying such
/// strips, or than reading as many bytes between them.
const SHORT_STRIP: usize = 16 << 10;
/// Number of strips above which there are many.
const MANY_STRIPS: usize = 8;

/// Object found by `_heads`, for reads of its parts.
#[pyclass(frozen, module = "mooncake._mooncake", name = "Located")]
pub(crate) struct LocatedObject {
    object: Located,
}

#[pymethods]
impl LocatedObject {
    /// Length of the object in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.object.size()
    }
}

/// Bytes at regular distances: `rows` strips of `width`, the first at `start`, each `stride` after
/// the previous one.
#[derive(Clone, Copy, Debug)]
struct Strips {
    start: u64,
    stride: u64,
    rows: u64,
    width: u64,
}

impl Strips {
    /// Returns the offset behind the last byte, unless it overflows.
    fn end(&self) -> Option<u64> {
        let last = self.rows.checked_sub(1)?.checked_mul(self.stride)?;
        self.start.checked_add(last)?.checked_add(self.width)
    }

    /// Returns the first bytes of the strips.
    fn starts(self) -> impl Iterator<Item = u64> {
        (0..self.rows).map(move |row| self.start + row * self.stride)
    }

    /// Returns whether the strips are contiguous.
    fn is_contiguous(&self) -> bool {
        self.stride == self.width
    }

    /// Joins contiguous strips into one.
    fn joined(self) -> Self {
        if self.is_contiguous() {
            return Self { rows: 1, width: self.width * self.rows, stride: self.width * self.rows, ..self };
        }
        self
    }

    fn has_many_short(&self) -> bool {
        self.rows > MANY_STRIPS as u64 && self.width < SHORT_STRIP as u64
    }

    /// Returns whether reading the gaps between the strips is cheaper than one request for each
    /// strip.
    fn is_dense(&self) -> bool {
        self.has_many_short() && self.stride.saturating_sub(self.width) < SHORT_STRIP as u64
    }
}

/// Value to write: a header, then strips of memory.
#[derive(FromPyObject)]
struct Write<'py> {
    #[pyo3(from_py_with = text)]
    key: String,
    header: Bound<'py, PyBytes>,
    /// Address and length of the memory that holds the strips.
    memory: (Uint, Uint),
    start: Uint,
    stride: Uint,
    rows: Uint,
    width: Uint,
}

/// Read of an object: the strips in the object and their destination.
#[derive(FromPyObject)]
struct Read<'py> {
    object: PyRef<'py, LocatedObject>,
    #[pyo3(attribute("from_"))]
    from: Uint,
    from_stride: Uint,
    to: Uint,
    to_stride: Uint,
    rows: Uint,
    width: Uint,
}

/// Destination and the reads into it.
#[derive(FromPyObject)]
struct Job<'py> {
    memory: (Uint, Uint),
    reads: Vec<Read<'py>>,
}

/// Object and its first bytes.
type Head<'py> = (LocatedObject, Bound<'py, PyBytes>);

/// Job without references to Python objects.
struct Plan {
    address: u64,
    len: u64,
    reads: Vec<(Located, Strips, Strips)>,
}

impl Job<'_> {
    fn plan(&self) -> Plan {
        let read = |read: &Read<'_>| {
            let (rows, width) = (read.rows.0, read.width.0);
            let from = Strips { start: read.from.0, stride: read.from_stride.0, rows, width };
            let to = Strips { start: read.to.0, stride: read.to_stride.0, rows, width };
            (read.object.object.clone(), from, to)
        };
        Plan { address: self.memory.0.0, len: self.memory.1.0, reads: self.reads.iter().map(read).collect() }
    }
}

/// Owner of the memory that a job names.
enum Owner {
    /// Memory of the program, named by its address.
    Address(CallMemory),
    /// Python objects, which are kept alive meanwhile.
    Objects(Arc<Keep>),
}

impl Session {
    fn piece(&self, owner: &Owner, address: u64, len: u64) -> Result<Slice<TransportSet>> {
        let len = Uint(len).len();
        match owner {
            Owner::Address(memory) => memory.source(address, len),
            Owner::Objects(keep) => object_slice(&self.client, span(address, len)?, keep),
        }
    }

    fn target(&self, owner: &Owner, address: u64, len: u64) -> Result<SliceMut<TransportSet>> {
        let len = Uint(len).len();
        match owner {
            Owner::Address(memory) => memory.sink(address, len),
            Owner::Objects(keep) => object_slice_mut(span(address, len)?, keep),
        }
    }

    /// Returns header and strips as pieces of one value. Many short strips are copied into leased
    /// memory, which `leases` keeps.
    fn gather(
        &self,
        owner: &Owner,
        memory: (u64, u64),
        strips: Strips,
        leases: &mut Vec<Lease>,
    ) -> Result<Vec<Slice<TransportSet>>> {
        if strips.rows == 0 || strips.width == 0 {
            return Ok(Vec::new());
        }
        if strips.end().is_none_or(|end| end > memory.1) {
            return Err(Error::invalid("part of a tensor exceeds the tensor"));
        }
        let strips = strips.joined();
        let whole = self.piece(owner, memory.0, memory.1)?;
        let width = Uint(strips.width).len();
        if !strips.has_many_short() {
            return strips
                .starts()
                .map(|start| {
                    let start = Uint(start).len();
                    whole.slice(start..start + width)
                })
                .collect();
        }
        let lease = self.arena()?.take(&self.client, Uint(strips.rows * strips.width).len())?;
        let mut copy = lease.slice_mut()?;
        for (row, start) in strips.starts().enumerate() {
            copy_strip(&whole, Uint(start).len(), &mut copy, row * width, width)?;
        }
        leases.push(lease);
        Ok(vec![copy.into_shared()])
    }

    /// Reads the strips of all jobs at once. Each job succeeds or fails independently. An object
    /// whose lease has ended since its head was read is located again, and has to have the same
    /// value.
    async fn scatter(&self, owner: &Owner, plans: Vec<Plan>) -> Vec<Result<()>> {
        let mut reads = Vec::new();
        // Job of each read, and the strips to copy afterwards.
        let mut after: Vec<(usize, Option<(Strips, Strips)>)> = Vec::new();
        let mut outcomes: Vec<Result<()>> = Vec::with_capacity(plans.len());
        let mut leases: Vec<Option<Lease>> = Vec::new();
        for (job, plan) in plans.iter().enumerate() {
            outcomes.push(plan.reads.iter().try_for_each(|(object, from, to)| {
                let (Some(from_end), Some(to_end)) = (from.end(), to.end()) else {
                    return Ok(());
                };
                if from.width == 0 {
                    return Ok(());
                }
                if from_end > object.size() || to_end > plan.len {
                    return Err(Error::invalid("part of a tensor exceeds the tensor"));
                }
                let through_lease = matches!(owner, Owner::Objects(_)) && self.client.needs_registration();
                if through_lease || (from.is_dense() && !(from.is_contiguous() && to.is_contiguous())) {
                    // Reads the whole range, and then copies the strips out of it.
                    let lease = self.arena()?.take(&self.client, Uint(from_end - from.start).len())?;
                    reads.push(RangeRead {
                        object: object.clone(),
                        offset: from.start,
                        into: lease.slice_mut()?,
                    });
                    leases.push(Some(lease));
                    after.push((job, Some((Strips { start: 0, ..*from }, *to))));
                    return Ok(());
                }
                let (from, to) = if from.is_contiguous() && to.is_contiguous() {
                    (from.joined(), to.joined())
                } else {
                    (*from, *to)
                };
                for (at, start) in from.starts().zip(to.starts()) {
                    let address = plan.address.saturating_add(start);
                    let into = self.target(owner, address, from.width)?;
                    reads.push(RangeRead { object: object.clone(), offset: at, into });
                    leases.push(None);
                    after.push((job, None));
                }
                Ok(())
            }));
        }
        let read = self.client.read_current(reads).await;
        for ((read, (job, copy)), lease) in read.into_iter().zip(after).zip(leases) {
            let done = read.result.and_then(|()| match (copy, read.into) {
                (Some((strips, to)), Some(from)) => self.copy_strips(owner, &plans[job], from, strips, to),
                (Some(_), None) => Err(Error::internal("read returned no memory")),
                (None, _) => Ok(()),
            });
            drop(lease);
            if done.is_err() && outcomes[job].is_ok() {
                outcomes[job] = done;
            }
        }
        outcomes
    }

    fn copy_strips(
        &self,
        owner: &Owner,
        plan: &Plan,
        from: SliceMut<TransportSet>,
        strips: Strips,
        to: Strips,
    ) -> Result<()> {
        let mut whole = self.target(owner, plan.address, plan.len)?;
        let (from, width) = (from.into_shared(), Uint(strips.width).len());
        for (at, start) in strips.starts().zip(to.starts()) {
            copy_strip(&from, Uint(at).len(), &mut whole, Uint(start).len(), width)?;
        }
        Ok(())
    }
}

fn span(address: u64, len: usize) -> Result<MemorySpan> {
    let ptr =
        usize::try_from(address).ok().and_then(|a| NonNull::new(std::ptr::with_exposed_provenance_mut(a)));
    ptr.map(|ptr| MemorySpan::new(ptr, len))
        .ok_or_else(|| Error::invalid("cannot use tensor: its address is null"))
}

/// Copies a range of one slice to a range of another. Both ranges are checked.
#[allow(unsafe_code)]
fn copy_strip(
    from: &Slice<TransportSet>,
    at: usize,
    to: &mut SliceMut<TransportSet>,
    start: usize,
    len: usize,
) -> Result<()> {
    let inside = at.checked_add(len).is_some_and(|end| end <= from.len())
        && start.checked_add(len).is_some_and(|end| end <= to.len());
    if !inside {
        return Err(Error::invalid("part of a tensor exceeds the tensor"));
    }
    let source = MemorySpan { location: from.location(), ..span(from.addr() + at as u64, len)? };
    let target = MemorySpan { location: to.location(), ..span(to.addr() + start as u64, len)? };
    if source.location.is_device() || target.location.is_device() {
        // SAFETY: both ranges were just checked, and the arguments keep them. If a program copies
        // device memory onto itself, the device defines the result.
        return unsafe { copy_memory(source, target) };
    }
    // SAFETY: as above. The ranges may overlap in the program's own memory.
    unsafe { source.ptr.copy_to(target.ptr, len) };
    Ok(())
}

#[pymethods]
impl Store {
    /// Looks up each key and reads at most `upto` first bytes. Absent keys are `None`.
    fn _heads<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = texts)] keys: Vec<String>,
        upto: usize,
    ) -> PyResult<Vec<Option<Head<'py>>>> {
        let Some(session) = self.session()? else { return Ok(keys.iter().map(|_| None).collect()) };
        let read = async {
            let located = self.present(session.client.locate(&keys).await?);
            let arena = session.arena()?;
            let (mut reads, mut leases) = (Vec::new(), Vec::new());
            for object in located.iter().flatten() {
                let len = Uint(object.size()).len().min(upto);
                let lease = arena.take(&session.client, len)?;
                reads.push(RangeRead { object: object.clone(), offset: 0, into: lease.slice_mut()? });
                leases.push(lease);
            }
            let outcomes = session.client.read_current(reads).await;
            Ok((located, outcomes, leases))
        };
        let (located, outcomes, leases) = match wait(py, read) {
            Ok(read) => read,
            Err(error) => {
                self.errors.record(&error);
                return Ok(keys.iter().map(|_| None).collect());
            }
        };
        let mut outcomes = outcomes.into_iter();
        let head = |object: Option<Located>| {
            let Some(object) = object else { return Ok(None) };
            let Some(read) = outcomes.next() else { return Ok(None) };
            if let Err(error) = read.result {
                self.errors.record(&error);
                return Ok(None);
            }
            let Some(slice) = read.into else { return Ok(None) };
            let bytes = bytes_with(py, slice.len(), |bytes| slice.copy_to(0, bytes))?;
            Ok(Some((LocatedObject { object }, bytes)))
        };
        let heads = located.into_iter().map(head).collect();
        drop(leases);
        heads
    }

    /// Reads strips of located objects into memory named by its address, or that `owners` keep.
    /// Returns a code for each job.
    #[pyo3(signature = (jobs, owners=None))]
    fn _read_strips(
        &self,
        py: Python<'_>,
        jobs: Vec<Job<'_>>,
        owners: Option<Vec<Py<PyAny>>>,
    ) -> PyResult<Vec<i64>> {
        let n = jobs.len();
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; n]) };
        let plans: Vec<Plan> = jobs.iter().map(Job::plan).collect();
        drop(jobs);
        let owner = Owner::new(&session, owners);
        let outcomes = wait(py, async { Ok(session.scatter(&owner, plans).await) });
        owner.wait(py);
        Ok(self.codes(n, outcomes))
    }

    /// Writes values that consist of a header and strips of memory, which is registered or which
    /// `owners` keep. Returns a code for each value.
    #[pyo3(signature = (upsert, writes, config=None, owners=None))]
    fn _write_strips(
        &self,
        py: Python<'_>,
        upsert: bool,
        writes: Vec<Write<'_>>,
        config: Config<'_>,
        owners: Option<Vec<Py<PyAny>>>,
    ) -> PyResult<Vec<i64>> {
        let n = writes.len();
        let Some(session) = self.session()? else { return Ok(vec![NOT_SET_UP; n]) };
        let config = match config::for_call(&config, n, false) {
            Ok(config) => config,
            Err(error) => return Ok(self.codes(n, Err(error))),
        };
        let mut keep = Keep::default();
        let mut plans = Vec::with_capacity(n);
        for write in writes {
            let header = bytes_of(write.header.as_any(), &mut keep)?;
            let strips = Strips {
                start: write.start.0,
                stride: write.stride.0,
                rows: write.rows.0,
                width: write.width.0,
            };
            plans.push((write.key, header, (write.memory.0.0, write.memory.1.0), strips));
        }
        let headers = Arc::new(keep);
        let owner = Owner::new(&session, owners);
        let operation = if upsert { Operation::BatchUpsertFrom } else { Operation::BatchPutFrom };
        let outcomes = wait(py, async {
            let mut leases = Vec::new();
            let mut values = Vec::with_capacity(n);
            for (key, header, memory, strips) in plans {
                let gathered = session.gather(&owner, memory, strips, &mut leases);
                let pieces = gathered.and_then(|data| {
                    let mut pieces = Vec::with_capacity(1 + data.len());
                    if let Some(header) = header {
                        pieces.push(object_slice(&session.client, header, &headers)?);
                    }
                    pieces.extend(data);
                    Ok(pieces)
                });
                values.push((key, pieces));
            }
            session.client.write_valid(operation, values, config).await
        });
        owner.wait(py);
        Ok(self.codes(n, outcomes))
    }

    /// Copies bytes out of memory of the program. Returns `None` if the range cannot be used.
    fn _peek<'py>(&self, py: Python<'py>, address: Uint, len: Uint) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(session) = self.session()? else { return Ok(None) };
        let slice = match session.call_memory().source(address.0, len.len()) {
            Ok(slice) => slice,
            Err(error) => {
                self.errors.record(&error);
                return Ok(None);
            }
        };
        bytes_with(py, slice.len(), |bytes| slice.copy_to(0, bytes)).map(Some)
    }

    /// Copies bytes into memory of the program. Returns whether the range can be used.
    fn _poke(&self, address: Uint, bytes: &[u8]) -> PyResult<bool> {
        let Some(session) = self.session()? else { return Ok(false) };
        let memory = session.call_memory();
        let written = memory.sink(address.0, bytes.len()).and_then(|mut slice| slice.copy_from(0, bytes));
        Ok(match written {
            Ok(()) => true,
            Err(error) => {
                self.errors.record(&error);
                false
            }
        })
    }
}

impl Owner {
    fn new(session: &Arc<Session>, owners: Option<Vec<Py<PyAny>>>) -> Self {
        let Some(objects) = owners else { return Self::Address(session.call_memory()) };
        let mut keep = Keep::default();
        objects.into_iter().for_each(|object| keep.object(object));
        Self::Objects(Arc::new(keep))
    }

    /// Waits until no transfer uses unregistered memory.
    fn wait(&self, py: Python<'_>) {
        if let Self::Address(memory) = self {
            wait_until_unused(py, memory);
        }
    }
}
