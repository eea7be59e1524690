//! What owners of segments are told of the objects in them, so that the cache outlives its master: an owner announces them to the next one.
//!
//! A ledger holds what has changed in the segments of one client since the client last asked. A master that does not know the
//! client lets it mount memory with objects in it: first the space they take is kept, so that the rest can be used at once; then the owner
//! looks at each object (its bytes must be those it once had) and announces it, and only then can it be read.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId, SlotId};
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use std::time::Duration;

use super::Master;
use super::clients::{Mount, unknown};
use super::directory::{Object, Replicas, Shard, Value};
use super::groups::Group;
use super::put::Writer;
use super::segments::{GRAIN, Held};
use mooncake_protocol::wire::{InventoryChange, InventoryPage, StoredReplica};

/// Most changes that wait for a client. One that has not asked for so long learns that it knows nothing.
const MOST_WAITING: usize = 1 << 19;
/// Most changes in one answer.
const PAGE: usize = 4096;

/// When a value was written: by which master, and after how many uses of its objects. Of one master's, the later is the newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) epoch: u64,
    pub(super) number: u64,
}

/// Changes in the segments of one client, until it has heard of them.
pub(super) struct Ledger(Mutex<Waiting>);

struct Waiting {
    /// Number of the first that waits; counted from 1.
    first: u64,
    /// Number of the last that was told, heard or not.
    told: u64,
    changes: VecDeque<Change>,
    /// Some were dropped.
    lost: bool,
    /// When the client last asked.
    asked: Moment,
}

struct Change {
    replica: ReplicaId,
    /// `None`: it is gone.
    stored: Option<Stored>,
}

struct Stored {
    segment: SegmentId,
    offset: u64,
    len: u64,
    key: ObjectKey,
    checksum: Option<u64>,
    writer: ClientId,
    group: Option<Arc<Group>>,
    hard_pin: bool,
    soft_pin: Moment,
    stamp: Stamp,
}

impl Ledger {
    fn new(now: Moment) -> Self {
        Self(Mutex::new(Waiting { first: 1, told: 0, changes: VecDeque::new(), lost: false, asked: now }))
    }

    /// The value of an object can be read there.
    pub(super) fn stored<A>(&self, held: &Held<A>, object: &Object<A>, value: &Value<A>)
    where
        A: SegmentAllocator,
    {
        let stored = Stored {
            segment: held.segment.info.id,
            offset: held.extent.offset,
            len: value.len,
            key: object.key.clone(),
            checksum: value.checksum,
            writer: value.writer.client,
            group: object.group().cloned(),
            hard_pin: object.hard_pin,
            soft_pin: object.soft_pin(),
            stamp: value.stamp,
        };
        self.push(Change { replica: held.id, stored: Some(stored) });
    }

    /// It cannot any more.
    pub(super) fn gone(&self, replica: ReplicaId) {
        self.push(Change { replica, stored: None });
    }

    fn push(&self, change: Change) {
        let mut waiting = self.0.lock();
        if waiting.lost {
            return;
        }
        // What came and went untold need not be told of. What was told must be, acknowledged or not.
        let last = waiting.first - 1 + waiting.changes.len() as u64;
        if change.stored.is_none()
            && waiting.told < last
            && waiting
                .changes
                .back()
                .is_some_and(|last| last.replica == change.replica && last.stored.is_some())
        {
            waiting.changes.pop_back();
            return;
        }
        if waiting.changes.len() == MOST_WAITING {
            waiting.lost = true;
            waiting.changes = VecDeque::new();
            return;
        }
        waiting.changes.push_back(change);
    }

    /// What comes after the change of number `after`, and forgets what comes before.
    fn page(&self, after: u64, epoch: u64, now: Moment) -> InventoryPage {
        let mut waiting = self.0.lock();
        waiting.asked = now;
        let heard = after.saturating_sub(waiting.first - 1);
        let lost = std::mem::take(&mut waiting.lost)
            || after.saturating_add(1) < waiting.first
            || heard > waiting.changes.len() as u64;
        if lost {
            waiting.first += waiting.changes.len() as u64;
            waiting.changes.clear();
        } else {
            waiting.changes.drain(..heard as usize);
            waiting.first += heard;
        }
        let told: Vec<_> = waiting.changes.iter().take(PAGE).map(|change| change.tell(now)).collect();
        let next = waiting.first - 1 + told.len() as u64;
        waiting.told = waiting.told.max(next);
        InventoryPage { epoch, next, lost, whole: told.len() == waiting.changes.len(), changes: told }
    }
}

impl Change {
    fn tell(&self, now: Moment) -> InventoryChange {
        let stored = self.stored.as_ref().map(|stored| StoredReplica {
            segment: stored.segment,
            offset: stored.offset,
            len: stored.len,
            key: stored.key.as_bytes().to_vec(),
            checksum: stored.checksum,
            writer: stored.writer,
            group: stored.group.as_deref().map_or_else(String::new, |group| group.name().to_owned()),
            hard_pin: stored.hard_pin,
            soft_pin_ms: u64::try_from(stored.soft_pin.since(now).as_millis()).unwrap_or(u64::MAX),
            epoch: stored.stamp.epoch,
            number: stored.stamp.number,
        });
        InventoryChange { replica: self.replica, stored }
    }
}

