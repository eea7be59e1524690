//! Rounds of a communicator: the task that carries out its collective operations, and agrees with
//! the other participants on who takes part.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode};
use tokio::sync::{mpsc, watch};
use tokio::time::{Sleep, sleep};

use super::counted::Counted;
use super::shared::{Shared, not_active};
use crate::call::{Collective, bits};
use crate::message::{Envelope, Message, Progress, Round, Tag};
use crate::operation::{Outcome, Pending, closed};
use crate::staging::MemoryGuard;
use crate::view::{Evidence, MAX_RANKS, MemberState, Slot, View};

/// Collective call that waits for its turn.
pub(super) struct Call {
    pub(super) collective: Collective,
    pub(super) guard: MemoryGuard,
    pub(super) pending: Pending,
    pub(super) _counted: Counted,
}

/// Task of a communicator.
pub(super) struct Executor {
    pub(super) shared: Arc<Shared>,
    views: watch::Receiver<Option<Arc<View>>>,
    /// View of the round. `None` while this rank is alone.
    view: Option<Arc<View>>,
    /// Active slots of the view.
    active: u64,
    pub(super) round: Round,
    /// Number of the next operation. `None` until the participants have announced it.
    next: Option<u64>,
    /// Round in which the last operation was finished, unless this rank was left out of it.
    finished: Option<Round>,
    /// Slots that did not respond within the timeout, and have sent nothing since.
    unresponsive: u64,
    /// True if the next operation needs a new round.
    is_stale: bool,
    /// True while an operation is in progress.
    is_busy: bool,
    /// Slots whose loss does not count as a failure of the present operation.
    pub(super) settled: u64,
    /// Slots whose failure was seen during the present operation.
    pub(super) failed: u64,
    /// Slots that the last operation has named as failed.
    reported_failed: u64,
    /// Slots that have failed since, and have left the active set before an operation has seen it.
    unreported_failed: u64,
    /// Pauses of this process which the present round takes into account.
    pauses: u64,
    /// Last evidence that was reported about each slot.
    reported: [Option<Evidence>; MAX_RANKS],
}

/// Result of an attempt to agree on a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Agreement {
    /// Every participant has entered the round.
    Reached,
    /// Another participant has finished the operation in the round in which this one was ready.
    Finished,
    /// The others go on, or have gone on, without this rank.
    Excluded,
    /// The view has this rank no longer.
    Inactive,
    /// The communicator is closed.
    Closed,
}

/// Reason to repeat an operation.
#[derive(Debug)]
pub(super) struct Interrupted;

/// Time limit that starts again with each step of progress.
pub(super) struct ProgressTimeout {
    sleep: Pin<Box<Sleep>>,
    limit: Duration,
}

impl ProgressTimeout {
    pub(super) fn new(limit: Duration) -> Self {
        Self { sleep: Box::pin(sleep(limit)), limit }
    }

    pub(super) fn restart(&mut self) {
        self.sleep.set(sleep(self.limit));
    }

    pub(super) async fn end(&mut self) {
        self.sleep.as_mut().await;
    }
}

