//! Eviction of groups in steps.
//!
//! A group goes as one, and may have very many objects. One step locks the shards of so many of
//! them as take less than a millisecond, and evicts them at once: a look-up in between would extend
//! the lease of the group, and the rest would stay. The rest of a larger group goes first at the
//! next evictions, and the tick evicts it in any case, whatever is looked up meanwhile.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::SlotId;

use super::group_rests::{GroupRest, STEP};
use super::state::Space;
use super::victim::Victim;
use crate::directory::{LockedShards, Pass, Shard};
use crate::model::group::Group;
use crate::model::misses::MissCause;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::{MutexGuard, yield_now};

/// Number of steps of one eviction. With pins on a large group, a step may evict nothing;
/// another object goes then, and the next eviction goes on with the group.
const STEPS_OF_A_CALL: usize = 4;

/// Number of steps of one tick.
const STEPS_OF_A_TICK: usize = 64;

/// Number of objects that a call evicts before the rest of its evictions runs aside.
const QUICK: u64 = 256;

/// Number of calls whose evictions run aside at the same time.
const MAX_ASIDE: usize = 64;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Evicts the object in a slot, and its group if it has one. Pinned objects of the group stay.
    /// Returns `None` if the object may no longer be evicted.
    pub(crate) fn evict_chosen(
        &self,
        mut shard: MutexGuard<'_, Shard<A, E>>,
        slot: SlotId,
        pass: Pass,
        now: Moment,
    ) -> Option<Victim<A>> {
        let mut victim = Victim::empty();
        let (hash, tenant, key) = (shard[slot].hash, shard[slot].tenant(), shard[slot].key.clone());
        let Some(group) = shard[slot].group().cloned() else {
            self.evict_slot(&mut shard, slot, MissCause::Evicted, now, &mut victim);
            return Some(victim);
        };
        drop(shard);
        // The chosen object is of the first step.
        let mut hashes = group.hashes();
        hashes.retain(|other| *other != hash);
        hashes.push(hash);
        let mut rest = GroupRest { group, tenant, pass, hashes };
        let step = rest.next_step();
        let mut shards = self.directory.lock_all(&step);
        let chosen = shards.shard_of(hash)?;
        // A look-up may have extended the lease since the choice.
        let slot = chosen.find(hash, key.as_bytes())?;
        let is_member = chosen[slot].group().is_some_and(|group| Arc::ptr_eq(group, &rest.group));
        if !is_member || !self.is_evictable(&chosen[slot], pass, now) {
            return None;
        }
        self.evict_slot(chosen, slot, MissCause::Evicted, now, &mut victim);
        self.evict_members(&mut shards, &step, &rest, now, &mut victim);
        drop(shards);
        self.groups.push_front(rest);
        Some(victim)
    }

    /// Evicts some of the rest of a group, if there is one of this tenant or, without a tenant, of
    /// any.
    pub(crate) fn evict_rest(&self, tenant: Option<u32>, now: Moment) -> Option<Victim<A>> {
        let mut victim = Victim::empty();
        let steps = if is_planted("group-walked-at-once") { usize::MAX } else { STEPS_OF_A_CALL };
        for _ in 0..steps {
            self.evict_step(self.groups.take(tenant)?, now, &mut victim);
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
            let Some(rest) = self.groups.take(None) else { break };
            self.evict_step(rest, now, &mut victim);
            self.release_parents(&mut victim);
            // Requests go first on a machine with no more processors than threads.
            yield_now();
        }
        for _ in 0..STEPS_OF_A_TICK {
            let Some((group, hashes)) = self.groups.idle.lock().pop_front() else { break };
            self.wake_step(group, hashes);
        }
    }

    fn evict_step(&self, mut rest: GroupRest, now: Moment, victim: &mut Victim<A>) {
        let step = rest.next_step();
        self.evict_members(&mut self.directory.lock_all(&step), &step, &rest, now, victim);
        self.groups.push_front(rest);
    }

    /// Evicts the objects of a group with these hashes. Leases of the group count only at its
    /// choice: the memory of a read object is not reused before the end of the read.
    fn evict_members(
        &self,
        shards: &mut LockedShards<'_, A, E>,
        hashes: &[u64],
        rest: &GroupRest,
        now: Moment,
        victim: &mut Victim<A>,
    ) {
        for hash in hashes {
            let Some(shard) = shards.shard_of(*hash) else { continue };
            let Some(slot) = rest.find(shard, *hash) else { continue };
            if self.is_unpinned(&shard[slot], rest.pass, now) && self.may_leave_memory(&shard[slot], now) {
                self.evict_slot(shard, slot, MissCause::EvictedWithGroup, now, victim);
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
