//! Values in device memory, written and read by every call without a copy, and devices that fail.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::testkit::device::{TestDevice, TestDeviceMemory};
use mooncake_store::client::{
    Client, ClientBuilder, PutOptions, PutOutcome, RangeRead, RangeWrite, ReadInto,
};
use mooncake_store::master::MasterOptions;
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::{BorrowedMemory, Slice, SliceMut};

use crate::cluster::{Cluster, Kind, eventually, value};

const SEGMENT: u64 = 32 << 20;
/// Lengths of values: one byte, a part of a buffer, and more than a buffer.
const LENGTHS: [usize; 3] = [1, 5000, (5 << 20) + 3];

/// Returns a client with a long timeout: the devices of all tests share a slow thread.
fn patient(cluster: &Cluster) -> ClientBuilder {
    cluster.builder().timeout(Duration::from_secs(20))
}

/// Allocates device memory as a slice, with access to its bytes.
fn blank(
    client: &Client,
    device: &TestDevice,
    len: usize,
) -> (Arc<TestDeviceMemory>, SliceMut<TransportSet>) {
    let memory = Arc::new(device.memory(len).unwrap());
    (memory.clone(), client.memory().register(memory).unwrap().exclusive().unwrap())
}

fn filled(client: &Client, device: &TestDevice, bytes: &[u8]) -> Slice<TransportSet> {
    let (memory, slice) = blank(client, device, bytes.len());
    memory.fill(bytes);
    slice.into_shared()
}

async fn read(client: &Client, device: &TestDevice, key: &str, len: usize) -> Option<Vec<u8>> {
    let (memory, into) = blank(client, device, len + 1);
    let ReadInto { result: found, .. } = client.get_into(key, into).await;
    let found = found.unwrap()?;
    let mut bytes = memory.bytes();
    assert_eq!(bytes.split_off(found), vec![0; len + 1 - found], "nothing behind the value is touched");
    Some(bytes)
}

async fn writers_and_readers(cluster: &Cluster, builder: impl Fn() -> ClientBuilder) -> (Client, Client) {
    let builder = || builder().segment(SEGMENT).checksum(true);
    let pair = (builder().connect().await.unwrap(), builder().connect().await.unwrap());
    assert_eq!(cluster.master.stats().keys, 0);
    pair
}

async fn every_call(cluster: &Cluster, (a, b): (Client, Client)) {
    let (from, to) = (TestDevice::new(), TestDevice::new());
    let config = PutOptions::new().replicas(2);
    for len in LENGTHS {
        let (key, bytes, later) = (format!("one {len}"), value(1, len), value(2, len));
        let stored = a.put_with(&key, &filled(&a, &from, &bytes), &config).await.unwrap();
        assert_eq!(stored, PutOutcome::Stored);
        assert!(read(&b, &to, &key, len).await.unwrap() == bytes, "{len} bytes");
        assert!(b.get(&key).await.unwrap().unwrap() == bytes);
        a.put_with(&key, &filled(&a, &from, &later), &config.clone().upsert()).await.unwrap();
        assert!(read(&b, &to, &key, len).await.unwrap() == later);
        a.remove(&key, true).await.unwrap();
        assert!(read(&b, &to, &key, len).await.is_none());
    }
    // One batch has many values, some of them in host memory.
    let keys: Vec<String> = (0..20).map(|i| format!("many {i}")).collect();
    let values: Vec<Bytes> = (0..20).map(|i| value(i, 1 + 20_000 * i as usize)).collect();
    let slice = |(i, bytes): (usize, &Bytes)| match i % 3 {
        0 => {
            let mut host = a.memory().alloc(bytes.len()).unwrap().exclusive().unwrap();
            host.copy_from(0, bytes).unwrap();
            host.into_shared()
        }
        _ => filled(&a, &from, bytes),
    };
    let items: Vec<_> = keys.iter().zip(values.iter().enumerate().map(slice)).collect();
    a.batch_put(&items, &config).await.unwrap().into_iter().for_each(|one| _ = one.unwrap());
    a.batch_put(&items, &config.clone().upsert()).await.unwrap().into_iter().for_each(|one| _ = one.unwrap());
    let (looks, items): (Vec<_>, Vec<_>) = keys
        .iter()
        .zip(&values)
        .map(|(key, bytes)| {
            let (look, into) = blank(&b, &to, bytes.len());
            (look, (key, into))
        })
        .unzip();
    let batch = b.batch_get_into(items).await;
    batch.located.unwrap();
    for ((read, look), bytes) in batch.reads.into_iter().zip(looks).zip(&values) {
        assert_eq!(read.result.unwrap(), Some(bytes.len()));
        assert!(look.bytes() == *bytes);
    }
    in_pieces((&a, &from), (&b, &to)).await;
    assert!(from.copies() > 0 && to.copies() > 0);
    a.remove_all(true).await.unwrap();
    assert_eq!(cluster.master.stats().keys, 0);
}

