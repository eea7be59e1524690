//! Random interleavings of everything that can happen to a cluster, against a model that knows what each read must show.
//!
//! Memory is real bytes. Reads and writes take several steps, so that whoever hands out space too early lets one tear the
//! other. A writer may go on until its grant runs out, whatever the master thinks of it by then; a reader believes what
//! it read only if its lease still holds at the last byte. What is checked: a read that succeeds shows exactly the bytes of
//! the put that was complete when it began (contract 1) however late writers are (3), repeated calls change nothing (5), and
//! when all is removed nothing is left (8).

#[path = "master_support/mod.rs"]
mod support;

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment};
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ReplicaId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Bug, MasterOptions, Put, Writer};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use support::{Rig, address, client, endpoint};

const NODES: u64 = 3;
const KEYS: u64 = 6;
const SEGMENT: u64 = 1024;
const LEASE: Duration = Duration::from_secs(10);
const GRANT: Duration = Duration::from_secs(600);
/// A revoked write's last bytes arrive within this time.
const LATE: Duration = Duration::from_secs(9);
/// A read or write moves this much at a time.
const CHUNK: usize = 96;

#[derive(Clone, Debug)]
enum Step {
    Start {
        key: u64,
        len: u64,
        upsert: bool,
        replicas: u64,
        pinned: bool,
    },
    Write {
        which: usize,
    },
    Revoke {
        which: usize,
    },
    Read {
        key: u64,
    },
    Copy {
        which: usize,
    },
    Exist {
        key: u64,
    },
    Remove {
        key: u64,
        force: bool,
    },
    RemoveAll {
        force: bool,
    },
    /// A node is stopped: its memory stays, it does not ping.
    Pause {
        node: u64,
    },
    Resume {
        node: u64,
    },
    /// A node dies with its memory and comes back empty, at another endpoint.
    Kill {
        node: u64,
    },
    Unmount {
        node: u64,
    },
    Mount {
        node: u64,
        same_id: bool,
    },
    Pass {
        tenths: u64,
    },
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    let (key, node, which) = (0..KEYS, 0..NODES, 0..8usize);
    prop_oneof![
        40 => (key.clone(), 1..=400u64, any::<bool>(), 1..=2u64, prop::bool::weighted(0.05))
            .prop_map(|(key, len, upsert, replicas, pinned)| Step::Start { key, len, upsert, replicas, pinned }),
        240 => which.clone().prop_map(|which| Step::Write { which }),
        8 => which.clone().prop_map(|which| Step::Revoke { which }),
        80 => key.clone().prop_map(|key| Step::Read { key }),
        240 => which.prop_map(|which| Step::Copy { which }),
        10 => key.clone().prop_map(|key| Step::Exist { key }),
        20 => (key, any::<bool>()).prop_map(|(key, force)| Step::Remove { key, force }),
        2 => any::<bool>().prop_map(|force| Step::RemoveAll { force }),
        4 => node.clone().prop_map(|node| Step::Pause { node }),
        8 => node.clone().prop_map(|node| Step::Resume { node }),
        2 => node.clone().prop_map(|node| Step::Kill { node }),
        4 => node.clone().prop_map(|node| Step::Unmount { node }),
        10 => (node, any::<bool>()).prop_map(|(node, same_id)| Step::Mount { node, same_id }),
        30 => prop_oneof![20 => 1..20u64, 3 => 20..110u64, 1 => Just(310u64), 1 => Just(6010u64)]
            .prop_map(|tenths| Step::Pass { tenths }),
        20 => Just(Step::Tick),
    ]
}

/// A node: a range of memory, as its process sees it.
struct Node {
    segment: Segment,
    /// Number of its process's client.
    client: u64,
    memory: Vec<u8>,
    /// Its wire lets others in.
    open: bool,
    paused: bool,
}

struct Value {
    version: u64,
    len: usize,
}

impl Value {
    /// Every byte says which value it belongs to and where in it.
    fn bytes(&self) -> Vec<u8> {
        (0..self.len as u64)
            .map(|at| {
                let mixed = (self.version * 0x9e37_79b9 + at).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (mixed >> 56) as u8
            })
            .collect()
    }
}

struct Write {
    key: u64,
    writer: Writer,
    replicas: Vec<Replica>,
    value: Value,
    /// Bytes written, over all replicas.
    done: usize,
    until: Moment,
    revoked: bool,
}

struct Read {
    replica: Replica,
    expected: Vec<u8>,
    got: Vec<u8>,
    deadline: Moment,
}