/// The ledgers, by client.
#[derive(Default)]
pub(super) struct Ledgers(HashMap<ClientId, Arc<Ledger>>);

impl Ledgers {
    pub(super) fn of(&self, client: ClientId) -> Option<Arc<Ledger>> {
        self.0.get(&client).cloned()
    }

    /// Forgets the ledger of a client that expired: changes in its dead segments are of no use.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.0.remove(&client);
    }

    /// Keeps those of clients that live, or have asked lately.
    pub(super) fn prune(&mut self, lives: impl Fn(ClientId) -> bool, ttl: Duration, now: Moment) {
        self.0.retain(|client, ledger| lives(*client) || ledger.0.lock().asked.after(ttl) > now);
    }
}

/// What an announced value is to one that is there.
enum Standing {
    /// Another replica of the same write.
    Same,
    /// Written later by the same master.
    Newer,
    /// Older, or the one there was written under this master.
    Older,
    /// Written under another master: there is no telling.
    Unclear,
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Which objects came to and went from the segments of a client, after change number `after`; 0 for a client that knows of none. From the first
    /// call on a client's later mounts are recorded, until it expires.
    pub fn inventory(&self, client: ClientId, after: u64) -> InventoryPage {
        let now = self.clock.now();
        let ledger = {
            let mut ledgers = self.ledgers.lock();
            let ledger = ledgers.0.entry(client).or_insert_with(|| Arc::new(Ledger::new(now)));
            ledger.clone()
        };
        self.timers.at(now.after(self.options.client_ttl));
        ledger.page(after, self.epoch, now)
    }

    /// As [`Master::mount`], of memory that objects lie in. It takes no new ones until [`Master::keep`] has been told of the last.
    ///
    /// # Errors
    /// As [`Master::mount`].
    pub fn mount_kept(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount_as(client, segment, Mount::Kept)
    }

    /// Keeps space free of new objects for those that its owner is going to announce; `open` when that was all. Repeated, it is fine.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` when the space is not free, or not such as objects take; what came before is kept.
    pub fn keep(&self, client: ClientId, segment: SegmentId, extents: &[Extent], open: bool) -> Result<()> {
        let _graves = self.membership.lock();
        let mounted = self.own_segment(client, segment)?.ok_or_else(|| unknown(&segment))?;
        for extent in extents {
            mounted.keep(*extent)?;
        }
        if open {
            mounted.open();
            self.eviction.something_changed();
        }
        Ok(())
    }

    /// Gives back what space is still kept.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` when another client mounted the segment.
    pub fn release_kept(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        let _graves = self.membership.lock();
        if let Some(mounted) = self.own_segment(client, segment)? {
            mounted.release_kept();
            mounted.open();
            self.eviction.something_changed();
        }
        Ok(())
    }

    /// An object whose space was kept is what it was: it can be read from now on. Repeated, it is fine. What cannot be taken gives its space back.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` (no such space was kept, or no such key or length is possible);
    /// `OBJECT_ALREADY_EXISTS` (there is a newer value, or one of which it is not known; that one goes, too; or a snapshot says that it was removed or replaced);
    /// `TENANT_NOT_REGISTERED`; `TENANT_QUOTA_EXCEEDED`.
    pub fn announce(&self, client: ClientId, replica: &StoredReplica) -> Result<()> {
        self.announce_as(client, replica, false)
    }

    /// As [`Master::announce`], of a replica that [`Master::expired`] listed. One that was removed or replaced since is refused.
    ///
    /// # Errors
    /// As [`Master::announce`].
    pub fn announce_expired(&self, client: ClientId, replica: &StoredReplica) -> Result<()> {
        self.announce_as(client, replica, true)
    }

