//! Making room: above the watermark in the background, and for a put that finds none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::SlotId;
use smallvec::SmallVec;

use super::Master;
use super::directory::{Object, Shard};
use super::segments::Mounted;

/// How far below the watermark the background goes at most, as a part of the capacity.
const HYSTERESIS: f64 = 0.01;

/// After every object was refused, nobody looks again for this long, or until something changes.
const FUTILE: Duration = Duration::from_millis(10);

/// So many objects the background evicts before it lets others run: some tens of microseconds.
const COURTEOUS: u32 = 32;

#[derive(Default)]
pub(super) struct EvictionState {
    futile_until: AtomicU64,
    /// The same for [`Master::clear_window`], whose search is dearer.
    pub(super) window_until: AtomicU64,
    /// Bytes of the largest put that found no gap among many objects, 0 for none.
    window_wanted: AtomicU64,
}

impl EvictionState {
    /// An object became readable, or space came free: looking again may help.
    pub(super) fn something_changed(&self) {
        if self.futile_until.load(Relaxed) != 0 {
            self.futile_until.store(0, Relaxed);
        }
    }
}

/// What may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Objects that nobody pinned.
    Ordinary,
    /// Soft-pinned ones too.
    SoftPinned,
}

/// What an eviction freed, and where.
pub(super) struct Victim<A> {
    pub(super) bytes: u64,
    pub(super) segments: SmallVec<[Arc<Mounted<A>>; 1]>,
}

