//! Ranges of a reserved object with and without a successful write, and writes that may still
//! arrive in its space.
//!
//! A range counts as unwritten from before its transfers begin until a write of it has succeeded.
//! Calls are futures that callers may drop at any await. A dropped call does not stop its
//! transfers, so a task waits for their end. Only then can the range be written again with effect,
//! and only then can the space be returned. After a timeout the end is unknown, so the space is
//! left to the master.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::MemoryLocation;
use mooncake_transport::engine::LookUps;
use parking_lot::Mutex;

use super::coverage::Coverage;
use crate::attempt::Attempt;
use crate::grants::ReservedSpace;

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
    /// Ranges of the writes in progress, by the number of the write: the step at which it began.
    in_progress: HashMap<u64, Range<u64>>,
    lost: LostRanges,
    /// Number of the last step. The beginning and the end of a write are one step each.
    steps: u64,
    /// True if a write timed out, so that its bytes may arrive at any time.
    may_land: bool,
    /// True after a commit or a return of the space. Nothing may be written any more.
    closed: bool,
    /// True once a commit has its result, or the space was given up. Until then, the object may be
    /// committed again, and its space may be returned.
    ended: bool,
    /// True if the space is to be returned when no write is in progress.
    given_up: bool,
    /// True once no further call about the space may be sent.
    sealed: bool,
}

/// Ranges of writes that have ended without success and were not written again since, by their
/// start and the number of the write. Ranges of one object may overlap.
#[derive(Debug, Default)]
struct LostRanges(BTreeMap<(u64, u64), LostRange>);

#[derive(Debug)]
struct LostRange {
    /// Offset of the first byte behind the range.
    end: u64,
    /// Step at which the write ended.
    ended: u64,
}

impl LostRanges {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&mut self, number: u64, range: Range<u64>, ended: u64) {
        self.0.insert((range.start, number), LostRange { end: range.end, ended });
    }

    /// Removes the ranges inside `range` whose writes had ended before the step `number`.
    fn remove_replaced(&mut self, range: &Range<u64>, number: u64) {
        // Ranges that begin elsewhere are not inside.
        let inside = self.0.range((range.start, 0)..=(range.end, u64::MAX));
        let replaced = inside.filter(|(_, lost)| lost.end <= range.end && lost.ended < number);
        let replaced: Vec<(u64, u64)> = replaced.map(|(key, _)| *key).collect();
        for key in replaced {
            self.0.remove(&key);
        }
    }
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
        self.moves || !self.in_progress.is_empty()
    }
}

impl Written {
    pub(super) fn new(space: GrantedSpace) -> Self {
        Self(Mutex::new(WriteState {
            space: Arc::new(space),
            covered: Coverage::default(),
            moves: false,
            in_progress: HashMap::new(),
            lost: LostRanges::default(),
            steps: 0,
            may_land: false,
            closed: false,
            ended: false,
            given_up: false,
            sealed: false,
        }))
    }

    /// Returns the present space.
    pub(super) fn space(&self) -> Arc<GrantedSpace> {
        self.0.lock().space.clone()
    }

