//! A member that has forked dies, and its child lives on: ports and files are free for the next process.

use std::path::PathBuf;

use mooncake_core::testkit::{ForkedChild, fork_child};
use mooncake_store::client::{ClientConfig, OffloadConfig, SegmentFile};

use crate::process::{Process, free_port};
use crate::support::{SEGMENT, builder_with, master, order, start, told_master, until_end_of_input};

/// The process of a member with a segment file or a disk. It forks if it is told to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other processes of the tests in this binary"]
async fn member() {
    let (Some(master), Some(folder)) = (told_master(), order::<PathBuf>("TEST_FOLDER")) else { return };
    let builder = match order::<u8>("TEST_DISK") {
        None => {
            let segment_file = Some(SegmentFile::new(folder.join("segment")));
            builder_with(ClientConfig { segment_file, ..ClientConfig::default() }, &master, SEGMENT)
        }
        Some(_) => {
            let disk = OffloadConfig { capacity: 64 << 20, buffer: 16 << 20, ..OffloadConfig::new(folder) };
            builder_with(ClientConfig::default(), &master, SEGMENT).offload(disk)
        }
    };
    let client = match builder.connect().await {
        Ok(client) => client,
        Err(error) => return println!("\nsaid {error}"),
    };
    match order::<u8>("TEST_FORK") {
        Some(_) => println!("\nsaid child {}", fork_child().unwrap()),
        None => println!("\nsaid ready"),
    }
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

fn start_member(port: u16, orders: &[(&str, String)], fork: bool) -> (Process, String) {
    let fork: &[(&str, String)] = if fork { &[("TEST_FORK", "1".into())] } else { &[] };
    let mut member = start("forked::member", port, &[orders, fork].concat());
    let said = member.said("said ").next().unwrap_or_default();
    (member, said)
}

fn is_free_while_a_child_lives_on(disk: bool, in_use: &str) {
    let port = free_port();
    let _master = master(port, &["--enable_offload"]);
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut orders = vec![("TEST_FOLDER", folder.path().display().to_string())];
    orders.extend(disk.then(|| ("TEST_DISK", "1".into())));
    let (owner, said) = start_member(port, &orders, true);
    let child = said.strip_prefix("child ").and_then(|number| number.parse().ok());
    let child = ForkedChild(child.unwrap_or_else(|| panic!("{said}")));
    let (_, said) = start_member(port, &orders, false);
    assert!(said.contains(in_use), "the owner is alive: {said}");
    owner.kill();
    let (_, said) = start_member(port, &orders, false);
    assert_eq!(said, "ready");
    drop(child);
}

#[test]
fn the_segment_file_of_a_killed_process_is_free_while_its_child_lives_on() {
    is_free_while_a_child_lives_on(false, "another process has it");
}

#[test]
fn the_disk_of_a_killed_process_is_free_while_its_child_lives_on() {
    is_free_while_a_child_lives_on(true, "is in use by process");
}
