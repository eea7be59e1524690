//! Data of a collective operation: offers, copies, and reduction.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;

use bytes::Bytes;
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::{SliceMut, Target};

use super::executor::{Agreement, Executor, Interrupted, ProgressTimeout};
use super::transfer::{ReadError, Source, copy_out, fill, payload_of};
use crate::call::{Buffer, Collective, Fold, Place, Plan, bits, inline_bytes};
use crate::message::{Message, Payload, Round, StagedDescriptor, Tag};
use crate::staging::{MemoryGuard, SCRATCH_BYTES, Scratch, Staged};

/// Longest part of a tensor that is reduced at a time.
const FOLD_BYTES: usize = 256 << 10;

/// First and second part of the data of an operation.
const FIRST: u8 = 0;
const SECOND: u8 = 1;

/// Bytes that have arrived.
enum Arrived {
    Inline(Bytes),
    Staged(Staged),
}

/// Data of one attempt: the bytes that wait for the end of the operation, and what went wrong.
#[derive(Default)]
struct Attempt {
    /// Bytes that are written to the caller's memory when the operation is finished. So the memory
    /// gets all bytes of a participant, and no byte of a rank that has failed. Other participants
    /// may read them, too.
    writes: Vec<(Buffer, Arrived)>,
    /// Reduced block that only other participants read.
    reduced: Option<Staged>,
    /// True if all participants were ready, and this rank asks them whether they have left it out.
    was_agreed: bool,
    /// Fault of this rank that does not concern the others.
    local: Option<Error>,
    /// Fault because of which no participant can finish the operation properly.
    fault: Option<Error>,
}

/// Staged input of a reduction: the slot, the bytes and the process that has them.
type StagedInput = (u8, StagedDescriptor, Target<TransportSet>);

/// Transfer of the bytes of a slot: into their destination, or apart with their destination.
type PendingRead = Pin<Box<dyn Future<Output = (u8, Result<Option<(Buffer, Staged)>, ReadError>)> + Send>>;

impl Collective {
    /// Returns whether no rank has any byte to move, as far as one rank knows it of all.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Barrier | Self::AllToAll { .. } => false,
            Self::AllReduce { tensor, .. } | Self::Reduce { tensor, .. } | Self::Broadcast { tensor, .. } => {
                tensor.len == 0
            }
            Self::ReduceScatter { output, .. } | Self::Scatter { output, .. } => output.len == 0,
            Self::AllGather { input, .. } | Self::Gather { input, .. } => input.len == 0,
        }
    }
}

impl Executor {
    /// Carries out an operation: attempts in one round after the other, until all participants of a
    /// round are ready.
    ///
    /// # Errors
    /// The reason why this rank has no result.
    ///
    /// # Safety
    /// `guard` keeps the buffers of the call allocated, and nothing else uses them.
    pub(super) async unsafe fn run_collective(
        &mut self,
        call: &Collective,
        guard: &MemoryGuard,
    ) -> Result<()> {
        let mut source: Option<Source> = None;
        let own = self.shared.own.0;
        let digest = call.digest();
        // Slots may become active before the operation begins.
        let input = call.input(own, u64::MAX);
        let mut ready: Option<(Round, Attempt)> = None;
        loop {
            let agreement = self.agree(ready.as_ref().map(|(round, _)| *round)).await;
            let is_alone = self.peers() == 0 && !is_planted("pg-last-rank-repeats-alone");
            match (agreement, ready.take()) {
                // A participant has finished, or all were ready and no other one is left.
                (Agreement::Finished | Agreement::Reached, Some((round, attempt)))
                    if agreement == Agreement::Finished || is_alone && attempt.was_agreed =>
                {
                    self.finish(Some(round));
                    // SAFETY: promised by the caller.
                    return unsafe { attempt.complete() }.await;
                }
                (Agreement::Reached, _) => {}
                (other, _) => {
                    let error = self.error_of(other);
                    if let (Some(tensor), Some(source)) = (call.in_place(), &source) {
                        // SAFETY: the tensor is the input.
                        unsafe { source.restore(tensor) };
                    }
                    return Err(error);
                }
            }
            let plan = call.plan(own, self.members(), &input);
            let max_len = plan.offers.iter().map(|(_, range)| range.len()).max().unwrap_or(0);
            let staged = match source.take() {
                None => {
                    let unstaged = call.unstaged(own, &plan, &input);
                    // SAFETY: promised by the caller.
                    unsafe { Source::stage(&self.shared.plane, &input, max_len, unstaged) }.await
                }
                Some(mut source) => {
                    // SAFETY: as above.
                    unsafe { source.share(&self.shared.plane, max_len) }.await.map(|()| source)
                }
            };
            let tag = self.tag(digest);
            let mut attempt = Attempt::default();
            let end = match staged {
                Ok(staged) => {
                    let staged = source.insert(staged);
                    // SAFETY: promised by the caller.
                    unsafe { self.attempt(tag, &plan, staged, &mut attempt, guard) }.await
                }
                Err(error) => {
                    attempt.fault = Some(error);
                    Ok(())
                }
            };
            if end.is_err() {
                continue;
            }
            self.send_ready(tag, attempt.fault.is_none(), self.peers());
            match self.gather_ready(tag, &mut attempt).await {
                Ok(()) => {
                    self.finish(Some(tag.round));
                    // SAFETY: promised by the caller.
                    return unsafe { attempt.complete() }.await;
                }
                Err(Interrupted) => ready = Some((tag.round, attempt)),
            }
        }
    }

