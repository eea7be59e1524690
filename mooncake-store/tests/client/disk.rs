//! Objects on disks of clients.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::ReplicaLocation;
use mooncake_store::client::{Client, ClientBuilder, OffloadConfig, PutOptions};
use mooncake_store::master::{DiskOptions, MasterOptions, PromotionOptions};

use crate::cluster::{Cluster, Kind, eventually, value};

const KIB: usize = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const SIZE: usize = 256 * KIB;
/// Number of keys: twice as many as memory holds.
pub(crate) const KEYS: u64 = 64;

fn options(disks: DiskOptions) -> MasterOptions {
    MasterOptions { disks: Some(disks), lease_ttl: Duration::from_millis(500), ..MasterOptions::default() }
}

pub(crate) async fn cluster(disks: DiskOptions) -> Cluster {
    Cluster::start(Kind::Tcp, options(disks)).await
}

pub(crate) fn disk(path: &Path) -> OffloadConfig {
    let interval = Duration::from_millis(20);
    OffloadConfig { interval, buffer: 32 * MIB, capacity: 64 * MIB, ..OffloadConfig::new(path) }
}

pub(crate) fn owner(cluster: &Cluster, path: &Path) -> ClientBuilder {
    patient_builder(cluster).offload(disk(path))
}

/// Returns a client with long leases, so that objects are not evicted before the disk has written
/// them.
pub(crate) fn patient_builder(cluster: &Cluster) -> ClientBuilder {
    cluster.builder().timeout(Duration::from_secs(20)).space_timeout(Duration::from_secs(20))
}

/// Reads a value, again if the read was too slow for its lease.
pub(crate) async fn read(client: &Client, key: &str) -> Option<Bytes> {
    loop {
        match client.get(key).await {
            Err(error) if error.code() == ErrorCode::LeaseExpired => {}
            got => return got.unwrap(),
        }
    }
}

pub(crate) fn key(number: u64) -> String {
    format!("block/{number}")
}

pub(crate) fn expected(number: u64) -> Bytes {
    value(number, SIZE)
}

pub(crate) async fn fill(client: &Client) {
    for number in 0..KEYS {
        client.put(key(number), &expected(number)[..]).await.unwrap();
    }
}

/// Returns the numbers of replicas in memory and on disks.
pub(crate) fn replicas_of(cluster: &Cluster, key: &str) -> (usize, usize) {
    let replicas = cluster.master.peek(key.as_bytes()).unwrap_or_default();
    let disks = replicas.iter().filter(|r| matches!(r.location, ReplicaLocation::LocalDisk { .. })).count();
    (replicas.len() - disks, disks)
}

pub(crate) async fn all_written(cluster: &Cluster) {
    eventually("everything is on disk", async || (0..KEYS).all(|n| replicas_of(cluster, &key(n)).1 == 1))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_beyond_memory_come_back_from_disk() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    let other = patient_builder(&cluster).segment(0).connect().await.unwrap();
    fill(&other).await;
    all_written(&cluster).await;
    assert!((0..KEYS).any(|n| replicas_of(&cluster, &key(n)) == (0, 1)), "memory holds half of it");
    for client in [&other, &owner] {
        for number in 0..KEYS {
            let got = read(client, &key(number)).await;
            assert!(got.as_deref() == Some(&*expected(number)), "{number}");
        }
    }
    let keys: Vec<String> = (0..KEYS).map(key).collect();
    let all = other.batch_get(&keys).await.unwrap();
    for (number, got) in (0..KEYS).zip(all) {
        assert!(got.unwrap().as_deref() == Some(&*expected(number)), "{number}");
    }
    let report = owner.status().disk().unwrap();
    assert_eq!((report.offloaded, report.refused, report.unread), (KEYS, 0, 0), "{report:?}");
    assert!(report.read >= KEYS, "{report:?}");
    eventually("nothing stays lent", async || owner.status().disk().unwrap().lent_bytes == 0).await;
    owner.close().await.unwrap();
    assert_eq!(read(&other, &key(0)).await, None, "its disk is gone with it");
}

