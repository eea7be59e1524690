//! Unusable directories and full disks: a clear error or a miss.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use common::{dir, engines, get, open, pattern, put};
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_disk::{DiskConfig, FileStore, StoreConfig};

fn refused(dir: &Path) -> mooncake_core::Error {
    FileStore::open(DiskConfig::default(), StoreConfig::new(dir, 1 << 20)).unwrap_err()
}

/// Runs an ignored test of this file as another process, after shell commands in namespaces of its
/// own. Returns false where there are no such namespaces.
fn run_in_namespace(test: &str, dir: &Path, before: &str) -> bool {
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
        "{before} && exec {} --exact {test} --ignored --nocapture --skip {}",
        exe.display(),
        dir.display()
    );
    let outcome = unshare().args(["sh", "-c", &script]).output().unwrap();
    let text =
        String::from_utf8_lossy(&outcome.stdout).into_owned() + &String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success() && text.contains("1 passed"), "{text}");
    true
}

/// Returns the directory that [`run_in_namespace`] passed.
fn passed_dir() -> Option<std::path::PathBuf> {
    std::env::args().skip_while(|arg| arg != "--skip").nth(1).map(Into::into)
}

#[test]
fn two_stores_on_one_directory() {
    let dir = dir();
    let (store, _) = open(&DiskConfig::default(), dir.path(), 1 << 20);
    let error = refused(dir.path());
    assert_eq!(error.code(), ErrorCode::FileLockFail);
    assert!(error.message().contains(&format!("process {}", std::process::id())), "{error}");
    drop(store);
    open(&DiskConfig::default(), dir.path(), 1 << 20);
}

#[test]
fn two_processes_on_one_directory() {
    let dir = dir();
    let (_store, _) = open(&DiskConfig::default(), dir.path(), 1 << 20);
    let exe = std::env::current_exe().unwrap();
    let outcome = Command::new(exe)
        .args(["--exact", "refuses_a_directory_in_use", "--ignored", "--nocapture", "--skip"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&outcome.stdout).contains("1 passed"), "{outcome:?}");
}

#[test]
#[ignore = "run by two_processes_on_one_directory"]
fn refuses_a_directory_in_use() {
    let Some(dir) = passed_dir() else { return };
    let error = refused(&dir);
    assert_eq!(error.code(), ErrorCode::FileLockFail);
    let parent = std::os::unix::process::parent_id();
    assert!(error.message().contains(&format!("process {parent}")), "{error}");
}

#[test]
fn a_directory_of_another_user() {
    let dir = dir();
    let me = std::fs::metadata(dir.path()).unwrap().uid();
    // Only root may change the owner of a directory.
    if std::os::unix::fs::chown(dir.path(), Some(me + 1), None).is_err() {
        return;
    }
    let error = refused(dir.path());
    assert_eq!(error.code(), ErrorCode::FileOpenFail);
    assert!(error.message().contains(&format!("user {}", me + 1)), "{error}");
    std::os::unix::fs::chown(dir.path(), Some(me), None).unwrap();
}

#[test]
fn a_directory_that_is_a_file_or_cannot_be_made() {
    let dir = dir();
    let path = dir.path().join("file");
    std::fs::write(&path, "something").unwrap();
    for path in [&path, &path.join("below"), Path::new("/proc/nowhere")] {
        let error = refused(path);
        assert_eq!(error.code(), ErrorCode::FileOpenFail);
        assert!(error.message().contains(path.to_str().unwrap()), "{error}");
    }
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"something");
}

#[test]
fn a_read_only_directory() {
    let dir = dir();
    let mount = format!("mount -t tmpfs none {0} && mount -o remount,ro {0}", dir.path().display());
    run_in_namespace("refuses_a_read_only_directory", dir.path(), &mount);
}

#[test]
#[ignore = "run by a_read_only_directory"]
fn refuses_a_read_only_directory() {
    let Some(dir) = passed_dir() else { return };
    let error = refused(&dir);
    assert_eq!(error.code(), ErrorCode::FileOpenFail);
    assert!(error.message().contains("cannot be written"), "{error}");
}

#[test]
fn a_full_file_system() {
    let dir = dir();
    let mount = format!("mount -t tmpfs -o size=4m none {}", dir.path().display());
    run_in_namespace("lives_on_a_full_file_system", dir.path(), &mount);
}

/// The store is configured for 64 MiB, the file system has 4 MiB.
#[test]
#[ignore = "run by a_full_file_system"]
fn lives_on_a_full_file_system() {
    let Some(dir) = passed_dir() else { return };
    for (at, disk) in engines().into_iter().enumerate() {
        let dir = dir.join(at.to_string());
        let (store, _) = open(&disk, &dir, 64 << 20);
        let (mut kept, mut refused) = (Vec::new(), 0);
        for i in 0..100u64 {
            match put(&store, &i.to_le_bytes(), &pattern(i, 100_000)) {
                Ok(()) => kept.push(i),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    refused += 1;
                }
            }
        }
        assert!(kept.len() > 20 && refused > 40, "{} kept, {refused} refused", kept.len());
        assert!(store.stats().disk.no_space > 0);
        for i in 0..100u64 {
            let read = get(&store, &i.to_le_bytes()).unwrap();
            assert!(read == kept.contains(&i).then(|| pattern(i, 100_000)), "{i}");
        }
        drop(store);
        let (store, found) = open(&disk, &dir, 64 << 20);
        assert_eq!(found.objects, kept.len() as u64, "acknowledged objects are present");
        drop(store);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_device_that_is_too_short() {
    let dir = dir();
    let config = StoreConfig { data: Some("/dev/null".into()), ..StoreConfig::new(dir.path(), 1 << 20) };
    let error = FileStore::open(DiskConfig::default(), config).unwrap_err();
    assert!(error.message().contains("/dev/null"), "{error}");
    for capacity in [0, 4095, 1 << 60] {
        let error =
            FileStore::open(DiskConfig::default(), StoreConfig::new(dir.path(), capacity)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