    /// Moves the data of an operation in one round.
    ///
    /// # Safety
    /// As for `run_collective`.
    async unsafe fn attempt(
        &mut self,
        tag: Tag,
        plan: &Plan,
        source: &Source,
        attempt: &mut Attempt,
        guard: &MemoryGuard,
    ) -> Result<(), Interrupted> {
        for (slot, range) in &plan.offers {
            let payload = source.payload(range.clone());
            self.shared.send_to(*slot, Message::Offer { tag, part: FIRST, payload });
        }
        match &plan.own {
            Some((range, Place::To(buffer))) if range.len() == buffer.len => {
                // SAFETY: the buffer is the caller's; the source is a copy, or the range does not
                // overlap with the buffer.
                unsafe { source.copy_to(range.clone(), buffer.as_ptr()) };
            }
            Some(_) => attempt.local = Some(does_not_fit(self.shared.own.0)),
            None => {}
        }
        if let Some(fold) = &plan.fold {
            // SAFETY: passed on.
            return unsafe { self.fold(tag, fold, source, attempt, guard) }.await;
        }
        // SAFETY: passed on.
        unsafe { self.gather(tag, FIRST, &plan.places, attempt, guard) }.await
    }

    /// Waits until every participant is ready.
    async fn gather_ready(&mut self, tag: Tag, attempt: &mut Attempt) -> Result<(), Interrupted> {
        let mut progress_timeout = ProgressTimeout::new(self.shared.plane.timeouts.collective());
        let mut last_missing = 0;
        loop {
            let mut missing = 0;
            let mut refused = None;
            let peers = self.peers();
            {
                let inbox = self.shared.inbox.lock();
                for slot in bits(peers) {
                    let ready = &inbox.members[usize::from(slot)].ready;
                    let remote = ready.iter().find(|(remote, _)| same_attempt(*remote, tag));
                    match remote {
                        None => missing |= 1u64 << slot,
                        Some((remote, success)) if !success || remote.call != tag.call => {
                            refused = Some(slot)
                        }
                        Some(_) => {}
                    }
                }
            }
            if let Some(slot) = refused
                && attempt.fault.is_none()
            {
                attempt.fault = Some(refused_by(slot));
            }
            // A participant may have finished and sent its next progress already. Its readiness
            // counts.
            let is_early = is_planted("pg-operation-ends-before-all-are-ready");
            if (missing == 0 || is_early) && self.round == tag.round && self.shared.plane.deliver_all() {
                // A rank that was stopped meanwhile may have been left out.
                if self.is_abandoned(tag.round) {
                    return Err(Interrupted);
                }
                attempt.was_agreed = self.begin_round_after_pause();
                return if attempt.was_agreed { Err(Interrupted) } else { Ok(()) };
            }
            // A participant that is ready may end as soon as it has finished: its loss does not
            // count as a failure of this operation.
            let counts = is_planted("pg-loss-of-a-ready-rank-is-a-failure");
            self.settled = if counts { 0 } else { peers & !missing };
            let is_interrupted = self.is_interrupted(tag.round);
            self.settled = 0;
            if is_interrupted {
                return Err(Interrupted);
            }
            if missing == 0 {
                // More messages are there.
                tokio::task::yield_now().await;
                continue;
            }
            if missing != last_missing {
                progress_timeout.restart();
                last_missing = missing;
            }
            self.wait_for(missing, &mut progress_timeout).await;
        }
    }

