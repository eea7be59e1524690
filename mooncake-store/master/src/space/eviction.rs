//! Eviction: above the watermark in the background, and for a put that finds no free space.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;

use super::backoff::Search;
use super::gap_searches::GapOutlook;
use super::offload_first::SkippedObject;
use super::state::Space;
use super::victim::{MAX_PASSED_OVER, Victim};
use crate::directory::{Object, Pass};
use crate::model::segment::{GRAIN, MountedSegment};

/// Maximum distance below the watermark down to which the background evicts, as a part of the
/// capacity.
const HYSTERESIS: f64 = 0.01;

/// Number of objects that the background evicts before it yields the processor: some tens of
/// microseconds.
const YIELD_EVERY: u32 = 32;

/// Outcome of evictions in order for a put.
enum InOrder {
    /// A gap of the size exists.
    Gap,
    /// More evictions in order are of no use.
    NoGap,
    /// No object can be evicted.
    NoVictim,
}

/// Outcome of a conditional eviction.
enum NextVictim<A> {
    Evicted(Victim<A>),
    /// The next victim would not help.
    Rejected,
    /// No object can be evicted.
    NoVictim,
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Frees what a put of `len` bytes needs, and hardly more, in the named segment or in any.
    /// Returns whether the put may try again. Nothing is evicted for a put that could not be placed
    /// afterwards.
    pub(crate) fn free_space_for(&self, len: u64, only: Option<&str>, now: Moment) -> bool {
        let takes = self.accepts(only, now);
        let Some(need) = len.checked_next_multiple_of(GRAIN).filter(|need| self.could_hold_in(*need, &takes))
        else {
            return false;
        };
        let has_removed = self.remove_all_ended(now);
        if (self.reclaim(now) > 0 || has_removed) && self.has_space_for(len, &takes) {
            return true;
        }
        if self.eviction.is_paused(Search::Put, now) {
            return false;
        }
        self.counters.eviction_attempted();
        if self.drop_hot_replicas(len, now) > 0 && self.has_space_for(len, &takes) {
            return true;
        }
        self.set_offload_budget(len);
        let (outlook, large) = (self.eviction.searches.outlook(only, len, now), self.directory.is_large());
        let (mut passes, mut is_first_victim) = (self.passes_for_put().peekable(), true);
        while let Some(pass) = passes.next() {
            // Several small victims in a row leave a gap only by chance, so they are evicted in the
            // order of the policy only where gaps are likely. A victim that is large enough by
            // itself always may be.
            let by_chance = match outlook {
                GapOutlook::Likely => is_first_victim && !pass.takes_soft_pinned(),
                GapOutlook::Unknown => is_first_victim && !pass.takes_soft_pinned() && large,
                GapOutlook::Doubtful | GapOutlook::Suspended => false,
            };
            let of_use = |object: &Object<A>, _: u64| by_chance || leaves_a_gap(object, need, &takes);
            let (mut freed, mut end) = (0, InOrder::NoGap);
            self.repeat_eviction(|| {
                if only.is_some() || freed >= len.max(1) {
                    return None;
                }
                let victim = match self.evict_next(pass, now, of_use) {
                    NextVictim::Evicted(victim) => victim,
                    NextVictim::Rejected => return None,
                    NextVictim::NoVictim => {
                        end = InOrder::NoVictim;
                        return None;
                    }
                };
                // Space that is freed where nothing is placed does not help.
                if victim.segments.iter().any(|segment| takes(segment)) {
                    freed = victim.bytes.saturating_add(freed);
                }
                if victim.segments.iter().any(|segment| takes(segment) && segment.fits(len)) {
                    end = InOrder::Gap;
                    return None;
                }
                Some(victim.objects)
            });
            is_first_victim &= freed == 0;
            match end {
                InOrder::NoGap => {}
                InOrder::Gap => return true,
                InOrder::NoVictim if passes.peek().is_some() => continue,
                InOrder::NoVictim => {
                    self.eviction.begin(Search::Put, now);
                    return false;
                }
            }
            if !large && outlook != GapOutlook::Suspended && self.evict_contiguous(len, &takes, pass, now) {
                if pass == Pass::Ordinary {
                    self.eviction.searches.record_success(only, len, now);
                }
                return true;
            }
        }
        if outlook == GapOutlook::Suspended {
            return false;
        }
        // The search for the cheapest gap examines every object. Among many objects the tick does
        // that, and the put tries again.
        if large {
            self.eviction.searches.request(only, len);
        } else {
            self.eviction.searches.record_failure(only, len, now, self.clock.now());
        }
        false
    }

