//! Causes of misses: random calls, compared with what the responses show and with an oracle.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_core::clock::Rng;
use mooncake_core::error::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::hints::PutHints;
use mooncake_core::replica::{ReplicaType, ReplicateConfig, SoftPin};
use mooncake_core::testkit::{effort, test_seed};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{MasterOptions, MissCause, MissCounts, Put, TenantQuota, Writer};
use mooncake_store::protocol::call::Handle;
use mooncake_store::protocol::message::{BatchExistKey, BatchGetReplicaList, ExistKey, LocatePrefix};
use proptest::prelude::*;

use crate::common::rig::{KIB, Rig, client, segment};

const LEN: u64 = 16 * KIB;

/// Registered tenants, and one that is not.
const TENANTS: [&str; 3] = ["a", "b", "nobody"];

/// Hint that an object ends by itself.
#[derive(Clone, Copy, Debug)]
enum Limit {
    None,
    /// A time to live of three seconds.
    Time,
    FirstRead,
}

#[derive(Clone, Debug)]
enum Step {
    Put { at: (usize, u8), group: Option<u8>, pinned: bool, large: bool, unfinished: bool, limit: Limit },
    Revoke((usize, u8)),
    Remove((usize, u8)),
    Unmount,
    Pass(u8),
    Exist(usize, Vec<u8>),
    ExistOne(usize, u8),
    Get(usize, Vec<u8>),
    Prefix { tenant: usize, keys: Vec<u8>, with_replicas: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = || (0..2usize, 0..14u8);
    let keys = || proptest::collection::vec(0..14u8, 0..8);
    let group = proptest::option::weighted(0.3, 0..2u8);
    let limit = prop_oneof![6 => Just(Limit::None), 1 => Just(Limit::Time), 1 => Just(Limit::FirstRead)];
    let rarely = proptest::bool::weighted;
    let put = (at(), group, any::<bool>(), rarely(0.1), rarely(0.2), limit);
    let step = prop_oneof![
        8 => put.prop_map(|(at, group, pinned, large, unfinished, limit)| {
            Step::Put { at, group, pinned, large, unfinished, limit }
        }),
        1 => at().prop_map(Step::Revoke),
        1 => at().prop_map(Step::Remove),
        1 => Just(Step::Unmount),
        2 => prop_oneof![Just(1u8), Just(11), Just(70)].prop_map(Step::Pass),
        1 => (0..3usize, keys()).prop_map(|(tenant, keys)| Step::Exist(tenant, keys)),
        1 => (0..3usize, 0..14u8).prop_map(|(tenant, key)| Step::ExistOne(tenant, key)),
        1 => (0..3usize, keys()).prop_map(|(tenant, keys)| Step::Get(tenant, keys)),
        2 => (0..3usize, keys(), any::<bool>())
            .prop_map(|(tenant, keys, with_replicas)| Step::Prefix { tenant, keys, with_replicas }),
    ];
    proptest::collection::vec(step, 1..80)
}

type Key = (usize, u8);

/// Master with an oracle of why its keys are missing.
struct Tried {
    rig: Rig,
    /// Causes that a key may have left with.
    left: BTreeMap<Key, Vec<MissCause>>,
    grouped: BTreeSet<Key>,
    pinned: BTreeSet<Key>,
    /// Keys that were put with a limit.
    limited: BTreeSet<Key>,
    /// Misses that the responses show.
    missed: u64,
    by_cause: BTreeMap<(usize, MissCause), u64>,
}

impl Tried {
    fn new(policy: PolicyKind) -> Self {
        let quota = |name: &&str| TenantQuota { name: (*name).into(), bytes: 6 * LEN };
        let options = MasterOptions {
            tenants: Some(TENANTS[..2].iter().map(quota).collect()),
            high_watermark: 1.0,
            put_release: std::time::Duration::from_secs(60),
            ..MasterOptions::default()
        };
        let rig = Rig::with_policy(options, policy);
        rig.mount(1, 5 * LEN);
        rig.mount(2, 4 * LEN);
        Self {
            rig,
            left: BTreeMap::new(),
            grouped: BTreeSet::new(),
            pinned: BTreeSet::new(),
            limited: BTreeSet::new(),
            missed: 0,
            by_cause: BTreeMap::new(),
        }
    }