impl<A> Victim<A> {
    pub(super) fn none() -> Self {
        Self { bytes: 0, segments: SmallVec::new() }
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Frees what a put of `len` bytes needs, and hardly more, in the segment named or else in any; whether it may look again.
    pub(super) fn make_room(&self, len: u64, only: Option<&str>, now: Moment) -> bool {
        if !self.could_hold(len) {
            return false;
        }
        let takes = self.taking(only, now);
        if self.reclaim(now) > 0 && self.has_room(len, &takes) {
            return true;
        }
        if self.eviction.futile_until.load(Relaxed) > now.0 {
            return false;
        }
        self.counters.eviction_attempted();
        if self.drop_hot(len, now) > 0 && self.has_room(len, &takes) {
            return true;
        }
        for pass in self.passes() {
            let mut freed = 0;
            // Victims in the policy's order, as long as chance may open a gap; then the cheapest gap there is.
            while only.is_none() && freed < len.max(1) {
                let Some(victim) = self.evict_one(pass, now) else { break };
                // What comes free where nothing is placed helps nobody.
                if victim.segments.iter().any(|segment| takes(segment)) {
                    freed = victim.bytes.saturating_add(freed);
                }
                if victim.segments.iter().any(|segment| takes(segment) && segment.fits(len)) {
                    return true;
                }
            }
            // Looking for the cheapest gap means looking at every object. Among many that is the tick's; who waits asks again.
            if self.directory.is_large() {
                self.eviction.window_wanted.fetch_max(len, Relaxed);
            } else if self.clear_window(len, &takes, pass, now) {
                return true;
            }
        }
        self.eviction.futile_until.store(now.after(FUTILE).0, Relaxed);
        false
    }

    /// Opens the gap that a put did not find among many objects.
    pub(super) fn clear_wanted_window(&self, now: Moment) {
        let len = self.eviction.window_wanted.swap(0, Relaxed);
        if len > 0 && !self.has_room(len, self.taking(None, now)) {
            let cleared = self.passes().any(|pass| self.clear_window(len, self.taking(None, now), pass, now));
            if cleared {
                self.eviction.something_changed();
            }
        }
    }

    /// Evicts down to just below the high watermark, if usage is above.
    pub(super) fn evict_to_watermark(&self, now: Moment) {
        let (used, capacity) = self.occupancy();
        let watermark = (self.options.high_watermark * capacity as f64) as u64;
        if used <= watermark || self.eviction.futile_until.load(Relaxed) > now.0 {
            return;
        }
        self.counters.eviction_attempted();
        let below = (self.options.eviction_ratio.min(HYSTERESIS) * capacity as f64) as u64;
        let mut left = used.saturating_sub(self.drop_hot(used - watermark, now));
        for pass in self.passes() {
            let target = if pass == Pass::Ordinary { watermark - below.min(watermark) } else { watermark };
            for count in 1u32.. {
                if left <= target {
                    break;
                }
                let Some(victim) = self.evict_one(pass, now) else { break };
                left = left.saturating_sub(victim.bytes);
                if count.is_multiple_of(COURTEOUS) {
                    // Requests go first, where there are no more processors than threads.
                    std::thread::yield_now();
                }
            }
        }
        if left > watermark {
            self.eviction.futile_until.store(now.after(FUTILE).0, Relaxed);
        }
    }

    /// Evicts one object: of what the shards' policies would let go next, what has been unused for the longest. So the
    /// order is that of one policy over all, without one lock for all. (Blocks of one prefix lie in many shards; were each
    /// shard emptied by itself, every prefix would soon have a hole.)
    pub(super) fn evict_one(&self, pass: Pass, now: Moment) -> Option<Victim<A>> {
        // Each round evicts, or learns the age of one shard's next victim.
        for _ in 0..2 * self.directory.len() {
            let (index, age) = self.directory.oldest();
            let mut shard = self.directory.lock_at(index);
            let found = shard.choose(pass, now, |object| self.evictable(object, pass, now));
            if found.is_none_or(|found| found > age) {
                self.directory.note_age(index, found);
                continue;
            }
            let Some(slot) = shard.chosen() else { continue };
            let group = shard[slot].group().cloned();
            let mut victim = Victim::none();
            self.evict_slot(&mut shard, slot, now, &mut victim);
            let next = shard.choose(pass, now, |object| self.evictable(object, pass, now));
            self.directory.note_age(index, next);
            drop(shard);
            if let Some(group) = group {
                self.evict_rest(&group, pass, now, &mut victim);
            }
            return Some(victim);
        }
        None
    }

    /// Evicts the value in a slot, which there must be, and adds it to what went before.
    pub(super) fn evict_slot(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        now: Moment,
        victim: &mut Victim<A>,
    ) {
        let lease = self.in_use_until(&shard[slot]);
        let Some(value) = shard.take_value(slot) else { return };
        let bytes = value.replicas.iter().fold(0u64, |sum, held| sum.saturating_add(held.extent.len));
        victim.bytes = victim.bytes.saturating_add(bytes);
        victim.segments.extend(value.replicas.iter().map(|held| held.segment.clone()));
        value.retire(self.rest_until(lease), now);
        shard.settle(slot);
        self.counters.evicted(1, bytes);
    }

    pub(super) fn evictable(&self, object: &Object<A>, pass: Pass, now: Moment) -> bool {
        object.value().is_some()
            && object.write().is_none()
            && object.copying().is_none()
            && !object.hard_pin
            && (pass == Pass::SoftPinned || object.soft_pin() <= now)
            // One member that is being read keeps all.
            && !self.is_read(object, now)
            && self.may_leave_memory(object, now)
    }

    /// Frees what has rested long enough, a slice of each segment; how many bytes.
    pub(super) fn reclaim(&self, now: Moment) -> u64 {
        let registry = self.segments.read();
        registry.list.iter().fold(0, |sum, segment| segment.reclaim(now).saturating_add(sum))
    }

    /// Frees all that has rested long enough, slice by slice; whether there was any.
    pub(super) fn reclaim_all(&self, now: Moment) -> bool {
        let due: Vec<_> = {
            let registry = self.segments.read();
            registry.list.iter().filter(|segment| segment.has_rested(now)).cloned().collect()
        };
        // Nothing new becomes due: `now` stays.
        for segment in &due {
            while segment.has_rested(now) {
                segment.reclaim(now);
            }
        }
        !due.is_empty()
    }

    pub(super) fn passes(&self) -> impl Iterator<Item = Pass> + use<A, E> {
        let soft = self.options.evict_soft_pinned.then_some(Pass::SoftPinned);
        [Some(Pass::Ordinary), soft].into_iter().flatten()
    }

    fn has_room(&self, len: u64, takes: impl Fn(&Mounted<A>) -> bool) -> bool {
        self.segments.read().list.iter().any(|segment| takes(segment) && segment.fits(len))
    }

    /// Which segments placement would take an object to: open ones, of that name if it is bound to one, and doubted ones only if
    /// there are no others.
    pub(super) fn taking<'o>(
        &self,
        only: Option<&'o str>,
        now: Moment,
    ) -> impl Fn(&Mounted<A>) -> bool + use<'o, A, E> {
        let registry = self.segments.read();
        let all_doubted = registry.list.iter().all(|segment| segment.is_doubted());
        move |segment| {
            only.is_none_or(|name| segment.info.name == name)
                && segment.would_open(now)
                && (all_doubted || !segment.is_doubted())
        }
    }

    /// Whether memory is filled beyond what the background leaves.
    pub(super) fn is_above_watermark(&self) -> bool {
        let (used, capacity) = self.occupancy();
        used as f64 > self.options.high_watermark * capacity as f64
    }

    /// Bytes in use that eviction could free sooner or later, and capacity.
    fn occupancy(&self) -> (u64, u64) {
        let registry = self.segments.read();
        registry.list.iter().fold((0, 0), |(used, capacity), segment| {
            // What rests is free soon without evicting anything for it.
            (
                used.saturating_add(segment.used().saturating_sub(segment.resting())),
                capacity.saturating_add(segment.info.size),
            )
        })
    }
}
