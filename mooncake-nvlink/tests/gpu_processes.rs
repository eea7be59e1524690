//! Two processes on the double of libcuda: the owner is this test binary, started again for the one test that serves memory until it is told not to.

use std::process::Command;

use mooncake_nvlink::testkit::{load, processes};

#[test]
#[ignore = "the other process of the tests in this file"]
fn owner() {
    let double = load();
    processes::owner(&|| double.live());
}

fn spawn() -> Command {
    load();
    again("owner")
}

/// This binary, for one of its tests.
fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture"]);
    command
}

#[test]
fn memory_of_another_process_is_read_and_written() {
    processes::read_and_written(&spawn, 2);
}

#[test]
fn a_killed_owner_is_unavailable_at_once_and_the_next_one_is_another() {
    processes::killed_and_followed(&spawn);
}

#[test]
fn a_region_closed_under_a_reader_never_shows_what_came_after() {
    processes::closed_under_a_reader(&spawn);
}

#[test]
fn a_descriptor_alone_leads_to_memory() {
    processes::by_descriptor_alone(&spawn);
}

#[test]
fn memory_at_the_place_of_other_memory_is_not_taken_for_that() {
    assert!(processes::two_nodes_of_one_process(&spawn), "the double gives addresses out again");
}

#[test]
#[ignore = "the user's process of the test after it"]
fn fabric_user() {
    processes::read_and_written(&spawn, 2);
    processes::by_descriptor_alone(&spawn);
    assert!(load().calls("cuMemImportFromShareableHandle") >= 2);
    assert_eq!(load().calls("cuIpcOpenMemHandle"), 0);
}

/// Both processes on devices of a fabric, which this one's are not.
#[test]
fn memory_of_a_fabric_is_opened_by_its_handle() {
    assert!(again("fabric_user").env("DOUBLE_FABRIC", "1").status().unwrap().success());
}

#[test]
#[ignore = "a process of its own, in which the test after it counts"]
fn cycling_user() {
    const CYCLES: usize = 10_000;
    let double = load();
    processes::cycles(&spawn, &|| double.live(), CYCLES);
    assert!(double.calls("cuIpcOpenMemHandle") >= CYCLES as i64);
}

#[test]
fn nothing_is_left_of_ten_thousand_openings() {
    assert!(again("cycling_user").env("DOUBLE_DELAY_US", "0").status().unwrap().success());
}
