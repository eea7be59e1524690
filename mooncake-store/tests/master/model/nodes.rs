//! Nodes that join, stop, die and announce, and masters that are restarted.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use mooncake_core::alloc::Extent;
use mooncake_core::clock::{Clock, Moment};
use mooncake_core::ids::{ReplicaId, SegmentId, Uuid};
use mooncake_core::replica::Segment;
use mooncake_store::master::{Master, Snapshot};
use mooncake_store::protocol::wire::{EpochPair, StoredReplica};

use super::world::{SEGMENT, Verdict, World, options};
use super::{Mistake, NODES};
use crate::common::rig::{client, segment};

/// Minimum time for which a client takes unmounted memory to be in use.
const LATE_USE: Duration = Duration::from_secs(60);

/// Node: a range of memory, as its process records it.
pub(crate) struct Node {
    pub(crate) segment: Segment,
    /// Number of the client of its process.
    pub(crate) client: u64,
    pub(crate) memory: Vec<u8>,
    /// Number of its process.
    pub(crate) instance: u64,
    /// Marks a transport that accepts other processes.
    pub(crate) open: bool,
    pub(crate) paused: bool,
    /// Longest lease promise that it received from a master.
    promise: u64,
    /// Time until which peers may use the memory, which was unmounted.
    retired_until: Moment,
    epoch: u64,
    /// Order of the masters that it has met or knows from others.
    epochs: Vec<EpochPair>,
    heard: u64,
    /// Number of the last work of its disk.
    pub(crate) work_done: u64,
    /// Objects from the inventory, with their bytes once they were read, and whether the bytes are
    /// known to be those of the object.
    entries: HashMap<ReplicaId, (StoredReplica, Option<Vec<u8>>, bool)>,
    /// Objects that are to be announced. The flag is set for those that the master has listed.
    kept: VecDeque<(StoredReplica, Vec<u8>, bool)>,
}

impl Node {
    pub(crate) fn join(world: &World, number: u64) -> Self {
        let mut node = Self {
            segment: segment(number, SEGMENT),
            client: number,
            memory: vec![0; SEGMENT as usize],
            instance: number + 1,
            open: true,
            paused: false,
            promise: 0,
            retired_until: Moment(0),
            epoch: 0,
            epochs: Vec::new(),
            heard: 0,
            work_done: 0,
            entries: HashMap::new(),
            kept: VecDeque::new(),
        };
        node.begin(world);
        world.rig.master.mount(client(number), &node.segment).unwrap();
        node
    }

    /// Requests the inventory of a master, and reports earlier promises.
    fn begin(&mut self, world: &World) {
        let page = world.rig.master.inventory(client(self.client), 0);
        if self.epoch != 0 && self.epoch != page.epoch {
            self.epochs.insert(0, EpochPair { newer: page.epoch, older: self.epoch });
        }
        (self.epoch, self.heard) = (page.epoch, page.next);
        self.epochs = world.rig.master.exchange_epochs(&self.epochs);
        if !world.is(Mistake::ForgetPromise) {
            let welcome = world.rig.master.exchange_promise(client(self.client), self.promise);
            self.promise = self.promise.max(welcome.promise_ms);
        }
    }

    fn bytes_of(&self, stored: &StoredReplica) -> Option<&[u8]> {
        let from = usize::try_from(stored.offset).ok()?;
        self.memory.get(from..from.checked_add(usize::try_from(stored.len).ok()?)?)
    }
}

impl World {
    pub(crate) fn resume(&mut self, node: u64) -> Verdict {
        self.nodes[node as usize].paused = false;
        if !self.rig.master.ping(client(self.nodes[node as usize].client)).need_remount {
            return Ok(());
        }
        let mut at = std::mem::replace(&mut self.nodes[node as usize], Node::placeholder());
        let outcome = self.remount(&mut at);
        self.nodes[node as usize] = at;
        outcome.map_err(|error| format!("remount of node {node}: {error}"))
    }