impl Executor {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let pauses = shared.plane.pauses.count();
        Self {
            pauses,
            views: shared.views.clone(),
            shared,
            view: None,
            active: 0,
            round: Round::default(),
            next: None,
            finished: None,
            unresponsive: 0,
            is_stale: false,
            is_busy: false,
            settled: 0,
            failed: 0,
            reported_failed: 0,
            unreported_failed: 0,
            reported: [None; MAX_RANKS],
        }
    }

    /// Carries out the calls until the communicator is closed.
    pub(super) async fn run(mut self, mut calls: mpsc::Receiver<Call>) {
        self.views.mark_changed();
        loop {
            self.reconcile();
            if self.shared.is_closing() {
                break;
            }
            tokio::select! {
                call = calls.recv() => match call {
                    Some(call) => self.run_call(call).await,
                    None => break,
                },
                () = self.wake() => {}
            }
        }
        // The remaining calls end with an error.
        calls.close();
        while let Ok(call) = calls.try_recv() {
            call.pending.finish(Outcome::of_error(closed()));
        }
    }

    /// Waits for a message or a view.
    async fn wake(&mut self) {
        let (shared, views) = (&self.shared, &mut self.views);
        tokio::select! {
            () = shared.changed.notified() => {}
            change = views.changed() => if change.is_err() {
                // Views do not change any more.
                shared.changed.notified().await;
            },
        }
    }

    /// Waits for a message, a view, or the end of patience. In the last case the slots that this
    /// rank waits for are examined.
    pub(super) async fn wait_for(&mut self, slots: u64, progress_timeout: &mut ProgressTimeout) {
        self.shared.plane.driver.set_expected(slots.count_ones());
        let expired = tokio::select! {
            () = self.wake() => false,
            () = progress_timeout.end() => true,
        };
        if expired {
            self.probe_slots(slots).await;
            progress_timeout.restart();
        }
    }

    /// Asks whether the processes of the slots respond. A slot without a response is absent from
    /// now on.
    async fn probe_slots(&mut self, slots: u64) {
        // A process that was stopped after its message and before its notice silences the others.
        self.shared.plane.driver.poll_messages();
        let shared = &self.shared;
        let probes = bits(slots).map(|slot| async move { (slot, shared.responds(slot).await) });
        for (slot, is_alive) in join_all(probes).await {
            if !is_alive {
                tracing::info!(slot, "rank does not respond");
                self.unresponsive |= 1 << slot;
            }
        }
        // Progress may be repeated at any time.
        self.announce();
    }

    fn own_bit(&self) -> u64 {
        self.shared.own_bit()
    }

    /// Returns the participants of the present round. Without a view, this rank alone.
    pub(super) fn members(&self) -> u64 {
        match self.view {
            Some(_) => self.active & !self.round.absent,
            None => self.own_bit(),
        }
    }

    pub(super) fn peers(&self) -> u64 {
        self.members() & !self.own_bit()
    }

    /// Returns the tag of the present operation in the present round.
    pub(super) fn tag(&self, call: u64) -> Tag {
        Tag { operation: self.next.unwrap_or(0), round: self.round, call }
    }

    /// Takes over the view, the rounds of other participants, and failures. Does not wait.
    pub(super) fn reconcile(&mut self) {
        self.shared.apply_view();
        let before = self.active;
        let mut is_new = self.take_view();
        let dismissed = before & !self.active;
        if self.view.is_none() {
            return;
        }
        let own = self.own_bit();
        let (mut lost, departed);
        {
            let mut inbox = self.shared.inbox.lock();
            self.unresponsive &= !std::mem::take(&mut inbox.recently_active);
            for slot in bits(self.active & !own) {
                let Some(remote) = inbox.members[usize::from(slot)].progress.map(|progress| progress.round)
                else {
                    continue;
                };
                // The opinion of an absent participant does not count, nor does that of a
                // participant in another view.
                let is_absent = self.round.absent >> slot & 1 != 0;
                let is_older = remote.number <= self.round.number;
                if remote.mask != self.round.mask || is_absent && (self.is_busy || is_older) {
                    continue;
                }
                if remote.number > self.round.number {
                    self.round = remote;
                    is_new = true;
                } else if remote.number == self.round.number && remote.absent & !self.round.absent != 0 {
                    self.round.absent |= remote.absent;
                    is_new = true;
                }
            }
            (lost, departed) = (inbox.lost | inbox.left, inbox.departed());
        }
        lost = (lost | self.unresponsive) & self.active & !own & !self.round.absent;
        let failed = if self.is_busy { lost & !self.settled } else { 0 };
        self.is_stale |= lost != failed;
        if failed != 0 {
            self.round.absent |= failed;
            self.failed |= failed;
            self.report(failed & !departed, Evidence::Failure);
            is_new = true;
        }
        if is_new {
            self.announce_to(self.active | dismissed);
        }
    }

    /// Takes over a new view. Returns whether its mask is new.
    fn take_view(&mut self) -> bool {
        let Some(view) = self.views.borrow_and_update().clone() else { return false };
        let known = self.view.as_ref();
        if known.is_some_and(|known| (known.generation, known.mask) == (view.generation, view.mask)) {
            self.view = Some(view);
            return false;
        }
        let before = std::mem::replace(&mut self.active, 0);
        self.active = view.active().fold(0, |active, slot| active | 1 << slot.0);
        // The endpoint of a slot is withdrawn with a failure, and stays after a proposal.
        let has_failed = |slot: &u8| {
            let member = view.members.get(usize::from(*slot));
            member.is_some_and(|member| member.state == MemberState::Inactive && member.endpoint.is_none())
        };
        let failed =
            bits(before & !self.active).filter(has_failed).fold(0, |failed, slot| failed | 1 << slot);
        self.unreported_failed |= failed & !(self.reported_failed | self.failed | self.round.absent);
        self.unreported_failed &= !self.active;
        self.reported_failed &= !(self.active & !before);
        self.round = Round { mask: view.mask, number: 0, absent: 0 };
        (self.unresponsive, self.is_stale) = (0, false);
        self.reported = [None; MAX_RANKS];
        let rejoins = self.shared.rejoins.swap(false, Ordering::SeqCst);
        if rejoins || self.active & self.own_bit() == 0 {
            // When this rank is active again, the others know the number.
            (self.next, self.finished) = (None, None);
            self.unreported_failed = 0;
        }
        self.view = Some(view);
        true
    }

    /// Sends the progress to all active slots, absent ones included.
    fn announce(&self) {
        self.announce_to(self.active);
    }

    /// Sends the progress to slots, and to the processes that the view has removed. A process that
    /// was stopped learns by it that the others go on without it.
    fn announce_to(&self, slots: u64) {
        let removed = std::mem::take(&mut self.shared.inbox.lock().removed);
        if self.active & self.own_bit() == 0 {
            return;
        }
        let progress = Progress { round: self.round, next: self.next, finished: self.finished };
        for (communicator, link) in removed.into_iter().filter(|(_, link)| link.is_open()) {
            let (slot, message) = (self.shared.own.0, Message::Progress(progress));
            link.send(&Envelope { communicator, slot, message });
        }
        for slot in bits(slots & !self.own_bit()) {
            self.shared.send_to(slot, Message::Progress(progress));
        }
    }

    /// Reports evidence about slots, unless it is what was reported last.
    fn report(&mut self, slots: u64, evidence: Evidence) {
        let Some(view) = &self.view else { return };
        for slot in bits(slots) {
            let reported = &mut self.reported[usize::from(slot)];
            if let Some(member) = view.members.get(usize::from(slot))
                && reported.replace(evidence) != Some(evidence)
            {
                self.shared.membership.report(Slot(slot), member.incarnation, evidence);
            }
        }
    }

    /// Returns whether the attempt in `round` cannot end any more.
    pub(super) fn is_interrupted(&mut self, round: Round) -> bool {
        self.reconcile();
        if self.shared.is_closing() || self.round != round {
            return true;
        }
        let inbox = self.shared.inbox.lock();
        bits(self.peers()).any(|slot| {
            inbox.members[usize::from(slot)]
                .progress
                .is_some_and(|remote| remote.round.mask > round.mask || remote.next > self.next)
        })
    }

    /// Returns whether a participant has left `round`, before it had finished the present
    /// operation, for a round that perhaps lacks this rank. The others do not wait for this rank
    /// then. So this rank must not finish the operation in `round`.
    pub(super) fn is_abandoned(&self, round: Round) -> bool {
        if is_planted("pg-abandoned-round-is-finished") {
            return false;
        }
        let inbox = self.shared.inbox.lock();
        bits(self.peers()).filter_map(|slot| inbox.members[usize::from(slot)].progress).any(|remote| {
            let has_finished =
                remote.finished == Some(round) && remote.next == self.next.map(|next| next + 1);
            let is_same_mask = remote.round.mask == round.mask && remote.round.number >= round.number;
            let is_without = is_same_mask && remote.round.absent & self.own_bit() != 0;
            !has_finished && (remote.round.mask > round.mask || is_without)
        })
    }

    /// Returns whether this process was stopped since the last call. The others may then have left
    /// this rank out, in a message that is still on its way.
    fn was_stopped(&mut self) -> bool {
        let before = std::mem::replace(&mut self.pauses, self.shared.plane.pauses.count());
        before != self.pauses && !is_planted("pg-stopped-rank-asks-nobody")
    }

    /// Begins a new round if this process was stopped in the present operation, and returns whether
    /// it was. Each participant then enters the new round, or has finished the operation, or has
    /// left this rank out, and says so.
    pub(super) fn begin_round_after_pause(&mut self) -> bool {
        if !self.was_stopped() || self.view.is_none() {
            return false;
        }
        self.round.number += 1;
        self.announce();
        true
    }

    /// Waits until every participant has entered the present round. `ready` is the round in which
    /// this rank has all data of the present operation.
    pub(super) async fn agree(&mut self, ready: Option<Round>) -> Agreement {
        let mut progress_timeout = ProgressTimeout::new(self.shared.plane.timeouts.collective());
        let mut last_missing = 0;
        loop {
            self.reconcile();
            if self.shared.is_closing() {
                return Agreement::Closed;
            }
            if self.view.is_none() {
                return Agreement::Reached;
            }
            if self.active & self.own_bit() == 0 {
                return Agreement::Inactive;
            }
            // Participants that are behind do not need this rank yet.
            let is_absent = self.round.absent & self.own_bit() != 0;
            if is_absent && (self.peers() == 0 || self.highest_next() >= self.next) {
                return Agreement::Excluded;
            }
            let missing = match if is_absent { Err(0) } else { self.compare_progress(ready) } {
                Ok(agreement) => return agreement,
                Err(missing) => missing,
            };
            if missing != last_missing {
                progress_timeout.restart();
                last_missing = missing;
            }
            self.wait_for(missing, &mut progress_timeout).await;
        }
    }

    /// Returns the highest number of a next operation among the other active slots.
    fn highest_next(&self) -> Option<u64> {
        let inbox = self.shared.inbox.lock();
        let progress = |slot: u8| inbox.members[usize::from(slot)].progress;
        bits(self.active & !self.own_bit()).filter_map(progress).filter_map(|remote| remote.next).max()
    }

    /// Compares the progress of the participants.
    ///
    /// # Errors
    /// The participants that have not entered the round yet.
    fn compare_progress(&mut self, ready: Option<Round>) -> Result<Agreement, u64> {
        let (mut missing, mut skipped, mut highest) = (0u64, 0u64, self.next);
        let mut finished = false;
        {
            let inbox = self.shared.inbox.lock();
            for slot in bits(self.peers()) {
                let Some(remote) = inbox.members[usize::from(slot)].progress else {
                    missing |= 1 << slot;
                    continue;
                };
                if remote.round != self.round {
                    missing |= 1 << slot;
                }
                // A participant that was left out of the present operation waits for the next one.
                if self.next.is_some() && remote.next > self.next && remote.finished.is_none() {
                    skipped |= 1 << slot;
                    continue;
                }
                highest = highest.max(remote.next);
                let is_forgotten = is_planted("pg-finished-rank-is-not-asked");
                finished |= !is_forgotten
                    && remote.next == self.next.map(|next| next + 1)
                    && remote.finished.is_some_and(|round| Some(round) == ready);
            }
        }
        match (self.next, highest) {
            (Some(next), Some(highest)) if highest > next => {
                Ok(if finished && highest == next + 1 { Agreement::Finished } else { Agreement::Excluded })
            }
            _ if skipped != 0 => {
                self.round.absent |= skipped;
                self.announce();
                Err(self.peers())
            }
            _ if missing != 0 => Err(missing),
            _ => {
                self.next = Some(highest.unwrap_or(0));
                Ok(Agreement::Reached)
            }
        }
    }

    /// Begins a new round if failures were seen since the present one began.
    fn renew_round(&mut self) {
        if self.view.is_none() || !(self.is_stale || self.round.absent != 0) {
            return;
        }
        let departed_slots = {
            let mut inbox = self.shared.inbox.lock();
            inbox.lost = 0;
            inbox.left | self.unresponsive
        };
        self.is_stale = false;
        self.round.number += 1;
        self.round.absent = departed_slots & self.active & !self.own_bit();
        self.announce();
    }

    /// Records the end of the present operation, and drops its messages.
    /// `round` is `None` if this rank is left out.
    pub(super) fn finish(&mut self, round: Option<Round>) {
        if self.view.is_none() {
            return;
        }
        let next = self.next.map_or(1, |next| next + 1);
        (self.next, self.finished) = (Some(next), round);
        let mut inbox = self.shared.inbox.lock();
        for slot in bits(std::mem::take(&mut inbox.pending_slots)) {
            let member = &mut inbox.members[usize::from(slot)];
            member.offers.retain(|offer| offer.tag.operation >= next);
            member.ready.retain(|(tag, _)| tag.operation >= next);
            let is_empty = member.offers.is_empty() && member.ready.is_empty();
            inbox.pending_slots |= u64::from(!is_empty) << slot;
        }
    }

    /// Carries out one call.
    async fn run_call(&mut self, call: Call) {
        let Call { collective, guard, pending, _counted } = call;
        self.reconcile();
        self.failed = 0;
        self.is_stale |= self.was_stopped();
        self.renew_round();
        self.is_busy = true;
        let active = if self.view.is_some() { self.active } else { 0 };
        let end = match collective.is_empty() {
            true => Ok(()),
            // SAFETY: the caller of `start` promises the buffers until `guard` is dropped.
            false => unsafe { self.run_collective(&collective, &guard) }.await,
        };
        self.is_busy = false;
        let mut outcome = Outcome { failed: self.failed, ..Outcome::default() };
        match end {
            Ok(()) => {
                outcome.failed |= active & !self.members();
                let present = self.peers();
                self.report(present, Evidence::Success);
            }
            Err(error) => outcome.error = Some(error),
        }
        outcome.failed &= !self.own_bit();
        self.reported_failed = outcome.failed;
        if outcome.failed != 0 && self.shared.options.syncs_after_failure {
            self.sync().await;
        }
        // Every failure shows in one operation at least, also if the others were faster.
        outcome.failed |= std::mem::take(&mut self.unreported_failed);
        self.reported_failed = outcome.failed;
        self.failed = 0;
        self.shared.plane.pool.trim();
        drop(guard);
        pending.finish(outcome);
    }

    /// Waits for the end of the reconciliation window, and serves the other participants meanwhile.
    async fn sync(&mut self) {
        let membership = self.shared.membership.clone();
        let mut sync = membership.sync_after_failure();
        loop {
            self.reconcile();
            if self.shared.is_closing() {
                return;
            }
            tokio::select! {
                outcome = &mut sync => {
                    tracing::debug!(?outcome, "failure reconciled");
                    return self.reconcile();
                }
                () = self.wake() => {}
            }
        }
    }

    /// Returns the error of an operation that did not agree.
    pub(super) fn error_of(&mut self, agreement: Agreement) -> Error {
        match agreement {
            Agreement::Inactive => not_active(self.shared.own),
            Agreement::Closed => closed(),
            Agreement::Excluded | Agreement::Reached | Agreement::Finished => {
                self.failed |= self.active & !self.own_bit();
                // The others count this operation as well.
                self.finish(None);
                self.is_stale = true;
                Error::new(
                    ErrorCode::TransferFail,
                    format!(
                        "cannot finish collective: the other ranks left this one out. slot={}; \
                         call join_group, or start this rank again",
                        self.shared.own
                    ),
                )
            }
        }
    }

    /// Sends a message of the present operation to participants.
    pub(super) fn send_ready(&self, tag: Tag, success: bool, to: u64) {
        for slot in bits(to) {
            self.shared.send_to(slot, Message::Ready { tag, success });
        }
    }
}
