//! Cluster of the model: one master, its nodes, and the permitted results of every read.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment};
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{Replica, ReplicaList, ReplicaLocation, ReplicaType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{
    DiskOptions, HotOptions, MasterOptions, PromotionOptions, Put, TenantQuota, Writer,
};
use mooncake_store::protocol::wire::OffloadItem;

use super::background::{LateEnd, Work};
use super::nodes::Node;
use super::{KEYS, Mistake, NODES, Setup, Step};
use crate::common::rig::{Rig, address, client, endpoint};

pub(crate) const SEGMENT: u64 = 1024;
pub(crate) const GRANT: Duration = Duration::from_secs(600);
/// Longest time after a revoke until the last bytes of the write arrive.
pub(crate) const LATE: Duration = Duration::from_secs(9);
/// Longest time after a restart until bytes of an allocation of the earlier master arrive.
pub(crate) const OLD_GRANT: Duration = Duration::from_secs(25);
/// Number of bytes that a transfer moves at a time.
pub(crate) const CHUNK: usize = 96;
/// Number of buffers of the reader, each long enough for any object.
const BUFFERS: usize = 4;
const LONGEST: usize = 400;
/// Number of ticks in which a master forgets a snapshot.
const TICKS: usize = 300;

pub(crate) type Verdict = Result<(), String>;

/// Completed put.
#[derive(Clone, Debug)]
pub(crate) struct Value {
    version: u64,
    len: usize,
}

impl Value {
    /// Returns the bytes. Each byte depends on the value and the position in it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        (0..self.len as u64)
            .map(|at| {
                let mixed = (self.version * 0x9e37_79b9 + at).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (mixed >> 56) as u8
            })
            .collect()
    }
}

/// Values of each key that reads may show, and the number of its values so far.
pub(crate) type Permitted = HashMap<u64, (Vec<Value>, usize)>;

/// Replica, and the process at its endpoint at the time of the lookup.
#[derive(Clone, Debug)]
pub(crate) struct LocatedReplica {
    pub(crate) replica: Replica,
    instance: u64,
}

struct Write {
    key: u64,
    writer: Writer,
    places: Vec<LocatedReplica>,
    value: Value,
    /// Number of bytes written, over all replicas.
    done: usize,
    until: Moment,
    /// Marks a write that is never ended.
    silent: bool,
}

struct Read {
    place: LocatedReplica,
    /// Bytes of every value that the read may show.
    allowed: Vec<Vec<u8>>,
    done: usize,
    deadline: Moment,
    buffer: usize,
    /// Marks a dropped read.
    dropped: bool,
    /// Reader that reports the end of the read, and the number of the read.
    number: Option<(u64, u64)>,
}

/// Number of readers that report the end of their reads.
const READERS: u64 = 2;

pub(crate) struct World {
    pub(crate) rig: Rig,
    pub(crate) setup: Setup,
    pub(crate) mistake: Option<Mistake>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) works: Vec<Work>,
    /// Ends of copies that may arrive again.
    pub(crate) late_ends: Vec<LateEnd>,
    /// Reports of objects written to disk that may arrive again: the owner, the object and the
    /// number of the work.
    pub(crate) late_reports: Vec<(u64, OffloadItem, u64)>,
    /// Client that began the last copy of each key.
    pub(crate) copiers: HashMap<Vec<u8>, u64>,
    /// Time of the start of the last write of each key.
    pub(crate) started: HashMap<Vec<u8>, Moment>,
    /// Clients that died, and when.
    pub(crate) died: HashMap<u64, Moment>,
    writes: Vec<Write>,
    /// Writes that timed out and whose bytes are still on their way.
    late: Vec<Write>,
    reads: Vec<Read>,
    /// Number of the last read.
    next_read: u64,
    /// Memory of the reader, and its free buffers, the one freed last at the end.
    buffers: Vec<Vec<u8>>,
    free: Vec<usize>,
    /// Value that a read of each key must show, if anything.
    current: HashMap<u64, Value>,
    /// Every value that was ever complete, since any of them may be announced after a restart.
    complete: HashMap<u64, Vec<Value>>,
    /// Values that a read of a key may show, if a master before the present one may have changed it
    /// since the snapshot that the present one has read.
    loose: HashMap<u64, Vec<Value>>,
    leases: HashMap<u64, Moment>,
    /// Key and version for which the master used each replica number.
    numbers: HashMap<ReplicaId, (u64, u64)>,
    pub(crate) next: u64,
    /// Last snapshot, and what was permitted at its time.
    pub(crate) snapshot: Option<(Vec<u8>, Permitted)>,
    pub(crate) drain: Option<mooncake_core::ids::Uuid>,
    /// Files by owner and key.
    pub(crate) files: HashMap<(u64, Vec<u8>), Vec<u8>>,
    pub(crate) good_reads: u64,
}

