//! Checks of this host.

use std::fs;

use mooncake_core::Result;
use mooncake_core::memory::HugePages;
use mooncake_transport::topology::Discovery;
use mooncake_transport::topology::ports::Device;

use super::finding::Finding;
use super::output::human;
use crate::config::ClientEnvironment;

/// Limit of locked memory below which RDMA registration usually fails.
const MEMLOCK: u64 = 1 << 30;
/// Free shared memory that a small segment needs.
const SHARED: u64 = 256 << 20;

/// Runs all checks that need no cluster.
pub(super) fn examine() -> Vec<Finding> {
    let devices = Discovery::default().devices();
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let usable = devices.iter().any(|device| device.fault.is_none());
    let mut findings = vec![memlock(limit(&limits, "Max locked memory"), usable)];
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let wanted = ClientEnvironment::read().config.memory.huge_pages != HugePages::Off;
    findings.extend([huge_pages(&read("/proc/meminfo"), wanted), shared_memory()]);
    let current = fs::read_to_string(format!("{CLOCK}/current_clocksource")).ok();
    let cpus = read("/proc/cpuinfo");
    let flags = cpus.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    findings.push(clock(current.as_deref(), &read(&format!("{CLOCK}/available_clocksource")), flags));
    findings.push(open_files());
    findings.extend(rdma(&devices));
    if cfg!(feature = "transport-nvlink") {
        let has_driver = fs::exists("/proc/driver/nvidia").unwrap_or(false);
        findings.extend(gpus(mooncake_engine::transport_set::gpus(), has_driver));
    }
    findings
}

fn memlock(bytes: Option<u64>, rdma: bool) -> Finding {
    let fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)";
    match bytes {
        None => Finding::unknown("locked memory", "the system does not report it"),
        Some(bytes) if bytes >= MEMLOCK => Finding::good("locked memory", allowed(bytes)),
        Some(bytes) if rdma => Finding::bad(
            "locked memory",
            format!("{} can be locked; RDMA devices need as much as they register", human(bytes)),
            fix,
        ),
        Some(bytes) => Finding::hint(
            "locked memory",
            format!(
                "{} can be locked; TCP and shared memory need none, RDMA as much as it registers",
                human(bytes)
            ),
            fix,
        ),
    }
}

/// Checks each RDMA device with its ports and addresses, and the library that opens them.
fn rdma(devices: &[Device]) -> Vec<Finding> {
    if devices.is_empty() {
        return vec![Finding::good("RDMA", "no devices here; TCP and shared memory need none")];
    }
    let mut findings: Vec<Finding> = devices.iter().map(rdma_device).collect();
    if cfg!(feature = "transport-rdma") {
        findings.push(match mooncake_engine::transport_set::rdma_devices() {
            Ok(names) => Finding::good("libibverbs", format!("sees {}", names.join(", "))),
            Err(error) => Finding::bad("libibverbs", error.to_string(), "apt install ibverbs-providers"),
        });
    }
    findings
}

/// Checks the GPUs, and which peers can open their memory.
fn gpus(found: Result<Vec<Result<String>>>, has_driver: bool) -> Vec<Finding> {
    let grade = |gpu: Result<String>| match gpu {
        Ok(gpu) => Finding::good("GPU", gpu),
        Err(error) => Finding::hint("GPU", error.to_string(), "transfers copy its memory through the host"),
    };
    match found {
        Ok(gpus) => gpus.into_iter().map(grade).collect(),
        Err(_) if !has_driver => vec![Finding::good("GPU", "no device here; memory of the host needs none")],
        Err(error) => {
            let fix = "give the process the devices and the library (Docker: --gpus all)";
            vec![Finding::hint("GPU", error.to_string(), fix)]
        }
    }
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
        None => Finding::unknown("open files", "the system does not report it"),
        Some(count) if count >= 4096 => Finding::good("open files", format!("{count} allowed")),
        Some(count) => Finding::hint(
            "open files",
            format!("{count} allowed; a busy node keeps several connections to each other node"),
            "ulimit -n 65536 (systemd: LimitNOFILE=65536)",
        ),
    }
}

fn allowed(bytes: u64) -> String {
    if bytes == u64::MAX { "unlimited".into() } else { format!("{} allowed", human(bytes)) }
}

/// Returns the soft limit with this name; the maximum for `unlimited`.
fn limit(limits: &str, name: &str) -> Option<u64> {
    let value = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if value == "unlimited" { Some(u64::MAX) } else { value.parse().ok() }
}

