//! Access of other users of the host to files of values, one test for each kind of file.
//!
//! Tests with other users need root, and check less without it.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mooncake_store::client::PutOptions;

use crate::cluster::{
    PATIENCE, argument, builder, connect, eventually, in_segment_of, master, master_address,
};
use crate::process::{Process, free_port};
use crate::segment_files::folder;

const NOBODY: u32 = 65534;
/// Bytes of each value.
const SECRET: &[u8] = b"SECRET-PROMPT-";

/// Returns the regular files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map_while(Result::ok) {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => found.extend(files(&entry.path())),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Checks that other users read no file below a folder, by its permissions and by trying.
fn check_private(folder: &Path, names: &[&str]) {
    let found = files(folder);
    for name in names {
        assert!(found.iter().any(|path| path.ends_with(name)), "{name}: {found:?}");
    }
    for path in found {
        assert_eq!(mode(&path) & 0o177, 0, "{}", path.display());
        let cat = Command::new("cat").arg(&path).uid(NOBODY).gid(NOBODY).output();
        assert!(cat.is_err() || !cat.unwrap().status.success(), "{}", path.display());
    }
}

/// Starts this test program with a umask of zero, so that nothing but the code decides.
fn start_open(test: &str, port: u16, variables: &[(&str, &Path)]) -> Process {
    let program = std::env::current_exe().unwrap();
    let child = Command::new("sh")
        .args(["-c", "umask 0; exec \"$0\" \"$@\""])
        .arg(program)
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("TEST_MASTER", format!("127.0.0.1:{port}"))
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    Process(child)
}

/// Process of an owner with the settings of the environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn owner() {
    use mooncake_store::client::{ClientConfig, ClientEnvironment};
    let Some(master) = master_address() else { return };
    let environment = ClientEnvironment::over(ClientConfig { segment: 16 << 20, ..ClientConfig::default() });
    let mut config = environment.config.clone();
    if argument::<String>("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH").is_some() {
        let interval = std::time::Duration::from_millis(50);
        config.offload = Some(mooncake_store::client::OffloadConfig { interval, ..environment.offload("") });
    }
    match crate::cluster::builder_with(config, &master, 16 << 20).connect().await {
        Ok(client) => {
            println!("\nsaid {}", client.hostname());
            let _ = crate::cluster::until_end_of_input().await;
            client.close().await.unwrap();
        }
        Err(error) => println!("\nsaid refused: {error}"),
    }
}