    /// Takes the offers of a part that have arrived from the slots.
    fn take_offers(&mut self, tag: Tag, part: u8, from: &mut u64) -> Result<Vec<(u8, Payload)>, Error> {
        let mut inbox = self.shared.inbox.lock();
        let mut offers = Vec::new();
        for slot in bits(self.peers()) {
            let member = &mut inbox.members[usize::from(slot)];
            let other_call = |remote: &Tag| same_attempt(*remote, tag) && remote.call != tag.call;
            if member.offers.iter().any(|offer| other_call(&offer.tag))
                || member
                    .ready
                    .iter()
                    .any(|(remote, success)| other_call(remote) || same_attempt(*remote, tag) && !success)
            {
                return Err(refused_by(slot));
            }
            if *from >> slot & 1 == 0 {
                continue;
            }
            let offer = member.offers.iter().position(|offer| offer.tag == tag && offer.part == part);
            if let Some(at) = offer {
                offers.push((slot, member.offers.swap_remove(at).payload));
                *from &= !(1 << slot);
            }
        }
        Ok(offers)
    }

    /// Waits for the offers of a part, and passes each to `take`, which may begin a transfer. No
    /// transfer is in progress at the end.
    async fn collect(
        &mut self,
        tag: Tag,
        part: u8,
        mut from: u64,
        attempt: &mut Attempt,
        mut take: impl FnMut(&mut Attempt, u8, Payload) -> Option<PendingRead> + Send,
    ) -> Result<(), Interrupted> {
        let mut reads: FuturesUnordered<PendingRead> = FuturesUnordered::new();
        let mut progress_timeout = ProgressTimeout::new(self.shared.plane.timeouts.collective());
        let end = loop {
            match self.take_offers(tag, part, &mut from) {
                Ok(offers) if !offers.is_empty() => {
                    progress_timeout.restart();
                    for (slot, payload) in offers {
                        reads.extend(take(attempt, slot, payload));
                    }
                }
                Ok(_) => {}
                Err(error) => attempt.fault = Some(error),
            }
            if attempt.fault.is_some() || from == 0 && reads.is_empty() {
                break Ok(());
            }
            if self.is_interrupted(tag.round) {
                break Err(Interrupted);
            }
            tokio::select! {
                Some((slot, result)) = reads.next(), if !reads.is_empty() => {
                    progress_timeout.restart();
                    match result {
                        Ok(None) => {}
                        Ok(Some((buffer, staged))) => attempt.writes.push((buffer, Arrived::Staged(staged))),
                        // The sender has left the round, and its progress will say so.
                        Err(ReadError::Withdrawn) => from |= 1 << slot,
                        Err(ReadError::Local(error)) => attempt.fault = Some(error),
                        Err(ReadError::Failed(error)) => {
                            tracing::info!(slot, %error, "cannot read the data of a rank");
                            self.shared.lose_slot(slot);
                            // This rank lacks data, and must not be ready in this round.
                            break Err(Interrupted);
                        }
                    }
                }
                () = self.wait_for(from, &mut progress_timeout) => {}
            }
        };
        // Nothing touches the caller's memory afterwards. Each transfer has a deadline.
        while reads.next().await.is_some() {}
        end
    }

