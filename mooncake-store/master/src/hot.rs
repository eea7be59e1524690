//! More replicas of objects that are read often. Reads are counted while they are frequent; the owner of a replica is asked, by a task,
//! to make another; a replica that is not needed any more, or whose room is, goes again.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SlotId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use super::Master;
use super::directory::{Object, Value};
use super::options::HotOptions;
use mooncake_protocol::api::CopyToken;

/// How often there is something to decide.
const EVERY: Duration = Duration::from_millis(100);
/// A replica is kept this long, and again while its object is read often.
const KEPT: Duration = Duration::from_secs(30);
/// After a decision nothing is decided about a key for this long.
const PAUSE: Duration = Duration::from_secs(30);
/// After a replica went, none is made again for this long.
const RECREATE: Duration = Duration::from_secs(60);
/// No replica is made in a segment that is fuller than this.
const FULLEST: f64 = 0.85;
/// Most keys that wait for a decision, and most keys of a shard whose reads are counted.
const CANDIDATES: usize = 1024;
const COUNTED: usize = 1 << 14;

/// How often an object was read lately.
#[derive(Clone, Copy, Debug)]
struct Heat {
    since: Moment,
    hits: u64,
    before: u64,
}

/// Reads of the objects of one shard.
#[derive(Debug, Default)]
pub(super) struct Heats(HashMap<SlotId, Heat>);

impl Heats {
    /// Counts a read; whether it makes the object a hot one.
    fn note(&mut self, slot: SlotId, options: &HotOptions, now: Moment) -> bool {
        if self.0.len() >= COUNTED && !self.0.contains_key(&slot) {
            return false;
        }
        let heat = self.0.entry(slot).or_insert(Heat { since: now, hits: 0, before: 0 });
        let past = now.since(heat.since);
        if past >= options.window {
            let before = if past < 2 * options.window { heat.hits } else { 0 };
            *heat = Heat { since: now, hits: 0, before };
        }
        heat.hits += 1;
        heat.hits == options.threshold()
    }

    fn is_hot(&self, slot: SlotId, options: &HotOptions, now: Moment) -> bool {
        self.0.get(&slot).is_some_and(|heat| {
            let past = now.since(heat.since);
            let threshold = options.threshold();
            heat.hits >= threshold && past < 2 * options.window
                || heat.before >= threshold && past < options.window
        })
    }

    /// The slot may be another object's from now on.
    pub(super) fn forget(&mut self, slot: SlotId) {
        if !self.0.is_empty() {
            self.0.remove(&slot);
        }
    }

    fn prune(&mut self, options: &HotOptions, now: Moment) {
        self.0.retain(|_, heat| now.since(heat.since) < 2 * options.window);
    }
}

/// A replica that was asked for.
#[derive(Debug)]
struct Extra {
    token: CopyToken,
    /// Who is to make it.
    client: ClientId,
    task: Uuid,
    until: Moment,
    /// Once it is there.
    replica: Option<(ReplicaId, u64)>,
}

#[derive(Debug)]
struct Table {
    rng: Rng,
    candidates: Vec<ObjectKey>,
    extras: HashMap<ObjectKey, Vec<Extra>>,
    /// Until when nothing is decided about a key.
    pauses: HashMap<ObjectKey, Moment>,
    prune_at: Moment,
}

/// Hot objects. Its lock is inside a shard's.
#[derive(Debug)]
pub(super) struct Hot {
    options: HotOptions,
    table: Mutex<Table>,
    due: AtomicU64,
    proposed: AtomicU64,
    made: AtomicU64,
    dropped: AtomicU64,
}

