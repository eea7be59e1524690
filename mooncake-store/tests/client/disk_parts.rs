//! Parts of objects that are on disks only.

use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::replica::{Replica, ReplicaLocation};
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{Client, Located, OffloadConfig, RangeOutcome, RangeRead};
use mooncake_store::master::{DiskOptions, MasterOptions};
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::message::{LendRanges, Request, ReturnObjects, VerifyReplicas};
use mooncake_store::protocol::pack::Unpack;
use mooncake_store::protocol::server::{RunningServer, Server, ServerOptions};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, VerifiedReplicas};
use parking_lot::Mutex;

use crate::cluster::{Cluster, Kind, eventually, value};
use crate::common::fake_disk::FakeDisk;
use crate::disk::{
    KEYS, MIB, SIZE, all_written, cluster, disk, expected, fill, key, owner, patient_builder, replicas_of,
};

async fn find(client: &Client, key: &str) -> Option<Located> {
    client.ranges().locate(&[key]).await.unwrap().remove(0).unwrap()
}

/// Reads ranges of located objects, and returns each outcome.
async fn parts(client: &Client, reads: &[(&Located, u64, usize)]) -> Vec<Result<Vec<u8>>> {
    let ranges = reads.iter().map(|&(object, offset, len)| RangeRead {
        object: object.clone(),
        offset,
        into: client.memory().alloc(len).unwrap().exclusive().unwrap(),
    });
    let bytes = |RangeOutcome { result, into }: RangeOutcome<_>| {
        result?;
        let mut bytes = vec![0; into.len()];
        into.copy_to(0, &mut bytes)?;
        Ok(bytes)
    };
    client.ranges().read(ranges.collect()).await.into_iter().map(bytes).collect()
}

async fn part(client: &Client, object: &Located, offset: u64, len: usize) -> Result<Vec<u8>> {
    parts(client, &[(object, offset, len)]).await.remove(0)
}

/// Reads ranges of objects by their keys, again if a read was too slow for its lease.
async fn of_keys(client: &Client, reads: &[(String, u64, usize)]) -> Vec<Vec<u8>> {
    loop {
        let mut located = Vec::new();
        for (key, ..) in reads {
            located.push(find(client, key).await.expect("it is there"));
        }
        let ranges: Vec<_> = reads.iter().zip(&located).map(|((_, at, len), o)| (o, *at, *len)).collect();
        let read = parts(client, &ranges).await;
        let late = |outcome: &Result<_>| {
            outcome.as_ref().is_err_and(|error| error.code() == ErrorCode::LeaseExpired)
        };
        if !read.iter().any(late) {
            return read.into_iter().map(Result::unwrap).collect();
        }
    }
}

