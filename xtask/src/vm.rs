//! Disposable virtual machine with the files of this machine and another kernel, for tests that
//! need features of that kernel.
//!
//! The machine is emulated (TCG), so it needs no privileges of the host. The kernel of Debian is
//! unpacked, never installed. The guest has the files of this machine read-only at the same paths,
//! and its own `/run` and `/dev/shm`; temporary files are in `/run`. It needs Debian 12 on x86-64.

use std::fs;
use std::path::{Path, PathBuf};

use crate::run::{Result, command, target_dir};

/// Debian packages that build and run the machine.
const PACKAGES: &[&str] = &["qemu-system-x86", "busybox-static", "kmod", "xz-utils", "iproute2"];
/// Kernel modules of the machine itself: its disks are shared folders, its output is a serial port.
const MODULES: &[&str] = &["virtio_pci", "virtio_console", "9pnet_virtio", "9p", "crc32_generic"];

/// Kernel and initial file system, ready to start.
pub(crate) struct Vm {
    folder: PathBuf,
}

/// Hardware of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Two processors and their memory.
    Plain,
    /// The same as two NUMA nodes, with a network card on each; a cable between the cards.
    TwoNodes,
}

impl Shape {
    fn words(self) -> Vec<String> {
        let mut words: Vec<String> = ["-smp", "2", "-m", "2048"].map(String::from).into();
        if self == Shape::TwoNodes {
            words.extend(["-M", "q35"].map(String::from));
            for node in 0..2 {
                let bus = 32 * (node + 1);
                let mut word = |option: &str, value: String| words.extend([option.into(), value]);
                word("-object", format!("memory-backend-ram,id=memory{node},size=1024M"));
                word("-numa", format!("node,nodeid={node},cpus={node},memdev=memory{node}"));
                word("-device", format!("pxb-pcie,id=host{node},bus_nr={bus},bus=pcie.0,numa_node={node}"));
                word(
                    "-device",
                    format!("pcie-root-port,id=port{node},bus=host{node},chassis={bus},slot={node}"),
                );
                word("-netdev", format!("hubport,id=net{node},hubid=0"));
                word(
                    "-device",
                    format!(
                        "virtio-net-pci,netdev=net{node},bus=port{node},mac=52:54:00:00:00:0{node},romfile="
                    ),
                );
            }
            words.extend(["-numa", "dist,src=0,dst=1,val=21"].map(String::from));
        }
        words
    }
}

