//! Thread of a device: takes completions, checks deadlines, and handles events of the device. It
//! sleeps when there is nothing to do.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{error, info, warn};

use crate::endpoint::{Endpoint, Nic, Scratch, request_parts};
use crate::node::Node;
use crate::send_credits::{WakeableQueue, may_sleep};
use crate::sieve::Evictable;
use crate::verbs::{Completed, CompletionBatch, Event, Status};

/// Number of completions taken at once.
const BATCH: usize = 64;
/// Time that a closed node waits for the completions of its devices.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a failed action is retried.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Serves a device until its node is closed and all its connections are gone.
pub(crate) fn run(node: &Arc<Node>, nic: &Arc<Nic>) {
    let mut poller = Poller {
        node: node.clone(),
        nic: nic.clone(),
        batch: CompletionBatch::new(BATCH),
        completed: Vec::with_capacity(BATCH),
        scratch: Scratch::default(),
        starved: Vec::new(),
        all: Vec::new(),
        closing: None,
    };
    while !poller.is_finished() {
        if nic.is_lost() {
            poller.clean_up();
        } else if let Err(error) = poller.poll_once() {
            error!(device = nic.name, %error, "completion queue lost");
            nic.mark_lost();
            poller.node.retire_all(nic, &error);
        }
    }
}

struct Poller {
    node: Arc<Node>,
    nic: Arc<Nic>,
    batch: CompletionBatch,
    completed: Vec<Completed>,
    scratch: Scratch,
    // Kept from one round to the next, like the lists of `scratch`.
    starved: Vec<Arc<Endpoint>>,
    all: Vec<Arc<Endpoint>>,
    closing: Option<Moment>,
}

impl WakeableQueue for Poller {
    type Error = Error;

    fn take(&mut self) -> Result<bool> {
        self.dispatch_completions()
    }

    fn arm(&mut self) -> Result<()> {
        self.nic.queue.request_wake()
    }
}

impl Poller {
    fn is_finished(&mut self) -> bool {
        if !self.node.closed.load(Ordering::Acquire) {
            return false;
        }
        let now = self.node.clock.now();
        let since = *self.closing.get_or_insert(now);
        if now.since(since) >= CLOSE_TIMEOUT {
            let endpoints: Vec<Arc<Endpoint>> = self.nic.endpoints.read().values().cloned().collect();
            for endpoint in endpoints {
                self.node.retire(&endpoint, &Error::new(ErrorCode::TransferFail, "closed"));
                self.node.destroy_or_leak(&endpoint);
            }
        }
        self.nic.endpoints.read().is_empty()
    }

    fn poll_once(&mut self) -> Result<()> {
        let may_sleep = may_sleep(self)?;
        self.check_deadlines();
        if may_sleep {
            self.sleep(true);
            self.nic.queue.drain_events();
        }
        Ok(())
    }

    /// Cleans up a lost device: its queue returns nothing, and its descriptors, which may report
    /// events for ever, are ignored.
    fn clean_up(&mut self) {
        self.check_deadlines();
        self.sleep(false);
    }

    /// Assigns completions to their connections. Returns false when there are none.
    fn dispatch_completions(&mut self) -> Result<bool> {
        self.completed.clear();
        self.completed.extend(self.nic.queue.poll(&mut self.batch)?);
        let of = |completion: &Completed| request_parts(completion.id).0;
        for run in self.completed.chunk_by(|a, b| of(a) == of(b)) {
            // Completions of a destroyed connection are ignored.
            let endpoint = self.nic.endpoints.read().get(&of(&run[0])).cloned();
            let Some(endpoint) = endpoint else { continue };
            let outcome = endpoint.completed(run.iter(), &mut self.scratch.ended);
            match outcome {
                Ok(false) => {}
                Ok(true) => {
                    self.node.retire(&endpoint, &Error::new(ErrorCode::TransferFail, "a request failed"))
                }
                Err(error) => self.node.retire(&endpoint, &error),
            }
            let moved = self.scratch.ended.iter().filter(|ended| ended.status == Status::Done);
            self.nic.throughput.add(moved.map(|ended| u64::from(ended.message.len)).sum());
            for ended in self.scratch.ended.drain(..) {
                self.node.ended(ended, &endpoint.rail);
            }
            if endpoint.is_retired() && endpoint.is_idle() {
                self.node.destroy(&endpoint);
            }
        }
        let has_completions = !self.completed.is_empty();
        if has_completions {
            self.resume_starved();
        }
        Ok(has_completions)
    }

