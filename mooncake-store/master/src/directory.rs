//! Which objects there are: a table sharded by key.

mod order;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use foldhash::quality::FixedState;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SlotId};
use mooncake_core::replica::{Replica, ReplicaStatus, SoftPin};
use mooncake_core::tables::Tables;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use self::order::{Pool, Seat};
use super::disks::{FileGrant, OnDisk, Tier};
use super::expired::ExpiredReplicas;
use super::groups::{Group, Groups};
use super::hot::Heats;
use super::inventory::Stamp;
use super::journal::Journal;
use super::put::Writer;
use super::segments::Held;
use super::slots::Slots;
use super::tenants::Tenants;
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::TaskKind;

/// Most objects have one replica; those need no allocation of their own.
pub(super) type Replicas<A> = SmallVec<[Held<A>; 1]>;

/// Of how many writes a shard keeps the room.
const SPARE_WRITES: usize = 1024;

/// Everything known of one key.
pub(super) struct Object<A> {
    pub(super) key: ObjectKey,
    hash: u64,
    /// Readers of the present value may rely on it until here.
    pub(super) lease: Moment,
    /// Until when it is soft-pinned; zero for never.
    soft_pin: Moment,
    pub(super) hard_pin: bool,
    seat: Seat,
    /// Number of its tenant, 0 for none.
    tenant: u32,
    group: Option<Arc<Group>>,
    /// When it was last used, counted in uses of all objects.
    pub(super) used: u64,
    value: Option<Value<A>>,
    write: Option<Box<Write<A>>>,
    copying: Option<Box<Copying<A>>>,
    /// What it has to do with disks.
    pub(super) tier: Option<Box<Tier>>,
}

/// What can be read.
pub(super) struct Value<A> {
    pub(super) len: u64,
    pub(super) checksum: Option<u64>,
    pub(super) writer: Writer,
    /// A write began after it: the end of a write without a number may mean that one, whatever became of it.
    pub(super) followed: bool,
    pub(super) stamp: Stamp,
    pub(super) replicas: Replicas<A>,
}

impl<A> Value<A> {
    /// Whether an end of this caller's can only be the one that made this value, repeated.
    pub(super) fn ended_by(&self, caller: Writer) -> bool {
        self.writer.repeats(caller) || self.writer.is(caller) && !self.followed
    }
}

/// A write in progress: a put's, or an upsert's beside the value it will replace.
pub(super) struct Write<A> {
    pub(super) writer: Writer,
    pub(super) started: Moment,
    pub(super) len: u64,
    pub(super) replicas: Replicas<A>,
    pub(super) soft_pin: SoftPin,
    pub(super) soft_pin_ttl_ms: Option<u64>,
    pub(super) hard_pin: bool,
    /// It brings back from a disk what is there already.
    pub(super) promotes: bool,
    /// A file that the value is to be written to, too.
    pub(super) file: Option<Box<FileGrant>>,
    /// Its place in [`Shard::writing`].
    seat: usize,
}

/// More replicas of a value, being made. While they are, the value stays as it is: it is neither replaced nor removed.
pub(super) struct Copying<A> {
    pub(super) client: ClientId,
    pub(super) kind: TaskKind,
    /// Of a hot object's copy; nil for others.
    pub(super) token: CopyToken,
    pub(super) started: Moment,
    /// What is read; what a move drops in the end.
    pub(super) source: ReplicaId,
    pub(super) targets: Replicas<A>,
    /// All its targets are gone: it keeps nobody from anything, and its client is told so.
    pub(super) over: bool,
}

impl<A: SegmentAllocator> Copying<A> {
    pub(super) fn retire(self, until: Moment, now: Moment) {
        self.targets.into_iter().for_each(|held| held.retire(until, now));
    }
}

impl<A: SegmentAllocator> Object<A> {
    pub(super) fn value(&self) -> Option<&Value<A>> {
        self.value.as_ref()
    }

    pub(super) fn write(&self) -> Option<&Write<A>> {
        self.write.as_deref()
    }

    /// The file of a writer's write in progress.
    pub(super) fn file_of_write(&mut self, writer: Writer) -> Option<&mut FileGrant> {
        self.write.as_mut().filter(|write| write.writer.is(writer))?.file.as_deref_mut()
    }

