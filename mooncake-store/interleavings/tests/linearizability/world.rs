//! Masters, their clients, and the calls between them, as a program states them.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::error::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::hints::PutHints;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig, Segment};
use mooncake_core::{Error, Result};
use mooncake_interleavings::{Master, MasterOptions, Snapshot};
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::message::*;
use mooncake_protocol::wire::{
    EndItem, EpochPair, InventoryChange, ItemLifetime, StoredLifetime, StoredReplica,
};

use crate::model::{Id, Life, OWNERS, Owner, Removal, Step};
use crate::program::{Call, CopyOf, Epoch, Program, Write};
use crate::search::Event;

/// Time that a pass takes: longer than a lease, a short life and the timeout of a client.
const PASS: Duration = Duration::from_secs(11);
/// Time after which a master no longer admits values of earlier masters.
const LONG_PASS: Duration = Duration::from_secs(601);
/// Time after which a short life ends.
const SHORT_MS: u64 = 5_000;
/// Bytes of the smallest value. The length of a value tells its write.
const UNIT: u64 = 64;
const SEGMENT_BYTES: u64 = 1 << 20;

/// Object that an owner holds.
#[derive(Clone, Debug)]
struct Held {
    stored: StoredReplica,
    lifetime: Option<StoredLifetime>,
}

#[derive(Debug, Default)]
struct OwnerState {
    is_mounted: bool,
    /// True if the owner has mounted its segment at this master.
    has_joined: bool,
    /// Number of mounts, each at other addresses.
    mounts: u64,
    /// Epoch of the last master that the owner has met.
    epoch: u64,
    /// Order of masters that the owner has met.
    epochs: Vec<EpochPair>,
    /// Objects that the owner knows to be in its segment.
    heard: Vec<Held>,
    /// Objects of earlier masters that are not announced.
    kept: Vec<Held>,
    /// Extents and the writes that filled them, in order.
    memory: Vec<(u64, u64, Id)>,
}

impl OwnerState {
    /// Returns whether the bytes of an object are still there.
    fn is_intact(&self, held: &Held) -> bool {
        let (begin, end) = (held.stored.offset, held.stored.offset + held.stored.len);
        let last = self.memory.iter().rev().find(|(from, to, _)| *from < end && begin < *to);
        last.is_some_and(|(_, _, id)| *id == id_of(held.stored.len))
    }
}

pub(crate) struct World {
    keys: u8,
    policy: PolicyKind,
    seed: u64,
    clock: Arc<ManualClock>,
    master: Mutex<Option<Arc<Master>>>,
    owners: Vec<Mutex<OwnerState>>,
    snapshot: Mutex<Option<Vec<u8>>>,
    time: AtomicU64,
    /// Events by key.
    events: Vec<Mutex<Vec<Event>>>,
}

fn id_of(len: u64) -> Id {
    (len / UNIT - 1) as Id
}

fn client(owner: Owner) -> ClientId {
    ClientId(Uuid::new(1, u64::from(owner) + 1))
}

fn name(owner: Owner) -> String {
    format!("node{owner}:1")
}

fn endpoint(owner: Owner) -> String {
    format!("10.0.0.{owner}:1")
}

fn segment(owner: Owner, mounts: u64) -> Segment {
    Segment {
        id: SegmentId(Uuid::new(2, u64::from(owner) + 1)),
        name: name(owner),
        base: (u64::from(owner) + 1) << 40 | (mounts + 1) << 24,
        size: SEGMENT_BYTES,
        endpoint: endpoint(owner),
        protocol: "tcp".into(),
        host_id: format!("node{owner}"),
        locality: None,
    }
}

fn key_name(key: u8) -> Vec<u8> {
    vec![b'a' + key]
}