/// Checks the reserved huge pages, and whether clients started in this environment use them.
fn huge_pages(info: &str, wanted: bool) -> Finding {
    let value = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    match (value("HugePages_Total"), value("HugePages_Free"), value("Hugepagesize")) {
        (Some(0), ..) if wanted => Finding::bad(
            "huge pages",
            "none reserved, but MC_STORE_USE_HUGEPAGE is set",
            "sysctl vm.nr_hugepages=N before the clients start, or unset MC_STORE_USE_HUGEPAGE",
        ),
        (Some(0), ..) => Finding::hint(
            "huge pages",
            "none reserved; clients do not use them by default",
            "sysctl vm.nr_hugepages=N before the clients start with MC_STORE_USE_HUGEPAGE=1",
        ),
        (Some(total), Some(0), Some(_)) => {
            let fix = "reserve more (sysctl vm.nr_hugepages), or unset MC_STORE_USE_HUGEPAGE";
            let found = format!("all {total} are in use");
            if wanted {
                Finding::bad("huge pages", found, fix)
            } else {
                Finding::hint("huge pages", found, fix)
            }
        }
        (Some(total), Some(free), Some(kib)) => {
            Finding::good("huge pages", format!("{free} of {total} free, {} each", human(kib << 10)))
        }
        _ => Finding::unknown("huge pages", "the system does not report it"),
    }
}

fn shared_memory() -> Finding {
    match rustix::fs::statvfs("/dev/shm") {
        Err(error) => Finding::hint(
            "/dev/shm",
            format!("missing ({error}); clients do not need it, clients of Mooncake C++ may"),
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

/// Folder in which the kernel reports the current and the available clock sources.
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0";

/// Checks the clock for leases and timeouts; `flags` are those of the processor.
fn clock(current: Option<&str>, available: &str, flags: &str) -> Finding {
    let has = |list: &str, name: &str| list.split_whitespace().any(|word| word == name);
    match current.map(str::trim) {
        None => Finding::unknown("clock", "the system does not report its clock source"),
        Some(name @ ("hpet" | "acpi_pm" | "pit" | "jiffies" | "refined-jiffies")) => {
            // The kernel removes the counter from the list if it drifts against another clock.
            let unstable = has(flags, "tsc") && !has(available, "tsc");
            let (why, fix) = if unstable {
                (
                    "; it found the processor's counter (tsc) unstable",
                    "dmesg | grep -i clocksource shows the reason: update firmware and hypervisor, or move to another machine",
                )
            } else {
                (
                    "",
                    "boot without a clocksource= option, or echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
                )
            };
            Finding::hint("clock", format!("the clock source is {name}, which is slow to read{why}"), fix)
        }
        Some(name) => Finding::good("clock", format!("the clock source is {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faulty_devices_report_cause_and_fix() {
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
        let refused =
            |text: &'static str| mooncake_core::Error::new(mooncake_core::ErrorCode::NotSupported, text);
        for (found, has_driver, says) in [
            (Ok(vec![Ok("cuda:0, H100".to_owned())]), true, "Good, found: \"cuda:0, H100\""),
            (Ok(vec![Err(refused("cuda:1 cannot be opened"))]), true, "Hint"),
            (Err(refused("no libcuda.so.1")), true, "--gpus all"),
            (Err(refused("no libcuda.so.1")), false, "no device here"),
        ] {
            let said = format!("{:?}", gpus(found, has_driver));
            assert!(said.contains(says), "{said}");
        }
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
    #[test]
    fn clocks_and_huge_pages_are_graded() {
        let said = |current, available, flags| format!("{:?}", clock(current, available, flags));
        assert!(said(Some("tsc\n"), "tsc hpet", "flags : tsc").contains("Good"));
        assert!(said(Some("kvm-clock"), "kvm-clock tsc", "flags : tsc").contains("Good"));
        assert!(said(None, "", "").contains("Unknown"));
        let chosen = said(Some("hpet"), "tsc hpet acpi_pm", "flags : fpu tsc");
        assert!(chosen.contains("Hint") && chosen.contains("current_clocksource"), "{chosen}");
        let unstable = said(Some("hpet"), "hpet acpi_pm", "flags : fpu tsc constant_tsc");
        assert!(unstable.contains("Hint") && unstable.contains("unstable") && unstable.contains("dmesg"));

        let pages = |total, free, wanted| {
            let info = format!("HugePages_Total: {total}\nHugePages_Free: {free}\nHugepagesize: 2048 kB\n");
            format!("{:?}", huge_pages(&info, wanted))
        };
        for (total, free, wanted, grade, fix) in [
            (0, 0, false, "Hint", "vm.nr_hugepages=N"),
            (0, 0, true, "Bad", "unset MC_STORE_USE_HUGEPAGE"),
            (8, 0, false, "Hint", "reserve more"),
            (8, 0, true, "Bad", "reserve more"),
            (8, 3, true, "Good", "3 of 8 free, 2.0 MiB each"),
        ] {
            let said = pages(total, free, wanted);
            assert!(said.contains(grade) && said.contains(fix), "{said}");
        }
        assert!(format!("{:?}", huge_pages("", true)).contains("Unknown"));
    }
}