struct World {
    rig: Rig,
    nodes: Vec<Node>,
    writes: Vec<Write>,
    reads: Vec<Read>,
    /// What a read of each key must show, if anything.
    current: HashMap<u64, Value>,
    leases: HashMap<u64, Moment>,
    /// Which value each number of a replica was told for.
    numbers: HashMap<ReplicaId, (u64, u64)>,
    next: u64,
    good_reads: u64,
    /// Judge by what readers get alone, not by what the master refuses.
    bytes_only: bool,
}

type Verdict = Result<(), String>;

impl World {
    fn new(bug: Option<Bug>) -> Self {
        let rig = Rig::with(MasterOptions { shards: 4, high_watermark: 0.95, ..MasterOptions::default() });
        if let Some(bug) = bug {
            rig.master.plant(bug);
        }
        let nodes = (0..NODES)
            .map(|number| {
                let segment = rig.mount(number, SEGMENT);
                Node { segment, client: number, memory: vec![0; SEGMENT as usize], open: true, paused: false }
            })
            .collect();
        Self {
            rig,
            nodes,
            writes: Vec::new(),
            reads: Vec::new(),
            current: HashMap::new(),
            leases: HashMap::new(),
            numbers: HashMap::new(),
            next: 1,
            good_reads: 0,
            bytes_only: bug.is_some(),
        }
    }

    fn now(&self) -> Moment {
        self.rig.clock.now()
    }

    fn apply(&mut self, step: &Step) -> Verdict {
        match *step {
            Step::Start { key, len, upsert, replicas, pinned } => {
                self.start(key, len, upsert, replicas, pinned)?
            }
            Step::Write { which } => self.write(which)?,
            Step::Revoke { which } => self.revoke(which)?,
            Step::Read { key } => self.read(key)?,
            Step::Copy { which } => self.copy(which)?,
            Step::Exist { key } => self.exist(key)?,
            Step::Remove { key, force } => self.remove(key, force)?,
            Step::RemoveAll { force } => {
                self.rig.master.remove_all(force);
                self.look_for_removed(force);
            }
            Step::Pause { node } => self.nodes[node as usize].paused = true,
            Step::Resume { node } => self.resume(node)?,
            Step::Kill { node } => self.kill(node)?,
            Step::Unmount { node } => self.unmount(node)?,
            Step::Mount { node, same_id } => self.mount(node, same_id)?,
            Step::Pass { tenths } => self.pass(Duration::from_millis(tenths * 100)),
            Step::Tick => drop(self.rig.master.tick()),
        }
        Ok(())
    }

    fn start(&mut self, key: u64, len: u64, upsert: bool, replicas: u64, pinned: bool) -> Verdict {
        self.next += 1;
        let writer = Writer { client: client(100_000 + self.next), attempt: self.next };
        let mode = if upsert { WriteMode::Upsert } else { WriteMode::Put };
        let config = ReplicateConfig { hard_pin: pinned, ..ReplicateConfig::replicas(replicas) };
        let name = name(key);
        let put = Put { writer, mode, key: &name, len, config: &config, group: "" };
        let until = self.now().after(GRANT);
        let readable = self.rig.master.peek(&name).is_ok();
        let Ok(granted) = self.rig.master.put_start(&put) else { return Ok(()) };
        if mode == WriteMode::Put && readable {
            return Err(format!("a put of {key} was granted although it exists"));
        }
        let again = self.rig.master.put_start(&put).map_err(|e| e.code());
        if again.as_ref() != Ok(&granted) {
            return Err(format!("put start repeated: {granted:?}, then {again:?}"));
        }
        let value = Value { version: self.next, len: len as usize };
        self.writes.push(Write { key, writer, replicas: granted, value, done: 0, until, revoked: false });
        Ok(())
    }

    /// One write moves on; at its end it is reported complete, twice.
    fn write(&mut self, which: usize) -> Verdict {
        let Some(mut write) = take(&mut self.writes, which) else { return Ok(()) };
        if self.now() >= write.until {
            return Ok(());
        }
        let bytes = write.value.bytes();
        let total = bytes.len() * write.replicas.len();
        if write.done < total {
            let (replica, from) = (write.done / bytes.len(), write.done % bytes.len());
            let to = (from + CHUNK).min(bytes.len());
            match self.memory(&write.replicas[replica]) {
                Some(memory) => memory[from..to].copy_from_slice(&bytes[from..to]),
                None if write.revoked => return Ok(()),
                None => {
                    self.writes.push(write);
                    return self.revoke(self.writes.len() - 1);
                }
            }
            write.done += to - from;
        }
        if write.done < total {
            self.writes.push(write);
        } else if !write.revoked {
            let name = name(write.key);
            let end = || self.rig.master.put_end(write.writer, &name, None, ReplicaType::All);
            if end().is_ok() {
                end().map_err(|error| format!("put end repeated: {error}"))?;
                self.leases.remove(&write.key);
                self.current.insert(write.key, write.value);
            }
        }
        Ok(())
    }

