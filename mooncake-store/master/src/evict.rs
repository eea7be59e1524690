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
use super::disks::Passed;
use super::segments::{GRAIN, Mounted};
use super::window::{Outlook, Searches};

/// How far below the watermark the background goes at most, as a part of the capacity.
const HYSTERESIS: f64 = 0.01;

/// After every object was refused, nobody looks again for this long, or until something changes.
const FUTILE: Duration = Duration::from_millis(10);

/// So many objects the background evicts before it lets others run: some tens of microseconds.
const COURTEOUS: u32 = 32;

#[derive(Default)]
pub(super) struct EvictionState {
    futile_until: AtomicU64,
    pub(super) searches: Searches,
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

/// What came of evicting the next in line if it is of use.
enum Next<A> {
    Gone(Victim<A>),
    /// It would be of no use.
    Kept,
    /// Nothing may go.
    Nobody,
}

impl<A> Victim<A> {
    pub(super) fn none() -> Self {
        Self { bytes: 0, segments: SmallVec::new() }
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Frees what a put of `len` bytes needs, and hardly more, in the segment named or else in any; whether it may look again. Nothing
    /// goes for a put that could not be placed afterwards.
    pub(super) fn make_room(&self, len: u64, only: Option<&str>, now: Moment) -> bool {
        let takes = self.taking(only, now);
        let Some(need) = len.checked_next_multiple_of(GRAIN).filter(|need| self.could_take(*need, &takes))
        else {
            return false;
        };
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
        self.want_room(len);
        let (outlook, large) = (self.eviction.searches.outlook(only, len, now), self.directory.is_large());
        'passes: for pass in self.passes() {
            // Several small victims in a row leave a gap by chance only, so they go in the policy's order only where there are gaps to be
            // had. One that is large enough by itself always may.
            let by_chance = match outlook {
                Outlook::Likely => pass == Pass::Ordinary,
                Outlook::Unknown => pass == Pass::Ordinary && large,
                Outlook::Doubtful | Outlook::Barred => false,
            };
            let mut freed = 0;
            while only.is_none() && freed < len.max(1) {
                let of_use = |object: &Object<A>| by_chance || leaves_a_gap(object, need, &takes);
                let victim = match self.evict_next(pass, now, of_use) {
                    Next::Gone(victim) => victim,
                    Next::Kept => break,
                    Next::Nobody if pass == Pass::Ordinary && self.options.evict_soft_pinned => {
                        continue 'passes;
                    }
                    Next::Nobody => {
                        self.eviction.futile_until.store(now.after(FUTILE).0, Relaxed);
                        return false;
                    }
                };
                // What comes free where nothing is placed helps nobody.
                if victim.segments.iter().any(|segment| takes(segment)) {
                    freed = victim.bytes.saturating_add(freed);
                }
                if victim.segments.iter().any(|segment| takes(segment) && segment.fits(len)) {
                    return true;
                }
            }
            if !large && outlook != Outlook::Barred && self.clear_window(len, &takes, pass, now) {
                if pass == Pass::Ordinary {
                    self.eviction.searches.found(only, len, now);
                }
                return true;
            }
        }
        if outlook == Outlook::Barred {
            return false;
        }
        // Looking for the cheapest gap means looking at every object. Among many that is the tick's; who waits asks again.
        if large {
            self.eviction.searches.want(only, len);
        } else {
            self.eviction.searches.in_vain(only, len, now, self.clock.now());
        }
        false
    }

    /// Opens the gaps that puts did not find among many objects.
    pub(super) fn clear_wanted_windows(&self, now: Moment) {
        for (only, len) in self.eviction.searches.wanted() {
            let only = only.as_deref();
            let takes = self.taking(only, now);
            let found = self.has_room(len, &takes)
                || self.passes().any(|pass| self.clear_window(len, &takes, pass, now));
            if found {
                self.eviction.searches.found(only, len, self.clock.now());
                self.eviction.something_changed();
            } else {
                self.eviction.searches.in_vain(only, len, now, self.clock.now());
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
        self.want_room(left.saturating_sub(watermark - below.min(watermark)));
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
        match self.evict_next(pass, now, |_| true) {
            Next::Gone(victim) => Some(victim),
            Next::Kept | Next::Nobody => None,
        }
    }

    /// As [`Master::evict_one`], unless it would be of no use.
    fn evict_next(&self, pass: Pass, now: Moment, of_use: impl Fn(&Object<A>) -> bool) -> Next<A> {
        let mut unwritten = Vec::new();
        let next = self.evict_oldest(pass, now, of_use, &mut unwritten);
        self.ask_for(unwritten);
        next
    }

    fn evict_oldest(
        &self,
        pass: Pass,
        now: Moment,
        of_use: impl Fn(&Object<A>) -> bool,
        unwritten: &mut Vec<Passed>,
    ) -> Next<A> {
        // Each round evicts, or learns the age of one shard's next victim.
        for _ in 0..2 * self.directory.len() {
            let (index, age) = self.directory.oldest();
            let mut shard = self.directory.lock_at(index);
            let mut passed = Vec::new();
            let found = shard.choose(pass, now, |object| self.goes(object, pass, now, &mut passed));
            unwritten.extend(passed);
            if found.is_none_or(|found| found > age) {
                self.directory.note_age(index, found);
                continue;
            }
            let Some(slot) = shard.chosen() else { continue };
            if !of_use(&shard[slot]) {
                return Next::Kept;
            }
            let group = shard[slot].group().cloned();
            let mut victim = Victim::none();
            self.evict_slot(&mut shard, slot, now, &mut victim);
            let next = shard.choose(pass, now, |object| self.evictable(object, pass, now));
            self.directory.note_age(index, next);
            drop(shard);
            if let Some(group) = group {
                self.evict_rest(&group, pass, now, &mut victim);
            }
            return Next::Gone(victim);
        }
        Next::Nobody
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
        self.is_loose(object, pass, now) && self.may_leave_memory(object, now)
    }

    /// As [`evictable`](Self::evictable), noting some objects of those passed over that a disk would have to have first.
    pub(super) fn goes(&self, object: &Object<A>, pass: Pass, now: Moment, passed: &mut Vec<Passed>) -> bool {
        self.is_loose(object, pass, now) && self.leaves_memory(object, now, passed)
    }

    fn is_loose(&self, object: &Object<A>, pass: Pass, now: Moment) -> bool {
        object.value().is_some()
            && object.write().is_none()
            && object.copying().is_none()
            && !object.hard_pin
            && (pass == Pass::SoftPinned || object.soft_pin() <= now)
            // One member that is being read keeps all.
            && !self.is_read(object, now)
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

    /// Whether a segment that takes it could ever hold it.
    fn could_take(&self, need: u64, takes: impl Fn(&Mounted<A>) -> bool) -> bool {
        self.segments.read().list.iter().any(|segment| need <= segment.info.size && takes(segment))
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
    pub(super) fn occupancy(&self) -> (u64, u64) {
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

/// Whether what an object leaves behind is room enough by itself.
fn leaves_a_gap<A: SegmentAllocator>(
    object: &Object<A>,
    need: u64,
    takes: impl Fn(&Mounted<A>) -> bool,
) -> bool {
    let mut replicas = object.value().into_iter().flat_map(|value| &value.replicas);
    replicas.any(|held| held.extent.len >= need && takes(&held.segment))
}