    fn scoped(&self, (tenant, key): Key) -> Option<Vec<u8>> {
        let key = [b'k', key];
        self.rig.master.scoped(TENANTS[tenant], &key).ok().map(|key| key.into_owned())
    }

    /// Returns the keys whose object exists, readable or not.
    fn existing(&self) -> BTreeSet<Key> {
        let all = (0..2).flat_map(|tenant| (0..14).map(move |key| (tenant, key)));
        all.filter(|at| self.rig.master.find(&self.scoped(*at).unwrap()).is_ok()).collect()
    }

    fn why(&self, at: Key) -> Option<MissCause> {
        self.scoped(at).map_or(Some(MissCause::Unknown), |key| self.rig.master.why_missing(&key))
    }

    /// Runs a step. Returns the causes of objects that left in it, by key.
    fn run(&mut self, step: &Step) -> impl Fn(Key) -> Vec<MissCause> + use<> {
        let (grouped, pinned) = (self.grouped.clone(), self.pinned.clone());
        let mut limited = self.limited.clone();
        if let Step::Put { at, .. } = step {
            limited.insert(*at);
        }
        let of = move |why: Option<MissCause>| {
            move |at: Key| {
                let by_itself = ends(limited.contains(&at));
                let why: Vec<_> = match why {
                    // Every step that takes time may be the end of a write.
                    Some(why @ MissCause::OwnerLost) => vec![Some(why), Some(MissCause::PutFailed)],
                    Some(why) => vec![Some(why)],
                    // The first object of a group is not visible.
                    None => vec![
                        Some(MissCause::Evicted),
                        grouped.contains(&at).then_some(MissCause::EvictedWithGroup),
                        pinned.contains(&at).then_some(MissCause::PinEnded),
                    ],
                };
                why.into_iter().flatten().chain(by_itself).collect::<Vec<_>>()
            }
        };
        match step {
            Step::Put { at, group, pinned, large, unfinished, limit } => {
                self.put(*at, *group, *pinned, *large, *unfinished, *limit);
                of(None)
            }
            Step::Revoke(at) => {
                let key = self.scoped(*at).unwrap();
                let _ = self.rig.master.put_revoke(Writer::from(client(9)), &key, ReplicaType::All);
                of(Some(MissCause::PutFailed))
            }
            Step::Remove(at) => {
                let _ = self.rig.master.remove(&self.scoped(*at).unwrap(), true);
                of(Some(MissCause::Removed))
            }
            Step::Unmount => {
                self.rig.master.unmount(client(2), segment(2, 4 * LEN).id).unwrap();
                // Without time: that of a write could end.
                self.rig.pass(0.0);
                of(Some(MissCause::OwnerLost))
            }
            Step::Pass(seconds) => {
                self.rig.alive_for(f64::from(*seconds));
                of(Some(MissCause::PutFailed))
            }
            reads => {
                self.read(reads);
                of(Some(MissCause::Unknown))
            }
        }
    }

