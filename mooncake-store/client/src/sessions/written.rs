//! Unwritten ranges of a reserved object, and writes that may still arrive in its space.
//!
//! A range counts as unwritten from before its transfers begin until a write of it has succeeded.
//! Calls are futures that callers may drop at any await. A dropped call does not stop its
//! transfers, so a task waits for their end. Only then can the range be written again with effect,
//! and only then can the space be returned. After a timeout the end is unknown, so the space is
//! left to the master.

use std::ops::Range;

use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use parking_lot::Mutex;

/// State of the writes of one reservation.
#[derive(Debug, Default)]
pub(super) struct Written(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    unwritten: Vec<Unwritten>,
    /// Number of the last step. The beginning and the end of a write are one step each.
    steps: u64,
    /// True if a write timed out, so that its bytes may arrive at any time.
    may_land: bool,
    /// True after a commit or a return of the space. Nothing may be written any more.
    closed: bool,
    /// True if the space is to be returned when no write is in progress.
    given_up: bool,
}

/// A range without a successful write.
#[derive(Debug)]
struct Unwritten {
    range: Range<u64>,
    /// Step at which the write began.
    begun: u64,
    /// Step at which the write ended without success. `None` while the write is in progress.
    ended: Option<u64>,
}

impl State {
    fn step(&mut self) -> u64 {
        self.steps += 1;
        self.steps
    }

    fn is_under_way(&self) -> bool {
        self.unwritten.iter().any(|range| range.ended.is_none())
    }
}

impl Written {
    pub(super) fn is_incomplete(&self) -> bool {
        let state = self.0.lock();
        state.may_land || !state.unwritten.is_empty()
    }

    /// Refuses all later writes, unless the object is incomplete.
    ///
    /// # Errors
    /// Returns the reason why the object is incomplete.
    pub(super) fn close_if_complete(&self) -> Result<(), &'static str> {
        let mut state = self.0.lock();
        if state.is_under_way() {
            return Err("a write of it is under way");
        }
        if state.may_land && !is_planted("session-ignores-late-writes") {
            return Err("a write of it timed out and may still land; give it back and reserve the key again");
        }
        if !state.unwritten.is_empty() {
            return Err("a part of it could not be written");
        }
        state.closed = true;
        Ok(())
    }

    /// Refuses all later writes. Returns whether the space can be returned now. If a write is in
    /// progress, the task that waits for its end returns the space.
    pub(super) fn give_up(&self) -> bool {
        let mut state = self.0.lock();
        state.closed = true;
        if is_planted("session-ignores-late-writes") {
            return true;
        }
        state.given_up = state.is_under_way();
        !state.may_land && !state.given_up
    }

    /// Records the beginning of a write. Returns its number, or `None` if nothing may be written
    /// any more.
    pub(super) fn begin(&self, range: Range<u64>) -> Option<u64> {
        let mut state = self.0.lock();
        if state.closed {
            return None;
        }
        let begun = state.step();
        state.unwritten.push(Unwritten { range, begun, ended: None });
        Some(begun)
    }

    /// Records the end of write `begun`. A successful write also replaces failed writes inside its
    /// range that had ended before it began.
    pub(super) fn end(&self, begun: u64, succeeded: bool, may_land: bool) {
        let mut state = self.0.lock();
        state.may_land |= may_land;
        let step = state.step();
        let Some(at) = state.unwritten.iter().position(|range| range.begun == begun) else { return };
        if !succeeded {
            state.unwritten[at].ended = Some(step);
            return;
        }
        let Range { start, end } = state.unwritten.swap_remove(at).range;
        state.unwritten.retain(|lost| {
            let before = lost.ended.is_some_and(|ended| ended < begun);
            !before || lost.range.start < start || lost.range.end > end
        });
    }

    /// Returns whether the space was given up during a write and can be returned now. Returns true
    /// only once.
    pub(super) fn take_given_up(&self) -> bool {
        let mut state = self.0.lock();
        let now = state.given_up && !state.is_under_way();
        state.given_up &= !now;
        now && !state.may_land
    }
}