    /// Resumes connections that waited for credit of the completion queue.
    fn resume_starved(&mut self) {
        let mut starved = std::mem::take(&mut self.starved);
        self.nic.starved.take(&mut starved);
        for endpoint in starved.drain(..) {
            if endpoint.has_waiting()
                && let Err(error) = endpoint.post_waiting()
            {
                self.node.retire(&endpoint, &error);
            }
        }
        self.starved = starved;
    }

    /// Checks deadlines, if it is time.
    fn check_deadlines(&mut self) {
        let now = self.node.clock.now();
        if now < self.nic.planned() {
            return;
        }
        self.nic.clear_plan();
        let mut all = std::mem::take(&mut self.all);
        all.extend(self.nic.endpoints.read().values().cloned());
        for endpoint in all.drain(..) {
            let due = endpoint.tick(now, &self.node.config, &mut self.scratch.expired);
            for piece in self.scratch.expired.drain(..) {
                piece.done.finish(Err(crate::endpoint::deadline_error()));
            }
            if let Some(reason) = due.retire {
                self.node.retire(&endpoint, &reason);
            }
            let is_destroyed = due.destroy && self.node.destroy(&endpoint);
            match due.next {
                _ if is_destroyed => {}
                _ if due.destroy => self.nic.wake_by(now.after(RETRY_DELAY)),
                Some(at) => self.nic.wake_by(at),
                None => {}
            }
        }
        self.all = all;
        self.resume_starved();
    }

    /// Waits for a wake-up or the next deadline, and optionally for a completion or an event of the
    /// device.
    fn sleep(&self, watch_device: bool) {
        let now = self.node.clock.now();
        let mut wait = self.nic.planned().since(now);
        if self.closing.is_some() || self.node.closed.load(Ordering::Acquire) {
            wait = wait.min(RETRY_DELAY);
        }
        let mut fds = [
            PollFd::new(self.nic.wake_event(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.nic.device.event_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.nic.queue.as_fd(), PollFlags::IN),
        ];
        let watched = if watch_device { 3 } else { 1 };
        let timeout = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX).min(3600),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let _ = poll(&mut fds[..watched], Some(&timeout));
        let (woken, has_event) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if woken {
            let mut count = [0; 8];
            let _ = rustix::io::read(self.nic.wake_event(), &mut count);
        }
        if has_event {
            self.handle_event();
        }
    }

    /// Handles one event of the device.
    fn handle_event(&self) {
        let nic = &self.nic;
        match nic.device.next_event() {
            Ok(Event::PortUp) => {
                if nic.refresh(&self.node.config) {
                    info!(device = nic.name, "port is up");
                }
            }
            Ok(Event::PortDown) => {
                nic.refresh(&self.node.config);
                warn!(device = nic.name, "port is down");
            }
            Ok(Event::Addresses) => {
                nic.refresh(&self.node.config);
                info!(device = nic.name, gid = %nic.gid().addr, "addresses of the port have changed");
            }
            Ok(Event::Fatal | Event::QueueFatal) => {
                warn!(device = nic.name, "device lost");
                nic.mark_lost();
                self.node.retire_all(nic, &Error::new(ErrorCode::TransferFail, "the device is lost"));
            }
            Ok(Event::Other(_)) => {}
            Err(error) => {
                warn!(device = nic.name, %error, "cannot read events of the device; device lost");
                nic.mark_lost();
                self.node.retire_all(
                    nic,
                    &Error::new(ErrorCode::TransferFail, "the events of the device cannot be read"),
                );
            }
        }
    }
}
