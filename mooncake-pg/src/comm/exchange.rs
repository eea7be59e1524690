//! Exchanges: buffers to and from many ranks with one time limit, beside the collective operations.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::sleep;

use super::arrivals::{MAX_AHEAD, MAX_UNTAKEN};
use super::counted::Counted;
use super::shared::Shared;
use super::transfer::{Source, fill};
use crate::call::{Buffer, Input, bits};
use crate::message::{ExchangeTag, Message, Payload};
use crate::operation::{Operation, Outcome};
use crate::staging::Keep;
use crate::view::MAX_RANKS;

/// Exchange of this rank.
struct Exchange {
    tag: ExchangeTag,
    outputs: Vec<Option<Buffer>>,
    inputs: Vec<Option<Buffer>>,
    keep: Keep,
}

impl Shared {
    pub(super) fn post_exchange(
        self: &Arc<Self>,
        tag: ExchangeTag,
        outputs: Vec<Option<Buffer>>,
        inputs: Vec<Option<Buffer>>,
        timeout: Option<Duration>,
        keep: Keep,
    ) -> Operation {
        self.apply_view();
        let (operation, pending) = Operation::new(None);
        let (shared, counted) = (self.clone(), Counted::new(&self.gauge));
        let exchange = Exchange { tag, outputs, inputs, keep };
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
        let mut wanted = 0u64;
        for (slot, input) in exchange.inputs.iter().enumerate().take(MAX_RANKS) {
            if input.is_some() {
                wanted |= 1 << slot;
            }
        }
        let mut outcome = Outcome::default();
        let pair =
            (exchange.outputs.get(own).copied().flatten(), exchange.inputs.get(own).copied().flatten());
        if let (Some(output), Some(input)) = pair
            && output.len == input.len
        {
            // SAFETY: the caller of `exchange` promises both buffers. They may be the same memory.
            unsafe { std::ptr::copy(output.as_ptr(), input.as_ptr(), output.len) };
            outcome.arrived |= 1 << own;
        }
        wanted &= !(1 << own);
        let sends = exchange.outputs.iter().enumerate().take(MAX_RANKS).filter(|(slot, _)| *slot != own);
        let sends = sends.filter_map(|(slot, output)| output.map(|output| (slot as u8, output)));
        join_all(sends.map(|(slot, output)| self.send_exchange(slot, tag, output))).await;
        for slot in bits(wanted) {
            // A process that has ended is noticed by the connection.
            if let Some((_, link)) = self.correspondent(slot) {
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
            let (arrived, lost) = self.arrivals(tag, wanted, &losses);
            for (slot, _, _) in &arrived {
                wanted &= !(1 << slot);
            }
            wanted &= !lost;
            if arrived.is_empty() {
                if wanted == 0 {
                    return outcome;
                }
                tokio::select! {
                    () = notified => {}
                    () = &mut deadline => return outcome,
                }
                continue;
            }
            let reads = arrived.into_iter().map(|(slot, id, payload)| async move {
                (slot, self.read_exchange(exchange, slot, id, payload).await)
            });
            for (slot, success) in join_all(reads).await {
                outcome.arrived |= u64::from(success) << slot;
            }
        }
    }

    /// Makes this round the present one of its buffer, and refuses what belongs to earlier ones.
    /// Returns the failures that were known before.
    fn begin_exchange(&self, tag: ExchangeTag) -> HashMap<u8, u64> {
        let mut late = Vec::new();
        let losses = {
            let mut state = self.exchanges.state.lock();
            let round = state.rounds.entry(tag.buffer).or_default();
            *round = (*round).max(tag.round);
            let round = *round;
            state.arrived.retain(|(slot, theirs), (id, _)| {
                let stays = theirs.buffer != tag.buffer || theirs.round >= round;
                if !stays {
                    late.push((*slot, *id));
                }
                stays
            });
            state.losses.clone()
        };
        for (slot, id) in late {
            self.send_to(slot, Message::Taken { id, success: false });
        }
        losses
    }

    /// Takes the messages of the exchange that have arrived from the slots, and returns the slots
    /// that have failed.
    fn arrivals(
        &self,
        tag: ExchangeTag,
        wanted: u64,
        losses: &HashMap<u8, u64>,
    ) -> (Vec<(u8, u64, Payload)>, u64) {
        let mut state = self.exchanges.state.lock();
        let mut arrived = Vec::new();
        let mut lost = 0;
        for slot in bits(wanted) {
            if let Some((id, payload)) = state.arrived.remove(&(slot, tag)) {
                arrived.push((slot, id, payload));
            } else if state.is_closed
                || state.losses.get(&slot) != losses.get(&slot)
                || self.correspondent(slot).is_none()
            {
                lost |= 1 << slot;
            }
        }
        (arrived, lost)
    }

    async fn send_exchange(self: &Arc<Self>, slot: u8, tag: ExchangeTag, output: Buffer) {
        let untaken = self.exchanges.state.lock().untaken.keys().filter(|(to, _)| *to == slot).count();
        if untaken >= MAX_UNTAKEN {
            tracing::debug!(slot, "rank does not take its data; nothing is sent");
            return;
        }
        let input = Input::whole(output);
        // SAFETY: the caller of `exchange` promises the buffer.
        let (payload, staged) = match unsafe { Source::stage(&self.plane, &input, output.len, None) }.await {
            Ok(Source::Private(bytes)) => (Payload::Inline(bytes), None),
            Ok(Source::Shared { staged, .. }) => {
                (Payload::Staged { address: staged.address(), len: output.len as u64 }, Some(staged))
            }
            Err(error) => return tracing::warn!(slot, %error, "cannot send data"),
        };
        let id = self.message_number();
        self.exchanges.state.lock().untaken.insert((slot, id), staged);
        self.send_to(slot, Message::Exchange { id, tag, payload });
    }

    async fn read_exchange(
        self: &Arc<Self>,
        exchange: &Exchange,
        slot: u8,
        id: u64,
        payload: Payload,
    ) -> bool {
        let place = exchange.inputs.get(usize::from(slot)).copied().flatten();
        let place = place.filter(|place| place.len as u64 == payload.len());
        let success = match (place, payload) {
            (None, _) => {
                tracing::warn!(slot, "data of an exchange does not have the length of its buffer");
                false
            }
            (Some(place), Payload::Inline(bytes)) => {
                // SAFETY: the caller of `exchange` promises the buffer.
                unsafe { fill(place, &bytes) };
                true
            }
            (Some(place), Payload::Staged { address, .. }) => {
                // SAFETY: as above, until `keep` is dropped.
                let read = unsafe { self.clone().read(slot, address, place, exchange.keep.clone()) }.await;
                read.inspect_err(|error| tracing::info!(slot, %error, "cannot read data")).is_ok()
            }
        };
        self.send_to(slot, Message::Taken { id, success });
        success
    }

    /// Keeps a message until its exchange begins, or drops that of an earlier round.
    pub(super) fn take_exchange(&self, slot: u8, id: u64, tag: ExchangeTag, payload: Payload) {
        let is_kept = {
            let mut state = self.exchanges.state.lock();
            let is_late = state.rounds.get(&tag.buffer).is_some_and(|round| tag.round < *round);
            let ahead = state.arrived.keys().filter(|(from, _)| *from == slot).count();
            if is_late || ahead >= MAX_AHEAD {
                false
            } else {
                state.arrived.insert((slot, tag), (id, payload));
                true
            }
        };
        if is_kept {
            self.exchanges.changed.notify_waiters();
        } else {
            self.send_to(slot, Message::Taken { id, success: false });
        }
    }
}