pub(crate) fn options(setup: Setup, long_leases: bool) -> MasterOptions {
    let promotion = Some(PromotionOptions { threshold: 1, queue_limit: 100, per_heartbeat: 2 });
    let disks = DiskOptions { on_evict: setup.on_evict, promotion, ..DiskOptions::default() };
    let hot = HotOptions { reads_per_second: 0.3, ..HotOptions::default() };
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 2 * SEGMENT };
    MasterOptions {
        shards: 4,
        high_watermark: 0.95,
        lease_ttl: Duration::from_secs(if long_leases { 100 } else { 10 }),
        disks: setup.disks.then_some(disks),
        hot: setup.hot.then_some(hot),
        tenants: setup.tenants.then(|| vec![quota("a"), quota("b")]),
        ..MasterOptions::default()
    }
}

impl World {
    pub(crate) fn new(setup: Setup, mistake: Option<Mistake>) -> Self {
        let rig = Rig::with(options(setup, setup.long_leases));
        let mut world = Self {
            rig,
            setup,
            mistake,
            nodes: Vec::new(),
            works: Vec::new(),
            late_ends: Vec::new(),
            late_reports: Vec::new(),
            copiers: HashMap::new(),
            started: HashMap::new(),
            died: HashMap::new(),
            writes: Vec::new(),
            late: Vec::new(),
            reads: Vec::new(),
            next_read: 0,
            buffers: vec![vec![0; LONGEST]; BUFFERS],
            free: (0..BUFFERS).collect(),
            current: HashMap::new(),
            complete: HashMap::new(),
            loose: HashMap::new(),
            leases: HashMap::new(),
            numbers: HashMap::new(),
            next: 1,
            snapshot: None,
            drain: None,
            files: HashMap::new(),
            good_reads: 0,
        };
        world.plant();
        world.nodes = (0..NODES).map(|number| Node::join(&world, number)).collect();
        world
    }

    /// Plants the mistake, if it is one of the master.
    pub(crate) fn plant(&self) {
        if let Some(Mistake::Master(bug)) = self.mistake {
            self.rig.master.plant(bug);
        }
    }

    pub(crate) fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    pub(crate) fn now(&self) -> Moment {
        self.rig.clock.now()
    }

    pub(crate) fn apply(&mut self, step: &Step) -> Verdict {
        match *step {
            Step::Start { key, len, upsert, replicas, pinned } => {
                return self.start(key, len, upsert, replicas, pinned);
            }
            Step::Write { which } => return self.write(which),
            Step::Store { key, len, replicas } => return self.store(key, len, replicas),
            Step::Revoke { which } => return self.revoke(which),
            Step::TimeOut { which } => return self.time_out(which),
            Step::Land { which } => self.land(which),
            Step::DropWrite { which } => return self.drop_write(which),
            Step::Read { key } => return self.read(key),
            Step::Fetch { which } => return self.fetch(which),
            Step::DropRead { which } => self.drop_read(which),
            Step::Exist { key } => return self.exist(key),
            Step::Remove { key, force } => return self.remove(key, force),
            Step::RemoveAll { force } => {
                self.rig.master.remove_all(force);
                self.look_for_removed(0..KEYS, force);
            }
            Step::RemoveMatching { key, force } => {
                let removed = self.rig.master.remove_matching(&format!("key {key}$"), force);
                removed.map_err(|error| format!("remove by pattern: {error}"))?;
                self.look_for_removed(key..key + 1, force);
            }
            Step::Clear { key } => self.clear(key),
            Step::Copy { key, from, to, moves } => return self.begin_copy(key, from, to, moves),
            Step::Drain { from, to } => self.begin_drain(from, to),
            Step::CancelDrain => self.cancel_drain(),
            Step::Tasks { node } => return self.take_tasks(node),
            Step::Work { which } => return self.work(which),
            Step::LateEnd { which } => return self.end_late(which),
            Step::GiveUpWork { which } => self.give_up_work(which),
            Step::DropWork { which } => self.drop_work(which),
            Step::OfferDisk { node } => self.offer_disk(node),
            Step::Offload { node } => self.offload(node),
            Step::Promote { node } => self.promote(node),
            Step::Pause { node } => self.nodes[node as usize].paused = true,
            Step::Resume { node } => return self.resume(node),
            Step::Kill { node, same_port } => return self.kill(node, same_port),
            Step::Unmount { node } => return self.unmount(node),
            Step::Mount { node, same_id } => return self.mount(node, same_id),
            Step::Hear { node } => self.hear(node),
            Step::HearAll => self.hear_all(),
            Step::Announce { node } => drop(self.announce(node)),
            Step::AnnounceAll { node } => while self.announce(node) {},
            Step::Snapshot => self.take_snapshot()?,
            Step::Restart { recall, long_leases } => self.restart(recall, long_leases),
            Step::Pass { tenths } => {
                self.pass(Duration::from_millis(tenths * 100));
                if tenths > 6000 {
                    // Work that is due by then takes several ticks.
                    (0..TICKS).for_each(|_| drop(self.rig.master.tick()));
                }
            }
            Step::Tick => {
                self.report_reads();
                self.rig.master.tick();
                return self.check_copiers();
            }
        }
        Ok(())
    }

