//! Prefetches: promotions that the owner of a disk reserves at the master.

use std::time::Duration;

use mooncake_core::ErrorCode::{self, *};
use mooncake_store::master::{DiskOptions, MasterOptions, PromotionOptions};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt};

use crate::common::rig::{KIB, MIB, Rig, client};

const LEN: u64 = 100;
const LEASE: Duration = Duration::from_secs(5);

/// Returns a master with the memory of client 1, and the disks of clients 1 and 2.
fn rig_with(promotion: Option<PromotionOptions>) -> Rig {
    let rig = Rig::with(MasterOptions {
        disks: Some(DiskOptions { promotion, ..DiskOptions::default() }),
        lease_ttl: LEASE,
        client_ttl: Duration::from_secs(10),
        client_suspicion: Duration::from_secs(4),
        ..MasterOptions::default()
    });
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    (1..=2).for_each(|who| rig.master.mount_disk(client(who), true).unwrap());
    rig
}

fn rig() -> Rig {
    rig_with(None)
}

/// Records an object that a client found on its disk.
fn store(rig: &Rig, who: u64, key: &str) {
    let item = OffloadItem { tenant: "default".into(), key: key.into(), size: LEN.cast_signed() };
    let endpoint = format!("disk{who}:1");
    let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: LEN.cast_signed(), endpoint };
    rig.master.offloaded(client(who), &[item], &[place]).unwrap();
}

fn register(rig: &Rig, who: u64, key: &str) -> Result<(), ErrorCode> {
    rig.master.register_prefetch(client(who), key.as_bytes()).map_err(|error| error.code())
}

fn start(rig: &Rig, who: u64, key: &str) -> Result<(), ErrorCode> {
    let start = rig.master.promotion_start(client(who), key.as_bytes(), LEN, &[]);
    start.map(drop).map_err(|error| error.code())
}

/// Returns the number of replicas.
fn replicas(rig: &Rig, key: &str) -> usize {
    rig.master.peek(key.as_bytes()).map_or(0, |replicas| replicas.len())
}

#[test]
fn a_prefetched_object_is_in_memory_under_a_lease() {
    let rig = rig();
    store(&rig, 1, "k");
    assert_eq!(start(&rig, 1, "k"), Err(ReplicaIsNotReady), "nothing is reserved");
    assert_eq!(register(&rig, 1, "k"), Ok(()));
    assert_eq!(rig.master.to_promote(client(1)).unwrap(), [], "the owner knows it already");
    assert_eq!(start(&rig, 1, "k"), Ok(()));
    assert_eq!(rig.master.leased_for(b"k"), None);
    rig.master.promoted(client(1), b"k").unwrap();
    assert_eq!((replicas(&rig, "k"), rig.master.leased_for(b"k")), (2, Some(LEASE)));
    assert_eq!(rig.remove("k", false), Err(ObjectHasLease));
    let stats = rig.master.stats();
    assert_eq!((stats.hits, stats.disks.promotions_too_rare), (0, 0), "a prefetch is no read");
    let disks = stats.disks;
    assert_eq!(
        (disks.promotions_admitted, disks.promotions_completed, disks.promotions_in_flight),
        (1, 1, 0)
    );
}

/// An object that returns because it is read gets its lease from the read.
#[test]
fn a_promotion_by_reads_grants_no_lease() {
    let rig = rig_with(Some(PromotionOptions { threshold: 1, ..PromotionOptions::default() }));
    store(&rig, 1, "k");
    rig.locate("k").unwrap();
    assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 1);
    rig.alive_for(LEASE.as_secs_f64() + 2.0);
    assert_eq!(rig.master.leased_for(b"k"), None);
    start(&rig, 1, "k").unwrap();
    rig.master.promoted(client(1), b"k").unwrap();
    assert_eq!(rig.master.leased_for(b"k"), None);
}

#[test]
fn objects_that_cannot_return_are_refused_by_reason() {
    let rig = rig();
    assert_eq!(register(&rig, 1, "none"), Err(ObjectNotFound));
    store(&rig, 1, "k");
    assert_eq!(register(&rig, 7, "k"), Err(UnavailableInCurrentStatus), "it has no disk");
    assert_eq!(register(&rig, 2, "k"), Err(InvalidParams), "it is on another disk");
    rig.put(9, "in memory", KIB).unwrap();
    assert_eq!(register(&rig, 1, "in memory"), Err(PromotionAlreadyExists));
    rig.start(9, "unfinished", KIB).unwrap();
    assert_eq!(register(&rig, 1, "unfinished"), Err(ReplicaIsNotReady));
    // The next value is being written beside that on disk.
    store(&rig, 1, "replaced");
    rig.upsert(9, "replaced", KIB).unwrap();
    assert_eq!(register(&rig, 1, "replaced"), Err(ReplicaIsNotReady));
    assert_eq!(register(&rig, 1, "k"), Ok(()));
    assert_eq!(register(&rig, 1, "k"), Err(PromotionAlreadyExists));
    start(&rig, 1, "k").unwrap();
    assert_eq!(register(&rig, 1, "k"), Err(PromotionAlreadyExists));
    rig.master.promoted(client(1), b"k").unwrap();
    assert_eq!(register(&rig, 1, "k"), Err(PromotionAlreadyExists));
}

