//! Unusable directories and full disks: a clear error or a miss.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use common::{dir, engines, get, open, pattern, put};
use mooncake_core::alloc::BuiltinAllocator;
use mooncake_core::evict::BuiltinPolicy;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_disk::{DiskConfig, FileStore, LockedDir, StoreConfig};

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

/// Returns the name of a locked directory below the shared one, or an empty one for that itself.
fn name_in(dir: &Path, locked: &LockedDir) -> String {
    locked.path().strip_prefix(dir).unwrap().display().to_string()
}

#[test]
fn processes_that_share_a_directory_take_over_each_others_stores() {
    let dir = dir();
    let lock = || LockedDir::lock_shared(dir.path()).unwrap();
    let [first, second, third] = [lock(), lock(), lock()];
    let names = [&first, &second, &third].map(|locked| name_in(dir.path(), locked));
    assert_eq!(names, ["", "worker-1", "worker-2"]);
    // The first free one is taken, and a store of its own refuses the directory.
    drop(second);
    assert_eq!(name_in(dir.path(), &lock()), "worker-1");
    assert_eq!(refused(dir.path()).code(), ErrorCode::FileLockFail);
    drop(first);
    let first = lock();
    assert_eq!(name_in(dir.path(), &first), "");
    let open = |locked: LockedDir| {
        let config = StoreConfig::new("/nowhere", 1 << 20);
        FileStore::<BuiltinAllocator, BuiltinPolicy>::open_locked(DiskConfig::default(), config, locked)
            .unwrap()
    };
    let ((store, _), (other, found)) = (open(first), open(lock()));
    assert_eq!(found.objects, 0);
    put(&store, b"key", b"value").unwrap();
    put(&other, b"key", b"other").unwrap();
    assert_eq!(get(&store, b"key").unwrap().as_deref(), Some(&b"value"[..]));
    drop((store, other));
    let ((store, found), (other, _)) = (open(lock()), open(lock()));
    assert_eq!(found.objects, 1);
    assert_eq!(get(&store, b"key").unwrap().as_deref(), Some(&b"value"[..]));
    assert_eq!(get(&other, b"key").unwrap().as_deref(), Some(&b"other"[..]));
    assert_eq!(mode(dir.path()), 0o700);
    assert_eq!(mode(&dir.path().join("worker-1")), 0o700);
}

#[test]
fn many_processes_at_once_share_a_directory() {
    let dir = dir();
    let locked: Vec<LockedDir> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..16).map(|_| scope.spawn(|| LockedDir::lock_shared(dir.path()).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut names: Vec<_> = locked.iter().map(|locked| name_in(dir.path(), locked)).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 16, "{names:?}");
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
        let (mut stored, mut refused) = (Vec::new(), 0);
        for i in 0..100u64 {
            match put(&store, &i.to_le_bytes(), &pattern(i, 100_000)) {
                Ok(()) => stored.push(i),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    refused += 1;
                }
            }
        }
        assert!(stored.len() > 20 && refused > 40, "{} stored, {refused} refused", stored.len());
        assert!(store.stats().disk.no_space > 0);
        for i in 0..100u64 {
            let read = get(&store, &i.to_le_bytes()).unwrap();
            assert!(read == stored.contains(&i).then(|| pattern(i, 100_000)), "{i}");
        }
        drop(store);
        let (store, found) = open(&disk, &dir, 64 << 20);
        assert_eq!(found.objects, stored.len() as u64, "acknowledged objects are present");
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

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn widen(path: &Path, bits: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(bits)).unwrap();
}

/// Opens the store and checks that no other user has access.
fn check_private(dir: &Path) -> usize {
    let (store, found) = open(&DiskConfig::default(), dir, 1 << 20);
    put(&store, format!("key {}", found.objects).as_bytes(), b"value").unwrap();
    drop(store);
    let mut files = 0;
    for entry in std::fs::read_dir(dir).unwrap().map_while(Result::ok) {
        assert_eq!(mode(&entry.path()), 0o600, "{}", entry.path().display());
        files += 1;
    }
    assert_eq!((mode(dir), files), (0o700, 3));
    usize::try_from(found.objects).unwrap()
}

#[test]
fn values_and_keys_are_private_to_the_user() {
    let dir = dir();
    let folder = dir.path().join("a/disk");
    assert_eq!(check_private(&folder), 0);
    // Earlier versions left the permissions to the umask.
    for name in ["objects", "index", "lock"] {
        widen(&folder.join(name), 0o644);
    }
    widen(&folder, 0o755);
    assert_eq!(check_private(&folder), 1);
}

#[test]
fn a_link_or_a_file_of_another_user_is_refused_by_name() {
    let letter = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(letter.path(), "dear all").unwrap();
    for name in ["lock", "index", "objects"] {
        let dir = dir();
        check_private(dir.path());
        let path = dir.path().join(name);
        let moved_path = dir.path().join("aside");
        std::fs::rename(&path, &moved_path).unwrap();
        symlink(letter.path(), &path).unwrap();
        let error = refused(dir.path());
        assert!(error.message().contains("symbolic link") && error.message().contains(name), "{error}");
        assert_eq!(std::fs::read(letter.path()).unwrap(), b"dear all");
        std::fs::rename(&moved_path, &path).unwrap();
        if chown(&path, Some(65534), None).is_ok() {
            let error = refused(dir.path());
            assert!(error.message().contains("user 65534") && error.message().contains(name), "{error}");
            chown(&path, Some(0), None).unwrap();
        }
        check_private(dir.path());
    }
    // A link in place of a file that is being written is replaced.
    let dir = dir();
    std::fs::create_dir(dir.path().join("disk")).unwrap();
    symlink(letter.path(), dir.path().join("disk/index.new")).unwrap();
    check_private(&dir.path().join("disk"));
    assert_eq!(std::fs::read(letter.path()).unwrap(), b"dear all");
    symlink("disk", dir.path().join("link")).unwrap();
    assert!(refused(&dir.path().join("link")).message().contains("symbolic link"));
}