    pub(crate) fn name(&self, key: u64) -> Vec<u8> {
        let tenant = ["a", "b"][(key % 2) as usize];
        self.scoped(tenant, format!("key {key}").as_bytes())
    }

    /// Returns a key as the master records it.
    pub(crate) fn scoped(&self, tenant: &str, key: &[u8]) -> Vec<u8> {
        self.rig.master.scoped(tenant, key).map_or_else(|_| key.to_vec(), |key| key.into_owned())
    }

    pub(crate) fn place(&self, replica: &Replica) -> LocatedReplica {
        let node = self.nodes.iter().find(|node| node.segment.endpoint == endpoint(replica));
        LocatedReplica { replica: replica.clone(), instance: node.map_or(0, |node| node.instance) }
    }

    fn start(&mut self, key: u64, len: u64, upsert: bool, replicas: u64, pinned: bool) -> Verdict {
        self.next += 1;
        let writer = Writer { client: client(100_000 + self.next), attempt: self.next };
        let mode = if upsert { WriteMode::Upsert } else { WriteMode::Put };
        let config = ReplicateConfig { hard_pin: pinned, ..ReplicateConfig::replicas(replicas) };
        let name = self.name(key);
        let put = Put { writer, mode, key: &name, len, config: &config, group: "", session: None };
        let until = self.now().after(GRANT);
        let readable = self.rig.master.peek(&name).is_ok();
        let granted = match self.rig.master.put_start(&put).map_err(|error| error.code()) {
            Ok(granted) => granted,
            Err(ErrorCode::ObjectHasReplicationTask) => return self.check_copier(&put),
            Err(_) => return Ok(()),
        };
        self.started.insert(name.clone(), self.now());
        if mode == WriteMode::Put && readable {
            return Err(format!("a put of {key} was granted although it exists"));
        }
        let again = self.rig.master.put_start(&put).map_err(|e| e.code());
        if again.as_ref() != Ok(&granted) {
            return Err(format!("put start repeated: {granted:?}, then {again:?}"));
        }
        let value = Value { version: self.next, len: len as usize };
        let places = granted.iter().map(|replica| self.place(replica)).collect();
        self.writes.push(Write { key, writer, places, value, done: 0, until, silent: false });
        Ok(())
    }

    /// Starts a write and moves it on to its end.
    fn store(&mut self, key: u64, len: u64, replicas: u64) -> Verdict {
        let before = self.writes.len();
        self.start(key, len, true, replicas, false)?;
        while self.writes.len() > before && !self.writes[before].silent {
            self.write(before)?;
        }
        Ok(())
    }

    /// Moves one write on. At its end the write is reported complete, twice.
    fn write(&mut self, which: usize) -> Verdict {
        let Some(mut write) = take(&mut self.writes, which) else { return Ok(()) };
        if self.now() >= write.until {
            return Ok(());
        }
        let bytes = write.value.bytes();
        let total = bytes.len() * write.places.len();
        if write.done < total {
            let (place, from) = (write.done / bytes.len(), write.done % bytes.len());
            let to = (from + CHUNK).min(bytes.len());
            match self.memory(&write.places[place]) {
                Some(memory) => memory[from..to].copy_from_slice(&bytes[from..to]),
                None if write.silent => return Ok(()),
                None => {
                    self.writes.push(write);
                    return self.revoke(self.writes.len() - 1);
                }
            }
            write.done += to - from;
        }
        if write.done < total {
            self.writes.push(write);
            Ok(())
        } else if write.silent {
            Ok(())
        } else {
            self.end(&write)
        }
    }

