//! Available memory of the host and of the control groups of the process.

use std::path::{Path, PathBuf};

use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::HugePages;
use mooncake_core::{Error, ErrorCode, Result};

use crate::config::ClientConfig;

/// Limit of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit {
    /// Total number of bytes.
    total: u64,
    /// Number of bytes that are not in use.
    free: u64,
    /// File that states the limit.
    origin: PathBuf,
}

impl ClientConfig {
    /// Checks that the host and the control groups have enough memory, unless
    /// [`allow_overcommit`](Self::allow_overcommit) is set. `held` is the number of bytes that this
    /// client offers already. Their pages may not be allocated yet.
    ///
    /// Huge pages are reserved when they are mapped, and a segment file is filled at once, so
    /// neither needs this check.
    pub(crate) fn check_memory(&self, held: u64, bytes: u64) -> Result<()> {
        let reserved = self.segment_file.is_some() || self.memory.huge_pages != HugePages::Off;
        if self.allow_overcommit || reserved || bytes == 0 || is_planted("overcommit") {
            return Ok(());
        }
        check(&limits(Path::new("/")), held, bytes)
    }
}

fn check(limits: &[Limit], held: u64, bytes: u64) -> Result<()> {
    for limit in limits {
        if bytes <= limit.free && held.saturating_add(bytes) <= limit.total {
            continue;
        }
        let Limit { total, free, origin } = limit;
        return Err(Error::new(
            ErrorCode::BufferOverflow,
            format!(
                "cannot offer memory: the kernel would end the process when the memory is written. \
                 wanted={bytes} offered={held} \
                 free={free} total={total} limit={}; offer less (global_segment_size), \
                 raise the limit, or set allow_overcommit",
                origin.display()
            ),
        ));
    }
    Ok(())
}

/// Returns the limits that apply to this process. `root` is `/` except in tests. Files that are
/// missing or unreadable impose no limit.
fn limits(root: &Path) -> Vec<Limit> {
    let mut limits = Vec::new();
    let origin = root.join("proc/meminfo");
    let text = read(&origin);
    if let (Some(total), Some(free)) = (meminfo(&text, "MemTotal:"), meminfo(&text, "MemAvailable:")) {
        limits.push(Limit { total, free, origin });
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

/// Returns the limit of one control group, if it has one.
fn of_group(folder: &Path, [max, current, inactive, active]: [&str; 4]) -> Option<Limit> {
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
    Some(Limit { total, free: total.saturating_sub(used.saturating_sub(cached)), origin })
}

/// Returns a value of `/proc/meminfo` in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 16384 kB\nMemFree: 1 kB\nMemAvailable: 8192 kB\n");

    fn refusal(files: &[(&str, &str)], held: u64, bytes: u64) -> Option<String> {
        let root = tree(files);
        check(&limits(root.path()), held, bytes).err().map(|error| {
            assert_eq!(error.code(), ErrorCode::BufferOverflow);
            error.to_string()
        })
    }

    #[test]
    fn memory_beyond_the_hosts_or_a_groups_is_refused() {
        const MIB: u64 = 1 << 20;
        assert_eq!(refusal(&[], 0, u64::MAX), None, "nothing is known");
        assert_eq!(refusal(&[MEMINFO], 0, 8 * MIB), None);
        assert!(refusal(&[MEMINFO], 0, 8 * MIB + 1).unwrap().contains("proc/meminfo"));
        assert!(
            refusal(&[MEMINFO], 12 * MIB, 5 * MIB).unwrap().contains("total=16777216"),
            "what is offered is not taken yet"
        );
        let second = [
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/container\n"),
            ("sys/fs/cgroup/pod/memory.max", "6291456\n"),
            ("sys/fs/cgroup/pod/memory.current", "4194304\n"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 1\nfile 99\ninactive_file 1048576\nactive_file 1048576\n",
            ),
            ("sys/fs/cgroup/pod/container/memory.max", "max\n"),
        ];
        assert_eq!(refusal(&second, 0, 4 * MIB), None, "pages of files give way");
        assert!(refusal(&second, 0, 4 * MIB + 1).unwrap().contains("pod/memory.max"));
        let namespaced = [MEMINFO, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "2097152\n")];
        assert!(refusal(&namespaced, 0, 2 * MIB + 1).unwrap().contains("free=2097152"));
        let first = [
            MEMINFO,
            ("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/host/path\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "3145728\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "2097152\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1048576\n"),
        ];
        assert_eq!(refusal(&first, 0, 2 * MIB), None);
        assert!(refusal(&first, 0, 2 * MIB + 1).unwrap().contains("memory.limit_in_bytes"));
    }

    #[test]
    fn programs_choose_whether_memory_is_checked() {
        let wanted = 1 << 60;
        let free = ClientConfig { allow_overcommit: true, ..ClientConfig::default() };
        free.check_memory(0, wanted).unwrap();
        let bound = ClientConfig { allow_overcommit: false, ..free };
        let error = bound.check_memory(0, wanted).unwrap_err().to_string();
        assert!(error.contains("allow_overcommit") && error.contains("cannot offer memory"), "{error}");
        bound.check_memory(0, 4096).unwrap();
    }
}
