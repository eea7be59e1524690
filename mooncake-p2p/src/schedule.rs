//! Choice of the next shard to read, and of its source. No I/O, no clock and no randomness of its
//! own, so that a simulation can run it.

use std::collections::{HashMap, HashSet};

use mooncake_core::clock::{Moment, Rng};

use crate::catalogue::Role;

/// Number that stands for a source. The caller assigns it.
pub type SourceId = usize;

/// Bounds of the reads in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of shards that one reader reads at once.
    pub streams: usize,
    /// Maximum number of reads from one source at once, by all readers.
    pub readers_per_source: usize,
}

/// Knowledge of a reader about the other nodes.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Sources of each shard.
    pub copies: Vec<Vec<ShardCopy>>,
    /// Reads of other readers in progress.
    pub reads: Vec<OtherRead>,
}

/// Copy of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardCopy {
    /// Node with the copy.
    pub source: SourceId,
    /// Role of the node.
    pub role: Role,
    /// True if the node is on the host of the reader.
    pub is_own_host: bool,
}

/// Read of another reader in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherRead {
    /// Node that is read from.
    pub source: SourceId,
    /// Shard of the same object, or `None` for another object.
    pub shard: Option<usize>,
    /// True if that reader is on the host of this one.
    pub is_own_host: bool,
}

/// Read to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Shard to read.
    pub shard: usize,
    /// Node to read from.
    pub source: SourceId,
}

/// Outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The shard has arrived and its checksum is right.
    Arrived,
    /// Another reader took the last slot of the source, or the call is being restarted.
    NotBegun,
    /// The source failed. It is not read from before this moment.
    Failed {
        /// End of the pause.
        until: Moment,
    },
    /// The bytes are wrong. This shard is not read from that source again.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Missing,
    /// `is_stale` marks a read that began before a restart.
    Reading {
        source: SourceId,
        is_stale: bool,
    },
    Arrived,
}

/// Schedule of the reads of one object by one reader.
///
/// Shards on the own host come first. A shard on its way to another reader of the host waits for
/// it. Of the others, the next shard is the one with the fewest copies, where a read in progress
/// counts as a copy. The source is the node with the fewest reads in progress, and no seeder if
/// others are equal.
#[derive(Clone, Debug)]
pub struct Schedule {
    limits: Limits,
    shards: Vec<Progress>,
    refused: HashSet<(usize, SourceId)>,
    paused: HashMap<SourceId, Moment>,
}

impl Schedule {
    /// Creates the schedule of an object with this number of shards.
    pub fn new(shards: usize, limits: Limits) -> Self {
        let shards = vec![Progress::Missing; shards];
        Self { limits, shards, refused: HashSet::new(), paused: HashMap::new() }
    }

    /// Marks a shard that need not be read.
    pub fn skip(&mut self, shard: usize) {
        self.shards[shard] = Progress::Arrived;
    }

    /// Returns whether a shard has arrived.
    pub fn has_arrived(&self, shard: usize) -> bool {
        self.shards[shard] == Progress::Arrived
    }

    /// Returns whether all shards have arrived.
    pub fn is_complete(&self) -> bool {
        self.shards.iter().all(|progress| *progress == Progress::Arrived)
    }

    /// Returns the number of reads in progress.
    pub fn reads_in_progress(&self) -> usize {
        self.shards.iter().filter(|progress| matches!(progress, Progress::Reading { .. })).count()
    }

    /// Forgets everything that has arrived or failed. Reads in progress end as if they failed.
    pub fn restart(&mut self) {
        for progress in &mut self.shards {
            *progress = match *progress {
                Progress::Reading { source, .. } => Progress::Reading { source, is_stale: true },
                _ => Progress::Missing,
            };
        }
        self.refused.clear();
        self.paused.clear();
    }

    /// Returns the next read and marks it as in progress, or `None` if nothing can be read now.
    pub fn begin_next(&mut self, view: &View, now: Moment, rng: &mut Rng) -> Option<Choice> {
        if self.reads_in_progress() >= self.limits.streams {
            return None;
        }
        let mut reads: HashMap<SourceId, usize> = HashMap::new();
        let mut others_by_shard: HashMap<usize, (usize, bool)> = HashMap::new();
        for progress in &self.shards {
            if let Progress::Reading { source, .. } = progress {
                *reads.entry(*source).or_default() += 1;
            }
        }
        for read in &view.reads {
            *reads.entry(read.source).or_default() += 1;
            if let Some(shard) = read.shard {
                let (count, is_own_host) = others_by_shard.entry(shard).or_default();
                *count += 1;
                *is_own_host |= read.is_own_host;
            }
        }
        let reads_from = |source: SourceId| reads.get(&source).copied().unwrap_or(0);
        let mut best = None;
        for (shard, copies) in view.copies.iter().enumerate() {
            if self.shards.get(shard) != Some(&Progress::Missing) {
                continue;
            }
            let (others, reaches_own_host) = others_by_shard.get(&shard).copied().unwrap_or_default();
            let is_usable = |copy: &&ShardCopy| {
                !self.refused.contains(&(shard, copy.source))
                    && self.paused.get(&copy.source).is_none_or(|until| *until <= now)
            };
            let is_on_own_host = copies.iter().filter(is_usable).any(|copy| copy.is_own_host);
            // A shard that is on the own host, or on its way there, crosses the network once.
            if reaches_own_host && !is_on_own_host {
                continue;
            }
            let free = copies.iter().filter(is_usable).filter(|copy| {
                reads_from(copy.source) < self.limits.readers_per_source && copy.is_own_host == is_on_own_host
            });
            let source =
                free.min_by_key(|copy| (reads_from(copy.source), copy.role == Role::Gold, rng.next_u64()));
            let Some(copy) = source else { continue };
            let rank = (!is_on_own_host, copies.len() + others, rng.next_u64());
            if best.is_none_or(|(best, _)| rank < best) {
                best = Some((rank, Choice { shard, source: copy.source }));
            }
        }
        let (_, choice) = best?;
        self.shards[choice.shard] = Progress::Reading { source: choice.source, is_stale: false };
        Some(choice)
    }

