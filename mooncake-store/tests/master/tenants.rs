//! Tenants: keys of their own, quotas, and exact charges.

use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, endpoint, segment};
use mooncake_core::clock::Rng;
use mooncake_core::error::ErrorCode::{self, *};
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};
use mooncake_core::testkit::effort;
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put, TenantQuota, Writer};
use mooncake_store::protocol::wire::TaskKind::{self, Copy, Move};
use proptest::prelude::*;

fn options(quotas: &[(&str, u64)]) -> MasterOptions {
    let quota = |&(name, bytes): &(&str, u64)| TenantQuota { name: name.into(), bytes };
    let tenants = Some(quotas.iter().map(quota).collect());
    MasterOptions { tenants, high_watermark: 1.0, ..MasterOptions::default() }
}

fn rig(quotas: &[(&str, u64)]) -> Rig {
    let rig = Rig::with(options(quotas));
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    rig
}

/// Tenant of a master, which several threads may use.
struct Tenant<'a>(&'a Master, &'a str);

impl Tenant<'_> {
    fn key(&self, key: &str) -> Vec<u8> {
        self.0.scoped(self.1, key.as_bytes()).unwrap().into_owned()
    }

    fn start(
        &self,
        who: u64,
        key: &str,
        len: u64,
        mode: WriteMode,
        copies: u64,
    ) -> Result<Vec<Replica>, ErrorCode> {
        let key = self.0.scoped(self.1, key.as_bytes()).map_err(|error| error.code())?;
        let config = ReplicateConfig { replicas: copies, ..ReplicateConfig::default() };
        let put = Put {
            writer: Writer::from(client(who)),
            mode,
            key: &key,
            len,
            config: &config,
            group: "",
            session: None,
        };
        self.0.put_start(&put).map_err(|error| error.code())
    }

    fn end(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        let ended = self.0.put_end(Writer::from(client(who)), &self.key(key), None, ReplicaType::All);
        ended.map_err(|error| error.code())
    }

    fn revoke(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        let ended = self.0.put_revoke(Writer::from(client(who)), &self.key(key), ReplicaType::All);
        ended.map_err(|error| error.code())
    }

    fn put(&self, key: &str, len: u64) -> Result<Vec<Replica>, ErrorCode> {
        let space = self.start(9, key, len, WriteMode::Put, 1)?;
        self.end(9, key)?;
        Ok(space)
    }

    fn has(&self, key: &str) -> bool {
        self.0.peek(&self.key(key)).is_ok()
    }

    fn charged(&self) -> u64 {
        self.0.tenant(self.1).unwrap().charged
    }
}

#[test]
fn the_same_key_means_other_objects() {
    let rig = rig(&[("a", MIB), ("b", MIB)]);
    let (a, b) = (Tenant(&rig.master, "a"), Tenant(&rig.master, "b"));
    a.put("k", KIB).unwrap();
    assert!(a.has("k") && !b.has("k"));
    b.put("k", 2 * KIB).unwrap();
    assert_eq!((a.charged(), b.charged()), (KIB, 2 * KIB));
    assert_eq!(Tenant(&rig.master, "c").put("k", KIB), Err(TenantNotRegistered));
    assert_eq!(Tenant(&rig.master, "default").put("k", KIB), Err(TenantNotRegistered));

    a.put("ka", KIB).unwrap();
    let found = rig.master.locate_matching_of("a", "^k").unwrap();
    let mut keys: Vec<_> = found.iter().map(|(key, _)| key.as_bytes().to_vec()).collect();
    keys.sort();
    assert_eq!(keys, [&b"k"[..], b"ka"], "as they were written");
    assert_eq!(rig.master.locate_matching_of("c", "^k").unwrap(), []);
    assert_eq!(rig.master.remove_matching_of("c", "^k", true).unwrap(), 0);
    assert_eq!(rig.master.remove_matching_of("a", "^a", true).unwrap(), 0, "the name is no part of the key");
    assert_eq!(rig.master.remove_matching_of("a", "^ka$", true).unwrap(), 1);
    assert_eq!(rig.master.remove_all_of("c", true), 0);
    assert_eq!(rig.master.remove_all_of("a", true), 1);
    assert!(!a.has("k") && b.has("k"));
    assert_eq!((a.charged(), b.charged()), (0, 2 * KIB));
    assert_eq!(rig.master.keys_of("b").len(), 1);
    let cleared = rig.master.clear_replicas_anywhere(&[b"k"], client(9), "");
    assert_eq!((cleared[0].as_bytes(), b.charged()), (&b"k"[..], 0));
}

