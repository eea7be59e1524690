//! Exchanges: messages to and from many ranks with one time limit, beside the collective
//! operations.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::sleep;

use super::arrivals::{ENDED, MAX_EARLY_ROUNDS, MAX_UNACKNOWLEDGED};
use super::counted::Counted;
use super::shared::Shared;
use super::transfer::{Source, fill};
use crate::call::{Buffer, Input, bits};
use crate::message::{ExchangeTag, Message, Payload};
use crate::operation::{Operation, Outcome};
use crate::staging::MemoryGuard;
use crate::view::{MAX_RANKS, Slot};

/// Exchange of this rank.
struct Exchange {
    tag: ExchangeTag,
    outputs: Vec<Option<Vec<Buffer>>>,
    inputs: Vec<Option<Buffer>>,
    guard: MemoryGuard,
}

impl Shared {
    pub(super) fn post_exchange(
        self: &Arc<Self>,
        tag: ExchangeTag,
        outputs: Vec<Option<Vec<Buffer>>>,
        inputs: Vec<Option<Buffer>>,
        timeout: Option<Duration>,
        guard: MemoryGuard,
    ) -> Operation {
        self.apply_view();
        let (operation, pending) = Operation::new(None);
        let (shared, counted) = (self.clone(), Counted::new(&self.gauge));
        let exchange = Exchange { tag, outputs, inputs, guard };
        self.plane.runtime.spawn(async move {
            let outcome = shared.run_exchange(&exchange, timeout).await;
            drop((exchange, counted));
            pending.finish(outcome);
        });
        operation
    }

