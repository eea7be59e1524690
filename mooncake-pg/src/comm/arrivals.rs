//! State of exchanges: data that has arrived, and data that its receivers have not taken.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::message::{ExchangeTag, Payload};
use crate::staging::Staged;

/// Largest number of rounds of a rank that are kept until this rank begins them.
pub(super) const MAX_AHEAD: usize = 64;
/// Largest number of messages to one rank that it has not taken. Further ones are not sent: that
/// rank counts this one as not arrived.
pub(super) const MAX_UNTAKEN: usize = 16;

#[derive(Default)]
pub(super) struct Exchanges {
    pub(super) state: Mutex<State>,
    /// Wakes every exchange.
    pub(super) changed: Notify,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) arrived: HashMap<(u8, ExchangeTag), (u64, Payload)>,
    /// Present round of each buffer.
    pub(super) rounds: HashMap<u64, u64>,
    /// Messages that their receivers have not taken, with their staged bytes.
    pub(super) untaken: HashMap<(u8, u64), Option<Staged>>,
    /// Number of failures of each slot.
    pub(super) losses: HashMap<u8, u64>,
    pub(super) is_closed: bool,
}

impl Exchanges {
    /// Takes an acknowledgement. Returns false if it is not one of an exchange.
    pub(super) fn take_acknowledgement(&self, slot: u8, id: u64) -> bool {
        let taken = self.state.lock().untaken.remove(&(slot, id));
        taken.is_some()
    }

    /// Ends the wait for a slot, and drops the data from and for the slot.
    pub(super) fn lose(&self, slot: u8) {
        {
            let mut state = self.state.lock();
            *state.losses.entry(slot).or_default() += 1;
            state.arrived.retain(|(from, _), _| *from != slot);
            state.untaken.retain(|(to, _), _| *to != slot);
        }
        self.changed.notify_waiters();
    }

    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_waiters();
    }
}