    fn end(&mut self, write: &Write) -> Verdict {
        let name = self.name(write.key);
        let end = || self.rig.master.put_end(write.writer, &name, None, ReplicaType::All);
        if end().is_ok() {
            end().map_err(|error| format!("put end repeated: {error}"))?;
            self.leases.remove(&write.key);
            self.loose.remove(&write.key);
            self.complete.entry(write.key).or_default().push(write.value.clone());
            self.current.insert(write.key, write.value.clone());
        }
        Ok(())
    }

    /// Gives up a write; bytes that the writer sent may still arrive for a while.
    fn revoke(&mut self, which: usize) -> Verdict {
        let Some(mut write) = take(&mut self.writes, which) else { return Ok(()) };
        if !write.silent {
            self.tell_revoke(&write)?;
            write.silent = true;
            write.until = write.until.min(self.now().after(LATE));
        }
        self.writes.push(write);
        Ok(())
    }

    fn tell_revoke(&self, write: &Write) -> Verdict {
        let name = self.name(write.key);
        let revoke = || self.rig.master.put_revoke(write.writer, &name, ReplicaType::All);
        if revoke().is_ok() && revoke().is_ok() {
            return Err("a second revoke found something to revoke".into());
        }
        Ok(())
    }

    /// Times out a write. The writer cannot know when its bytes end, so it leaves the space to the
    /// master.
    fn time_out(&mut self, which: usize) -> Verdict {
        let Some(mut write) = take(&mut self.writes, which) else { return Ok(()) };
        if !write.silent {
            if self.is(Mistake::RevokeLate) {
                self.tell_revoke(&write)?;
            }
            write.silent = true;
        }
        self.late.push(write);
        Ok(())
    }

    /// Lands the rest of a write that timed out.
    fn land(&mut self, which: usize) {
        let Some(write) = take(&mut self.late, which) else { return };
        if self.now() >= write.until {
            return;
        }
        let bytes = write.value.bytes();
        for (number, place) in write.places.iter().enumerate() {
            let from = write.done.saturating_sub(number * bytes.len()).min(bytes.len());
            if let Some(memory) = self.memory(place) {
                memory[from..].copy_from_slice(&bytes[from..]);
            }
        }
    }

    /// Drops a write: its transfers continue, and it is never ended.
    fn drop_write(&mut self, which: usize) -> Verdict {
        let Some(mut write) = take(&mut self.writes, which) else { return Ok(()) };
        if !write.silent && self.is(Mistake::CommitDropped) {
            self.end(&write)?;
        }
        write.silent = true;
        self.writes.push(write);
        Ok(())
    }

    /// Returns the bytes that a read of the key may show.
    fn allowed(&self, key: u64) -> Vec<Vec<u8>> {
        self.values(key).iter().map(Value::bytes).collect()
    }

    fn values(&self, key: u64) -> Vec<Value> {
        let current = || self.current.get(&key).cloned().into_iter().collect();
        self.loose.get(&key).cloned().unwrap_or_else(current)
    }

    /// Returns the values that reads may show now.
    pub(crate) fn permitted(&self) -> Permitted {
        let completed = |key: u64| self.complete.get(&key).map_or(0, Vec::len);
        (0..KEYS).map(|key| (key, (self.values(key), completed(key)))).collect()
    }

