//! I/O engine of one ring and one thread: many requests in progress, submitted together, and one
//! wait for all events.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::types::Fd;
use io_uring::{IoUring, Probe, opcode, squeue};
use slab::Slab;
use tracing::error;

use super::worker::spawn;
use crate::config::DiskConfig;
use crate::queue::Queue;
use crate::run::{BouncePool, Io, Run};

/// User data of the completion for a write to the event of the queue.
const EVENT: u64 = u64::MAX;

/// Starts a ring on a thread of its own.
///
/// # Errors
///
/// Returns an error if the kernel refuses a ring, or does not support the operations.
pub(super) fn start(config: &DiskConfig, queue: Arc<Queue>) -> io::Result<()> {
    let entries = u32::try_from(config.depth + 1).unwrap_or(u32::MAX).next_power_of_two();
    let ring = IoUring::builder().setup_clamp().build(entries)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let required = [opcode::Read::CODE, opcode::Write::CODE, opcode::PollAdd::CODE];
    if !required.iter().all(|code| probe.is_supported(*code)) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the io_uring of this kernel is too old"));
    }
    let bounces = BouncePool::new(config.piece_bytes, config.depth, config.zero_copy);
    let driver = Driver { ring, queue, runs: Slab::new(), depth: config.depth, bounces, polling: false };
    spawn("disk-uring", move || driver.run())
}

struct Driver {
    ring: IoUring,
    queue: Arc<Queue>,
    /// Requests that the kernel is processing.
    runs: Slab<Run>,
    depth: usize,
    bounces: BouncePool,
    /// True if the kernel polls the event.
    polling: bool,
}

impl Driver {
    fn run(mut self) {
        loop {
            self.submit_jobs();
            if self.queue.is_closed() && self.runs.is_empty() {
                return;
            }
            self.poll_event();
            // At the limit, new jobs have to wait for a completion anyway.
            let sleep = self.runs.len() >= self.depth || self.queue.prepare_sleep();
            let min_completions = usize::from(sleep || self.queue.is_closed());
            if let Err(e) = self.ring.submit_and_wait(min_completions)
                && !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN | libc::ETIME))
            {
                error!(error = %e, "io_uring failed; disk I/O stopped");
                return self.abort();
            }
            self.take_completions();
        }
    }

    /// Passes jobs to the kernel while there are jobs and free entries.
    fn submit_jobs(&mut self) {
        while self.runs.len() < self.depth {
            let Some(job) = self.queue.next() else { return };
            if let Some(run) = Run::begin(job, &mut self.bounces) {
                let key = self.runs.insert(run);
                self.request(key);
            }
        }
    }

    fn poll_event(&mut self) {
        if self.polling {
            return;
        }
        let Some(event) = self.queue.event() else { return };
        let poll = opcode::PollAdd::new(Fd(event.as_raw_fd()), libc::POLLIN as u32).build().user_data(EVENT);
        self.polling = true;
        self.push(&poll);
    }

    fn take_completions(&mut self) {
        let completions: smallvec::SmallVec<[(u64, i32); 64]> =
            self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
        for (key, result) in completions {
            if key == EVENT {
                self.polling = false;
                self.queue.clear_event();
                continue;
            }
            let outcome = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            self.handle_result(key as usize, outcome);
        }
    }

    fn handle_result(&mut self, key: usize, outcome: io::Result<usize>) {
        let Some(run) = self.runs.get_mut(key) else { return };
        match run.handle_result(outcome) {
            None => self.request(key),
            Some(result) => self.runs.remove(key).end(result, &mut self.bounces),
        }
    }

    fn request(&mut self, key: usize) {
        let run = &self.runs[key];
        let mut io = run.io();
        match run.inject(&mut io) {
            Ok(()) => self.push(&entry_of(io).user_data(key as u64)),
            Err(Some(error)) => self.handle_result(key, Err(error)),
            // The request gets no completion.
            Err(None) => {}
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the bytes and the file belong to a run that stays in `runs` until the kernel
            // has answered.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The submission queue is full: the kernel takes its entries.
            let _ = self.ring.submit();
        }
    }

    /// Ends the driver of a broken ring. The kernel may still process requests, so their memory is
    /// leaked.
    fn abort(mut self) {
        self.queue.close();
        for run in std::mem::take(&mut self.runs) {
            std::mem::forget(run.1);
        }
    }
}

fn entry_of(io: Io) -> squeue::Entry {
    // `piece_bytes` is at most 1 GiB.
    let len = u32::try_from(io.len).unwrap_or(u32::MAX);
    match io.write {
        true => opcode::Write::new(Fd(io.fd), io.ptr.as_ptr(), len).offset(io.offset).build(),
        false => opcode::Read::new(Fd(io.fd), io.ptr.as_ptr(), len).offset(io.offset).build(),
    }
}
