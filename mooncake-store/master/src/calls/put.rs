//! Writes: allocate space, make values readable, take failed writes back.

use std::cell::RefCell;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::{MergeableOrder, Place};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ObjectKey, SlotId};
use mooncake_core::replica::{Replica, ReplicaStatus, ReplicaType, ReplicateConfig, SoftPin};
use mooncake_core::{Error, ErrorCode, Result};

use mooncake_protocol::api::WriteMode;
use mooncake_protocol::pack::{self, Pack};
use mooncake_protocol::wire::pack_in_memory;

use super::chains::KeyInCall;
use super::master::Master;
use super::weights::managed;
use crate::directory::object::not_found;
use crate::directory::{Object, Replicas, Shard, Value, Write};
use crate::model::disk_replicas::DiskReplicas;
use crate::model::lifetime::Lifetime;
use crate::model::misses::MissCause;
use crate::model::options::Placement;
use crate::model::segment::{Allocation, NoSpace};
use crate::model::tenants::{QuotaRefusal, Reservation, unknown};
use crate::model::value::{Stamp, Writer};

/// Number of times that a put looks for free space again after others took the space that it had
/// freed.
const ROUNDS: usize = 8;
/// Number of times that a put evicts objects of its tenant.
const QUOTA_ROUNDS: usize = 2;