#[test]
fn too_many_reservations_are_refused() {
    let rig = rig_with(Some(PromotionOptions { queue_limit: 2, ..PromotionOptions::default() }));
    ["a", "b", "c"].iter().for_each(|key| store(&rig, 1, key));
    assert_eq!((register(&rig, 1, "a"), register(&rig, 1, "b")), (Ok(()), Ok(())));
    assert_eq!(register(&rig, 1, "c"), Err(KeysUltraLimit));
    assert_eq!(rig.master.stats().disks.promotions_over_limit, 1);
    rig.master.promotion_failed(client(1), b"a").unwrap();
    assert_eq!(register(&rig, 1, "c"), Ok(()));
}

/// A promotion that waits for its owner counts for a prefetch, and a prefetch for a promotion.
#[test]
fn a_promotion_that_waits_is_not_reserved_again() {
    let rig = rig_with(Some(PromotionOptions { threshold: 1, ..PromotionOptions::default() }));
    store(&rig, 1, "read");
    rig.locate("read").unwrap();
    assert_eq!(register(&rig, 1, "read"), Err(PromotionAlreadyExists));
    assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 1);
    store(&rig, 1, "prefetched");
    assert_eq!(register(&rig, 1, "prefetched"), Ok(()));
    rig.locate("prefetched").unwrap();
    assert_eq!(rig.master.to_promote(client(1)).unwrap(), []);
}

/// A transfer that timed out is not reported. The reservation ends after a minute.
#[test]
fn a_reservation_that_is_never_used_ends_by_itself() {
    let rig = rig();
    store(&rig, 1, "k");
    register(&rig, 1, "k").unwrap();
    rig.alive_for(59.0);
    assert_eq!(register(&rig, 1, "k"), Err(PromotionAlreadyExists));
    rig.alive_for(2.0);
    assert_eq!(register(&rig, 1, "k"), Ok(()));
    rig.alive_for(61.0);
    // The heartbeat of the disk ends it as well.
    assert_eq!(rig.master.to_promote(client(1)).unwrap(), []);
    let disks = rig.master.stats().disks;
    assert_eq!((disks.promotions_in_flight, disks.promotions_expired), (0, 2));
    assert_eq!(start(&rig, 1, "k"), Err(ReplicaIsNotReady));
}

/// Reservation, space and object are free when the owner unmounts its disk, expires or is silent.
#[test]
fn a_reservation_ends_with_its_owner() {
    let without = |rig: &Rig, seconds: u64| {
        for _ in 0..seconds {
            rig.clock.advance(Duration::from_secs(1));
            let _ = rig.master.ping(client(1));
            rig.master.tick();
        }
    };
    for unmounts in [false, true] {
        let rig = rig();
        store(&rig, 2, "k");
        store(&rig, 2, "unused");
        register(&rig, 2, "k").unwrap();
        register(&rig, 2, "unused").unwrap();
        start(&rig, 2, "k").unwrap();
        if unmounts {
            rig.master.unmount_disk(client(2)).unwrap();
        } else {
            without(&rig, 11);
            assert_eq!(register(&rig, 2, "unused"), Err(UnavailableInCurrentStatus), "it is suspected");
            without(&rig, 5);
        }
        assert_eq!(register(&rig, 2, "unused"), Err(UnavailableInCurrentStatus));
        let disks = rig.master.stats().disks;
        assert_eq!((disks.promotions_in_flight, disks.promotions_cancelled), (0, 2), "{disks:?}");
        assert_eq!(rig.put(9, "k", 2 * LEN).map(|replicas| replicas.len()), Ok(1));
        let late = rig.master.promoted(client(2), b"k").map_err(|error| error.code());
        assert_eq!(late, Err(ReplicaIsNotReady));
        rig.master.remove_all(true);
        rig.alive_for(601.0);
        assert_eq!(rig.used(), 0);
    }
}
