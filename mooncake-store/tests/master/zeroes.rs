//! Memory with bytes of other tenants: who receives it, and what its owner is asked to zero.

use mooncake_core::error::ErrorCode::{self, NoAvailableHandle};
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{MasterOptions, Put, TenantQuota, Writer};

use crate::common::rig::{KIB, Rig, client};

const SEGMENT: u64 = 1024 * KIB;
const LEN: u64 = 64 * KIB;
/// Writer that numbers its writes, and one that does not.
const NUMBERED: u64 = 7;
const UNNUMBERED: u64 = 0;

fn rig() -> Rig {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 1 << 30 };
    let tenants = Some(["a", "b"].map(quota).into());
    let rig = Rig::with(MasterOptions { tenants, high_watermark: 1.0, ..MasterOptions::default() });
    rig.mount(1, SEGMENT);
    rig
}

/// Lets a tenant use all memory, and others none.
fn give_all(rig: &Rig, tenant: &str) {
    for name in ["a", "b"] {
        let bytes = if name == tenant { 1 << 40 } else { 1 };
        rig.master.set_tenant(&TenantQuota { name: name.into(), bytes }).unwrap();
    }
}

fn put(rig: &Rig, tenant: &str, key: &str, attempt: u64) -> Result<(), ErrorCode> {
    give_all(rig, tenant);
    let key = rig.master.scoped(tenant, key.as_bytes()).unwrap();
    let writer = Writer { client: client(9), attempt };
    let (mode, config) = (WriteMode::Put, &ReplicateConfig::default());
    let put = Put { writer, mode, key: &key, len: LEN, config, group: "", session: None };
    rig.master.put_start(&put).map_err(|error| error.code())?;
    rig.master.put_end(writer, &key, None, ReplicaType::All).map_err(|error| error.code())
}

/// Fills the segment with objects of a tenant, and removes them.
fn fill(rig: &Rig, tenant: &str) {
    for n in 0..SEGMENT / LEN {
        put(rig, tenant, &format!("{tenant} {n}"), NUMBERED).unwrap();
    }
    assert_eq!(rig.master.remove_all_of(tenant, true), SEGMENT / LEN);
}

#[test]
fn writers_that_number_their_writes_receive_any_memory() {
    let rig = rig();
    for n in 0..16 {
        put(&rig, ["a", "b"][n % 2], &format!("{n}"), UNNUMBERED).unwrap();
    }
    assert_eq!((rig.master.remove_all_of("a", true), rig.master.remove_all_of("b", true)), (8, 8));
    fill(&rig, "a");
    fill(&rig, "b");
    // Parts of the segment had bytes of both tenants.
    assert_eq!(put(&rig, "a", "k", UNNUMBERED), Err(NoAvailableHandle));
    assert_eq!(put(&rig, "b", "k", UNNUMBERED), Err(NoAvailableHandle));
    put(&rig, "a", "k", NUMBERED).unwrap();
    assert_eq!(rig.used(), LEN, "what was refused is free");
}

#[test]
fn a_full_pool_loses_one_object_for_a_refused_put() {
    let rig = rig();
    for n in 0..SEGMENT / LEN {
        put(&rig, "a", &format!("{n}"), NUMBERED).unwrap();
    }
    assert_eq!(put(&rig, "b", "k", UNNUMBERED), Err(NoAvailableHandle));
    assert_eq!(rig.master.stats().evicted_keys, 1);
    assert_eq!(put(&rig, "b", "k", UNNUMBERED), Err(NoAvailableHandle));
    assert_eq!(rig.master.stats().evicted_keys, 1, "the gap is still there");
    put(&rig, "b", "k", NUMBERED).unwrap();
}

#[test]
fn what_the_owner_has_zeroed_is_granted() {
    let rig = rig();
    let work = |done: &[u64]| rig.master.zero_work(client(1), done);
    assert!(work(&[]).needed && work(&[]).extents.is_empty());
    fill(&rig, "a");
    assert!(work(&[]).extents.is_empty(), "nobody needs it");
    assert_eq!(put(&rig, "b", "k", UNNUMBERED), Err(NoAvailableHandle));
    let first = work(&[]).extents;
    assert_eq!(first.iter().map(|extent| extent.len).sum::<u64>(), SEGMENT / 8, "a part at a time");
    assert_eq!(work(&[]).extents, first, "repeated until it is reported");
    assert!(rig.master.zero_work(client(2), &[first[0].number]).extents.is_empty(), "of another client");
    assert_eq!(work(&[]).extents, first);
    assert_eq!(put(&rig, "b", "k", UNNUMBERED), Err(NoAvailableHandle), "not zeroed yet");
    assert_eq!(work(&[first[0].number, first[0].number, 1]).extents, first[1..]);
    put(&rig, "b", "k", UNNUMBERED).unwrap();

    // Memory that is freed from now on is zeroed before a writer asks.
    let before = work(&[]).extents.len();
    put(&rig, "a", "k", NUMBERED).unwrap();
    rig.master.remove_all_of("a", true);
    assert_eq!(work(&[]).extents.len(), before + 1);
}

/// A master knows nothing of the bytes in memory that is mounted again.
#[test]
fn memory_that_is_mounted_again_has_bytes_of_unknown_tenants() {
    let rig = rig();
    put(&rig, "b", "k", UNNUMBERED).unwrap();
    rig.master.unmount(client(1), crate::common::rig::segment(1, SEGMENT).id).unwrap();
    rig.mount(1, SEGMENT);
    assert_eq!(put(&rig, "b", "k", UNNUMBERED), Err(NoAvailableHandle));
    put(&rig, "b", "k", NUMBERED).unwrap();
}

#[test]
fn copies_and_their_space_follow_the_same_rule() {
    let rig = rig();
    rig.mount(2, SEGMENT);
    let config = |segment: u64| ReplicateConfig {
        preferred_segments: vec![format!("node{segment}:1")],
        ..ReplicateConfig::default()
    };
    let key = rig.master.scoped("a", b"k").unwrap().into_owned();
    let writer = Writer { client: client(9), attempt: NUMBERED };
    let start = |key: &[u8], config: &ReplicateConfig| {
        let put = Put { writer, mode: WriteMode::Put, key, len: LEN, config, group: "", session: None };
        rig.master.put_start(&put).unwrap();
        rig.master.put_end(writer, key, None, ReplicaType::All).unwrap();
    };
    // The whole second segment has bytes of tenant b.
    give_all(&rig, "b");
    for n in 0..SEGMENT / LEN {
        start(&rig.master.scoped("b", format!("{n}").as_bytes()).unwrap(), &config(2));
    }
    rig.master.remove_all_of("b", true);
    give_all(&rig, "a");
    start(&key, &config(1));
    let copy = |attempt| {
        let copier = Writer { client: client(1), attempt };
        rig.master.copy_start(copier, &key, "node1:1", &["node2:1"]).map(drop).map_err(|error| error.code())
    };
    assert_eq!(copy(UNNUMBERED), Err(NoAvailableHandle));
    assert_eq!(copy(NUMBERED), Ok(()));
}