/// The owner of a disk reads what it writes there without a lease, which would keep the memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn puts_wait_for_disks_and_no_leases() {
    let lease_ttl = Duration::from_secs(300);
    let options = MasterOptions { lease_ttl, ..options(DiskOptions::default()) };
    let cluster = Cluster::start(Kind::Tcp, options).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    assert!(cluster.master.peek(key(KEYS - 1).as_bytes()).is_ok());
    assert_eq!(cluster.master.leased_for(key(KEYS - 1).as_bytes()), None, "nothing was read");
    for number in 0..KEYS {
        let got = read(&owner, &key(number)).await;
        assert!(got.as_deref() == Some(&*expected(number)), "{number}");
    }
    owner.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_an_owner_lends_at_a_time_is_read_in_parts() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let small = OffloadConfig { buffer: MIB, ..disk(folder.path()) };
    let owner = patient_builder(&cluster).offload(small).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let keys: Vec<String> = (0..KEYS).map(key).collect();
    for (number, got) in (0..KEYS).zip(owner.batch_get(&keys).await.unwrap()) {
        assert!(got.unwrap().as_deref() == Some(&*expected(number)), "{number}");
    }
    let all = (0..4).map(|n| owner.get(key(n))).collect::<Vec<_>>();
    assert!(futures::future::join_all(all).await.iter().all(|got| matches!(got, Ok(Some(_)))), "at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_outlives_its_owner_and_what_was_removed_does_not() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let other = patient_builder(&cluster).segment(0).connect().await.unwrap();
    let first = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&other).await;
    all_written(&cluster).await;
    other.remove(key(1), true).await.unwrap();
    other.put_with(key(2), &value(1000, SIZE)[..], &PutOptions::new().upsert()).await.unwrap();
    eventually("the new value is on disk", async || replicas_of(&cluster, &key(2)).1 == 1).await;
    eventually("the owner hears of it", async || first.status().disk().unwrap().store.objects == KEYS - 1)
        .await;
    first.close().await.unwrap();
    eventually("nothing is left", async || cluster.master.stats().keys == 0).await;
    let second = owner(&cluster, folder.path()).connect().await.unwrap();
    for number in 0..KEYS {
        let got = read(&other, &key(number)).await;
        let expected = match number {
            1 => None,
            2 => Some(value(1000, SIZE)),
            number => Some(expected(number)),
        };
        assert!(got == expected, "{number}");
    }
    second.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_found_by_a_new_owner_but_written_since_is_dropped() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let other = patient_builder(&cluster).connect().await.unwrap();
    let first = owner(&cluster, folder.path()).segment(0).connect().await;
    // A disk without memory beside it serves only after a restart.
    first.unwrap().close().await.unwrap();
    let first = owner(&cluster, folder.path()).connect().await.unwrap();
    let mine = PutOptions::new().prefer_segment(first.hostname());
    first.put_with("k", &value(1, SIZE)[..], &mine).await.unwrap();
    eventually("it is on disk", async || replicas_of(&cluster, "k").1 == 1).await;
    first.close().await.unwrap();
    other.put("k", &value(2, SIZE)[..]).await.unwrap();
    let second = owner(&cluster, folder.path()).connect().await.unwrap();
    eventually("the old value goes", async || second.status().disk().unwrap().store.objects == 0).await;
    assert!(read(&other, "k").await == Some(value(2, SIZE)));
    second.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_disk_loses_what_was_used_least_and_nothing_else() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let small = OffloadConfig { capacity: 4 * MIB, ..disk(folder.path()) };
    let owner = patient_builder(&cluster).offload(small).connect().await.unwrap();
    fill(&owner).await;
    eventually("the disk is full", async || owner.status().disk().unwrap().store.evicted > 0).await;
    eventually("the master knows what is gone", async || {
        let on_disk = (0..KEYS).filter(|n| replicas_of(&cluster, &key(*n)).1 == 1).count() as u64;
        let report = owner.status().disk().unwrap();
        report.offloaded + report.refused >= KEYS && on_disk == report.store.objects
    })
    .await;
    let mut there = 0;
    for number in 0..KEYS {
        let got = read(&owner, &key(number)).await;
        there += usize::from(got.is_some());
        assert!(got.is_none_or(|got| got == expected(number)), "{number}");
    }
    assert!((16..=48).contains(&there), "memory holds up to 32, and the disk up to 16 more: {there}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_record_is_a_miss_and_no_replica_any_more() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let damaged = (0..KEYS).find(|n| replicas_of(&cluster, &key(*n)) == (0, 1)).unwrap();
    // Damages every record of the file in the middle of its value.
    let path = folder.path().join("objects");
    let mut bytes = std::fs::read(&path).unwrap();
    let needle = &expected(damaged)[100_000..100_064];
    let at = bytes.windows(64).position(|window| window == needle).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let keys = [key(damaged), key(KEYS - 1)];
    let got: Vec<_> = owner.batch_get(&keys).await.unwrap().into_iter().map(Result::unwrap).collect();
    assert_eq!(got[0], None);
    assert!(got[1] == Some(expected(KEYS - 1)), "one that is whole is read beside it");
    eventually("the master hears of it", async || replicas_of(&cluster, &key(damaged)) == (0, 0)).await;
    assert_eq!(owner.status().disk().unwrap().store.corrupt, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_the_cluster_does_not_know_reads_what_all_do() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).tenant("blue").connect().await.unwrap();
    let other = patient_builder(&cluster).segment(0).tenant("green").connect().await.unwrap();
    fill(&other).await;
    all_written(&cluster).await;
    let there = (0..KEYS).find(|n| replicas_of(&cluster, &key(*n)) == (0, 1)).unwrap();
    for client in [&other, &owner] {
        assert!(read(client, &key(there)).await == Some(expected(there)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_is_emptied_with_the_cluster() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    owner.remove_all(true).await.unwrap();
    eventually("it is empty", async || owner.status().disk().unwrap().store.objects == 0).await;
    assert_eq!(read(&owner, &key(0)).await, None);
    owner.put("after", &value(1, SIZE)[..]).await.unwrap();
    assert!(read(&owner, "after").await == Some(value(1, SIZE)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_read_often_comes_back_to_memory() {
    let promotion = Some(PromotionOptions { per_heartbeat: 4, ..PromotionOptions::default() });
    let cluster = cluster(DiskOptions { promotion, ..DiskOptions::default() }).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let often = (0..KEYS).find(|n| replicas_of(&cluster, &key(*n)) == (0, 1)).unwrap();
    // Removals free memory down to below the watermark.
    let in_memory = (0..KEYS).filter(|n| replicas_of(&cluster, &key(*n)).0 == 1).take(16);
    for number in in_memory {
        owner.remove(key(number), true).await.unwrap();
    }
    eventually("it is back", async || {
        assert!(read(&owner, &key(often)).await == Some(expected(often)));
        replicas_of(&cluster, &key(often)) == (1, 1)
    })
    .await;
    // The master lists the replica before its owner has the response.
    eventually("it is counted", async || owner.status().disk().unwrap().promoted >= 1).await;
    let before = owner.status().disk().unwrap().read;
    assert!(read(&owner, &key(often)).await == Some(expected(often)));
    assert_eq!(owner.status().disk().unwrap().read, before, "from memory");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_memory_takes_back_an_object_of_more_value() {
    let promotion = Some(PromotionOptions::default());
    let disks = options(DiskOptions { promotion, ..DiskOptions::default() });
    let options = MasterOptions { high_watermark: 1.0, ..disks };
    let cluster = Cluster::with_policy(PolicyKind::Gittins, options).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let in_memory = || (0..KEYS).filter(|n| replicas_of(&cluster, &key(*n)).0 == 1);
    let (often, other) = ((0..KEYS).find(|n| replicas_of(&cluster, &key(*n)) == (0, 1)), in_memory().next());
    let (often, other, held) = (often.unwrap(), other.unwrap(), in_memory().count());
    // The objects in memory become old.
    for _ in 0..200 {
        assert!(read(&owner, &key(other)).await == Some(expected(other)));
    }
    eventually("it is back", async || {
        assert!(read(&owner, &key(often)).await == Some(expected(often)));
        replicas_of(&cluster, &key(often)) == (1, 1)
    })
    .await;
    assert_eq!(in_memory().count(), held, "one object has gone for it");
    assert!(replicas_of(&cluster, &key(other)).0 == 1, "and not the one that is used");
    for number in 0..KEYS {
        assert!(read(&owner, &key(number)).await == Some(expected(number)));
    }
}

/// Returns the numbers of the keys of the test that a client reads with their values.
async fn found(client: &Client) -> Vec<u64> {
    let mut found = Vec::new();
    for number in 0..KEYS {
        if let Some(got) = read(client, &key(number)).await {
            assert!(got == expected(number), "{number}");
            found.push(number);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_are_given_one_folder_each_have_a_disk_there() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let reader = patient_builder(&cluster).segment(0).connect().await.unwrap();
    let mut owners = Vec::new();
    for _ in 0..3 {
        owners.push(owner(&cluster, folder.path()).segment(4 * MIB).connect().await.unwrap());
    }
    fill(&reader).await;
    all_written(&cluster).await;
    let counts = |owners: &[Client]| -> Vec<u64> {
        owners.iter().map(|owner| owner.status().disk().unwrap().store.objects).collect()
    };
    let mut before = counts(&owners);
    assert!(before.iter().all(|n| *n > 0) && before.iter().sum::<u64>() == KEYS, "{before:?}");
    assert_eq!(found(&reader).await.len() as u64, KEYS);
    // Only the folders of the two others are below that of the first.
    let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["index", "lock", "objects", "worker-1", "worker-2"]);
    // The next three take over the disks, whichever of them takes which.
    for owner in owners.drain(..).rev() {
        owner.close().await.unwrap();
    }
    eventually("nothing is left", async || cluster.master.stats().keys == 0).await;
    for _ in 0..3 {
        owners.push(owner(&cluster, folder.path()).segment(4 * MIB).connect().await.unwrap());
    }
    let mut after = counts(&owners);
    before.sort_unstable();
    after.sort_unstable();
    assert_eq!(after, before);
    assert_eq!(found(&reader).await.len() as u64, KEYS);
    // A folder that one client leaves is free for the next.
    let first = owners.remove(0);
    let count = first.status().disk().unwrap().store.objects;
    first.close().await.unwrap();
    let next = owner(&cluster, folder.path()).segment(0).connect().await.unwrap();
    assert_eq!(next.status().disk().unwrap().store.objects, count);
    assert_eq!(found(&reader).await.len() as u64, KEYS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_cannot_be_used_is_refused_by_name() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = owner(&cluster, &file).connect().await.unwrap_err();
    assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
    let error = patient_builder(&cluster).offload(OffloadConfig::new("")).connect().await.unwrap_err();
    assert!(error.to_string().contains("path is empty"), "{error}");
    let without = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let elsewhere = tempfile::tempdir().unwrap();
    let error = owner(&without, elsewhere.path()).connect().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnableOffload);
    assert!(error.to_string().contains("--enable_offload"), "{error}");
}
