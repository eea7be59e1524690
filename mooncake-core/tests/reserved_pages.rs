//! Memory whose pages may be missing: an allocation that succeeds can be written to its last byte,
//! and any other is refused by name. The kernel ends a process that touches a missing page, so each
//! case runs in a process of its own.
#![allow(unsafe_code, reason = "the tests write to every page")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "child processes print their outcome")]

use std::fs::File;
use std::path::Path;
use std::process::Command;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, HugePages, MemorySource, numa_node_limit};
use mooncake_core::{Error, Result};

const MIB: usize = 1 << 20;

/// Returns an argument that the parent process passed in the environment.
fn argument(name: &str) -> Option<String> {
    #[allow(clippy::disallowed_methods, reason = "arguments of a child process of this test")]
    std::env::var(name).ok()
}

/// Writes to every page, and prints the outcome.
fn touch(memory: Result<HostMemory>) {
    match memory {
        Ok(memory) => {
            let span = memory.span();
            for at in (0..span.len).step_by(4096).chain([span.len - 1]) {
                // SAFETY: in bounds, and this is the only user of the memory.
                unsafe { span.ptr.add(at).write_volatile(at as u8 | 1) };
            }
            println!("\nsaid written");
        }
        Err(error) => println!("\nsaid {} {error}", error.code().name()),
    }
}

/// Process of one case. Its arguments select the memory.
#[test]
#[ignore = "child process of the other tests"]
fn allocate_and_touch() {
    let Some(case) = argument("TEST_MEMORY") else { return };
    let len = argument("TEST_MIB").and_then(|n| n.parse::<usize>().ok()).unwrap_or(1) * MIB;
    let with = |huge_pages, shared: bool, numa_node| {
        let shared = shared.then(|| "mooncake test".to_owned());
        HostMemory::with(len, &HostMemoryOptions { huge_pages, shared, numa_node })
    };
    let file = |map: fn(&File, usize) -> Result<HostMemory>| {
        let path = argument("TEST_FILE").unwrap();
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        map(&file, len)
    };
    touch(match &*case {
        "2M private" => with(HugePages::Size2M, false, None),
        "2M shared" => with(HugePages::Size2M, true, None),
        "1G private" => with(HugePages::Size1G, false, None),
        "1G shared" => with(HugePages::Size1G, true, None),
        "2M of a node" => with(HugePages::Size2M, false, Some(0)),
        "shared" => with(HugePages::Off, true, None),
        "file of its own" => file(|file, len| HostMemory::map_alone(file.try_clone().unwrap(), len, None)),
        "part of a file" => file(|file, len| {
            file.set_len(len as u64).map_err(Error::from)?;
            HostMemory::map_filled(file, 0, len)
        }),
        other => panic!("{other}"),
    });
}

/// Runs a case after shell commands, in a mount namespace of its own if there are some. Returns
/// what the process said, or `None` where there are no such namespaces.
fn outcome_after(before: &str, case: &str, mib: usize, more: &[(&str, &str)]) -> Option<String> {
    let program = std::env::current_exe().unwrap();
    let script =
        format!("{before}\nexec {} --exact allocate_and_touch --ignored --nocapture", program.display());
    let mut command = match before {
        "" => Command::new("sh"),
        _ => {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh"]);
            command
        }
    };
    command.args(["-ec", &script]).env("TEST_MEMORY", case).env("TEST_MIB", mib.to_string());
    let run = command.envs(more.iter().copied()).output().unwrap();
    let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if said.contains("unshare failed") || said.contains("permission denied") {
        eprintln!("skipped: no namespaces here: {said}");
        return None;
    }
    assert!(run.status.success(), "{case}: the process ended with {}: {said}", run.status);
    said.lines().find_map(|line| line.strip_prefix("said ").map(str::to_owned))
}

fn outcome(case: &str, mib: usize, more: &[(&str, &str)]) -> String {
    outcome_after("", case, mib, more).unwrap_or_default()
}

#[test]
fn huge_pages_are_there_or_refused_by_name() {
    // More than the machine has reserved, in all likelihood, but far less than its memory.
    for case in ["2M private", "2M shared", "2M of a node"] {
        let said = outcome(case, 64, &[]);
        let refused = said.starts_with("BUFFER_OVERFLOW") && said.contains("32 huge pages of 2048 KiB");
        assert!(refused || said == "written", "{case}: {said}");
    }
    for case in ["1G private", "1G shared"] {
        let said = outcome(case, 1024, &[]);
        let refused = said.starts_with("BUFFER_OVERFLOW") && said.contains("1 huge pages of 1048576 KiB");
        assert!(refused || said == "written", "{case}: {said}");
    }
}

#[test]
fn files_on_a_full_file_system_are_refused_with_codes_of_files() {
    let folder = std::env::temp_dir().join(format!("mooncake-small-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (shown, file) = (folder.display(), folder.join("file"));
    let small = format!("mount -t tmpfs -o size=4m tmpfs {shown}");
    let files = [("TEST_FILE", file.to_str().unwrap())];
    for case in ["file of its own", "part of a file"] {
        let Some(said) = outcome_after(&small, case, 8, &files) else { break };
        assert!(said.starts_with("FILE_WRITE_FAIL") && said.contains("free space"), "{case}: {said}");
        assert_eq!(outcome_after(&small, case, 3, &files).as_deref(), Some("written"), "{case}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn shared_memory_needs_no_space_in_dev_shm() {
    let small = "mount -t tmpfs -o size=64k tmpfs /dev/shm";
    if let Some(said) = outcome_after(small, "shared", 8, &[]) {
        assert_eq!(said, "written");
    }
}

#[test]
fn a_numa_node_that_exists_has_a_limit() {
    if Path::new("/sys/devices/system/node/node0/meminfo").exists() {
        let limit = numa_node_limit(Path::new("/"), 0).unwrap();
        assert!(0 < limit.free && limit.free <= limit.total, "{limit:?}");
    }
}
