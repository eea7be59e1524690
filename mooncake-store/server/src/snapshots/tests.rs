use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
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
fn the_order_of_masters_is_beside_the_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let open = || SnapshotStore::open(&config(folder.path()), "lab").unwrap();
    assert!(open().begin_term(7).is_empty());
    assert_eq!(open().begin_term(8), [7]);
    assert_eq!(open().begin_term(8), [7], "a repetition");
    assert_eq!(open().begin_term(9), [8, 7]);
    let file = folder.path().join("lab").join("masters");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    (10..200).for_each(|own| drop(open().begin_term(own)));
    let earlier = open().begin_term(200);
    assert_eq!((earlier.len(), earlier[0], earlier[62]), (63, 199, 137));
    for damaged in ["", "mooncake masters 2\n7\n", "\u{0}"] {
        fs::write(&file, damaged).unwrap();
        assert!(open().begin_term(1).is_empty());
    }
    fs::write(&file, "mooncake masters 1\n0000000000000007\nx\n0000000000000008\n").unwrap();
    assert_eq!(open().begin_term(1), [7]);
    // A folder that cannot be written to loses the order only.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert!(open().begin_term(2).is_empty());
}

#[test]
fn put_retains_newest_and_records_latest() {
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
    let others =
        ["snapshot-6", "snapshot-x", "letter", "unfinished-letter", "unfinished-1-2", "snapshot-7.bak"];
    let unfinished = ["unfinished-00000000000000000007-12", "unfinished-latest", "latest.new"];
    for name in others.iter().chain(&unfinished) {
        fs::write(own.join(name), "dear all").unwrap();
    }
    fs::create_dir(own.join("unfinished-00000000000000000008-12")).unwrap();
    SnapshotStore::open(&config(folder.path()), "lab").unwrap().put(fill, always).unwrap();
    assert_eq!(numbers(&own), [5, 6]);
    assert!(others.iter().all(|name| own.join(name).exists()));
    assert!(unfinished.iter().all(|name| !own.join(name).exists()));
    assert!(own.join("unfinished-00000000000000000008-12").is_dir());
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
fn folder_creation_error_states_path() {
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
async fn stopped_master_writes_last_snapshot() {
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
    async fn put_retains_newest() {
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

/// Snapshots have the keys of all objects.
#[test]
fn other_users_read_no_snapshot_and_links_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("lab");
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
    let letter = folder.path().join("letter");
    fs::write(&letter, "dear all").unwrap();
    let backup = folder.path().join("backup");
    let config = SnapshotConfig { backup: Some(backup.clone()), ..config(folder.path()) };
    let first = SnapshotStore::open(&config, "lab").unwrap().put(fill, always).unwrap();
    // Other versions wrote this file with the permissions of the umask.
    fs::set_permissions(&first, fs::Permissions::from_mode(0o644)).unwrap();
    for name in ["latest.new", "unfinished-latest", "latest"] {
        let _ = fs::remove_file(own.join(name));
        symlink(&letter, own.join(name)).unwrap();
    }
    symlink(&letter, own.join(name(2))).unwrap();
    let store = SnapshotStore::open(&config, "lab").unwrap();
    assert!(store.latest().is_some());
    // The number of the link is not that of a snapshot.
    let refused = store.put(fill, always).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::ObjectAlreadyExists);
    fs::remove_file(own.join(name(2))).unwrap();
    store.put(fill, always).unwrap();
    assert_eq!(fs::read(&letter).unwrap(), b"dear all");
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    for path in [first, own.join(name(2)), own.join("latest")] {
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
    let restored = backup.join("mooncake_snapshot_restore_backup/lab");
    assert_eq!(mode(&restored.join(name(1))), 0o600);
    assert!([own, restored].iter().all(|folder| mode(folder) == 0o700));
}

#[test]
fn a_folder_or_a_snapshot_of_another_user_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(&config(folder.path()), "lab").unwrap();
    let path = store.put(fill, always).unwrap();
    // Only root may give files away.
    if chown(&path, Some(65534), None).is_err() {
        return;
    }
    assert!(store.latest().is_none());
    let own = folder.path().join("lab");
    chown(&own, Some(65534), None).unwrap();
    let error = SnapshotStore::open(&config(folder.path()), "lab").unwrap_err();
    assert!(error.message().contains("user 65534") && error.message().contains("lab"), "{error}");
    fs::remove_dir_all(&own).unwrap();
    symlink("/tmp", &own).unwrap();
    let error = SnapshotStore::open(&config(folder.path()), "lab").unwrap_err();
    assert!(error.message().contains("symbolic link"), "{error}");
}
