use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use mooncake_core::ErrorCode;

use super::folder_store::{listed, names};
use super::format::{LATEST, name};
use super::*;
use crate::config::MasterConfig;
use mooncake_master::MasterOptions;

fn config(folder: &Path) -> SnapshotConfig {
    SnapshotConfig { folder: folder.into(), ..SnapshotConfig::default() }
}

fn always() -> Result<()> {
    Ok(())
}

/// A snapshot of a master without objects.
fn fill(sink: &mut Sink<'_>) -> Result<()> {
    Master::new(MasterOptions::default())?.snapshot(sink).map(drop)
}

fn numbers(folder: &Path) -> Vec<u64> {
    let mut numbers: Vec<_> = listed(folder).into_iter().map(|(number, _)| number).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn the_last_ones_are_kept_and_the_latest_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(&config(folder.path()), "lab").unwrap();
    assert!(store.latest().is_none());
    for _ in 0..5 {
        store.put(fill, always).unwrap();
    }
    let own = folder.path().join("lab");
    assert_eq!(numbers(&own), [4, 5]);
    assert_eq!(fs::read_to_string(own.join(LATEST)).unwrap(), "snapshot-00000000000000000005\n");
    assert!(store.latest().is_some());
    assert!(SnapshotStore::open(&config(folder.path()), "other").unwrap().latest().is_none());
    // Files with similar names must not be removed.
    for name in ["snapshot-6", "snapshot-x", "letter", "unfinished-letter"] {
        fs::write(own.join(name), "dear all").unwrap();
    }
    SnapshotStore::open(&config(folder.path()), "lab").unwrap().put(fill, always).unwrap();
    assert_eq!(numbers(&own), [5, 6]);
    assert!(own.join("letter").exists() && own.join("snapshot-6").exists());
    assert!(!own.join("unfinished-letter").exists());
}

#[test]
fn a_damaged_one_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(&config(folder.path()), "lab").unwrap();
    let [first, second] = [0; 2].map(|_| store.put(fill, always).unwrap());
    let whole = fs::read(&second).unwrap();
    fs::write(&second, &whole[..whole.len() - 1]).unwrap();
    assert!(store.latest().is_some(), "the first one");
    fs::write(&first, "").unwrap();
    assert!(store.latest().is_none());
    store.put(fill, always).unwrap();
    assert!(store.latest().is_some());
    assert_eq!(numbers(&folder.path().join("lab")), [2, 3]);
}

#[test]
fn what_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(&config(folder.path()), "lab").unwrap();
    let first = store.put(fill, always).unwrap();
    let no = || Err(Error::internal("not now"));
    let refused = [store.put(|_| no(), always), store.put(fill, no)];
    assert!(refused.iter().all(|refused| refused.as_ref().is_err_and(|e| e.message() == "not now")));
    // Another master has taken the number meanwhile.
    let taken = folder.path().join("lab").join(name(2));
    let late = store.put(fill, || {
        fs::write(&taken, "of another")?;
        Ok(())
    });
    assert_eq!(late.unwrap_err().code(), ErrorCode::ObjectAlreadyExists);
    assert_eq!(fs::read(&taken).unwrap(), b"of another");
    let mut left = names(&folder.path().join("lab"));
    left.sort();
    let there = [LATEST.to_owned(), name(1), name(2)];
    assert_eq!(left, there, "{first:?}");
}

#[test]
fn the_spare_folder_takes_what_the_other_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let (main, spare) = (folder.path().join("main"), folder.path().join("spare"));
    let config = SnapshotConfig { backup: Some(spare.clone()), ..config(&main) };
    let store = SnapshotStore::open(&config, "lab").unwrap();
    store.put(fill, always).unwrap();
    let times = AtomicUsize::new(0);
    let full_once = |sink: &mut Sink<'_>| {
        if times.fetch_add(1, Relaxed) == 0 {
            return Err(Error::new(ErrorCode::PersistentFail, "no space left"));
        }
        fill(sink)
    };
    let path = store.put(full_once, always).unwrap();
    assert_eq!(path, spare.join("mooncake_snapshot_save_backup/lab").join(name(2)));
    assert_eq!(numbers(&main.join("lab")), [1]);
    assert!(store.latest().is_some());
    let restored = spare.join("mooncake_snapshot_restore_backup/lab");
    assert_eq!(numbers(&restored), [2], "the one that was restored");
    store.put(fill, always).unwrap();
    assert_eq!(numbers(&main.join("lab")), [1, 3]);
}

#[test]
fn a_folder_that_cannot_be_had_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = SnapshotStore::open(&config(&file), "lab").unwrap_err();
    assert!(error.message().contains("file/lab"), "{error}");
}