    /// Copies the offers of a part to their destinations.
    ///
    /// # Safety
    /// As for `run_collective`.
    async unsafe fn gather(
        &mut self,
        tag: Tag,
        part: u8,
        places: &[(u8, Place)],
        attempt: &mut Attempt,
        guard: &MemoryGuard,
    ) -> Result<(), Interrupted> {
        let from = places.iter().fold(0, |from, (slot, _)| from | 1 << slot);
        let shared = self.shared.clone();
        let is_early = is_planted("pg-bytes-are-read-in-place");
        self.collect(tag, part, from, attempt, |attempt, slot, payload| {
            let place = places.iter().find(|(from, _)| *from == slot);
            match (place, payload) {
                (Some((_, Place::To(buffer))), payload) if payload.len() != buffer.len as u64 => {
                    attempt.local = Some(does_not_fit(slot));
                    None
                }
                (Some((_, Place::To(buffer))), Payload::Inline(bytes)) => {
                    attempt.writes.push((*buffer, Arrived::Inline(bytes)));
                    None
                }
                (Some((_, Place::To(buffer))), Payload::Staged(descriptor)) if part == FIRST && !is_early => {
                    let (buffer, read) =
                        (*buffer, shared.clone().read_to_staging(slot, descriptor, buffer.len));
                    Some(Box::pin(async move { (slot, read.await.map(|staged| Some((buffer, staged)))) }))
                }
                (Some((_, Place::To(buffer))), Payload::Staged(descriptor)) => {
                    // Every attempt writes all of a reduced tensor.
                    // SAFETY: promised by the caller; the destinations do not overlap.
                    let read = unsafe { shared.clone().read(slot, descriptor, *buffer, guard.clone()) };
                    Some(Box::pin(async move { (slot, read.await.map(|()| None)) }))
                }
                _ => {
                    attempt.local = Some(does_not_fit(slot));
                    None
                }
            }
        })
        .await
    }

    /// Reduces the offers of the first part, and moves the results in the second part.
    ///
    /// # Safety
    /// As for `run_collective`.
    async unsafe fn fold(
        &mut self,
        tag: Tag,
        fold: &Fold,
        source: &Source,
        attempt: &mut Attempt,
        guard: &MemoryGuard,
    ) -> Result<(), Interrupted> {
        let mut inputs: Vec<(u8, Payload)> = Vec::new();
        let len = fold.own.len();
        let peers = self.peers();
        self.collect(tag, FIRST, peers, attempt, |attempt, slot, payload| {
            if payload.len() == len as u64 {
                inputs.push((slot, payload));
            } else {
                attempt.fault = Some(refused_by(slot));
            }
            None
        })
        .await?;
        if attempt.fault.is_some() {
            return Ok(());
        }
        inputs.sort_unstable_by_key(|(slot, _)| *slot);
        if len <= inline_bytes() {
            let result = fold_inline(self.shared.own.0, fold, &inputs, source);
            for slot in &fold.receivers {
                let payload = Payload::Inline(result.clone());
                self.shared.send_to(*slot, Message::Offer { tag, part: SECOND, payload });
            }
            if let Some(Place::To(buffer)) = fold.result {
                attempt.writes.push((buffer, Arrived::Inline(result)));
            }
        } else {
            // SAFETY: passed on.
            unsafe { self.fold_staged(tag, fold, &inputs, source, attempt) }.await?;
            if attempt.fault.is_some() {
                return Ok(());
            }
        }
        // SAFETY: passed on.
        unsafe { self.gather(tag, SECOND, &fold.places, attempt, guard) }.await
    }

