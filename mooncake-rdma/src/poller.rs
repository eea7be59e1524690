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
use crate::send_credits::{Watched, is_quiet};
use crate::sieve::Evictable;
use crate::verbs::{Batch, Completed, Event};

/// Number of completions taken at once.
const BATCH: usize = 64;
/// Time that a closed node waits for the completions of its devices.
const LAST_WAIT: Duration = Duration::from_secs(2);
/// Pause before a failed action is retried.
const SOON: Duration = Duration::from_millis(20);

/// Serves a device until its node is closed and all its connections are gone.
pub(crate) fn run(node: &Arc<Node>, nic: &Arc<Nic>) {
    let mut poller = Poller {
        node: node.clone(),
        nic: nic.clone(),
        batch: Batch::new(BATCH),
        completed: Vec::with_capacity(BATCH),
        scratch: Scratch::default(),
        starved: Vec::new(),
        all: Vec::new(),
        closing: None,
    };
    while !poller.is_over() {
        if nic.is_lost() {
            poller.wind_up();
        } else if let Err(error) = poller.turn() {
            error!(device = nic.name, %error, "completion queue lost");
            nic.mark_lost();
            poller.node.retire_all(nic, &error);
        }
    }
}

struct Poller {
    node: Arc<Node>,
    nic: Arc<Nic>,
    batch: Batch,
    completed: Vec<Completed>,
    scratch: Scratch,
    // Kept from one round to the next, like the lists of `scratch`.
    starved: Vec<Arc<Endpoint>>,
    all: Vec<Arc<Endpoint>>,
    closing: Option<Moment>,
}

impl Watched for Poller {
    type Lost = Error;

    fn take(&mut self) -> Result<bool> {
        self.hand_out()
    }

    fn arm(&mut self) -> Result<()> {
        self.nic.queue.request_wake()
    }
}

impl Poller {
    fn is_over(&mut self) -> bool {
        if !self.node.closed.load(Ordering::Acquire) {
            return false;
        }
        let now = self.node.clock.now();
        let since = *self.closing.get_or_insert(now);
        if now.since(since) >= LAST_WAIT {
            let left: Vec<Arc<Endpoint>> = self.nic.endpoints.read().values().cloned().collect();
            for endpoint in left {
                self.node.retire(&endpoint, &Error::new(ErrorCode::TransferFail, "closed"));
                self.node.destroy_or_leak(&endpoint);
            }
        }
        self.nic.endpoints.read().is_empty()
    }

    fn turn(&mut self) -> Result<()> {
        let quiet = is_quiet(self)?;
        self.clock();
        if quiet {
            self.sleep(true);
            self.nic.queue.quieten();
        }
        Ok(())
    }

    /// Cleans up a lost device: its queue returns nothing, and its descriptors, which may report
    /// events for ever, are ignored.
    fn wind_up(&mut self) {
        self.clock();
        self.sleep(false);
    }

    /// Assigns completions to their connections. Returns false when there are none.
    fn hand_out(&mut self) -> Result<bool> {
        self.completed.clear();
        self.completed.extend(self.nic.queue.poll(&mut self.batch)?);
        let of = |one: &Completed| request_parts(one.id).0;
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
            for ended in self.scratch.ended.drain(..) {
                self.node.ended(ended, &endpoint.rail);
            }
            if endpoint.is_retired() && endpoint.is_idle() {
                self.node.destroy(&endpoint);
            }
        }
        let some = !self.completed.is_empty();
        if some {
            self.resume_starved();
        }
        Ok(some)
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
    fn clock(&mut self) {
        let now = self.node.clock.now();
        if now < self.nic.planned() {
            return;
        }
        self.nic.plan_nothing();
        let mut all = std::mem::take(&mut self.all);
        all.extend(self.nic.endpoints.read().values().cloned());
        for endpoint in all.drain(..) {
            let due = endpoint.tick(now, &self.node.config, &mut self.scratch.late);
            for piece in self.scratch.late.drain(..) {
                piece.done.finish(Err(crate::endpoint::too_late()));
            }
            if let Some(why) = due.retire {
                self.node.retire(&endpoint, &why);
            }
            let gone = due.destroy && self.node.destroy(&endpoint);
            match due.next {
                _ if gone => {}
                _ if due.destroy => self.nic.wake_by(now.after(SOON)),
                Some(at) => self.nic.wake_by(at),
                None => {}
            }
        }
        self.all = all;
        self.resume_starved();
    }

    /// Waits for the bell or the next deadline, and optionally for a completion or an event of the
    /// device.
    fn sleep(&self, of_the_device: bool) {
        let now = self.node.clock.now();
        let mut wait = self.nic.planned().since(now);
        if self.closing.is_some() || self.node.closed.load(Ordering::Acquire) {
            wait = wait.min(SOON);
        }
        let mut fds = [
            PollFd::new(self.nic.bell(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.nic.device.event_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.nic.queue.as_fd(), PollFlags::IN),
        ];
        let watched = if of_the_device { 3 } else { 1 };
        let timeout = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX).min(3600),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let _ = poll(&mut fds[..watched], Some(&timeout));
        let (rung, happened) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if rung {
            let mut count = [0; 8];
            let _ = rustix::io::read(self.nic.bell(), &mut count);
        }
        if happened {
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
