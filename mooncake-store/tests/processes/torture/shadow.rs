//! Changes of the keys of a client, and the values that a read may return after them.

use std::time::Duration;

use super::timeline::{MasterTime, Timeline};

/// Time that a read of a value with a lifetime may be late: between the end of the put at the
/// master and its response, and between two clocks of one host.
const LATE: Duration = Duration::from_secs(1);

/// Change of one key by its only writer.
#[derive(Clone, Debug)]
struct Change {
    kind: Kind,
    /// False if the call failed or was dropped, so that its effect is unknown.
    is_certain: bool,
    /// Life of the master that acknowledged the change. `None` if the master ended during the call.
    acknowledged: Option<MasterTime>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Put {
        version: u64,
        ends: Option<Duration>,
        is_read_once: bool,
    },
    Removal,
    /// The first read of a value that is deleted after its first read.
    OnlyRead {
        version: u64,
    },
}

/// Outcome of a call that changes a key, on the clock of the client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub(super) is_certain: bool,
    pub(super) acknowledged: Option<MasterTime>,
    pub(super) ended: Duration,
}

/// Expectation of a client before a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// The last change has stored a value, and no master ended since.
    Present,
    /// The last change has stored a value under an earlier master.
    Outlived,
    /// Any outcome.
    Unknown,
}

/// Changes of one key, in order, from the last one that can never be undone.
#[derive(Clone, Debug, Default)]
pub(super) struct Shadow {
    changes: Vec<Change>,
    /// Time until which a write or a copy that has not ended may protect the object from a removal
    /// by pattern.
    unsettled_until: Duration,
}

impl Shadow {
    /// Notes a put. `time_to_live` begins at the end of the put.
    pub(super) fn put(
        &mut self,
        version: u64,
        time_to_live: Option<Duration>,
        is_read_once: bool,
        outcome: Outcome,
    ) {
        let ends = time_to_live.filter(|_| outcome.is_certain).map(|span| outcome.ended + span);
        self.note(Kind::Put { version, ends, is_read_once }, outcome);
    }

    pub(super) fn remove(&mut self, outcome: Outcome) {
        self.note(Kind::Removal, outcome);
    }

    fn note(&mut self, kind: Kind, Outcome { is_certain, acknowledged, .. }: Outcome) {
        self.changes.push(Change { kind, is_certain, acknowledged });
    }

    /// Notes that a write or copy of the object may be in progress until this time.
    pub(super) fn unsettle(&mut self, until: Duration) {
        self.unsettled_until = self.unsettled_until.max(until);
    }

    pub(super) fn is_settled(&self, now: Duration) -> bool {
        self.unsettled_until <= now
    }

    /// Checks that a read, which began at `began`, may return this version.
    ///
    /// # Errors
    /// Says why the value is too old.
    pub(super) fn check(
        &mut self,
        version: u64,
        began: Duration,
        ended: Outcome,
        timeline: &Timeline,
    ) -> Result<(), String> {
        let found = self.find(version, began, timeline);
        let is_read_once =
            found.map_err(|reason| format!("version {version}: {reason}; {}", self.history(timeline)))?;
        if is_read_once {
            self.note(Kind::OnlyRead { version }, ended);
        }
        Ok(())
    }

    /// Returns whether the value is deleted after this read.
    fn find(&self, version: u64, began: Duration, timeline: &Timeline) -> Result<bool, String> {
        for change in self.changes.iter().rev() {
            match &change.kind {
                Kind::Put { version: stored, ends, is_read_once } if *stored == version => {
                    let late = ends.and_then(|ends| began.checked_sub(ends + LATE));
                    let late = late.map(|late| format!("it ended {:?} before the read", late + LATE));
                    return late.map_or(Ok(*is_read_once), Err);
                }
                Kind::OnlyRead { version: read } if *read == version && change.is_final(timeline) => {
                    return Err("it was read before, and is deleted after its first read".into());
                }
                // Another version may have been put after that read.
                Kind::OnlyRead { .. } => {}
                Kind::Put { .. } | Kind::Removal if change.is_final(timeline) => {
                    return Err(format!("replaced or removed by {:?}", change.kind));
                }
                Kind::Put { .. } | Kind::Removal => {}
            }
        }
        Err("never written, or replaced long ago".into())
    }

    /// Returns what a read that begins now will find.
    pub(super) fn expected(&self, began: Duration, timeline: &Timeline) -> Expected {
        let Some(Change { kind: Kind::Put { ends, .. }, is_certain: true, acknowledged }) =
            self.changes.last()
        else {
            return Expected::Unknown;
        };
        if ends.is_some_and(|ends| ends <= began + LATE) {
            return Expected::Unknown;
        }
        match acknowledged {
            Some(at) if timeline.lives(*at) => Expected::Present,
            Some(_) => Expected::Outlived,
            None => Expected::Unknown,
        }
    }

