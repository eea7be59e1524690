//! Look-ups of objects that the caller does not name one by one, and lists of keys.
//!
//! A look-up of any size takes bounded memory: it goes through the directory in steps, and encodes
//! each object when it finds it. A response that would be too long is refused before a lease is
//! granted.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ObjectKey, SlotId};
use mooncake_core::replica::Replica;
use mooncake_protocol::call::{Handle, Response};
use mooncake_protocol::frame::{MAX_REPLY, Refusal, too_large};
use mooncake_protocol::message::{GetReplicaListByRegex, Request};
use mooncake_protocol::pack::{Pack, Pairs, wide_len};
use mooncake_protocol::wire::MatchingPage;
use regex::bytes::Regex;

use super::lookup::is_readable;
use super::master::Master;
use crate::directory::{Position, Shard};
use crate::model::pattern::compile;

/// Number of keys of a call up to which its response is short enough, unless an object has a
/// hundred replicas.
pub(super) const MAX_UNCHECKED: usize = 4096;
/// Length of a replica in memory in a response, in bytes; few endpoints have longer names.
pub(super) const REPLICA_LEN: usize = 320;
/// Length of a page in bytes from which no object is added.
const PAGE_BYTES: usize = 1 << 20;
/// Number of objects that one page examines.
const PAGE_OBJECTS: usize = 1 << 16;

/// Condition on a key of the directory: it belongs to a tenant and matches a pattern.
struct KeyCondition {
    prefix: Vec<u8>,
    pattern: Option<Regex>,
}

impl KeyCondition {
    /// Returns the key without the prefix of its tenant, if the condition holds.
    fn own<'k>(&self, key: &'k [u8]) -> Option<&'k [u8]> {
        let key = key.strip_prefix(&*self.prefix)?;
        self.pattern.as_ref().is_none_or(|pattern| pattern.is_match(key)).then_some(key)
    }
}

