//! Values that are replaced while clients read them.

use std::time::Duration;

use mooncake_core::replica::ReplicaLocation;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::client::{Client, Located, PutOptions, RangeOutcome, RangeRead};
use tokio::task::spawn_blocking;

use crate::cluster::{PATIENCE, builder, eventually, master, start, start_client, tagged, version_of};
use crate::process::{Process, deadline, free_port};
use crate::worker::Worker;

const LEN: usize = 1 << 20;

/// Starts a master, a client with space for this number of values, a reader and a writer.
async fn stage(values: u64, lease: &str) -> (u16, [Process; 2], Client, Client) {
    let port = free_port();
    // Without the high watermark, a value that fills its segment is not evicted.
    let server = master(port, &[lease, "--eviction_high_watermark_ratio=1"]);
    let at = format!("127.0.0.1:{port}");
    let room = (values * (LEN as u64 + 16)).next_multiple_of(4096).to_string();
    let arguments = [("TEST_DATA_PORT", free_port().to_string()), ("TEST_SEGMENT", room)];
    let mut owner = start("leases::owner", port, &arguments);
    assert!(owner.lines_after("ready").next().is_some());
    let timeout = Duration::from_secs(24);
    // The writer must fail at once without free space.
    let client =
        async || builder(&at, 0).timeout(timeout).space_timeout(Duration::ZERO).connect().await.unwrap();
    (port, [server, owner], client().await, client().await)
}

/// Returns the address of the value.
async fn address(client: &Client) -> u64 {
    let list = client.replicas().list("k").await.unwrap().unwrap();
    let ReplicaLocation::Memory(place) = &list.replicas[0].location else { panic!("in memory") };
    place.address
}

async fn locate(client: &Client) -> Located {
    client.ranges().locate(&["k"]).await.unwrap().remove(0).unwrap().unwrap()
}

