//! State machine of a job: the next request to the kernel, and the meaning of its result. Both
//! engines use it.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Completion;

use crate::buffer::Frame;
use crate::layout::BLOCK;
use crate::queue::{Job, deadline_error};

/// Request to the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Io {
    pub(crate) fd: RawFd,
    pub(crate) write: bool,
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

// SAFETY: an address and numbers; the code that uses the address makes sure that it is valid.
unsafe impl Send for Io {}

/// Bounce buffers of one engine thread, kept for reuse.
#[derive(Debug)]
pub(crate) struct BouncePool {
    free: Vec<Frame>,
    bytes: usize,
    max_free: usize,
    zero_copy: bool,
}

impl BouncePool {
    /// Creates the buffers for requests of at most `piece` bytes. At most `max_free` of them are
    /// kept.
    pub(crate) fn new(piece: usize, max_free: usize, zero_copy: bool) -> Self {
        // One more block receives the edges of partial writes.
        Self { free: Vec::new(), bytes: piece + 2 * BLOCK as usize, max_free, zero_copy }
    }

    fn take(&mut self) -> Result<Frame> {
        self.free.pop().map_or_else(|| Frame::new(self.bytes), Ok)
    }

    fn put_back(&mut self, frame: Option<Frame>) {
        if let Some(frame) = frame
            && self.free.len() < self.max_free
        {
            self.free.push(frame);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Read of the first block of a partial write.
    Head,
    /// Read of the last block of a partial write.
    Tail,
    /// Transfer of the bytes.
    Main,
}

/// Job in progress.
#[derive(Debug)]
pub(crate) struct Run {
    job: Job,
    /// Share of the completion, held here while the kernel uses the memory of the caller, and
    /// parked while it uses the bounce buffer.
    done: Option<Completion>,
    bounce: Option<Frame>,
    lo: u64,
    hi: u64,
    phase: Phase,
    /// Number of transferred bytes of the phase.
    at: usize,
    stalled_attempts: u32,
}

/// Answers without progress after which a file counts as broken.
const MAX_STALLED_ATTEMPTS: u32 = 100;

impl Run {
    /// Begins a job, unless its deadline has passed.
    pub(crate) fn begin(job: Job, bounces: &mut BouncePool) -> Option<Self> {
        let queue = job.queue.clone();
        let Some(done) = queue.unpark(job.key) else {
            queue.end(job, None, Err(deadline_error()));
            return None;
        };
        if queue.is_expired(done.deadline()) {
            crate::stats::add(&queue.counters.timeouts, 1);
            queue.end(job, Some(done), Err(deadline_error()));
            return None;
        }
        let (lo, hi) = job.blocks();
        let direct = job.file().align() != 1;
        let fits = !direct || (!job.is_partial() && job.local.addr().is_multiple_of(BLOCK));
        let mut run =
            Self { job, done: None, bounce: None, lo, hi, phase: Phase::Main, at: 0, stalled_attempts: 0 };
        if bounces.zero_copy && fits {
            run.done = Some(done);
            return Some(run);
        }
        match bounces.take() {
            Ok(frame) => run.bounce = Some(frame),
            Err(error) => {
                queue.end(run.job, Some(done), Err(error));
                return None;
            }
        }
        if run.job.writes() {
            run.fill();
            run.phase = run.edge_after(None);
        }
        // From here on the kernel touches only the bounce buffer, so the watch thread may complete
        // the share.
        queue.park(run.job.key, done);
        Some(run)
    }

    /// Returns the next request.
    pub(crate) fn io(&self) -> Io {
        let fd = self.job.file().fd();
        let block = BLOCK as usize;
        match self.phase {
            Phase::Main => {
                let len = self.total() - self.at;
                Io {
                    fd,
                    write: self.job.writes(),
                    ptr: self.ptr(self.at),
                    len,
                    offset: self.lo + self.at as u64,
                }
            }
            Phase::Head | Phase::Tail => {
                let offset = if self.phase == Phase::Head { self.lo } else { self.hi - BLOCK };
                let ptr = self.ptr(self.scratch() + self.at);
                Io { fd, write: false, ptr, len: block - self.at, offset: offset + self.at as u64 }
            }
        }
    }

    /// Processes the result of the kernel to [`io`](Self::io). Returns the result when the job is
    /// complete.
    pub(crate) fn handle_result(&mut self, outcome: io::Result<usize>) -> Option<Result<()>> {
        let transferred = match outcome {
            Ok(transferred) => transferred,
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                return self.no_progress();
            }
            Err(e) => return Some(Err(self.io_error(e))),
        };
        let reached = self.at + transferred;
        match self.phase {
            Phase::Main => {
                let end = if self.job.writes() { self.hi } else { self.job.end() };
                if self.lo + reached as u64 >= end {
                    return Some(Ok(()));
                }
                if transferred == 0 {
                    return Some(Err(self.short_io_error(self.lo + reached as u64)));
                }
            }
            Phase::Head | Phase::Tail => {
                if reached == BLOCK as usize {
                    self.patch();
                    self.phase = self.edge_after(Some(self.phase));
                    self.at = 0;
                    return None;
                }
                if transferred == 0 {
                    return Some(Err(self.short_io_error(self.lo + reached as u64)));
                }
            }
        }
        // The rest begins at a block again, even if some bytes are transferred twice.
        let align = self.job.file().align() as usize;
        let at = reached - reached % align;
        if at == self.at {
            return self.no_progress();
        }
        self.at = at;
        None
    }

    /// Ends the job. The caller gets the bytes of a read, unless its share was completed with an
    /// error before.
    pub(crate) fn end(mut self, result: Result<()>, bounces: &mut BouncePool) {
        let queue = self.job.queue.clone();
        let done = self.done.take().or_else(|| queue.unpark(self.job.key));
        if let (Some(frame), true, true, false) =
            (&self.bounce, done.is_some(), result.is_ok(), self.job.writes())
        {
            let skip = (self.job.start - self.lo) as usize;
            // SAFETY: the job may write the memory of the caller until the share in `done` is
            // completed; the buffer is longer than the job.
            unsafe {
                self.job.local.ptr.copy_from_nonoverlapping(frame.ptr().add(skip), self.job.local.len);
            }
        }
        bounces.put_back(self.bounce.take());
        queue.end(self.job, done, result);
    }

    /// Applies an injected fault to the next request. See [`Faults`](crate::Faults).
    pub(crate) fn inject(&self, io: &mut Io) -> std::result::Result<(), Option<io::Error>> {
        let align = self.job.file().align() as usize;
        self.job.queue.faults.apply(io.write, io.offset, &mut io.len, align)
    }

    fn total(&self) -> usize {
        (self.hi - self.lo) as usize
    }

    fn ptr(&self, at: usize) -> NonNull<u8> {
        let first = self.bounce.as_ref().map_or(self.job.local.ptr, Frame::ptr);
        // SAFETY: `at` is less than the length of the range, or lies in the last block of the
        // buffer.
        unsafe { first.add(at) }
    }

    /// Returns the offset in the buffer at which edges are read.
    fn scratch(&self) -> usize {
        self.bounce.as_ref().map_or(0, |frame| frame.len() - BLOCK as usize)
    }

    /// Copies the bytes of the caller into the buffer.
    fn fill(&mut self) {
        let skip = (self.job.start - self.lo) as usize;
        if let Some(frame) = &self.bounce {
            // SAFETY: no other code writes the bytes of the caller until the share is completed,
            // which this run holds; the buffer is longer than the job.
            unsafe {
                self.job.local.ptr.copy_to_nonoverlapping(frame.ptr().add(skip), self.job.local.len);
            }
        }
    }

    /// Returns the next phase: the edges outside of the job are read first.
    fn edge_after(&self, phase: Option<Phase>) -> Phase {
        let head = self.job.start != self.lo;
        let tail = self.job.end() != self.hi;
        let one_block = self.total() == BLOCK as usize;
        match phase {
            None if head => Phase::Head,
            None | Some(Phase::Head) if tail && !(head && one_block) => Phase::Tail,
            _ => Phase::Main,
        }
    }

    /// Restores the bytes of an edge around those of the caller.
    fn patch(&mut self) {
        let block = BLOCK as usize;
        let (scratch, total) = (self.scratch(), self.total());
        let front = (self.job.start - self.lo) as usize;
        let back = (self.hi - self.job.end()) as usize;
        let (phase, one_block) = (self.phase, total == block);
        let Some(frame) = self.bounce.as_mut() else { return };
        if phase == Phase::Head {
            frame.copy_within(scratch..scratch + front, 0);
        }
        if back != 0 && (phase == Phase::Tail || one_block) {
            frame.copy_within(scratch + block - back..scratch + block, total - back);
        }
    }

    fn no_progress(&mut self) -> Option<Result<()>> {
        self.stalled_attempts += 1;
        (self.stalled_attempts >= MAX_STALLED_ATTEMPTS)
            .then(|| Err(self.short_io_error(self.lo + self.at as u64)))
    }

    fn short_io_error(&self, at: u64) -> Error {
        let (code, what) = match self.job.writes() {
            true => (ErrorCode::FileWriteFail, "cannot write: write returned 0 bytes"),
            false => (ErrorCode::FileReadFail, "cannot read: file ends"),
        };
        Error::new(code, format!("{what}. path={} offset={at}", self.job.file().path().display()))
    }

    fn io_error(&self, e: io::Error) -> Error {
        let (what, code) = match (self.job.writes(), e.raw_os_error()) {
            (true, Some(libc::ENOSPC | libc::EDQUOT)) => ("write", ErrorCode::NoAvailableHandle),
            (true, _) => ("write", ErrorCode::FileWriteFail),
            (false, _) => ("read", ErrorCode::FileReadFail),
        };
        let text = format!(
            "cannot {what} {} bytes at {} of {}: {e}",
            self.job.local.len,
            self.job.start,
            self.job.file().path().display()
        );
        Error::new(code, text).with_source(e)
    }
}
