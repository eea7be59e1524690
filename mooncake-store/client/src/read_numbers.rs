//! Numbers of the reads of one client.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng};
use mooncake_protocol::master_client::ReadNumber;
use parking_lot::Mutex;

/// Pause before the first report.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// Numbers of the reads of one client.
#[derive(Debug)]
pub(crate) struct ReadNumbers {
    /// Identity of this reader. Another process draws another one.
    pub(crate) reader: u64,
    open: Mutex<OpenReads>,
    /// Number up to which the master knows that all reads have ended.
    reported: AtomicU64,
    /// True while a report is planned.
    pub(crate) is_planned: AtomicBool,
    /// Pause before the next report, in milliseconds.
    pub(crate) pause_ms: AtomicU64,
}

/// Time after which a read has ended in any case; none for a read that has to be ended.
const OPEN: Moment = Moment(u64::MAX);

/// Reads that have not ended, and those behind them.
#[derive(Debug)]
struct OpenReads {
    /// Number of the first read in the list.
    first: u64,
    /// Time at which each read ends; zero for one that has ended.
    until: VecDeque<Moment>,
}

impl OpenReads {
    fn begin(&mut self) -> u64 {
        self.until.push_back(OPEN);
        self.first + self.until.len() as u64 - 1
    }

    fn set_until(&mut self, number: u64, until: Moment) {
        let at = number.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some(known) = at.and_then(|at| self.until.get_mut(at)) {
            *known = until;
        }
    }

    /// Returns the number up to which all reads have ended.
    fn all_ended(&mut self, now: impl Fn() -> Moment) -> u64 {
        // Most reads have ended or have to be ended, for which no clock is read.
        let has_ended = |until: Moment| until == Moment(0) || (until != OPEN && until <= now());
        while self.until.front().is_some_and(|until| has_ended(*until)) {
            self.until.pop_front();
            self.first += 1;
        }
        self.first - 1
    }
}

impl ReadNumbers {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        Self {
            reader: rng.next_u64(),
            open: Mutex::new(OpenReads { first: 1, until: VecDeque::new() }),
            reported: AtomicU64::new(0),
            is_planned: AtomicBool::new(false),
            pause_ms: AtomicU64::new(u64::try_from(FIRST_PAUSE.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// Begins a read. Returns its number.
    pub(crate) fn begin(&self) -> u64 {
        self.open.lock().begin()
    }

    /// Ends the read of this number.
    pub(crate) fn end(&self, number: u64) {
        self.open.lock().set_until(number, Moment(0));
    }

    /// Lets the read of this number end at `until` at the latest: no byte counts after that time.
    pub(crate) fn end_at(&self, number: u64, until: Moment) {
        self.open.lock().set_until(number, until);
    }

    /// Returns what a request for locations tells the master about the read of this number.
    pub(crate) fn describe(&self, number: u64, now: impl Fn() -> Moment) -> ReadNumber {
        ReadNumber { reader: self.reader, number, ended: self.open.lock().all_ended(now) }
    }

    /// Records that the master has received the number up to which all reads have ended.
    pub(crate) fn record_reported(&self, ended: u64) {
        self.reported.fetch_max(ended, SeqCst);
    }

    /// Returns the number up to which all reads have ended, if the master does not know it.
    pub(crate) fn unreported(&self, now: impl Fn() -> Moment) -> Option<u64> {
        let ended = self.open.lock().all_ended(now);
        (ended > self.reported.load(SeqCst)).then_some(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_ends_with_all_before_it() {
        let numbers = ReadNumbers::new(&mut Rng::seeded(3));
        let begin = || numbers.begin();
        let end = |number| numbers.end(number);
        let unreported = || numbers.unreported(|| Moment(1));
        assert_eq!((unreported(), [begin(), begin(), begin()]), (None, [1, 2, 3]));
        end(2);
        assert_eq!(unreported(), None);
        end(1);
        assert_eq!(unreported(), Some(2));
        numbers.record_reported(2);
        end(1);
        end(9);
        assert_eq!((unreported(), begin()), (None, 4));
        end(4);
        end(3);
        assert_eq!((unreported(), numbers.open.lock().until.len()), (Some(4), 0));
    }

    #[test]
    fn a_forgotten_read_ends_with_its_lease() {
        let numbers = ReadNumbers::new(&mut Rng::seeded(3));
        let (forgotten, other) = (numbers.begin(), numbers.begin());
        numbers.end_at(forgotten, Moment(10));
        numbers.end(other);
        let unreported = |now| numbers.unreported(|| Moment(now));
        assert_eq!((unreported(9), unreported(10)), (None, Some(2)));
        numbers.end(forgotten);
        assert_eq!(unreported(10), Some(2));
    }
}