    /// Forgets what can never be read again.
    pub(super) fn prune(&mut self, timeline: &Timeline) {
        let is_over = |change: &Change| {
            !matches!(change.kind, Kind::OnlyRead { .. })
                && change.is_certain
                && change.acknowledged.is_some_and(|at| timeline.is_in_snapshot(at))
        };
        if let Some(last) = self.changes.iter().rposition(is_over) {
            self.changes.drain(..last);
        }
    }

    fn history(&self, timeline: &Timeline) -> String {
        let first = self.changes.len().saturating_sub(12);
        format!("changes {:?}; {timeline}", &self.changes[first..])
    }
}

impl Change {
    /// Returns whether the change is acknowledged and not undone by the end of its master.
    fn is_final(&self, timeline: &Timeline) -> bool {
        self.is_certain
            && self.acknowledged.is_some_and(|at| timeline.lives(at) || timeline.is_in_snapshot(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn at(life: u64, mark: u64) -> Outcome {
        Outcome { is_certain: true, acknowledged: Some(MasterTime { life, mark }), ended: NOW }
    }

    const FAILED: Outcome = Outcome { is_certain: false, acknowledged: None, ended: NOW };

    fn timeline(lines: &str) -> Timeline {
        let mut timeline = Timeline::default();
        lines.lines().for_each(|line| timeline.apply(line).unwrap());
        timeline
    }

    fn permitted(shadow: &mut Shadow, timeline: &Timeline) -> Vec<u64> {
        (0..10).filter(|version| shadow.find(*version, NOW, timeline).is_ok()).collect()
    }

    #[test]
    fn the_last_acknowledged_value_and_later_attempts_may_be_read() {
        let up = timeline("up 1\nmark 1");
        let mut shadow = Shadow::default();
        assert_eq!(permitted(&mut shadow, &up), [0; 0]);
        shadow.put(1, None, false, at(1, 1));
        shadow.put(2, None, false, FAILED);
        assert_eq!(permitted(&mut shadow, &up), [1, 2]);
        shadow.remove(FAILED);
        assert_eq!(permitted(&mut shadow, &up), [1, 2]);
        shadow.put(3, None, false, at(1, 1));
        assert_eq!(permitted(&mut shadow, &up), [3]);
        shadow.remove(at(1, 1));
        assert_eq!(permitted(&mut shadow, &up), [0; 0]);
    }

    #[test]
    fn only_the_last_changes_of_a_dead_master_are_uncertain() {
        let mut shadow = Shadow::default();
        shadow.put(1, None, false, at(1, 1));
        shadow.put(2, None, false, at(1, 5));
        shadow.put(3, None, false, at(1, 9));
        let dead = "up 1\nmark 9\ndown 1\n";
        // The snapshot began after mark 6: it holds the second value.
        let mut with_snapshot = timeline(&format!("{dead}snap 1 6\nup 2\nmark 10"));
        assert_eq!(permitted(&mut shadow, &with_snapshot), [2, 3]);
        assert_eq!(permitted(&mut shadow, &timeline(&format!("{dead}up 2"))), [1, 2, 3]);
        // Changes under the next master stay, until it ends without a snapshot.
        shadow.remove(at(2, 10));
        assert_eq!(permitted(&mut shadow, &with_snapshot), [0; 0]);
        with_snapshot.apply("down 2").unwrap();
        assert_eq!(permitted(&mut shadow, &with_snapshot), [2, 3]);
        with_snapshot.apply("snap 2 11").unwrap();
        assert_eq!(permitted(&mut shadow, &with_snapshot), [0; 0]);
        shadow.prune(&with_snapshot);
        assert_eq!(shadow.changes.len(), 1);
    }

    #[test]
    fn lifetimes_and_single_reads_are_checked() {
        let up = timeline("up 1\nmark 1");
        let mut shadow = Shadow::default();
        shadow.put(1, Some(Duration::from_secs(2)), false, at(1, 1));
        let read = |shadow: &mut Shadow, version, began, timeline: &Timeline| {
            shadow.check(version, began, at(1, 1), timeline)
        };
        assert_eq!(read(&mut shadow, 1, NOW + Duration::from_secs(1), &up), Ok(()));
        assert!(read(&mut shadow, 1, NOW + Duration::from_secs(4), &up).is_err());
        shadow.put(2, None, true, at(1, 1));
        assert_eq!(read(&mut shadow, 2, NOW, &up), Ok(()));
        assert!(read(&mut shadow, 2, NOW, &up).is_err());
        // The master that deleted the value has ended without a snapshot of that.
        assert_eq!(read(&mut shadow, 2, NOW, &timeline("up 1\nmark 2\ndown 1\nup 2")), Ok(()));
    }
}