#[test]
fn over_quota_the_own_oldest_objects_go() {
    let rig = rig(&[("a", 10 * KIB), ("b", MIB)]);
    let (a, b) = (Tenant(&rig.master, "a"), Tenant(&rig.master, "b"));
    b.put("older", 10 * KIB).unwrap();
    (0..10).for_each(|at| drop(a.put(&format!("k{at}"), KIB).unwrap()));
    assert_eq!(a.charged(), 10 * KIB);
    assert_eq!(a.put("k3", KIB), Err(ObjectAlreadyExists), "that is known before anything has to go");
    a.put("new", 3 * KIB).unwrap();
    let left: Vec<_> = (0..10).filter(|at| a.has(&format!("k{at}"))).collect();
    assert_eq!(left, [3, 4, 5, 6, 7, 8, 9]);
    assert!(b.has("older"), "what others have used less stays");
    assert_eq!((a.charged(), rig.master.tenant("a").unwrap().evicted), (10 * KIB, 3 * KIB));
    // Eviction of all objects would not suffice.
    assert_eq!(a.put("large", 10 * KIB + 1), Err(TenantQuotaExceeded));
    assert_eq!(a.start(9, "twice", 6 * KIB, WriteMode::Put, 2), Err(TenantQuotaExceeded));
    assert!(a.has("k3"));
    // Leased objects stay.
    (3..10).for_each(|at| drop(rig.master.locate(&a.key(&format!("k{at}"))).unwrap()));
    assert_eq!(a.put("next", 4 * KIB), Err(TenantQuotaExceeded));
    assert_eq!(a.put("next", 3 * KIB).map(drop), Ok(()), "new was not");
    assert_eq!(rig.master.tenant("a").unwrap().rejected, 3);
    // A replacement takes the space of the previous value.
    a.start(9, "next", 3 * KIB, WriteMode::Upsert, 1).unwrap();
    assert_eq!(a.charged(), 13 * KIB, "both are there for now");
    a.end(9, "next").unwrap();
    assert_eq!(a.charged(), 10 * KIB);
    assert_eq!(rig.master.audit_charges(), [""; 0]);
}