    /// It has none any more; whether it had.
    pub(super) fn take_file_of_write(&mut self, writer: Writer) -> bool {
        let write = self.write.as_mut().filter(|write| write.writer.is(writer));
        write.is_some_and(|write| write.file.take().is_some())
    }

    pub(super) fn copying(&self) -> Option<&Copying<A>> {
        self.copying.as_deref().filter(|copying| !copying.over)
    }

    /// A copy whose end nobody has heard of.
    pub(super) fn copying_in_vain(&self) -> Option<&Copying<A>> {
        self.copying.as_deref().filter(|copying| copying.over)
    }

    pub(super) fn tenant(&self) -> u32 {
        self.tenant
    }

    /// What its tenant is charged for it: bytes of every replica there is or will be.
    pub(super) fn charged(&self) -> u64 {
        let len = self.value.as_ref().map_or(0, |value| value.len);
        let value = self.value.as_ref().map_or(0, |value| value.replicas.len());
        let copies = self.copying.as_ref().map_or(0, |copying| copying.targets.len());
        let write =
            self.write.as_ref().map_or(0, |write| write.len.saturating_mul(write.replicas.len() as u64));
        len.saturating_mul((value + copies) as u64).saturating_add(write)
    }

    pub(super) fn group(&self) -> Option<&Arc<Group>> {
        self.group.as_ref()
    }

    pub(super) fn group_name(&self) -> &str {
        self.group.as_deref().map_or("", Group::name)
    }

    /// Every readable replica: those in memory, then those on disks.
    pub(super) fn describe(&self) -> Vec<Replica> {
        let mut replicas = self.value.as_ref().map(Value::describe).unwrap_or_default();
        replicas.extend(self.disk().into_iter().flat_map(OnDisk::describe));
        replicas
    }

    /// The writer's checksum of what can be read.
    pub(super) fn checksum(&self) -> Option<u64> {
        let in_memory = self.value.as_ref().map(|value| value.checksum);
        in_memory.or_else(|| self.disk().map(|disk| disk.checksum)).flatten()
    }

    /// A reader may rely on the present value until then.
    pub(super) fn grant_lease(&mut self, until: Moment) {
        self.lease = self.lease.max(until);
        if let Some(group) = &self.group {
            group.extend(until);
        }
    }

    pub(super) fn soft_pin(&self) -> Moment {
        self.soft_pin
    }
}

impl<A: SegmentAllocator> Value<A> {
    /// Gives its space back once `lease` has run out.
    pub(super) fn retire(self, lease: Moment, now: Moment) {
        self.replicas.into_iter().for_each(|held| held.retire(lease, now));
    }

    /// Replicas in segments that are still there.
    pub(super) fn live(&self) -> impl Iterator<Item = &Held<A>> {
        self.replicas.iter().filter(|held| held.segment.is_alive())
    }

    pub(super) fn describe(&self) -> Vec<Replica> {
        self.live().map(|held| held.describe(self.len, ReplicaStatus::Complete)).collect()
    }
}

impl<A: SegmentAllocator> Write<A> {
    pub(super) fn new(writer: Writer, started: Moment, len: u64, replicas: Replicas<A>) -> Self {
        Self {
            writer,
            started,
            len,
            replicas,
            soft_pin: SoftPin::Preserve,
            soft_pin_ttl_ms: None,
            hard_pin: false,
            promotes: false,
            file: None,
            seat: 0,
        }
    }

    pub(super) fn retire(self, until: Moment, now: Moment) {
        self.replicas.into_iter().for_each(|held| held.retire(until, now));
    }

    pub(super) fn describe(&self) -> Vec<Replica> {
        let in_memory = self.replicas.iter().map(|held| held.describe(self.len, ReplicaStatus::Processing));
        in_memory.chain(self.file.iter().map(|file| file.describe(self.len))).collect()
    }
}

