//! Segments that are mounted and unmounted while the store runs.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ids::{SegmentId, Uuid};
use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, ErrorCode, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::file_segment::FileSegment;
use super::{Session, Store};
use crate::args::{Uint, text, texts};
use crate::client::PythonClient;
use crate::interpreter::detached;
use crate::runtime::wait;

/// Lengths of allocated segments are multiples of this.
const GRANULE: u64 = 16 << 20;
/// Longest grace period, in seconds.
const MAX_GRACE: u64 = 3600;

fn parse(texts: &[String]) -> Result<Vec<SegmentId>> {
    let parse = |text: &String| {
        let id = text.parse::<Uuid>();
        id.map(SegmentId).map_err(|error| Error::invalid(format!("invalid segment id {text:?}: {error}")))
    };
    texts.iter().map(parse).collect()
}

impl Session {
    /// Allocates memory for `alloc_from_mem_pool`.
    fn allocate(&self, len: usize) -> Result<u64> {
        if self.client.as_ipc().is_none() {
            return Err(Error::invalid(
                "cannot allocate from memory pool: only a store of setup_dummy() has one",
            ));
        }
        let memory = self.client.allocate(len)?;
        let address = memory.span().ptr.as_ptr().expose_provenance() as u64;
        self.allocated.lock().push(memory);
        Ok(address)
    }

    async fn mount_file(&self, path: String, size: u64, offset: u64, protocol: &str) -> Result<SegmentId> {
        self.warn_about_protocol(protocol)?;
        let len =
            usize::try_from(size).map_err(|_| Error::invalid("segment is larger than the address space"))?;
        let opened = tokio::task::spawn_blocking(move || {
            let file = std::fs::File::options().read(true).write(true).open(&path);
            let file = file.map_err(|error| {
                Error::new(ErrorCode::FileOpenFail, format!("cannot open {path}: {error}")).with_source(error)
            })?;
            FileSegment::new(file, offset, len)
        });
        let memory =
            opened.await.map_err(|error| Error::internal(format!("cannot map file segment: {error}")))??;
        self.client.full()?.segments().mount_memory(Arc::new(memory)).await
    }

    /// Warns if `protocol` is not the store's. Mooncake C++ accepts any protocol, and the default
    /// of the argument is not the store's own.
    fn warn_about_protocol(&self, protocol: &str) -> Result<()> {
        let ours = &self.client.full()?.config().protocol;
        if ![ours, "", "tcp"].contains(&protocol) {
            tracing::warn!("segment is mounted with the store's protocol {ours} instead of {protocol}");
        }
        Ok(())
    }

    async fn unmount(&self, ids: Vec<String>, grace: Uint) -> Result<()> {
        let ids = parse(&ids)?;
        let client = self.client.full()?;
        let known = client.segments().ids();
        if let Some(unknown) = ids.iter().find(|id| !known.contains(id)) {
            return Err(Error::new(
                ErrorCode::SegmentNotFound,
                format!("cannot unmount segment {}: it is not mounted", unknown.0),
            ));
        }
        if grace.0 > MAX_GRACE {
            let text = format!("grace period is too long. seconds={} max={MAX_GRACE}", grace.0);
            return Err(Error::invalid(text));
        }
        for id in ids {
            match grace.0 {
                0 => client.segments().unmount(id).await?,
                seconds => client.segments().unmount_after(id, Duration::from_secs(seconds)).await?,
            }
        }
        Ok(())
    }
}

fn mount_result<'py>(py: Python<'py>, ids: &[SegmentId]) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("ret", 0)?;
    result.set_item("segment_ids", ids.iter().map(|id| id.0.to_string()).collect::<Vec<_>>())?;
    Ok(result)
}

impl Store {
    fn report_mount<'py>(&self, py: Python<'py>, mounted: Result<SegmentId>) -> PyResult<Bound<'py, PyDict>> {
        match mounted {
            Ok(id) => mount_result(py, &[id]),
            Err(error) => {
                self.errors.record(&error);
                let result = mount_result(py, &[])?;
                result.set_item("ret", -1)?;
                Ok(result)
            }
        }
    }

    fn report_unmount(&self, outcome: Result<()>) -> i64 {
        match outcome {
            Ok(()) => 0,
            Err(error) => {
                self.errors.record(&error);
                -1
            }
        }
    }
}

