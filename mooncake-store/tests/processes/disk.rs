//! Owners of disks that die, freeze and return.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_store::client::{Client, OffloadConfig};

use crate::cluster::{
    PATIENCE, SEGMENT, argument, builder, eventually, master, master_address, start, tagged, timed,
    until_end_of_input,
};
use crate::process::{Process, deadline, free_port};

const LEN: usize = 256 << 10;
/// Number of keys: twice as many as memory holds.
const KEYS: u64 = 128;

/// Process of an owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn owner() {
    let Some(master) = master_address() else { return };
    let folder: PathBuf = argument("TEST_FOLDER").unwrap();
    let interval = Duration::from_millis(50);
    let disk =
        OffloadConfig { interval, capacity: 256 << 20, buffer: 32 << 20, ..OffloadConfig::new(folder) };
    let client = builder(&master, SEGMENT).offload(disk).connect().await.unwrap();
    println!("\nready {}", client.status().disk().unwrap().store.objects);
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

/// Starts an owner. Returns it with the number of objects that it found.
fn start_owner(port: u16, folder: &Path) -> (Process, u64) {
    let mut owner = start("disk::owner", port, &[("TEST_FOLDER", folder.to_str().unwrap().into())]);
    let found = owner.lines_after("ready ").next().expect("an owner that comes up");
    (owner, found.parse().unwrap())
}

/// Fills memory twice over, as fast as the disk takes the objects.
async fn fill(client: &Client) {
    for key in 0..KEYS {
        eventually("there is room", Duration::from_secs(60), async || {
            client.put(key.to_string(), &tagged(key, 1, LEN)[..]).await.is_ok()
        })
        .await;
    }
}

async fn on_disk(client: &Client) -> usize {
    let keys: Vec<String> = (0..KEYS).map(|key| key.to_string()).collect();
    let all = client.replicas().batch_list(&keys).await.unwrap_or_default();
    let lists = all.into_iter().filter_map(|list| list.ok().flatten());
    lists.filter(|list| list.replicas.iter().any(|replica| replica.location.memory().is_none())).count()
}

/// Reads a value within its lease. Returns whether it was there; another value is an error.
async fn is_there(client: &Client, key: u64) -> bool {
    let late = deadline();
    loop {
        late("a read within its lease");
        match timed("a read", client.get(key.to_string())).await {
            Err(error) if error.code() == ErrorCode::LeaseExpired => {}
            Err(error) => panic!("{key}: {error}"),
            Ok(None) => return false,
            Ok(Some(got)) => {
                assert!(got == tagged(key, 1, LEN), "{key}: other bytes");
                return true;
            }
        }
    }
}

async fn count(client: &Client) -> usize {
    let mut count = 0;
    for key in 0..KEYS {
        count += usize::from(is_there(client, key).await);
    }
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_is_killed_is_a_miss_and_its_objects_come_back_with_it() {
    let port = free_port();
    let flags = ["--enable_offload=true", "--default_kv_lease_ttl=500", "--client_ttl=4"];
    let _master = master(port, &flags);
    let client = builder(&format!("127.0.0.1:{port}"), 0).connect().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (owner, found) = start_owner(port, folder.path());
    assert_eq!(found, 0);
    fill(&client).await;
    eventually("all is on disk", PATIENCE, async || on_disk(&client).await == KEYS as usize).await;
    assert_eq!(count(&client).await, KEYS as usize);

    // Each read ends in time and is a miss, before and after the master detects the death.
    owner.kill();
    assert_eq!(count(&client).await, 0);
    eventually("the master knows", PATIENCE, async || on_disk(&client).await == 0).await;
    assert!(!is_there(&client, 0).await);

    let (owner, found) = start_owner(port, folder.path());
    assert_eq!(found, KEYS);
    assert_eq!(on_disk(&client).await, KEYS as usize, "announced before it says that it is ready");
    assert_eq!(count(&client).await, KEYS as usize);

    // The owner returns before its heartbeat timeout: its objects count as soon as the previous
    // process is given up.
    owner.kill();
    let (owner, found) = start_owner(port, folder.path());
    assert_eq!(found, KEYS);
    eventually("all is served again", PATIENCE, async || count(&client).await == KEYS as usize).await;

    // An owner that does not respond is a miss within the timeout of a read.
    owner.freeze();
    assert!(!is_there(&client, 0).await);
    owner.thaw();
    eventually("it answers again", PATIENCE, async || is_there(&client, 0).await).await;

    // The owner announces its objects to a new master.
    drop(_master);
    let _master = master(port, &flags);
    eventually("all is announced", PATIENCE, async || on_disk(&client).await == KEYS as usize).await;
    assert_eq!(count(&client).await, KEYS as usize);
}
