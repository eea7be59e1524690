//! Replicas of expired clients. A client that was cut off for a while is served again when it
//! returns.
//!
//! A client that cannot reach its master still holds its objects. When the client expires, each of
//! its replicas is listed here for [`RETENTION`]. Removing or replacing an object takes it from the
//! list. A client that returns announces the listed replicas, and only those are served again. The
//! memory is not written meanwhile, because the master places nothing in a retired segment.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::StoredReplica;
use smallvec::SmallVec;

use super::object::Object;
use crate::model::lifetime::Lifetime;
use crate::model::snapshot::{Horizon, ReplicaPosition, SnapshotObject};
use crate::model::value::Stamp;

/// Time for which an expired client may return to its objects.
const RETENTION: Duration = Duration::from_secs(600);

/// Maximum number of objects in the list of a shard. Further ones are lost when their client
/// expires.
const MAX_OBJECTS: usize = 1 << 16;

/// Number of objects that one step through a list visits, under one lock of its shard.
pub(crate) const STEP: usize = 256;

/// Key after which the next step through a list begins; `None` for the first step.
pub(crate) type After = Option<Box<[u8]>>;

/// Reason why a replica is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListedFor {
    /// The client expired.
    Expiry,
    /// The client hands its memory over to its next process.
    HandOver,
    /// The snapshot of an earlier master has the replica, and the client may be late.
    LateReturn,
}

/// Object with replicas in segments of expired clients.
struct ExpiredObject {
    reason: ListedFor,
    len: u64,
    checksum: Option<u64>,
    writer: ClientId,
    group: String,
    hard_pin: bool,
    soft_pin: Moment,
    stamp: Stamp,
    used: u64,
    /// Lifetime, if the object ends by itself; not for [`ListedFor::Expiry`].
    lifetime: Option<Lifetime>,
    positions: SmallVec<[ReplicaPosition; 1]>,
    until: Moment,
}

impl ExpiredObject {
    fn to_snapshot(&self, key: &[u8], now: Moment, wall_ms: u64) -> Option<SnapshotObject> {
        (self.reason != ListedFor::LateReturn).then(|| SnapshotObject {
            key: key.to_vec(),
            len: self.len,
            checksum: self.checksum,
            written: Some(Horizon { epoch: self.stamp.epoch, number: self.stamp.number }),
            used: self.used,
            group: self.group.clone(),
            hard_pin: self.hard_pin,
            soft_pin_ms: soft_pin_ms(self, now),
            lifetime: self.lifetime.map(|lifetime| lifetime.to_stored(now, wall_ms)),
            positions: self.positions.to_vec(),
            disks: Vec::new(),
        })
    }
}

/// List of the objects of one shard with replicas in segments of expired clients.
#[derive(Default)]
pub(crate) struct ExpiredReplicas {
    objects: BTreeMap<Box<[u8]>, ExpiredObject>,
    /// Time before which no entry ends.
    next: Moment,
}

/// Returns the next objects of a list, at most [`STEP`].
fn next_step<'m, V>(
    objects: &'m BTreeMap<Box<[u8]>, V>,
    after: &After,
) -> impl Iterator<Item = (&'m Box<[u8]>, &'m V)> {
    let begin = after.as_deref().map_or(Unbounded, Excluded);
    objects.range::<[u8], _>((begin, Unbounded)).take(STEP)
}

