//! Sessions of a trace file: times of their turns, and prompts that continue earlier ones.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use clap::ValueEnum;

use crate::row::MAX_TIME_MS;
use crate::trace::{PAUSE_MS, TokenRun};

/// Blocks that the turns of a session list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TurnBlocks {
    /// Only those after the prompt of the turn before.
    New,
    /// All blocks of the prompt.
    All,
}

/// Reason why a file is not a trace.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowError {
    /// Line with the fault, if there is one.
    pub(crate) line: Option<usize>,
    /// Reason, and what to do after a semicolon.
    pub(crate) reason: String,
}

impl RowError {
    pub(crate) fn at(line: usize, reason: impl Into<String>) -> Self {
        Self { line: Some(line), reason: reason.into() }
    }
}

/// Request as it arrives in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) line: usize,
    pub(crate) time_ms: Option<f64>,
    pub(crate) delay_ms: Option<f64>,
    pub(crate) session: Option<String>,
    pub(crate) ids: Vec<u64>,
    pub(crate) inputs: Vec<TokenRun>,
}

/// Returns the indices of the turns of each session, in the order of the first turns. A request
/// without a session is one of its own. Turns that all have times are in the order of time.
pub(crate) fn sessions_of(arrivals: &[Arrival]) -> Vec<Vec<usize>> {
    let mut sessions: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (index, arrival) in arrivals.iter().enumerate() {
        let session = match &arrival.session {
            Some(name) => *known.entry(name).or_insert(sessions.len()),
            None => sessions.len(),
        };
        if session == sessions.len() {
            sessions.push(Vec::new());
        }
        sessions[session].push(index);
    }
    for turns in &mut sessions {
        let time = |index: &usize| arrivals[*index].time_ms;
        if turns.iter().all(|index| time(index).is_some()) {
            turns.sort_by(|a, b| time(a).unwrap_or_default().total_cmp(&time(b).unwrap_or_default()));
        }
    }
    sessions
}

/// Gives every turn its time. Returns whether the file has the times at which sessions start.
///
/// # Errors
///
/// If only some sessions have a start, if a turn is earlier than the one before, or if a time is
/// out of range.
pub(crate) fn set_times(arrivals: &mut [Arrival], sessions: &[Vec<usize>]) -> Result<bool, RowError> {
    let start_of =
        |arrivals: &[Arrival], turns: &[usize]| turns.first().and_then(|first| arrivals[*first].time_ms);
    let has_starts = sessions.first().is_some_and(|turns| start_of(arrivals, turns).is_some());
    for (number, turns) in sessions.iter().enumerate() {
        if start_of(arrivals, turns).is_some() != has_starts {
            let line = turns.first().map_or(0, |first| arrivals[*first].line);
            return Err(RowError::at(
                line,
                "some sessions have a `timestamp` in their first turn and others do not",
            ));
        }
        let mut now_ms = if has_starts { 0.0 } else { (number as u64 * PAUSE_MS) as f64 };
        for index in turns {
            let turn = &mut arrivals[*index];
            let time_ms = turn.time_ms.unwrap_or(now_ms + turn.delay_ms.unwrap_or_default());
            if time_ms < now_ms {
                return Err(RowError::at(turn.line, "a turn is earlier than the one before in its session"));
            }
            if time_ms > MAX_TIME_MS {
                return Err(RowError::at(turn.line, "the delays of a session are out of range"));
            }
            turn.time_ms = Some(time_ms);
            now_ms = time_ms;
        }
    }
    Ok(has_starts)
}

/// Number of turns after the first one of a session that list blocks, and of those that begin with
/// the first block of the turn before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaterTurns {
    pub(crate) all: usize,
    pub(crate) repeating: usize,
}

impl LaterTurns {
    pub(crate) fn of(arrivals: &[Arrival], sessions: &[Vec<usize>]) -> Self {
        let mut turns = Self::default();
        let firsts =
            sessions.iter().map(|turns| turns.iter().filter_map(|index| arrivals[*index].ids.first()));
        for firsts in firsts {
            let mut before = None;
            for first in firsts {
                turns.all += usize::from(before.is_some());
                turns.repeating += usize::from(before == Some(first));
                before = Some(first);
            }
        }
        turns
    }

    /// Returns the likelier meaning of the blocks.
    pub(crate) fn likely(self) -> TurnBlocks {
        if 2 * self.repeating >= self.all { TurnBlocks::All } else { TurnBlocks::New }
    }
}

/// Puts the blocks of the turns before in front of those of each turn.
///
/// # Errors
///
/// If there are more than `max_blocks` blocks then.
pub(crate) fn join_turns(
    arrivals: &mut [Arrival],
    sessions: &[Vec<usize>],
    max_blocks: usize,
) -> Result<(), RowError> {
    let mut blocks = 0;
    for turns in sessions {
        let (mut ids, mut inputs): (Vec<u64>, Vec<TokenRun>) = Default::default();
        for index in turns {
            let turn = &mut arrivals[*index];
            ids.append(&mut turn.ids);
            inputs.append(&mut turn.inputs);
            blocks += ids.len().max(inputs.len());
            if blocks > max_blocks {
                let reason = format!("the joined turns have more than {max_blocks} blocks");
                return Err(RowError::at(turn.line, reason));
            }
            (turn.ids, turn.inputs) = (ids.clone(), inputs.clone());
        }
    }
    Ok(())
}