async fn read(client: &Client, object: &Located) -> Result<Vec<u8>, ErrorCode> {
    let into = client.memory().alloc(object.size() as usize).unwrap().exclusive().unwrap();
    let range = RangeRead { object: object.clone(), offset: 0, into };
    let RangeOutcome { result: read, into } = client.ranges().read(vec![range]).await.remove(0);
    let mut bytes = vec![0; into.len()];
    into.copy_to(0, &mut bytes).unwrap();
    read.map(|()| bytes).map_err(|error| error.code())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_that_is_replaced_is_read_as_it_was_while_the_lease_is_alive() {
    let (_, _processes, reader, writer) = stage(4, "--default_kv_lease_ttl=2000").await;
    // A replaced value stays reserved until its leases expire.
    let upsert = async |version| {
        eventually("there is room", PATIENCE, async || {
            writer.put_with("k", &tagged(0, version, LEN)[..], &PutOptions::new().upsert()).await.is_ok()
        })
        .await;
    };
    let mut whole = 0;
    for version in 1..20 {
        upsert(version).await;
        if version == 1 {
            // The reader knows the owner from now on: before the first contact with a process it
            // asks the master again, and gets the later value.
            reader.get("k").await.unwrap().unwrap();
        }
        let (before, at) = (locate(&reader).await, address(&reader).await);
        upsert(version + 100).await;
        let replaced = locate(&reader).await;
        match read(&reader, &before).await {
            // The lease was alive all the time.
            Ok(bytes) => {
                assert_eq!(version_of(0, &bytes), Some(version), "neither torn nor the later one");
                assert_ne!(address(&reader).await, at, "written elsewhere");
                whole += 1;
            }
            Err(code) => assert_eq!(code, ErrorCode::LeaseExpired),
        }
        match read(&reader, &replaced).await {
            Ok(bytes) => assert_eq!(version_of(0, &bytes), Some(version + 100)),
            Err(code) => assert_eq!(code, ErrorCode::LeaseExpired),
        }
        if whole == 3 {
            return;
        }
    }
    panic!("{whole} reads within the lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_is_written_over_only_when_no_lease_is_alive() {
    let (_, _processes, reader, writer) = stage(1, "--default_kv_lease_ttl=1000").await;
    writer.put_with("k", &tagged(0, 1, LEN)[..], &PutOptions::new().upsert()).await.unwrap();
    let at = address(&reader).await;
    let (mut refused, mut version) = (0, 1);
    let late = deadline();
    while refused < 3 {
        late("three values are not written over");
        let object = locate(&reader).await;
        let outcome =
            writer.put_with("k", &tagged(0, version + 1, LEN)[..], &PutOptions::new().upsert()).await;
        match (read(&reader, &object).await, outcome) {
            // The lease was alive all the time.
            (Ok(bytes), outcome) => {
                assert_eq!(version_of(0, &bytes), Some(version));
                let kind = outcome.map_err(|error| error.kind()).unwrap_err();
                assert_eq!(kind, ErrorKind::NoSpace, "there is room for one value only");
                refused += 1;
            }
            (Err(_), outcome) => {
                version += u64::from(outcome.is_ok());
            }
        }
        eventually("it is written over once the lease is over", PATIENCE, async || {
            writer.put_with("k", &tagged(0, version + 1, LEN)[..], &PutOptions::new().upsert()).await.is_ok()
        })
        .await;
        version += 1;
        assert_eq!(address(&reader).await, at, "there is no other room");
        let bytes = reader.get("k").await.unwrap().unwrap();
        assert_eq!(version_of(0, &bytes), Some(version));
    }
}

/// Other processes read all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upserts_under_readers() {
    let (port, _processes, _, writer) = stage(4, "--default_kv_lease_ttl=50").await;
    let key = "key 0";
    let mut version = 0;
    let mut upsert = async || {
        version += 1;
        writer
            .put_with(key, &tagged(0, 1 << 32 | version, LEN)[..], &PutOptions::new().upsert())
            .await
            .is_ok()
    };
    eventually("there is room", PATIENCE, &mut upsert).await;
    let mut readers = Vec::new();
    for number in 2..5 {
        readers.push(spawn_blocking(move || Worker::start(port, number, 1, 0, false)).await.unwrap());
    }
    let (mut stored, mut refused) = (0, 0);
    let late = deadline();
    while stored < 100 {
        late("100 upserts beside the readers");
        if upsert().await { stored += 1 } else { refused += 1 }
    }
    let mut hits = 0;
    for reader in readers {
        hits += spawn_blocking(|| reader.leave()).await.unwrap().hits;
    }
    println!("{stored} upserts ({refused} found no room), {hits} reads, no torn byte");
    assert!(hits > 10, "{hits}");
}

/// A cached value needs no owner, and is dropped when another value replaces it, by any writer and
/// any master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_is_read_without_its_owner_and_never_for_another_value() {
    let port = free_port();
    let at = format!("127.0.0.1:{port}");
    let flags = ["--default_kv_lease_ttl=2000"];
    let server = master(port, &flags);
    let writer = builder(&at, 0).connect().await.unwrap();
    let (owner, _) = spawn_blocking(move || start_client(port)).await.unwrap();
    let reader = builder(&at, 0).share_memory(false).hot_cache(4 << 20).connect().await.unwrap();
    let hits = || reader.status().hot_cache().unwrap().hits;
    let read =
        async || reader.get("k").await.unwrap().map(|bytes| version_of(0, &bytes).expect("one value, whole"));
    for version in 1..4 {
        eventually("there is room", PATIENCE, async || {
            writer.put_with("k", &tagged(0, version, LEN)[..], &PutOptions::new().upsert()).await.is_ok()
        })
        .await;
        let before = hits();
        eventually("it is kept", PATIENCE, async || {
            assert_eq!(read().await, Some(version));
            hits() > before
        })
        .await;
    }
    let before = hits();
    owner.freeze();
    for _ in 0..10 {
        assert_eq!(read().await, Some(3), "its owner stands still");
    }
    assert_eq!(hits(), before + 10);
    owner.thaw();
    // Another master starts at the same port, and its record of the key counts.
    server.kill();
    let _server = master(port, &flags);
    eventually("it is written again", PATIENCE, async || {
        assert!(reader.get("k").await.unwrap_or(None).is_none_or(|bytes| version_of(0, &bytes) == Some(3)));
        writer.remove("k", true).await.is_ok() && writer.put("k", &tagged(0, 4, LEN)[..]).await.is_ok()
    })
    .await;
    let before = hits();
    eventually("it is kept", PATIENCE, async || {
        assert_eq!(read().await, Some(4));
        hits() > before
    })
    .await;
    println!("{} reads of what was kept", hits());
}