/// One lock's worth of the directory.
///
/// A slot is in one place of its pool exactly while its object has a value that is not hard-pinned; it is listed in
/// `writing` exactly while its object has a write.
pub(super) struct Shard<A, E: EvictionPolicy> {
    keys: Tables,
    objects: Slots<Object<A>>,
    /// Objects without a tenant, as eviction sees them; those of tenants come after, by number.
    own: Pool<E>,
    others: Vec<Pool<E>>,
    /// Soft-pinned objects that have a value, by when that is over.
    pins: BTreeSet<(Moment, SlotId)>,
    /// What would go, as it was last asked for.
    chosen: Option<SlotId>,
    config: E::Config,
    tenants: Arc<Tenants>,
    groups: Arc<Groups>,
    writing: Vec<SlotId>,
    /// Room of writes that are over: writes come and go in large numbers, and at other times than objects do.
    #[allow(clippy::vec_box, reason = "what is kept is the room")]
    spare: Vec<Box<Write<A>>>,
    values: usize,
    journal: Option<Arc<dyn Journal>>,
    pub(super) reads: Reads,
    pub(super) heats: Heats,
    /// Replicas that expired clients may announce again.
    pub(super) expired: ExpiredReplicas,
}

/// Counted under the shard's lock, so that readers share no counter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reads {
    pub(super) asked: u64,
    pub(super) hits: u64,
    pub(super) hit_bytes: u64,
    /// Of these, objects that are on disk only.
    pub(super) disk_hits: u64,
    pub(super) disk_hit_bytes: u64,
}

impl<A: SegmentAllocator, E: EvictionPolicy> Shard<A, E> {
    fn new(config: &E::Config, tenants: Arc<Tenants>, groups: Arc<Groups>) -> Self {
        Self {
            keys: Tables::default(),
            objects: Slots::new(),
            own: Pool::new(config),
            others: Vec::new(),
            pins: BTreeSet::new(),
            chosen: None,
            config: config.clone(),
            tenants,
            groups,
            writing: Vec::new(),
            spare: Vec::new(),
            values: 0,
            journal: None,
            reads: Reads::default(),
            heats: Heats::default(),
            expired: ExpiredReplicas::default(),
        }
    }

    pub(super) fn set_journal(&mut self, journal: Arc<dyn Journal>) {
        self.journal = Some(journal);
    }

    pub(super) fn find(&self, hash: u64, key: &[u8]) -> Option<SlotId> {
        self.keys.find(tag(hash), |slot| self[SlotId(slot)].key.as_bytes() == key).map(SlotId)
    }

    /// An object without value or write, to be given one before the lock is left.
    pub(super) fn add(&mut self, hash: u64, key: ObjectKey, tenant: u32) -> SlotId {
        let object = Object {
            key,
            hash,
            lease: Moment(0),
            soft_pin: Moment(0),
            hard_pin: false,
            seat: Seat::None,
            tenant,
            group: None,
            used: 0,
            value: None,
            write: None,
            copying: None,
            tier: None,
        };
        let slot = self.objects.insert(object);
        self.keys.insert(tag(hash), slot.0);
        slot
    }

    /// Sets what can be read and returns what could be before. The hard pin must be as it shall be.
    pub(super) fn put_value(&mut self, slot: SlotId, value: Value<A>, use_number: u64) -> Option<Value<A>> {
        let before = self.take_value(slot);
        self.expired.keep_only(&self.objects[slot].key, value.stamp);
        self.charged(slot, |shard| {
            let object = &mut shard.objects[slot];
            object.used = use_number;
            object.value = Some(value);
            shard.enter(slot);
            shard.values += 1;
            shard.tell(slot, true);
            shard.tell_owners(slot);
        });
        before
    }

    pub(super) fn take_value(&mut self, slot: SlotId) -> Option<Value<A>> {
        self.charged(slot, |shard| {
            let object = &mut shard.objects[slot];
            let value = object.value.take()?;
            shard.expired.forget(object.key.as_bytes());
            for held in &value.replicas {
                held.segment.ledger.iter().for_each(|ledger| ledger.gone(held.id));
            }
            shard.forget(slot);
            Some(value)
        })
    }

    /// Forgets the replicas of an object that expired clients hold.
    pub(super) fn forget_expired(&mut self, slot: SlotId) {
        self.expired.forget(self.objects[slot].key.as_bytes());
    }

