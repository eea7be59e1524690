//! Clients on hosts that lack the memory that their settings name: a client that has joined can be
//! filled to its last byte, and any other is refused by name. No process is ended by the kernel.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use mooncake_core::ErrorCode;
use mooncake_core::memory::{HostMemoryOptions, HugePages};
use mooncake_store::client::{ClientConfig, SegmentFile};

use crate::cluster::{SEGMENT, argument, builder_with, master, master_address, start};
use crate::process::free_port;

/// Length of the values.
const VALUE: usize = 1 << 20;

/// Bytes of memory for which no huge pages are reserved, in all likelihood.
const LARGE: u64 = 64 << 20;

/// Returns the number of huge pages that are free.
fn free_huge_pages() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    free.and_then(|free| free.trim().parse().ok()).unwrap_or(0)
}

/// Process of a client that joins, fills its segment, reads it back, and prints the outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn filler() {
    let Some(master) = master_address() else { return };
    let huge_pages = match argument::<u64>("TEST_HUGE") {
        Some(2) => HugePages::Size2M,
        Some(_) => HugePages::Size1G,
        None => HugePages::Off,
    };
    let config = ClientConfig {
        memory: HostMemoryOptions { huge_pages, ..HostMemoryOptions::default() },
        share_memory: argument::<u8>("TEST_TCP").is_none(),
        local_buffer: argument("TEST_BUFFER").unwrap_or(SEGMENT),
        segment_file: argument::<String>("TEST_FILE").map(SegmentFile::new),
        ..ClientConfig::default()
    };
    let segment = argument("TEST_SEGMENT").unwrap_or(SEGMENT);
    let client = match builder_with(config, &master, segment).connect().await {
        Ok(client) => client,
        Err(error) => return println!("\nsaid {} {error}", error.code().name()),
    };
    let mut read = 0;
    for i in 0..segment / VALUE as u64 {
        let value = vec![i as u8 | 1; VALUE];
        if client.put(format!("key {i}"), &value[..]).await.is_ok() {
            read += u64::from(client.get(format!("key {i}")).await.unwrap().is_some_and(|got| got == value));
        }
    }
    println!("\nsaid filled {read}");
    client.close().await.unwrap();
}

/// Starts the process above, and returns what it says. The process must end by itself.
fn outcome(arguments: &[(&str, String)]) -> String {
    let port = free_port();
    let _master = master(port, &[]);
    let mut client = start("promised_memory::filler", port, arguments);
    // Until the end of its output, which the process writes to until its end.
    let said: Vec<String> = client.lines_after("said ").collect();
    let ended = client.ended();
    assert!(ended.success(), "{arguments:?}: the process ended with {ended}");
    said.into_iter().next().unwrap_or_default()
}

fn is_filled(said: &str) -> bool {
    said.strip_prefix("filled ").is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n > 0))
}

#[test]
fn huge_pages_that_are_missing_are_refused_by_name() {
    // More than another test of this program reserves at the same time.
    let bytes = |name: &'static str, bytes: u64| (name, bytes.to_string());
    let (segment, buffer) = (bytes("TEST_SEGMENT", LARGE), bytes("TEST_BUFFER", LARGE));
    let (tcp, huge) = (("TEST_TCP", "1".to_owned()), |size: u8| ("TEST_HUGE", size.to_string()));
    for arguments in [
        vec![huge(2), segment.clone(), buffer.clone()],
        vec![huge(2), segment.clone(), buffer.clone(), tcp.clone()],
        vec![huge(1), segment.clone(), buffer.clone()],
        vec![huge(1), segment.clone(), buffer.clone(), tcp.clone()],
        // The local buffer alone, and the segment alone.
        vec![huge(2), bytes("TEST_SEGMENT", 0), buffer],
        vec![huge(2), segment, bytes("TEST_BUFFER", 0), tcp],
    ] {
        let said = outcome(&arguments);
        let refused = said.starts_with("BUFFER_OVERFLOW") && said.contains("huge pages of");
        // A machine may have enough of them.
        let enough = said.starts_with("filled ") && free_huge_pages() > 0;
        assert!(refused || enough, "{arguments:?}: {said}");
    }
}

#[test]
fn a_daemon_without_huge_pages_ends_with_an_error() {
    let port = free_port();
    let _master = master(port, &[]);
    for more in [&[][..], &[("MC_FORCE_TCP", "1")], &[("MC_STORE_HUGEPAGE_SIZE", "1GB")]] {
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_mooncake_client"))
            .args(["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE"])
            .args(["--global_segment_size=64MB", "--local_buffer_size=64MB"])
            .args([format!("--master_server_address=127.0.0.1:{port}"), format!("--port={}", free_port())])
            .env("MC_STORE_USE_HUGEPAGE", "1")
            .envs(more.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // With enough huge pages it would run for ever.
        let enough = free_huge_pages() * (2 << 20) >= LARGE;
        if enough {
            daemon.kill().unwrap();
        }
        let ended = daemon.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(enough || ended.status.signal().is_none() && !ended.status.success(), "{:?}", ended.status);
        assert!(enough || said.contains("huge pages of"), "{said}");
    }
}

#[test]
fn a_segment_file_that_cannot_be_used_has_a_code_of_files() {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let outcome_at = |path: &Path| outcome(&[("TEST_FILE", path.display().to_string())]);
    let code = |said: &str| said.split_whitespace().next().unwrap_or_default().to_owned();
    for (name, expected) in
        [("nowhere/segment", ErrorCode::FileNotFound), ("folder", ErrorCode::FileOpenFail)]
    {
        let path = folder.path().join(name);
        std::fs::create_dir_all(folder.path().join("folder")).unwrap();
        let said = outcome_at(&path);
        assert_eq!(code(&said), expected.name(), "{said}");
        assert!(said.contains(&path.display().to_string()), "{said}");
    }
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    assert_eq!(code(&outcome_at(&link)), "FILE_OPEN_FAIL");
    assert_eq!(code(&outcome_at(Path::new("/dev/null"))), "FILE_OPEN_FAIL");
    assert!(is_filled(&outcome_at(&folder.path().join("segment"))));
}

/// Script that mounts a small file system, and runs the test below on it.
const SMALL: &str = r#"
mount -t tmpfs -o size=8m none "$1" || exit 77
TEST_FOLDER="$1" "$2" --exact promised_memory::on_a_small_file_system --ignored --nocapture
"#;

#[test]
#[allow(clippy::print_stderr, reason = "a test that is left out says why")]
fn a_segment_file_on_a_full_file_system_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    let run = Command::new("unshare")
        .args(["--mount", "sh", "-c", SMALL, "sh"])
        .args([folder.path(), &test])
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if run.status.code() == Some(77) || said.contains("unshare failed") {
        return eprintln!("left out: no file system can be mounted here: {said}");
    }
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "child process of the test above, on a small file system"]
fn on_a_small_file_system() {
    let Some(folder) = argument::<String>("TEST_FOLDER") else { return };
    let file = ("TEST_FILE", format!("{folder}/segment"));
    let said = outcome(std::slice::from_ref(&file));
    assert!(said.starts_with("FILE_WRITE_FAIL") && said.contains("free space"), "{said}");
    assert!(said.contains(&file.1), "{said}");
    // Nothing of the attempt is left in the way of a smaller one.
    let smaller = ("TEST_SEGMENT", (4 << 20).to_string());
    let said = outcome(&[file, smaller]);
    assert!(is_filled(&said), "{said}");
}