#[pymethods]
impl Store {
    /// Mounts a part of a file as a segment, for example a file in shared memory. Returns
    /// `{"ret": 0, "segment_ids": [..]}`, or `ret` -1 on failure.
    #[pyo3(signature = (path, size, offset=Uint(0), protocol="tcp", location=""))]
    fn mount_segment<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = text)] path: String,
        size: Uint,
        offset: Uint,
        protocol: &str,
        location: &str,
    ) -> PyResult<Bound<'py, PyDict>> {
        let _ = location;
        let mounted = match self.session()? {
            Some(_) if size.0 == 0 => return mount_result(py, &[]),
            Some(session) => wait(py, session.mount_file(path, size.0, offset.0, protocol)),
            None => Err(Error::invalid("store is not set up")),
        };
        self.report_mount(py, mounted)
    }

    /// Mounts new memory as a segment, a multiple of 16 MiB. The result has its size as
    /// `allocated_size`.
    #[pyo3(signature = (size, protocol="tcp", location=""))]
    fn allocate_and_mount_segment<'py>(
        &self,
        py: Python<'py>,
        size: Uint,
        protocol: &str,
        location: &str,
    ) -> PyResult<Bound<'py, PyDict>> {
        let _ = location;
        let rounded = size.0.checked_next_multiple_of(GRANULE).filter(|_| size.0 > 0);
        let mounted = match (self.session()?, rounded) {
            (None, _) => Err(Error::invalid("store is not set up")),
            (_, None) => Err(Error::invalid(format!("cannot mount segment: invalid size. size={}", size.0))),
            (Some(session), Some(bytes)) => wait(py, async {
                session.warn_about_protocol(protocol)?;
                session.client.full()?.segments().mount(bytes).await
            }),
        };
        let allocated = if mounted.is_ok() { rounded.unwrap_or(0) } else { 0 };
        let result = self.report_mount(py, mounted)?;
        result.set_item("allocated_size", allocated)?;
        Ok(result)
    }

    /// Unmounts segments, after a grace period if one is given. The call does not wait for the
    /// grace period. Returns 0 or -1.
    #[pyo3(signature = (segment_ids, grace_period_seconds=Uint(0)))]
    fn unmount_segment(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] segment_ids: Vec<String>,
        grace_period_seconds: Uint,
    ) -> PyResult<i64> {
        let Some(session) = self.session()? else { return Ok(-1) };
        Ok(self.report_unmount(wait(py, session.unmount(segment_ids, grace_period_seconds))))
    }

    /// Unmounts segments of `allocate_and_mount_segment` and frees their memory.
    #[pyo3(signature = (segment_ids, grace_period_seconds=Uint(0)))]
    fn unmount_and_free_segment(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = texts)] segment_ids: Vec<String>,
        grace_period_seconds: Uint,
    ) -> PyResult<i64> {
        self.unmount_segment(py, segment_ids, grace_period_seconds)
    }

    /// Unmounts this client's disk segment at once, whatever the grace period. Returns 0, also if
    /// there is none, or -1 on an IPC client.
    #[pyo3(signature = (grace_period_seconds=Uint(0)))]
    fn unmount_local_disk_segment(&self, py: Python<'_>, grace_period_seconds: Uint) -> PyResult<i64> {
        let _ = grace_period_seconds;
        let Some(session) = self.session()? else { return Ok(-1) };
        let closed = wait(py, async {
            session.client.full()?.segments().close_disk().await;
            Ok(())
        });
        Ok(self.report_unmount(closed))
    }

    /// Allocates memory that `mooncake_client` can map (see `register_buffer`), until close.
    /// Returns its address, or 0 on failure and on a store that was not set up with `setup_dummy`.
    fn alloc_from_mem_pool(&self, py: Python<'_>, size: Uint) -> PyResult<u64> {
        let Some(session) = self.session()? else { return Ok(0) };
        let allocated = detached(py, || session.allocate(size.len()));
        Ok(allocated.unwrap_or_else(|error| {
            self.errors.record(&error);
            0
        }))
    }

    /// Returns how many values and parts were read from disks of other clients.
    fn get_offload_rpc_read_count(&self) -> PyResult<u64> {
        let session = self.session()?;
        Ok(session
            .and_then(|session| session.client.full().ok().map(|client| client.status().disk_reads()))
            .unwrap_or(0))
    }
}
