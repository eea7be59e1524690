//! Tests with two processes on the fake libcuda. The owner is this test binary, started again for
//! the one test that serves memory until it is stopped.

use std::process::Command;

use mooncake_nvlink::testkit::{load, processes};

#[test]
#[ignore = "runs as the other process of the tests in this file"]
fn owner() {
    let fake = load();
    processes::owner(&|| fake.live());
}

fn spawn() -> Command {
    load();
    own_test("owner")
}

/// Returns the command that runs one test of this binary.
fn own_test(test: &str) -> Command {
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
fn a_region_closed_under_a_reader_never_shows_later_bytes() {
    processes::closed_under_a_reader(&spawn);
}

#[test]
fn a_descriptor_alone_leads_to_memory() {
    processes::by_descriptor_alone(&spawn);
}

#[test]
fn memory_at_a_reused_address_is_not_taken_for_the_earlier_one() {
    assert!(processes::two_nodes_of_one_process(&spawn), "the fake reuses addresses");
}

#[test]
#[ignore = "runs as the user's process in the test after it"]
fn fabric_user() {
    processes::read_and_written(&spawn, 2);
    processes::by_descriptor_alone(&spawn);
    assert!(load().calls("cuMemImportFromShareableHandle") >= 2);
    assert_eq!(load().calls("cuIpcOpenMemHandle"), 0);
}

/// Both processes run on devices of a fabric, while those of this process are not in one.
#[test]
fn memory_of_a_fabric_is_opened_by_its_handle() {
    assert!(own_test("fabric_user").env("DOUBLE_FABRIC", "1").status().unwrap().success());
}

#[test]
#[ignore = "runs as the process in which the test after it counts"]
fn cycling_user() {
    const CYCLES: usize = 10_000;
    let fake = load();
    processes::cycles(&spawn, &|| fake.live(), CYCLES);
    assert!(fake.calls("cuIpcOpenMemHandle") >= CYCLES as i64);
}

#[test]
fn ten_thousand_openings_leave_nothing_behind() {
    assert!(own_test("cycling_user").env("DOUBLE_DELAY_US", "0").status().unwrap().success());
}
