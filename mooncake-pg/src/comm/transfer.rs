//! Bytes on their way: the staged input of an operation, and reads from the staging memory of
//! another rank into memory of the caller.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::Target;

use super::shared::Shared;
use crate::call::{Buffer, Input, inline_bytes};
use crate::link::Plane;
use crate::message::Payload;
use crate::staging::{Keep, SCRATCH_BYTES, Staged, destination};

/// Bytes that are copied before other tasks of the thread get a turn.
const TURN_BYTES: usize = 4 << 20;

/// Staged input of an operation. It does not change until the operation is over.
pub(super) enum Source {
    /// Input whose parts all travel in messages.
    Private(Bytes),
    /// Input that other ranks read.
    Shared(Staged),
}

impl Source {
    /// Copies the input of an operation.
    ///
    /// # Errors
    /// The errors of the staging memory.
    ///
    /// # Safety
    /// The buffers of the input are readable.
    pub(super) async unsafe fn stage(plane: &Plane, input: &Input, longest: usize) -> Result<Self> {
        if longest <= inline_bytes() {
            let mut bytes = Vec::with_capacity(input.len);
            for buffer in input.staged.iter().filter(|buffer| buffer.len > 0) {
                // SAFETY: readable, as promised by the caller.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len) });
            }
            return Ok(Source::Private(bytes.into()));
        }
        let staged = plane.pool.lend(input.len).await?;
        let mut offset = 0;
        for buffer in &input.staged {
            for from in (0..buffer.len).step_by(TURN_BYTES) {
                let len = TURN_BYTES.min(buffer.len - from);
                // SAFETY: inside of the buffer, which is readable.
                unsafe { staged.write(offset, buffer.as_ptr().add(from), len) };
                offset += len;
                if len == TURN_BYTES {
                    tokio::task::yield_now().await;
                }
            }
        }
        Ok(Source::Shared(staged))
    }

    /// Makes ranges of up to `longest` bytes accessible to other ranks.
    ///
    /// # Errors
    /// The errors of the staging memory.
    pub(super) async fn share(&mut self, plane: &Plane, longest: usize) -> Result<()> {
        if let Source::Private(bytes) = self
            && longest > inline_bytes()
        {
            let staged = plane.pool.lend(bytes.len()).await?;
            // SAFETY: the bytes are readable.
            unsafe { staged.write(0, bytes.as_ptr(), bytes.len()) };
            *self = Source::Shared(staged);
        }
        Ok(())
    }

    /// Returns the range as the content of a message.
    pub(super) fn payload(&self, range: std::ops::Range<usize>) -> Payload {
        match self {
            Source::Private(bytes) => Payload::Inline(bytes.slice(range)),
            Source::Shared(staged) => payload_of(staged, range),
        }
    }

    /// Copies a range out.
    ///
    /// # Safety
    /// The bytes from `to` on are writable, as many as the range has.
    pub(super) unsafe fn copy_to(&self, range: std::ops::Range<usize>, to: *mut u8) {
        let (from, len) = match self {
            Source::Private(bytes) => (bytes.as_ptr(), bytes.len()),
            Source::Shared(staged) => (staged.as_ptr().cast_const(), staged.len()),
        };
        assert!(range.start <= range.end && range.end <= len, "beyond the input");
        // SAFETY: the range lies in the input; the caller promises the other side.
        unsafe { std::ptr::copy_nonoverlapping(from.add(range.start), to, range.len()) };
    }
}

/// Returns a range of staging memory as the content of a message.
pub(super) fn payload_of(staged: &Staged, range: std::ops::Range<usize>) -> Payload {
    if range.len() <= inline_bytes() {
        let mut bytes = Vec::with_capacity(range.len());
        assert!(range.start <= range.end && range.end <= staged.len(), "beyond staging memory");
        // SAFETY: inside of the staging memory, which only its owner writes. The bytes are copied
        // without a reference to them.
        unsafe {
            std::ptr::copy_nonoverlapping(staged.as_ptr().add(range.start), bytes.as_mut_ptr(), range.len());
            bytes.set_len(range.len());
        }
        return Payload::Inline(bytes.into());
    }
    Payload::Staged { address: staged.address() + range.start as u64, len: range.len() as u64 }
}

/// Copies bytes into memory of the caller.
///
/// # Safety
/// The buffer is writable, and nothing else touches it.
pub(super) unsafe fn fill(buffer: Buffer, bytes: &[u8]) {
    let len = bytes.len().min(buffer.len);
    // SAFETY: as promised by the caller, and not more than the buffer has.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.as_ptr(), len) };
}

impl Shared {
    /// Opens the transfer engine of a slot's process.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` without a process, or the errors of the look-up.
    pub(super) async fn target(&self, slot: u8, deadline: Moment) -> Result<Target<TransportSet>> {
        let (endpoint, _) = self.correspondent(slot).ok_or_else(|| {
            Error::new(ErrorCode::UnavailableInCurrentStatus, format!("no process has the slot. slot={slot}"))
        })?;
        self.plane.engine.open_by(&endpoint.engine, deadline).await
    }

    /// Returns the latest end of a transfer that begins now.
    pub(super) fn transfer_deadline(&self, len: usize) -> Moment {
        self.plane.engine.clock().now().after(self.transfer_timeout(len))
    }

    fn transfer_timeout(&self, len: usize) -> Duration {
        // At least 100 MB/s.
        self.plane.timeouts.collective() + Duration::from_nanos(10 * len as u64)
    }

    /// Keeps staged bytes while a rank that has lost its connection may still read them. That rank
    /// would take other bytes for its message.
    pub(super) fn retire(&self, staged: Vec<Staged>) {
        let Some(longest) = staged.iter().map(Staged::len).max() else { return };
        let patience = 2 * self.transfer_timeout(longest);
        self.plane.runtime.spawn(async move {
            tokio::time::sleep(patience).await;
            drop(staged);
        });
    }

    /// Reads staged bytes of a slot into memory of the caller. Nothing touches the memory after the
    /// end, whatever the result is.
    ///
    /// # Errors
    /// The errors of the transfer.
    ///
    /// # Safety
    /// `keep` keeps the buffer allocated, and nothing else touches it until the end. If the future
    /// is dropped, that is true until the last clone of `keep` is dropped.
    pub(super) async unsafe fn read(
        self: Arc<Self>,
        slot: u8,
        address: u64,
        to: Buffer,
        keep: Keep,
    ) -> Result<()> {
        let deadline = self.transfer_deadline(to.len);
        let target = self.target(slot, deadline).await?;
        let engine = &self.plane.engine;
        let Some(first) = NonNull::new(to.as_ptr()).filter(|_| to.len > 0) else { return Ok(()) };
        if self.plane.reads_in_place {
            // SAFETY: promised by the caller.
            let sink = unsafe { destination(MemorySpan::new(first, to.len), &keep) }?;
            return engine.read(&target, address, sink, Some(deadline)).await.0;
        }
        let scratch = self.plane.pool.scratch()?;
        for from in (0..to.len).step_by(SCRATCH_BYTES) {
            let len = SCRATCH_BYTES.min(to.len - from);
            // SAFETY: the range of the last turn is no longer in use.
            for sink in unsafe { scratch.split(len, 1) }? {
                let (result, sink) = engine.read(&target, address + from as u64, sink, Some(deadline)).await;
                result?;
                // SAFETY: inside of the buffer, which the caller lends exclusively, in readable and
                // writable memory.
                let part = unsafe { std::slice::from_raw_parts_mut(to.as_ptr().add(from), len) };
                sink.copy_to(0, part)?;
            }
        }
        Ok(())
    }
}