    /// Remounts a node that the master does not know.
    fn remount(&mut self, at: &mut Node) -> mooncake_core::Result<()> {
        let before = at.epoch;
        at.begin(self);
        let entries = std::mem::take(&mut at.entries).into_values();
        if at.epoch == before {
            at.kept = self.listed_as_expired(at);
        } else {
            let sealed = entries.filter(|(.., sealed)| *sealed);
            at.kept.extend(sealed.filter_map(|(stored, bytes, _)| Some((stored, bytes?, false))));
        }
        at.kept.retain(|(stored, ..)| stored.segment == at.segment.id);
        let late = self.rig.master.unclaimed(client(at.client), at.segment.id, 0);
        for listed in late.changes.iter().filter_map(|change| change.stored.as_ref()) {
            let is_it = |kept: &StoredReplica| {
                (kept.epoch, kept.number, kept.offset) == (listed.epoch, listed.number, listed.offset)
            };
            at.kept.iter_mut().filter(|(stored, ..)| is_it(stored)).for_each(|kept| kept.2 = true);
        }
        let (who, master) = (client(at.client), &self.rig.master);
        if !at.open {
            at.kept.clear();
            return master.remount(who, &[]);
        }
        if self.setup.own_memory {
            self.next += 1;
            at.segment.base += self.next * SEGMENT;
            master.mount_with_objects(who, &at.segment)?;
            let extent = |(stored, ..): &(StoredReplica, Vec<u8>, bool)| Extent {
                offset: stored.offset,
                len: stored.len.next_multiple_of(64),
            };
            let mut extents: Vec<_> = at.kept.iter().map(extent).collect();
            extents.sort_unstable_by_key(|extent| extent.offset);
            if master.reserve_extents(who, at.segment.id, &extents, true).is_err() {
                // Two replicas overlap: none is trusted.
                at.kept.clear();
                master.release_reserved(who, at.segment.id)?;
            }
        } else {
            at.kept.clear();
        }
        for _ in 0..2 {
            master.remount(who, std::slice::from_ref(&at.segment))?;
        }
        Ok(())
    }

    /// Returns the objects that the master lists since the node expired. It has granted no space in
    /// the segment since then.
    fn listed_as_expired(&self, at: &Node) -> VecDeque<(StoredReplica, Vec<u8>, bool)> {
        if !self.setup.own_memory {
            return VecDeque::new();
        }
        let page = self.rig.master.expired(client(at.client), at.segment.id, 0);
        let stored = page.changes.into_iter().filter_map(|change| change.stored);
        stored
            .filter_map(|stored| {
                let bytes = at.bytes_of(&stored)?.to_vec();
                Some((stored, bytes, true))
            })
            .collect()
    }

    pub(crate) fn kill(&mut self, node: u64, same_port: bool) -> Verdict {
        self.next += 1;
        let next = self.next;
        let at = &mut self.nodes[node as usize];
        let died = at.client;
        at.segment.id = SegmentId(Uuid::new(3, next));
        if !same_port {
            at.segment.endpoint = format!("10.0.0.{node}:{next}");
        }
        (at.client, at.instance) = (1000 + next, 1000 + next);
        at.memory.fill(0);
        (at.open, at.paused, at.promise, at.work_done) = (true, false, 0, 0);
        at.entries.clear();
        at.kept.clear();
        at.epochs.clear();
        at.epoch = 0;
        self.files.retain(|(owner, _), _| *owner != died);
        self.client_died(died);
        let mut at = std::mem::replace(&mut self.nodes[node as usize], Node::placeholder());
        at.begin(self);
        let mounted = self.rig.master.mount(client(at.client), &at.segment);
        self.nodes[node as usize] = at;
        mounted.map_err(|error| format!("mount after a crash: {error}"))
    }

    pub(crate) fn unmount(&mut self, node: u64) -> Verdict {
        let at = &mut self.nodes[node as usize];
        at.open = false;
        at.entries.clear();
        at.kept.clear();
        for _ in 0..2 {
            let gone = self.rig.master.unmount(client(at.client), at.segment.id);
            gone.map_err(|error| format!("unmount of node {node}: {error}"))?;
        }
        let at = &mut self.nodes[node as usize];
        at.retired_until = self.rig.clock.now().after(LATE_USE.max(Duration::from_millis(at.promise)));
        Ok(())
    }

