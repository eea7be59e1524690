//! The copying itself: on the submitting thread, and in pieces on threads kept for it.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::memory::{MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Completion, Opcode, same_host};
use parking_lot::{Condvar, Mutex};

use crate::pages::MappedFile;

pub(crate) type Link = same_host::Link<MappedFile>;
pub(crate) type MappedRegion = same_host::MappedRegion<MappedFile>;

/// One copy between memory here and an owner's.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) link: Arc<Link>,
    pub(crate) region: Arc<MappedRegion>,
    pub(crate) opcode: Opcode,
    pub(crate) local: MemorySpan,
    /// Address in the owner's process.
    pub(crate) remote: u64,
}

impl Copy {
    /// Moves the bytes now, unless it is too late for that.
    ///
    /// # Safety
    /// The remote range lies in the region. The local bytes are there, and for a read nobody else's, until this returns.
    pub(crate) unsafe fn run(&self, deadline: Option<Moment>, clock: &SharedClock) -> Outcome {
        let Some(inside) = Link::enter(&*self.link, &self.region) else { return Outcome::Closed };
        // Only now: whoever is stopped before this looks at the time when it goes on, and whoever is stopped after it is
        // inside, so that the owner notices and cuts the memory off from it. No write lands long after its deadline.
        if deadline.is_some_and(|deadline| clock.now() >= deadline) {
            return Outcome::Late;
        }
        let (local, len) = (self.local.ptr, self.local.len);
        // SAFETY: the range lies in the region and that in the file, all of which is mapped for as long as the region is held; its size
        // is sealed, so that the pages stay whatever the owner does. Other processes may write the bytes meanwhile, as on any
        // one-sided wire; no reference to them is ever made. One process may reach the same pages by both pointers, hence
        // no `nonoverlapping`.
        unsafe {
            let remote = self.region.mapping().0.span().ptr.add(self.region.offset_of(self.remote));
            match self.opcode {
                Opcode::Read => local.copy_from(remote, len),
                Opcode::Write => local.copy_to(remote, len),
            }
        }
        // Closed meanwhile, the memory may have been cut off, and the bytes have gone to nobody or come from nobody.
        if inside.leave() { Outcome::Done } else { Outcome::Closed }
    }

    /// The part of it from `from` on, `len` bytes at most.
    ///
    /// # Safety
    /// `from` is less than its length.
    pub(crate) unsafe fn part(&self, from: usize, len: usize) -> Copy {
        // SAFETY: inside the span, as promised.
        let ptr = unsafe { self.local.ptr.add(from) };
        let local = MemorySpan { ptr, len: len.min(self.local.len - from), ..self.local };
        Copy { local, remote: self.remote + from as u64, ..self.clone() }
    }
}

/// What became of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All bytes are where they belong.
    Done,
    /// The deadline had passed, and nothing was touched.
    Late,
    /// The owner has closed the region. Local bytes of a read may have changed.
    Closed,
}

impl Copy {
    /// The same in words.
    pub(crate) fn result(&self, outcome: Outcome) -> Result<()> {
        match outcome {
            Outcome::Done => Ok(()),
            Outcome::Late => {
                Err(Error::new(ErrorCode::RpcTimeout, "the deadline passed before the copy began"))
            }
            Outcome::Closed => Err(closed(self.remote, self.local.len)),
        }
    }
}

/// Threads that copy.
#[derive(Debug)]
pub(crate) struct Copiers {
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
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Copiers {
    pub(crate) fn new(limit: usize, clock: SharedClock) -> Self {
        let shared = Shared { queue: Mutex::default(), work: Condvar::new(), clock };
        Self { shared: Arc::new(shared), limit }
    }

    /// Queues pieces.
    ///
    /// # Safety
    /// As for [`Copy::run`], until the piece's share is finished.
    pub(crate) unsafe fn queue(&self, pieces: impl Iterator<Item = (Copy, Completion)>) {
        let mut queue = self.shared.queue.lock();
        queue.pieces.extend(pieces);
        let wanted = queue.pieces.len().min(self.limit);
        while queue.threads < wanted && queue.idle < queue.pieces.len() {
            let shared = self.shared.clone();
            let started =
                std::thread::Builder::new().name("mooncake-shm".into()).spawn(move || shared.work());
            match started {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    tracing::warn!(%error, "no thread to copy with");
                    // Dropped shares count as failed; not under the lock, for they may drop anything.
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

impl Drop for Copiers {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn work(&self) {
        while let Some((copy, share)) = self.next() {
            if share.is_given_up() {
                share.give_back();
                continue;
            }
            let result = self.copy(&copy, &share);
            share.finish(result);
        }
    }

    /// The next piece; what is queued is copied even after the end.
    fn next(&self) -> Option<(Copy, Completion)> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(piece) = queue.pieces.pop_front() {
                return Some(piece);
            }
            if queue.closed {
                return None;
            }
            queue.idle += 1;
            self.work.wait(&mut queue);
            queue.idle -= 1;
        }
    }

    fn copy(&self, copy: &Copy, share: &Completion) -> Result<()> {
        if !copy.link.is_alive() {
            return Err(gone());
        }
        // SAFETY: promised by whoever queued it, until the share is finished, which comes after this.
        copy.result(unsafe { copy.run(share.deadline(), &self.clock) })
    }
}

pub(crate) fn gone() -> Error {
    Error::new(ErrorCode::TransferFail, "the owner of the memory is gone")
}

pub(crate) fn closed(addr: u64, len: usize) -> Error {
    Error::invalid(format!("{len} bytes at {addr:#x} do not lie in one registered buffer of shared memory"))
}