    fn put(&mut self, at: Key, group: Option<u8>, pinned: bool, large: bool, unfinished: bool, limit: Limit) {
        let hints = match limit {
            Limit::None => None,
            Limit::Time => Some(PutHints { ttl_ms: Some(3000), ..PutHints::default() }),
            Limit::FirstRead => Some(PutHints { delete_after_read: true, ..PutHints::default() }),
        };
        if hints.is_some() {
            self.limited.insert(at);
        }
        let key = self.scoped(at).unwrap();
        let soft_pin = if pinned { SoftPin::Enable } else { SoftPin::Disable };
        let config = ReplicateConfig {
            soft_pin,
            soft_pin_ttl_ms: pinned.then_some(3000),
            hints: hints.map(Box::new),
            ..ReplicateConfig::default()
        };
        let group = group.map(|group| format!("{}\0g{group}", TENANTS[at.0])).unwrap_or_default();
        let put = Put {
            writer: client(9).into(),
            mode: WriteMode::Put,
            key: &key,
            len: if large { 7 * LEN } else { LEN },
            config: &config,
            group: &group,
            session: None,
        };
        let started = self.rig.master.put_start(&put).map_err(|error| error.code());
        let why = match started {
            Ok(_) => {
                if !group.is_empty() {
                    self.grouped.insert(at);
                }
                if pinned {
                    self.pinned.insert(at);
                }
                if !unfinished {
                    let ended =
                        self.rig.master.put_end(Writer::from(client(9)), &key, None, ReplicaType::All);
                    ended.unwrap();
                }
                return;
            }
            Err(ErrorCode::NoAvailableHandle) => MissCause::PutFailed,
            Err(ErrorCode::TenantQuotaExceeded) => MissCause::OverQuota,
            Err(ErrorCode::ObjectAlreadyExists) => return,
            Err(other) => panic!("{other:?}"),
        };
        if self.rig.master.find(&key).is_err() {
            self.left.insert(at, vec![why]);
        }
    }

    fn read(&mut self, step: &Step) {
        let (tenant, mut keys) = match step {
            Step::Exist(tenant, keys) | Step::Get(tenant, keys) => (*tenant, keys.clone()),
            Step::ExistOne(tenant, key) => (*tenant, vec![*key]),
            Step::Prefix { tenant, keys, .. } => (*tenant, keys.clone()),
            _ => unreachable!("no read"),
        };
        // The first read of an object may end it, so that the second one in the call is a miss.
        let mut seen = BTreeSet::new();
        keys.retain(|key| seen.insert(*key));
        let causes: Vec<_> = keys.iter().map(|key| self.why((tenant, *key))).collect();
        let names: Vec<[u8; 2]> = keys.iter().map(|key| [b'k', *key]).collect();
        let names: Vec<&[u8]> = names.iter().map(AsRef::as_ref).collect();
        let (master, of, keys) = (&self.rig.master, TENANTS[tenant], (&names[..]).into());
        let front = |found: Vec<bool>| found.iter().take_while(|found| **found).count();
        let found = match step {
            Step::Exist(..) => {
                let found = master.handle(BatchExistKey { keys, tenant: of });
                front(found.into_iter().map(|found| found.unwrap()).collect())
            }
            Step::ExistOne(..) => master.handle(ExistKey { key: names[0], tenant: of }).unwrap().into(),
            Step::Get(..) => {
                let found = master.handle(BatchGetReplicaList { keys, tenant: of });
                front(found.into_iter().map(|found| found.is_ok()).collect())
            }
            Step::Prefix { with_replicas, .. } => {
                let call = LocatePrefix { keys, with_replicas: *with_replicas, tenant: of };
                master.handle(call).unwrap().count as usize
            }
            _ => unreachable!("no read"),
        };
        self.missed += (names.len() - found) as u64;
        for cause in &causes[found..] {
            *self.by_cause.entry((tenant, cause.unwrap_or(MissCause::BehindGap))).or_default() += 1;
        }
    }
}

/// Returns the causes of an object that may end by itself.
fn ends(is_limited: bool) -> Vec<MissCause> {
    if is_limited { vec![MissCause::Expired, MissCause::DeletedAfterRead] } else { Vec::new() }
}

fn counts(master: MissCounts) -> BTreeMap<MissCause, u64> {
    master.iter().filter(|(_, count)| *count > 0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: effort(60, 300), ..ProptestConfig::default() })]
    #[test]
    fn causes_add_up_to_all_misses(
        steps in steps(),
        policy in prop_oneof![Just(PolicyKind::Lru), Just(PolicyKind::Gittins)],
    ) {
        let mut tried = Tried::new(policy);
        for step in &steps {
            let before = tried.existing();
            let why_left = tried.run(step);
            let now = tried.existing();
            for at in before.difference(&now) {
                // A put may have been refused after its own object had left.
                if matches!(step, Step::Put { at: own, .. } if own == at) {
                    prop_assert!(tried.limited.contains(at), "{step:?}");
                    continue;
                }
                tried.left.insert(*at, why_left(*at));
            }
            if matches!(step, Step::Unmount) {
                tried.rig.mount(2, 4 * LEN);
            }
            for at in (0..2).flat_map(|tenant| (0..14).map(move |key| (tenant, key))) {
                let why = tried.why(at);
                let is_readable = tried.rig.master.peek(&tried.scoped(at).unwrap()).is_ok();
                let allowed = match (is_readable, now.contains(&at)) {
                    (true, _) => vec![None],
                    (false, true) => {
                        let by_itself = ends(tried.limited.contains(&at));
                        by_itself.into_iter().chain([MissCause::Unreadable]).map(Some).collect()
                    }
                    (false, false) => {
                        let left = tried.left.get(&at).cloned().unwrap_or(vec![MissCause::Unknown]);
                        left.into_iter().map(Some).collect()
                    }
                };
                prop_assert!(allowed.contains(&why), "{at:?} after {step:?}: {why:?}, not {allowed:?}");
            }
        }
        let mut all: BTreeMap<MissCause, u64> = BTreeMap::new();
        for ((_, cause), count) in &tried.by_cause {
            *all.entry(*cause).or_default() += count;
        }
        let stats = tried.rig.master.stats();
        prop_assert_eq!(stats.misses.total(), tried.missed);
        prop_assert_eq!(counts(stats.misses), all);
        for (tenant, name) in TENANTS[..2].iter().enumerate() {
            let of = tried.by_cause.iter().filter(|((of, _), _)| *of == tenant);
            let of: BTreeMap<_, _> = of.map(|((_, cause), count)| (*cause, *count)).collect();
            prop_assert_eq!(counts(tried.rig.master.tenant(name).unwrap().misses), of);
        }
    }
}