/// Blocks of a growing text, by bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextBlocks {
    /// Ids of the full blocks.
    ids: Vec<u64>,
    /// Bytes after them.
    rest: Vec<u8>,
}

impl TextBlocks {
    /// Adds a text. Returns the ids of all blocks, with that of the last bytes. An id is a hash of
    /// the block and of all blocks before.
    pub(crate) fn extend(&mut self, text: &str, block_bytes: usize) -> Vec<u64> {
        self.rest.extend_from_slice(text.as_bytes());
        let full = self.rest.len() - self.rest.len() % block_bytes.max(1);
        for block in self.rest[..full].chunks(block_bytes.max(1)) {
            self.ids.push(hash_after(self.ids.last(), block));
        }
        self.rest.drain(..full);
        let last = (!self.rest.is_empty()).then(|| hash_after(self.ids.last(), &self.rest));
        self.ids.iter().copied().chain(last).collect()
    }
}

fn hash_after(before: Option<&u64>, block: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, block).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(session: &str, time_ms: Option<f64>, delay_ms: Option<f64>, ids: &[u64]) -> Arrival {
        let session = (!session.is_empty()).then(|| session.to_owned());
        Arrival { line: 7, time_ms, delay_ms, session, ids: ids.into(), inputs: Vec::new() }
    }

    fn times(mut arrivals: Vec<Arrival>) -> Result<(Vec<f64>, bool), RowError> {
        let sessions = sessions_of(&arrivals);
        let has_starts = set_times(&mut arrivals, &sessions)?;
        Ok((arrivals.iter().filter_map(|arrival| arrival.time_ms).collect(), has_starts))
    }

    #[test]
    fn a_delay_counts_from_the_turn_before() {
        let arrivals = vec![
            turn("a", Some(100.0), None, &[]),
            turn("b", Some(50.0), None, &[]),
            turn("a", None, Some(20.0), &[]),
            turn("", Some(1.0), None, &[]),
            turn("a", None, None, &[]),
            turn("b", None, Some(0.5), &[]),
        ];
        assert_eq!(times(arrivals), Ok((vec![100.0, 50.0, 120.0, 1.0, 120.0, 50.5], true)));
        let endless = vec![
            turn("a", None, None, &[]),
            turn("b", None, Some(5.0), &[]),
            turn("a", None, Some(9.0), &[]),
        ];
        assert_eq!(times(endless), Ok((vec![0.0, 299.0, 9.0], false)), "sessions start 294 ms apart");
    }

    #[test]
    fn impossible_times_are_errors() {
        let some = vec![turn("a", Some(1.0), None, &[]), turn("b", None, Some(1.0), &[])];
        let reason = "some sessions have a `timestamp` in their first turn and others do not";
        assert_eq!(times(some), Err(RowError::at(7, reason)));
        let mixed = vec![
            turn("a", Some(9.0), None, &[]),
            turn("a", None, Some(5.0), &[]),
            turn("a", Some(10.0), None, &[]),
        ];
        let reason = "a turn is earlier than the one before in its session";
        assert_eq!(times(mixed), Err(RowError::at(7, reason)));
        let late = vec![turn("a", Some(MAX_TIME_MS), None, &[]), turn("a", None, Some(MAX_TIME_MS), &[])];
        assert_eq!(times(late), Err(RowError::at(7, "the delays of a session are out of range")));
    }

    #[test]
    fn turns_with_times_are_joined_in_their_order() {
        let mut arrivals = vec![
            turn("a", Some(9.0), None, &[3]),
            turn("b", Some(5.0), None, &[4]),
            turn("a", Some(8.0), None, &[1, 2]),
            turn("", Some(8.0), None, &[1]),
        ];
        let sessions = sessions_of(&arrivals);
        assert_eq!(sessions, [vec![2, 0], vec![1], vec![3]]);
        assert_eq!(LaterTurns::of(&arrivals, &sessions), LaterTurns { all: 1, repeating: 0 });
        join_turns(&mut arrivals, &sessions, 7).unwrap();
        let ids: Vec<_> = arrivals.iter().map(|arrival| &arrival.ids[..]).collect();
        assert_eq!(ids, [&[1, 2, 3][..], &[4], &[1, 2], &[1]]);
        assert_eq!(LaterTurns::of(&arrivals, &sessions), LaterTurns { all: 1, repeating: 1 });
        let error = join_turns(&mut arrivals, &sessions, 7).unwrap_err();
        assert_eq!(error, RowError::at(7, "the joined turns have more than 7 blocks"));
    }

    #[test]
    fn the_likelier_meaning_is_that_of_most_turns() {
        let likely = |all, repeating| LaterTurns { all, repeating }.likely();
        assert_eq!(
            [likely(0, 0), likely(4, 2), likely(4, 1)],
            [TurnBlocks::All, TurnBlocks::All, TurnBlocks::New]
        );
    }

    #[test]
    fn blocks_of_a_text_stand_for_all_before_them() {
        let mut text = TextBlocks::default();
        let first = text.extend("abcdefg", 4);
        let second = text.extend("hij", 4);
        assert_eq!(
            (first.len(), second.len(), first[0] == second[0], first[1] == second[1]),
            (2, 3, true, false)
        );
        assert_eq!(TextBlocks::default().extend("abcdefghij", 4), second);
        assert_ne!(TextBlocks::default().extend("abcXefghij", 4)[2], second[2]);
        assert!(TextBlocks::default().extend("", 4).is_empty());
    }
}
