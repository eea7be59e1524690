//! Decisions about additional replicas of objects that are read often.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ObjectKey, Uuid};
use mooncake_protocol::api::CopyToken;

use super::state::Jobs;
use crate::directory::Object;
use crate::model::segment::MountedSegment;
use crate::space::hot_table::{ExtraReplica, HotTable, KEPT_FOR, PAUSE, PAUSE_AFTER_DROP};

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
            let over = |extras: &Vec<ExtraReplica>| extras.iter().any(|extra| extra.until <= now);
            let over: Vec<_> =
                table.extras.iter().filter(|(_, e)| over(e)).map(|(key, _)| key.clone()).collect();
            let prune = table.prune_at <= now;
            if prune {
                table.prune_at = now.after(hot.options.window);
            }
            (candidates, over, prune)
        };
        over.iter().for_each(|key| self.renew_or_drop(hot, key, now));
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
        let lease = Uuid::new(table.rng.next_u64() | 1, table.rng.next_u64());
        let token = CopyToken { lease, epoch: plan.epoch };
        drop(table);
        match self.add_hot_copy(key.as_bytes(), &plan.source, plan.client, &plan.target, token) {
            Ok(task) => {
                let extra = ExtraReplica {
                    token,
                    client: plan.client,
                    task,
                    until: now.after(KEPT_FOR),
                    replica: None,
                };
                hot.table.lock().extras.entry(key.clone()).or_default().push(extra);
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

    /// Renews the time of replicas whose time has ended if the object is hot, and drops them if
    /// not.
    fn renew_or_drop(&self, hot: &HotTable, key: &ObjectKey, now: Moment) {
        let hash = self.space.directory.hash(key.as_bytes());
        let still = {
            let shard = self.space.directory.lock(hash);
            shard
                .find(hash, key.as_bytes())
                .is_some_and(|slot| shard.read_rates.is_hot(slot, &hot.options, now))
        };
        let mut gone = Vec::new();
        {
            let mut table = hot.table.lock();
            let Some(extras) = table.extras.get_mut(key) else { return };
            extras.retain_mut(|extra| {
                if extra.until > now {
                    return true;
                }
                if still && extra.replica.is_some() {
                    extra.until = now.after(KEPT_FOR);
                    return true;
                }
                gone.push((extra.task, extra.replica));
                false
            });
            if extras.is_empty() {
                table.extras.remove(key);
            }
            if !gone.is_empty() {
                table.pauses.insert(key.clone(), now.after(PAUSE_AFTER_DROP));
            }
        }
        for (task, replica) in gone {
            match replica {
                Some((replica, _)) => self.space.drop_replica(hot, key, replica, now),
                None => drop(self.withdraw_task(task, "a hot object cooled down")),
            }
        }
    }
}