    fn read(&mut self, key: u64) -> Verdict {
        let asked = self.now();
        self.next_read += 1;
        // Every third read is that of a client of Mooncake C++, which reports nothing.
        let reader = self.next_read % (READERS + 1);
        let number = (reader > 0).then_some((reader, self.next_read));
        let found = match number {
            Some((reader, number)) => {
                let ended = self.ended_reads(reader);
                self.rig.master.locate_for_read(reader, number, ended, &self.name(key))
            }
            None => self.rig.master.locate(&self.name(key)),
        };
        let found = found.map_err(|e| e.code());
        let allowed = self.allowed(key);
        let list = match found {
            Ok(list) if !allowed.is_empty() => list,
            Ok(_) => return Err(format!("key {key} is readable and should not be")),
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady) => {
                // The object was evicted, or is gone with its node, which may announce it again.
                return Ok(());
            }
            Err(code) => return Err(format!("locate: {code:?}")),
        };
        self.leases.insert(key, asked.after(list.lease));
        self.check_numbers(key, &list)?;
        for replica in list.replicas {
            match &replica.location {
                ReplicaLocation::Memory(_) => {
                    let Some(buffer) = self.free.pop() else { continue };
                    let (place, allowed) = (self.place(&replica), allowed.clone());
                    let deadline = asked.after(list.lease);
                    self.reads.push(Read {
                        place,
                        allowed,
                        done: 0,
                        deadline,
                        buffer,
                        dropped: false,
                        number,
                    });
                }
                ReplicaLocation::LocalDisk { client: owner, .. } => {
                    let file = self.files.get(&(owner.0.second, self.name(key)));
                    if file.is_some_and(|file| !allowed.contains(file)) {
                        return Err(format!("wrong bytes on the disk of {owner}"));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the number up to which all reads of a reader have ended.
    fn ended_reads(&self, reader: u64) -> u64 {
        if self.is(Mistake::EndReadsEarly) {
            return self.next_read;
        }
        let open = self.reads.iter().filter(|read| !read.dropped).filter_map(|read| read.number);
        let first = open.filter(|(of, _)| *of == reader).map(|(_, number)| number).min();
        // The read that begins now has not ended.
        first.unwrap_or(self.next_read).saturating_sub(1)
    }

    /// Reports the ends of reads.
    fn report_reads(&self) {
        for reader in 1..=READERS {
            self.rig.master.report_reads(reader, self.ended_reads(reader));
        }
    }

    fn check_numbers(&mut self, key: u64, list: &ReplicaList) -> Verdict {
        if self.loose.contains_key(&key) {
            return Ok(());
        }
        let value = (key, self.current[&key].version);
        for replica in list.replicas.iter().filter(|replica| replica.location.memory().is_some()) {
            if *self.numbers.entry(replica.id).or_insert(value) != value || !replica.id.is_of_one_value() {
                return Err(format!("{:?} is told for two values", replica.id));
            }
        }
        Ok(())
    }

    /// Moves one read on. At its end the bytes count if the lease still holds.
    fn fetch(&mut self, which: usize) -> Verdict {
        let Some(mut read) = take(&mut self.reads, which) else { return Ok(()) };
        let len = read.place.replica.location.size() as usize;
        let to = (read.done + CHUNK).min(len);
        let part = self.memory(&read.place).map(|memory| memory[read.done..to].to_vec());
        // A node that is gone or refuses is a miss.
        let gone = part.is_none();
        if let Some(part) = part {
            self.buffers[read.buffer][read.done..to].copy_from_slice(&part);
            read.done = to;
        }
        if !gone && read.done < len {
            self.reads.push(read);
            return Ok(());
        }
        if !(read.dropped && self.is(Mistake::FreeWithTicket)) {
            self.free.push(read.buffer);
        }
        if !gone && !read.dropped && self.now() < read.deadline {
            let got = &self.buffers[read.buffer][..len];
            if !read.allowed.iter().any(|allowed| allowed == got) {
                return Err(format!("wrong bytes at {:?}", read.place));
            }
            self.good_reads += 1;
        }
        Ok(())
    }

    /// Drops a read, whose transfer continues.
    fn drop_read(&mut self, which: usize) {
        let Some(mut read) = take(&mut self.reads, which) else { return };
        if !read.dropped && self.is(Mistake::FreeWithTicket) {
            self.free.push(read.buffer);
        }
        read.dropped = true;
        self.reads.push(read);
    }

    fn exist(&mut self, key: u64) -> Verdict {
        let now = self.now();
        if self.rig.master.exists(&self.name(key)) {
            if self.allowed(key).is_empty() {
                return Err(format!("key {key} exists and should not"));
            }
            self.leases.insert(key, now.after(Duration::from_secs(10)));
        }
        Ok(())
    }

    fn remove(&mut self, key: u64, force: bool) -> Verdict {
        let name = self.name(key);
        match self.rig.master.remove(&name, force).map_err(|error| error.code()) {
            Ok(()) => {}
            Err(ErrorCode::ReplicaIsNotReady | ErrorCode::ObjectHasReplicationTask) => {
                // The value may lie with an expired client, which may announce it again.
                self.check_blocked(&name)?;
                return Ok(());
            }
            // Nor may a value that was not there yet return.
            Err(ErrorCode::ObjectNotFound) => {
                self.gone(key);
                return Ok(());
            }
            Err(_) => return Ok(()),
        }
        let is_leased = self.leases.get(&key).is_some_and(|lease| *lease > self.now());
        if self.mistake.is_none() && !force && is_leased {
            return Err(format!("key {key} was removed under a lease"));
        }
        self.gone(key);
        match self.rig.master.remove(&name, force).map_err(|e| e.code()) {
            Err(ErrorCode::ObjectNotFound) => Ok(()),
            other => Err(format!("remove repeated: {other:?}")),
        }
    }

    /// Clears the replicas of the readable value, as its writer.
    fn clear(&mut self, key: u64) {
        let Some(value) = self.current.get(&key) else { return };
        let name = self.name(key);
        let cleared = self.rig.master.clear_replicas(&[&name], client(100_000 + value.version), "");
        if !cleared.is_empty() {
            self.gone(key);
        }
    }

    /// Records a removed key, of which no value may return.
    fn gone(&mut self, key: u64) {
        self.current.remove(&key);
        self.leases.remove(&key);
        self.loose.remove(&key);
    }

    /// Checks after a remove of many that objects which cannot be read do not return.
    fn look_for_removed(&mut self, keys: std::ops::Range<u64>, force: bool) {
        for key in keys.clone() {
            if self.rig.master.peek(&self.name(key)).is_err() {
                self.gone(key);
            }
        }
        if force {
            self.leases.retain(|key, _| !keys.contains(key));
        }
    }

    /// Records another master. It knows a snapshot with the `known` values, or none. Changes by
    /// the masters before it since that snapshot are uncertain: each of them counts or is lost.
    pub(crate) fn loosen(&mut self, known: Option<Permitted>) {
        for key in 0..KEYS {
            let known = known.as_ref().and_then(|known| known.get(&key).cloned());
            let (mut values, completed) = known.unwrap_or_default();
            values.extend(self.complete.get(&key).into_iter().flatten().skip(completed).cloned());
            self.loose.insert(key, values);
        }
        self.leases.clear();
        let last = self.now().after(OLD_GRANT);
        for write in self.writes.iter_mut().chain(&mut self.late) {
            write.until = write.until.min(last);
        }
        for work in &mut self.works {
            work.until = work.until.min(last);
        }
    }

    pub(crate) fn pass(&mut self, mut span: Duration) {
        while !span.is_zero() {
            let step = span.min(Duration::from_secs(4));
            self.rig.clock.advance(step);
            span -= step;
            for node in self.nodes.iter().filter(|node| !node.paused) {
                let _ = self.rig.master.ping(client(node.client));
            }
        }
    }

    /// Returns the bytes of a replica, if its process still lives and accepts others.
    pub(crate) fn memory(&mut self, place: &LocatedReplica) -> Option<&mut [u8]> {
        let any_instance = self.is(Mistake::NoInstance);
        let of = |node: &&mut Node| {
            node.segment.endpoint == endpoint(&place.replica)
                && (any_instance || node.instance == place.instance)
        };
        let node = self.nodes.iter_mut().find(of)?;
        let from = usize::try_from(address(&place.replica).checked_sub(node.segment.base)?).ok()?;
        let to = from.checked_add(place.replica.location.size() as usize)?;
        if node.open { node.memory.get_mut(from..to) } else { None }
    }

    /// Gives up and removes everything: nothing may be left.
    pub(crate) fn finish(&mut self) -> Verdict {
        self.writes.clear();
        self.late.clear();
        self.reads.clear();
        self.works.clear();
        self.cancel_drain();
        for node in 0..NODES {
            self.resume(node)?;
            let at = &self.nodes[node as usize];
            let _ = self.rig.master.release_reserved(client(at.client), at.segment.id);
        }
        self.pass(GRANT + Duration::from_secs(100));
        self.rig.master.tick();
        self.rig.master.remove_all(true);
        self.pass(GRANT + Duration::from_secs(100));
        self.rig.master.tick();
        self.rig.master.tick();
        let stats = self.rig.master.stats();
        if (stats.used(), stats.resting(), stats.keys, stats.writing) != (0, 0, 0, 0) {
            return Err(format!("left behind: {stats:?}"));
        }
        match self.rig.master.audit_charges() {
            charges if charges.is_empty() => Ok(()),
            charges => Err(format!("charges: {charges:?}")),
        }
    }
}

pub(crate) fn take<T>(from: &mut Vec<T>, which: usize) -> Option<T> {
    if from.is_empty() { None } else { Some(from.remove(which % from.len())) }
}
