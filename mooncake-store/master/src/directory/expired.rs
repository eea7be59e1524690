//! Replicas of expired clients. A client that was cut off for a while is served again when it
//! returns.
//!
//! A client that cannot reach its master still holds its objects. When the client expires, each of
//! its replicas is listed here for [`KEPT_FOR`]. Removing or replacing an object takes it from the
//! list. A client that returns announces the listed replicas, and only those are served again. The
//! memory is not written meanwhile, because the master places nothing in a retired segment.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::StoredReplica;
use smallvec::SmallVec;

use super::object::Object;
use crate::model::snapshot::{Horizon, ReplicaPosition, SnapshotObject};
use crate::model::value::Stamp;

/// Time for which an expired client may return to its objects.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// Maximum number of objects in the list of a shard. Further ones are lost when their client
/// expires.
const MAX_OBJECTS: usize = 1 << 16;

/// Object with replicas in segments of expired clients.
struct ExpiredObject {
    len: u64,
    checksum: Option<u64>,
    writer: ClientId,
    group: String,
    hard_pin: bool,
    soft_pin: Moment,
    stamp: Stamp,
    used: u64,
    positions: SmallVec<[ReplicaPosition; 1]>,
    until: Moment,
}

/// List of the objects of one shard with replicas in segments of expired clients.
#[derive(Default)]
pub(crate) struct ExpiredReplicas {
    objects: HashMap<Box<[u8]>, ExpiredObject>,
    /// Time before which no entry ends.
    next: Moment,
}

impl ExpiredReplicas {
    /// Lists the replicas of an object that lie in segments of expired clients. An object that ends
    /// by itself is not listed: the list does not say when.
    pub(crate) fn record<A: SegmentAllocator>(&mut self, object: &Object<A>, now: Moment) {
        let Some(value) = object.value().filter(|_| !object.is_limited) else { return };
        for held in value.replicas.iter().filter(|held| held.segment.has_expired()) {
            let key = object.key.as_bytes();
            if !self.objects.contains_key(key) && self.objects.len() >= MAX_OBJECTS {
                return;
            }
            let until = now.after(KEPT_FOR);
            if self.objects.is_empty() {
                self.next = until;
            }
            let position = ReplicaPosition { segment: held.segment.info.id, offset: held.extent.offset };
            let listed = self.objects.entry(key.into()).or_insert_with(|| ExpiredObject {
                len: value.len,
                checksum: value.checksum,
                writer: value.writer.client,
                group: object.group_name().to_owned(),
                hard_pin: object.hard_pin,
                soft_pin: object.soft_pin(),
                stamp: value.stamp,
                used: object.used,
                positions: SmallVec::new(),
                until,
            });
            if listed.stamp == value.stamp && !listed.positions.contains(&position) {
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

    /// Forgets the objects with such keys.
    pub(crate) fn forget_where(&mut self, wanted: impl Fn(&[u8]) -> bool) {
        self.objects.retain(|key, _| !wanted(key));
    }

    /// Forgets the objects whose time is over.
    pub(crate) fn forget_ended(&mut self, now: Moment) {
        if self.objects.is_empty() || self.next > now {
            return;
        }
        self.objects.retain(|_, listed| listed.until > now);
        self.next = self.objects.values().map(|listed| listed.until).min().unwrap_or(Moment(u64::MAX));
    }

    /// Takes a replica from the list. Returns the number of the last use of its object.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` if the list does not have it.
    pub(crate) fn take(&mut self, replica: &StoredReplica) -> Result<Option<u64>> {
        let gone = || {
            let text = "removed or replaced since its client expired, or that was too long ago";
            Error::new(ErrorCode::ObjectAlreadyExists, text)
        };
        let listed = self.objects.get_mut(&*replica.key).ok_or_else(gone)?;
        let stamp = Stamp { epoch: replica.epoch, number: replica.number };
        let position = ReplicaPosition { segment: replica.segment, offset: replica.offset };
        let at = listed.positions.iter().position(|listed| *listed == position).ok_or_else(gone)?;
        if listed.stamp != stamp || listed.len != replica.len {
            return Err(gone());
        }
        let used = listed.used;
        listed.positions.swap_remove(at);
        if listed.positions.is_empty() {
            self.objects.remove(&*replica.key);
        }
        Ok(Some(used))
    }

    /// Returns the listed replicas of a segment.
    pub(crate) fn in_segment(&self, segment: SegmentId, now: Moment) -> impl Iterator<Item = StoredReplica> {
        self.objects.iter().flat_map(move |(key, listed)| {
            let there = listed.positions.iter().filter(move |position| position.segment == segment);
            there.map(move |position| StoredReplica {
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
            })
        })
    }

    /// Returns the listed objects for a snapshot.
    pub(crate) fn to_snapshot(&self, now: Moment) -> impl Iterator<Item = SnapshotObject> {
        self.objects.iter().map(move |(key, listed)| SnapshotObject {
            key: key.to_vec(),
            len: listed.len,
            checksum: listed.checksum,
            written: Some(Horizon { epoch: listed.stamp.epoch, number: listed.stamp.number }),
            used: listed.used,
            group: listed.group.clone(),
            hard_pin: listed.hard_pin,
            soft_pin_ms: soft_pin_ms(listed, now),
            lifetime: None,
            positions: listed.positions.to_vec(),
            disks: Vec::new(),
        })
    }
}

fn soft_pin_ms(listed: &ExpiredObject, now: Moment) -> u64 {
    u64::try_from(listed.soft_pin.since(now).as_millis()).unwrap_or(u64::MAX)
}
