//! Point-to-point operations.
//!
//! The sender announces a message, with its bytes or with their address in staging memory. The
//! receiver matches announcements with receives in their order, copies or reads the bytes, and
//! acknowledges them. Then both operations are over. The failure of a process ends all operations
//! with it. There is no time limit for a process that responds: after each p2p timeout without
//! progress, the membership is asked whether it does.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};

use super::counted::Counted;
use super::pairs::{Announced, End, MAX_ANNOUNCED, MAX_INLINE, Outgoing, Pair, Receive, State};
use super::shared::Shared;
use super::transfer::{ReadError, Source, fill};
use crate::call::{Buffer, Input, inline_bytes};
use crate::message::{Message, Payload};
use crate::operation::{Operation, Outcome, closed};
use crate::staging::MemoryGuard;
use crate::view::{Evidence, MAX_RANKS, Slot};

impl Shared {
    /// Returns an unused number for a message that will be acknowledged.
    pub(super) fn message_number(&self) -> u64 {
        self.p2p.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn post_send(self: &Arc<Self>, tensor: Buffer, to: Slot, guard: MemoryGuard) -> Operation {
        let (operation, pending) = Operation::new(Some(&self.plane.driver));
        let send = Outgoing { tensor, guard, pending, counted: Counted::new(&self.gauge) };
        let mut state = self.p2p.state.lock();
        let pair = state.pairs.entry(to.0).or_default();
        pair.sends.push_back(send);
        if !pair.is_announcing {
            pair.is_announcing = true;
            let (shared, failures) = (self.clone(), pair.failures);
            self.plane.driver.spawn(async move { shared.announce_sends(to.0, failures).await });
        }
        self.watch(to.0, pair);
        operation
    }

    pub(super) fn post_receive(
        self: &Arc<Self>,
        tensor: Buffer,
        from: Option<Slot>,
        guard: MemoryGuard,
    ) -> Operation {
        let (operation, pending) = Operation::new(Some(&self.plane.driver));
        let receive = Receive { tensor, end: End { guard, pending, _counted: Counted::new(&self.gauge) } };
        match from {
            Some(slot) => {
                // A process that has ended is noticed by the connection.
                if let Some((_, link)) = self.present_peer(slot.0) {
                    link.open();
                }
                let mut state = self.p2p.state.lock();
                let pair = state.pairs.entry(slot.0).or_default();
                pair.receives.push_back(receive);
                self.watch(slot.0, pair);
            }
            None => {
                for slot in 0..MAX_RANKS as u8 {
                    if let Some((_, link)) = self.present_peer(slot) {
                        link.open();
                    }
                }
                self.p2p.state.lock().any_receives.push_back(receive);
            }
        }
        self.match_receives();
        operation
    }

    /// Announces the sends to a slot in their order.
    async fn announce_sends(self: Arc<Self>, slot: u8, failures: u64) {
        loop {
            let (send, message_taken, inline) = {
                let mut state = self.p2p.state.lock();
                let Some(pair) = state.pairs.get_mut(&slot).filter(|pair| pair.failures == failures) else {
                    return;
                };
                let message_taken = pair.message_taken.clone();
                if pair.announced.len() >= MAX_ANNOUNCED {
                    (None, message_taken, false)
                } else if let Some(send) = pair.sends.pop_front() {
                    let inline =
                        send.tensor.len <= inline_bytes() && pair.inline + send.tensor.len <= MAX_INLINE;
                    (Some(send), message_taken, inline)
                } else {
                    pair.is_announcing = false;
                    return;
                }
            };
            let Some(send) = send else {
                // A permit is kept if a message is taken between the look and this wait.
                message_taken.notified().await;
                continue;
            };
            self.announce_send(slot, failures, send, inline).await;
        }
    }

    async fn announce_send(self: &Arc<Self>, slot: u8, failures: u64, send: Outgoing, inline: bool) {
        let Outgoing { tensor, guard, pending, counted } = send;
        let max_len = if inline { 0 } else { tensor.len.max(inline_bytes() + 1) };
        let input = Input::whole(tensor);
        // SAFETY: the caller of `send` promises the buffer until `guard` is dropped.
        let source = unsafe { Source::stage(&self.plane, &input, max_len, None) }.await;
        let end = End { guard, pending, _counted: counted };
        let (payload, staged) = match source {
            Ok(Source::Private(bytes)) => (Payload::Inline(bytes), None),
            Ok(Source::Shared { staged, .. }) => {
                (Payload::Staged(staged.descriptor(0..tensor.len)), Some(staged))
            }
            Err(error) => return end.finish(Outcome::of_error(error)),
        };
        let (id, len) = (self.message_number(), tensor.len);
        let mut end = Some(end);
        {
            let mut state = self.p2p.state.lock();
            let pair = state.pairs.entry(slot).or_default();
            if pair.failures == failures {
                let inline = if staged.is_none() { len } else { 0 };
                let end = if len == 0 { None } else { end.take() };
                pair.inline += inline;
                pair.announced.insert(id, Announced { end, inline, staged });
            } else if let Some(end) = end.take() {
                drop(state);
                return end.finish(failed_with(slot, "it has failed meanwhile"));
            }
        }
        self.send_to(slot, Message::Send { id, payload });
        if let Some(end) = end {
            end.finish(Outcome::default());
        }
    }

    /// Takes an announced message.
    pub(super) fn take_sent(self: &Arc<Self>, slot: u8, id: u64, payload: Payload) {
        let exceeds_limit = {
            let mut state = self.p2p.state.lock();
            let pair = state.pairs.entry(slot).or_default();
            pair.arrived.push_back((id, payload));
            pair.steps += 1;
            pair.arrived.len() > MAX_ANNOUNCED
        };
        if exceeds_limit {
            return self.fail_pair(slot, "it announces more messages than agreed");
        }
        self.match_receives();
    }

    /// Matches announced messages with receives, in the order of both.
    fn match_receives(self: &Arc<Self>) {
        let mut state = self.p2p.state.lock();
        let State { pairs, any_receives } = &mut *state;
        for (slot, pair) in pairs.iter_mut() {
            while !pair.arrived.is_empty() {
                let Some(receive) = pair.receives.pop_front().or_else(|| any_receives.pop_front()) else {
                    break;
                };
                let Some((id, payload)) = pair.arrived.pop_front() else { break };
                pair.reading += 1;
                let (shared, slot) = (self.clone(), *slot);
                self.plane.driver.spawn(async move { shared.read_message(slot, id, payload, receive).await });
                self.watch(slot, pair);
            }
        }
    }

    async fn read_message(self: Arc<Self>, slot: u8, id: u64, payload: Payload, receive: Receive) {
        let Receive { tensor, end } = receive;
        let len = usize::try_from(payload.len()).unwrap_or(usize::MAX);
        let fits = len <= tensor.len;
        let result: Result<(), ReadError> = match (tensor.part(0..len), payload) {
            (None, _) => Err(too_long(slot, len, tensor.len).into()),
            (Some(place), Payload::Inline(bytes)) => {
                // SAFETY: the caller of `receive` promises the buffer until `guard` is dropped.
                unsafe { fill(place, &bytes) };
                Ok(())
            }
            (Some(place), Payload::Staged(descriptor)) => {
                // SAFETY: as above.
                unsafe { self.clone().read(slot, descriptor, place, end.guard.clone()) }.await
            }
        };
        {
            let mut state = self.p2p.state.lock();
            let pair = state.pairs.entry(slot).or_default();
            pair.reading = pair.reading.saturating_sub(1);
            pair.steps += 1;
        }
        self.send_to(slot, Message::Taken { id, success: result.is_ok() });
        match result {
            Ok(()) => {
                let source = Some(Slot(slot));
                end.finish(Outcome { source, ..Outcome::default() });
            }
            Err(ReadError::Failed(error)) if !fits => end.finish(Outcome::of_error(error)),
            // The sender counts this rank as failed, and lives.
            Err(ReadError::Withdrawn) => end.finish(failed_with(slot, "it has given the message up")),
            Err(error) => {
                tracing::info!(slot, %error, "cannot read the message of a rank");
                self.fail_pair_with(slot, "its data cannot be read", vec![end]);
            }
        }
    }

    /// Takes the acknowledgement of a message.
    pub(super) fn take_acknowledgement(self: &Arc<Self>, slot: u8, id: u64, success: bool) {
        if self.exchanges.take_acknowledgement(slot, id) {
            return;
        }
        let (announced, message_taken) = {
            let mut state = self.p2p.state.lock();
            let Some(pair) = state.pairs.get_mut(&slot) else { return };
            let Some(announced) = pair.announced.remove(&id) else { return };
            pair.inline -= announced.inline;
            pair.steps += 1;
            (announced, pair.message_taken.clone())
        };
        message_taken.notify_one();
        let Announced { end, staged, .. } = announced;
        drop(staged);
        if let Some(end) = end {
            let outcome = match success {
                true => Outcome::default(),
                false => Outcome::of_error(Error::invalid(format!(
                    "cannot send message: the receiver has less space. slot={slot}"
                ))),
            };
            // The end may start other operations, which take messages. The lock of the messages of
            // this peer is held here.
            match is_planted("pg-callback-runs-under-a-lock") {
                true => end.finish(outcome),
                false => self.plane.driver.spawn(async move { end.finish(outcome) }),
            }
        }
    }

    /// Starts the task that examines a slot after each timeout without progress.
    fn watch(self: &Arc<Self>, slot: u8, pair: &mut Pair) {
        if !std::mem::replace(&mut pair.is_watched, true) {
            let (shared, failures) = (Arc::downgrade(self), pair.failures);
            self.plane.runtime.spawn(async move {
                loop {
                    let Some(timeout) = shared.upgrade().map(|shared| shared.plane.timeouts.p2p()) else {
                        return;
                    };
                    let steps = shared.upgrade().and_then(|shared| shared.steps(slot, failures));
                    let Some(steps) = steps else { return };
                    tokio::time::sleep(timeout.max(std::time::Duration::from_millis(10))).await;
                    let Some(shared) = shared.upgrade() else { return };
                    // As in `Executor::probe_slots`.
                    shared.plane.driver.poll_messages();
                    match shared.steps(slot, failures) {
                        None => return,
                        Some(current) if current != steps => {}
                        Some(_) => {
                            // The news may have come between the check of a call and its start.
                            let has_left = shared.has_left(slot);
                            let reason = match has_left {
                                true => "it has closed its communicator",
                                false => "its process does not respond",
                            };
                            if (has_left || !shared.responds(slot).await)
                                && shared.steps(slot, failures) == Some(steps)
                            {
                                return shared.fail_pair(slot, reason);
                            }
                        }
                    }
                }
            });
        }
    }

    /// Returns the progress of a slot, or `None` if there is nothing to watch any more.
    fn steps(&self, slot: u8, failures: u64) -> Option<u64> {
        let mut state = self.p2p.state.lock();
        let pair = state.pairs.get_mut(&slot)?;
        if pair.failures != failures {
            return None;
        }
        if pair.is_idle() {
            pair.is_watched = false;
            return None;
        }
        Some(pair.steps)
    }

    /// Ends all operations with a slot.
    pub(super) fn fail_pair(self: &Arc<Self>, slot: u8, reason: &'static str) {
        self.fail_pair_with(slot, reason, Vec::new());
    }

    fn fail_pair_with(self: &Arc<Self>, slot: u8, reason: &'static str, mut ends: Vec<End>) {
        let mut dropped = Vec::new();
        {
            let mut state = self.p2p.state.lock();
            if let Some(pair) = state.pairs.get_mut(&slot) {
                let Pair { sends, announced, receives, failures, message_taken, reading, .. } =
                    std::mem::take(pair);
                // Reads in progress end by themselves, with their own failures.
                *pair = Pair { failures: failures + 1, reading, ..Pair::default() };
                message_taken.notify_one();
                ends.extend(sends.into_iter().map(|Outgoing { guard, pending, counted, .. }| End {
                    guard,
                    pending,
                    _counted: counted,
                }));
                for Announced { end, staged, .. } in announced.into_values() {
                    ends.extend(end);
                    dropped.extend(staged);
                }
                ends.extend(receives.into_iter().map(|receive| receive.end));
            }
        }
        drop(dropped);
        if ends.is_empty() {
            return;
        }
        tracing::info!(slot, reason, operations = ends.len(), "point-to-point operations failed");
        if self.is_closing() {
            return ends.into_iter().for_each(|end| end.finish(Outcome::of_error(closed())));
        }
        self.report_failure(slot);
        let shared = self.clone();
        self.plane.runtime.spawn(async move {
            if shared.options.syncs_after_failure {
                let outcome = shared.membership.sync_after_failure().await;
                tracing::debug!(?outcome, "failure reconciled");
            }
            ends.into_iter().for_each(|end| end.finish(failed_with(slot, reason)));
        });
    }

    fn report_failure(&self, slot: u8) {
        let incarnation = {
            let inbox = self.inbox.lock();
            let present = inbox.members[usize::from(slot)].present.as_ref();
            present.filter(|_| inbox.departed() >> slot & 1 == 0).map(|(incarnation, ..)| *incarnation)
        };
        if let Some(incarnation) = incarnation {
            self.membership.report(Slot(slot), incarnation, Evidence::Failure);
        }
    }

    /// Ends all operations because the communicator is closed.
    pub(super) fn fail_all_pairs(self: &Arc<Self>) {
        for slot in 0..MAX_RANKS as u8 {
            self.fail_pair(slot, "the communicator is closed");
        }
        let any_receives = std::mem::take(&mut self.p2p.state.lock().any_receives);
        any_receives.into_iter().for_each(|receive| receive.end.finish(Outcome::of_error(closed())));
    }
}

pub(super) fn failed_with(slot: u8, reason: &'static str) -> Outcome {
    let text = format!("cannot finish operation: the other rank failed: {reason}. slot={slot}");
    Outcome { failed: 1 << slot, ..Outcome::of_error(Error::new(ErrorCode::TransferFail, text)) }
}

fn too_long(slot: u8, len: usize, space: usize) -> Error {
    Error::invalid(format!(
        "cannot receive message: it is longer than the tensor. slot={slot} len={len} space={space}"
    ))
}
