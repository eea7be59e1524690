//! Decisions about additional replicas of objects that are read often.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ObjectKey, Uuid};

use super::state::Jobs;
use crate::directory::Object;
use crate::model::segment::MountedSegment;
use crate::space::hot_table::{ExtraReplica, HotTable, PAUSE, PAUSE_AFTER_DROP, RETENTION};
use crate::sync::atomic::Ordering::Relaxed;

/// Time between two rounds of decisions.
const INTERVAL: Duration = Duration::from_millis(100);

/// Used part of a segment above which no additional replica is made there.
const MAX_USED_RATIO: f64 = 0.85;

/// Additional replica to make.
struct HotCopyPlan {
    source: String,
    client: ClientId,
    target: String,
    epoch: u64,
}

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Decides about objects that have become hot, and about replicas whose time has ended.
    pub(crate) fn update_hot_replicas(&self, now: Moment) {
        let Some(hot) = &self.space.hot else { return };
        if hot.due.load(Relaxed) > now.0 {
            return;
        }
        hot.due.store(now.after(INTERVAL).0, Relaxed);
        let (candidates, over, prune) = {
            let mut table = hot.table.lock();
            let candidates = std::mem::take(&mut table.candidates);
            table.pauses.retain(|_, until| *until > now);
            let over = table.extras.iter().filter(|(_, extra)| extra.until <= now);
            let over: Vec<_> = over.map(|(id, extra)| (*id, extra.key.clone())).collect();
            let prune = table.prune_at <= now;
            if prune {
                table.prune_at = now.after(hot.options.window);
            }
            (candidates, over, prune)
        };
        over.iter().for_each(|(id, key)| self.renew_or_drop(hot, *id, key, now));
        for key in candidates {
            self.propose(hot, &key, now);
        }
        if prune {
            self.space.directory.shards().for_each(|mut shard| shard.read_rates.prune(&hot.options, now));
        }
    }

    fn propose(&self, hot: &HotTable, key: &ObjectKey, now: Moment) {
        if hot.table.lock().pauses.contains_key(key) {
            return;
        }
        let Some(plan) = self.plan_hot_copy(hot, key, now) else { return };
        hot.proposed.fetch_add(1, Relaxed);
        let mut table = hot.table.lock();
        table.pauses.insert(key.clone(), now.after(PAUSE));
        if !hot.options.enforce {
            tracing::info!(key = %key.as_bytes().escape_ascii(), to = plan.target, "hot object would get a replica");
            return;
        }
        drop(table);
        let HotCopyPlan { source, client, target, epoch } = plan;
        match self.add_copy(client, key.as_bytes(), &source, &[&target], Some(epoch)) {
            Ok(task) => {
                let until = now.after(RETENTION);
                let extra = ExtraReplica { key: key.clone(), epoch, client, until, replica: None };
                hot.table.lock().extras.insert(task, extra);
            }
            Err(error) => tracing::debug!(%error, "cannot create task for replica of hot object"),
        }
    }

    /// Chooses source and target of an additional replica, if one is needed and fits.
    fn plan_hot_copy(&self, hot: &HotTable, key: &ObjectKey, now: Moment) -> Option<HotCopyPlan> {
        let hash = self.space.directory.hash(key.as_bytes());
        let (names, hosts, source, client, len, epoch) = {
            let shard = self.space.directory.lock(hash);
            let object: &Object<A> = &shard[shard.find(hash, key.as_bytes())?];
            let value = object.value().filter(|_| object.write().is_none() && object.copying().is_none())?;
            let live: Vec<_> = value.live().map(|held| &held.segment).collect();
            if live.is_empty() || live.len() >= hot.options.max_replicas {
                return None;
            }
            let source = live[self.space.random.below(live.len())];
            let names: HashSet<String> = live.iter().map(|segment| segment.info.name.clone()).collect();
            let hosts: HashSet<String> = live.iter().map(|segment| segment.info.host_id.clone()).collect();
            (names, hosts, source.info.name.clone(), source.client, value.len, value.copy_epoch())
        };
        let registry = self.space.segments.read();
        let fit = |segment: &&Arc<MountedSegment<A>>| {
            !names.contains(&segment.info.name)
                && segment.is_open(now)
                && segment.fits(len)
                && 1.0 - segment.free_ratio() < MAX_USED_RATIO
        };
        let fitting: Vec<_> = registry.list.iter().filter(fit).collect();
        let apart: Vec<_> =
            fitting.iter().copied().filter(|segment| !hosts.contains(&segment.info.host_id)).collect();
        let choice = if apart.is_empty() { &fitting } else { &apart };
        let target = choice.get(self.space.random.below(choice.len().max(1)))?.info.name.clone();
        Some(HotCopyPlan { source, client, target, epoch })
    }

    /// Renews a replica whose time has ended if the object is hot, and drops it if not.
    fn renew_or_drop(&self, hot: &HotTable, task: Uuid, key: &ObjectKey, now: Moment) {
        let hash = self.space.directory.hash(key.as_bytes());
        let still = {
            let shard = self.space.directory.lock(hash);
            shard
                .find(hash, key.as_bytes())
                .is_some_and(|slot| shard.read_rates.is_hot(slot, &hot.options, now))
        };
        let replica = {
            let mut table = hot.table.lock();
            let Some(extra) = table.extras.get_mut(&task).filter(|extra| extra.until <= now) else { return };
            let replica = extra.replica;
            if still && replica.is_some() {
                extra.until = now.after(RETENTION);
                return;
            }
            table.extras.remove(&task);
            table.pauses.insert(key.clone(), now.after(PAUSE_AFTER_DROP));
            replica
        };
        match replica {
            Some((replica, _)) => self.space.drop_replica(hot, key, replica, now),
            None => drop(self.withdraw_task(task, "a hot object cooled down")),
        }
    }
}
