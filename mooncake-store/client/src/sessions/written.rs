//! Ranges of a reserved object with and without a successful write, and writes that may still
//! arrive in its space.
//!
//! A range counts as unwritten from before its transfers begin until a write of it has succeeded.
//! Calls are futures that callers may drop at any await. A dropped call does not stop its
//! transfers, so a task waits for their end. Only then can the range be written again with effect,
//! and only then can the space be returned. After a timeout the end is unknown, so the space is
//! left to the master.

use std::ops::Range;
use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::MemoryLocation;
use mooncake_transport::engine::LookUps;
use parking_lot::Mutex;

use super::coverage::Coverage;
use crate::attempt::Attempt;

/// State of the writes of one reservation.
#[derive(Debug)]
pub(super) struct Written(Mutex<WriteState>);

/// Space that the master has granted for an object.
#[derive(Debug)]
pub(super) struct GrantedSpace {
    pub(super) replicas: Vec<MemoryLocation>,
    pub(super) attempt: Attempt,
    /// Look-ups that the engine had made before the master was last asked for the space.
    pub(super) look_ups: LookUps,
}

/// Begun write: its number, and the space that it writes to.
pub(super) type StartedWrite = (u64, Arc<GrantedSpace>);

#[derive(Debug)]
struct WriteState {
    space: Arc<GrantedSpace>,
    /// Ranges of writes that have succeeded. With any, the space can no longer be replaced.
    covered: Coverage,
    /// True while the space is replaced. No write begins meanwhile.
    moves: bool,
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
    /// Number of the write: the step at which it began.
    number: u64,
    /// Step at which the write ended without success. `None` while the write is in progress.
    ended: Option<u64>,
}

impl WriteState {
    fn step(&mut self) -> u64 {
        self.steps += 1;
        self.steps
    }

    /// Returns the first range of the object that no write has covered.
    fn first_gap(&self, len: u64) -> Option<Range<u64>> {
        if is_planted("session-shows-old-memory") { None } else { self.covered.first_gap(len) }
    }

    fn is_under_way(&self) -> bool {
        self.moves || self.unwritten.iter().any(|range| range.ended.is_none())
    }
}

impl Written {
    pub(super) fn new(space: GrantedSpace) -> Self {
        Self(Mutex::new(WriteState {
            space: Arc::new(space),
            covered: Coverage::default(),
            moves: false,
            unwritten: Vec::new(),
            steps: 0,
            may_land: false,
            closed: false,
            given_up: false,
        }))
    }

    /// Returns the present space.
    pub(super) fn space(&self) -> Arc<GrantedSpace> {
        self.0.lock().space.clone()
    }

    /// Begins the replacement of the space that `writes` have failed to write to. Returns false if
    /// bytes could be lost, or if another write could still use the space.
    pub(super) fn begin_move(&self, writes: &[u64]) -> bool {
        let mut state = self.0.lock();
        let others = |range: &Unwritten| range.ended.is_none() && !writes.contains(&range.number);
        let fixed = state.closed || !state.covered.is_empty() || state.may_land || state.moves;
        if fixed || state.unwritten.iter().any(others) {
            return false;
        }
        state.moves = true;
        true
    }

    /// Ends the replacement. Without new space, nothing can be written any more, unless the old
    /// space `stays`. Returns false if the space was given up meanwhile.
    pub(super) fn end_move(&self, space: Option<GrantedSpace>, stays: bool) -> bool {
        let mut state = self.0.lock();
        state.moves = false;
        match space {
            Some(space) => state.space = Arc::new(space),
            None => state.closed |= !stays,
        }
        !state.given_up
    }

    pub(super) fn is_incomplete(&self, len: u64) -> bool {
        let state = self.0.lock();
        state.may_land || !state.unwritten.is_empty() || state.first_gap(len).is_some()
    }

    /// Refuses all later writes, unless the object of `len` bytes is incomplete. Returns the
    /// request that granted the space.
    ///
    /// # Errors
    /// Returns the reason why the object is incomplete.
    pub(super) fn close_if_complete(&self, len: u64) -> Result<Attempt, String> {
        let mut state = self.0.lock();
        if state.is_under_way() {
            return Err("a write of it is under way".into());
        }
        if state.may_land && !is_planted("session-ignores-late-writes") {
            let text = "a write of it timed out and may still land; give it back and reserve the key again";
            return Err(text.into());
        }
        if !state.unwritten.is_empty() {
            return Err("a part of it could not be written".into());
        }
        // The memory has bytes of earlier objects there, perhaps of another tenant.
        if let Some(Range { start, end }) = state.first_gap(len) {
            return Err(format!("bytes {start}..{end} of {len} were never written; write all of them first"));
        }
        state.closed = true;
        Ok(state.space.attempt)
    }

    /// Records that the master still granted the space after these look-ups.
    pub(super) fn confirm(&self, look_ups: LookUps) {
        let mut state = self.0.lock();
        let GrantedSpace { replicas, attempt, .. } = &*state.space;
        state.space = Arc::new(GrantedSpace { replicas: replicas.clone(), attempt: *attempt, look_ups });
    }

    /// Refuses all later writes. Returns the request for the space if the space can be returned
    /// now. If a write is in progress, the task that waits for its end returns the space.
    pub(super) fn give_up(&self) -> Option<Attempt> {
        let mut state = self.0.lock();
        state.closed = true;
        if is_planted("session-ignores-late-writes") {
            return Some(state.space.attempt);
        }
        state.given_up = state.is_under_way();
        (!state.may_land && !state.given_up).then_some(state.space.attempt)
    }

    /// Records the beginning of a write.
    ///
    /// # Errors
    /// Returns the reason if nothing may be written any more, or now.
    pub(super) fn begin(&self, range: Range<u64>) -> Result<StartedWrite, &'static str> {
        let mut state = self.0.lock();
        if state.closed {
            return Err("it was committed or given back");
        }
        if state.moves {
            return Err("another write of it looks for new space; write the range again");
        }
        let number = state.step();
        state.unwritten.push(Unwritten { range, number, ended: None });
        Ok((number, state.space.clone()))
    }

    /// Records the end of write `number`. A successful write also replaces failed writes inside its
    /// range that had ended before it began.
    pub(super) fn end(&self, number: u64, succeeded: bool, may_land: bool) {
        let mut state = self.0.lock();
        state.may_land |= may_land;
        let step = state.step();
        let Some(at) = state.unwritten.iter().position(|range| range.number == number) else { return };
        if !succeeded {
            state.unwritten[at].ended = Some(step);
            return;
        }
        let Range { start, end } = state.unwritten.swap_remove(at).range;
        state.covered.add(start..end);
        state.unwritten.retain(|lost| {
            let before = lost.ended.is_some_and(|ended| ended < number);
            !before || lost.range.start < start || lost.range.end > end
        });
    }

    /// Returns the request for the space if the space was given up during a write and can be
    /// returned now. Returns it only once.
    pub(super) fn take_given_up(&self) -> Option<Attempt> {
        let mut state = self.0.lock();
        let now = state.given_up && !state.is_under_way();
        state.given_up &= !now;
        (now && !state.may_land).then_some(state.space.attempt)
    }
}
