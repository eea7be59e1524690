//! Bytes on their way: the staged input of an operation, and reads from the staging memory of
//! another rank into memory of the caller.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::Target;

use super::shared::Shared;
use crate::call::{Buffer, Input, inline_bytes};
use crate::link::Plane;
use crate::message::{Payload, StagedDescriptor};
use crate::staging::{MemoryGuard, SCRATCH_BYTES, Staged, destination};

/// Least time limit of a transfer. The process of a slow rank gets this time to serve it.
const MIN_TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that are copied before other tasks of the thread get a turn.
const YIELD_BYTES: usize = 4 << 20;

/// Input of an operation. It does not change until the operation is over.
pub(super) enum Source {
    /// Input whose parts all travel in messages.
    Private(Bytes),
    /// Input that other ranks read.
    Shared {
        staged: Staged,
        /// Range that stays in the caller's memory, because no other rank reads it.
        unstaged: Option<(Range<usize>, Buffer)>,
    },
}

/// Returns the parts of a range outside of another one.
fn without(range: Range<usize>, excluded: Option<&Range<usize>>) -> [Range<usize>; 2] {
    let Some(excluded) = excluded else { return [range.clone(), range.end..range.end] };
    let cut = |at: usize| at.clamp(range.start, range.end);
    [range.start..cut(excluded.start), cut(excluded.end)..range.end]
}

impl Source {
    /// Copies the input of an operation, without the range `unstaged` of a long one.
    ///
    /// # Errors
    /// The errors of the staging memory.
    ///
    /// # Safety
    /// The buffers of the input are readable. Nothing writes the range `unstaged` until the
    /// operation is over.
    pub(super) async unsafe fn stage(
        plane: &Plane,
        input: &Input,
        max_len: usize,
        unstaged: Option<Range<usize>>,
    ) -> Result<Self> {
        if max_len <= inline_bytes() {
            let mut bytes = Vec::with_capacity(input.len);
            for buffer in input.staged.iter().filter(|buffer| buffer.len > 0) {
                // SAFETY: readable, as promised by the caller.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len) });
            }
            return Ok(Source::Private(bytes.into()));
        }
        let staged = plane.pool.allocate(input.len).await?;
        let unstaged = unstaged.and_then(|range| Some((range.clone(), input.part(range)?)));
        let mut offset = 0;
        for buffer in &input.staged {
            let range = offset..offset + buffer.len;
            for part in without(range, unstaged.as_ref().map(|(range, _)| range)) {
                for from in part.clone().step_by(YIELD_BYTES) {
                    let len = YIELD_BYTES.min(part.end - from);
                    // SAFETY: inside of the buffer, which is readable.
                    unsafe { staged.write(from, buffer.as_ptr().add(from - offset), len) };
                    if len == YIELD_BYTES {
                        tokio::task::yield_now().await;
                    }
                }
            }
            offset += buffer.len;
        }
        Ok(Source::Shared { staged, unstaged })
    }

    /// Makes all ranges of up to `max_len` bytes accessible to other ranks.
    ///
    /// # Errors
    /// The errors of the staging memory.
    ///
    /// # Safety
    /// As for [`stage`](Self::stage).
    pub(super) async unsafe fn share(&mut self, plane: &Plane, max_len: usize) -> Result<()> {
        match self {
            Source::Private(bytes) if max_len > inline_bytes() => {
                let staged = plane.pool.allocate(bytes.len()).await?;
                // SAFETY: the bytes are readable.
                unsafe { staged.write(0, bytes.as_ptr(), bytes.len()) };
                *self = Source::Shared { staged, unstaged: None };
            }
            Source::Private(_) => {}
            Source::Shared { staged, unstaged } => {
                if let Some((range, buffer)) = unstaged.take() {
                    // SAFETY: readable, as promised by the caller, and as long as the range.
                    unsafe { staged.write(range.start, buffer.as_ptr(), buffer.len) };
                }
            }
        }
        Ok(())
    }

    /// Returns the range as the content of a message.
    pub(super) fn payload(&self, range: Range<usize>) -> Payload {
        match self {
            Source::Private(bytes) => Payload::Inline(bytes.slice(range)),
            Source::Shared { staged, .. } => payload_of(staged, range),
        }
    }