    /// Frees what an object of this value needs, as long as the next victim is of less value and
    /// not soft-pinned. Evicts hardly more than `len` bytes. Returns whether there is space.
    pub(crate) fn free_space_for_value(&self, len: u64, value: u64, now: Moment) -> bool {
        let takes = self.accepts(None, now);
        let (mut freed, mut has_space) = (0, self.reclaim(now) > 0 && self.has_space_for(len, &takes));
        self.renew_notes(Pass::Ordinary, now);
        self.repeat_eviction(|| {
            if has_space || freed >= len || !self.directory.has_less_than(value) {
                return None;
            }
            // A note may be too low, so the rank of the victim itself decides.
            let is_less = |_: &Object<A>, rank| rank < value;
            let NextVictim::Evicted(victim) = self.evict_next(Pass::Ordinary, now, is_less) else {
                return None;
            };
            freed = victim.bytes.saturating_add(freed);
            has_space = self.has_space_for(len, &takes);
            Some(victim.objects)
        });
        has_space
    }

    /// Returns whether an object of this length fits without an eviction, and below the watermark.
    pub(crate) fn has_spare_space(&self, len: u64, now: Moment) -> bool {
        !self.is_above_watermark() && self.has_space_for(len, self.accepts(None, now))
    }

    /// Makes the gaps that puts did not find among many objects.
    pub(crate) fn evict_requested_gaps(&self, now: Moment) {
        for (only, len) in self.eviction.searches.requested() {
            let only = only.as_deref();
            let takes = self.accepts(only, now);
            let found = self.has_space_for(len, &takes)
                || self.passes_for_put().any(|pass| self.evict_contiguous(len, &takes, pass, now));
            if found {
                self.eviction.searches.record_success(only, len, self.clock.now());
                self.eviction.end_backoff();
            } else {
                self.eviction.searches.record_failure(only, len, now, self.clock.now());
            }
        }
    }

    /// Evicts down to just below the high watermark, if more memory is in use.
    pub(crate) fn evict_to_watermark(&self, now: Moment) {
        let (used, capacity) = self.occupancy();
        let watermark = (self.options.high_watermark * capacity as f64) as u64;
        if used <= watermark || self.eviction.is_paused(Search::Background, now) {
            return;
        }
        self.counters.eviction_attempted();
        let below = (self.options.eviction_ratio.min(HYSTERESIS) * capacity as f64) as u64;
        let mut left = used.saturating_sub(self.drop_hot_replicas(used - watermark, now));
        self.set_offload_budget(left.saturating_sub(watermark - below.min(watermark)));
        for pass in self.passes() {
            let target = if pass == Pass::Ordinary { watermark - below.min(watermark) } else { watermark };
            for count in 1u32.. {
                if left <= target {
                    break;
                }
                let Some(victim) = self.evict_one(pass, now) else { break };
                left = left.saturating_sub(victim.bytes);
                if count.is_multiple_of(YIELD_EVERY) {
                    // Requests go first on a machine with no more processors than threads.
                    crate::sync::yield_now();
                }
            }
        }
        if left > watermark {
            self.eviction.begin(Search::Background, now);
        }
    }

    /// Evicts one object: the first in order among the next victims of the shards. The order is
    /// thus that of one policy over all shards, without one lock for all. (Blocks of one prefix
    /// lie in many shards. If each shard were emptied by itself, every prefix would soon have a
    /// hole.)
    pub(crate) fn evict_one(&self, pass: Pass, now: Moment) -> Option<Victim<A>> {
        match self.evict_next(pass, now, |_, _| true) {
            NextVictim::Evicted(victim) => Some(victim),
            NextVictim::Rejected | NextVictim::NoVictim => None,
        }
    }

    /// Evicts like [`evict_one`](Self::evict_one), but only an object of a rank that `of_use`
    /// accepts. The rest of a group that is being evicted goes first, whatever its rank.
    fn evict_next(&self, pass: Pass, now: Moment, of_use: impl Fn(&Object<A>, u64) -> bool) -> NextVictim<A> {
        if let Some(victim) = self.evict_rest(None, now) {
            return NextVictim::Evicted(victim);
        }
        let mut unwritten = Vec::new();
        let next = self.evict_oldest(pass, now, of_use, &mut unwritten);
        self.request_offloads(unwritten);
        next
    }