#[test]
fn quotas_come_and_go() {
    let rig = rig(&[("a", 4 * MIB), ("b", 4 * MIB)]);
    let quota = |name: &str, bytes| TenantQuota { name: name.into(), bytes };
    let effective = |name: &str| rig.master.tenant(name).unwrap().effective;
    assert_eq!((effective("a"), effective("b")), (MIB, MIB), "there is less than all want");
    rig.mount(3, 2 * MIB);
    assert_eq!(effective("a"), 2 * MIB);
    rig.master.unmount(client(3), segment(3, MIB).id).unwrap();
    assert_eq!(effective("a"), MIB);

    let a = Tenant(&rig.master, "a");
    a.put("k", 100 * KIB).unwrap();
    assert_eq!(rig.master.remove_tenant("a").unwrap_err().code(), TenantNotEmpty);
    assert_eq!(rig.master.remove_tenant("none").unwrap_err().code(), ObjectNotFound);
    assert_eq!(rig.master.set_tenant(&quota("a", 10 * KIB)).unwrap().charged, 100 * KIB);
    assert_eq!(a.put("l", KIB).map(drop), Ok(()), "what was too much made room");
    assert!(!a.has("k"));
    rig.master.remove(&a.key("l"), false).unwrap();
    rig.master.remove_tenant("a").unwrap();
    assert_eq!(a.0.scoped("a", b"k").unwrap_err().code(), TenantNotRegistered);
    assert_eq!(rig.master.tenants().len(), 1);
    assert_eq!(effective("b"), 2 * MIB);
    rig.master.set_tenant(&quota("a", MIB)).unwrap();
    a.put("k", KIB).unwrap();

    for bad in [quota("", 1), quota("_a", 1), quota("a\nb", 1), quota("a", 0), quota("a", u64::MAX)] {
        assert_eq!(rig.master.set_tenant(&bad).unwrap_err().code(), InvalidParams);
    }
    let off = Rig::new();
    assert_eq!(off.master.tenant("a").unwrap_err().code(), UnavailableInCurrentMode);
    assert_eq!(off.master.set_tenant(&quota("a", 1)).unwrap_err().code(), UnavailableInCurrentMode);
    assert_eq!(off.master.scoped("any", b"k").unwrap().as_ref(), b"k");
    let twice = [("a", 1), ("a", 2)];
    assert!(options(&twice).check().is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Start { who: u64, key: u8, len: u64, upsert: bool, copies: u64 },
    End { who: u64, key: u8 },
    Revoke { who: u64, key: u8 },
    Read(u8),
    Remove { key: u8, force: bool },
    RemoveAll(bool),
    Copy { key: u8, to: u64, moves: bool },
    EndCopy { key: u8, moves: bool, well: bool },
    Clear { who: u64, key: u8, segment: u64 },
    Unmount(u64),
    Mount(u64),
    Quota(u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (who, key) = (1..3u64, 0..5u8);
    let (who, key) = (|| who.clone(), || key.clone());
    prop_oneof![
        6 => (who(), key(), 1..40_000u64, any::<bool>(), 1..3u64)
            .prop_map(|(who, key, len, upsert, copies)| Step::Start { who, key, len, upsert, copies }),
        6 => (who(), key()).prop_map(|(who, key)| Step::End { who, key }),
        1 => (who(), key()).prop_map(|(who, key)| Step::Revoke { who, key }),
        2 => key().prop_map(Step::Read),
        1 => (key(), any::<bool>()).prop_map(|(key, force)| Step::Remove { key, force }),
        1 => any::<bool>().prop_map(Step::RemoveAll),
        3 => (key(), 1..4u64, any::<bool>()).prop_map(|(key, to, moves)| Step::Copy { key, to, moves }),
        3 => (key(), any::<bool>(), any::<bool>())
            .prop_map(|(key, moves, well)| Step::EndCopy { key, moves, well }),
        1 => (who(), key(), 0..4u64).prop_map(|(who, key, segment)| Step::Clear { who, key, segment }),
        1 => (1..4u64).prop_map(Step::Unmount),
        2 => (1..4u64).prop_map(Step::Mount),
        1 => (1..200_000u64).prop_map(Step::Quota),
        2 => prop_oneof![Just(0), Just(11), Just(31), Just(601)].prop_map(Step::Pass),
    ]
}

const SPACE: u64 = 64 * KIB;

/// Applies a step. Its outcome does not matter: the charge must be right after each.
fn take(rig: &Rig, tenant: &Tenant<'_>, step: &Step) {
    let master = &rig.master;
    let key = |key: u8| format!("k{key}");
    let kind = |moves: bool| if moves { Move } else { Copy };
    match *step {
        Step::Start { who, key: at, len, upsert, copies } => {
            let mode = if upsert { WriteMode::Upsert } else { WriteMode::Put };
            let _ = tenant.start(who, &key(at), len, mode, copies);
        }
        Step::End { who, key: at } => drop(tenant.end(who, &key(at))),
        Step::Revoke { who, key: at } => drop(tenant.revoke(who, &key(at))),
        Step::Read(at) => drop(master.locate(&tenant.key(&key(at)))),
        Step::Remove { key: at, force } => drop(master.remove(&tenant.key(&key(at)), force)),
        Step::RemoveAll(force) => drop(master.remove_all_of(tenant.1, force)),
        Step::Copy { key: at, to, moves } => {
            let scoped = tenant.key(&key(at));
            let Ok(replicas) = master.peek(&scoped) else { return };
            let from = (1..4).find(|number| segment(*number, SPACE).endpoint == endpoint(&replicas[0]));
            let from = segment(from.unwrap(), SPACE).name;
            let to = segment(to, SPACE).name;
            if moves {
                let _ = master.move_start(client(1), &scoped, &from, &to);
            } else {
                let _ = master.copy_start(client(1), &scoped, &from, &[&to]);
            }
        }
        Step::EndCopy { key: at, moves, well } => {
            let scoped = tenant.key(&key(at));
            let kind: TaskKind = kind(moves);
            let _ = if well {
                master.replication_end(client(1), kind, &scoped)
            } else {
                master.replication_revoke(client(1), kind, &scoped)
            };
        }
        Step::Clear { who, key: at, segment: number } => {
            let name = if number == 0 { String::new() } else { segment(number, SPACE).name };
            drop(master.clear_replicas_anywhere(&[key(at).as_bytes()], client(who), &name));
        }
        Step::Unmount(number) => drop(master.unmount(client(number), segment(number, SPACE).id)),
        Step::Mount(number) => drop(master.mount(client(number), &segment(number, SPACE))),
        Step::Quota(bytes) => {
            master.set_tenant(&TenantQuota { name: tenant.1.into(), bytes }).unwrap();
        }
        Step::Pass(seconds) => rig.alive_for(seconds as f64),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(effort(60, 300)))]

    /// After any operations in any order, a tenant is charged exactly for its objects.
    #[test]
    fn charges_are_exact(steps in proptest::collection::vec((any::<bool>(), step()), 1..60)) {
        let rig = Rig::with(options(&[("a", 60 * KIB), ("b", 100 * KIB)]));
        (1..3).for_each(|number| drop(rig.mount(number, SPACE)));
        for (first, step) in &steps {
            take(&rig, &Tenant(&rig.master, if *first { "a" } else { "b" }), step);
            prop_assert_eq!(rig.master.audit_charges(), Vec::<String>::new(), "after {:?}", step);
        }
        rig.alive_for(602.0);
        rig.master.remove_all(true);
        for tenant in rig.master.tenants() {
            prop_assert_eq!(tenant.charged, 0);
            rig.master.remove_tenant(&tenant.name).unwrap();
        }
    }
}

/// With several threads, the quota holds throughout, and the charge is exact at the end.
#[test]
fn quotas_hold_under_many_hands() {
    const QUOTA: u64 = 64 * KIB;
    let rig = rig(&[("a", QUOTA), ("b", QUOTA)]);
    let master = &rig.master;
    std::thread::scope(|scope| {
        for who in 1..5u64 {
            scope.spawn(move || {
                let mut rng = Rng::seeded(who);
                for round in 0..3000u64 {
                    let tenant = Tenant(master, if who % 2 == 0 { "a" } else { "b" });
                    let key = format!("k{}", rng.next_u64() % 40);
                    let len = 1 + rng.next_u64() % (8 * KIB);
                    if tenant.start(who, &key, len, WriteMode::Put, 1).is_ok() {
                        let charged = tenant.charged();
                        assert!(charged <= QUOTA + 4 * 8 * KIB, "{charged}");
                        if round % 7 == 0 {
                            tenant.revoke(who, &key).unwrap();
                        } else {
                            tenant.end(who, &key).unwrap();
                        }
                    }
                    if round % 5 == 0 {
                        let _ = master.remove(&tenant.key(&key), false);
                    }
                }
            });
        }
    });
    assert_eq!(master.audit_charges(), [""; 0]);
    for name in ["a", "b"] {
        assert!(Tenant(master, name).charged() <= QUOTA, "never more than the quota");
        master.remove_all_of(name, true);
        assert_eq!(Tenant(master, name).charged(), 0);
    }
    rig.pass(Duration::from_secs(601).as_secs_f64());
    assert_eq!(rig.used(), 0);
}
