//! Data of releases: a snapshot, a segment file with its index, and an inventory of each release,
//! read by this version.
//!
//! `MOONCAKE_CORPUS=v0.1.0` names the folder, and the ignored test `corpus::write` writes the data
//! of this version into it. A release adds its folder and never changes the folder of another.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, checksum};
use mooncake_core::ErrorCode;
use mooncake_store::client::SegmentFile;
use mooncake_store::config::MasterConfig;
use mooncake_store::protocol::pack;
use mooncake_store::protocol::wire::InventoryPage;
use mooncake_store::server::MasterServer;

use crate::cluster::{PATIENCE, argument, builder, connect, eventually, master_shown};
use crate::process::{Process, free_port, metric};
use crate::segment_files::{Owner, folder, hits, value};

/// Size of the segment file in bytes.
const SEGMENT: u64 = 64 << 10;
/// Number of objects in the segment file, of which one is removed before the snapshot.
const OBJECTS: u64 = 12;
const REMOVED: u64 = 3;
/// Number of objects in the inventory.
const LISTED: u64 = 3;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

/// Starts a master that writes snapshots into `folder` and restores the newest snapshot there.
fn master_in(folder: &Path) -> (u16, u16, Process) {
    let (port, pages) = (free_port(), free_port());
    let path = format!("--snapshot_local_path={}", folder.display());
    let flags = [
        "--enable_snapshot=true",
        "--enable_snapshot_restore=true",
        "--snapshot_interval_seconds=1",
        "--client_ttl=60",
        &path,
    ];
    (port, pages, master_shown(port, pages, &flags))
}

fn segment_arguments() -> [(&'static str, String); 2] {
    [("TEST_SEGMENT", SEGMENT.to_string()), ("TEST_OBJECTS", OBJECTS.to_string())]
}

/// Writes the corpus of this version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes the corpus of a release"]
async fn write() {
    let Some(release) = argument::<String>("MOONCAKE_CORPUS") else { return };
    let to = corpus().join(release);
    std::fs::create_dir_all(&to).unwrap();

    let (snapshots, memory) = (tempfile::tempdir().unwrap(), folder());
    let file = SegmentFile::new(memory.path().join("segment"));
    let (port, pages, master) = master_in(snapshots.path());
    let reader = connect(&format!("127.0.0.1:{port}"), 0).await;
    let owner = Owner::ready_with(port, &file.path, Some((0, OBJECTS)), &segment_arguments());
    assert!(reader.remove(format!("key {REMOVED}"), true).await.unwrap());
    let count = || metric(pages, "master_snapshot_success").unwrap_or(0);
    let before = count();
    eventually("two snapshots after the removal", PATIENCE, async || count() >= before + 2).await;
    owner.0.kill();
    master.kill();
    let newest = std::fs::read_dir(snapshots.path().join("mooncake_cluster")).unwrap();
    let newest = newest.map(|entry| entry.unwrap().path()).filter(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("snapshot-"))
    });
    std::fs::copy(newest.max().unwrap(), to.join("snapshot")).unwrap();
    std::fs::copy(&file.path, to.join("segment")).unwrap();
    std::fs::copy(&file.index, to.join("segment.objects")).unwrap();
    let about = std::fs::metadata(&file.path).unwrap();
    std::fs::write(to.join("segment.inode"), [about.dev().to_le_bytes(), about.ino().to_le_bytes()].concat())
        .unwrap();

    let config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        metrics_host: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_port: 0,
        ..MasterConfig::default()
    };
    let server = MasterServer::start(config).await.unwrap();
    let client = builder(&server.addresses().rpc.to_string(), 1 << 20).connect().await.unwrap();
    for i in 0..LISTED {
        client.put(format!("key {i}"), &value(i)[..]).await.unwrap();
    }
    let page = server.master().inventory(client.id(), 0);
    let mut bytes = Vec::new();
    pack::encode::<Result<InventoryPage, ErrorCode>>(&Ok(page), &mut bytes);
    std::fs::write(to.join("inventory"), bytes).unwrap();
    client.close().await.unwrap();
    server.stop().await;
}

/// Changes the file that an index names: its header holds the device and the inode of the file.
fn adopt(index: &mut [u8], from: &[u8], file: &Path) {
    let about = std::fs::metadata(file).unwrap();
    let to = [about.dev().to_le_bytes(), about.ino().to_le_bytes()].concat();
    let at = index.windows(from.len()).position(|window| window == from).expect("the header names the file");
    index[at..at + to.len()].copy_from_slice(&to);
    // After the eight bytes of the name: length (4), CRC-64 (8), header.
    let len = u32::from_le_bytes(index[8..12].try_into().unwrap()) as usize;
    let sum = checksum(CrcAlgorithm::Crc64Ecma182, &index[20..20 + len]);
    index[12..20].copy_from_slice(&sum.to_le_bytes());
}

fn releases() -> Vec<PathBuf> {
    let mut folders: Vec<_> =
        std::fs::read_dir(corpus()).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty(), "there is no release");
    folders
}

/// A cluster whose master and client were upgraded at once serves what the release left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_and_snapshots_of_every_release_are_served() {
    for release in releases() {
        let (snapshots, memory) = (tempfile::tempdir().unwrap(), folder());
        let cluster = snapshots.path().join("mooncake_cluster");
        std::fs::create_dir(&cluster).unwrap();
        std::fs::copy(release.join("snapshot"), cluster.join("snapshot-00000000000000000001")).unwrap();
        let file = SegmentFile::new(memory.path().join("segment"));
        std::fs::copy(release.join("segment"), &file.path).unwrap();
        let mut index = std::fs::read(release.join("segment.objects")).unwrap();
        adopt(&mut index, &std::fs::read(release.join("segment.inode")).unwrap(), &file.path);
        std::fs::write(&file.index, index).unwrap();

        let (port, _, _master) = master_in(snapshots.path());
        let reader = connect(&format!("127.0.0.1:{port}"), 0).await;
        let _owner = Owner::ready_with(port, &file.path, None, &segment_arguments());
        eventually("all objects but the removed one are served", PATIENCE, async || {
            hits(&reader, 0..OBJECTS).await == OBJECTS - 1
        })
        .await;
        assert_eq!(reader.get(format!("key {REMOVED}")).await.unwrap(), None, "{}", release.display());
    }
}

#[test]
fn inventories_of_every_release_are_read() {
    for release in releases() {
        let bytes = std::fs::read(release.join("inventory")).unwrap();
        let page = pack::decode::<Result<InventoryPage, ErrorCode>>(&bytes).unwrap().unwrap();
        let stored: Vec<_> = page.changes.iter().filter_map(|change| change.stored.as_ref()).collect();
        for i in 0..LISTED {
            let key = format!("key {i}").into_bytes();
            let one = stored.iter().find(|one| one.key == key).expect("the key is listed");
            assert_eq!(one.len, value(i).len() as u64, "{}", release.display());
        }
        assert!(page.whole && !page.lost);
    }
}
