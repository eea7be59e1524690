//! Eviction of groups in steps.
//!
//! A group goes as one, and may have very many objects. One step evicts so many of them as take
//! less than a millisecond. The rest goes first at the next evictions, and the tick evicts it in
//! any case.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;

use super::group_rests::GroupRest;
use super::state::Space;
use super::victim::Victim;
use crate::directory::Pass;
use crate::model::group::Group;
use crate::model::misses::MissCause;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::yield_now;

/// Number of objects of a group that one step looks at.
const STEP: usize = 128;

/// Number of steps of one eviction. With pins or leases on a large group, a step may evict nothing;
/// another object goes then, and the next eviction goes on with the group.
const STEPS_OF_A_CALL: usize = 4;

/// Number of steps of one tick.
const STEPS_OF_A_TICK: usize = 64;

/// Number of objects that a call evicts before the rest of its evictions runs aside.
const QUICK: u64 = 256;

/// Number of calls whose evictions run aside at the same time.
const MAX_ASIDE: usize = 64;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Evicts more of a group after one of its objects was evicted. Pinned and leased objects stay.
    pub(crate) fn evict_group(
        &self,
        group: Arc<Group>,
        tenant: u32,
        pass: Pass,
        now: Moment,
        victim: &mut Victim<A>,
    ) {
        let hashes = group.hashes();
        let mut rest = GroupRest { group, tenant, pass, hashes };
        self.evict_step(&mut rest, now, victim);
        if !rest.hashes.is_empty() {
            self.groups.push_front(rest);
        }
    }

    /// Evicts some of the rest of a group, if there is one of this tenant or, without a tenant, of
    /// any.
    pub(crate) fn evict_rest(&self, tenant: Option<u32>, now: Moment) -> Option<Victim<A>> {
        let mut victim = Victim::empty();
        let steps = if is_planted("group-walked-at-once") { usize::MAX } else { STEPS_OF_A_CALL };
        for _ in 0..steps {
            let mut rest = self.groups.take(tenant)?;
            self.evict_step(&mut rest, now, &mut victim);
            if !rest.hashes.is_empty() {
                self.groups.push_front(rest);
            }
            if victim.objects > 0 {
                self.release_parents(&mut victim);
                return Some(victim);
            }
        }
        None
    }

    /// Does some of the work on groups that is left.
    pub(crate) fn continue_groups(&self, now: Moment) {
        for _ in 0..STEPS_OF_A_TICK {
            let mut victim = Victim::empty();
            let Some(mut rest) = self.groups.take(None) else { break };
            self.evict_step(&mut rest, now, &mut victim);
            self.release_parents(&mut victim);
            if !rest.hashes.is_empty() {
                self.groups.push_front(rest);
            }
            // Requests go first on a machine with no more processors than threads.
            yield_now();
        }
        for _ in 0..STEPS_OF_A_TICK {
            let Some((group, hashes)) = self.groups.idle.lock().pop_front() else { break };
            self.wake_step(group, hashes);
        }
    }

    fn evict_step(&self, rest: &mut GroupRest, now: Moment, victim: &mut Victim<A>) {
        let step = if is_planted("group-evicts-at-once") { usize::MAX } else { STEP };
        let remaining = rest.hashes.len().saturating_sub(step);
        for hash in rest.hashes.drain(remaining..) {
            let mut shard = self.directory.lock(hash);
            let Some(slot) = shard.find_hash(hash) else { continue };
            let is_member = shard[slot].group().is_some_and(|group| Arc::ptr_eq(group, &rest.group));
            if is_member && self.is_evictable(&shard[slot], rest.pass, now) {
                self.evict_slot(&mut shard, slot, MissCause::EvictedWithGroup, now, victim);
            }
        }
    }

    /// Lets eviction choose an object of a group again if all of them wait.
    pub(crate) fn wake_group(&self, group: Arc<Group>) {
        if group.is_idle() {
            let hashes = group.hashes();
            self.wake_step(group, hashes);
        }
    }

    fn wake_step(&self, group: Arc<Group>, mut hashes: Vec<u64>) {
        let rest = hashes.len().saturating_sub(STEP);
        let is_over = !group.is_idle() || hashes.drain(rest..).any(|hash| self.directory.wake(hash));
        if !is_over && !hashes.is_empty() {
            self.groups.idle.lock().push_back((group, hashes));
        }
    }

    /// Repeats an eviction until it returns `None`. It returns the number of objects that left
    /// memory. After some objects, the rest runs aside: a large put may need the space of a hundred
    /// thousand small objects.
    pub(crate) fn repeat_eviction(&self, mut evict: impl FnMut() -> Option<u64>) {
        let mut evicted = 0;
        while evicted < QUICK {
            let Some(objects) = evict() else { return };
            evicted += objects.max(1);
        }
        let mut rest = || while evict().is_some() {};
        let Some(run_blocking) = self.run_blocking.get() else { return rest() };
        if self.groups.aside.fetch_add(1, Relaxed) < MAX_ASIDE {
            run_blocking(&mut rest);
        } else {
            rest();
        }
        self.groups.aside.fetch_sub(1, Relaxed);
    }
}