async fn server(snapshots: SnapshotConfig) -> crate::MasterServer {
    let config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        snapshots: Some(snapshots),
        ..MasterConfig::default()
    };
    crate::MasterServer::start(config).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_is_told_to_stop_takes_a_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = SnapshotConfig { write: true, restore: true, ..config(folder.path()) };
    server(config.clone()).await.stop().await;
    let own = folder.path().join("mooncake_cluster");
    assert_eq!(numbers(&own), [1]);
    // A dropped server writes none.
    let dropped = server(config.clone()).await;
    drop(dropped);
    server(SnapshotConfig { write: false, ..config }).await.stop().await;
    assert_eq!(numbers(&own), [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_too_long_is_given_up_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let config = SnapshotConfig { write: true, limit: Duration::from_nanos(1), ..config(folder.path()) };
    let server = server(config).await;
    let state = server.state.clone();
    server.stop().await;
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    assert_eq!((count(&state.snapshots.success), count(&state.snapshots.failed)), (0, 1));
    assert!(numbers(&folder.path().join("mooncake_cluster")).is_empty());
    assert!(crate::summary::line(&state).ends_with("| Snapshots: Success=0, Fail=1"));
}

/// Snapshots in a local metadata directory. The library may be missing; the test with processes
/// reports that.
#[cfg(feature = "metadata-rocksdb")]
mod own {
    use super::*;
    use mooncake_core::meta::Expect;
    use mooncake_metadata::open_folder;

    async fn with(test: impl FnOnce(&SnapshotConfig) + Send + 'static) {
        let folder = tempfile::tempdir().unwrap();
        let config = config(Path::new(&format!("rocksdb://{}", folder.path().display())));
        if open_folder(config.own().unwrap()).is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            return;
        }
        tokio::task::spawn_blocking(move || test(&config)).await.unwrap();
    }

    /// Writes three and a half parts.
    fn fill_long(sink: &mut Sink<'_>) -> Result<()> {
        (0..5).try_for_each(|byte| sink(&vec![byte; 734_003]))
    }

    fn keys(config: &SnapshotConfig) -> Vec<String> {
        let directory = open_folder(config.own().unwrap()).unwrap();
        let all = tokio::runtime::Handle::current().block_on(directory.list("")).unwrap();
        all.into_iter().map(|(key, _)| key).collect()
    }

    #[tokio::test]
    async fn the_last_ones_are_kept() {
        with(|config| {
            let store = SnapshotStore::open(config, "lab").unwrap();
            assert!(store.latest().is_none());
            for _ in 0..5 {
                store.put(fill, always).unwrap();
            }
            assert_eq!(store.main.numbers(), [4, 5]);
            assert!(store.latest().is_some());
            assert!(SnapshotStore::open(config, "other").unwrap().latest().is_none());
            let path = store.put(fill_long, always).unwrap();
            assert!(path.ends_with("lab/snapshot-00000000000000000006"), "{path:?}");
            let long = store.main.read(6).unwrap();
            assert!(long.len() == 5 * 734_003 && long.last() == Some(&4));
            assert!(store.latest().is_some(), "one that is none is passed over");
            assert_eq!(store.main.numbers(), [5, 6]);
            for _ in 0..2 {
                store.put(fill, always).unwrap();
            }
            assert_eq!(keys(config).len(), 4, "each of two has a part, and is listed: {:?}", keys(config));
        })
        .await;
    }

    #[tokio::test]
    async fn what_fails_or_is_not_finished_leaves_nothing() {
        with(|config| {
            let store = SnapshotStore::open(config, "lab").unwrap();
            store.put(fill_long, always).unwrap();
            let before = keys(config);
            let no = || Err(Error::internal("not now"));
            let breaks_off = |sink: &mut Sink<'_>| fill_long(sink).and_then(|()| no());
            let refused = [store.put(breaks_off, always), store.put(fill_long, no)];
            assert!(refused.iter().all(|refused| refused.as_ref().is_err_and(|e| e.message() == "not now")));
            assert_eq!(keys(config), before);
            // State after processes that were killed while they wrote a snapshot, before they
            // published it, and while they removed one.
            let directory = open_folder(config.own().unwrap()).unwrap();
            for key in [
                "unfinished/00000000000000000009",
                "part/00000000000000000009/00000000",
                "part/00000000000000000009/00000001",
                "unfinished/00000000000000000001",
                "unfinished/00000000000000000007",
            ] {
                let key = format!("mooncake-store/lab/snapshots/{key}");
                let put = directory.put(&key, "x".into(), Expect::Absent);
                tokio::runtime::Handle::current().block_on(put).unwrap();
            }
            drop(SnapshotStore::open(config, "lab").unwrap());
            assert_eq!(keys(config), before);
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_master_writes_and_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let config = SnapshotConfig {
            write: true,
            restore: true,
            ..config(Path::new(&format!("rocksdb://{}", folder.path().display())))
        };
        if open_folder(config.own().unwrap()).is_err() {
            return;
        }
        for _ in 0..3 {
            server(config.clone()).await.stop().await;
        }
        let numbers = tokio::task::spawn_blocking(move || {
            SnapshotStore::open(&config, "mooncake_cluster").unwrap().main.numbers()
        });
        assert_eq!(numbers.await.unwrap(), [2, 3]);
    }
}