/// Builds a machine with these kernel modules besides its own, unless it exists. `extra` are Debian
/// packages that the programs of the tests need.
pub(crate) fn prepare(modules: &[&str], extra: &[&str]) -> Result<Vm> {
    let folder = target_dir().join("rdma-vm");
    fs::create_dir_all(&folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    let mut packages = PACKAGES.to_vec();
    packages.extend(extra);
    let missing: Vec<&str> = packages.into_iter().filter(|package| !is_installed(package)).collect();
    let wanted: Vec<&str> = MODULES.iter().chain(modules).copied().collect();
    let recipe = format!("{}\n{INIT}", wanted.join(" "));
    let ready = fs::read_to_string(folder.join("recipe")).is_ok_and(|made| made == recipe);
    if ready && missing.is_empty() {
        return Ok(Vm { folder });
    }
    apt(&["update"])?;
    if !missing.is_empty() {
        println!("installing {}", missing.join(" "));
        apt(&[&["install", "-y", "--no-install-recommends"][..], &missing].concat())?;
    }
    if !ready {
        build(&folder, &wanted)?;
        write(&folder.join("recipe"), &recipe)?;
    }
    Ok(Vm { folder })
}

impl Vm {
    /// Starts the machine, runs a shell script in it as root, and prints its output. Returns the
    /// exit status of the script.
    pub(crate) fn run(&self, shape: Shape, script: &str, seconds: u32) -> Result<i32> {
        let job = self.folder.join("job");
        let _ = fs::remove_dir_all(&job);
        fs::create_dir_all(&job).map_err(|e| format!("cannot make {}: {e}", job.display()))?;
        write(&job.join("script"), script)?;
        let log = job.join("kernel.log");
        let file = |name: &str| self.folder.join(name).display().to_string();
        let seconds = seconds.to_string();
        let share = |tag: &str, path: &str, more: &str| {
            format!("local,mount_tag={tag},path={path},security_model=none,multidevs=remap{more}")
        };
        let machine = command("timeout", &["--foreground", &seconds, "qemu-system-x86_64"])
            // Emulation copies byte by byte if the processor claims a fast `rep movsb`.
            .args(&["-accel", "tcg", "-cpu", "max,-erms"])
            .args(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(&["-kernel", &file("vmlinux"), "-initrd", &file("initrd")])
            .args(&["-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"])
            .args(&["-serial", &format!("file:{}", log.display())])
            .args(&["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=out"])
            .args(&["-chardev", "file,id=out,path=/dev/stdout,append=on"])
            .args(&["-virtfs", &share("root", "/", ",readonly=on")])
            .args(&["-virtfs", &share("job", &job.display().to_string(), "")])
            // The options of the shape come last: earlier devices go to the first bus.
            .args(&shape.words().iter().map(String::as_str).collect::<Vec<_>>());
        let ended = machine.run_through_a_pipe();
        match fs::read_to_string(job.join("status")) {
            Ok(status) => status.trim().parse().map_err(|_| format!("the machine's status is {status:?}")),
            Err(_) => {
                let log = fs::read_to_string(&log).unwrap_or_default();
                let why = ended.err().unwrap_or_else(|| "it ended without a status".into());
                Err(format!("the virtual machine: {why} (124: not over in {seconds} s)\n{log}"))
            }
        }
    }
}

/// Unpacks the kernel, and packs the modules and the first program into the initial file system.
fn build(folder: &Path, modules: &[&str]) -> Result {
    let unpacked = folder.join("kernel");
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked).map_err(|e| format!("cannot make {}: {e}", unpacked.display()))?;
    let here = unpacked.display().to_string();
    let about = command("apt-cache", &["show", "--no-all-versions", "linux-image-amd64"]).output()?;
    let package = about
        .lines()
        .find_map(|line| line.strip_prefix("Depends: "))
        .and_then(|depends| depends.split_whitespace().next())
        .ok_or("linux-image-amd64 names no kernel")?;
    let version = package.strip_prefix("linux-image-").ok_or("a kernel package of another name")?.to_owned();
    println!("unpacking {package}");
    command("apt-get", &["-qq", "-o", "APT::Sandbox::User=root", "download", package]).dir(&here).run()?;
    let deb = fs::read_dir(&unpacked)
        .ok()
        .and_then(|mut files| files.next()?.ok())
        .ok_or("the kernel package was not downloaded")?;
    command("dpkg", &["-x", &deb.path().display().to_string(), &here]).run()?;

    unpack_kernel(folder, &unpacked.join(format!("boot/vmlinuz-{version}")))?;

    command("/sbin/depmod", &["-b", &here, &version]).run()?;
    let mut order: Vec<String> = Vec::new();
    for module in modules {
        let words = ["-d", &here, "-S", &version, "--show-depends", module];
        for line in command("/sbin/modprobe", &words).output()?.lines() {
            let Some(path) = line.strip_prefix("insmod ") else { continue };
            let path = path.trim().to_owned();
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    let mut archive = Archive::default();
    for name in ["bin", "dev", "modules", "proc", "root", "sys"] {
        archive.folder(name);
    }
    archive.program("init", INIT.as_bytes());
    archive.program("bin/busybox", &read(Path::new("/bin/busybox"))?);
    for (i, path) in order.iter().enumerate() {
        archive.program(&format!("modules/{i:03}.ko"), &read(Path::new(path))?);
    }
    write(&folder.join("initrd"), archive.end())?;
    fs::remove_dir_all(&unpacked).map_err(|e| format!("cannot remove {here}: {e}"))
}

/// Extracts the kernel from its self-extracting file, to spare the emulator the work. The header of
/// the file holds its position ("the Linux/x86 boot protocol").
fn unpack_kernel(folder: &Path, packed: &Path) -> Result {
    let image = read(packed)?;
    let number = |at: usize| -> Option<usize> {
        image.get(at..at + 4).and_then(|b| Some(u32::from_le_bytes(b.try_into().ok()?) as usize))
    };
    let payload = || {
        let setup = (usize::from(*image.get(0x1f1)?) + 1) * 512;
        let start = setup + number(0x248)?;
        // The last four bytes are the length of the unpacked kernel.
        image.get(start..start + number(0x24c)?.checked_sub(4)?)
    };
    let payload = payload().ok_or_else(|| format!("{} is not a kernel", packed.display()))?;
    let (xz, out) = (folder.join("vmlinux.xz"), folder.join("vmlinux"));
    let _ = fs::remove_file(&out);
    write(&xz, payload)?;
    command("xz", &["-d", &xz.display().to_string()]).run()?;
    match read(&out)?.starts_with(b"\x7fELF") {
        true => Ok(()),
        false => Err(format!("{} does not hold an ELF file", packed.display())),
    }
}

fn is_installed(package: &str) -> bool {
    let words = ["-W", "-f", "${Status}", package];
    command("dpkg-query", &words).output().is_ok_and(|status| status.contains("ok installed"))
}

fn apt(words: &[&str]) -> Result {
    command("apt-get", &["-qq", "-o", "DPkg::Lock::Timeout=600", "-o", "Dpkg::Use-Pty=0"])
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .run()
        .map_err(|e| format!("{e}\nthis task is for Debian 12 as root; it needs {}", PACKAGES.join(", ")))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result {
    fs::write(path, bytes).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// Archive in the "newc" format of cpio, which the kernel unpacks as its initial file system.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, 0o100_755, content);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        self.bytes.extend(b"070701");
        let fields =
            [self.entries, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        for field in fields {
            self.bytes.extend(format!("{field:08X}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// First program of the machine: loads the modules, mounts the files of the host, runs the script,
/// and writes its status.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
PATH=/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
for module in /modules/*.ko; do insmod $module; done

nine="trans=virtio,version=9p2000.L,msize=512000"
mount -t 9p -o $nine,ro,cache=loose root /root
for name in proc sys dev; do mount --move /$name /root/$name; done
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts none /root/dev/pts
for name in run dev/shm; do mount -t tmpfs none /root/$name; done
mkdir /root/run/job /root/run/tmp
mount -t 9p -o $nine,cache=none job /root/run/job

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run/tmp TMPDIR=/run/tmp
chroot /root /bin/sh /run/job/script </root/dev/null >/root/dev/vport0p1 2>&1
echo $? >/root/run/job/status
/bin/busybox sync
/bin/busybox reboot -f
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_aligned_and_end() {
        let mut archive = Archive::default();
        archive.folder("a");
        archive.program("bc", b"12345");
        let bytes = archive.end();
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.starts_with(b"07070100000001000041ED"));
        let text = String::from_utf8_lossy(&bytes);
        // A header of 110 bytes, the name and its zero, up to the next four; the content likewise.
        assert_eq!(text.find("bc\0"), Some(112 + 110));
        assert_eq!(text.find("12345\0\0\x00070701"), Some(112 + 116));
        assert!(text.contains("TRAILER!!!\0"));
    }
}