    /// The writer gives up; what it had sent may still arrive for a while.
    fn revoke(&mut self, which: usize) -> Verdict {
        let Some(mut write) = take(&mut self.writes, which) else { return Ok(()) };
        if write.revoked {
            return Ok(());
        }
        let name = name(write.key);
        let revoke =
            || self.rig.master.put_revoke(write.writer, &name, ReplicaType::All).map_err(|e| e.code());
        let first = revoke();
        if first.is_ok() && revoke().is_ok() {
            return Err("a second revoke found something to revoke".into());
        }
        write.revoked = true;
        write.until = write.until.min(self.now().after(LATE));
        self.writes.push(write);
        Ok(())
    }

    fn read(&mut self, key: u64) -> Verdict {
        let asked = self.now();
        let found = self.rig.master.locate(&name(key)).map_err(|e| e.code());
        let list = match (found, self.current.get(&key)) {
            (Ok(list), Some(_)) => list,
            (Ok(_), None) => return Err(format!("key {key} is readable and should not be")),
            (Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady), _) => {
                // Evicted, or gone with its node. It must not come back.
                self.current.remove(&key);
                return Ok(());
            }
            (Err(code), _) => return Err(format!("locate: {code:?}")),
        };
        for replica in &list.replicas {
            let value = (key, self.current[&key].version);
            if *self.numbers.entry(replica.id).or_insert(value) != value || !replica.id.is_of_one_value() {
                return Err(format!("{:?} is told for two values", replica.id));
            }
        }
        let expected = self.current[&key].bytes();
        self.leases.insert(key, asked.after(LEASE));
        for replica in list.replicas {
            let deadline = asked.after(list.lease);
            self.reads.push(Read { replica, expected: expected.clone(), got: Vec::new(), deadline });
        }
        Ok(())
    }

    /// One read moves on; at its end it is believed if the lease still holds.
    fn copy(&mut self, which: usize) -> Verdict {
        let Some(mut read) = take(&mut self.reads, which) else { return Ok(()) };
        let from = read.got.len();
        let to = (from + CHUNK).min(read.expected.len());
        // A node that is gone, or refuses, is a miss.
        let Some(memory) = self.memory(&read.replica) else { return Ok(()) };
        let bytes = memory[from..to].to_vec();
        read.got.extend(bytes);
        if read.got.len() < read.expected.len() {
            self.reads.push(read);
        } else if self.now() < read.deadline {
            if read.got != read.expected {
                return Err(format!("wrong bytes at {:?}", read.replica));
            }
            self.good_reads += 1;
        }
        Ok(())
    }

    fn exist(&mut self, key: u64) -> Verdict {
        let now = self.now();
        match (self.rig.master.exists(&name(key)), self.current.contains_key(&key)) {
            (true, false) => Err(format!("key {key} exists and should not")),
            (true, true) => {
                self.leases.insert(key, now.after(LEASE));
                Ok(())
            }
            (false, _) => {
                self.current.remove(&key);
                Ok(())
            }
        }
    }

    fn remove(&mut self, key: u64, force: bool) -> Verdict {
        let name = name(key);
        match self.rig.master.remove(&name, force) {
            Ok(()) => {
                if !self.bytes_only
                    && !force
                    && self.leases.get(&key).is_some_and(|lease| *lease > self.now())
                {
                    return Err(format!("key {key} was removed under a lease"));
                }
                self.current.remove(&key);
                self.leases.remove(&key);
                match self.rig.master.remove(&name, force).map_err(|e| e.code()) {
                    Err(ErrorCode::ObjectNotFound) => Ok(()),
                    other => Err(format!("remove repeated: {other:?}")),
                }
            }
            Err(_) => Ok(()),
        }
    }

    /// After a remove of all: what cannot be read any more must not come back.
    fn look_for_removed(&mut self, force: bool) {
        let master = &self.rig.master;
        self.current.retain(|key, _| master.peek(&name(*key)).is_ok());
        if force {
            self.leases.clear();
        }
    }

    fn resume(&mut self, node: u64) -> Verdict {
        self.nodes[node as usize].paused = false;
        self.ping(node)
    }

    fn ping(&mut self, node: u64) -> Verdict {
        let at = &self.nodes[node as usize];
        if !self.rig.master.ping(client(at.client)).need_remount {
            return Ok(());
        }
        let segments = if at.open { vec![at.segment.clone()] } else { Vec::new() };
        for _ in 0..2 {
            let again = self.rig.master.remount(client(at.client), &segments);
            again.map_err(|error| format!("remount of node {node}: {error}"))?;
        }
        Ok(())
    }

    fn kill(&mut self, node: u64) -> Verdict {
        self.next += 1;
        let at = &mut self.nodes[node as usize];
        at.segment.id = SegmentId(Uuid::new(3, self.next));
        at.segment.endpoint = format!("10.0.0.{node}:{}", self.next);
        at.client = 1000 + self.next;
        at.memory.fill(0);
        (at.open, at.paused) = (true, false);
        let mounted = self.rig.master.mount(client(at.client), &at.segment);
        mounted.map_err(|error| format!("mount after a crash: {error}"))
    }

    fn unmount(&mut self, node: u64) -> Verdict {
        let at = &mut self.nodes[node as usize];
        at.open = false;
        for _ in 0..2 {
            let gone = self.rig.master.unmount(client(at.client), at.segment.id);
            gone.map_err(|error| format!("unmount of node {node}: {error}"))?;
        }
        Ok(())
    }

    /// The same memory is offered again, as the same segment or another.
    fn mount(&mut self, node: u64, same_id: bool) -> Verdict {
        self.next += 1;
        let at = &mut self.nodes[node as usize];
        if !at.open && !same_id {
            at.segment.id = SegmentId(Uuid::new(3, self.next));
        }
        at.open = true;
        for _ in 0..2 {
            let mounted = self.rig.master.mount(client(at.client), &at.segment);
            mounted.map_err(|error| format!("mount of node {node}: {error}"))?;
        }
        Ok(())
    }

    fn pass(&mut self, mut span: Duration) {
        while !span.is_zero() {
            let step = span.min(Duration::from_secs(4));
            self.rig.clock.advance(step);
            span -= step;
            for node in self.nodes.iter().filter(|node| !node.paused) {
                let _ = self.rig.master.ping(client(node.client));
            }
        }
    }

    /// The bytes of a replica, if its node still has them and lets others in.
    fn memory(&mut self, replica: &Replica) -> Option<&mut [u8]> {
        let node = self.nodes.iter_mut().find(|node| node.segment.endpoint == endpoint(replica))?;
        let from = (address(replica) - node.segment.base) as usize;
        let len = replica.location.size() as usize;
        node.open.then(|| &mut node.memory[from..from + len])
    }

    /// Everything is given up and removed: nothing may be left.
    fn finish(&mut self) -> Verdict {
        self.writes.clear();
        self.reads.clear();
        for node in 0..NODES {
            self.resume(node)?;
        }
        self.pass(GRANT + LEASE);
        self.rig.master.tick();
        self.rig.master.remove_all(true);
        self.pass(LEASE);
        self.rig.master.tick();
        self.rig.master.tick();
        let stats = self.rig.master.stats();
        if (stats.used(), stats.resting(), stats.keys, stats.writing) != (0, 0, 0, 0) {
            return Err(format!("left behind: {stats:?}"));
        }
        Ok(())
    }
}

