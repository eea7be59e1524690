//! Tests with two processes on the fake libcuda. The owner is this test binary, started again for
//! the one test that serves memory until it is stopped.

use std::process::Command;

use mooncake_nvlink::allocator::{Backend, probe};
use mooncake_nvlink::testkit::{device, load, processes};
use mooncake_nvlink::{DeviceMemory, NvlinkConfig, NvlinkTransport, device_summaries};
use mooncake_transport::{BufferDesc, Protocol, SegmentDesc, Transport};

#[test]
#[ignore = "runs as the other process of the tests in this file"]
fn owner() {
    let fake = load();
    processes::owner(&|| fake.live_objects());
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
    assert!(reaches_another_host());
    assert_eq!(probe(0), Backend::Fabric);
    assert!(device_summaries().unwrap()[1].as_ref().unwrap().contains("fabric"));
}

/// Returns whether a node of this process reaches memory of another host by its handle.
fn reaches_another_host() -> bool {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let node = NvlinkTransport::start(NvlinkConfig::default(), runtime.handle()).unwrap();
    let mut desc = SegmentDesc::new("owner");
    desc.protocols.push(Protocol::NVLINK);
    desc.buffers.push(BufferDesc {
        addr: 0x10_0000,
        length: 4096,
        extra: [("shm_name".to_owned(), "AB".repeat(64).into())].into_iter().collect(),
        ..BufferDesc::default()
    });
    desc.extra.insert("nvlink_endpoint".into(), "another-boot:mooncake-nvlink-0".into());
    node.reaches(&desc)
}

/// Both processes run on devices of a fabric, while those of this process are not in one.
#[test]
fn memory_of_a_fabric_is_opened_by_its_handle() {
    assert!(own_test("fabric_user").env("FAKE_CUDA_FABRIC", "1").status().unwrap().success());
}

#[test]
#[ignore = "runs as the user's process in the test after it"]
fn user_without_a_channel() {
    processes::read_and_written(&spawn, 2);
    processes::by_descriptor_alone(&spawn);
    assert!(load().calls("cuIpcOpenMemHandle") >= 2);
    assert!(!reaches_another_host());
    assert_eq!(probe(0), Backend::Plain);
    let summary = device_summaries().unwrap().swap_remove(1).unwrap();
    assert!(
        summary.starts_with("cuda:1, ") && summary.contains("CUDA 12.8") && summary.contains("IPC"),
        "{summary}"
    );
    assert!(DeviceMemory::with_fabric(&device(0), 4096).unwrap_err().to_string().contains("fabric"));
}

/// Devices of most machines report a fabric and refuse to allocate, or to export, memory for it.
#[test]
fn memory_of_a_fabric_without_a_channel_is_opened_by_ipc() {
    for refusal in ["2", "3"] {
        let mut command = own_test("user_without_a_channel");
        assert!(command.env("FAKE_CUDA_FABRIC", refusal).status().unwrap().success(), "{refusal}");
    }
}

#[test]
#[ignore = "runs as the process in which the test after it counts"]
fn cycling_user() {
    const CYCLES: usize = 10_000;
    let fake = load();
    processes::cycles(&spawn, &|| fake.live_objects(), CYCLES);
    assert!(fake.calls("cuIpcOpenMemHandle") >= CYCLES as i64);
}

#[test]
fn ten_thousand_openings_leave_nothing_behind() {
    assert!(own_test("cycling_user").env("FAKE_CUDA_DELAY_US", "0").status().unwrap().success());
}

#[test]
#[ignore = "runs as the process in which the test after it counts"]
fn user_of_departed_owners() {
    let fake = load();
    processes::departed_owners(&spawn, &|| fake.live_objects(), 30);
}

#[test]
fn owners_that_depart_leave_nothing_behind() {
    assert!(own_test("user_of_departed_owners").env("FAKE_CUDA_DELAY_US", "0").status().unwrap().success());
}
