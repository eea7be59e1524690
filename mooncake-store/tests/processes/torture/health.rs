//! Memory and descriptors of processes.

use std::fs;
use std::path::Path;

/// Memory that a process may gain between its warm state and the end of a run, in KiB.
const MORE_MEMORY: u64 = 32 << 10;
/// Descriptors that it may gain.
const MORE_DESCRIPTORS: usize = 16;

/// Memory and descriptors of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Health {
    resident_kib: u64,
    descriptors: usize,
}

impl Health {
    pub(super) fn of(process: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident_kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count);
        Self { resident_kib, descriptors }
    }

    /// # Errors
    /// Names what has grown since the process was warm.
    pub(super) fn assert_flat(&self, warm: &Self, what: &str) -> Result<(), String> {
        if self.resident_kib > warm.resident_kib * 5 / 4 + MORE_MEMORY
            || self.descriptors > warm.descriptors + MORE_DESCRIPTORS
        {
            return Err(format!("the {what} grows: warm {warm:?}, now {self:?}"));
        }
        Ok(())
    }
}

/// Returns the processes that have this folder in their arguments or environment.
pub(super) fn processes_in(folder: &Path) -> Vec<u32> {
    let folder = folder.to_str().unwrap().as_bytes();
    let has =
        |path: String| fs::read(path).unwrap_or_default().windows(folder.len()).any(|part| part == folder);
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let others = processes.filter(|process| *process != std::process::id());
    others
        .filter(|process| has(format!("/proc/{process}/environ")) || has(format!("/proc/{process}/cmdline")))
        .collect()
}
