//! Process of an owner of memory, which may be a file, or be beside a disk.

use std::path::PathBuf;
use std::time::Duration;

use mooncake_store::client::{ClientConfig, OffloadConfig, SegmentFile};

use super::client::{commands, connect};
use crate::cluster::{argument, builder_with, master_address};

/// Size of the segment of an owner.
pub(super) const SEGMENT: u64 = 12 << 20;
/// Size of a segment that an owner mounts and unmounts.
const MOUNTED: u64 = 4 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn owner() {
    let (Some(master), Some(slot)) = (master_address(), argument::<usize>("TEST_SLOT")) else { return };
    let commands = commands();
    let file = argument::<PathBuf>("TEST_FILE").map(SegmentFile::new);
    let disk = argument::<PathBuf>("TEST_FOLDER").map(|folder| OffloadConfig {
        interval: Duration::from_millis(200),
        capacity: 128 << 20,
        buffer: 8 << 20,
        ..OffloadConfig::new(folder)
    });
    let make = || {
        let config =
            ClientConfig { segment_file: file.clone(), offload: disk.clone(), ..ClientConfig::default() };
        builder_with(config, &master, SEGMENT).local_buffer(1 << 20).share_memory(slot % 2 == 0)
    };
    let client = connect(make).await;
    println!("\n> ready {}", client.hostname());
    let mut mounted = None;
    loop {
        let command = match commands.try_recv() {
            Ok(command) => command,
            Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
            Err(std::sync::mpsc::TryRecvError::Empty) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        match (command.as_str(), mounted.take()) {
            ("mount", None) => mounted = client.segments().mount(MOUNTED).await.ok(),
            ("mount", Some(id)) => drop(client.segments().unmount(id).await),
            ("lasting", before) => {
                mounted = before;
                println!("> lasting {}", client.status().lasting_objects().await);
            }
            (other, _) => println!("> wrong owner {slot}: an unknown command: {other}"),
        }
    }
    // A master that is stopped does not respond; the owner leaves nevertheless.
    let closed = client.close().await;
    println!("> left {closed:?}");
}