    /// Makes a change and charges its tenant for it. Nothing else changes what an object takes; not to be nested.
    fn charged<R>(&mut self, slot: SlotId, change: impl FnOnce(&mut Self) -> R) -> R {
        let object = &self.objects[slot];
        let tenant = object.tenant;
        if tenant == 0 {
            return change(self);
        }
        let before = object.charged();
        let outcome = change(self);
        self.tenants.charge(tenant, before, self.objects[slot].charged());
        outcome
    }

    /// The slot's value has just gone.
    fn forget(&mut self, slot: SlotId) {
        self.values -= 1;
        self.tell(slot, false);
        self.leave(slot);
    }

    /// Tells whoever wants to know that a value came or went.
    fn tell(&self, slot: SlotId, stored: bool) {
        let Some(journal) = &self.journal else { return };
        let object = &self.objects[slot];
        let Some((tenant, key)) = self.tenants.unscoped(&object.key) else { return };
        // A group's name is scoped as a key is.
        let group = object.group_name();
        let group =
            if object.tenant == 0 { group } else { group.split_once('\0').map_or(group, |(_, name)| name) };
        if stored {
            journal.stored(tenant, &key, group);
        } else {
            journal.removed(tenant, &key, group);
        }
    }

    /// Keeps only replicas in live segments; what is dropped rests in its dead segment.
    pub(super) fn prune(&mut self, slot: SlotId, now: Moment, put_release: Duration) {
        self.charged(slot, |shard| shard.prune_parts(slot, now, put_release));
    }

    fn prune_parts(&mut self, slot: SlotId, now: Moment, put_release: Duration) {
        self.objects[slot].retain_disk(|_| true);
        let object = &mut self.objects[slot];
        let lease = object.lease;
        self.expired.note(object, now);
        if let Some(value) = &mut object.value {
            drop_dead(&mut value.replicas, lease, now);
            if value.replicas.is_empty() {
                object.value = None;
                self.forget(slot);
            }
        }
        let object = &mut self.objects[slot];
        if let Some(write) = &mut object.write {
            drop_dead(&mut write.replicas, write.started.after(put_release), now);
            if write.replicas.is_empty() {
                self.unseat_write(slot);
            }
        }
        let object = &mut self.objects[slot];
        if let Some(copying) = &mut object.copying {
            let until = copying.started.after(put_release);
            let had_targets = !copying.targets.is_empty();
            drop_dead(&mut copying.targets, until, now);
            copying.over |= had_targets && copying.targets.is_empty();
            if object.value.is_none()
                && let Some(copying) = object.copying.take()
            {
                copying.retire(until, now);
            }
        }
    }

    pub(super) fn begin_copy(&mut self, slot: SlotId, copying: Copying<A>) {
        debug_assert!(self[slot].value.is_some() && self[slot].copying().is_none());
        self.charged(slot, |shard| shard.objects[slot].copying = Some(Box::new(copying)));
    }

    pub(super) fn take_copy(&mut self, slot: SlotId) -> Option<Copying<A>> {
        self.charged(slot, |shard| shard.objects[slot].copying.take().map(|copying| *copying))
    }

    /// Adds to the replicas of what can be read, or takes from them; one must stay.
    pub(super) fn change_replicas(&mut self, slot: SlotId, change: impl FnOnce(&mut Replicas<A>)) {
        self.charged(slot, |shard| {
            let mut told = Vec::new();
            if let Some(value) = &mut shard.objects[slot].value {
                told.extend(value.replicas.iter().map(|held| (held.id, held.segment.clone())));
                change(&mut value.replicas);
            }
            let object = &shard[slot];
            let Some(value) = &object.value else { return };
            let is = |held: &Held<A>, id| held.id == id;
            for (id, segment) in
                told.iter().filter(|(id, _)| !value.replicas.iter().any(|held| is(held, *id)))
            {
                segment.ledger.iter().for_each(|ledger| ledger.gone(*id));
            }
            for held in value.replicas.iter().filter(|held| !told.iter().any(|(id, _)| is(held, *id))) {
                held.segment.ledger.iter().for_each(|ledger| ledger.stored(held, object, value));
            }
        });
    }

    /// Tells the owners of its replicas that an object can be read there.
    fn tell_owners(&self, slot: SlotId) {
        let object = &self[slot];
        let Some(value) = &object.value else { return };
        for held in &value.replicas {
            held.segment.ledger.iter().for_each(|ledger| ledger.stored(held, object, value));
        }
    }

