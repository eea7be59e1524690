//! Combinations of limits: every value that a disk has accepted can be read, whichever buffer on
//! the way is smaller than the value.

use bytes::Bytes;
use mooncake_core::ErrorCode;
use mooncake_core::testkit::effort;
use mooncake_store::client::{Client, ClientBuilder, OffloadConfig, RangeOutcome, RangeRead};
#[cfg(feature = "local")]
use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig};
use mooncake_store::master::DiskOptions;

use crate::cluster::{Cluster, eventually, value};
use crate::disk::{MIB, cluster, disk, patient_builder, replicas_of};

const KIB: u64 = 1 << 10;
/// Lengths of the values: around the sizes of the buffers below, of blocks, and of chunks.
const LENGTHS: [usize; 10] =
    [1, 4095, 65_536, 65_537, 262_143, 262_144, 300_000, 1_048_576, 1_500_001, 3_000_000];
/// Sizes of the buffer through which a disk is read.
const DISK_BUFFERS: [u64; 4] = [64 * KIB, 100_000, 256 * KIB, 8 * MIB];
/// Sizes of the local buffer of readers.
const LOCAL_BUFFERS: [u64; 3] = [KIB, 64 * KIB, 8 * MIB];

fn keys() -> Vec<String> {
    (0..LENGTHS.len()).map(|n| format!("length/{n}")).collect()
}

fn expected(n: usize) -> Bytes {
    value(n as u64, LENGTHS[n])
}

fn with_disk(builder: ClientBuilder, folder: &std::path::Path, buffer: u64) -> ClientBuilder {
    builder.offload(OffloadConfig { buffer, ..disk(folder) })
}

/// Repeats a read that was too slow for its lease.
async fn in_time<R>(mut read: impl AsyncFnMut() -> mooncake_core::Result<R>) -> R {
    loop {
        match read().await {
            Err(error) if error.code() == ErrorCode::LeaseExpired => {}
            outcome => return outcome.unwrap(),
        }
    }
}

/// Checks every way of reading.
async fn check(client: &Client, what: &str) {
    let keys = keys();
    for (n, key) in keys.iter().enumerate() {
        let got = in_time(async || client.get(key).await).await;
        assert!(got.as_deref() == Some(&*expected(n)), "{what}: get of {} bytes", LENGTHS[n]);
        let got = in_time(async || {
            let into = client.memory().alloc(LENGTHS[n])?.exclusive().unwrap();
            let read = client.get_into(key, into).await;
            let mut bytes = vec![0; LENGTHS[n]];
            assert_eq!(read.result?, Some(LENGTHS[n]));
            read.into.copy_to(0, &mut bytes)?;
            Ok(bytes)
        });
        assert!(got.await == expected(n), "{what}: get into memory of {} bytes", LENGTHS[n]);
    }
    for (n, got) in client.batch_get(&keys).await.unwrap().into_iter().enumerate() {
        let got = match got {
            Err(error) if error.code() == ErrorCode::LeaseExpired => continue,
            got => got.unwrap(),
        };
        assert!(got.as_deref() == Some(&*expected(n)), "{what}: batch with {} bytes", LENGTHS[n]);
    }
    check_ranges(client, &keys, what).await;
}

/// Reads each value whole, and in two unequal ranges, all with one call.
async fn check_ranges(client: &Client, keys: &[String], what: &str) {
    let read = in_time(async || {
        let located = client.ranges().locate(keys).await?;
        let (mut ranges, mut parts) = (Vec::new(), Vec::new());
        for (n, object) in located.into_iter().enumerate() {
            let object = object?.expect("it is there");
            let len = LENGTHS[n];
            for (from, to) in [(0, len), (0, len / 3), (len / 3, len)].into_iter().filter(|(a, b)| a < b) {
                let into = client.memory().alloc(to - from)?.exclusive().unwrap();
                ranges.push(RangeRead { object: object.clone(), offset: from as u64, into });
                parts.push((n, from, to));
            }
        }
        let outcomes = client.ranges().read(ranges).await;
        let read = parts.into_iter().zip(outcomes).map(|(part, RangeOutcome { result, into })| {
            result?;
            let mut bytes = vec![0; into.len()];
            into.copy_to(0, &mut bytes)?;
            Ok((part, bytes))
        });
        read.collect::<mooncake_core::Result<Vec<_>>>()
    });
    for ((n, from, to), bytes) in read.await {
        assert!(bytes == expected(n)[from..to], "{what}: bytes {from} to {to} of {}", LENGTHS[n]);
    }
}