    /// Begins the replacement of the space that `writes` have failed to write to. Returns false if
    /// bytes could be lost, or if another write could still use the space.
    pub(super) fn begin_move(&self, writes: &[u64]) -> bool {
        let writes: HashSet<u64> = writes.iter().copied().collect();
        let mut state = self.0.lock();
        let fixed = state.closed || !state.covered.is_empty() || state.may_land || state.moves;
        if fixed || state.in_progress.keys().any(|number| !writes.contains(number)) {
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
        let is_wanted = !state.given_up;
        match space {
            Some(space) => state.space = Arc::new(space),
            None if stays => {}
            None => state.closed = true,
        }
        is_wanted
    }

    pub(super) fn is_incomplete(&self, len: u64) -> bool {
        let state = self.0.lock();
        state.may_land
            || !state.in_progress.is_empty()
            || !state.lost.is_empty()
            || state.first_gap(len).is_some()
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
        if !state.lost.is_empty() {
            return Err("a part of it could not be written".into());
        }
        // The memory has bytes of earlier objects there, perhaps of another tenant.
        if let Some(Range { start, end }) = state.first_gap(len) {
            return Err(format!("bytes {start}..{end} of {len} were never written; write all of them first"));
        }
        if state.sealed {
            return Err("it was committed or given back".into());
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
        state.in_progress.insert(number, range);
        Ok((number, state.space.clone()))
    }

    /// Records the end of write `number`. A successful write also replaces failed writes inside its
    /// range that had ended before it began.
    pub(super) fn end(&self, number: u64, succeeded: bool, may_land: bool) {
        let mut state = self.0.lock();
        state.may_land |= may_land;
        let step = state.step();
        let Some(range) = state.in_progress.remove(&number) else { return };
        if succeeded {
            state.lost.remove_replaced(&range, number);
            state.covered.add(range);
        } else {
            state.lost.add(number, range, step);
        }
    }

    /// Records that a commit has its result.
    pub(super) fn record_end(&self) {
        self.0.lock().ended = true;
    }

    /// Records that the only call about the space is being sent: a master that does not recognize
    /// writers would take another one for a call about a later write of the key.
    pub(super) fn seal(&self) {
        let mut state = self.0.lock();
        (state.closed, state.ended, state.sealed) = (true, true, true);
    }

    /// Records that the call was not sent.
    pub(super) fn unseal(&self) {
        let mut state = self.0.lock();
        (state.ended, state.sealed) = (false, false);
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

impl ReservedSpace for Written {
    fn is_open(&self) -> bool {
        !self.0.lock().ended
    }

    /// Refuses all later writes. Returns the request for the space if the space can be returned
    /// now. If a write is in progress, the task that waits for its end returns the space.
    fn give_up(&self) -> Option<Attempt> {
        let mut state = self.0.lock();
        if state.sealed {
            return None;
        }
        state.closed = true;
        state.ended = true;
        if is_planted("session-ignores-late-writes") {
            return Some(state.space.attempt);
        }
        state.given_up = state.is_under_way();
        (!state.may_land && !state.given_up).then_some(state.space.attempt)
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::clock::Moment;
    use mooncake_protocol::api::WriteMode;

    use super::*;

    const LEN: u64 = 1 << 18;

    fn written() -> Written {
        let attempt = Attempt { mode: WriteMode::Put, number: 1, requested_at: Moment::default() };
        Written::new(GrantedSpace { replicas: Vec::new(), attempt, look_ups: LookUps::default() })
    }

    fn write(written: &Written, range: Range<u64>, succeeds: bool) {
        let (number, _) = written.begin(range).unwrap();
        written.end(number, succeeds, false);
    }

    /// Searches among all ranges of the object take 10^11 steps here.
    #[test]
    fn each_of_many_ranges_ends_in_few_steps() {
        let written = written();
        // Every second byte comes later, from the end to the start.
        let order = || (0..LEN / 2).map(|at| 2 * at).chain((0..LEN / 2).map(|at| 2 * at + 1)).rev();
        for succeeds in [false, true] {
            let begun: Vec<u64> = order().map(|at| written.begin(at..at + 1).unwrap().0).collect();
            begun.into_iter().for_each(|number| written.end(number, succeeds, false));
            assert_eq!(written.is_incomplete(LEN), !succeeds);
        }
        written.close_if_complete(LEN).unwrap();
    }

    #[test]
    fn a_sealed_object_is_neither_committed_nor_given_back() {
        let written = written();
        write(&written, 0..10, true);
        written.seal();
        assert!(written.close_if_complete(10).is_err() && written.give_up().is_none() && !written.is_open());
        written.unseal();
        assert!(written.close_if_complete(10).is_ok() && written.is_open() && written.give_up().is_some());
    }

    #[test]
    fn lost_ranges_are_replaced_by_later_writes_around_them() {
        let lost = "a part of it could not be written";
        let outcome = |written: &Written| written.close_if_complete(10).map(drop);
        for (later, replaces) in [(0..10, true), (2..5, true), (1..6, true), (3..10, false), (0..4, false)] {
            let written = written();
            write(&written, 2..5, false);
            write(&written, later.clone(), true);
            assert_eq!(outcome(&written) == Err(lost.into()), !replaces, "{later:?}");
        }
        // A write that began before the end of the lost one may have been overwritten by it.
        let written = written();
        let (lost_write, _) = written.begin(2..5).unwrap();
        let (around, _) = written.begin(0..10).unwrap();
        written.end(lost_write, false, false);
        written.end(around, true, false);
        assert_eq!(outcome(&written), Err(lost.into()));
        write(&written, 0..10, true);
        assert_eq!(outcome(&written), Ok(()));
    }
}