    /// Offers the same memory again, as the same segment or another one.
    pub(crate) fn mount(&mut self, node: u64, same_id: bool) -> Verdict {
        // A node that the master has forgotten remounts before it mounts anything else.
        self.resume(node)?;
        self.next += 1;
        let at = &mut self.nodes[node as usize];
        if !at.open && !same_id {
            at.segment.id = SegmentId(Uuid::new(3, self.next));
        }
        at.open = true;
        let (who, segment) = (client(at.client), std::slice::from_ref(&at.segment));
        let again = self.rig.clock.now() < at.retired_until;
        for _ in 0..2 {
            let master = &self.rig.master;
            let mounted = if again { master.remount(who, segment) } else { master.mount(who, &at.segment) };
            mounted.map_err(|error| format!("mount of node {node}: {error}"))?;
        }
        Ok(())
    }

    pub(crate) fn hear(&mut self, node: u64) {
        let at = &mut self.nodes[node as usize];
        let page = self.rig.master.inventory(client(at.client), at.heard);
        if page.epoch != at.epoch {
            return;
        }
        if page.lost {
            at.entries.clear();
        }
        at.heard = page.next;
        for change in page.changes {
            match change.stored {
                Some(stored) => drop(at.entries.insert(change.replica, (stored, None, false))),
                None => drop(at.entries.remove(&change.replica)),
            }
        }
        // Bytes that were read before this request are those of an object that still exists.
        let mut entries = std::mem::take(&mut at.entries);
        for (stored, bytes, sealed) in entries.values_mut() {
            *sealed |= bytes.is_some();
            if bytes.is_none() {
                *bytes = at.bytes_of(stored).map(<[u8]>::to_vec);
            }
        }
        at.entries = entries;
    }

    pub(crate) fn hear_all(&mut self) {
        for node in (0..NODES).filter(|node| !self.nodes[*node as usize].paused).collect::<Vec<_>>() {
            self.hear(node);
            self.hear(node);
        }
    }

    /// Announces one object. Returns whether there was one.
    pub(crate) fn announce(&mut self, node: u64) -> bool {
        let at = &mut self.nodes[node as usize];
        let who = client(at.client);
        if at.paused {
            return false;
        }
        let next = at.kept.pop_front();
        if let Some((stored, bytes, listed)) = &next {
            if at.bytes_of(stored) == Some(bytes) {
                let master = &self.rig.master;
                let _ =
                    if *listed { master.announce_expired(who, stored) } else { master.announce(who, stored) };
            }
            if at.kept.is_empty() {
                let _ = self.rig.master.release_reserved(who, at.segment.id);
            }
        }
        next.is_some()
    }

    pub(crate) fn take_snapshot(&mut self) -> Verdict {
        let mut bytes = Vec::new();
        let written = self.rig.master.snapshot(|part| {
            bytes.extend_from_slice(part);
            Ok(())
        });
        written.map_err(|error| format!("snapshot: {error}"))?;
        self.snapshot = Some((bytes, self.permitted()));
        Ok(())
    }

    pub(crate) fn restart(&mut self, recall: bool, long_leases: bool) {
        self.next += 1;
        let (options, clock) = (options(self.setup, long_leases), self.rig.clock.clone());
        let parts = (Default::default(), Default::default());
        let master = Master::with_parts(options, &parts.0, &parts.1, clock, 1000 + self.next);
        self.rig.master = master.unwrap();
        self.plant();
        let mut known = None;
        if recall
            && !self.is(Mistake::ForgetPromise)
            && let Some((bytes, permitted)) = &self.snapshot
        {
            self.rig.master.recall(Snapshot::read(bytes).unwrap());
            known = Some(permitted.clone());
        }
        self.drain = None;
        self.copiers.clear();
        self.started.clear();
        self.loosen(known);
    }
}

impl Node {
    /// Returns a placeholder for a node that is being changed.
    fn placeholder() -> Self {
        Self {
            segment: segment(u64::from(u16::MAX), SEGMENT),
            client: 0,
            memory: Vec::new(),
            instance: 0,
            open: false,
            paused: true,
            promise: 0,
            retired_until: Moment(0),
            epoch: 0,
            epochs: Vec::new(),
            heard: 0,
            work_done: 0,
            entries: HashMap::new(),
            kept: VecDeque::new(),
        }
    }
}
