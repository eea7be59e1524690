//! Files that clients share, and that outlive their writers and the owners of the values in memory.

use std::path::Path;
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_store::client::{Client, PutOptions};

use crate::cluster::{
    LIMIT, PATIENCE, argument, builder, eventually, master, master_address, start, start_client, tagged,
    timed,
};
use crate::process::{Process, deadline, free_port};

/// Length of values, long enough for a kill in the middle of a write.
const LEN: usize = 1 << 20;
const KEYS: u64 = 12;

/// Number of keys that are put once. The others are put again and again.
const ONCE: u64 = 6;

/// Process of a writer, which runs until it is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn writer() {
    let Some(master) = master_address() else { return };
    let round: u64 = argument("TEST_NUMBER").unwrap();
    let client = builder(&master, 0).timeout(LIMIT * 10).connect().await.unwrap();
    for key in 0..ONCE {
        client.put(key.to_string(), &tagged(key, 1, LEN)[..]).await.unwrap();
        eventually("it has a file", Duration::from_secs(60), async || has_file(&client, key).await).await;
    }
    for turn in 0.. {
        for key in ONCE..KEYS {
            let _ = client
                .put_with(
                    key.to_string(),
                    &tagged(key, round * 1000 + turn, LEN)[..],
                    &PutOptions::new().upsert(),
                )
                .await;
        }
        println!("\nwrote {turn}");
    }
}

/// Reads a key. Returns the version of a complete value, if there is one.
async fn read(client: &Client, key: u64) -> Option<u64> {
    let late = deadline();
    loop {
        late("a read within its lease");
        match timed("a read", client.get(key.to_string())).await {
            Err(error) if error.code() == ErrorCode::LeaseExpired => {}
            got => {
                let bytes = got.unwrap()?;
                let version = crate::cluster::version_of(key, &bytes);
                return Some(version.expect("a value that was put, whole"));
            }
        }
    }
}

async fn has_file(client: &Client, key: u64) -> bool {
    let list = client.replicas().list(key.to_string()).await.ok().flatten();
    list.is_some_and(|list| list.replicas.iter().any(|replica| replica.location.memory().is_none()))
}

/// Returns whether an object has its only replica in a file.
async fn only_in_file(client: &Client, key: u64) -> bool {
    let list = client.replicas().list(key.to_string()).await.ok().flatten();
    list.is_some_and(|list| list.replicas.iter().all(|replica| replica.location.memory().is_none()))
}

fn cut_off(dir: &Path, found: &mut usize) {
    for entry in std::fs::read_dir(dir).unwrap().map_while(Result::ok) {
        if entry.file_type().unwrap().is_dir() {
            cut_off(&entry.path(), found);
        } else if !entry.file_name().to_str().unwrap().starts_with('.') {
            *found += usize::from(entry.metadata().unwrap().len() != LEN as u64 + 16);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_is_killed_leaves_whole_files_and_values_outlive_memory() {
    let port = free_port();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(".mooncake-root"), "").unwrap();
    let root = format!("--root_fs_dir={}", folder.path().display());
    let _master = master(port, &[&root, "--default_kv_lease_ttl=500", "--client_ttl=2"]);
    let client = builder(&format!("127.0.0.1:{port}"), 0).timeout(LIMIT).connect().await.unwrap();
    for round in 0..3 {
        let (holder, _) = start_client(port);
        let (other, _) = start_client(port);
        let mut writing = start("files::writer", port, &[("TEST_NUMBER", round.to_string())]);
        // The kill comes at any point of a write.
        assert!(writing.lines_after("wrote ").nth(round as usize).is_some());
        writing.kill();
        for key in 0..KEYS {
            read(&client, key).await;
        }
        [holder, other].into_iter().for_each(Process::kill);
        eventually("nothing is in memory", PATIENCE, async || {
            let mut left = 0;
            for key in 0..KEYS {
                let list = client.replicas().list(key.to_string()).await.ok().flatten();
                left += usize::from(list.is_some() && !only_in_file(&client, key).await);
            }
            left == 0
        })
        .await;
        for key in 0..KEYS {
            let there = read(&client, key).await;
            assert!(key >= ONCE || there == Some(1), "{key}, round {round}: it was in a file");
        }
        let mut cut = 0;
        cut_off(folder.path(), &mut cut);
        assert_eq!(cut, 0, "files under names that readers may be told of are whole");
    }
}
