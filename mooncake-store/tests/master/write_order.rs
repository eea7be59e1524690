//! Order of writes: that of their ends, also for ends that one call reports, and also for the next
//! master.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mooncake_core::alloc::Extent;
use mooncake_core::clock::{Clock, ManualClock, Moment};
use mooncake_core::error::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put, Snapshot, Writer};
use mooncake_store::protocol::message::{BatchPutEnd, Handle};
use mooncake_store::protocol::wire::{EndItem, StoredReplica};

use crate::common::rig::{KIB, MIB, client, segment};

type Call = Box<dyn FnOnce() + Send>;

/// Clock that makes a call when it is read. The end of a batch reads it before each object, while
/// it holds no lock.
struct CallingClock {
    time: ManualClock,
    /// Call to make, and the number of readings before it.
    call: Mutex<Option<(usize, Call)>>,
}

impl fmt::Debug for CallingClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.time.fmt(f)
    }
}

impl Clock for CallingClock {
    fn now(&self) -> Moment {
        let mut next = self.call.lock().unwrap();
        let call = match next.take() {
            Some((0, call)) => Some(call),
            Some((readings, call)) => {
                *next = Some((readings - 1, call));
                None
            }
            None => None,
        };
        drop(next);
        if let Some(call) = call {
            call();
        }
        self.time.now()
    }

    fn wall_ms(&self) -> u64 {
        self.time.wall_ms()
    }
}

struct Node {
    clock: Arc<CallingClock>,
    master: Arc<Master>,
}

impl Node {
    fn new(policy: PolicyKind, seed: u64) -> Self {
        let clock = Arc::new(CallingClock { time: ManualClock::new(), call: Mutex::default() });
        clock.time.advance(Duration::from_secs(seed));
        let options = MasterOptions { high_watermark: 1.0, ..MasterOptions::default() };
        let parts = (Default::default(), policy.into());
        let master = Master::with_parts(options, &parts.0, &parts.1, clock.clone(), seed).unwrap();
        Self { clock, master: Arc::new(master) }
    }

    fn mount(&self, who: u64) -> Segment {
        self.master.inventory(client(who), 0);
        let segment = segment(who, MIB);
        self.master.mount(client(who), &segment).unwrap();
        segment
    }

    /// Makes a call during the end of a batch, before the object at this index is stored.
    fn call_before_object(&self, index: usize, call: impl FnOnce() + Send + 'static) {
        *self.clock.call.lock().unwrap() = Some((index, Box::new(call)));
    }

    fn end_batch(&self, who: u64, keys: &[&str]) {
        let items: Vec<_> = keys.iter().map(|key| EndItem { key: key.as_bytes(), checksum: None }).collect();
        let call = BatchPutEnd {
            client: client(who),
            items: items.into(),
            replicas: ReplicaType::All,
            tenant: "default",
        };
        self.master.handle(call).into_iter().for_each(|ended| ended.unwrap());
    }

    /// Announces replicas of a segment to this master, and returns which of them are accepted.
    fn announce(&self, who: u64, segment: &Segment, stored: &[StoredReplica]) -> Vec<bool> {
        let extent =
            |stored: &StoredReplica| Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) };
        let extents: Vec<_> = stored.iter().map(extent).collect();
        self.master.mount_with_objects(client(who), segment).unwrap();
        self.master.reserve_extents(client(who), segment.id, &extents, true).unwrap();
        stored.iter().map(|stored| self.master.announce(client(who), stored).is_ok()).collect()
    }
}

fn start(master: &Master, who: u64, key: &str, len: u64) {
    let config =
        ReplicateConfig { preferred_segments: vec![format!("node{who}:1")], ..ReplicateConfig::default() };
    let key = key.as_bytes();
    let mode = WriteMode::Upsert;
    let put = Put { writer: client(who).into(), mode, key, len, config: &config, group: "", session: None };
    master.put_start(&put).unwrap();
}

/// Returns the objects that the segment of a client holds.
fn stored(master: &Master, who: u64) -> Vec<StoredReplica> {
    let page = master.inventory(client(who), 0);
    assert!(page.whole);
    let gone: Vec<_> =
        page.changes.iter().filter(|change| change.stored.is_none()).map(|change| change.replica).collect();
    let there = page.changes.into_iter().filter(|change| !gone.contains(&change.replica));
    there.filter_map(|change| change.stored).collect()
}

fn snapshot(master: &Master) -> Vec<u8> {
    let mut bytes = Vec::new();
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        Ok(())
    };
    master.snapshot(write).unwrap();
    bytes
}

