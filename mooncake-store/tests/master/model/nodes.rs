//! Nodes that join, stop, die and announce, and masters that are restarted.

use std::collections::{HashMap, VecDeque};

use mooncake_core::alloc::Extent;
use mooncake_core::ids::{ReplicaId, SegmentId, Uuid};
use mooncake_core::replica::Segment;
use mooncake_store::master::{Master, Snapshot};
use mooncake_store::protocol::wire::StoredReplica;

use super::Mistake;
use super::world::{SEGMENT, Verdict, World, options};
use crate::common::rig::{client, segment};

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
    epoch: u64,
    heard: u64,
    /// Objects from the inventory, with their bytes once they were read, and whether the bytes are
    /// known to be those of the object.
    entries: HashMap<ReplicaId, (StoredReplica, Option<Vec<u8>>, bool)>,
    /// Objects of an earlier master that are to be announced.
    kept: VecDeque<(StoredReplica, Vec<u8>)>,
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
            epoch: 0,
            heard: 0,
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
        (self.epoch, self.heard) = (page.epoch, page.next);
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
            at.kept.clear();
        } else {
            let sealed = entries.filter(|(.., sealed)| *sealed);
            at.kept.extend(sealed.filter_map(|(stored, bytes, _)| Some((stored, bytes?))));
        }
        at.kept.retain(|(stored, _)| stored.segment == at.segment.id);
        let (who, master) = (client(at.client), &self.rig.master);
        if !at.open {
            at.kept.clear();
            return master.remount(who, &[]);
        }
        if self.setup.own_memory {
            self.next += 1;
            at.segment.base += self.next * SEGMENT;
            master.mount_kept(who, &at.segment)?;
            let extent = |(stored, _): &(StoredReplica, Vec<u8>)| Extent {
                offset: stored.offset,
                len: stored.len.next_multiple_of(64),
            };
            let mut extents: Vec<_> = at.kept.iter().map(extent).collect();
            extents.sort_unstable_by_key(|extent| extent.offset);
            if master.keep(who, at.segment.id, &extents, true).is_err() {
                // Two replicas overlap: none is trusted.
                at.kept.clear();
                master.release_kept(who, at.segment.id)?;
            }
        } else {
            at.kept.clear();
        }
        for _ in 0..2 {
            master.remount(who, std::slice::from_ref(&at.segment))?;
        }
        Ok(())
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
        (at.open, at.paused, at.promise) = (true, false, 0);
        at.entries.clear();
        at.kept.clear();
        self.files.retain(|(owner, _), _| *owner != died);
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
        for _ in 0..2 {
            let mounted = self.rig.master.mount(client(at.client), &at.segment);
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

    pub(crate) fn announce(&mut self, node: u64) {
        let at = &mut self.nodes[node as usize];
        let who = client(at.client);
        if let Some((stored, bytes)) = at.kept.pop_front() {
            if at.bytes_of(&stored) == Some(&bytes) {
                let _ = self.rig.master.announce(who, &stored);
            }
            if at.kept.is_empty() {
                let _ = self.rig.master.release_kept(who, at.segment.id);
            }
        }
    }

    pub(crate) fn take_snapshot(&mut self) -> Verdict {
        let mut bytes = Vec::new();
        let written = self.rig.master.snapshot(|part| {
            bytes.extend_from_slice(part);
            Ok(())
        });
        written.map_err(|error| format!("snapshot: {error}"))?;
        self.snapshot = Some(bytes);
        Ok(())
    }

    pub(crate) fn restart(&mut self, recall: bool, long_leases: bool) {
        self.next += 1;
        let (options, clock) = (options(self.setup, long_leases), self.rig.clock.clone());
        let parts = (Default::default(), Default::default());
        let master = Master::with_parts(options, &parts.0, &parts.1, clock, 1000 + self.next);
        self.rig.master = master.unwrap();
        self.plant();
        if recall
            && !self.is(Mistake::ForgetPromise)
            && let Some(bytes) = &self.snapshot
        {
            self.rig.master.recall(Snapshot::read(bytes).unwrap());
        }
        self.drain = None;
        self.loosen();
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
            epoch: 0,
            heard: 0,
            entries: HashMap::new(),
            kept: VecDeque::new(),
        }
    }
}