/// Size of a response about matching objects.
#[derive(Default)]
struct Measured {
    count: usize,
    bytes: usize,
    /// Longest container in the response.
    widest: usize,
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the replicas of each object whose key matches the pattern, and grants leases.
    ///
    /// Patterns are those of ECMAScript, without back references and look-around. They match bytes:
    /// `.` is any byte but the end of a line.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the text is not a pattern, or is too large.
    pub fn locate_matching(&self, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>> {
        let condition = KeyCondition { prefix: Vec::new(), pattern: Some(compile(pattern)?) };
        Ok(self.locate_where(&condition))
    }

    /// Returns replicas of one tenant like [`Master::locate_matching`]. Pattern and response
    /// contain the keys without prefix. A tenant that is not registered has no objects.
    ///
    /// # Errors
    /// Those of [`Master::locate_matching`].
    pub fn locate_matching_of(&self, tenant: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>> {
        Ok(self
            .condition(tenant, pattern)?
            .map(|condition| self.locate_where(&condition))
            .unwrap_or_default())
    }

    fn locate_where(&self, condition: &KeyCondition) -> Vec<(ObjectKey, Vec<Replica>)> {
        let mut found = Vec::new();
        let now = self.space().clock.now();
        self.space().directory.visit(|shard, slot| {
            self.locate_one(shard, slot, condition, now, |key, replicas| {
                ObjectKey::new(key).map(|key| found.push((key, replicas))).is_ok()
            });
        });
        found
    }

    /// Returns the condition of a pattern; `None` for a tenant that is not registered.
    fn condition(&self, tenant: &str, pattern: &str) -> Result<Option<KeyCondition>> {
        let pattern = Some(compile(pattern)?);
        Ok(self.space().tenants.prefix(tenant).map(|prefix| KeyCondition { prefix, pattern }))
    }

    /// Passes key and replicas of an object to `take` if its key fulfils the condition. Grants a
    /// lease if `take` returns true.
    fn locate_one(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        condition: &KeyCondition,
        now: Moment,
        take: impl FnOnce(&[u8], Vec<Replica>) -> bool,
    ) {
        let Some((key, replicas)) = describe(shard, slot, condition, now) else { return };
        if take(key, replicas) {
            let lease = self.space().lease_from(now);
            shard[slot].grant_lease(lease);
            shard[slot].reads.add_unreported(lease);
            self.space().directory.touch(shard, slot, &self.space().next_place());
            self.space().end_at_read(shard, slot);
        }
    }

    /// Encodes the response to a look-up by pattern. A response that would be too long is refused
    /// without a lease.
    pub(super) fn respond_matching<'a>(
        &self,
        r: GetReplicaListByRegex<'a>,
        response: &mut Response<'_>,
    ) -> Result<(), Refusal> {
        let condition = match self.condition(r.tenant, r.pattern) {
            Ok(Some(condition)) => condition,
            none => {
                response.set::<GetReplicaListByRegex<'a>>(none.map(|_| Pairs(Vec::new())));
                return Ok(());
            }
        };
        let now = self.space().clock.now();
        let measured = self.measure(&condition, now)?;
        if response.may_have_members() && self.has_localities() {
            response.set::<GetReplicaListByRegex<'a>>(self.handle(r));
            return Ok(());
        }
        let Measured { count: most, widest, .. } = measured;
        response.write_value::<GetReplicaListByRegex<'a>, _>(widest, |out| {
            out.list(most, |out| {
                // Objects that were stored meanwhile are added while they fit.
                let (start, mut count) = (out.position(), 0);
                self.space().directory.visit(|shard, slot| {
                    self.locate_one(shard, slot, &condition, now, |key, replicas| {
                        let fits = key.len().max(replicas.widest()) <= widest;
                        if count == most || !fits || out.position() - start > measured.bytes {
                            return false;
                        }
                        out.length(key.len());
                        out.bytes(key);
                        replicas.pack(out);
                        count += 1;
                        true
                    });
                });
                count
            });
        })
    }

    /// Measures the response to a look-up by pattern, and refuses one that is too long.
    fn measure(&self, condition: &KeyCondition, now: Moment) -> Result<Measured, Refusal> {
        let (mut measured, mut scratch) = (Measured::default(), Vec::new());
        let (mut is_too_long, size) = (false, std::cell::Cell::new(0));
        self.space().directory.visit_from(
            Position::FIRST,
            |shard, slot| {
                let Some((key, replicas)) = describe(shard, slot, condition, now) else { return };
                measured.count += 1;
                measured.bytes += 4 + key.len() + wide_len(&replicas, &mut scratch);
                measured.widest = measured.widest.max(key.len()).max(replicas.widest());
                size.set(measured.bytes);
            },
            || {
                is_too_long = size.get() > MAX_REPLY - 64;
                !is_too_long
            },
        );
        if is_too_long && !is_planted("answer-unbounded") {
            let fields = format_args!("pattern={:?}", condition.pattern.as_ref().map(Regex::as_str));
            let advice = "use a pattern that matches fewer keys, or LocateMatching, which answers by pages";
            return Err(too_large(GetReplicaListByRegex::NAME, fields, advice));
        }
        measured.widest = measured.widest.max(measured.count);
        Ok(measured)
    }

    /// Returns a page of the objects whose keys match, and grants leases on them. `position` is 0
    /// for the first page, or [`MatchingPage::next`] of the earlier one.
    ///
    /// # Errors
    /// Those of [`Master::locate_matching`].
    pub fn matching_page(&self, tenant: &str, pattern: &str, position: u64) -> Result<MatchingPage> {
        let mut objects = Vec::new();
        let Some(condition) = self.condition(tenant, pattern)? else {
            return Ok(MatchingPage { objects: Pairs(objects), next: 0 });
        };
        let (now, mut scratch) = (self.space().clock.now(), Vec::new());
        let (bytes, seen) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let next = self.space().directory.visit_from(
            Position::from_number(position),
            |shard, slot| {
                seen.set(seen.get() + 1);
                self.locate_one(shard, slot, &condition, now, |key, replicas| {
                    bytes.set(bytes.get() + key.len() + wide_len(&replicas, &mut scratch));
                    objects.push((key.to_vec(), replicas));
                    true
                });
            },
            || bytes.get() < PAGE_BYTES && seen.get() < PAGE_OBJECTS,
        );
        Ok(MatchingPage { objects: Pairs(objects), next: next.map_or(0, Position::to_number) })
    }

    /// Refuses a call whose response would be too long, before it grants a lease. With
    /// `ends_at_gap`, the response ends at the first key that cannot be read.
    pub(super) fn check_reply_of(
        &self,
        call: &str,
        tenant: &str,
        keys: &[&[u8]],
        ends_at_gap: bool,
    ) -> Result<(), Refusal> {
        if keys.len() <= MAX_UNCHECKED || is_planted("answer-unbounded") {
            return Ok(());
        }
        let (now, mut scratch, mut len) = (self.space().clock.now(), Vec::new(), 0);
        for key in keys {
            let replicas = self.scoped_if_known(tenant, key).ok().and_then(|key| {
                let hash = self.space().directory.hash(&key);
                let shard = self.space().directory.lock(hash);
                let slot = shard.find(hash, &key).filter(|slot| is_readable(&shard, *slot, now))?;
                Some(shard[slot].describe())
            });
            match replicas {
                None if ends_at_gap => break,
                None => len += 5,
                // The lease and the checksum follow.
                Some(replicas) => len += 32 + wide_len(&replicas, &mut scratch),
            }
            if len > MAX_REPLY - 64 {
                let fields = format_args!("keys={}", keys.len());
                return Err(too_large(call, fields, "ask for fewer keys at a time"));
            }
        }
        Ok(())
    }

    /// Returns every key with a readable value, in no order.
    pub fn keys(&self) -> Vec<ObjectKey> {
        let all = KeyCondition { prefix: Vec::new(), pattern: None };
        let mut keys = Vec::new();
        self.visit_keys(&all, Position::FIRST, |key| keys.extend(ObjectKey::new(key)), || true);
        keys
    }

    /// Returns the keys of one tenant like [`Master::keys`].
    pub fn keys_of(&self, tenant: &str) -> Vec<ObjectKey> {
        let mut keys = Vec::new();
        if let Some(prefix) = self.space().tenants.prefix(tenant) {
            let own = KeyCondition { prefix, pattern: None };
            self.visit_keys(&own, Position::FIRST, |key| keys.extend(ObjectKey::new(key)), || true);
        }
        keys
    }

    /// Passes keys of one tenant to `take`, without its prefix, until `take` has got `most_bytes`
    /// of them or many objects were examined. `position` is 0 at first, then what this method has
    /// returned; it returns `None` after the last key.
    pub fn list_keys(
        &self,
        tenant: &str,
        position: u64,
        most_bytes: usize,
        mut take: impl FnMut(&[u8]),
    ) -> Option<u64> {
        let own = KeyCondition { prefix: self.space().tenants.prefix(tenant)?, pattern: None };
        let (bytes, steps) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let take = |key: &[u8]| {
            bytes.set(bytes.get() + key.len() + 1);
            take(key);
        };
        let may_continue = || {
            steps.set(steps.get() + 1);
            bytes.get() < most_bytes && steps.get() < PAGE_OBJECTS / 256
        };
        self.visit_keys(&own, Position::from_number(position), take, may_continue).map(Position::to_number)
    }

    fn visit_keys(
        &self,
        condition: &KeyCondition,
        position: Position,
        mut take: impl FnMut(&[u8]),
        may_continue: impl FnMut() -> bool,
    ) -> Option<Position> {
        let now = self.space().clock.now();
        let see = |shard: &mut Shard<A, E>, slot| {
            let object = &shard[slot];
            let exists = object.value().is_some() || object.disk().is_some();
            if exists
                && shard.end_of_lifetime(slot, now).is_none()
                && let Some(key) = condition.own(object.key.as_bytes())
            {
                take(key);
            }
        };
        self.space().directory.visit_from(position, see, may_continue)
    }
}

/// Returns key and replicas of an object if its key fulfils the condition and it can be read.
fn describe<'s, A: SegmentAllocator, E: MergeableOrder>(
    shard: &'s Shard<A, E>,
    slot: SlotId,
    condition: &KeyCondition,
    now: Moment,
) -> Option<(&'s [u8], Vec<Replica>)> {
    let object = &shard[slot];
    let key = condition.own(object.key.as_bytes())?;
    if shard.end_of_lifetime(slot, now).is_some() {
        return None;
    }
    let replicas = object.describe();
    (!replicas.is_empty()).then_some((key, replicas))
}