    /// `prepaid` bytes have been charged for it.
    pub(super) fn put_write(&mut self, slot: SlotId, write: Write<A>, prepaid: u64) {
        let before = self[slot].charged();
        self.seat_write(slot, write);
        let object = &self.objects[slot];
        self.tenants.charge(object.tenant, before + prepaid, object.charged());
    }

    fn seat_write(&mut self, slot: SlotId, mut write: Write<A>) {
        debug_assert!(self[slot].write.is_none());
        write.seat = self.writing.len();
        self.writing.push(slot);
        let object = &mut self.objects[slot];
        object.write = Some(match self.spare.pop() {
            Some(mut room) => {
                *room = write;
                room
            }
            None => Box::new(write),
        });
        if let Some(value) = &mut object.value {
            value.followed = true;
        }
    }

    pub(super) fn take_write(&mut self, slot: SlotId) -> Option<Write<A>> {
        self.charged(slot, |shard| shard.unseat_write(slot))
    }

    fn unseat_write(&mut self, slot: SlotId) -> Option<Write<A>> {
        let mut room = self.objects[slot].write.take()?;
        let none = Write::new(room.writer, room.started, 0, Replicas::new());
        let write = std::mem::replace(&mut *room, none);
        if self.spare.len() < SPARE_WRITES {
            self.spare.push(room);
        }
        self.writing.swap_remove(write.seat);
        if let Some(moved) = self.writing.get(write.seat)
            && let Some(other) = &mut self.objects[*moved].write
        {
            other.seat = write.seat;
        }
        Some(write)
    }

    /// Forgets the object if nothing is left of it.
    pub(super) fn settle(&mut self, slot: SlotId) {
        let object = &self[slot];
        if object.value.is_none() && object.write.is_none() && object.disk().is_none() {
            self.keys.remove(tag(object.hash), |other| other == slot.0);
            let Some(mut object) = self.objects.remove(slot) else { return };
            object.leave_disks();
            self.heats.forget(slot);
            if let Some(group) = &object.group {
                self.groups.leave(group, &object.key);
            }
        }
    }

    /// Puts an object into the group of that name, and out of the one before.
    pub(super) fn join(&mut self, slot: SlotId, name: &str) {
        let object = &mut self.objects[slot];
        if object.group_name() == name {
            return;
        }
        let group = self.groups.join(name, object.key.clone(), object.lease);
        if let Some(before) = object.group.replace(group) {
            self.groups.leave(&before, &object.key);
        }
    }

    /// Slots with a write in progress.
    pub(super) fn writing(&self) -> &[SlotId] {
        &self.writing
    }

    /// Objects that have a value.
    pub(super) fn values(&self) -> usize {
        self.values
    }

    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }
}

impl<A, E: EvictionPolicy> std::ops::Index<SlotId> for Shard<A, E> {
    type Output = Object<A>;

    fn index(&self, slot: SlotId) -> &Object<A> {
        &self.objects[slot]
    }
}

impl<A, E: EvictionPolicy> std::ops::IndexMut<SlotId> for Shard<A, E> {
    fn index_mut(&mut self, slot: SlotId) -> &mut Object<A> {
        &mut self.objects[slot]
    }
}

/// What a table knows a hash by.
fn tag(hash: u64) -> u32 {
    hash as u32
}

fn drop_dead<A: SegmentAllocator>(replicas: &mut Replicas<A>, until: Moment, now: Moment) {
    let mut at = 0;
    while at < replicas.len() {
        if replicas[at].segment.is_alive() {
            at += 1;
        } else {
            replicas.remove(at).retire(until, now);
        }
    }
}

/// All shards.
pub(super) struct Directory<A, E: EvictionPolicy> {
    hasher: FixedState,
    shards: Box<[Locked<A, E>]>,
    /// For each shard, when what it would evict next was last used, as far as known.
    ages: Box<[AtomicU64]>,
    uses: Padded<AtomicU64>,
}

type Locked<A, E> = Padded<Mutex<Shard<A, E>>>;

/// So many objects are looked at in a few milliseconds.
const MANY: usize = 1 << 17;