#[test]
fn a_snapshot_during_the_end_of_a_batch_loses_no_object() {
    let keys = ["a", "b", "c", "d", "e"];
    for policy in [PolicyKind::Gittins, PolicyKind::Lru] {
        for index in 0..keys.len() {
            let node = Node::new(policy, 3);
            let segment = node.mount(1);
            keys.iter().for_each(|key| start(&node.master, 1, key, KIB));
            let written = Arc::new(Mutex::new(Vec::new()));
            let (master, bytes) = (node.master.clone(), written.clone());
            node.call_before_object(index, move || *bytes.lock().unwrap() = snapshot(&master));
            node.end_batch(1, &keys);
            let next = Node::new(policy, 8);
            next.master.recall(Snapshot::read(&written.lock().unwrap()).unwrap());
            let accepted = next.announce(1, &segment, &stored(&node.master, 1));
            assert_eq!(accepted, [true; 5], "{policy:?}, snapshot before object {index}");
        }
    }
}

/// A snapshot that a batch follows still refuses what was removed before it.
#[test]
fn a_snapshot_refuses_objects_of_a_batch_that_were_removed_before_it() {
    let node = Node::new(PolicyKind::Gittins, 3);
    let segment = node.mount(1);
    ["a", "b"].iter().for_each(|key| start(&node.master, 1, key, KIB));
    node.end_batch(1, &["a", "b"]);
    let stale = stored(&node.master, 1);
    node.master.remove(b"a", true).unwrap();
    let written = snapshot(&node.master);
    let next = Node::new(PolicyKind::Gittins, 8);
    next.master.recall(Snapshot::read(&written).unwrap());
    let accepted = next.announce(1, &segment, &stale);
    for (stored, accepted) in stale.iter().zip(accepted) {
        assert_eq!(accepted, *stored.key == *b"b", "{}", stored.key.escape_ascii());
    }
}

/// A client replaces a value, and the master restarts before the end of the write. The value that
/// returns is not that of the write, so the end must not be confirmed.
#[test]
fn the_end_of_a_write_of_the_earlier_master_is_refused() {
    for attempt in [0, 9] {
        let node = Node::new(PolicyKind::Gittins, 3);
        let segment = node.mount(1);
        start(&node.master, 1, "k", KIB);
        node.end_batch(1, &["k"]);
        let held = stored(&node.master, 1);
        let writer = Writer { client: client(1), attempt };
        let config = ReplicateConfig::default();
        let (mode, key) = (WriteMode::Upsert, b"k");
        node.master
            .put_start(&Put { writer, mode, key, len: 2 * KIB, config: &config, group: "", session: None })
            .unwrap();
        let next = Node::new(PolicyKind::Gittins, 8);
        assert_eq!(next.announce(1, &segment, &held), [true]);
        let ended = next.master.put_end(writer, key, None, ReplicaType::All);
        assert_eq!(ended.unwrap_err().code(), ErrorCode::InvalidWrite, "attempt {attempt}");
        assert!(next.master.peek(key).is_ok());
    }
}

/// The end of a write that a batch reports comes after that of another client, although the call
/// began earlier.
#[test]
fn the_later_write_of_a_key_wins_after_a_restart() {
    for policy in [PolicyKind::Gittins, PolicyKind::Lru] {
        for first in [1, 2] {
            let node = Node::new(policy, 3);
            let segments = [node.mount(1), node.mount(2)];
            start(&node.master, 1, "a", KIB);
            start(&node.master, 2, "k", 2 * KIB);
            let earlier = Arc::new(Mutex::new(Vec::new()));
            let (master, of_earlier) = (node.master.clone(), earlier.clone());
            node.call_before_object(1, move || {
                master.put_end(Writer::from(client(2)), b"k", None, ReplicaType::All).unwrap();
                *of_earlier.lock().unwrap() = stored(&master, 2);
                start(&master, 1, "k", 3 * KIB);
            });
            node.end_batch(1, &["a", "k"]);
            let next = Node::new(policy, 8);
            for who in [first, 3 - first] {
                let (of_earlier, of_later) = (earlier.lock().unwrap().clone(), stored(&node.master, 1));
                let stored = if who == 1 { of_later } else { of_earlier };
                next.announce(who, &segments[who as usize - 1], &stored);
            }
            let found = next.master.locate(b"k").unwrap();
            let len = found.replicas[0].location.memory().unwrap().size;
            assert_eq!(len, 3 * KIB, "{policy:?}, client {first} returns first");
        }
    }
}
