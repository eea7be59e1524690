//! Gate of a region: memory is accessed only inside, and shutting the gate waits until no user is
//! inside.

use mooncake_core::fault_injection::is_planted;

use crate::sync::{AtomicBool, Ordering, RwLock, RwLockReadGuard};

/// Gate that is open until it is shut for good.
#[derive(Debug)]
pub(crate) struct Gate {
    shut: AtomicBool,
    lock: RwLock,
}

/// Right to access the memory behind a gate, for as long as it is held.
pub(crate) type Inside<'a> = RwLockReadGuard<'a, ()>;

impl Gate {
    /// Returns an open gate.
    pub(crate) fn new() -> Self {
        Self { shut: AtomicBool::new(false), lock: RwLock::new() }
    }

    /// Enters, unless the gate is shut. The same thread may enter several times.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        if is_planted("tcp-gate-looks-first") {
            return (!self.shut.load(Ordering::Acquire)).then(|| self.lock.read());
        }
        let inside = self.lock.read();
        (!self.shut.load(Ordering::Acquire)).then_some(inside)
    }

    /// Shuts the gate. Returns when no user is inside; none enters afterwards.
    pub(crate) fn shut(&self) {
        self.shut.store(true, Ordering::Release);
        if !is_planted("tcp-gate-does-not-wait") {
            self.lock.wait_for_readers();
        }
    }
}