/// Slots that are looked at under one lock.
const AT_ONCE: usize = 256;

/// Neighbouring locks must not share a cache line.
#[repr(align(128))]
struct Padded<T>(T);

impl<A: SegmentAllocator, E: EvictionPolicy> Directory<A, E> {
    pub(super) fn new(shards: usize, seed: u64, config: &E::Config, tenants: &Arc<Tenants>) -> Self {
        let groups = Arc::new(Groups::new(seed));
        let shard = || Shard::new(config, tenants.clone(), groups.clone());
        Self {
            hasher: FixedState::with_seed(seed),
            shards: (0..shards).map(|_| Padded(Mutex::new(shard()))).collect(),
            ages: (0..shards).map(|_| AtomicU64::new(0)).collect(),
            uses: Padded(AtomicU64::new(1)),
        }
    }

    /// The number of a use that happens now.
    pub(super) fn use_number(&self) -> u64 {
        self.uses.0.fetch_add(1, Relaxed)
    }

    /// Uses are counted from beyond that number on.
    pub(super) fn count_from(&self, number: u64) {
        self.uses.0.fetch_max(number.saturating_add(1), Relaxed);
    }

    /// In the shard of a hash there is something that was last used then.
    pub(super) fn note_older(&self, hash: u64, used: u64) {
        self.ages[self.index(hash)].fetch_min(used, Relaxed);
    }

    /// The shard whose next victim seems to have been unused for the longest, and since when.
    pub(super) fn oldest(&self) -> (usize, u64) {
        let ages = self.ages.iter().map(|age| age.load(Relaxed));
        ages.enumerate().min_by_key(|(_, age)| *age).unwrap_or((0, 0))
    }

    /// Notes the age of a shard's next victim. One that has none comes up again when all others have become younger.
    pub(super) fn note_age(&self, index: usize, age: Option<u64>) {
        self.ages[index].store(age.unwrap_or_else(|| self.use_number()), Relaxed);
    }

    pub(super) fn hash(&self, key: &[u8]) -> u64 {
        use std::hash::{BuildHasher, Hasher};
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        hasher.finish()
    }

    pub(super) fn lock(&self, hash: u64) -> MutexGuard<'_, Shard<A, E>> {
        self.shards[self.index(hash)].0.lock()
    }

    fn index(&self, hash: u64) -> usize {
        // Not among the bits of the tag.
        (hash >> 40) as usize & (self.shards.len() - 1)
    }

    pub(super) fn len(&self) -> usize {
        self.shards.len()
    }

    /// Whether looking at every object takes longer than a caller should wait.
    pub(super) fn is_large(&self) -> bool {
        // Keys are spread evenly, so one shard tells.
        self.shards[0].0.lock().values() * self.shards.len() > MANY
    }

    pub(super) fn lock_at(&self, index: usize) -> MutexGuard<'_, Shard<A, E>> {
        self.shards[index].0.lock()
    }

    /// Every object that is there throughout, and perhaps others. A shard is locked for a few objects at a time, so that
    /// nobody waits for long.
    pub(super) fn visit(&self, see: impl FnMut(&mut Shard<A, E>, SlotId)) {
        self.visit_while(see, || ControlFlow::Continue(()));
    }

    /// As [`Directory::visit`], for as long as `between` lets it, which is asked while nothing is locked.
    pub(super) fn visit_while(
        &self,
        mut see: impl FnMut(&mut Shard<A, E>, SlotId),
        mut between: impl FnMut() -> ControlFlow<()>,
    ) {
        for shard in &self.shards {
            let mut from = 0;
            loop {
                let mut shard = shard.0.lock();
                if from >= shard.objects.end() {
                    break;
                }
                for slot in (from..from + AT_ONCE).map(|index| SlotId(index as u32)) {
                    if shard.objects.get(slot).is_some() {
                        see(&mut shard, slot);
                    }
                }
                from += AT_ONCE;
                MutexGuard::unlock_fair(shard);
                if between().is_break() {
                    return;
                }
            }
        }
    }

    /// Each shard in turn, locked while it is looked at.
    pub(super) fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Shard<A, E>>> {
        self.shards.iter().map(|shard| shard.0.lock())
    }
}
