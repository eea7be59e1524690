//! Limits of the memory of this process: the host's memory, and those of its control groups.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::promised;
use super::reserve::{is_in_memory, missing_bytes};
use crate::error::{Error, ErrorCode, Result};

/// Limit of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Total number of bytes.
    pub total: u64,
    /// Number of bytes that are not in use.
    pub free: u64,
    /// File that states the limit.
    pub origin: PathBuf,
}

/// Shortest memory that [`check_free_memory`] checks, in bytes.
const CHECKED: usize = 64 << 20;

/// Checks that the host and the control groups of the process have `len` bytes of free memory, so
/// that memory of ordinary pages is there when it is written. Short memory is not checked.
///
/// # Errors
/// Returns `BUFFER_OVERFLOW` with the limit that is too low.
pub fn check_free_memory(len: usize) -> Result<()> {
    if len < CHECKED || crate::fault_injection::is_planted("promised-memory") {
        return Ok(());
    }
    match unpromised_limits(len as u64).into_iter().find(|limit| len as u64 > limit.free) {
        None => Ok(()),
        Some(MemoryLimit { total, free, origin }) => Err(Error::new(
            ErrorCode::BufferOverflow,
            format!(
                "cannot allocate memory: the kernel would end the process when it is written. \
                 wanted={len} free={free} total={total} limit={}; allocate less, or raise \
                 the limit",
                origin.display()
            ),
        )),
    }
}

/// Returns the bytes of memory that the pages of a part of a file still need: those of its holes,
/// if the file lies in memory (tmpfs, a memfd), and otherwise none.
pub fn missing_file_memory(file: &File, offset: u64, len: u64) -> u64 {
    if is_in_memory(file) { missing_bytes(file, offset, len) } else { 0 }
}

/// Returns the limits that apply to this process, for a demand of `wanted` bytes. Memory that it
/// has mapped and not yet written is not free: the memory of [`HostMemory`](super::HostMemory) with
/// ordinary pages. The written part of that memory is counted if the demand depends on it.
pub fn unpromised_limits(wanted: u64) -> Vec<MemoryLimit> {
    let mut limits = memory_limits(Path::new("/"));
    let at_most = promised::missing_bytes_at_most();
    let is_ample = limits.iter().all(|limit| limit.free.saturating_sub(at_most) >= wanted);
    let promised = if at_most == 0 || is_ample { at_most } else { promised::count_missing_bytes() };
    limits.iter_mut().for_each(|limit| limit.free = limit.free.saturating_sub(promised));
    limits
}

/// Returns the limits that apply to this process. `root` is `/` except in tests. Files that are
/// missing or unreadable impose no limit.
pub fn memory_limits(root: &Path) -> Vec<MemoryLimit> {
    let mut limits = Vec::new();
    let origin = root.join("proc/meminfo");
    let text = read(&origin);
    if let (Some(total), Some(free)) = (meminfo(&text, "MemTotal:"), meminfo(&text, "MemAvailable:")) {
        limits.push(MemoryLimit { total, free, origin });
    }
    for line in read(&root.join("proc/self/cgroup")).lines() {
        // `0::/path` is version 2 of control groups, `4:memory:/path` is version 1.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, files) = match controllers {
            "" => ("sys/fs/cgroup", ["memory.max", "memory.current", "inactive_file ", "active_file "]),
            _ if controllers.split(',').any(|name| name == "memory") => (
                "sys/fs/cgroup/memory",
                [
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file ",
                    "total_active_file ",
                ],
            ),
            _ => continue,
        };
        // In a container, the path may be that of the host while the group is mounted as the root.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            limits.extend(of_group(&root.join(mount).join(group), files));
        }
    }
    limits
}

/// Returns the limit of the memory of a NUMA node, for memory that is bound to the node. `root` is
/// `/` except in tests.
pub fn numa_node_limit(root: &Path, node: u32) -> Option<MemoryLimit> {
    let origin = root.join(format!("sys/devices/system/node/node{node}/meminfo"));
    let text = read(&origin);
    // Each line begins with `Node 0 `.
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.split_once(name).map(|(_, value)| value))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let total = of(" MemTotal:")?;
    // The kernel can reclaim pages of files.
    let free = [" MemFree:", " Active(file):", " Inactive(file):", " SReclaimable:"];
    let free = free.iter().filter_map(|name| of(name)).fold(0, u64::saturating_add);
    Some(MemoryLimit { total, free: free.min(total), origin })
}

/// Returns the limit of one control group, if it has one.
fn of_group(folder: &Path, [max, current, inactive, active]: [&str; 4]) -> Option<MemoryLimit> {
    let origin = folder.join(max);
    // The text `max` is not a number and means that there is no limit.
    let total: u64 = read(&origin).trim().parse().ok()?;
    let used: u64 = read(&folder.join(current)).trim().parse().unwrap_or(0);
    // The kernel can reclaim pages of files.
    let stat = read(&folder.join("memory.stat"));
    let cached: u64 = [inactive, active]
        .iter()
        .filter_map(|name| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok()))
        .sum();
    Some(MemoryLimit { total, free: total.saturating_sub(used.saturating_sub(cached)), origin })
}

/// Returns a value of `/proc/meminfo` in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