/// Request to write one object.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// Writer of the object.
    pub writer: Writer,
    /// True if an existing object is replaced or refuses the put.
    pub mode: WriteMode,
    /// Key of the object.
    pub key: &'a [u8],
    /// Length of the object in bytes.
    pub len: u64,
    /// Number, placement and pins of the replicas.
    pub config: &'a ReplicateConfig,
    /// Group of the object, empty for none. The list in `config` is for batches; here it only tells
    /// whether the request has groups.
    pub group: &'a str,
    /// Name of the session that writes the object.
    pub session: Option<&'a [u8]>,
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Allocates space for an object. The caller writes every replica that it receives, and then
    /// ends the put or revokes it.
    ///
    /// Between one and `config.replicas` replicas are allocated, in distinct segments (on distinct
    /// hosts as far as possible). If memory is full, other objects are evicted first. The
    /// allocation is valid for [`MasterOptions::put_release`](crate::MasterOptions::put_release).
    /// An object is readable only after the end of its put.
    ///
    /// An upsert is written beside the old value, which stays readable until the end, and after a
    /// revoke. The old space is overwritten only if memory does not hold both values, the lengths
    /// are equal, and no reader holds a lease.
    ///
    /// # Errors
    /// `INVALID_PARAMS`; `OBJECT_ALREADY_EXISTS` (put only; a write in progress counts until it is
    /// [`MasterOptions::put_discard`](crate::MasterOptions::put_discard) old);
    /// `OBJECT_REPLICA_BUSY` (upsert only: another write of the same client is in progress);
    /// `OBJECT_HAS_REPLICATION_TASK` (upsert only: the object is being copied or moved);
    /// `NO_AVAILABLE_HANDLE`; `TENANT_NOT_REGISTERED`; `TENANT_QUOTA_EXCEEDED`.
    pub fn put_start(&self, put: &Put<'_>) -> Result<Vec<Replica>> {
        self.put_start_in(put, KeyInCall::default())
    }

    /// Starts a put like [`Master::put_start`]. The object is one of the call. The number of its
    /// use does not count.
    pub(super) fn put_start_in(&self, put: &Put<'_>, call: KeyInCall<'_>) -> Result<Vec<Replica>> {
        self.start(put, call, Write::describe)
    }

    /// Encodes the result of [`Master::put_start`] as a list of [`Replica`]s.
    pub(super) fn put_start_to(
        &self,
        put: &Put<'_>,
        call: KeyInCall<'_>,
        out: &mut pack::Writer<'_>,
    ) -> Result<()> {
        // `show` runs once at most, but two closures cannot share the writer.
        let out = RefCell::new(out);
        self.start(put, call, |write| {
            if write.file.is_some() {
                return write.describe().pack(*out.borrow_mut());
            }
            let replicas = write.replicas.iter().map(Allocation::position);
            pack_in_memory(replicas, write.len, ReplicaStatus::Processing, *out.borrow_mut());
        })
    }

    /// Allocates space and passes the write to `show`.
    fn start<R>(&self, put: &Put<'_>, call: KeyInCall<'_>, show: impl Fn(&Write<A>) -> R) -> Result<R> {
        self.check_put(put)?;
        let hash = self.hash_of(put.key, call);
        let place = call.place().unwrap_or_else(|| Place::numbered(0));
        let tenant = self.space().tenants.number(put.key);
        let (mut quota_made, mut refusal) = (0, NoSpace::Full);
        for _ in 0..ROUNDS {
            let now = self.space().clock.now();
            let mut shard = self.space().directory.lock(hash);
            if let Some(same) = self.admit(&mut shard, hash, put, &show, now)? {
                return Ok(same);
            }
            let bytes = put.len.saturating_mul(put.config.replicas);
            let freed = self.freed_charge(&shard, hash, put.key);
            let charged = match self.space().tenants.reserve(tenant, bytes, freed) {
                Ok(charged) => charged,
                Err(QuotaRefusal::Full) if quota_made < QUOTA_ROUNDS => {
                    drop(shard);
                    quota_made += 1;
                    self.space().evict_for_quota(tenant, bytes, freed, now);
                    continue;
                }
                Err(QuotaRefusal::Unknown) => return Err(unknown(self.space().tenants.split(put.key).0)),
                Err(QuotaRefusal::Full | QuotaRefusal::TooLarge) => {
                    record_refusal(&mut shard, hash, put.key, MissCause::OverQuota);
                    return Err(self.space().quota_exceeded(tenant, put.key, bytes));
                }
            };
            let grantee = put.writer.grantee(tenant);
            match self.space().place(put.len, hash, grantee, put.config, now) {
                Ok(space) => {
                    self.space().counters.placed(put.config.replicas, space.len());
                    return self.grant(&mut shard, hash, put, place, space, charged, &show, now);
                }
                Err(why) => refusal = why,
            }
            // More evictions would free memory with bytes of other tenants, too.
            if refusal == NoSpace::Remains {
                break;
            }
            drop(charged);
            drop(shard);
            if !self.space().free_space_for(put.len, self.space().only_in(put.config), now) {
                break;
            }
        }
        if let Some(shown) = self.overwrite(hash, put, place, &show)? {
            return Ok(shown);
        }
        self.space().counters.out_of_space();
        record_refusal(&mut self.space().directory.lock(hash), hash, put.key, MissCause::PutFailed);
        Err(no_space(refusal, put.len))
    }

    /// Ends a write whose bytes are complete. Its value is readable from now on, instead of the
    /// previous one. A file of the write counts once its own end (of [`ReplicaType::Disk`]) was
    /// reported, before or after this one. Repeating the call has no effect.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `ILLEGAL_CLIENT` (the write of another client); `INVALID_WRITE` (no
    /// write in progress, or its allocation has expired).
    pub fn put_end(
        &self,
        writer: Writer,
        key: &[u8],
        checksum: Option<u64>,
        replicas: ReplicaType,
    ) -> Result<()> {
        self.put_end_at(writer, key, checksum, replicas, None)
    }

    /// Ends a write like [`Master::put_end`]. `use_number` is that of the object in its batch.
    pub(super) fn put_end_at(
        &self,
        writer: Writer,
        key: &[u8],
        checksum: Option<u64>,
        replicas: ReplicaType,
        use_number: Option<u64>,
    ) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        if replicas == ReplicaType::Disk && self.end_file(&mut shard[slot], writer) {
            drop(shard);
            self.space().eviction.end_backoff();
            return Ok(());
        }
        match role_of(&shard[slot], writer) {
            CallerRole::OfWrite if in_memory(replicas) => {}
            CallerRole::OfValue if in_memory(replicas) => return Ok(()),
            // Nothing of that type was allocated, so there is nothing to end.
            CallerRole::OfWrite => return Ok(()),
            CallerRole::OfValue | CallerRole::OfOlder => return Err(nothing_in_progress(key)),
            CallerRole::Unrelated => return Err(other_writer(key)),
        }
        shard.prune(slot, now, self.space().options.put_release);
        let _held = self.space().tenants.hold(shard[slot].tenant(), shard[slot].charged_bytes());
        let Some(write) = shard.take_write(slot) else {
            shard.remove_if_empty(slot, MissCause::OwnerLost);
            return Err(not_found().context("every segment of the write is gone"));
        };
        let deadline = write.started.after(self.space().options.put_release);
        if deadline <= now {
            self.space().quarantine_write(write, now);
            shard.remove_if_empty(slot, MissCause::PutFailed);
            return Err(Error::new(
                ErrorCode::InvalidWrite,
                format!("cannot end put: its allocation has expired. key={}", key.escape_ascii()),
            ));
        }
        let number = use_number.unwrap_or_else(|| self.space().directory.next_use_number());
        let place = Place { number, ..write.place };
        // Unlike the number of the use, the stamp never comes from the batch.
        let stamp = match use_number {
            Some(number) if is_planted("stamp-before-lock") => number,
            _ => self.space().directory.next_stamp_number(),
        };
        let stamp = Stamp { epoch: self.space().epoch, number: stamp };
        self.complete(&mut shard, slot, write, checksum, &place, stamp, now);
        let (parent, sampled) = (shard.parent(slot), self.sampled_bytes(&shard, slot));
        drop(shard);
        if let Some(bytes) = sampled {
            self.space().curve.feed.note_use(hash, &place, bytes);
        }
        self.space().directory.change_children(parent, true);
        self.space().eviction.end_backoff();
        Ok(())
    }

    /// Revokes a write that failed. Its space is taken back, and the previous value stays readable.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `ILLEGAL_CLIENT`, `INVALID_WRITE` (no write in progress). After each of
    /// them there is nothing left to revoke.
    pub fn put_revoke(&self, writer: Writer, key: &[u8], replicas: ReplicaType) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        if replicas == ReplicaType::Disk && self.revoke_file(&mut shard, slot, writer) {
            drop(shard);
            self.space().eviction.end_backoff();
            return Ok(());
        }
        match role_of(&shard[slot], writer) {
            CallerRole::OfWrite if in_memory(replicas) => {}
            CallerRole::OfWrite => return Ok(()),
            CallerRole::OfValue | CallerRole::OfOlder => return Err(nothing_in_progress(key)),
            CallerRole::Unrelated => return Err(other_writer(key)),
        }
        if let Some(write) = shard.take_write(slot) {
            // Bytes that the writer gave up on may still arrive.
            let rest = now
                .after(self.space().options.revoke_rest)
                .min(write.started.after(self.space().options.put_release));
            write.quarantine(self.space().quarantine_end(rest), now);
        }
        shard.remove_if_empty(slot, MissCause::PutFailed);
        Ok(())
    }

    fn check_put(&self, put: &Put<'_>) -> Result<()> {
        let config = put.config;
        ObjectKey::check(put.key)?;
        let refuse = |why: &'static str| Err(Error::invalid(why));
        if put.len == 0 {
            return refuse("cannot put object: it has no bytes");
        }
        config.check()?;
        if self.space().options.placement == Placement::Cxl && config.preferred().is_empty() {
            return refuse("cannot put object: allocation_strategy cxl needs preferred_segments");
        }
        if config.dfs_replicas > 0 {
            let text = "cannot put object: this master has no distributed file system";
            return Err(Error::new(ErrorCode::DfsServiceUnavailable, text));
        }
        let longest = self.space().options.max_soft_pin_ttl;
        if let Some(ttl) = config.soft_pin_ttl_ms.filter(|ttl| Duration::from_millis(*ttl) > longest) {
            return Err(Error::invalid(format!(
                "soft_pin_ttl_ms {ttl} is above max_kv_soft_pin_ttl ({longest:?})"
            )));
        }
        Ok(())
    }

    /// Checks whether the write may start. Returns the response of the same call if this is its
    /// repetition.
    fn admit<R>(
        &self,
        shard: &mut Shard<A, E>,
        hash: u64,
        put: &Put<'_>,
        show: impl Fn(&Write<A>) -> R,
        now: Moment,
    ) -> Result<Option<R>> {
        self.admit_to_weights(put.group, put.key, put.config.data_type, now)?;
        let Some(slot) = shard.find(hash, put.key) else { return Ok(None) };
        shard.prune(slot, now, self.space().options.put_release);
        if shard[slot].is_limited {
            self.space().remove_if_ended(shard, slot, now);
            if shard.find(hash, put.key).is_none() {
                return Ok(None);
            }
        }
        let object = &shard[slot];
        if let Some(write) = object.write() {
            if write.writer.repeats(put.writer) && write.len == put.len {
                return Ok(Some(show(write)));
            }
            self.admit_after(write, put, now)?;
        }
        let on_disk = object.disk().is_some_and(DiskReplicas::is_live);
        if put.mode == WriteMode::Put && (object.value().is_some() || on_disk) {
            return Err(already_exists());
        }
        // A request without groups leaves the object in its group.
        let names_group = !put.group.is_empty() || put.config.group_ids.is_some();
        if object.value().is_some() && names_group && object.group_name() != put.group {
            return Err(Error::invalid("the group of an existing object cannot change"));
        }
        if !names_group && self.space().is_managed(object) {
            return Err(managed(put.key));
        }
        if object.copying().is_some() {
            return Err(ErrorCode::ObjectHasReplicationTask.into());
        }
        // The object that is about to be replaced should not be evicted for its successor.
        self.space().directory.touch(shard, slot, &self.space().next_place());
        shard.remove_if_empty(slot, MissCause::OwnerLost);
        Ok(None)
    }

    /// Checks whether a write may replace one in progress.
    fn admit_after(&self, write: &Write<A>, put: &Put<'_>, now: Moment) -> Result<()> {
        if write.started.after(self.space().options.put_discard) <= now {
            return Ok(());
        }
        match put.mode {
            WriteMode::Put => Err(already_exists()),
            // The end of the old write would be taken for the end of the new one.
            WriteMode::Upsert if write.writer.is(put.writer) => Err(Error::new(
                ErrorCode::ObjectReplicaBusy,
                format!("the same client is already writing the object. key={}", put.key.escape_ascii()),
            )),
            WriteMode::Upsert => Ok(()),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of an allocation")]
    fn grant<R>(
        &self,
        shard: &mut Shard<A, E>,
        hash: u64,
        put: &Put<'_>,
        place: Place,
        space: Replicas<A>,
        charged: Reservation<'_>,
        show: impl Fn(&Write<A>) -> R,
        now: Moment,
    ) -> Result<R> {
        let slot = match (shard.find(hash, put.key), ObjectKey::new(put.key)) {
            (Some(slot), _) => slot,
            (None, Ok(key)) => shard.add(hash, key, self.space().tenants.number(put.key)),
            // `check_put` has checked the length of the key.
            (None, Err(error)) => {
                space.into_iter().for_each(|held| held.quarantine(now, now));
                return Err(error.into());
            }
        };
        if let Some(abandoned) = shard.take_write(slot) {
            self.space().quarantine_write(abandoned, now);
        }
        let mut write = Write::new(put.writer, now, put.len, space);
        write.soft_pin = put.config.soft_pin;
        write.soft_pin_ttl_ms = put.config.soft_pin_ttl_ms;
        write.hard_pin = put.config.hard_pin || self.space().weights.manage(put.group);
        // Each write without a copy of the parent of the call.
        let hints = put.config.hints.as_ref().map(|hints| hints.of_object());
        write.hints = hints.filter(|hints| !hints.is_empty()).map(Box::new);
        // An object that ends by itself stays in memory: a file would keep it for the next master.
        let is_limited = write.hints.as_ref().is_some_and(|hints| hints.limit_lifetime());
        write.file = if is_limited { None } else { self.grant_file(put.key) };
        write.session = put.session.map(Box::from);
        write.place = place;
        let shown = show(&write);
        shard.put_write(slot, write, charged.spend());
        if !put.group.is_empty() {
            shard.join_group(slot, put.group);
        }
        Ok(shown)
    }

    /// Overwrites the old value in its own space if no reader uses it: the last resort of an upsert
    /// without free space.
    fn overwrite<R>(
        &self,
        hash: u64,
        put: &Put<'_>,
        place: Place,
        show: impl Fn(&Write<A>) -> R,
    ) -> Result<Option<R>> {
        if put.mode != WriteMode::Upsert {
            return Ok(None);
        }
        let now = self.space().clock.now();
        let mut shard = self.space().directory.lock(hash);
        if let Some(same) = self.admit(&mut shard, hash, put, &show, now)? {
            return Ok(Some(same));
        }
        let Some(slot) = shard.find(hash, put.key) else { return Ok(None) };
        let object = &shard[slot];
        let fits = object.value().is_some_and(|value| value.len == put.len);
        let in_use = if is_planted("upsert-ignores-disk-promises") {
            object.lease
        } else {
            // A lease of look-ups yields, as to a put that evicts. The owner of a disk may be
            // reading the value, too.
            let yields = self.space().lease_yields(object, now);
            self.space().in_use_until(object).max(if yields { Moment(0) } else { object.lease })
        };
        if !fits || in_use > now {
            return Ok(None);
        }
        let charged = self.space().tenants.hold(object.tenant(), object.charged_bytes());
        let Some(mut old) = shard.take_value(slot, now) else { return Ok(None) };
        // A client that has kept the old number would take the new value for the old one.
        old.replicas.iter_mut().for_each(|held| held.id = self.space().new_replica());
        self.grant(&mut shard, hash, put, place, old.replicas, charged, &show, now).map(Some)
    }

    /// Returns the charge of the tenant for the object that the write will replace.
    fn freed_charge(&self, shard: &Shard<A, E>, hash: u64, key: &[u8]) -> u64 {
        if !self.space().tenants.are_on() {
            return 0;
        }
        shard.find(hash, key).map_or(0, |slot| shard[slot].charged_bytes())
    }

    /// Makes the value of a write readable.
    #[allow(clippy::too_many_arguments, reason = "the parts of a value")]
    fn complete(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        write: Write<A>,
        checksum: Option<u64>,
        place: &Place,
        stamp: Stamp,
        now: Moment,
    ) {
        let (action, ttl, hard_pin) = (write.soft_pin, write.soft_pin_ttl_ms, write.hard_pin);
        let (writer, file, session) = (write.writer, write.file, write.session);
        let lifetime = write.hints.and_then(|hints| Lifetime::begin(&hints, now));
        let value =
            Value { len: write.len, checksum, writer, superseded: false, stamp, replicas: write.replicas };
        self.space().counters.value_size(value.len);
        let used = self.space().take_use(&mut shard[slot]);
        shard[slot].hard_pin |= hard_pin;
        match action {
            SoftPin::Preserve => {}
            SoftPin::Disable => shard.set_soft_pin(slot, Moment(0)),
            SoftPin::Enable => {
                let ttl = ttl.map_or(self.space().options.soft_pin_ttl, Duration::from_millis);
                shard.set_soft_pin(slot, now.after(ttl));
            }
        }
        shard[slot].drop_disk_replicas();
        if lifetime.is_some() || shard[slot].is_limited {
            self.space().set_lifetime(shard, slot, lifetime);
        }
        shard.name_session(session);
        let old = self.space().directory.put_value(shard, slot, value, place);
        if let Some(old) = old {
            self.space().give_back(old, used, now);
        }
        if let Some(file) = file {
            self.expect_file(&mut shard[slot], *file, writer, now);
        }
        let to_disk = self.space().options.disks.as_ref().is_some_and(|disks| !disks.on_evict);
        if to_disk && !shard[slot].is_limited {
            self.jobs.offload(shard, slot, now);
        }
    }
}

/// Records why a put was refused, for those who miss its object.
fn record_refusal<A: SegmentAllocator, E: MergeableOrder>(
    shard: &mut Shard<A, E>,
    hash: u64,
    key: &[u8],
    why: MissCause,
) {
    if shard.find(hash, key).is_none() {
        shard.record_departure(hash, why);
    }
}

enum CallerRole {
    OfWrite,
    OfValue,
    /// The value is that of the caller, but its call may concern another write.
    OfOlder,
    Unrelated,
}

fn role_of<A: SegmentAllocator>(object: &Object<A>, caller: Writer) -> CallerRole {
    if object.write().is_some_and(|write| write.writer.is(caller) && !write.promotes) {
        CallerRole::OfWrite
    } else if object.value().is_some_and(|value| value.ended_by(caller)) {
        CallerRole::OfValue
    } else if object.write().is_none() && object.value().is_some_and(|value| value.writer.is(caller)) {
        CallerRole::OfOlder
    } else {
        CallerRole::Unrelated
    }
}

/// Returns whether the call concerns memory. Files are written behind the put and have an end of
/// their own, even in a call about all replicas.
fn in_memory(replicas: ReplicaType) -> bool {
    matches!(replicas, ReplicaType::All | ReplicaType::Memory)
}

#[cold]
fn no_space(why: NoSpace, len: u64) -> Error {
    let why = match why {
        NoSpace::Full => "no segment has enough free space, and no more objects can be evicted",
        NoSpace::Remains => "free memory has bytes of other tenants until its owner zeroes it",
    };
    Error::new(ErrorCode::NoAvailableHandle, format!("cannot put object: {why}. len={len}"))
}

#[cold]
fn already_exists() -> Error {
    ErrorCode::ObjectAlreadyExists.into()
}

#[cold]
fn other_writer(key: &[u8]) -> Error {
    Error::new(
        ErrorCode::IllegalClient,
        format!("another client writes the object. key={}", key.escape_ascii()),
    )
}

#[cold]
fn nothing_in_progress(key: &[u8]) -> Error {
    Error::new(
        ErrorCode::InvalidWrite,
        format!("no write of the object is in progress. key={}", key.escape_ascii()),
    )
}