impl ExpiredReplicas {
    /// Lists the replicas of an object that lie in segments of expired clients, or in those that
    /// are handed over. The list of an expired client does not say when objects end by themselves,
    /// so these are omitted.
    pub(crate) fn record<A: SegmentAllocator>(
        &mut self,
        object: &Object<A>,
        lifetime: Option<Lifetime>,
        now: Moment,
    ) {
        let has_ended = lifetime.is_some_and(|lifetime| lifetime.end(now).is_some());
        let Some(value) = object.value().filter(|_| !has_ended) else { return };
        for held in &value.replicas {
            let reason = if held.segment.is_handed_over() {
                ListedFor::HandOver
            } else if held.segment.has_expired() && lifetime.is_none() {
                ListedFor::Expiry
            } else {
                continue;
            };
            let key = object.key.as_bytes();
            if !self.objects.contains_key(key) && self.objects.len() >= MAX_OBJECTS {
                return;
            }
            let until = now.after(RETENTION);
            self.next = if self.objects.is_empty() { until } else { self.next.min(until) };
            let position = ReplicaPosition { segment: held.segment.info.id, offset: held.extent.offset };
            let listed = self.objects.entry(key.into()).or_insert_with(|| ExpiredObject {
                reason,
                len: value.len,
                checksum: value.checksum,
                writer: value.writer.client,
                group: object.group_name().to_owned(),
                hard_pin: object.hard_pin,
                soft_pin: object.soft_pin(),
                stamp: value.stamp,
                used: object.used,
                lifetime,
                positions: SmallVec::new(),
                until,
            });
            if (listed.stamp, listed.reason) == (value.stamp, reason) && !listed.positions.contains(&position)
            {
                listed.positions.push(position);
                listed.until = until;
            }
        }
    }

    /// Forgets an object.
    pub(crate) fn forget(&mut self, key: &[u8]) {
        if !self.objects.is_empty() && !is_planted("expired-removals-forgotten") {
            self.objects.remove(key);
        }
    }

    /// Forgets an object unless the listed value has that stamp.
    pub(crate) fn forget_unless(&mut self, key: &ObjectKey, stamp: Stamp) {
        if !self.objects.is_empty()
            && self.objects.get(key.as_bytes()).is_some_and(|listed| listed.stamp != stamp)
        {
            self.forget(key.as_bytes());
        }
    }

    /// Forgets an object that a client wrote, or may have written: snapshots do not name writers.
    /// Returns whether there was one.
    pub(crate) fn forget_of(&mut self, key: &[u8], writer: ClientId) -> bool {
        let is_of =
            |listed: &ExpiredObject| listed.writer == writer || listed.reason == ListedFor::LateReturn;
        let is_there = self.objects.get(key).is_some_and(is_of);
        if is_there {
            self.forget(key);
        }
        is_there
    }

    /// Forgets the next objects with such keys. Returns whether it was the last step.
    pub(crate) fn forget_where(&mut self, after: &mut After, wanted: impl Fn(&[u8]) -> bool) -> bool {
        self.forget_step(after, |key, _| wanted(key))
    }

    /// Returns whether the time of an object may be over.
    pub(crate) fn may_have_ended(&self, now: Moment) -> bool {
        !self.objects.is_empty() && self.next <= now
    }

    /// Forgets the next objects whose time is over. Returns whether it was the last step.
    pub(crate) fn forget_ended(&mut self, after: &mut After, now: Moment) -> bool {
        if after.is_none() {
            self.next = Moment(u64::MAX);
        }
        let mut next = self.next;
        let is_last = self.forget_step(after, |_, listed| {
            let has_ended = listed.until <= now;
            next = if has_ended { next } else { next.min(listed.until) };
            has_ended
        });
        self.next = next;
        is_last
    }

    fn forget_step(
        &mut self,
        after: &mut After,
        mut wanted: impl FnMut(&[u8], &ExpiredObject) -> bool,
    ) -> bool {
        let mut forgotten = Vec::new();
        let mut count = 0;
        for (key, listed) in next_step(&self.objects, &std::mem::take(after)) {
            count += 1;
            if wanted(key, listed) {
                forgotten.push(key.clone());
            }
            if count == STEP {
                *after = Some(key.clone());
            }
        }
        forgotten.iter().for_each(|key| drop(self.objects.remove(key)));
        count < STEP
    }