fn name(key: u64) -> Vec<u8> {
    format!("key {key}").into_bytes()
}

fn take<T>(from: &mut Vec<T>, which: usize) -> Option<T> {
    if from.is_empty() { None } else { Some(from.remove(which % from.len())) }
}

fn run(steps: &[Step], bug: Option<Bug>) -> Result<u64, String> {
    let mut world = World::new(bug);
    for (at, step) in steps.iter().enumerate() {
        world.apply(step).map_err(|what| format!("step {at} ({step:?}): {what}"))?;
    }
    world.finish()?;
    Ok(world.good_reads)
}

/// Runs many random lists of steps; how many reads succeeded, and the shortest list that went wrong.
fn check(cases: u32, bug: Option<Bug>) -> (u64, Result<(), TestError<Vec<Step>>>) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let reads = std::cell::Cell::new(0);
    let outcome =
        TestRunner::new_with_rng(config, rng).run(&prop::collection::vec(step(), 1..400), |steps| {
            let good = run(&steps, bug).map_err(TestCaseError::fail)?;
            reads.set(reads.get() + good);
            Ok(())
        });
    (reads.get(), outcome)
}

#[test]
fn every_interleaving_keeps_the_contract() {
    let (reads, outcome) = check(400, None);
    if let Err(TestError::Fail(why, steps)) = outcome {
        panic!("{why}\n{steps:#?}");
    }
    assert!(reads > 2000, "the model must get to see successful reads: {reads}");
}

#[test]
fn planted_bugs_are_found_by_wrong_bytes() {
    for bug in [Bug::SkipLease, Bug::ReuseEarly] {
        let Err(TestError::Fail(why, _)) = check(400, Some(bug)).1 else { panic!("{bug:?} was not found") };
        assert!(why.message().contains("wrong bytes"), "{bug:?}: {why}");
    }
}
