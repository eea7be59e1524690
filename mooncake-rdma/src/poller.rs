//! The thread of a device: takes completions, looks at the clock, hears what happens to the device. It sleeps when nothing does.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{error, info, warn};

use crate::endpoint::{Endpoint, Scratch, request_parts};
use crate::nic::Nic;
use crate::node::Node;
use crate::room::{Watched, is_quiet};
use crate::verbs::{Batch, Completed, Event};

/// Completions taken at once.
const BATCH: usize = 64;
/// How long a closed node waits for its devices to hand everything back.
const LAST_WAIT: Duration = Duration::from_secs(2);
/// How long it takes until something that could not be done now is tried again.
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
            error!(device = nic.name, %error, "the completion queue is lost");
            nic.lose();
            poller.node.give_up_all(nic, &error);
        }
    }
}

struct Poller {
    node: Arc<Node>,
    nic: Arc<Nic>,
    batch: Batch,
    completed: Vec<Completed>,
    scratch: Scratch,
    // Kept from one round to the next, as lists of `scratch` are.
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
                self.node.bury_or_forget(&endpoint);
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

    /// What is left to do for a lost device: nothing comes out of its queue, and its descriptors, which may say for ever that they have
    /// something to say, are left alone.
    fn wind_up(&mut self) {
        self.clock();
        self.sleep(false);
    }

    /// Hands completions to whom they concern; false when there are none.
    fn hand_out(&mut self) -> Result<bool> {
        self.completed.clear();
        self.completed.extend(self.nic.queue.poll(&mut self.batch)?);
        let of = |one: &Completed| request_parts(one.id).0;
        for run in self.completed.chunk_by(|a, b| of(a) == of(b)) {
            // Those of a connection that is gone stand for nothing.
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
                self.node.bury(&endpoint);
            }
        }
        let some = !self.completed.is_empty();
        if some {
            self.feed();
        }
        Ok(some)
    }

    /// Lets connections go on that waited for room in the queue.
    fn feed(&mut self) {
        let mut starved = std::mem::take(&mut self.starved);
        self.nic.starved.take(&mut starved);
        for endpoint in starved.drain(..) {
            if endpoint.waits()
                && let Err(error) = endpoint.go_on()
            {
                self.node.retire(&endpoint, &error);
            }
        }
        self.starved = starved;
    }

    /// Looks at deadlines, if it is time.
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
            let gone = due.bury && self.node.bury(&endpoint);
            match due.next {
                _ if gone => {}
                _ if due.bury => self.nic.wake_by(now.after(SOON)),
                Some(at) => self.nic.wake_by(at),
                None => {}
            }
        }
        self.all = all;
        self.feed();
    }

    /// Waits, if they are to be heard, for a completion or an event of the device; for a ring of the bell, or the next deadline.
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
            self.hear();
        }
    }

    /// One event of the device.
    fn hear(&self) {
        let nic = &self.nic;
        match nic.device.next_event() {
            Ok(Event::PortUp) => {
                if nic.refresh(&self.node.config) {
                    info!(device = nic.name, "the port is up");
                }
            }
            Ok(Event::PortDown) => {
                nic.refresh(&self.node.config);
                warn!(device = nic.name, "the port is down");
            }
            Ok(Event::Addresses) => {
                nic.refresh(&self.node.config);
                info!(device = nic.name, gid = %nic.gid().addr, "addresses have changed");
            }
            Ok(Event::Fatal | Event::QueueFatal) => {
                warn!(device = nic.name, "the device is lost");
                nic.lose();
                self.node.give_up_all(nic, &Error::new(ErrorCode::TransferFail, "the device is lost"));
            }
            Ok(Event::Other(_)) => {}
            Err(error) => {
                warn!(device = nic.name, %error, "the device's events are lost");
                nic.lose();
                self.node
                    .give_up_all(nic, &Error::new(ErrorCode::TransferFail, "the device's events are lost"));
            }
        }
    }
}