    async fn run_exchange(self: &Arc<Self>, exchange: &Exchange, timeout: Option<Duration>) -> Outcome {
        let (tag, own) = (exchange.tag, usize::from(self.own.0));
        let losses = self.begin_exchange(tag);
        let mut pending = 0u64;
        for (slot, input) in exchange.inputs.iter().enumerate().take(MAX_RANKS) {
            if input.is_some() {
                pending |= 1 << slot;
            }
        }
        let mut outcome = Outcome::default();
        let pair = (exchange.outputs.get(own), exchange.inputs.get(own).copied().flatten());
        if let (Some(Some(outputs)), Some(input)) = pair {
            let mut len = 0;
            for output in outputs {
                if let Some(destination) = input.part(len..input.len.min(len + output.len)) {
                    // SAFETY: the caller of `exchange` promises both buffers. They may be the same
                    // memory.
                    unsafe { std::ptr::copy(output.as_ptr(), destination.as_ptr(), destination.len) };
                }
                len += output.len;
            }
            outcome.take_message(own as u8, len as u64, input.len);
        }
        pending &= !(1 << own);
        let sends = exchange.outputs.iter().enumerate().take(MAX_RANKS).filter(|(slot, _)| *slot != own);
        let sends = sends.filter_map(|(slot, output)| output.clone().map(|output| (slot as u8, output)));
        join_all(sends.map(|(slot, output)| self.send_exchange(slot, tag, output))).await;
        for slot in bits(pending) {
            // A process that has ended is noticed by the connection.
            if let Some((_, link)) = self.present_peer(slot) {
                link.open();
            }
        }
        let deadline = async {
            match timeout {
                Some(timeout) => sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(deadline);
        loop {
            let notified = self.exchanges.changed.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let (arrived, lost) = self.arrivals(tag, pending, &losses);
            for (slot, _, _) in &arrived {
                pending &= !(1 << slot);
            }
            pending &= !lost;
            if arrived.is_empty() {
                if pending == 0 {
                    return outcome;
                }
                tokio::select! {
                    () = notified => {}
                    () = &mut deadline => return outcome,
                }
                continue;
            }
            let reads = arrived.into_iter().filter_map(|(slot, id, payload)| {
                let destination = exchange.inputs.get(usize::from(slot)).copied().flatten()?;
                Some(async move {
                    let len = payload.len();
                    let read = self.read_exchange(slot, id, payload, destination, &exchange.guard).await;
                    (slot, read.then_some((len, destination.len)))
                })
            });
            for (slot, read) in join_all(reads).await {
                if let Some((len, space)) = read {
                    outcome.take_message(slot, len, space);
                }
            }
        }
    }

    /// Makes this round the present one of its buffer, and refuses what belongs to earlier ones.
    /// Returns the failures that were known before.
    fn begin_exchange(&self, tag: ExchangeTag) -> HashMap<u8, u64> {
        let (obsolete, losses) = {
            let mut state = self.exchanges.state.lock();
            (state.advance(tag.buffer, tag.round), state.losses.clone())
        };
        self.refuse(obsolete);
        losses
    }

    fn refuse(&self, obsolete: Vec<(u8, u64)>) {
        for (slot, id) in obsolete {
            self.send_to(slot, Message::Taken { id, success: false });
        }
    }

    pub(super) fn end_exchanges(&self, buffer: u64) {
        let obsolete = self.exchanges.state.lock().advance(buffer, ENDED);
        self.refuse(obsolete);
    }

    /// Takes the messages of the exchange that have arrived from the slots, and returns the slots
    /// that have failed.
    fn arrivals(
        &self,
        tag: ExchangeTag,
        pending: u64,
        losses: &HashMap<u8, u64>,
    ) -> (Vec<(u8, u64, Payload)>, u64) {
        let mut state = self.exchanges.state.lock();
        let mut arrived = Vec::new();
        let mut lost = 0;
        for slot in bits(pending) {
            if let Some((id, payload)) = state.arrived.remove(&(slot, tag)) {
                arrived.push((slot, id, payload));
            } else if state.is_closed
                || state.losses.get(&slot) != losses.get(&slot)
                || self.present_peer(slot).is_none()
            {
                lost |= 1 << slot;
            }
        }
        (arrived, lost)
    }

    async fn send_exchange(self: &Arc<Self>, slot: u8, tag: ExchangeTag, output: Vec<Buffer>) {
        let unacknowledged =
            self.exchanges.state.lock().unacknowledged.keys().filter(|(to, _)| *to == slot).count();
        if unacknowledged >= MAX_UNACKNOWLEDGED {
            tracing::debug!(slot, "rank does not take its data; nothing is sent");
            return;
        }
        let input = Input::joined(output);
        // SAFETY: the caller of `exchange` promises the buffers.
        let (payload, staged) = match unsafe { Source::stage(&self.plane, &input, input.len, None) }.await {
            Ok(Source::Private(bytes)) => (Payload::Inline(bytes), None),
            Ok(Source::Shared { staged, .. }) => {
                (Payload::Staged(staged.descriptor(0..input.len)), Some(staged))
            }
            Err(error) => return tracing::warn!(slot, %error, "cannot send data"),
        };
        let id = self.message_number();
        self.exchanges.state.lock().unacknowledged.insert((slot, id), staged);
        self.send_to(slot, Message::Exchange { id, tag, payload });
    }

    /// Reads a message into the start of `destination`, as much of it as fits.
    async fn read_exchange(
        self: &Arc<Self>,
        slot: u8,
        id: u64,
        payload: Payload,
        destination: Buffer,
        guard: &MemoryGuard,
    ) -> bool {
        let success = match payload {
            Payload::Inline(bytes) => {
                // SAFETY: the caller of `exchange` promises the buffer.
                unsafe { fill(destination, &bytes) };
                true
            }
            Payload::Staged(descriptor) => {
                let len =
                    usize::try_from(descriptor.len).map_or(destination.len, |len| len.min(destination.len));
                let destination = Buffer { len, ..destination };
                // SAFETY: as above, until `guard` is dropped.
                let read = unsafe { self.clone().read(slot, descriptor, destination, guard.clone()) }.await;
                read.inspect_err(|error| tracing::info!(slot, %error, "cannot read data")).is_ok()
            }
        };
        self.send_to(slot, Message::Taken { id, success });
        success
    }

    /// Keeps a message until its exchange begins, or drops that of an earlier round.
    pub(super) fn take_exchange(&self, slot: u8, id: u64, tag: ExchangeTag, payload: Payload) {
        let is_accepted = {
            let mut state = self.exchanges.state.lock();
            let is_obsolete = state.rounds.get(&tag.buffer).is_some_and(|round| tag.round < *round);
            let early_count = state.arrived.keys().filter(|(from, _)| *from == slot).count();
            if is_obsolete || early_count >= MAX_EARLY_ROUNDS {
                false
            } else {
                state.arrived.insert((slot, tag), (id, payload));
                true
            }
        };
        if is_accepted {
            self.exchanges.changed.notify_waiters();
        } else {
            self.send_to(slot, Message::Taken { id, success: false });
        }
    }
}

impl Outcome {
    /// Records a message that has been read into a buffer of `space` bytes.
    fn take_message(&mut self, slot: u8, len: u64, space: usize) {
        self.arrived |= u64::from(len <= space as u64) << slot;
        self.lengths.push((Slot(slot), len));
    }
}
