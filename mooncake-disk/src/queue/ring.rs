//! Interface of the queue to an engine that sleeps in the kernel until the event is written.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use super::{Job, Queue};

impl Queue {
    /// Returns the next job, if there is one.
    pub(crate) fn next(&self) -> Option<Job> {
        self.state.lock().ready.pop_front()
    }

    /// Announces that the engine is about to sleep until the event is written. Returns false if
    /// there is work to do first.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let state = self.state.lock();
        let idle = state.ready.is_empty() && !state.closed;
        if !idle {
            self.asleep.store(false, Ordering::SeqCst);
        }
        idle
    }

    /// Reads the event, so that it can be waited for again.
    pub(crate) fn clear_event(&self) {
        if let Some(event) = &self.event {
            let _ = rustix::io::read(event, &mut [0u8; 8]);
        }
    }

    pub(crate) fn event(&self) -> Option<&OwnedFd> {
        self.event.as_ref()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }
}