    /// Reduces staged inputs in parts that fit into scratch memory.
    ///
    /// # Safety
    /// As for `run_collective`.
    async unsafe fn fold_staged(
        &mut self,
        tag: Tag,
        fold: &Fold,
        inputs: &[(u8, Payload)],
        source: &Source,
        attempt: &mut Attempt,
    ) -> Result<(), Interrupted> {
        let len = fold.own.len();
        let prepared = async {
            let deadline = self.shared.transfer_deadline(0);
            let mut targets = Vec::with_capacity(inputs.len());
            for (slot, payload) in inputs {
                let Payload::Staged(descriptor) = payload else { return Err(refused_by(*slot)) };
                targets.push((*slot, *descriptor, self.shared.target(*slot, deadline).await));
            }
            let staged = match fold.receivers.is_empty() {
                true => None,
                false => Some(self.shared.plane.pool.allocate(len).await?),
            };
            Ok((targets, staged, self.shared.plane.pool.scratch()?))
        };
        let (targets, staged, scratch) = match prepared.await {
            Ok(prepared) => prepared,
            Err(error) => {
                attempt.fault = Some(error);
                return Ok(());
            }
        };
        let mut open: Vec<StagedInput> = Vec::with_capacity(targets.len());
        for (slot, descriptor, target) in targets {
            match target {
                Ok(target) => open.push((slot, descriptor, target)),
                Err(error) => {
                    tracing::info!(slot, %error, "cannot reach the data of a rank");
                    self.shared.lose_slot(slot);
                }
            }
        }
        if open.len() < inputs.len() {
            return Err(self.interruption(tag.round, 0).await);
        }
        // One part for each input and the result.
        let count = open.len() + 1;
        let part = (SCRATCH_BYTES / count).min(FOLD_BYTES) & !63;
        for from in (0..len).step_by(part) {
            let size = part.min(len - from);
            let read = self.read_parts(&open, from, size, &scratch).await;
            let parts = match read {
                Ok(parts) => parts,
                Err(error) => {
                    attempt.fault = Some(error);
                    return Ok(());
                }
            };
            if self.is_interrupted(tag.round) {
                return Err(Interrupted);
            }
            // A transfer has failed.
            let Some(parts) = parts else { return Err(self.interruption(tag.round, 0).await) };
            let at = open.iter().position(|(slot, ..)| *slot > self.shared.own.0).unwrap_or(open.len());
            // SAFETY: passed on.
            unsafe { fold_parts(fold, parts, at, from..from + size, source, staged.as_ref()) };
            tokio::task::yield_now().await;
        }
        let invalid = self.check_inputs(&open).await;
        if invalid != 0 {
            return Err(self.interruption(tag.round, invalid).await);
        }
        if let Some(staged) = staged {
            for slot in &fold.receivers {
                let payload = payload_of(&staged, 0..len);
                self.shared.send_to(*slot, Message::Offer { tag, part: SECOND, payload });
            }
            match fold.result {
                Some(Place::To(buffer)) => attempt.writes.push((buffer, Arrived::Staged(staged))),
                _ => attempt.reduced = Some(staged),
            }
        }
        Ok(())
    }

    /// Checks that the inputs were read as announced. Returns the slots of the others.
    async fn check_inputs(&self, inputs: &[StagedInput]) -> u64 {
        let checks = inputs.iter().map(|(_, descriptor, target)| self.shared.check(target, descriptor));
        let mut invalid = 0;
        for ((slot, ..), result) in inputs.iter().zip(join_all(checks).await) {
            if let Err(error) = result {
                invalid |= 1 << slot;
                if let ReadError::Failed(error) | ReadError::Local(error) = error {
                    tracing::info!(slot, %error, "cannot read the data of a rank");
                    self.shared.lose_slot(*slot);
                }
            }
        }
        invalid
    }

    /// Waits for the end of a round in which this rank lacks data of the slots.
    async fn interruption(&mut self, round: Round, slots: u64) -> Interrupted {
        let mut progress_timeout = ProgressTimeout::new(self.shared.plane.timeouts.collective());
        while !self.is_interrupted(round) {
            self.wait_for(slots, &mut progress_timeout).await;
        }
        Interrupted
    }

    /// Reads a part of each input into scratch memory. The last part is for the result. Returns
    /// `None` if a transfer failed.
    ///
    /// # Errors
    /// The errors of the scratch memory.
    async fn read_parts(
        &self,
        inputs: &[StagedInput],
        from: usize,
        size: usize,
        scratch: &Scratch,
    ) -> Result<Option<Vec<SliceMut<TransportSet>>>> {
        // SAFETY: the ranges of the last call are dropped.
        let mut parts = unsafe { scratch.split(size, inputs.len() + 1) }?;
        let rest = parts.split_off(inputs.len());
        let engine = &self.shared.plane.engine;
        let deadline = self.shared.transfer_deadline(size);
        let reads = inputs.iter().zip(parts).map(|((_, descriptor, target), sink)| {
            engine.read(target, descriptor.address + from as u64, sink, Some(deadline))
        });
        let mut parts = Vec::with_capacity(inputs.len() + 1);
        let mut all = true;
        for ((slot, ..), (result, sink)) in inputs.iter().zip(join_all(reads).await) {
            if let Err(error) = result {
                tracing::info!(slot, %error, "cannot read the data of a rank");
                self.shared.lose_slot(*slot);
                all = false;
            }
            parts.push(sink);
        }
        parts.extend(rest);
        Ok(all.then_some(parts))
    }
}