    /// Returns the first byte of a range.
    ///
    /// # Panics
    /// If the range is not in the input, or only a part of it is staged.
    fn pointer(&self, range: &Range<usize>) -> *const u8 {
        let (from, len) = match self {
            Source::Private(bytes) => (bytes.as_ptr(), bytes.len()),
            Source::Shared { unstaged: Some((own, buffer)), .. }
                if own.start <= range.start && range.end <= own.end =>
            {
                assert!(own.len() == buffer.len, "beyond the input");
                // SAFETY: the range lies in the buffer.
                return unsafe { buffer.as_ptr().add(range.start - own.start) };
            }
            Source::Shared { staged, unstaged } => {
                let is_cut =
                    unstaged.as_ref().is_some_and(|(own, _)| range.start < own.end && own.start < range.end);
                assert!(!is_cut, "not staged");
                (staged.as_ptr().cast_const(), staged.len())
            }
        };
        assert!(range.start <= range.end && range.end <= len, "beyond the input");
        // SAFETY: the range lies in the input.
        unsafe { from.add(range.start) }
    }

    /// Copies a range out.
    ///
    /// # Safety
    /// The bytes from `to` on are writable, as many as the range has, and are not the range itself.
    pub(super) unsafe fn copy_to(&self, range: Range<usize>, to: *mut u8) {
        // SAFETY: the pointer is that of the range; the caller promises the other side.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(&range), to, range.len()) };
    }

    /// Returns the bytes of a range.
    ///
    /// # Safety
    /// Nothing writes the range while the result lives.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        if range.is_empty() {
            return &[];
        }
        // SAFETY: the pointer is that of the range; the caller promises that its bytes stay.
        unsafe { std::slice::from_raw_parts(self.pointer(&range), range.len()) }
    }

    /// Copies the whole input back to its tensor.
    ///
    /// # Safety
    /// The tensor is the input, and writable.
    pub(super) unsafe fn restore(&self, tensor: Buffer) {
        let unstaged = match self {
            Source::Private(_) => None,
            Source::Shared { unstaged, .. } => unstaged.as_ref().map(|(range, _)| range),
        };
        for part in without(0..tensor.len, unstaged) {
            // SAFETY: the part is a copy, and its destination lies in the tensor.
            unsafe { self.copy_to(part.clone(), tensor.as_ptr().add(part.start)) };
        }
    }
}

/// Returns a range of staging memory as the content of a message.
pub(super) fn payload_of(staged: &Staged, range: Range<usize>) -> Payload {
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
    Payload::Staged(staged.descriptor(range))
}

/// Reason why a read has no bytes.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The transfer has failed.
    Failed(Error),
    /// This rank has no memory for the bytes.
    Local(Error),
    /// The sender has given the bytes up, and may have used the memory for others.
    Withdrawn,
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) | Self::Local(error) => error.fmt(f),
            Self::Withdrawn => f.write_str("the sender has given the bytes up"),
        }
    }
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

/// Copies memory of the pool into memory of the caller.
///
/// # Safety
/// The buffer is writable, and nothing else touches it.
pub(super) async unsafe fn copy_out(staged: &Staged, buffer: Buffer) {
    let len = staged.len().min(buffer.len);
    for from in (0..len).step_by(YIELD_BYTES) {
        let size = YIELD_BYTES.min(len - from);
        // SAFETY: inside of both, and as promised by the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(staged.as_ptr().add(from), buffer.as_ptr().add(from), size);
        }
        if size == YIELD_BYTES {
            tokio::task::yield_now().await;
        }
    }
}

impl Shared {
    /// Opens the transfer engine of a slot's process.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` without a process, or the errors of the look-up.
    pub(super) async fn target(&self, slot: u8, deadline: Moment) -> Result<Target<TransportSet>> {
        let (endpoint, _) = self.present_peer(slot).ok_or_else(|| {
            Error::new(ErrorCode::UnavailableInCurrentStatus, format!("no process has the slot. slot={slot}"))
        })?;
        self.plane.engine.open_by(&endpoint.engine, deadline).await
    }

    /// Returns the latest end of a transfer that begins now.
    pub(super) fn transfer_deadline(&self, len: usize) -> Moment {
        self.plane.engine.clock().now().after(self.transfer_timeout(len))
    }

