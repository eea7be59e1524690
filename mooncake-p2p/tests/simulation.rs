//! Many readers of one object in virtual time: the schedule decides, and a model of links moves the
//! shards.
//!
//! Every node has a link of one shard per unit of time in each direction. The reads of a link share
//! it equally, and a read is as fast as the slower of its two shares.

use std::collections::BTreeSet;

use mooncake_core::clock::{Moment, Rng};
use mooncake_core::testkit::test_seed;
use mooncake_p2p::Role;
use mooncake_p2p::schedule::{Choice, Limits, OtherRead, Outcome, Schedule, ShardCopy, View};

const LIMITS: Limits = Limits { streams: 4, readers_per_source: 4 };

struct Reader {
    schedule: Schedule,
    reads: Vec<(Choice, f64)>,
    rng: Rng,
    is_alive: bool,
    host: usize,
    /// Time at which all shards had arrived.
    done: Option<f64>,
}

/// The seeder is node 0, and reader `i` is node `i + 1`.
struct Swarm {
    shards: usize,
    readers: Vec<Reader>,
    is_seeder_alive: bool,
    /// True if readers serve the object only once they have all of it, as in the Go library.
    serves_whole_only: bool,
    now: f64,
    /// Shards that left the seeder's host, and shards that crossed the network to a host.
    sent_by_seeder: usize,
    over_network: usize,
}

impl Swarm {
    fn new(readers: usize, readers_per_host: usize, shards: usize) -> Self {
        let mut rng = Rng::seeded(test_seed());
        let reader = |index: usize| Reader {
            schedule: Schedule::new(shards, LIMITS),
            reads: Vec::new(),
            rng: rng.split(),
            is_alive: true,
            host: 1 + index / readers_per_host,
            done: None,
        };
        let readers = (0..readers).map(reader).collect();
        Self {
            shards,
            readers,
            is_seeder_alive: true,
            serves_whole_only: false,
            now: 0.0,
            sent_by_seeder: 0,
            over_network: 0,
        }
    }

    fn host(&self, node: usize) -> usize {
        if node == 0 { 0 } else { self.readers[node - 1].host }
    }

    fn view(&self, of: usize) -> View {
        let host = self.host(of + 1);
        let mut view = View { copies: vec![Vec::new(); self.shards], reads: Vec::new() };
        for (shard, copies) in view.copies.iter_mut().enumerate() {
            if self.is_seeder_alive {
                copies.push(ShardCopy { source: 0, role: Role::Gold, is_own_host: false });
            }
            for (index, reader) in self.readers.iter().enumerate().filter(|(_, reader)| reader.is_alive) {
                if index != of && reader.schedule.has_arrived(shard) {
                    let is_own_host = reader.host == host;
                    copies.push(ShardCopy { source: index + 1, role: Role::Replica, is_own_host });
                }
            }
        }
        for reader in self.readers.iter().enumerate().filter(|(index, _)| *index != of).map(|(_, r)| r) {
            view.reads.extend(reader.reads.iter().map(|(choice, _)| OtherRead {
                source: choice.source,
                shard: Some(choice.shard),
                is_own_host: reader.host == host,
            }));
        }
        view
    }

    /// Begins the reads of the Go library: all shards at once, from a random reader that has the
    /// whole object, or else from the seeder.
    fn begin_whole_reads(&mut self) {
        let complete: Vec<usize> =
            (0..self.readers.len()).filter(|index| self.readers[*index].done.is_some()).collect();
        for reader in self.readers.iter_mut().filter(|r| r.reads.is_empty() && r.done.is_none()) {
            for shard in 0..self.shards {
                let random = complete.get(reader.rng.below(complete.len().max(1) as u64) as usize);
                let source = random.map_or(0, |index| index + 1);
                reader.reads.push((Choice { shard, source }, 1.0));
                self.sent_by_seeder += usize::from(source == 0);
            }
        }
    }

    fn begin_reads(&mut self) {
        if self.serves_whole_only {
            return self.begin_whole_reads();
        }
        // The nodes take turns, as they would.
        loop {
            let mut has_begun = false;
            for index in 0..self.readers.len() {
                if !self.readers[index].is_alive {
                    continue;
                }
                let view = self.view(index);
                let reader = &mut self.readers[index];
                let next = reader.schedule.begin_next(&view, Moment(0), &mut reader.rng);
                let Some(choice) = next else { continue };
                reader.reads.push((choice, 1.0));
                has_begun = true;
                let (from, to) = (self.host(choice.source), self.host(index + 1));
                self.sent_by_seeder += usize::from(choice.source == 0);
                self.over_network += usize::from(from != to);
            }
            if !has_begun {
                return;
            }
        }
    }

    /// Returns the number of reads over the network link of each node: out, and in.
    fn loads(&self) -> (Vec<usize>, Vec<usize>) {
        let (mut out, mut into) = (vec![0; self.readers.len() + 1], vec![0; self.readers.len() + 1]);
        for (index, reader) in self.readers.iter().enumerate() {
            for (choice, _) in reader.reads.iter().filter(|(c, _)| self.host(c.source) != reader.host) {
                out[choice.source] += 1;
                into[index + 1] += 1;
            }
        }
        (out, into)
    }

