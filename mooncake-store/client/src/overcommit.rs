//! Available memory of the host and of the control groups of the process.

use std::fmt;
use std::fs::File;
use std::path::Path;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::{
    HugePages, MemoryLimit, check_free_memory, missing_file_memory, numa_node_limit, unpromised_limits,
};
use mooncake_core::{Error, ErrorCode, Result};

use crate::config::ClientConfig;

/// Memory that a client is about to allocate, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Demand {
    segment: u64,
    local_buffer: u64,
    hot_cache: u64,
    /// Buffer for the readers of a disk.
    disk_buffer: u64,
}

impl Demand {
    fn total(self) -> u64 {
        let parts = [self.segment, self.local_buffer, self.hot_cache, self.disk_buffer];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, local_buffer, hot_cache, disk_buffer } = *self;
        write!(f, "wanted={} segment={segment} local_buffer={local_buffer}", self.total())?;
        for (name, bytes) in [("hot_cache", hot_cache), ("disk_buffer", disk_buffer)] {
            if bytes > 0 {
                write!(f, " {name}={bytes}")?;
            }
        }
        Ok(())
    }
}

impl ClientConfig {
    /// Checks that the host and the control groups have enough memory for a segment, unless
    /// [`allow_overcommit`](Self::allow_overcommit) is set. `held` is the number of bytes that this
    /// client offers already. Their pages may not be allocated yet.
    ///
    /// Huge pages are allocated when they are mapped, so they need no check.
    pub(crate) fn check_memory(&self, held: u64, bytes: u64) -> Result<()> {
        self.check_demand(held, Demand { segment: bytes, ..Demand::default() })
    }

    /// Checks the memory of a new client as [`check_memory`](Self::check_memory) does: segment,
    /// local buffer and hot cache. The buffer for the readers of a disk is rarely full, so a lack
    /// of memory for it is logged as a warning.
    pub(crate) fn check_setup_memory(&self) -> Result<()> {
        // A segment file is checked when it is open: its pages may be allocated already.
        let segment = if self.segment_file.is_some() { 0 } else { self.segment };
        let (local_buffer, hot_cache) = (self.local_buffer, self.hot_cache.bytes);
        let demand = Demand { segment, local_buffer, hot_cache, disk_buffer: 0 };
        self.check_demand(0, demand)?;
        let Some(disk) = &self.offload else { return Ok(()) };
        if let Err(error) = self.check_demand(0, Demand { disk_buffer: disk.buffer, ..demand }) {
            tracing::warn!(
                "memory for the buffer of the disk may be missing; set MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES: {error}"
            );
        }
        Ok(())
    }

    /// Checks the memory of a segment file as [`check_memory`](Self::check_memory) does, if the
    /// file lies in memory (tmpfs). Allocated pages of the file need no more memory.
    pub(crate) fn check_file_memory(&self, file: &File, len: u64) -> Result<()> {
        let missing = missing_file_memory(file, 0, len);
        self.refuse_beyond_limits(0, Demand { segment: missing, ..Demand::default() })
    }

    /// Checks the memory of an allocation of the program as [`check_memory`](Self::check_memory)
    /// does.
    pub(crate) fn check_allocation(&self, len: usize) -> Result<()> {
        if self.allow_overcommit || self.memory.huge_pages != HugePages::Off {
            return Ok(());
        }
        check_free_memory(len)
    }

    fn check_demand(&self, held: u64, demand: Demand) -> Result<()> {
        if self.memory.huge_pages != HugePages::Off {
            return Ok(());
        }
        self.refuse_beyond_limits(held, demand)
    }

    fn refuse_beyond_limits(&self, held: u64, demand: Demand) -> Result<()> {
        if self.allow_overcommit || demand.total() == 0 || is_planted("overcommit") {
            return Ok(());
        }
        let mut limits = unpromised_limits(demand.total());
        limits.extend(self.memory.numa_node.and_then(|node| numa_node_limit(Path::new("/"), node)));
        check(&limits, held, demand)
    }
}