/// Reduces one part of a tensor, into the staging memory of the result, or else into its
/// destination. `parts` has the inputs of the other participants in ascending order, between which
/// the own input is number `at`, and a part for a result without a destination.
///
/// # Safety
/// The parts are ranges of scratch memory of the length of `range`. The destination of the result
/// is writable, no other code reads it, and it does not overlap with the own input.
unsafe fn fold_parts(
    fold: &Fold,
    mut parts: Vec<SliceMut<TransportSet>>,
    at: usize,
    range: Range<usize>,
    source: &Source,
    staged: Option<&Staged>,
) {
    let Some(unused) = parts.pop() else { return };
    let pointer =
        |part: &SliceMut<TransportSet>| std::ptr::with_exposed_provenance_mut::<u8>(part.addr() as usize);
    let size = range.len();
    let place = match fold.result {
        Some(Place::To(buffer)) => buffer.part(range.clone()),
        _ => None,
    };
    let out = match (staged, place) {
        (Some(staged), _) => staged.part(range.clone()),
        (None, Some(place)) => place.as_ptr(),
        (None, None) => pointer(&unused),
    };
    // SAFETY: scratch memory is private to this process, and these are the only ranges of it in
    // use. They do not overlap. No other code uses the result, as promised by the caller, and
    // nothing writes the own input.
    unsafe {
        let mut inputs: Vec<&[u8]> =
            parts.iter().map(|part| std::slice::from_raw_parts(pointer(part).cast_const(), size)).collect();
        inputs.insert(at, source.bytes(fold.own.start + range.start..fold.own.start + range.end));
        fold.reduction.apply(&inputs, std::slice::from_raw_parts_mut(out, size));
    }
}

/// Reduces inputs that have come in messages.
fn fold_inline(own: u8, fold: &Fold, inputs: &[(u8, Payload)], source: &Source) -> Bytes {
    let mut own_input = vec![0; fold.own.len()];
    // SAFETY: as long as the range.
    unsafe { source.copy_to(fold.own.clone(), own_input.as_mut_ptr()) };
    let mut slices: Vec<&[u8]> = Vec::with_capacity(inputs.len() + 1);
    let at = inputs.iter().position(|(slot, _)| *slot > own).unwrap_or(inputs.len());
    for (_, payload) in inputs {
        // Inputs of this length are never staged; the caller has checked the length.
        if let Payload::Inline(bytes) = payload {
            slices.push(bytes);
        }
    }
    let mut result = vec![0; fold.own.len()];
    slices.insert(at.min(slices.len()), &own_input);
    fold.reduction.apply(&slices, &mut result);
    result.into()
}

impl Attempt {
    /// Writes the remaining bytes of the result.
    ///
    /// # Errors
    /// The fault of the attempt.
    ///
    /// # Safety
    /// The destinations are writable.
    async unsafe fn complete(self) -> Result<()> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        for (buffer, arrived) in self.writes {
            match arrived {
                // SAFETY: promised by the caller.
                Arrived::Inline(bytes) => unsafe { fill(buffer, &bytes) },
                // SAFETY: as above.
                Arrived::Staged(staged) => unsafe { copy_out(&staged, buffer) }.await,
            }
        }
        self.local.map_or(Ok(()), Err)
    }
}

fn same_attempt(remote: Tag, own: Tag) -> bool {
    (remote.operation, remote.round) == (own.operation, own.round)
}

fn does_not_fit(slot: u8) -> Error {
    Error::invalid(format!(
        "cannot finish collective: the data of a slot does not have the length of its buffer. slot={slot}"
    ))
}

fn refused_by(slot: u8) -> Error {
    Error::new(
        ErrorCode::InvalidParams,
        format!(
            "cannot finish collective: another rank called another operation, or cannot continue. \
             slot={slot}; make the same calls with the same sizes on every rank"
        ),
    )
}
