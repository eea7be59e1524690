//! Choice of the connection to close when a device has no free one, by the algorithm SIEVE (Zhang
//! et al., NSDI '24).

use std::sync::Arc;

/// Connection that may be closed for another one.
pub(crate) trait Evictable {
    /// Returns the id of the connection.
    fn id(&self) -> u32;

    /// Returns whether no message waits or is in flight.
    fn is_idle(&self) -> bool;

    /// Returns whether the connection was used since the last call.
    fn take_used(&self) -> bool;
}

/// Choice of the connection to close: the oldest that was not used since the last look.
pub(crate) struct Sieve<C> {
    entries: Vec<Arc<C>>,
    hand: usize,
}

impl<C> Default for Sieve<C> {
    fn default() -> Self {
        Self { entries: Vec::new(), hand: 0 }
    }
}

impl<C: Evictable> Sieve<C> {
    pub(crate) fn add(&mut self, connection: Arc<C>) {
        self.entries.push(connection);
    }

    pub(crate) fn remove(&mut self, id: u32) {
        if let Some(at) = self.entries.iter().position(|entry| entry.id() == id) {
            self.entries.remove(at);
            self.hand -= usize::from(self.hand > at);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the connection to close: idle, and not used since the last look.
    pub(crate) fn victim(&mut self) -> Option<Arc<C>> {
        for _ in 0..2 * self.entries.len() {
            self.hand = (self.hand + 1) % self.entries.len();
            let entry = &self.entries[self.hand];
            if entry.is_idle() && !entry.take_used() {
                return Some(entry.clone());
            }
        }
        None
    }
}