fn check(limits: &[MemoryLimit], held: u64, demand: Demand) -> Result<()> {
    let bytes = demand.total();
    for limit in limits {
        if bytes <= limit.free && held.saturating_add(bytes) <= limit.total {
            continue;
        }
        let MemoryLimit { total, free, origin } = limit;
        return Err(Error::new(
            ErrorCode::BufferOverflow,
            format!(
                "cannot offer memory: the kernel would end the process when the memory is written. \
                 {demand} offered={held} \
                 free={free} total={total} limit={}; offer less (global_segment_size), \
                 raise the limit, or set allow_overcommit",
                origin.display()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{HotCacheConfig, OffloadConfig, SegmentFile};
    use mooncake_core::memory::memory_limits;

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
        let demand = Demand { segment: bytes, ..Demand::default() };
        check(&memory_limits(root.path()), held, demand).err().map(|error| {
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
        free.check_allocation(1 << 60).unwrap();
        let bound = ClientConfig { allow_overcommit: false, ..free };
        let error = bound.check_memory(0, wanted).unwrap_err().to_string();
        assert!(error.contains("allow_overcommit") && error.contains("cannot offer memory"), "{error}");
        bound.check_memory(0, 4096).unwrap();
        let error = bound.check_allocation(1 << 60).unwrap_err();
        assert_eq!(error.code(), ErrorCode::BufferOverflow);
        bound.check_allocation(4096).unwrap();
    }
    #[test]
    fn a_numa_node_limits_the_memory_that_is_bound_to_it() {
        let node = "Node 1 MemTotal:       4096 kB\nNode 1 MemFree:        1024 kB\n\
                    Node 1 Active(file):     16 kB\nNode 1 Inactive(file):  8 kB\n";
        let root = tree(&[MEMINFO, ("sys/devices/system/node/node1/meminfo", node)]);
        let limit = numa_node_limit(root.path(), 1).unwrap();
        assert_eq!((limit.total, limit.free), (4096 << 10, 1048 << 10));
        assert!(limit.origin.ends_with("node1/meminfo"));
        assert_eq!(numa_node_limit(root.path(), 7), None);
    }

    /// Configuration that checks memory.
    fn checked() -> ClientConfig {
        ClientConfig {
            allow_overcommit: false,
            segment: 1 << 20,
            local_buffer: 1 << 20,
            ..Default::default()
        }
    }

    #[test]
    fn every_part_of_a_client_counts() {
        checked().check_setup_memory().unwrap();
        let huge = 1 << 60;
        let hot_cache = HotCacheConfig { bytes: huge, ..HotCacheConfig::default() };
        for (config, name) in [
            (ClientConfig { segment: huge, ..checked() }, "segment=1152921504606846976"),
            (ClientConfig { local_buffer: huge, ..checked() }, "local_buffer=1152921504606846976"),
            (ClientConfig { hot_cache, ..checked() }, "hot_cache=1152921504606846976"),
        ] {
            let message = config.check_setup_memory().unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
            ClientConfig { allow_overcommit: true, ..config }.check_setup_memory().unwrap();
        }
        // The local buffer is ordinary memory beside a segment file.
        let file = Some(SegmentFile::new("/nowhere"));
        let config = ClientConfig { segment: huge, segment_file: file, ..checked() };
        config.check_setup_memory().unwrap();
        ClientConfig { local_buffer: huge, ..config }.check_setup_memory().unwrap_err();
        // Such a buffer is a warning only.
        let offload = OffloadConfig { buffer: huge, ..OffloadConfig::new("/nowhere") };
        ClientConfig { offload: Some(offload), ..checked() }.check_setup_memory().unwrap();
    }

    #[test]
    fn pages_of_a_file_in_memory_count_unless_they_are_allocated() {
        let Ok(file) = tempfile::tempfile_in("/dev/shm") else { return };
        if missing_file_memory(&file, 0, 1) == 0 {
            return;
        }
        checked().check_file_memory(&file, 1 << 20).unwrap();
        let message = checked().check_file_memory(&file, 1 << 60).unwrap_err().to_string();
        assert!(message.contains("segment=1152921504606846976"), "{message}");
        let config = ClientConfig { allow_overcommit: true, ..checked() };
        config.check_file_memory(&file, 1 << 60).unwrap();
    }
}