/// Every cause occurs, so that the property is not true of nothing.
#[test]
fn each_cause_is_told() {
    let seed = test_seed();
    let mut rng = Rng::seeded(seed);
    let mut tried = Tried::new(PolicyKind::Lru);
    let mut random = |bound: u64| rng.below(bound);
    let told = |tried: &Tried| tried.rig.master.stats().misses;
    let mut steps = 0;
    // The rarest cause occurs about once in a thousand steps.
    while steps < 100_000 && told(&tried).iter().any(|(_, count)| count == 0) {
        steps += 1;
        let at = (random(2) as usize, random(14) as u8);
        let keys: Vec<u8> = (0..random(6)).map(|_| random(14) as u8).collect();
        let step = match random(20) {
            0 => Step::Revoke(at),
            1 => Step::Remove(at),
            2 => Step::Unmount,
            3 => Step::Pass([1, 11, 70][random(3) as usize]),
            4 => Step::Get(at.0, keys),
            5 => Step::Prefix { tenant: at.0, keys, with_replicas: false },
            _ => Step::Put {
                at,
                group: (random(3) == 0).then_some(random(2) as u8),
                pinned: random(3) == 0,
                large: random(20) == 0,
                unfinished: random(6) == 0,
                limit: [Limit::None, Limit::None, Limit::Time, Limit::FirstRead][random(4) as usize],
            },
        };
        drop(tried.run(&step));
        if matches!(step, Step::Unmount) {
            tried.rig.mount(2, 4 * LEN);
        }
    }
    let misses = told(&tried);
    for (cause, count) in misses.iter() {
        assert!(count > 0, "{cause:?} did not occur. seed={seed} {misses:?}");
    }
}
