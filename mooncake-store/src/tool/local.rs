//! What of this machine can keep a member from working.

use std::fs;

use mooncake_transport::topology::Discovery;
use mooncake_transport::topology::ports::Device;

use super::doctor::Finding;
use super::human;

/// Locked memory below which registering memory with a network card fails.
const MEMLOCK: u64 = 1 << 30;
/// Free shared memory that a small segment needs.
const SHARED: u64 = 256 << 20;

/// Looks at everything that needs no cluster.
pub(super) fn examine() -> Vec<Finding> {
    let devices = Discovery::default().devices();
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let usable = devices.iter().any(|device| device.fault.is_none());
    let mut findings = vec![memlock(limit(&limits, "Max locked memory"), usable)];
    findings.extend([huge_pages(), shared_memory(), clock(), open_files()]);
    findings.extend(rdma(&devices));
    findings
}

fn memlock(bytes: Option<u64>, rdma: bool) -> Finding {
    let fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)";
    match bytes {
        None => Finding::unknown("locked memory", "this system does not say"),
        Some(bytes) if bytes >= MEMLOCK => Finding::good("locked memory", allowed(bytes)),
        Some(bytes) if rdma => Finding::bad(
            "locked memory",
            format!(
                "{} may be locked; this machine's RDMA devices need all that they register",
                human(bytes)
            ),
            fix,
        ),
        Some(bytes) => Finding::hint(
            "locked memory",
            format!("{} may be locked; TCP and shared memory need none, RDMA all it registers", human(bytes)),
            fix,
        ),
    }
}

/// Each RDMA device with its ports and addresses, and the library that opens them.
fn rdma(devices: &[Device]) -> Vec<Finding> {
    if devices.is_empty() {
        return vec![Finding::good("RDMA", "no devices here; TCP and shared memory need none")];
    }
    #[allow(unused_mut, reason = "without the wire nothing is added")]
    let mut findings: Vec<Finding> = devices.iter().map(rdma_device).collect();
    #[cfg(feature = "transport-rdma")]
    findings.push(match crate::transport_set::rdma_devices() {
        Ok(names) => Finding::good("libibverbs", format!("sees {}", names.join(", "))),
        Err(error) => Finding::bad("libibverbs", error.to_string(), "apt install ibverbs-providers"),
    });
    findings
}

fn rdma_device(device: &Device) -> Finding {
    match device.fault.as_deref() {
        None => Finding::good("RDMA", device.to_string()),
        Some(fault) => {
            let fix = if fault.contains("cannot be opened") {
                "give the process /dev/infiniband (Docker: --device /dev/infiniband)"
            } else if fault.contains("verbs device") {
                "modprobe ib_uverbs"
            } else {
                "ip link set INTERFACE up; on InfiniBand start a subnet manager"
            };
            Finding::hint("RDMA", format!("{device}; not used: {fault}"), fix)
        }
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
    fn devices_are_named_with_what_is_wrong() {
        let device = |fault: Option<&str>| Device {
            name: "mlx5_0".into(),
            node: Some(1),
            ports: Vec::new(),
            fault: fault.map(str::to_owned),
        };
        let said = |fault| format!("{:?}", rdma_device(&device(fault)));
        assert!(said(None).contains("Good") && said(None).contains("mlx5_0 on NUMA node 1"));
        for (fault, fix) in [
            ("/dev/infiniband/uverbs0 cannot be opened: denied", "--device /dev/infiniband"),
            ("it has no verbs device", "modprobe"),
            ("no port is active", "ip link set"),
        ] {
            let said = said(Some(fault));
            assert!(said.contains("Hint") && said.contains(fault) && said.contains(fix), "{said}");
        }
        assert!(format!("{:?}", rdma(&[])).contains("no devices here"));
        for (bytes, rdma, grade) in
            [(Some(1), true, "Bad"), (Some(1), false, "Hint"), (Some(MEMLOCK), true, "Good")]
        {
            assert!(format!("{:?}", memlock(bytes, rdma)).contains(grade));
        }
    }

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