    /// Lists an object of the snapshot of an earlier master. An object that is on disks only is not
    /// listed.
    pub(crate) fn record_late(
        &mut self,
        object: SnapshotObject,
        soft_pin: Moment,
        lifetime: Option<Lifetime>,
        now: Moment,
    ) {
        let Some(written) = object.written else { return };
        let positions: SmallVec<_> = object.in_memory().collect();
        let key = object.key.into_boxed_slice();
        if positions.is_empty() || self.objects.contains_key(&key) || self.objects.len() >= MAX_OBJECTS {
            return;
        }
        let until = now.after(RETENTION);
        self.next = if self.objects.is_empty() { until } else { self.next.min(until) };
        let listed = ExpiredObject {
            reason: ListedFor::LateReturn,
            len: object.len,
            checksum: object.checksum,
            writer: ClientId::default(),
            group: object.group,
            hard_pin: object.hard_pin,
            soft_pin,
            stamp: Stamp { epoch: written.epoch, number: written.number },
            used: object.used,
            lifetime,
            positions,
            until,
        };
        self.objects.insert(key, listed);
    }

    /// Takes a replica from the list. Returns the number of the last use of its object and its
    /// lifetime.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` if the list does not have it.
    pub(crate) fn take(&mut self, replica: &StoredReplica) -> Result<(u64, Option<Lifetime>)> {
        let position = ReplicaPosition { segment: replica.segment, offset: replica.offset };
        let taken = self.take_where(replica, |listed, at| {
            // The next process of a segment file, too, may be late; its segment has another
            // identifier.
            let is_there = listed.positions[at] == position;
            let is_late = listed.reason == ListedFor::LateReturn;
            is_there && listed.reason != ListedFor::HandOver
                || is_late && listed.positions[at].offset == position.offset
        });
        taken.ok_or_else(|| {
            let text = "cannot announce replica: the object was removed or replaced, or the client is late";
            Error::new(ErrorCode::ObjectAlreadyExists, text)
        })
    }

    /// Takes a replica from the list that its client announces without knowledge of the list: its
    /// memory was handed over to the next process of the client, where the segment has another
    /// identifier; or a snapshot has it, and the client was still announcing when the time for that
    /// ended. Returns the number of the last use of its object and its lifetime.
    pub(crate) fn take_unlisted(&mut self, replica: &StoredReplica) -> Option<(u64, Option<Lifetime>)> {
        self.take_where(replica, |listed, at| {
            let allows_unlisted = match listed.reason {
                ListedFor::Expiry => false,
                ListedFor::HandOver => true,
                ListedFor::LateReturn => !is_planted("late-announcements-refused"),
            };
            allows_unlisted && listed.positions[at].offset == replica.offset
        })
    }

    fn take_where(
        &mut self,
        replica: &StoredReplica,
        is_it: impl Fn(&ExpiredObject, usize) -> bool,
    ) -> Option<(u64, Option<Lifetime>)> {
        if self.objects.is_empty() {
            return None;
        }
        let listed = self.objects.get_mut(&*replica.key)?;
        let stamp = Stamp { epoch: replica.epoch, number: replica.number };
        if listed.stamp != stamp || listed.len != replica.len {
            return None;
        }
        let at = (0..listed.positions.len()).find(|at| is_it(listed, *at))?;
        let known = (listed.used, listed.lifetime);
        listed.positions.swap_remove(at);
        if listed.positions.is_empty() {
            self.objects.remove(&*replica.key);
        }
        Some(known)
    }

    /// Returns the replicas of a segment that are listed for a reason, among the next objects.
    /// Objects that end by themselves are omitted, because the list does not say when. Returns
    /// whether it was the last step, too.
    pub(crate) fn in_segment(
        &self,
        after: &mut After,
        segment: SegmentId,
        reason: ListedFor,
        now: Moment,
    ) -> (Vec<StoredReplica>, bool) {
        let mut found = Vec::new();
        let is_last = self.visit_step(after, |key, listed| {
            if listed.reason != reason || listed.lifetime.is_some() {
                return;
            }
            let there = listed.positions.iter().filter(|position| position.segment == segment);
            found.extend(there.map(|position| StoredReplica {
                segment,
                offset: position.offset,
                len: listed.len,
                key: key.to_vec(),
                checksum: listed.checksum,
                writer: listed.writer,
                group: listed.group.clone(),
                hard_pin: listed.hard_pin,
                soft_pin_ms: soft_pin_ms(listed, now),
                epoch: listed.stamp.epoch,
                number: listed.stamp.number,
            }));
        });
        (found, is_last)
    }

