//! What of this machine can keep a member from working.

use std::fs;

use super::doctor::Finding;
use super::human;

/// Locked memory below which registering memory with a network card fails.
const MEMLOCK: u64 = 1 << 30;
/// Free shared memory that a small segment needs.
const SHARED: u64 = 256 << 20;

/// Looks at everything that needs no cluster.
pub(super) fn examine() -> Vec<Finding> {
    vec![memlock(), huge_pages(), shared_memory(), clock(), open_files()]
}

fn memlock() -> Finding {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    match limit(&limits, "Max locked memory") {
        None => Finding::unknown("locked memory", "this system does not say"),
        Some(bytes) if bytes >= MEMLOCK => Finding::good("locked memory", allowed(bytes)),
        Some(bytes) => Finding::hint(
            "locked memory",
            format!("{} may be locked; TCP and shared memory need none, RDMA all it registers", human(bytes)),
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)",
        ),
    }
}

fn open_files() -> Finding {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    match limit(&limits, "Max open files") {
        None => Finding::unknown("open files", "this system does not say"),
        Some(count) if count >= 4096 => Finding::good("open files", format!("{count} allowed")),
        Some(count) => Finding::hint(
            "open files",
            format!("{count} allowed; a busy member keeps several connections to each other one"),
            "ulimit -n 65536 (systemd: LimitNOFILE=65536)",
        ),
    }
}

fn allowed(bytes: u64) -> String {
    if bytes == u64::MAX { "unlimited".into() } else { format!("{} allowed", human(bytes)) }
}

/// The soft limit of that name; the most there is for `unlimited`.
fn limit(limits: &str, name: &str) -> Option<u64> {
    let value = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if value == "unlimited" { Some(u64::MAX) } else { value.parse().ok() }
}

fn huge_pages() -> Finding {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    match (value("HugePages_Total"), value("HugePages_Free"), value("Hugepagesize")) {
        (Some(0), ..) => Finding::hint(
            "huge pages",
            "none reserved: fine, unless members are told to use them",
            "sysctl vm.nr_hugepages=N before members start with MC_STORE_USE_HUGEPAGE=1",
        ),
        (Some(total), Some(0), Some(_)) => Finding::bad(
            "huge pages",
            format!("all {total} are taken"),
            "reserve more (sysctl vm.nr_hugepages), or unset MC_STORE_USE_HUGEPAGE",
        ),
        (Some(total), Some(free), Some(kib)) => {
            Finding::good("huge pages", format!("{free} of {total} free, {} each", human(kib << 10)))
        }
        _ => Finding::unknown("huge pages", "this system does not say"),
    }
}

fn shared_memory() -> Finding {
    match rustix::fs::statvfs("/dev/shm") {
        Err(error) => Finding::hint(
            "/dev/shm",
            format!("not there ({error}); our members do not need it, those of the existing system may"),
            "mount -t tmpfs tmpfs /dev/shm",
        ),
        Ok(stats) => {
            let free = stats.f_bavail.saturating_mul(stats.f_frsize);
            let found = format!("{} free", human(free));
            if free >= SHARED {
                Finding::good("/dev/shm", found)
            } else {
                Finding::hint(
                    "/dev/shm",
                    found,
                    "Docker: --shm-size=8g, Kubernetes: an emptyDir of medium Memory",
                )
            }
        }
    }
}

/// Leases are measured on clocks that nobody sets; what is compared by people, logs and dashboards, is not.
fn clock() -> Finding {
    let source = fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    match source.as_deref().map(str::trim) {
        Ok(name @ ("hpet" | "acpi_pm" | "jiffies" | "refined-jiffies")) => Finding::hint(
            "clock",
            format!("the kernel keeps time by {name}, which is slow to read"),
            "boot with clocksource=tsc where the processor's counter is stable",
        ),
        Ok(name) => Finding::good("clock", format!("the kernel keeps time by {name}")),
        Err(_) => Finding::unknown("clock", "this system does not say what it keeps time by"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let limits = "Limit  Soft Limit  Hard Limit\nMax open files            1024     524288   files\n\
                      Max locked memory         unlimited            unlimited            bytes\n";
        assert_eq!(limit(limits, "Max open files"), Some(1024));
        assert_eq!(limit(limits, "Max locked memory"), Some(u64::MAX));
        assert_eq!(limit(limits, "Max stack size"), None);
        assert_eq!(allowed(u64::MAX), "unlimited");
    }
}