/// Stores the values, and waits until they are on the disk only.
async fn store(cluster: &Cluster, owner: &Client) {
    for (n, key) in keys().iter().enumerate() {
        owner.put(key, &expected(n)[..]).await.unwrap();
    }
    eventually("everything is on disk", async || keys().iter().all(|key| replicas_of(cluster, key).1 == 1))
        .await;
    for id in owner.segments().ids() {
        owner.segments().unmount(id).await.unwrap();
    }
    assert!(keys().iter().all(|key| replicas_of(cluster, key) == (0, 1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_value_on_a_disk_is_read_through_any_buffers() {
    for disk_buffer in DISK_BUFFERS.into_iter().take(effort(2, DISK_BUFFERS.len())) {
        let cluster = cluster(DiskOptions::default()).await;
        let folder = tempfile::tempdir().unwrap();
        let owner = with_disk(patient_builder(&cluster), folder.path(), disk_buffer);
        let owner = owner.segment(16 * MIB).connect().await.unwrap();
        store(&cluster, &owner).await;
        check(&owner, &format!("its owner, buffer of {disk_buffer}")).await;
        for local_buffer in LOCAL_BUFFERS.into_iter().take(effort(2, LOCAL_BUFFERS.len())) {
            let what = format!("disk buffer {disk_buffer}, local buffer {local_buffer}");
            let reader = || patient_builder(&cluster).segment(0).local_buffer(local_buffer);
            let other_folder = tempfile::tempdir().unwrap();
            let with_own = with_disk(reader(), other_folder.path(), 64 * KIB).connect().await.unwrap();
            let reader = reader().connect().await.unwrap();
            check(&reader, &what).await;
            check(&with_own, &format!("{what}, own disk")).await;
            with_own.close().await.unwrap();
            reader.close().await.unwrap();
        }
        #[cfg(feature = "local")]
        check_shared(&cluster, disk_buffer).await;
        let report = owner.status().disk().unwrap();
        assert_eq!(report.store.unreadable + report.store.corrupt, 0, "{report:?}");
        eventually("nothing stays lent", async || owner.status().disk().unwrap().lent_bytes == 0).await;
        // The next owner has the smallest buffer.
        owner.close().await.unwrap();
        eventually("nothing is left", async || cluster.master.stats().keys == 0).await;
        let next = with_disk(patient_builder(&cluster), folder.path(), 64 * KIB);
        let next = next.segment(0).local_buffer(KIB).connect().await.unwrap();
        check(&next, &format!("after a restart with less than {disk_buffer}")).await;
        let reader = patient_builder(&cluster).segment(0).connect().await.unwrap();
        check(&reader, "another client after a restart").await;
    }
}

/// Reads through a daemon whose clients may share little memory.
#[cfg(feature = "local")]
async fn check_shared(cluster: &Cluster, disk_buffer: u64) {
    let daemon = patient_builder(cluster).segment(0).local_buffer(64 * KIB).connect().await.unwrap();
    for (buffer, max_memory) in
        [(16 * KIB, 1 << 40), (4 * MIB, 1 << 40), (64 * KIB, 8 * MIB), (64 * KIB, 2 * MIB)]
    {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("owner.sock");
        let config = LocalServerConfig { path, max_memory, ..LocalServerConfig::default() };
        let server = LocalServer::start(daemon.clone(), config).unwrap();
        let at = server.path().to_str().unwrap();
        let shared = LocalClient::connect(LocalConfig { buffer, ..LocalConfig::at(at) }).await.unwrap();
        let what = format!("disk buffer {disk_buffer}, shared buffer {buffer} of {max_memory}");
        for (n, key) in keys().iter().enumerate() {
            let got = in_time(async || shared.get(key).await).await;
            assert!(got.as_deref() == Some(&*expected(n)), "{what}: get of {} bytes", LENGTHS[n]);
        }
        for (n, got) in shared.batch_get(&keys()).await.unwrap().into_iter().enumerate() {
            let got = match got {
                Err(error) if error.code() == ErrorCode::LeaseExpired => continue,
                got => got.unwrap(),
            };
            assert!(got.as_deref() == Some(&*expected(n)), "{what}: batch with {} bytes", LENGTHS[n]);
        }
    }
    daemon.close().await.unwrap();
}
