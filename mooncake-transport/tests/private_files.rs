//! Files that hold values: permissions, owners and links. Tests with other users need root, and
//! check nothing without it.
#![cfg(not(miri))]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use mooncake_transport::private_files::{self, FileMode, Folder, Opening};

const NOBODY: u32 = 65534;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Gives a file or a link to another user. Returns false if this process may not do that.
fn give_away(path: &Path) -> bool {
    lchown(path, Some(NOBODY), None).is_ok()
}

/// Returns whether another user can read a file. `None` if this process may not become one.
fn others_read(path: &Path) -> Option<bool> {
    let cat = Command::new("cat").arg(path).uid(NOBODY).gid(NOBODY).output();
    cat.ok().map(|output| output.status.success())
}

#[test]
fn a_new_file_is_private_and_an_old_one_becomes_private() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (new, old) = (dir.path().join("new"), dir.path().join("old"));
    private_files::open(&new, Opening::Create, FileMode::PRIVATE).unwrap().write_all(b"value").unwrap();
    assert_eq!((mode(&new), others_read(&new).unwrap_or(false)), (0o600, false));
    fs::write(&old, "value").unwrap();
    fs::set_permissions(&old, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(others_read(&old).unwrap_or(true));
    assert_eq!(private_files::read(&old).unwrap(), b"value");
    assert_eq!((mode(&old), others_read(&old).unwrap_or(false)), (0o600, false));
    // Permissions that are narrower stay.
    fs::set_permissions(&old, fs::Permissions::from_mode(0o600)).unwrap();
    private_files::open(&old, Opening::Write, FileMode::GROUP_READ).unwrap();
    assert_eq!(mode(&old), 0o600);
    let shared = Folder::open(dir.path()).unwrap();
    shared.file("shared", Opening::New, FileMode::GROUP_READ).unwrap();
    assert_eq!(mode(&dir.path().join("shared")), 0o640);
    let exists = shared.file("shared", Opening::New, FileMode::GROUP_READ).unwrap_err();
    assert_eq!(exists.kind(), ErrorKind::AlreadyExists);
    let missing = shared.file("missing", Opening::Write, FileMode::PRIVATE).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

#[test]
fn a_link_in_place_of_a_file_is_refused_and_leads_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let (target, absent) = (dir.path().join("target"), dir.path().join("absent"));
    fs::write(&target, "dear all").unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o644)).unwrap();
    for to in [&target, &absent] {
        let link = dir.path().join("link");
        symlink(to, &link).unwrap();
        for opening in [Opening::Read, Opening::Write, Opening::Create] {
            let error = private_files::open(&link, opening, FileMode::PRIVATE).unwrap_err();
            assert!(error.to_string().contains("symbolic link"), "{error}");
        }
        // The link itself gives way to a file that replaces it.
        let folder = Folder::open(dir.path()).unwrap();
        symlink(to, dir.path().join("link.new")).unwrap();
        folder.replace("link", b"value", FileMode::PRIVATE).unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"value");
        folder.remove("link").unwrap();
    }
    assert_eq!(
        (fs::read(&target).unwrap(), mode(&target), absent.exists()),
        (b"dear all".to_vec(), 0o644, false)
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("folder")).unwrap();
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    let _listener = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    for name in ["folder", "pipe", "socket"] {
        for opening in [Opening::Read, Opening::Create] {
            private_files::open(&path(name), opening, FileMode::PRIVATE).unwrap_err();
        }
    }
    let folder = Folder::open(dir.path()).unwrap();
    for name in ["", ".", "..", "a/b", "/etc/passwd", "a\0b"] {
        let error = folder.file(name, Opening::Create, FileMode::PRIVATE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name:?}");
    }
    private_files::open(Path::new("/"), Opening::Create, FileMode::PRIVATE).unwrap_err();
}

#[test]
fn files_and_folders_of_another_user_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (file, folder) = (dir.path().join("file"), dir.path().join("folder"));
    fs::write(&file, "dear all").unwrap();
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    if !give_away(&file) || !give_away(&folder) {
        return;
    }
    for opening in [Opening::Read, Opening::Write, Opening::Create] {
        let error = private_files::open(&file, opening, FileMode::PRIVATE).unwrap_err();
        assert!(error.to_string().contains(&format!("user {NOBODY}")), "{error}");
    }
    assert_eq!((fs::read(&file).unwrap(), mode(&file)), (b"dear all".to_vec(), 0o666));
    let error = Folder::own(&folder).unwrap_err();
    assert!(error.to_string().contains(&format!("user {NOBODY}")), "{error}");
    // A folder of another user may hold a file of this one, such as in /dev/shm.
    private_files::open(&folder.join("own"), Opening::Create, FileMode::PRIVATE).unwrap();
}