    /// Returns the next listed objects for a snapshot, except those of clients that are late: their
    /// time ends with this master. `wall_ms` is the date of `now`. Returns whether it was the last
    /// step, too.
    pub(crate) fn to_snapshot(
        &self,
        after: &mut After,
        now: Moment,
        wall_ms: u64,
    ) -> (Vec<SnapshotObject>, bool) {
        let mut objects = Vec::new();
        let is_last =
            self.visit_step(after, |key, listed| objects.extend(listed.to_snapshot(key, now, wall_ms)));
        (objects, is_last)
    }

    /// Returns a listed object for a snapshot, like [`to_snapshot`](Self::to_snapshot).
    pub(crate) fn object_to_snapshot(&self, key: &[u8], now: Moment, wall_ms: u64) -> Option<SnapshotObject> {
        self.objects.get(key)?.to_snapshot(key, now, wall_ms)
    }

    fn visit_step(&self, after: &mut After, mut visit: impl FnMut(&[u8], &ExpiredObject)) -> bool {
        let mut count = 0;
        for (key, listed) in next_step(&self.objects, &std::mem::take(after)) {
            count += 1;
            visit(key, listed);
            if count == STEP {
                *after = Some(key.clone());
            }
        }
        count < STEP
    }
}

fn soft_pin_ms(listed: &ExpiredObject, now: Moment) -> u64 {
    u64::try_from(listed.soft_pin.since(now).as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::Uuid;

    use super::*;

    const COUNT: usize = 3 * STEP + 5;

    fn key(number: usize) -> Vec<u8> {
        format!("k{number}").into_bytes()
    }

    fn list() -> ExpiredReplicas {
        let mut list = ExpiredReplicas::default();
        for number in 0..COUNT {
            let position =
                ReplicaPosition { segment: SegmentId(Uuid::new(1, 1)), offset: 64 * number as u64 };
            let written = Some(Horizon { epoch: 1, number: number as u64 });
            let positions = vec![position];
            let object = SnapshotObject {
                written,
                positions,
                ..SnapshotObject::on_disks(&key(number), 64, None, &[])
            };
            list.record_late(object, Moment(0), None, Moment(number as u64));
        }
        list
    }

    /// Repeats a step until the last one. Returns the number of steps.
    fn repeat(mut step: impl FnMut(&mut After) -> bool) -> usize {
        let mut after = After::default();
        (1..).find(|_| step(&mut after)).unwrap_or_default()
    }

    #[test]
    fn a_list_is_visited_in_steps_while_it_changes() {
        let mut list = list();
        let (mut seen, mut number) = (Vec::new(), 0);
        let steps = repeat(|after| {
            let (some, is_last) =
                list.in_segment(after, SegmentId(Uuid::new(1, 1)), ListedFor::LateReturn, Moment(0));
            assert!(some.len() <= STEP);
            seen.extend(some.into_iter().map(|stored| stored.key));
            // An object where the visit is leaves the list.
            list.forget(seen.last().unwrap());
            number += 1;
            is_last
        });
        assert_eq!((seen.len(), steps, number), (COUNT, 4, 4));
        assert_eq!(repeat(|after| list.forget_where(after, |key| key.ends_with(b"7"))), 4);
        assert!(!list.objects.keys().any(|key| key.ends_with(b"7")) && list.objects.len() > COUNT / 2);
    }

    #[test]
    fn objects_whose_time_is_over_are_forgotten_in_steps() {
        let mut list = list();
        let end = |number: usize| Moment(number as u64).after(RETENTION);
        assert!(!list.may_have_ended(Moment(end(0).0 - 1)) && list.may_have_ended(end(0)));
        assert_eq!(repeat(|after| list.forget_ended(after, end(9))), 4);
        assert_eq!(list.objects.len(), COUNT - 10);
        assert!(!list.may_have_ended(end(9)) && list.may_have_ended(end(10)));
        repeat(|after| list.forget_ended(after, end(COUNT)));
        assert!(list.objects.is_empty());
    }
}