impl Hot {
    pub(super) fn new(options: HotOptions, seed: u64) -> Self {
        let table = Table {
            rng: Rng::seeded(seed),
            candidates: Vec::new(),
            extras: HashMap::new(),
            pauses: HashMap::new(),
            prune_at: Moment(0),
        };
        Self {
            options,
            table: Mutex::new(table),
            due: AtomicU64::new(0),
            proposed: AtomicU64::new(0),
            made: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// An object was read.
    pub(super) fn read(&self, heats: &mut Heats, slot: SlotId, key: &ObjectKey, now: Moment) {
        if heats.note(slot, &self.options, now) {
            let mut table = self.table.lock();
            if table.candidates.len() < CANDIDATES {
                table.candidates.push(key.clone());
            }
        }
    }

    /// Whether a client may begin the copy of this token.
    pub(super) fn check(&self, key: &[u8], client: ClientId, token: CopyToken, now: Moment) -> Result<()> {
        let table = self.table.lock();
        let asked = table.extras.iter().find(|(other, _)| other.as_bytes() == key).map(|(_, extras)| extras);
        let open =
            || asked.into_iter().flatten().filter(|extra| extra.replica.is_none() && extra.until > now);
        match open().find(|extra| extra.token == token) {
            Some(extra) if extra.client == client => Ok(()),
            Some(_) => Err(ErrorCode::IllegalClient.into()),
            None if open().next().is_some() => {
                Err(Error::new(ErrorCode::InvalidVersion, "that copy is not the one that was asked for"))
            }
            None => Err(not_asked_for()),
        }
    }

    /// The copy of a token is there.
    pub(super) fn made(&self, key: &ObjectKey, token: CopyToken, replica: (ReplicaId, u64), now: Moment) {
        let mut table = self.table.lock();
        let extras = table.extras.get_mut(key);
        if let Some(extra) = extras.into_iter().flatten().find(|extra| extra.token == token) {
            extra.replica = Some(replica);
            extra.until = now.after(KEPT);
            self.made.fetch_add(1, Relaxed);
        }
    }

    /// The copy of a token failed.
    pub(super) fn failed(&self, key: &ObjectKey, token: CopyToken, now: Moment) {
        let mut table = self.table.lock();
        if let Some(extras) = table.extras.get_mut(key) {
            extras.retain(|extra| extra.token != token);
            if extras.is_empty() {
                table.extras.remove(key);
            }
        }
        table.pauses.insert(key.clone(), now.after(PAUSE));
    }

    /// Proposed, made and dropped so far, and how many there are.
    pub(super) fn counts(&self) -> [u64; 4] {
        let there = self.table.lock().extras.values().flatten().filter(|e| e.replica.is_some()).count();
        let [proposed, made, dropped] = [&self.proposed, &self.made, &self.dropped].map(|c| c.load(Relaxed));
        [proposed, made, dropped, there as u64]
    }
}

#[cold]
pub(super) fn not_asked_for() -> Error {
    let text = "this master has not asked for that copy, or does not want it any more";
    Error::new(ErrorCode::UnavailableInCurrentStatus, text)
}

/// Which value of an object a decision is about: values have no replica in common.
pub(super) fn epoch<A>(value: &Value<A>) -> u64 {
    value.replicas.first().map_or(0, |held| held.id.0)
}

/// A replica to be made.
struct Plan {
    source: String,
    client: ClientId,
    target: String,
    epoch: u64,
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Decides about objects that have become hot, and about replicas whose time is over.
    pub(super) fn tend_hot(&self, now: Moment) {
        let Some(hot) = &self.hot else { return };
        if hot.due.load(Relaxed) > now.0 {
            return;
        }
        hot.due.store(now.after(EVERY).0, Relaxed);
        let (candidates, over, prune) = {
            let mut table = hot.table.lock();
            let candidates = std::mem::take(&mut table.candidates);
            table.pauses.retain(|_, until| *until > now);
            let over = |extras: &Vec<Extra>| extras.iter().any(|extra| extra.until <= now);
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
            self.directory.each().for_each(|mut shard| shard.heats.prune(&hot.options, now));
        }
    }

    fn propose(&self, hot: &Hot, key: &ObjectKey, now: Moment) {
        if hot.table.lock().pauses.contains_key(key) {
            return;
        }
        let Some(plan) = self.plan_hot(hot, key, now) else { return };
        hot.proposed.fetch_add(1, Relaxed);
        let mut table = hot.table.lock();
        table.pauses.insert(key.clone(), now.after(PAUSE));
        if !hot.options.enforce {
            tracing::info!(key = %key.as_bytes().escape_ascii(), to = plan.target, "a hot object would get another replica");
            return;
        }
        let lease = Uuid::new(table.rng.next_u64() | 1, table.rng.next_u64());
        let token = CopyToken { lease, epoch: plan.epoch };
        drop(table);
        match self.add_hot_copy(key.as_bytes(), &plan.source, plan.client, &plan.target, token) {
            Ok(task) => {
                let extra = Extra { token, client: plan.client, task, until: now.after(KEPT), replica: None };
                hot.table.lock().extras.entry(key.clone()).or_default().push(extra);
            }
            Err(error) => tracing::debug!(%error, "no task for another replica of a hot object"),
        }
    }

    /// From where to where, if there is reason and room.
    fn plan_hot(&self, hot: &Hot, key: &ObjectKey, now: Moment) -> Option<Plan> {
        let hash = self.directory.hash(key.as_bytes());
        let (names, hosts, source, client, len, epoch) = {
            let shard = self.directory.lock(hash);
            let object: &Object<A> = &shard[shard.find(hash, key.as_bytes())?];
            let value = object.value().filter(|_| object.write().is_none() && object.copying().is_none())?;
            let live: Vec<_> = value.live().map(|held| &held.segment).collect();
            if live.is_empty() || live.len() >= hot.options.max_replicas {
                return None;
            }
            let source = live[self.dice.below(live.len())];
            let names: HashSet<String> = live.iter().map(|segment| segment.info.name.clone()).collect();
            let hosts: HashSet<String> = live.iter().map(|segment| segment.info.host_id.clone()).collect();
            (names, hosts, source.info.name.clone(), source.client, value.len, epoch(value))
        };
        let registry = self.segments.read();
        let fit = |segment: &&std::sync::Arc<super::segments::Mounted<A>>| {
            !names.contains(&segment.info.name)
                && segment.is_open(now)
                && segment.fits(len)
                && 1.0 - segment.free_ratio() < FULLEST
        };
        let fitting: Vec<_> = registry.list.iter().filter(fit).collect();
        let apart: Vec<_> =
            fitting.iter().copied().filter(|segment| !hosts.contains(&segment.info.host_id)).collect();
        let choice = if apart.is_empty() { &fitting } else { &apart };
        let target = choice.get(self.dice.below(choice.len().max(1)))?.info.name.clone();
        Some(Plan { source, client, target, epoch })
    }

    /// The time of a replica is over: it gets more while its object is hot, or it goes.
    fn renew_or_drop(&self, hot: &Hot, key: &ObjectKey, now: Moment) {
        let hash = self.directory.hash(key.as_bytes());
        let still = {
            let shard = self.directory.lock(hash);
            shard.find(hash, key.as_bytes()).is_some_and(|slot| shard.heats.is_hot(slot, &hot.options, now))
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
                    extra.until = now.after(KEPT);
                    return true;
                }
                gone.push((extra.task, extra.replica));
                false
            });
            if extras.is_empty() {
                table.extras.remove(key);
            }
            if !gone.is_empty() {
                table.pauses.insert(key.clone(), now.after(RECREATE));
            }
        }
        for (task, replica) in gone {
            match replica {
                Some((replica, _)) => self.drop_replica(hot, key, replica, now),
                None => drop(self.withdraw_task(task, "a hot object cooled down")),
            }
        }
    }

    fn drop_replica(&self, hot: &Hot, key: &ObjectKey, replica: ReplicaId, now: Moment) {
        let hash = self.directory.hash(key.as_bytes());
        let mut shard = self.directory.lock(hash);
        let Some(slot) = shard.find(hash, key.as_bytes()) else { return };
        // What a copy or move relies on stays; it is an ordinary replica from now on.
        if shard[slot].copying().is_some() {
            return;
        }
        let lease = self.rest_until(self.in_use_until(&shard[slot]));
        shard.change_replicas(slot, |replicas| {
            let at = replicas.iter().position(|held| held.id == replica);
            if let Some(at) = at.filter(|_| replicas.len() > 1) {
                replicas.remove(at).retire(lease, now);
                hot.dropped.fetch_add(1, Relaxed);
            }
        });
    }

    /// Drops replicas of hot objects before any object goes, `bytes` of them at most and the oldest first; how many bytes.
    pub(super) fn drop_hot(&self, bytes: u64, now: Moment) -> u64 {
        let Some(hot) = &self.hot else { return 0 };
        let mut going = Vec::new();
        let mut freed = 0;
        {
            let mut table = hot.table.lock();
            let made = table.extras.iter().flat_map(|(key, extras)| extras.iter().map(move |e| (key, e)));
            let mut made: Vec<_> =
                made.filter_map(|(key, extra)| Some((extra.until, key.clone(), extra.replica?))).collect();
            made.sort_by_key(|(until, ..)| *until);
            for (_, key, (replica, len)) in made {
                if freed >= bytes {
                    break;
                }
                freed = len.saturating_add(freed);
                if let Some(extras) = table.extras.get_mut(&key) {
                    extras.retain(|extra| extra.replica.is_none_or(|(other, _)| other != replica));
                    if extras.is_empty() {
                        table.extras.remove(&key);
                    }
                }
                table.pauses.insert(key.clone(), now.after(RECREATE));
                going.push((key, replica));
            }
        }
        for (key, replica) in going {
            self.drop_replica(hot, &key, replica, now);
        }
        freed
    }
}