/// Returns the owner of a replica, its offset and its length.
fn place(replica: &Replica) -> (Owner, u64, u64) {
    let Some(memory) = replica.location.memory() else { return (0, 0, UNIT) };
    let owner = (0..OWNERS as Owner).find(|owner| endpoint(*owner) == memory.endpoint).unwrap_or(0);
    (owner, memory.address & ((1 << 24) - 1), memory.size)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(program: &Program, seed: u64) -> Self {
        Self {
            keys: program.keys,
            policy: if program.policy_is_default { PolicyKind::default() } else { PolicyKind::Lru },
            seed,
            clock: Arc::new(ManualClock::new()),
            master: Mutex::default(),
            owners: (0..OWNERS).map(|_| Mutex::default()).collect(),
            snapshot: Mutex::default(),
            time: AtomicU64::new(1),
            events: (0..program.keys).map(|_| Mutex::default()).collect(),
        }
    }

    /// Returns the events of each key.
    pub(crate) fn events(&self) -> Vec<Vec<Event>> {
        self.events.iter().map(|events| lock(events).clone()).collect()
    }

    pub(crate) fn run(self: &Arc<Self>, program: &Program) {
        for (number, epoch) in program.epochs.iter().enumerate() {
            self.begin_master(number, epoch);
            epoch.before.iter().for_each(|call| self.call(call));
            let threads: Vec<_> = epoch
                .threads
                .iter()
                .map(|calls| {
                    let (world, calls) = (self.clone(), calls.clone());
                    shuttle::thread::spawn(move || calls.iter().for_each(|call| world.call(call)))
                })
                .collect();
            for thread in threads {
                thread.join().expect("a panic of a thread ends the run");
            }
            epoch.after.iter().for_each(|call| self.call(call));
            self.end_master();
        }
    }

    fn begin_master(&self, number: usize, epoch: &Epoch) {
        let options = MasterOptions {
            high_watermark: 1.0,
            shards: 4,
            put_discard: Duration::from_secs(10_000),
            put_release: Duration::from_secs(20_000),
            ..MasterOptions::default()
        };
        let policy = self.policy.into();
        let seed = self.seed ^ (number as u64 + 1) << 32;
        let master = Master::with_parts(options, &Default::default(), &policy, self.clock.clone(), seed)
            .expect("the options are right");
        let snapshot = lock(&self.snapshot).clone().filter(|_| epoch.recalls);
        if number > 0 {
            self.record_all(self.now(), Step::Restart { recalls: snapshot.is_some() });
        }
        if let Some(bytes) = snapshot {
            master.recall(Snapshot::read(&bytes).expect("a snapshot is read as it was written"));
        }
        *lock(&self.master) = Some(Arc::new(master));
        for owner in 0..OWNERS as Owner {
            if number == 0 {
                self.meet(owner);
                let begin = self.now();
                let segment = Cow::Owned(segment(owner, 0));
                let mounted = self.master().handle(MountSegment { segment, client: client(owner) });
                mounted.expect("an empty master mounts every segment");
                self.join(owner);
                self.record_all(begin, Step::Mount { owner });
            }
        }
    }

    /// Ends the master. Owners keep what they know to be in their memory.
    fn end_master(&self) {
        *lock(&self.master) = None;
        for owner in &self.owners {
            let mut owner = lock(owner);
            let heard = std::mem::take(&mut owner.heard);
            owner.kept.extend(heard);
            let mut kept = std::mem::take(&mut owner.kept);
            kept.retain(|held| owner.is_intact(held));
            owner.kept = kept;
            owner.is_mounted = false;
            owner.has_joined = false;
        }
    }

    fn master(&self) -> Arc<Master> {
        lock(&self.master).clone().expect("calls are made to a master that runs")
    }

    fn now(&self) -> u64 {
        self.time.fetch_add(1, SeqCst)
    }

    fn record(&self, key: u8, begin: u64, step: Step) {
        let end = self.now();
        lock(&self.events[key as usize]).push(Event { begin, end, step });
    }

    fn record_all(&self, begin: u64, step: Step) {
        (0..self.keys).for_each(|key| self.record(key, begin, step));
    }

    fn call(&self, call: &Call) {
        match *call {
            Call::Start(write) => self.start(&write),
            Call::End(write) => self.end(&write),
            Call::Revoke(write) => self.revoke(&write),
            Call::Remove { key, force } => self.remove(key, force),
            Call::RemoveAll { by_pattern, force } => self.remove_all(by_pattern, force),
            Call::Locate { key } => self.locate(key),
            Call::Exists { key } => {
                let begin = self.now();
                let found = self.master().handle(ExistKey { key: &key_name(key), tenant: DEFAULT_TENANT });
                self.record(key, begin, Step::Exists { found: found.unwrap_or(false) });
            }
            Call::CopyStart(copy) => self.copy_start(copy),
            Call::CopyEnd(copy) => self.copy_end(copy),
            Call::CopyRevoke(copy) => self.copy_revoke(copy),
            Call::Snapshot => self.take_snapshot(),
            Call::Hear { owner } => self.hear(owner),
            Call::Pass { expires, is_long } => self.pass(expires, is_long),
            Call::Rejoin { owner } => self.rejoin(owner),
            Call::Return { owner } => self.return_to_master(owner),
            Call::Announce { owner, key } => self.announce(owner, key),
        }
    }

    fn start(&self, write: &Write) {
        let begin = self.now();
        let keys: Vec<_> = keys_of(write).map(key_name).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let sizes = vec![UNIT * (u64::from(write.id) + 1); keys.len()];
        let config = ReplicateConfig {
            preferred_segments: vec![name(write.client)],
            hard_pin: write.is_pinned,
            ..ReplicateConfig::default()
        };
        let hints = PutHints {
            ttl_ms: (write.life == Life::Short).then_some(SHORT_MS),
            delete_after_read: write.life == Life::OneRead,
            ..PutHints::default()
        };
        let started = self.master().handle(StartHintedWrites {
            client: client(write.client),
            attempt: u64::from(write.id) + 1,
            replace: write.replace,
            keys: keys.into(),
            sizes: sizes.into(),
            config: Cow::Owned(config),
            hints: Cow::Owned(hints),
            tenant: DEFAULT_TENANT,
        });
        for (key, started) in keys_of(write).zip(started) {
            let placed = started.ok().and_then(|replicas| replicas.first().map(place));
            if let Some((owner, offset, len)) = placed {
                lock(&self.owners[owner as usize]).memory.push((offset, offset + len, write.id));
            }
            let Write { id, replace, life, .. } = *write;
            let placed = placed.map(|(owner, ..)| owner);
            self.record(key, begin, Step::Start { id, replace, life, placed });
        }
    }

    fn end(&self, write: &Write) {
        let begin = self.now();
        let keys: Vec<_> = keys_of(write).map(key_name).collect();
        let items: Vec<_> = keys.iter().map(|key| EndItem { key, checksum: None }).collect();
        let ended = self.master().handle(EndWrites {
            client: client(write.client),
            attempt: u64::from(write.id) + 1,
            replace: write.replace,
            items: items.into(),
            replicas: ReplicaType::All,
            tenant: DEFAULT_TENANT,
        });
        for (key, ended) in keys_of(write).zip(ended) {
            self.record(key, begin, Step::End { id: write.id, ok: ended.is_ok() });
        }
    }

    fn revoke(&self, write: &Write) {
        let begin = self.now();
        let keys: Vec<_> = keys_of(write).map(key_name).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let revoked = self.master().handle(RevokeWrites {
            client: client(write.client),
            attempt: u64::from(write.id) + 1,
            replace: write.replace,
            keys: keys.into(),
            replicas: ReplicaType::All,
            tenant: DEFAULT_TENANT,
        });
        for (key, revoked) in keys_of(write).zip(revoked) {
            self.record(key, begin, Step::Revoke { id: write.id, ok: revoked.is_ok() });
        }
    }

    fn remove(&self, key: u8, force: bool) {
        let begin = self.now();
        let removed = self.master().handle(Remove { key: &key_name(key), force, tenant: DEFAULT_TENANT });
        let outcome = match removed.map_err(|error| error.code()) {
            Ok(()) => Removal::Removed,
            Err(ErrorCode::ObjectNotFound) => Removal::Absent,
            Err(_) => Removal::Busy,
        };
        self.record(key, begin, Step::Remove { force, outcome });
    }

    fn remove_all(&self, by_pattern: bool, force: bool) {
        let begin = self.now();
        if by_pattern {
            let call = RemoveByRegex { pattern: ".*", force, tenant: DEFAULT_TENANT };
            self.master().handle(call).expect("the pattern is right");
        } else {
            self.master().handle(RemoveAll { force, tenant: DEFAULT_TENANT }).expect("a removal of all");
        }
        self.record_all(begin, Step::RemoveAll { force });
    }

    fn locate(&self, key: u8) {
        let begin = self.now();
        let located = self.master().handle(GetReplicaList { key: &key_name(key), tenant: DEFAULT_TENANT });
        let found = located.ok().map(|list| {
            let places: Vec<_> = list.replicas.iter().map(place).collect();
            let owners = places.iter().fold(0, |owners, (owner, ..)| owners | 1 << owner);
            (places.first().map_or(0, |(_, _, len)| id_of(*len)), owners)
        });
        // A list without replicas is a miss: their segments have just expired.
        self.record(key, begin, Step::Locate { found: found.filter(|(_, owners)| *owners != 0) });
    }

    fn copy_start(&self, copy: CopyOf) {
        let CopyOf { number, client: who, key, from, to } = copy;
        let begin = self.now();
        let (key_name, target) = (key_name(key), name(to));
        let started = self.master().handle(StartCopy {
            client: client(who),
            attempt: u64::from(number) + 1,
            key: &key_name,
            tenant: DEFAULT_TENANT,
            source: &name(from),
            targets: vec![target.as_str()].into(),
            lease: Uuid::default(),
            epoch: 0,
        });
        for (owner, offset, len) in started.iter().flat_map(|plan| plan.targets.iter().map(place)) {
            lock(&self.owners[owner as usize]).memory.push((offset, offset + len, id_of(len)));
        }
        self.record(key, begin, Step::CopyStart { number, client: who, from, to, ok: started.is_ok() });
    }

    fn copy_end(&self, copy: CopyOf) {
        let begin = self.now();
        let ended = self.master().handle(EndCopy {
            client: client(copy.client),
            attempt: u64::from(copy.number) + 1,
            key: &key_name(copy.key),
            tenant: DEFAULT_TENANT,
            lease: Uuid::default(),
            epoch: 0,
        });
        self.record(copy.key, begin, Step::CopyEnd { number: copy.number, ok: ended.is_ok() });
    }

    fn copy_revoke(&self, copy: CopyOf) {
        let begin = self.now();
        let ended = self.master().handle(RevokeCopy {
            client: client(copy.client),
            attempt: u64::from(copy.number) + 1,
            key: &key_name(copy.key),
            tenant: DEFAULT_TENANT,
            lease: Uuid::default(),
            epoch: 0,
        });
        self.record(copy.key, begin, Step::CopyRevoke { number: copy.number, ok: ended.is_ok() });
    }

    fn take_snapshot(&self) {
        let (begin, mut bytes) = (self.now(), Vec::new());
        let write = |more: &[u8]| {
            bytes.extend_from_slice(more);
            Ok(())
        };
        self.master().snapshot(write).expect("nothing fails that writes to memory");
        *lock(&self.snapshot) = Some(bytes);
        self.record_all(begin, Step::Snapshot);
    }

    fn hear(&self, owner: Owner) {
        if !lock(&self.owners[owner as usize]).is_mounted {
            return;
        }
        let page = self.master().handle(FetchTimedInventory { client: client(owner), after: 0 });
        let page = page.expect("the inventory");
        let mut there: Vec<(u64, Held)> = Vec::new();
        for (index, InventoryChange { replica, stored }) in page.page.changes.into_iter().enumerate() {
            there.retain(|(number, _)| *number != replica.0);
            let lifetime = page.lifetimes.iter().find(|item| item.index == index as u64);
            let lifetime = lifetime.map(|item| item.lifetime);
            there.extend(stored.map(|stored| (replica.0, Held { stored, lifetime })));
        }
        let mut state = lock(&self.owners[owner as usize]);
        if state.is_mounted {
            state.heard = there.into_iter().map(|(_, held)| held).collect();
        }
    }

    fn pass(&self, expires: Option<Owner>, is_long: bool) {
        let begin = self.now();
        let master = self.master();
        // A client that has not returned to this master sends no heartbeat.
        for owner in (0..OWNERS as Owner).filter(|owner| Some(*owner) != expires) {
            if lock(&self.owners[owner as usize]).is_mounted {
                let _ = master.handle(Ping { client: client(owner) });
            }
        }
        self.clock.advance(if is_long { LONG_PASS } else { PASS });
        for owner in (0..OWNERS as Owner).filter(|owner| Some(*owner) != expires) {
            if lock(&self.owners[owner as usize]).is_mounted {
                let _ = master.handle(Ping { client: client(owner) });
            }
        }
        let expired = master.tick().expired;
        self.record_all(begin, Step::Time);
        if is_long {
            self.record_all(begin, Step::Close);
        }
        for owner in 0..OWNERS as Owner {
            if expired.iter().any(|segment| segment.name == name(owner)) {
                let mut state = lock(&self.owners[owner as usize]);
                state.is_mounted = false;
                let heard = std::mem::take(&mut state.heard);
                state.kept.extend(heard);
                drop(state);
                self.record_all(begin, Step::Leave { owner });
                self.record_all(begin, Step::LoseWrites { owner });
                self.record_all(begin, Step::LoseValues { owner });
                self.record_all(begin, Step::LoseCopies { owner });
            }
        }
    }

    /// Mounts the memory of an owner again with space for these objects. Returns whether the master
    /// accepts it.
    fn mount_with_objects(&self, owner: Owner, held: &[Held]) -> Result<()> {
        let begin = self.now();
        let mounts = {
            let mut state = lock(&self.owners[owner as usize]);
            state.mounts += 1;
            state.mounts
        };
        let segment = segment(owner, mounts);
        let id = segment.id;
        let (master, client) = (self.master(), client(owner));
        master.handle(MountKeptSegment { segment: Cow::Owned(segment), client })?;
        let offsets: Vec<_> = held.iter().map(|held| held.stored.offset).collect();
        let lengths: Vec<_> = held.iter().map(|held| held.stored.len).collect();
        let (offsets, lengths) = (offsets.into(), lengths.into());
        let kept = master.handle(KeepExtents { client, segment: id, offsets, lengths, open: true });
        if kept.is_err() {
            master.handle(ReleaseKept { client, segment: id })?;
        }
        self.join(owner);
        self.record_all(begin, Step::Mount { owner });
        kept
    }

    /// Lets an owner begin an inventory at this master, and tell it which masters came before.
    fn meet(&self, owner: Owner) {
        let client = client(owner);
        let page = self.master().handle(FetchTimedInventory { client, after: 0 }).expect("the inventory");
        let epochs = {
            let mut state = lock(&self.owners[owner as usize]);
            let (newer, older) = (page.page.epoch, state.epoch);
            if older != 0 && older != newer {
                state.epochs.push(EpochPair { newer, older });
            }
            state.epoch = newer;
            state.epochs.clone()
        };
        let known = self.master().handle(ExchangeEpochs { client, epochs: epochs.into() });
        let mut state = lock(&self.owners[owner as usize]);
        for pair in known.expect("the order of masters") {
            if !state.epochs.contains(&pair) {
                state.epochs.push(pair);
            }
        }
    }

    fn join(&self, owner: Owner) {
        let mut state = lock(&self.owners[owner as usize]);
        state.is_mounted = true;
        state.has_joined = true;
    }

    fn rejoin(&self, owner: Owner) {
        let state = lock(&self.owners[owner as usize]);
        if state.is_mounted || !state.has_joined {
            return;
        }
        drop(state);
        let (client, segment) = (client(owner), segment(owner, 0).id);
        let page = self.master().handle(FetchExpired { client, segment, after: 0 }).expect("the list");
        let listed: Vec<_> = page.changes.into_iter().filter_map(|change| change.stored).collect();
        let held: Vec<_> = listed.into_iter().map(|stored| Held { stored, lifetime: None }).collect();
        let held: Vec<_> = {
            let mut state = lock(&self.owners[owner as usize]);
            state.kept.clear();
            held.into_iter().filter(|held| state.is_intact(held)).collect()
        };
        self.meet(owner);
        if self.mount_with_objects(owner, &held).is_err() {
            return;
        }
        for held in held {
            let begin = self.now();
            let stored = vec![held.stored.clone()];
            let answer = self.master().handle(AnnounceExpired { client, stored: stored.into() });
            let ok = answer.iter().all(Result::is_ok);
            let (key, id) = (held.stored.key[0] - b'a', id_of(held.stored.len));
            self.record(key, begin, Step::AnnounceExpired { owner, id, ok });
            if ok {
                lock(&self.owners[owner as usize]).heard.push(held);
            }
        }
    }

    fn return_to_master(&self, owner: Owner) {
        let mut state = lock(&self.owners[owner as usize]);
        if std::mem::replace(&mut state.has_joined, true) {
            return;
        }
        let held = state.kept.clone();
        drop(state);
        self.meet(owner);
        if let Err(error) = self.mount_with_objects(owner, &held) {
            lock(&self.owners[owner as usize]).kept.clear();
            report(&error);
        }
    }

    fn announce(&self, owner: Owner, key: u8) {
        let held = {
            let mut state = lock(&self.owners[owner as usize]);
            if !state.is_mounted {
                return;
            }
            let at = state.kept.iter().position(|held| *held.stored.key == *key_name(key));
            let Some(at) = at else { return };
            state.kept.remove(at)
        };
        let begin = self.now();
        let lifetimes: Vec<_> =
            held.lifetime.iter().map(|lifetime| ItemLifetime { index: 0, lifetime: *lifetime }).collect();
        let (client, stored) = (client(owner), vec![held.stored.clone()].into());
        let answer = self.master().handle(AnnounceTimed { client, stored, lifetimes: lifetimes.into() });
        let ok = answer.iter().all(Result::is_ok);
        self.record(key, begin, Step::Announce { owner, id: id_of(held.stored.len), ok });
        if ok {
            lock(&self.owners[owner as usize]).heard.push(held);
        }
    }
}

fn keys_of(write: &Write) -> impl Iterator<Item = u8> + use<> {
    let keys = write.keys;
    (0..8).filter(move |key| keys & 1 << key != 0)
}

#[allow(clippy::print_stderr, reason = "a run that fails is read")]
fn report(error: &Error) {
    eprintln!("memory is not accepted: {error}");
}