#[test]
fn links_on_the_way_count_if_root_or_this_user_made_them() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("real/below")).unwrap();
    let link = dir.path().join("link");
    symlink("real", &link).unwrap();
    let through = link.join("below/file");
    private_files::open(&through, Opening::Create, FileMode::PRIVATE).unwrap().write_all(b"value").unwrap();
    assert_eq!(private_files::read(&through).unwrap(), b"value");
    assert_eq!(private_files::read(&dir.path().join("real/../link/below/file")).unwrap(), b"value");
    // The folder itself is never a link.
    let error = Folder::own(&link).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    Folder::own(&link.join("below")).unwrap();
    if give_away(&link) {
        let error = private_files::read(&through).unwrap_err();
        assert!(error.to_string().contains(&format!("user {NOBODY}")), "{error}");
        Folder::own(&link.join("below")).unwrap_err();
    }
    symlink("loop", dir.path().join("loop")).unwrap();
    Folder::open(&dir.path().join("loop/below")).unwrap_err();
}

#[test]
fn own_folders_are_private_and_others_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("a/b/c");
    Folder::own(&new).unwrap();
    for folder in ["a", "a/b", "a/b/c"] {
        assert_eq!(mode(&dir.path().join(folder)), 0o700);
    }
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(new.join("letter"), "dear all").unwrap();
    let own = |folder: &Path| Folder::own(folder).unwrap().narrow_if(|name| name == "own").unwrap();
    own(&new);
    assert_eq!(mode(&new), 0o755, "other programs use the folder, too");
    fs::rename(new.join("letter"), new.join("own")).unwrap();
    own(&new);
    assert_eq!(mode(&new), 0o700);
    fs::set_permissions(&new, fs::Permissions::from_mode(0o1777)).unwrap();
    own(&new);
    assert_eq!(mode(&new), 0o1777, "a folder such as /tmp is for all");
}

#[test]
fn nothing_below_a_folder_is_reached_through_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir_all(root.join("a")).unwrap();
    fs::create_dir_all(outside.join("b")).unwrap();
    fs::write(outside.join("b/letter"), "dear all").unwrap();
    symlink(&outside, root.join("c")).unwrap();
    symlink(outside.join("b"), root.join("a/b")).unwrap();
    fs::create_dir(root.join("d")).unwrap();
    symlink(outside.join("b/letter"), root.join("d/letter")).unwrap();
    symlink("..", root.join("up")).unwrap();
    let folder = Folder::open(&root).unwrap();
    for path in ["c", "c/b", "a/b", "up", "up/outside", "../outside", "/tmp", "", "d/../a"] {
        folder.below(Path::new(path)).unwrap_err();
        folder.create_below(Path::new(path), FileMode::PRIVATE).unwrap_err();
    }
    for path in ["c/b/letter", "a/b/letter", "d/letter", "up/outside/b/letter"] {
        folder.read_below(Path::new(path)).unwrap_err();
    }
    let made = folder.create_below(Path::new("e/f"), FileMode::GROUP_READ).unwrap();
    made.file("value", Opening::New, FileMode::GROUP_READ).unwrap().write_all(b"value").unwrap();
    let mut read = String::new();
    folder.read_below(Path::new("e/f/value")).unwrap().read_to_string(&mut read).unwrap();
    assert_eq!((&*read, mode(&root.join("e")), mode(&root.join("e/f"))), ("value", 0o750, 0o750));
    assert_eq!(fs::read_dir(outside.join("b")).unwrap().count(), 1);
}

#[test]
fn new_folders_keep_the_group_of_a_folder_that_gives_it() {
    let dir = tempfile::tempdir().unwrap();
    if chown(dir.path(), None, Some(NOBODY)).is_err() {
        return;
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o2770)).unwrap();
    let mode: FileMode = "660".parse().unwrap();
    let folder = Folder::open(dir.path()).unwrap().create_below(Path::new("a/b"), mode).unwrap();
    folder.file("value", Opening::New, mode).unwrap();
    for (path, bits) in [("a", 0o2770), ("a/b", 0o2770), ("a/b/value", 0o660)] {
        let path = dir.path().join(path);
        assert_eq!(
            (self::mode(&path), fs::metadata(&path).unwrap().gid()),
            (bits, NOBODY),
            "{}",
            path.display()
        );
    }
}

#[test]
fn an_inherited_descriptor_is_opened_by_its_path() {
    use std::os::fd::AsRawFd;
    let file = tempfile::tempfile().unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    private_files::open(Path::new(&path), Opening::Create, FileMode::PRIVATE)
        .unwrap()
        .write_all(b"value")
        .unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5);
}

#[test]
fn files_of_a_library_in_a_private_folder_are_private() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("old"), "key").unwrap();
    fs::set_permissions(dir.path().join("old"), fs::Permissions::from_mode(0o644)).unwrap();
    Folder::own(dir.path()).unwrap().keep_files_private().unwrap();
    assert_eq!(mode(&dir.path().join("old")), 0o600);
    fs::write(dir.path().join("new"), "key").unwrap();
    // File systems without such lists rely on the folder.
    let lists = Command::new("getfattr").args(["-n", "system.posix_acl_default"]).arg(dir.path()).output();
    if lists.is_ok_and(|output| output.status.success()) {
        assert_eq!(mode(&dir.path().join("new")), 0o600);
    }
}