    /// Moves the time to the end of the next reads. Returns false when no read is in progress.
    fn step(&mut self) -> bool {
        self.begin_reads();
        let (out, into) = self.loads();
        let hosts: Vec<usize> = (0..=self.readers.len()).map(|node| self.host(node)).collect();
        let speed = |node: usize, source: usize| {
            // Memory of the own host is ten times as fast as the network.
            if hosts[source] == hosts[node] { 10.0 } else { 1.0 / out[source].max(into[node]) as f64 }
        };
        let mut span = f64::INFINITY;
        for (index, reader) in self.readers.iter().enumerate() {
            for (choice, left) in &reader.reads {
                span = span.min(left / speed(index + 1, choice.source));
            }
        }
        if span.is_infinite() {
            return false;
        }
        self.now += span;
        for (index, reader) in self.readers.iter_mut().enumerate() {
            reader
                .reads
                .iter_mut()
                .for_each(|(choice, left)| *left -= span * speed(index + 1, choice.source));
            let (ended, going): (Vec<_>, Vec<_>) = reader.reads.drain(..).partition(|(_, left)| *left < 1e-9);
            reader.reads = going;
            for (choice, _) in ended {
                reader.schedule.finish(choice, Outcome::Arrived);
            }
            if reader.schedule.is_complete() && reader.done.is_none() {
                reader.done = Some(self.now);
            }
        }
        true
    }

    /// Ends a node. Reads from it fail, and its own reads end.
    fn kill(&mut self, node: usize) {
        match node.checked_sub(1) {
            None => self.is_seeder_alive = false,
            Some(index) => {
                self.readers[index].is_alive = false;
                self.readers[index].reads.clear();
            }
        }
        for reader in &mut self.readers {
            let (failed, going): (Vec<_>, Vec<_>) =
                reader.reads.drain(..).partition(|(choice, _)| choice.source == node);
            reader.reads = going;
            for (choice, _) in failed {
                reader.schedule.finish(choice, Outcome::NotBegun);
            }
        }
    }

    /// Returns the shards that a living reader has.
    fn shards_out(&self) -> usize {
        let alive = self.readers.iter().filter(|reader| reader.is_alive);
        let out = alive.flat_map(|r| (0..self.shards).filter(|shard| r.schedule.has_arrived(*shard)));
        out.collect::<BTreeSet<_>>().len()
    }

    fn finish(&mut self) {
        while self.step() {}
        for (index, reader) in self.readers.iter().enumerate().filter(|(_, reader)| reader.is_alive) {
            assert!(reader.schedule.is_complete(), "reader {index} misses shards");
        }
    }

    /// Returns the time until all had everything, in units of one transfer of the object.
    fn transfers(&self) -> f64 {
        self.now / self.shards as f64
    }
}

#[test]
fn eight_readers_need_at_most_one_and_a_half_transfers() {
    let mut swarm = Swarm::new(8, 1, 64);
    swarm.finish();
    assert!(swarm.transfers() <= 1.5, "{} transfers", swarm.transfers());
    assert!(swarm.sent_by_seeder <= 64 * 3 / 2, "the seeder sent {} shards of 64", swarm.sent_by_seeder);
}

#[test]
fn readers_that_serve_only_whole_objects_need_four_times_as_long() {
    let mut shared = Swarm::new(8, 1, 64);
    shared.finish();
    let mut whole = Swarm::new(8, 1, 64);
    whole.serves_whole_only = true;
    whole.finish();
    assert!(
        whole.transfers() >= 4.0 * shared.transfers(),
        "{} transfers instead of {}",
        whole.transfers(),
        shared.transfers()
    );
    assert_eq!(whole.sent_by_seeder, 8 * 64, "every reader reads everything from the seeder");
}

#[test]
fn thirty_two_readers_need_at_most_two_transfers() {
    let mut swarm = Swarm::new(32, 1, 64);
    swarm.finish();
    assert!(swarm.transfers() <= 2.0, "{} transfers", swarm.transfers());
}

#[test]
fn readers_of_one_host_share_what_crosses_the_network() {
    let mut swarm = Swarm::new(8, 4, 64);
    swarm.finish();
    assert_eq!(swarm.over_network, 2 * 64, "{} shards crossed the network", swarm.over_network);
}

#[test]
fn all_finish_when_the_seeder_ends_once_all_shards_are_out() {
    let mut swarm = Swarm::new(8, 1, 64);
    while swarm.shards_out() < 64 {
        assert!(swarm.step());
    }
    assert!(swarm.readers.iter().any(|reader| reader.done.is_none()));
    swarm.kill(0);
    swarm.finish();
}

#[test]
fn readers_that_end_at_random_stop_no_other() {
    let mut swarm = Swarm::new(16, 1, 64);
    let mut rng = Rng::seeded(test_seed());
    for _ in 0..8 {
        for _ in 0..rng.range(10..60) {
            swarm.step();
        }
        let node = 1 + rng.below(16) as usize;
        swarm.kill(node);
    }
    swarm.finish();
}
