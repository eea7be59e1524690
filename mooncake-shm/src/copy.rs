//! Copies in shared memory: on the submitting thread, and in pieces on dedicated threads.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::memory::{MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Completion, Opcode};
use parking_lot::{Condvar, Mutex};

use crate::bytes;
use crate::pages::MappedFile;

pub(crate) type Link = mooncake_ipc::Link<MappedFile>;
pub(crate) type MappedRegion = mooncake_ipc::MappedRegion<MappedFile>;

/// Copy between local memory and the memory of an owner.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) link: Arc<Link>,
    pub(crate) region: Arc<MappedRegion>,
    pub(crate) opcode: Opcode,
    pub(crate) local: MemorySpan,
    /// Address in the process of the owner.
    pub(crate) remote: u64,
}

impl Copy {
    /// Copies the bytes now, unless the deadline has passed.
    ///
    /// # Safety
    /// The remote range lies in the region. The local bytes are allocated until this returns, and
    /// for a read have no other user.
    pub(crate) unsafe fn run(&self, deadline: Option<Moment>, clock: &SharedClock) -> Outcome {
        let Some(inside) = Link::enter(&*self.link, &self.region) else { return Outcome::Closed };
        // Checked only now. A thread that is stopped before this line sees the time when it
        // resumes. A thread that is stopped after it is inside, so that the owner notices it and
        // detaches the memory. No write lands long after its deadline.
        if deadline.is_some_and(|deadline| clock.now() >= deadline) {
            return Outcome::DeadlinePassed;
        }
        let (local, len) = (self.local.ptr, self.local.len);
        // SAFETY: the range lies in the region and the region in the file, all of which is mapped
        // for as long as the region is held. The size of the file is sealed, so that the pages stay
        // whatever the owner does. Other processes may write the bytes meanwhile, as on any
        // one-sided transport; no reference to them is ever made. One process may reach the same
        // pages by both pointers, hence no `nonoverlapping`.
        unsafe {
            let remote = self.region.mapping().0.span().ptr.add(self.region.offset_of(self.remote));
            match self.opcode {
                Opcode::Read => bytes::copy(local.as_ptr(), remote.as_ptr(), len),
                Opcode::Write => bytes::copy(remote.as_ptr(), local.as_ptr(), len),
            }
        }
        // If the region was closed meanwhile, the memory may have been detached, and the bytes are
        // lost or invalid.
        if inside.leave() { Outcome::Done } else { Outcome::Closed }
    }

    /// Returns the part of the copy from `from` on, at most `len` bytes.
    ///
    /// # Safety
    /// `from` is less than the length of the copy.
    pub(crate) unsafe fn part(&self, from: usize, len: usize) -> Copy {
        // SAFETY: inside the span, as promised by the caller.
        let ptr = unsafe { self.local.ptr.add(from) };
        let local = MemorySpan { ptr, len: len.min(self.local.len - from), ..self.local };
        Copy { local, remote: self.remote + from as u64, ..self.clone() }
    }
}

/// Outcome of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Complete.
    Done,
    /// Deadline passed before the copy began; nothing was touched.
    DeadlinePassed,
    /// Region closed by the owner. Local bytes of a read may have changed.
    Closed,
}

impl Copy {
    /// Returns the outcome as a result.
    pub(crate) fn to_result(&self, outcome: Outcome) -> Result<()> {
        match outcome {
            Outcome::Done => Ok(()),
            Outcome::DeadlinePassed => Err(Error::new(
                ErrorCode::RpcTimeout,
                "cannot copy: the deadline passed before the copy began",
            )),
            Outcome::Closed => Err(not_registered_error(self.remote, self.local.len)),
        }
    }
}

/// Threads that copy.
#[derive(Debug)]
pub(crate) struct CopyThreads {
    shared: Arc<Shared>,
    limit: usize,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    clock: SharedClock,
}

#[derive(Debug, Default)]
struct Queue {
    pieces: VecDeque<(Copy, Completion)>,
    running_threads: usize,
    idle_threads: usize,
    closed: bool,
}

impl CopyThreads {
    pub(crate) fn new(limit: usize, clock: SharedClock) -> Self {
        let shared = Shared { queue: Mutex::default(), work: Condvar::new(), clock };
        Self { shared: Arc::new(shared), limit }
    }

    /// Queues pieces.
    ///
    /// # Safety
    /// As for [`Copy::run`], until the share of the piece is completed.
    pub(crate) unsafe fn queue(&self, pieces: impl Iterator<Item = (Copy, Completion)>) {
        let mut queue = self.shared.queue.lock();
        queue.pieces.extend(pieces);
        let target_threads = queue.pieces.len().min(self.limit);
        while queue.running_threads < target_threads && queue.idle_threads < queue.pieces.len() {
            let shared = self.shared.clone();
            let started =
                std::thread::Builder::new().name("mooncake-shm".into()).spawn(move || shared.work());
            match started {
                Ok(_) => queue.running_threads += 1,
                Err(error) if queue.running_threads == 0 => {
                    tracing::warn!(%error, "cannot start a copying thread");
                    // Dropped shares count as failed. They are dropped without the lock, because a
                    // drop may run any code.
                    let pieces = std::mem::take(&mut queue.pieces);
                    drop(queue);
                    return drop(pieces);
                }
                Err(_) => break,
            }
        }
        drop(queue);
        self.shared.work.notify_all();
    }
}

impl Drop for CopyThreads {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn work(&self) {
        while let Some((copy, share)) = self.next() {
            if share.is_cancelled() {
                share.finish_cancelled();
                continue;
            }
            let result = self.copy(&copy, &share);
            share.finish(result);
        }
    }

    /// Returns the next piece. Queued pieces are copied even after the end.
    fn next(&self) -> Option<(Copy, Completion)> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(piece) = queue.pieces.pop_front() {
                return Some(piece);
            }
            if queue.closed {
                return None;
            }
            queue.idle_threads += 1;
            self.work.wait(&mut queue);
            queue.idle_threads -= 1;
        }
    }

    fn copy(&self, copy: &Copy, share: &Completion) -> Result<()> {
        if !copy.link.is_alive() {
            return Err(owner_ended_error());
        }
        // SAFETY: promised by the caller of `queue`, until the share is completed, which comes
        // later.
        copy.to_result(unsafe { copy.run(share.deadline(), &self.clock) })
    }
}

pub(crate) fn owner_ended_error() -> Error {
    Error::new(ErrorCode::TransferFail, "cannot access shared memory: its owner has ended")
}

pub(crate) fn not_registered_error(addr: u64, len: usize) -> Error {
    Error::invalid(format!("{len} bytes at {addr:#x} do not lie in one registered buffer of shared memory"))
}
