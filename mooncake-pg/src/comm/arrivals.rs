//! State of exchanges: data that has arrived, and data that its receivers have not taken.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::message::{ExchangeTag, Payload};
use crate::staging::Staged;

/// Largest number of rounds of a rank that are kept until this rank begins them.
pub(super) const MAX_EARLY_ROUNDS: usize = 64;
/// Largest number of messages to one rank that it has not taken. Further ones are not sent: that
/// rank counts this one as not arrived.
pub(super) const MAX_UNACKNOWLEDGED: usize = 16;
/// Round of a buffer that has ended.
pub(super) const ENDED: u64 = u64::MAX;
/// Largest number of ended buffers that are remembered.
const MAX_ENDED: usize = 1024;

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
    pub(super) unacknowledged: HashMap<(u8, u64), Option<Staged>>,
    /// Number of failures of each slot.
    pub(super) losses: HashMap<u8, u64>,
    pub(super) is_closed: bool,
}

impl State {
    /// Makes a round the present one of its buffer. Returns the messages of earlier rounds, which
    /// nothing takes any more.
    pub(super) fn advance(&mut self, buffer: u64, round: u64) -> Vec<(u8, u64)> {
        let present = self.rounds.entry(buffer).or_default();
        *present = (*present).max(round);
        let round = *present;
        let mut obsolete = Vec::new();
        self.arrived.retain(|(slot, message_tag), (id, _)| {
            let is_current = message_tag.buffer != buffer || message_tag.round >= round;
            if !is_current {
                obsolete.push((*slot, *id));
            }
            is_current
        });
        let ended = || self.rounds.iter().filter(|(_, round)| **round == ENDED).map(|(buffer, _)| *buffer);
        if ended().count() > MAX_ENDED
            && let Some(oldest) = ended().min()
        {
            self.rounds.remove(&oldest);
        }
        obsolete
    }
}

impl Exchanges {
    /// Takes an acknowledgement. Returns false if it is not one of an exchange.
    pub(super) fn take_acknowledgement(&self, slot: u8, id: u64) -> bool {
        let removed = self.state.lock().unacknowledged.remove(&(slot, id));
        removed.is_some()
    }

    /// Ends the wait for a slot, and drops the data from and for the slot.
    pub(super) fn lose(&self, slot: u8) {
        {
            let mut state = self.state.lock();
            *state.losses.entry(slot).or_default() += 1;
            state.arrived.retain(|(from, _), _| *from != slot);
            state.unacknowledged.retain(|(to, _), _| *to != slot);
        }
        self.changed.notify_waiters();
    }

    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_waiters();
    }
}