    /// Returns a missing shard that has copies, but only such as were refused.
    pub fn refused_shard(&self, view: &View) -> Option<usize> {
        let is_refused = |(shard, copies): &(usize, &Vec<ShardCopy>)| {
            self.shards.get(*shard) == Some(&Progress::Missing)
                && !copies.is_empty()
                && copies.iter().all(|copy| self.refused.contains(&(*shard, copy.source)))
        };
        view.copies.iter().enumerate().find(is_refused).map(|(shard, _)| shard)
    }

    /// Records the outcome of a read. Returns whether the shard has arrived.
    pub fn finish(&mut self, choice: Choice, outcome: Outcome) -> bool {
        let progress = &mut self.shards[choice.shard];
        let is_stale = matches!(progress, Progress::Reading { is_stale: true, .. });
        *progress = Progress::Missing;
        if is_stale {
            return false;
        }
        match outcome {
            Outcome::Arrived => *progress = Progress::Arrived,
            Outcome::NotBegun => {}
            Outcome::Failed { until } => _ = self.paused.insert(choice.source, until),
            Outcome::Refused => _ = self.refused.insert((choice.shard, choice.source)),
        }
        outcome == Outcome::Arrived
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { streams: 4, readers_per_source: 2 };

    fn copy(source: SourceId, role: Role) -> ShardCopy {
        ShardCopy { source, role, is_own_host: false }
    }

    fn view(copies: Vec<Vec<ShardCopy>>) -> View {
        View { copies, reads: Vec::new() }
    }

    fn next(schedule: &mut Schedule, view: &View, now: u64) -> Option<(usize, SourceId)> {
        let choice = schedule.begin_next(view, Moment(now), &mut Rng::seeded(1))?;
        Some((choice.shard, choice.source))
    }

    #[test]
    fn rarest_shards_come_first_and_sources_are_bounded() {
        let (seeder, replica) = (copy(0, Role::Gold), copy(1, Role::Replica));
        let view = view(vec![vec![seeder, replica], vec![seeder], vec![seeder, replica], vec![seeder]]);
        let mut schedule = Schedule::new(4, LIMITS);
        let mut first = [next(&mut schedule, &view, 0).unwrap(), next(&mut schedule, &view, 0).unwrap()];
        first.sort_unstable();
        assert_eq!(first, [(1, 0), (3, 0)], "shards of the seeder alone");
        assert_eq!(next(&mut schedule, &view, 0).unwrap().1, 1, "the seeder has two readers");
        assert_eq!(next(&mut schedule, &view, 0).unwrap().1, 1);
        assert_eq!(next(&mut schedule, &view, 0), None, "all shards are in progress");
    }

    #[test]
    fn reads_of_others_count_as_copies_and_as_readers() {
        let seeder = copy(0, Role::Gold);
        let read = OtherRead { source: 0, shard: Some(0), is_own_host: false };
        let mut view = view(vec![vec![seeder]; 2]);
        view.reads.push(read);
        let mut schedule = Schedule::new(2, LIMITS);
        assert_eq!(next(&mut schedule, &view, 0), Some((1, 0)), "shard 0 is on its way to a node");
        assert_eq!(next(&mut schedule, &view, 0), None, "two readers are the bound");
        view.reads.clear();
        assert_eq!(next(&mut schedule, &view, 0), Some((0, 0)));
    }

    #[test]
    fn own_host_comes_first() {
        let far = copy(0, Role::Replica);
        let near = ShardCopy { source: 1, role: Role::Gold, is_own_host: true };
        let mut view = view(vec![vec![far], vec![far, near]]);
        let mut schedule = Schedule::new(2, LIMITS);
        assert_eq!(next(&mut schedule, &view, 0), Some((1, 1)));
        view.copies = vec![vec![far]; 2];
        view.reads.push(OtherRead { source: 2, shard: Some(0), is_own_host: true });
        let mut schedule = Schedule::new(2, LIMITS);
        assert_eq!(next(&mut schedule, &view, 0), Some((1, 0)), "another reader of the host fetches shard 0");
        assert_eq!(next(&mut schedule, &view, 0), None, "that read is waited for");
    }

    #[test]
    fn failed_and_refused_sources_are_avoided() {
        let view = view(vec![vec![copy(0, Role::Gold), copy(1, Role::Gold)]]);
        let mut schedule = Schedule::new(1, LIMITS);
        let choice = |(shard, source)| Choice { shard, source };
        let first = choice(next(&mut schedule, &view, 0).unwrap());
        assert!(!schedule.finish(first, Outcome::Refused));
        assert_eq!(schedule.refused_shard(&view), None, "there is another source");
        let second = choice(next(&mut schedule, &view, 0).unwrap());
        assert_ne!(first.source, second.source);
        assert!(!schedule.finish(second, Outcome::Failed { until: Moment(5) }));
        assert_eq!(next(&mut schedule, &view, 4), None);
        let third = choice(next(&mut schedule, &view, 5).unwrap());
        assert_eq!(third, second);
        schedule.restart();
        assert!(!schedule.finish(third, Outcome::Arrived), "the read began before the restart");
        let fourth = choice(next(&mut schedule, &view, 5).unwrap());
        assert!(schedule.finish(fourth, Outcome::Arrived) && schedule.is_complete());
    }
}