/// Writes values of several buffers, and writes and reads values in parts.
async fn in_pieces((a, from): (&Client, &TestDevice), (b, to): (&Client, &TestDevice)) {
    let (whole, config) = (value(9, 3 << 20), ReplicateConfig::default());
    let cuts = [0..1, 1..100_000, 100_000..whole.len()];
    let pieces = cuts.map(|cut| filled(a, from, &whole[cut])).to_vec();
    a.batch_put(&[("pieces", pieces)], &PutOptions::default()).await.unwrap().remove(0).unwrap();
    assert!(b.get("pieces").await.unwrap().unwrap() == whole);
    let object =
        a.ranges().reserve(&[("parts", whole.len() as u64)], &config).await.unwrap().remove(0).unwrap();
    let write = |range: std::ops::Range<usize>| RangeWrite {
        object: &object,
        offset: range.start as u64,
        from: filled(a, from, &whole[range]),
    };
    let written = a.ranges().write(vec![write(2_000_000..whole.len()), write(0..2_000_000)]).await;
    assert!(written.iter().all(Result::is_ok), "{written:?}");
    a.ranges().commit(&[&object]).await.unwrap().remove(0).unwrap();
    let object = b.ranges().locate(&["parts"]).await.unwrap().remove(0).unwrap().unwrap();
    let ranges = [0..whole.len(), 5..6, 1_000_000..3_000_000];
    let (looks, reads): (Vec<_>, Vec<_>) = ranges
        .iter()
        .map(|range| {
            let (look, into) = blank(b, to, range.len());
            (look, RangeRead { object: object.clone(), offset: range.start as u64, into })
        })
        .unzip();
    for ((read, look), range) in b.ranges().read(reads).await.into_iter().zip(looks).zip(ranges) {
        read.result.unwrap();
        assert!(look.bytes() == whole[range]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_takes_device_memory() {
    for kind in [Kind::Embedded, Kind::Tcp, Kind::Shm] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let pair = writers_and_readers(&cluster, || patient(&cluster)).await;
        every_call(&cluster, pair).await;
    }
    // No byte leaves the process.
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let pair = writers_and_readers(&cluster, || patient(&cluster).copy_in_process(true)).await;
    every_call(&cluster, pair).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pointer_is_enough() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let (a, b) = (patient(&cluster).connect().await.unwrap(), patient(&cluster).connect().await.unwrap());
    let (device, bytes) = (TestDevice::new(), value(1, 100_000));
    let memory = device.memory(bytes.len()).unwrap();
    memory.fill(&bytes);
    // SAFETY: the borrow is dropped before the memory, which no other code touches.
    #[allow(unsafe_code)]
    let borrowed = unsafe { BorrowedMemory::new(memory.unlocated()) };
    let region = a.memory().register(Arc::new(borrowed)).unwrap();
    assert_eq!(region.span().location, device.location());
    a.put("k", &region.slice(0..bytes.len()).unwrap()).await.unwrap();
    assert_eq!(b.get("k").await.unwrap().unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_comes_back_to_a_device() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let (a, _b) = (patient(&cluster).connect().await.unwrap(), patient(&cluster).connect().await.unwrap());
    let reader = patient(&cluster).segment(0).hot_cache(8 << 20).connect().await.unwrap();
    let (device, bytes) = (TestDevice::new(), value(1, 1_500_000));
    a.put("k", &bytes[..]).await.unwrap();
    for _ in 0..2 {
        assert!(read(&reader, &device, "k", bytes.len()).await.unwrap() == bytes);
    }
    eventually("it is kept", async || reader.status().hot_cache().unwrap().fills == 1).await;
    assert!(read(&reader, &device, "k", bytes.len()).await.unwrap() == bytes);
    assert_eq!(reader.status().hot_cache().unwrap().hits, 1);
    // A read into a failing device fails, too.
    device.fail_copies(u64::MAX);
    let (_look, into) = blank(&reader, &device, bytes.len());
    assert!(!matches!(reader.get_into("k", into).await.result, Ok(Some(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_segment_may_lie_on_a_device() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let (owner, user) = (TestDevice::new(), TestDevice::new());
        let holds = patient(&cluster).segment(0).connect().await.unwrap();
        holds.segments().mount_memory(Arc::new(owner.memory(16 << 20).unwrap())).await.unwrap();
        let a = patient(&cluster).segment(0).checksum(true).connect().await.unwrap();
        for len in LENGTHS {
            let (key, bytes) = (format!("k{len}"), value(3, len));
            a.put(&key, &filled(&a, &user, &bytes)).await.unwrap();
            assert!(read(&a, &user, &key, len).await.unwrap() == bytes, "{kind:?}, {len} bytes");
            assert!(a.get(&key).await.unwrap().unwrap() == bytes);
        }
        // An owner with a failing device is a failing owner.
        owner.fail_copies(u64::MAX);
        assert!(a.put("lost", b"bytes").await.is_err());
        assert!(!matches!(a.get("k5000").await, Ok(Some(_))));
        owner.fail_copies(0);
        // The client avoids the owner for a moment.
        let again = async || {
            a.get("k5000").await.is_ok_and(|found| found.is_some_and(|found| found == value(3, 5000)))
        };
        eventually("what it holds is there again", again).await;
        a.put("lost", b"found").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_fails_costs_the_call_and_nothing_else() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        // Replaced values stay reserved for the time of a lease.
        let a = patient(&cluster).segment(8 * SEGMENT).connect().await.unwrap();
        let (device, config) = (TestDevice::new(), PutOptions::default());
        let bytes = value(4, (3 << 20) + 1);
        let source = filled(&a, &device, &bytes);
        device.fail_copies(u64::MAX);
        assert!(a.put_with("k", &source, &config).await.is_err());
        cluster.assert_empty();
        device.fail_copies(0);
        assert_eq!(a.put_with("k", &source, &config).await.unwrap(), PutOutcome::Stored);
        device.fail_copies(u64::MAX);
        assert!(a.put_with("k", &source, &config.clone().upsert()).await.is_err());
        let (_look, into) = blank(&a, &device, bytes.len());
        assert!(!matches!(a.get_into("k", into).await.result, Ok(Some(_))));
        device.fail_copies(0);
        assert!(read(&a, &device, "k", bytes.len()).await.unwrap() == bytes, "the old value is as it was");
        // The test reads some objects at random: a hit has the right value.
        let mut rng = Rng::seeded(5);
        let (mut good, mut bad) = (0, 0);
        for round in 0..40u64 {
            device.fail_copies(rng.below(12));
            let bytes = value(round, (2 << 20) + 7);
            let source = filled(&a, &device, &bytes);
            if a.put_with("often", &source, &config.clone().upsert()).await.is_err() {
                bad += 1;
                continue;
            }
            device.fail_copies(rng.below(12));
            let (look, into) = blank(&a, &device, bytes.len());
            match a.get_into("often", into).await.result {
                Ok(Some(len)) => {
                    good += 1;
                    assert!(len == bytes.len() && look.bytes() == bytes, "{kind:?}, round {round}");
                }
                _ => bad += 1,
            }
        }
        device.fail_copies(0);
        assert!(good > 0 && bad > 0, "{good} went well, {bad} did not");
    }
}

#[cfg(feature = "disk")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lies_on_a_disk_comes_to_a_device() {
    use crate::disk::{KEYS, SIZE, all_written, cluster, expected, fill, key, owner, replicas_of};
    let cluster = cluster(mooncake_store::master::DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (device, owner) = (TestDevice::new(), owner(&cluster, folder.path()).connect().await.unwrap());
    fill(&owner).await;
    all_written(&cluster).await;
    let mut from_disk = 0;
    for number in 0..KEYS {
        from_disk += u64::from(replicas_of(&cluster, &key(number)).0 == 0);
        let (look, into) = blank(&owner, &device, SIZE);
        // The only permitted failure is a read that exceeds its lease.
        if let Ok(found) = owner.get_into(key(number), into).await.result {
            assert_eq!(found, Some(SIZE));
            assert!(look.bytes() == expected(number), "{number}");
        }
    }
    assert!(from_disk > 0);
}