    fn announce_as(&self, client: ClientId, replica: &StoredReplica, expired: bool) -> Result<()> {
        let key = ObjectKey::new(replica.key.as_slice())?;
        let now = self.clock.now();
        let hash = self.directory.hash(key.as_bytes());
        let mut shard = self.directory.lock(hash);
        let found = shard.find(hash, key.as_bytes());
        let held = match self.take_kept(client, replica)? {
            Some(held) => held,
            None if found.is_some_and(|slot| is_there(&shard[slot], replica)) => return Ok(()),
            None => return Err(Error::invalid(format!("no space was kept at {}", replica.offset))),
        };
        let judged = if expired {
            Some(shard.expired.take(replica))
        } else {
            self.past.get().map(|past| past.judge(hash, replica))
        };
        let used = match judged {
            Some(Err(error)) => {
                held.retire(now, now);
                return Err(error);
            }
            Some(Ok(used)) => used,
            None => None,
        };
        let tenant = self.tenants.number(key.as_bytes());
        let Ok(_charged) = self.tenants.reserve(tenant, replica.len, 0) else {
            held.retire(now, now);
            return Err(self.over_quota(tenant, key.as_bytes(), replica.len));
        };
        let standing = found.and_then(|slot| self.standing(&shard[slot], replica));
        match (found, standing) {
            (None, _) => {
                let slot = shard.add(hash, key, tenant);
                self.admit_announced(&mut shard, slot, replica, held, used, now);
            }
            (Some(slot), None) if shard[slot].write().is_none() => {
                self.admit_announced(&mut shard, slot, replica, held, used, now);
            }
            (Some(slot), Some(Standing::Newer)) => {
                self.admit_announced(&mut shard, slot, replica, held, used, now)
            }
            (Some(slot), Some(Standing::Same)) => shard.change_replicas(slot, |replicas| replicas.push(held)),
            (Some(slot), Some(Standing::Unclear)) => {
                held.retire(now, now);
                self.drop_value(&mut shard, slot, now);
                return Err(ErrorCode::ObjectAlreadyExists.into());
            }
            (Some(_), None | Some(Standing::Older)) => {
                held.retire(now, now);
                return Err(ErrorCode::ObjectAlreadyExists.into());
            }
        }
        self.eviction.something_changed();
        Ok(())
    }

    /// Space that was kept for a replica.
    fn take_kept(&self, client: ClientId, replica: &StoredReplica) -> Result<Option<Held<A>>> {
        let len = replica.len.checked_next_multiple_of(GRAIN).filter(|len| *len > 0);
        let len = len.ok_or_else(|| Error::invalid(format!("an object of {} bytes", replica.len)))?;
        // Locked until the space is taken, as in `place`: nothing comes to a segment after its unmount.
        let registry = self.segments.read();
        let mounted = registry.get(replica.segment).ok_or_else(|| unknown(&replica.segment))?;
        if mounted.client != client {
            let text = format!("segment {} was mounted by another client", replica.segment);
            return Err(Error::new(ErrorCode::IllegalClient, text));
        }
        let extent = Extent { offset: replica.offset, len };
        let taken = mounted.take_kept(extent);
        let id = self.new_replica();
        Ok(taken.then(|| Held { id, segment: mounted.clone(), extent }))
    }

    /// `None` when there is no value.
    fn standing(&self, object: &Object<A>, replica: &StoredReplica) -> Option<Standing> {
        let value = object.value()?;
        let stamp = stamp(replica);
        Some(if value.stamp == stamp && value.len == replica.len {
            Standing::Same
        } else if value.stamp.epoch == self.epoch {
            Standing::Older
        } else if value.stamp.epoch != stamp.epoch {
            Standing::Unclear
        } else if value.stamp.number < stamp.number && object.copying().is_none() {
            Standing::Newer
        } else {
            Standing::Older
        })
    }

    fn admit_announced(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        replica: &StoredReplica,
        held: Held<A>,
        used: Option<u64>,
        now: Moment,
    ) {
        if !replica.group.is_empty() {
            shard.join(slot, &replica.group);
        }
        let in_use = if is_planted("announcement-ignores-disk-promises") {
            shard[slot].lease
        } else {
            self.in_use_until(&shard[slot])
        };
        let object = &mut shard[slot];
        object.lease = Moment(0);
        object.hard_pin |= replica.hard_pin;
        if replica.soft_pin_ms > 0 {
            shard.set_soft_pin(slot, now.after(Duration::from_millis(replica.soft_pin_ms)));
        }
        let mut replicas = Replicas::new();
        replicas.push(held);
        let value = Value {
            len: replica.len,
            checksum: replica.checksum,
            writer: Writer::from(replica.writer),
            followed: false,
            stamp: stamp(replica),
            replicas,
        };
        // What was found on a disk may be older.
        shard[slot].leave_disks();
        if let Some(old) = shard.put_value(slot, value, self.directory.use_number()) {
            old.retire(self.rest_until(in_use), now);
        }
        if let Some(used) = used {
            shard.recall_use(slot, used);
            self.directory.note_older(self.directory.hash(&replica.key), used);
        }
    }

    fn drop_value(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        let lease = self.in_use_until(&shard[slot]);
        if shard[slot].copying().is_none()
            && let Some(value) = shard.take_value(slot)
        {
            value.retire(self.rest_until(lease), now);
            shard.settle(slot);
        }
    }
}

fn stamp(replica: &StoredReplica) -> Stamp {
    Stamp { epoch: replica.epoch, number: replica.number }
}

/// Whether an object has that very replica.
fn is_there<A: SegmentAllocator>(object: &Object<A>, replica: &StoredReplica) -> bool {
    object.value().is_some_and(|value| {
        let there =
            |held: &Held<A>| held.segment.info.id == replica.segment && held.extent.offset == replica.offset;
        value.stamp == stamp(replica) && value.replicas.iter().any(there)
    })
}