fn opened(folder: &Path) {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Puts values to an owner, and waits for `holds`.
async fn put_to(port: u16, owner: &str, holds: impl Fn() -> bool) {
    let client = connect(&format!("127.0.0.1:{port}"), 0).await;
    for i in 0..8 {
        let key = format!("secret key {i}");
        client.put_with(key, &SECRET.repeat(1000)[..], &in_segment_of(owner)).await.unwrap();
    }
    eventually("the files have values and keys", PATIENCE, async || holds()).await;
}

fn has(path: &Path, bytes: &[u8]) -> bool {
    let content = std::fs::read(path).unwrap_or_default();
    content.windows(bytes.len()).any(|window| window == bytes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segment_files_are_private() {
    let (port, dir) = (free_port(), folder());
    opened(dir.path());
    let _master = master(port, &[]);
    let (segment, index) = (dir.path().join("segment"), dir.path().join("segment.objects"));
    for round in 0..2 {
        let mut owner = start_open("security::owner", port, &[("MOONCAKE_STORE_SEGMENT_FILE", &segment)]);
        let name = owner.lines_after("said ").next().unwrap();
        assert!(!name.starts_with("refused"), "{name}");
        if round == 0 {
            put_to(port, &name, || has(&segment, SECRET) && has(&index, b"secret key")).await;
        }
        check_private(dir.path(), &["segment", "segment.objects"]);
        owner.kill();
        // Earlier versions left the permissions to the umask.
        for path in [&segment, &index] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segment_files_of_others_and_links_are_refused_by_name() {
    let (port, dir) = (free_port(), folder());
    let _master = master(port, &[]);
    let letter = dir.path().join("letter");
    std::fs::write(&letter, "").unwrap();
    let segment = dir.path().join("segment");
    for (name, says) in [
        ("segment", "symbolic link"),
        ("segment.objects", "symbolic link"),
        ("segment", "user 65534"),
        ("segment.objects", "user 65534"),
    ] {
        let path = dir.path().join(name);
        match says {
            "symbolic link" => symlink(&letter, &path).unwrap(),
            _ => {
                std::fs::write(&path, "").unwrap();
                if chown(&path, Some(NOBODY), None).is_err() {
                    return;
                }
            }
        }
        let mut owner = start_open("security::owner", port, &[("MOONCAKE_STORE_SEGMENT_FILE", &segment)]);
        let said = owner.lines_after("said ").next().unwrap();
        assert!(said.starts_with("refused") && said.contains(says), "{said}");
        assert!(said.contains(path.to_str().unwrap()), "{said}");
        for path in [&segment, &dir.path().join("segment.objects")] {
            let _ = std::fs::remove_file(path);
        }
        assert_eq!(std::fs::metadata(&letter).unwrap().len(), 0);
    }
    // A link in place of a file that is being written is replaced, and leads nowhere.
    symlink(&letter, dir.path().join("segment.objects.new")).unwrap();
    let mut owner = start_open("security::owner", port, &[("MOONCAKE_STORE_SEGMENT_FILE", &segment)]);
    assert!(!owner.lines_after("said ").next().unwrap().starts_with("refused"));
    assert_eq!(std::fs::metadata(&letter).unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_are_private() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    opened(dir.path());
    let _master = master(port, &["--enable_offload=true"]);
    let disk = dir.path().join("disk");
    let mut owner = start_open("security::owner", port, &[("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", &disk)]);
    let name = owner.lines_after("said ").next().unwrap();
    put_to(port, &name, || has(&disk.join("index"), b"secret key")).await;
    check_private(dir.path(), &["disk/objects", "disk/index", "disk/lock"]);
    assert_eq!(mode(&disk), 0o700);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_are_private() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    opened(dir.path());
    let child = Command::new("sh")
        .args(["-c", "umask 0; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_mooncake_master")])
        .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--metrics_port=0"])
        .args(["--enable_snapshot=true", "--snapshot_interval_seconds=1", "--cluster_id=lab"])
        .args([format!("--rpc_port={port}"), format!("--snapshot_local_path={}", dir.path().display())])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _master = Process(child.unwrap());
    let own = dir.path().join("lab");
    eventually("a snapshot", PATIENCE, async || own.join("latest").exists()).await;
    check_private(dir.path(), &["lab/latest"]);
    assert_eq!(mode(&own), 0o700);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_files_are_for_the_group_and_for_folders_that_the_client_allows() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    opened(dir.path());
    let root = format!("--root_fs_dir={}", dir.path().display());
    let _master = master(port, &[&root, "--cluster_id=lab"]);
    let address = format!("127.0.0.1:{port}");
    let refused = builder(&address, 16 << 20).connect().await.unwrap();
    refused.put_with("k", SECRET, &PutOptions::new().upsert()).await.unwrap();
    let said = async || refused.status().files().is_some_and(|files| files.refused == 1);
    eventually("the file is refused", PATIENCE, said).await;
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let mut owner = start_open("security::writer", port, &[("MOONCAKE_FS_ROOTS", dir.path())]);
    assert_eq!(owner.lines_after("said ").next().unwrap(), "written");
    let found = files(dir.path());
    assert_eq!(found.iter().map(|path| mode(path)).collect::<Vec<_>>(), [0o640]);
    assert_eq!(mode(&dir.path().join("lab")), 0o750);
}

/// Process of a client that writes one shared file, with the settings of the environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn writer() {
    use mooncake_store::client::{ClientConfig, ClientEnvironment};
    let Some(master) = master_address() else { return };
    let config = ClientEnvironment::over(ClientConfig::default()).config;
    let client = crate::cluster::builder_with(config, &master, 16 << 20).connect().await.unwrap();
    client.put("secret key", SECRET).await.unwrap();
    let written = async || client.status().files().is_some_and(|files| files.written == 1);
    eventually("the file is written", PATIENCE, written).await;
    println!("\nsaid written");
    let _ = crate::cluster::until_end_of_input().await;
}