    fn evict_oldest(
        &self,
        pass: Pass,
        now: Moment,
        of_use: impl Fn(&Object<A>, u64) -> bool,
        unwritten: &mut Vec<SkippedObject>,
    ) -> NextVictim<A> {
        self.renew_notes(pass, now);
        let mut passed_over = 0;
        // Each round evicts, passes an object over, or learns the rank of the next victim of one
        // shard.
        let mut rounds = 2 * self.directory.len();
        while rounds > 0 {
            rounds -= 1;
            let (index, others) = self.directory.first_victim();
            let mut shard = self.directory.lock_to_evict(index);
            let mut skipped = Vec::new();
            let found =
                shard.choose(pass, now, |object| self.is_evictable_noting(object, pass, now, &mut skipped));
            unwritten.extend(skipped);
            let Some(rank) = found.filter(|found| *found <= others) else {
                self.directory.note_victim(index, found);
                continue;
            };
            let Some(slot) = shard.take_chosen() else { continue };
            if passed_over < MAX_PASSED_OVER && shard.begin_wait(slot) {
                let next = shard.choose(pass, now, |object| self.is_evictable(object, pass, now));
                self.directory.note_victim(index, next);
                passed_over += 1;
                rounds += 1;
                continue;
            }
            if !of_use(&shard[slot], rank) {
                self.directory.note_victim(index, Some(rank));
                return NextVictim::Rejected;
            }
            let victim = self.evict_chosen(shard, slot, pass, now);
            let mut shard = self.directory.lock_to_evict(index);
            let next = shard.choose(pass, now, |object| self.is_evictable(object, pass, now));
            self.directory.note_victim(index, next);
            drop(shard);
            let Some(mut victim) = victim else { continue };
            self.release_parents(&mut victim);
            return NextVictim::Evicted(victim);
        }
        NextVictim::NoVictim
    }

    /// Looks for the next victims of some shards again if promotions are compared with them. While
    /// objects are only read, no eviction does that.
    pub(crate) fn renew_notes_for_promotions(&self, now: Moment) {
        if self.options.disks.as_ref().is_some_and(|disks| disks.promotion.is_some()) {
            self.renew_notes(Pass::Ordinary, now);
        }
    }

    /// Looks for the next victims of some shards again, because values change with time.
    fn renew_notes(&self, pass: Pass, now: Moment) {
        for index in self.directory.shards_to_renew() {
            let mut shard = self.directory.lock_to_evict(index);
            let found = shard.choose(pass, now, |object| self.is_evictable(object, pass, now));
            self.directory.note_victim(index, found);
            let idle = shard.take_idle_groups();
            drop(shard);
            idle.into_iter().for_each(|group| self.wake_group(group));
        }
    }

    /// Frees extents whose quarantine has ended, a slice of each segment. Returns their bytes.
    pub(crate) fn reclaim(&self, now: Moment) -> u64 {
        let registry = self.segments.read();
        registry.list.iter().fold(0, |sum, segment| segment.reclaim(now).saturating_add(sum))
    }

    /// Frees all extents whose quarantine has ended, slice by slice. Returns whether there were
    /// any.
    pub(crate) fn reclaim_all(&self, now: Moment) -> bool {
        let due: Vec<_> = {
            let registry = self.segments.read();
            registry.list.iter().filter(|segment| segment.has_reclaimable(now)).cloned().collect()
        };
        // `now` is constant, so no more extents become due meanwhile.
        for segment in &due {
            while segment.has_reclaimable(now) {
                segment.reclaim(now);
            }
        }
        !due.is_empty()
    }

    /// Returns whether a segment that `takes` accepts could ever hold `need` bytes.
    fn could_hold_in(&self, need: u64, takes: impl Fn(&MountedSegment<A>) -> bool) -> bool {
        self.segments.read().list.iter().any(|segment| need <= segment.info.size && takes(segment))
    }

    fn has_space_for(&self, len: u64, takes: impl Fn(&MountedSegment<A>) -> bool) -> bool {
        self.segments.read().list.iter().any(|segment| takes(segment) && segment.fits(len))
    }

    /// Returns a predicate for the segments in which placement would put an object: open ones, with
    /// the name `only` if it is given, and unreachable ones only if all are.
    pub(crate) fn accepts<'o>(
        &self,
        only: Option<&'o str>,
        now: Moment,
    ) -> impl Fn(&MountedSegment<A>) -> bool + use<'o, A, E> {
        let registry = self.segments.read();
        let all_unreachable = registry.list.iter().all(|segment| segment.is_reported_unreachable());
        move |segment| {
            only.is_none_or(|name| segment.info.name == name)
                && segment.would_open(now)
                && (all_unreachable || !segment.is_reported_unreachable())
        }
    }
}

/// Returns whether the extent of an object is large enough by itself.
fn leaves_a_gap<A: SegmentAllocator>(
    object: &Object<A>,
    need: u64,
    takes: impl Fn(&MountedSegment<A>) -> bool,
) -> bool {
    let mut replicas = object.value().into_iter().flat_map(|value| &value.replicas);
    replicas.any(|held| held.extent.len >= need && takes(&held.segment))
}