    /// Returns the time limit of a transfer, after which the slot counts as failed. So it is long
    /// also if ranks are examined early.
    fn transfer_timeout(&self, len: usize) -> Duration {
        // At least 100 MB/s.
        self.plane.timeouts.collective().max(MIN_TRANSFER_TIMEOUT) + Duration::from_nanos(10 * len as u64)
    }

    /// Reads staged bytes of a slot into memory of the caller. Nothing touches the memory after the
    /// end, whatever the result is.
    ///
    /// # Errors
    /// The memory may have any bytes then.
    ///
    /// # Safety
    /// `guard` keeps the buffer allocated, and nothing else touches it until the end. If the future
    /// is dropped, that is true until the last clone of `guard` is dropped.
    pub(super) async unsafe fn read(
        self: Arc<Self>,
        slot: u8,
        descriptor: StagedDescriptor,
        to: Buffer,
        guard: MemoryGuard,
    ) -> Result<(), ReadError> {
        let deadline = self.transfer_deadline(to.len);
        let target = self.target(slot, deadline).await?;
        let engine = &self.plane.engine;
        let Some(first) = NonNull::new(to.as_ptr()).filter(|_| to.len > 0) else { return Ok(()) };
        if self.plane.reads_in_place {
            // SAFETY: promised by the caller.
            let sink = unsafe { destination(MemorySpan::new(first, to.len), &guard) }?;
            engine.read(&target, descriptor.address, sink, Some(deadline)).await.0?;
            return self.check(&target, &descriptor).await;
        }
        let scratch = self.plane.pool.scratch()?;
        for from in (0..to.len).step_by(SCRATCH_BYTES) {
            let len = SCRATCH_BYTES.min(to.len - from);
            // SAFETY: the range of the last turn is no longer in use.
            for sink in unsafe { scratch.split(len, 1) }? {
                let address = descriptor.address + from as u64;
                let (result, sink) = engine.read(&target, address, sink, Some(deadline)).await;
                result?;
                // SAFETY: inside of the buffer, which the caller lends exclusively, in readable and
                // writable memory.
                let part = unsafe { std::slice::from_raw_parts_mut(to.as_ptr().add(from), len) };
                sink.copy_to(0, part)?;
            }
        }
        self.check(&target, &descriptor).await
    }

    /// Reads `len` staged bytes of a slot into memory of the pool.
    pub(super) async fn read_to_staging(
        self: Arc<Self>,
        slot: u8,
        descriptor: StagedDescriptor,
        len: usize,
    ) -> Result<Staged, ReadError> {
        let deadline = self.transfer_deadline(len);
        let target = self.target(slot, deadline).await?;
        let staged = self.plane.pool.allocate(len).await.map_err(ReadError::Local)?;
        // SAFETY: the memory is new, and nothing else uses it before the end of the transfer.
        let sink = unsafe { staged.sink() }?;
        self.plane.engine.read(&target, descriptor.address, sink, Some(deadline)).await.0?;
        self.check(&target, &descriptor).await.map(|()| staged)
    }

    /// Checks that staged bytes, which were read before, are those that the sender has
    /// announced.
    ///
    /// # Errors
    /// `Withdrawn` if they may be others, or the error of the transfer.
    pub(super) async fn check(
        &self,
        target: &Target<TransportSet>,
        descriptor: &StagedDescriptor,
    ) -> Result<(), ReadError> {
        if is_planted("pg-stamps-are-not-looked-at") {
            return Ok(());
        }
        // The bytes were read before.
        fence(Ordering::SeqCst);
        let deadline = Some(self.transfer_deadline(0));
        let engine = &self.plane.engine;
        let mut word = [0; 8];
        if self.plane.reads_in_place {
            let (result, bytes) =
                engine.read(target, descriptor.stamp_at, vec![0; word.len()], deadline).await;
            result?;
            word.copy_from_slice(&bytes);
        } else {
            let scratch = self.plane.pool.scratch()?;
            // SAFETY: the buffer is new.
            for sink in unsafe { scratch.split(word.len(), 1) }? {
                let (result, sink) = engine.read(target, descriptor.stamp_at, sink, deadline).await;
                result?;
                sink.copy_to(0, &mut word)?;
            }
        }
        if u64::from_ne_bytes(word) == descriptor.stamp { Ok(()) } else { Err(ReadError::Withdrawn) }
    }
}
