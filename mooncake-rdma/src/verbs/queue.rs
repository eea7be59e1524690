//! Completion queues, each with a channel that reports completions.

use std::ffi::c_uint;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use mooncake_core::Result;

use super::device::Device;
use super::ffi;
use super::{Counted, QUEUES, check, last_error};

/// Queue of the completed requests of queue pairs.
pub struct CompletionQueue {
    device: Arc<Device>,
    channel: NonNull<ffi::Channel>,
    pub(super) raw: NonNull<ffi::CompletionQueue>,
    _counted: Counted,
}

// SAFETY: libibverbs does its own locking.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// Completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Id that the request was posted with.
    pub id: u64,
    /// Outcome of the request.
    pub status: Status,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success, also of all earlier requests in its queue pair.
    Done,
    /// Not begun, or interrupted, because the queue pair has failed.
    Flushed,
    /// Refusal of the address, the key or the request by the peer.
    Refused,
    /// No acknowledgement from the peer in time.
    Unanswered,
    /// Error of this side, in memory or request, by the number of the verbs interface.
    Local(u32),
    /// Other error, by the number of the verbs interface.
    Failed(u32),
}

impl Status {
    fn from_number(number: c_uint) -> Self {
        match number {
            0 => Status::Done,
            5 => Status::Flushed,
            9 | 10 => Status::Refused,
            12 | 13 | 20 => Status::Unanswered,
            1 | 2 | 4 | 6 | 8 => Status::Local(number),
            other => Status::Failed(other),
        }
    }
}

impl CompletionQueue {
    /// Creates a queue for at least `entries` completions.
    pub fn new(device: &Arc<Device>, entries: u32) -> Result<Arc<Self>> {
        let calls = device.calls;
        // SAFETY: the device is open.
        let channel = unsafe { (calls.create_comp_channel)(device.raw.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(|| last_error("cannot create completion channel"))?;
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: device and channel are open.
        let raw =
            unsafe { (calls.create_cq)(device.raw.as_ptr(), entries, ptr::null_mut(), channel.as_ptr(), 0) };
        let Some(raw) = NonNull::new(raw) else {
            let error = last_error(format_args!("cannot create completion queue of {entries} entries"));
            // SAFETY: created above, and not used.
            unsafe { (calls.destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let queue = Self { device: device.clone(), channel, raw, _counted: Counted::one(&QUEUES) };
        let fd = queue.fd();
        let flags = rustix::fs::fcntl_getfl(fd).map_err(std::io::Error::from)?;
        rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Arc::new(queue))
    }

    /// Returns the number of completions that the queue holds. A queue that gets more is lost.
    pub fn entries(&self) -> u32 {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw.as_ptr()).cqe }.cast_unsigned()
    }

    /// Takes completed requests, and returns them.
    pub fn poll<'a>(&self, into: &'a mut CompletionBatch) -> Result<impl Iterator<Item = Completed> + 'a> {
        // SAFETY: the context outlives the queue; its table is filled in before the device is
        // returned.
        let poll = unsafe { (*self.device.raw.as_ptr()).ops.poll_cq };
        let capacity = i32::try_from(into.0.len()).unwrap_or(i32::MAX);
        let found = match poll {
            // SAFETY: the buffer has as many completions as requested.
            Some(poll) => unsafe { poll(self.raw.as_ptr(), capacity, into.0.as_mut_ptr()) },
            None => -1,
        };
        if found < 0 {
            return Err(last_error("cannot poll completion queue"));
        }
        let found = usize::try_from(found).unwrap_or(0).min(into.0.len());
        Ok(into.0[..found]
            .iter()
            .map(|one| Completed { id: one.id, status: Status::from_number(one.status) }))
    }

    /// Requests one wake-up on the channel at the next completion. Poll once more after it: a
    /// completion may have arrived before.
    pub fn request_wake(&self) -> Result<()> {
        // SAFETY: as in `poll`.
        let request = unsafe { (*self.device.raw.as_ptr()).ops.req_notify_cq };
        match request {
            Some(request) => {
                // SAFETY: the queue is alive.
                check(unsafe { request(self.raw.as_ptr(), 0) }, "cannot request completion event")
            }
            None => Err(last_error("cannot request completion event")),
        }
    }

    /// Removes wake-ups from the channel, so that it is quiet until the next one.
    pub fn drain_events(&self) {
        let (mut queue, mut user) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is open and does not block; the call writes both pointers on success.
        while unsafe {
            (self.device.calls.get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut user)
        } == 0
        {
            // SAFETY: the only queue of this channel, and the event just taken. Unacknowledged
            // events would block its destruction.
            unsafe { (self.device.calls.ack_cq_events)(self.raw.as_ptr(), 1) };
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open for as long as `self` lives, and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }
}

impl AsFd for CompletionQueue {
    /// Returns a descriptor that is readable after a requested wake-up.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

/// Buffer of [`CompletionQueue::poll`].
pub struct CompletionBatch(Box<[ffi::WorkCompletion]>);

impl CompletionBatch {
    /// Creates a buffer of that many completions.
    pub fn new(capacity: usize) -> Self {
        Self(vec![ffi::WorkCompletion::default(); capacity].into())
    }
}

impl fmt::Debug for CompletionBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionBatch({})", self.0.len())
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({})", self.device.name())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let calls = self.device.calls;
        // SAFETY: created by `new`; queue pairs that report here keep it alive; all events are
        // acknowledged when they are taken.
        unsafe {
            (calls.destroy_cq)(self.raw.as_ptr());
            (calls.destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}
