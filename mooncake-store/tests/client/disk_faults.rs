//! Disks of clients that fail, are full, do not respond, or cannot be used at all.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_disk::{IoFault, IoFaults, IoRequest};
use mooncake_store::client::{Client, ClientBuilder, DiskFaults, OffloadConfig, PutOptions};
use mooncake_store::master::DiskOptions;
use parking_lot::{Condvar, Mutex};

use crate::cluster::{Cluster, eventually, value};
use crate::disk::{
    KEYS, SIZE, all_written, cluster, disk, expected, fill, key, owner, patient_builder, read, replicas_of,
};

const ENOSPC: i32 = 28;
const EIO: i32 = 5;

/// Disk with a fault that the test chooses.
#[derive(Debug, Default)]
struct Moody {
    mood: Mutex<Mood>,
    better: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mood {
    #[default]
    Fine,
    /// Writes or reads fail.
    Fails { writes: bool, errno: i32 },
    /// Every operation hangs, or only writes.
    Hangs { reads: bool },
}

impl Moody {
    fn set(&self, mood: Mood) {
        *self.mood.lock() = mood;
        self.better.notify_all();
    }
}

impl IoFaults for Moody {
    fn fault(&self, request: IoRequest) -> IoFault {
        let mut mood = self.mood.lock();
        loop {
            match *mood {
                Mood::Hangs { reads } if reads || request.write => self.better.wait(&mut mood),
                Mood::Fails { writes, errno } if writes == request.write => return IoFault::Errno(errno),
                _ => return IoFault::None,
            }
        }
    }
}

/// Returns a client with such a disk, whose threads can hang one by one.
fn moody(cluster: &Cluster, path: &Path) -> (ClientBuilder, Arc<Moody>) {
    let mood = Arc::new(Moody::default());
    let faults = DiskFaults::new(mood.clone());
    let config = OffloadConfig { faults, threads: true, patience: Duration::from_secs(3), ..disk(path) };
    (patient_builder(cluster).offload(config), mood)
}

/// Counts the hits. Each hit has the right bytes.
async fn count(client: &Client) -> u64 {
    let mut there = 0;
    for number in 0..KEYS {
        let got = read(client, &key(number)).await;
        there += u64::from(got.is_some());
        assert!(got.is_none_or(|got| got == expected(number)), "{number}");
    }
    there
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_takes_nothing_refuses_objects_and_counts_them() {
    for errno in [ENOSPC, EIO] {
        let cluster = cluster(DiskOptions::default()).await;
        let folder = tempfile::tempdir().unwrap();
        let (builder, disk) = moody(&cluster, folder.path());
        let owner = builder.connect().await.unwrap();
        disk.set(Mood::Fails { writes: true, errno });
        fill(&owner).await;
        eventually("all were tried", async || owner.status().disk().unwrap().refused >= KEYS).await;
        let report = owner.status().disk().unwrap();
        assert_eq!((report.offloaded, report.store.objects), (0, 0), "{report:?}");
        assert_eq!(report.store.disk.no_space > 0, errno == ENOSPC, "{report:?}");
        let there = count(&owner).await;
        assert!((1..=32).contains(&there), "what memory holds: {there}");
        // The disk has free space again.
        disk.set(Mood::Fine);
        owner.put_with("later", &value(7, SIZE)[..], &PutOptions::new().upsert()).await.unwrap();
        // The full memory may evict it at once.
        eventually("it is on disk", async || replicas_of(&cluster, "later").1 == 1).await;
        assert!(read(&owner, "later").await == Some(value(7, SIZE)));
        owner.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_disk_cannot_read_is_a_miss_and_no_replica_any_more() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (builder, disk) = moody(&cluster, folder.path());
    let owner = builder.connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let there: Vec<u64> = (0..KEYS).filter(|n| replicas_of(&cluster, &key(*n)) == (0, 1)).collect();
    disk.set(Mood::Fails { writes: false, errno: EIO });
    for number in &there[..2] {
        assert_eq!(read(&owner, &key(*number)).await, None);
        eventually("the master hears of it", async || replicas_of(&cluster, &key(*number)) == (0, 0)).await;
    }
    disk.set(Mood::Fine);
    assert_eq!(owner.status().disk().unwrap().store.unreadable, 2);
    assert!(read(&owner, &key(there[2])).await == Some(expected(there[2])), "the others are whole");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_respond_is_a_miss_and_delays_nothing() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (builder, disk) = moody(&cluster, folder.path());
    let owner = builder.connect().await.unwrap();
    fill(&owner).await;
    all_written(&cluster).await;
    let there: Vec<u64> = (0..KEYS).filter(|n| replicas_of(&cluster, &key(*n)) == (0, 1)).collect();
    disk.set(Mood::Hangs { reads: true });
    let reads = there.iter().take(16).map(|number| owner.get(key(*number)));
    for got in futures::future::join_all(reads).await {
        assert_eq!(got.unwrap(), None);
    }
    eventually("nothing of its memory is lent", async || owner.status().disk().unwrap().lent_bytes == 0)
        .await;
    // The failed disk gets no more requests, and calls fail at once.
    let before = owner.status().disk().unwrap();
    let unread = async || owner.status().disk().unwrap().unread - before.unread;
    for number in &there[..4] {
        assert_eq!(read(&owner, &key(*number)).await, None);
    }
    assert!(unread().await >= 4);
    owner.remove(key(there[0]), true).await.unwrap();
    disk.set(Mood::Fine);
    eventually("it answers again", async || read(&owner, &key(there[1])).await == Some(expected(there[1])))
        .await;
    eventually("what was removed is gone", async || owner.status().disk().unwrap().store.objects == KEYS - 1)
        .await;
    owner.put_with("later", &value(7, SIZE)[..], &PutOptions::new().upsert()).await.unwrap();
    eventually("and it is used", async || replicas_of(&cluster, "later").1 == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_that_hang_cost_the_heartbeat_their_time_once() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (builder, disk) = moody(&cluster, folder.path());
    let owner = builder.connect().await.unwrap();
    owner.put("before", &value(5, SIZE)[..]).await.unwrap();
    eventually("it is on disk", async || replicas_of(&cluster, "before").1 == 1).await;
    disk.set(Mood::Hangs { reads: false });
    // The test puts several times as many objects as are written at a time.
    for number in 0..24 {
        owner.put(key(number), &expected(number)[..]).await.unwrap();
    }
    eventually("they are given up", async || owner.status().disk().unwrap().refused > 0).await;
    // An older value whose removal hangs does not return, either.
    owner.put_with("before", &value(6, SIZE)[..], &PutOptions::new().upsert()).await.unwrap();
    assert!(read(&owner, "before").await == Some(value(6, SIZE)));
    disk.set(Mood::Fine);
    eventually("it is used again", async || replicas_of(&cluster, "before").1 == 1).await;
    eventually("the master knows what is there", async || {
        let on_disk = (0..24).filter(|n| replicas_of(&cluster, &key(*n)).1 == 1).count() as u64;
        owner.status().disk().unwrap().store.objects == on_disk + 1
    })
    .await;
    for number in 0..24 {
        let got = read(&owner, &key(number)).await;
        assert!(got.is_none_or(|got| got == expected(number)), "{number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_leaves_a_disk_that_hangs() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (builder, disk) = moody(&cluster, folder.path());
    let owner = builder.connect().await.unwrap();
    disk.set(Mood::Hangs { reads: true });
    for number in 0..8 {
        owner.put(key(number), &expected(number)[..]).await.unwrap();
    }
    let closed = tokio::time::timeout(Duration::from_secs(60), owner.close()).await;
    closed.expect("it does not wait for the disk").unwrap();
    disk.set(Mood::Fine);
}

/// Runs an ignored test of this file as another process, after shell commands in namespaces of its
/// own. Returns false if the system permits no such namespaces.
fn elsewhere(test: &str, dir: &Path, before: &str) -> bool {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount"]);
        command
    };
    if !unshare().args(["mount", "-t", "tmpfs", "none", "/tmp"]).status().is_ok_and(|s| s.success()) {
        return false;
    }
    let exe = std::env::current_exe().unwrap();
    let script = format!(
        "{before} && exec {} --exact disk_faults::{test} --ignored --nocapture --skip {}",
        exe.display(),
        dir.display()
    );
    let outcome = unshare().args(["sh", "-c", &script]).output().unwrap();
    let text =
        String::from_utf8_lossy(&outcome.stdout).into_owned() + &String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success() && text.contains("1 passed"), "{text}");
    true
}

/// Returns the folder that [`elsewhere`] passed.
fn given() -> Option<PathBuf> {
    std::env::args().skip_while(|arg| arg != "--skip").nth(1).map(Into::into)
}

/// Returns the error of a client that cannot use this folder.
async fn refused(path: &Path) -> mooncake_core::Error {
    let cluster = cluster(DiskOptions::default()).await;
    owner(&cluster, path).connect().await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_of_another_user_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    // Only root may change the owner of a folder.
    if std::os::unix::fs::chown(folder.path(), Some(12345), None).is_err() {
        return;
    }
    let error = refused(folder.path()).await;
    assert_eq!(error.code(), ErrorCode::FileOpenFail);
    assert!(error.to_string().contains("user 12345"), "{error}");
    std::os::unix::fs::chown(folder.path(), Some(0), None).unwrap();
}

#[test]
fn a_read_only_directory_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs none {0} && mount -o remount,ro {0}", folder.path().display());
    elsewhere("refuses_a_read_only_directory", folder.path(), &mount);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by a_read_only_directory_is_refused_by_name"]
async fn refuses_a_read_only_directory() {
    let Some(folder) = given() else { return };
    let error = refused(&folder).await;
    assert_eq!(error.code(), ErrorCode::FileOpenFail);
    assert!(error.to_string().contains("cannot be written"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_in_use_by_another_process_is_shared_with_it() {
    let cluster = cluster(DiskOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let _owner = owner(&cluster, folder.path()).connect().await.unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "disk_faults::shares_a_directory_in_use", "--ignored", "--nocapture", "--skip"]);
    let outcome = tokio::process::Command::from(command).arg(folder.path()).output().await.unwrap();
    assert!(String::from_utf8_lossy(&outcome.stdout).contains("1 passed"), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by a_directory_in_use_by_another_process_is_shared_with_it"]
async fn shares_a_directory_in_use() {
    let Some(folder) = given() else { return };
    let cluster = cluster(DiskOptions::default()).await;
    let owner = owner(&cluster, &folder).connect().await.unwrap();
    let holder = |folder: &Path| std::fs::read_to_string(folder.join("lock")).unwrap();
    assert_eq!(holder(&folder), std::os::unix::process::parent_id().to_string());
    assert_eq!(holder(&folder.join("worker-1")), std::process::id().to_string());
    owner.close().await.unwrap();
}

#[test]
fn a_file_system_that_is_full_costs_objects_only() {
    let folder = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size=12m none {}", folder.path().display());
    elsewhere("lives_on_a_full_file_system", folder.path(), &mount);
}

/// Another process fills the file system after the client has measured its free space.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by a_file_system_that_is_full_costs_objects_only"]
async fn lives_on_a_full_file_system() {
    let Some(folder) = given() else { return };
    let cluster = cluster(DiskOptions::default()).await;
    let owner = owner(&cluster, &folder.join("disk")).connect().await.unwrap();
    std::fs::write(folder.join("other"), vec![1; 8 << 20]).unwrap();
    fill(&owner).await;
    eventually("all were tried", async || {
        let report = owner.status().disk().unwrap();
        report.offloaded + report.refused >= KEYS
    })
    .await;
    let report = owner.status().disk().unwrap();
    assert!(report.offloaded > 4 && report.refused > 16, "{report:?}");
    assert!(report.store.disk.no_space > 0, "{report:?}");
    assert!(count(&owner).await > 4);
}
