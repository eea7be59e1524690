//! Arrival of messages and of failures at a communicator.

use std::sync::Arc;

use super::shared::{MAX_EARLY, MAX_EARLY_BYTES, MAX_OFFERS, Offer, Shared};
use crate::link::Recipient;
use crate::message::Message;
use crate::view::MAX_RANKS;

impl Recipient for Shared {
    fn deliver(self: Arc<Self>, process: u64, slot: u8, message: Message) {
        self.take_message(process, slot, message);
    }

    fn lose(self: Arc<Self>, process: u64) {
        let slots = self.slots_of(process, None);
        if slots != 0 {
            return self.lose_slots(slots, false);
        }
        let mut inbox = self.inbox.lock();
        if inbox.early.iter().any(|(from, ..)| *from == process) && inbox.early_lost.len() < MAX_RANKS {
            inbox.early_lost.push_back(process);
        }
    }

    fn forget(self: Arc<Self>, process: u64, communicator: u32) {
        let slots = self.slots_of(process, Some(communicator));
        if slots != 0 {
            self.lose_slots(slots, true);
        }
    }
}

impl Shared {
    /// Takes a message of a process.
    pub(super) fn take_message(self: &Arc<Self>, process: u64, slot: u8, message: Message) {
        if !self.has_process(process, slot) {
            self.apply_view();
        }
        if !self.has_process(process, slot) {
            // The view that introduces the sender has not arrived yet.
            let mut inbox = self.inbox.lock();
            let bytes = inbox.early_bytes + message.inline_len();
            if inbox.early.len() < MAX_EARLY && bytes <= MAX_EARLY_BYTES {
                inbox.early_bytes = bytes;
                inbox.early.push_back((process, slot, message));
            }
            return;
        }
        match message {
            Message::Progress(progress) => self.update_participant(slot, |member| {
                member.progress = Some(progress);
                true
            }),
            Message::Offer { tag, part, payload } => self.update_participant(slot, |member| {
                member.offers.push(Offer { tag, part, payload });
                member.offers.len() <= MAX_OFFERS
            }),
            Message::Ready { tag, success } => self.update_participant(slot, |member| {
                member.ready.push((tag, success));
                member.ready.len() <= MAX_OFFERS
            }),
            Message::Bye => self.lose_slots(1 << slot, true),
            Message::Send { id, payload } => self.take_sent(slot, id, payload),
            Message::Taken { id, success } => self.take_acknowledgement(slot, id, success),
            Message::Exchange { id, tag, payload } => self.take_exchange(slot, id, tag, payload),
        }
    }
}