fn on_disk_only(cluster: &Cluster) -> Vec<u64> {
    (0..KEYS).filter(|n| replicas_of(cluster, &key(*n)) == (0, 1)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_what_is_on_disk_only_the_range_is_read() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    let other = patient_builder(&cluster).segment(0).connect().await.unwrap();
    fill(&other).await;
    all_written(&cluster).await;
    let there = on_disk_only(&cluster);
    let before = owner.status().disk().unwrap();
    let read = of_keys(&other, &[(key(there[0]), 100_000, 1000)]).await;
    assert!(read[0] == expected(there[0])[100_000..101_000]);
    let after = owner.status().disk().unwrap();
    let (times, bytes) = (after.read - before.read, after.read_bytes - before.read_bytes);
    assert_eq!(bytes, 1000 * times, "nothing else is lent");
    assert_eq!(after.store.disk.read_bytes - before.store.disk.read_bytes, times * (64 << 10), "one chunk");

    let mut rng = Rng::seeded(11);
    for client in [&other, &owner] {
        let mut reads = vec![(key(there[0]), 0, SIZE), (key(there[1]), 65_535, 2), (key(there[1]), 0, SIZE)];
        for _ in 0..60 {
            let from = rng.below(SIZE as u64);
            let len = 1 + rng.below((SIZE as u64 - from).min(100_000)) as usize;
            reads.push((key(rng.below(KEYS)), from, len));
        }
        let read = of_keys(client, &reads).await;
        for ((name, from, len), got) in reads.iter().zip(read) {
            let number: u64 = name.strip_prefix("block/").unwrap().parse().unwrap();
            let from = *from as usize;
            assert!(got == expected(number)[from..from + len], "{name} {from} {len}");
        }
    }
    let object = find(&other, &key(there[2])).await.unwrap();
    owner.close().await.unwrap();
    let lost = part(&other, &object, 0, 10).await.unwrap_err();
    assert_ne!(lost.code(), ErrorCode::InvalidReplica, "{lost}");
    assert!(find(&other, &key(there[2])).await.is_none(), "its disk is gone with it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_an_owner_lends_at_a_time_is_read_in_pieces() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let small = OffloadConfig { buffer: MIB, ..disk(folder.path()) };
    let owner = patient_builder(&cluster).offload(small).connect().await.unwrap();
    let long = value(99, 4 << 20);
    owner.put("long", &long[..]).await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    assert_eq!(replicas_of(&cluster, "long"), (0, 1));
    // Adjacent parts are one piece, which is too long for the memory of the owner.
    let reads: Vec<_> = (0..8).map(|n| ("long".to_string(), n * (512 << 10), 512 << 10)).collect();
    assert!(of_keys(&owner, &reads).await.concat() == long);
}

/// Cluster in which "k" is on the fake disk, and two values like it are in memory.
struct Stage {
    cluster: Cluster,
    client: Client,
    fake: Arc<FakeDisk>,
    values: [Bytes; 2],
    addresses: [u64; 2],
    endpoint: String,
    _server: RunningServer,
}

const FAKE: ClientId = ClientId(Uuid { first: 7, second: 7 });

impl Stage {
    async fn new(parts: bool) -> Self {
        Self::with(parts, false).await
    }

    /// Starts a cluster whose owner of a disk lends parts of values, or ranges.
    async fn with(parts: bool, ranges: bool) -> Self {
        let options = MasterOptions {
            disks: Some(DiskOptions::default()),
            lease_ttl: Duration::from_secs(60),
            client_ttl: Duration::from_secs(600),
            ..MasterOptions::default()
        };
        let cluster = Cluster::start(Kind::Tcp, options).await;
        let client = patient_builder(&cluster).connect().await.unwrap();
        let values = [value(1, SIZE), value(2, SIZE)];
        let mut addresses = [0; 2];
        let mut memory = String::new();
        for (i, value) in values.iter().enumerate() {
            let name = format!("value {i}");
            client.put(&name, &value[..]).await.unwrap();
            let replica = cluster.master.peek(name.as_bytes()).unwrap().remove(0);
            let at = replica.location.memory().unwrap();
            (addresses[i], memory) = (at.address, at.endpoint.clone());
        }
        let value = Mutex::new((addresses[0], 1, 60_000));
        let fake = Arc::new(FakeDisk { value, memory, parts, ranges, asked: Mutex::default() });
        let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
        let endpoint = server.local_addr().to_string();
        let _server = server.start(fake.clone());
        cluster.master.mount_disk(FAKE, true).unwrap();
        let stage = Self { cluster, client, fake, values, addresses, endpoint, _server };
        stage.announce();
        stage
    }

    fn announce(&self) {
        let item = OffloadItem { tenant: "default".into(), key: b"k".to_vec(), size: SIZE as i64 };
        let endpoint = self.endpoint.clone();
        let place = StoredAt { bucket: 0, offset: 0, key_size: 1, data_size: SIZE as i64, endpoint };
        self.cluster.master.offloaded(FAKE, &[item], &[place]).unwrap();
    }

    /// Gives the disk this value.
    fn holds(&self, value: usize, ttl_ms: u64) {
        *self.fake.value.lock() = (self.addresses[value], value as u64 + 1, ttl_ms);
    }

    fn is(&self, value: usize, got: &[u8], from: usize) -> bool {
        got == &self.values[value][from..from + got.len()]
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_are_of_one_value_whatever_the_disk_has_by_then() {
    let stage = Stage::new(true).await;
    let object = find(&stage.client, "k").await.unwrap();
    assert!(stage.is(0, &part(&stage.client, &object, 5, 100).await.unwrap(), 5));
    stage.holds(1, 60_000);
    let other = part(&stage.client, &object, 105, 100).await.unwrap_err();
    assert_eq!(other.code(), ErrorCode::LeaseExpired);
    // Another lookup finds that value.
    let again = find(&stage.client, "k").await.unwrap();
    assert!(stage.is(1, &part(&stage.client, &again, 105, 100).await.unwrap(), 105));
    stage.holds(0, 60_000);
    assert!(stage.is(0, &part(&stage.client, &object, 105, 100).await.unwrap(), 105));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_come_after_the_end_of_a_loan_do_not_count() {
    for parts in [true, false] {
        let stage = Stage::new(parts).await;
        stage.holds(0, 0);
        let object = find(&stage.client, "k").await.unwrap();
        let late = part(&stage.client, &object, 0, 100).await.unwrap_err();
        assert_eq!(late.code(), ErrorCode::LeaseExpired);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_lends_whole_objects_only_is_asked_for_these() {
    let stage = Stage::new(false).await;
    let client = &stage.client;
    let object = find(client, "k").await.unwrap();
    let read = parts(client, &[(&object, 0, 10), (&object, 200_000, 1000), (&object, 100_000, 70_000)]).await;
    for (got, from) in read.iter().zip([0, 200_000, 100_000]) {
        assert!(stage.is(0, got.as_ref().unwrap(), from));
    }
    assert_eq!(*stage.fake.asked.lock(), [1], "once");
    // The disk does not report the version of its value, so the client asks the master whether the
    // located object still exists.
    stage.cluster.master.unmount_disk(FAKE).unwrap();
    stage.cluster.master.mount_disk(FAKE, true).unwrap();
    stage.announce();
    stage.holds(1, 60_000);
    let other = part(client, &object, 10, 10).await.unwrap_err();
    assert_eq!(other.code(), ErrorCode::LeaseExpired);
    let again = find(client, "k").await.unwrap();
    assert!(stage.is(1, &part(client, &again, 10, 10).await.unwrap(), 10));
}

/// An owner of Mooncake C++ 0.3.14 lends ranges, and no whole objects for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_lends_ranges_is_asked_for_these() {
    let stage = Stage::with(false, true).await;
    let object = find(&stage.client, "k").await.unwrap();
    for (from, len) in [(5, 100), (200_000, 1000)] {
        let read = part(&stage.client, &object, from as u64, len).await.unwrap();
        assert!(stage.is(0, &read, from));
    }
    // The fake adds the offset of a range to the address that it lends.
    stage.holds(1, 60_000);
    let other = part(&stage.client, &object, 300, 10).await.unwrap();
    assert!(stage.is(1, &other, 300), "an owner without versions is believed");
    assert_eq!(*stage.fake.asked.lock(), [1, 1, 1]);
}

/// Asks the owner of a disk as a client of Mooncake C++ 0.3.14 does.
async fn call<R: Request + Sync>(endpoint: &str, request: R) -> R::Reply
where
    R::Reply: for<'a> Unpack<'a>,
{
    RpcClient::new(endpoint, RpcOptions::default()).call(&request).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_lends_ranges_and_verifies_replicas() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, folder.path()).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let on_disk = |key: &str| {
        let replicas = cluster.master.peek(key.as_bytes()).unwrap();
        let place = |replica: Replica| match replica.location {
            ReplicaLocation::LocalDisk { endpoint, .. } => Some((endpoint, replica.id)),
            _ => None,
        };
        replicas.into_iter().find_map(place).unwrap()
    };
    let (endpoint, id) = on_disk(&key(0));
    let scoped = [b"default\0", key(0).as_bytes()].concat();
    let keys = [&scoped[..], &scoped[..]];
    let size = SIZE as i64;
    let lend = |offsets: [i64; 2], lengths: [i64; 2], sizes: [i64; 2]| LendRanges {
        keys: keys[..].into(),
        offsets: offsets.to_vec().into(),
        lengths: lengths.to_vec().into(),
        sizes: sizes.to_vec().into(),
    };
    let loan = call(&endpoint, lend([0, 100_000], [10, 70_000], [size; 2])).await.unwrap();
    assert_eq!((loan.addresses.len(), loan.endpoint.is_empty()), (2, false));
    assert!(call(&endpoint, ReturnObjects { batch: loan.batch }).await);
    for (offsets, lengths, sizes) in [
        ([0, -1], [1, 1], [size; 2]),
        ([0, 0], [1, 0], [size; 2]),
        ([0, 0], [1, -1], [size; 2]),
        ([0, size], [1, 1], [size; 2]),
        ([0, i64::MAX], [1, i64::MAX], [size; 2]),
        ([0, 0], [1, 1], [size, -1]),
        ([0, 0], [1, 1], [size, size + 1]),
    ] {
        let refused = call(&endpoint, lend(offsets, lengths, sizes)).await;
        assert_eq!(refused.unwrap_err(), ErrorCode::InvalidParams, "{offsets:?} {lengths:?} {sizes:?}");
    }

    // The master lists an object that is not on the disk.
    let item = OffloadItem { tenant: "default".into(), key: b"ghost".to_vec(), size };
    let place = StoredAt { bucket: 0, offset: 0, key_size: 5, data_size: size, endpoint: endpoint.clone() };
    let list = || {
        eventually("the replica is listed", async || {
            cluster.master.mount_disk(owner.id(), true).unwrap();
            let _ = cluster.master.offloaded(owner.id(), from_ref(&item), from_ref(&place));
            replicas_of(&cluster, "ghost") == (0, 1)
        })
    };
    list().await;
    let (_, ghost) = on_disk("ghost");
    let block = key(0);
    let names = [block.as_bytes(), b"ghost"];
    let verify = |replica_ids: Option<Vec<u64>>| VerifyReplicas {
        tenant: "none",
        keys: names[..].into(),
        resolved_tenant: Some("default".into()),
        replica_ids,
    };
    let states = async |ids| call(&endpoint, verify(ids)).await.map(|all| all.states);
    let (present, gone, unknown) =
        (VerifiedReplicas::PRESENT, VerifiedReplicas::MISSING, VerifiedReplicas::UNKNOWN);
    assert_eq!(states(None).await, Ok(vec![present, unknown]), "without a number nothing is dropped");
    assert_eq!(states(Some(vec![1])).await, Err(ErrorCode::InvalidParams));
    assert_eq!(replicas_of(&cluster, "ghost"), (0, 1));
    assert_eq!(states(Some(vec![id.0, ghost.0])).await, Ok(vec![present, gone]));
    assert_eq!(replicas_of(&cluster, "ghost"), (0, 0));
    assert_eq!(states(Some(vec![id.0, ghost.0])).await, Ok(vec![present, gone]), "asked again");

    // A reader that is lent nothing lets the owner verify the replica.
    list().await;
    let other = patient_builder(&cluster).segment(0).connect().await.unwrap();
    let _ = other.get("ghost").await;
    eventually("the replica is dropped", async || replicas_of(&cluster, "ghost") == (0, 0)).await;
    list().await;
    let object = find(&other, "ghost").await.unwrap();
    part(&other, &object, 0, 10).await.unwrap_err();
    eventually("the replica is dropped", async || replicas_of(&cluster, "ghost") == (0, 0)).await;
}

#[cfg(feature = "local")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_clients_read_objects_on_disks() {
    use mooncake_store::local::{
        LocalClient, LocalConfig, LocalRange, LocalRead, LocalServer, LocalServerConfig,
    };
    use mooncake_transport::{Loopback, Region};

    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let owner = owner(&cluster, &folder.path().join("disk")).connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(owner.clone(), config).unwrap();
    let config = LocalConfig { buffer: 4 << 20, ..LocalConfig::at(path.to_str().unwrap()) };
    let light = LocalClient::connect(config).await.unwrap();
    let there = on_disk_only(&cluster);
    let late = |code| code == ErrorCode::LeaseExpired;
    let value = async |number| {
        loop {
            match light.get(key(number)).await {
                Err(error) if late(error.code()) => {}
                got => return got.unwrap(),
            }
        }
    };
    for number in there.iter().take(4) {
        assert!(value(*number).await == Some(expected(*number)), "{number}");
    }
    let keys: Vec<String> = there.iter().take(4).map(|number| key(*number)).collect();
    for (number, got) in there.iter().zip(light.batch_get(&keys).await.unwrap()) {
        assert!(
            got.is_err_and(|error| late(error.code())) || value(*number).await == Some(expected(*number))
        );
    }
    loop {
        let object = light.locate(&keys[..1]).await.unwrap().remove(0).unwrap().unwrap();
        let region: Region<Loopback> = light.alloc_registered(1 << 16).await.unwrap();
        let into = region.exclusive().unwrap();
        let LocalRead { result: outcome, into: slice } =
            light.read_ranges(vec![LocalRange { object, offset: 70_000, into }]).await.remove(0);
        match outcome {
            Err(error) if late(error.code()) => {}
            outcome => {
                outcome.unwrap();
                let mut got = vec![0; 1 << 16];
                slice.unwrap().copy_to(0, &mut got).unwrap();
                assert!(got == expected(there[0])[70_000..70_000 + (1 << 16)]);
                break;
            }
        }
    }
    drop(light);
    server.stop().await;
}

#[cfg(feature = "local")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn to_a_shared_client_a_lost_disk_is_a_miss() {
    use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig};

    let Stage { client, values, _server, cluster, .. } = Stage::new(true).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(client.clone(), config).unwrap();
    let config = LocalConfig { buffer: 4 << 20, ..LocalConfig::at(path.to_str().unwrap()) };
    let light = LocalClient::connect(config).await.unwrap();
    _server.stop().await;
    assert_eq!(replicas_of(&cluster, "k"), (0, 1), "the master does not know");
    let got: Vec<_> =
        light.batch_get(&["k", "value 1"]).await.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(got[0].is_none() && got[1].as_deref() == Some(&*values[1]));
    assert!(light.get("k").await.unwrap().is_none());
    drop(light);
    server.stop().await;
}
