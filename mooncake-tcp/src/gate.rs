//! Gate of a region: memory is accessed only inside, and closing the gate waits until no user is
//! inside.

use mooncake_core::fault_injection::is_planted;

use crate::sync::{AtomicBool, Ordering, RwLock, RwLockReadGuard};

/// Gate that is open until it is closed for good, as `seastar::gate`.
#[derive(Debug)]
pub(crate) struct Gate {
    closed: AtomicBool,
    lock: RwLock,
}

/// Right to access the memory behind a gate, for as long as it is held.
pub(crate) type GateHold<'a> = RwLockReadGuard<'a, ()>;

impl Gate {
    /// Returns an open gate.
    pub(crate) fn new() -> Self {
        Self { closed: AtomicBool::new(false), lock: RwLock::new() }
    }

    /// Enters, unless the gate is closed. The same thread may enter several times.
    pub(crate) fn enter(&self) -> Option<GateHold<'_>> {
        if is_planted("tcp-gate-looks-first") {
            return (!self.closed.load(Ordering::Acquire)).then(|| self.lock.read());
        }
        let hold = self.lock.read();
        (!self.closed.load(Ordering::Acquire)).then_some(hold)
    }

    /// Closes the gate. Returns when no user is inside; none enters afterwards.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if !is_planted("tcp-gate-does-not-wait") {
            self.lock.wait_for_readers();
        }
    }
}
