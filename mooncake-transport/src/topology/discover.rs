//! Hardware of a host, from sysfs. All paths are under a root, so that a folder can stand for a
//! host.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mooncake_core::memory::device_driver;

use super::{Devices, Topology};

/// PCI vendor of the GPUs `cuda:<number>`.
const NVIDIA: &str = "0x10de";
/// PCI classes of a display and of a 3D controller.
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// Root of the search, and selection of network devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    pub(super) root: PathBuf,
    /// Selections, all of which must contain a name.
    only: Vec<Vec<String>>,
    without: Vec<String>,
    /// PCI addresses of GPUs in the order of their numbers, if configured.
    gpus: Option<Vec<String>>,
}

/// Usable RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Name of the device, such as `mlx5_0`.
    pub name: String,
    /// PCI device. `None` for a software device without one.
    pub pci: Option<PathBuf>,
    /// NUMA node of the device, if known.
    pub node: Option<u32>,
}

/// GPU of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Number of the GPU in its driver, if this process uses the driver. Otherwise its index in the
    /// order of PCI addresses (`CUDA_DEVICE_ORDER=PCI_BUS_ID`).
    pub number: u32,
    /// PCI device of the GPU.
    pub pci: PathBuf,
    /// NUMA node of the GPU, if known.
    pub node: Option<u32>,
}

/// Result of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// NUMA nodes. Node 0 if the system reports none.
    pub nodes: Vec<u32>,
    /// Usable RDMA devices, by name.
    pub nics: Vec<Nic>,
    /// GPUs, by number.
    pub gpus: Vec<Gpu>,
    /// Unused RDMA devices, with the reasons.
    pub unusable: Vec<(String, String)>,
}

impl Default for Discovery {
    /// Creates a search of this host for all devices.
    fn default() -> Self {
        Self::under("/")
    }
}

impl Discovery {
    /// Creates a search of the host whose `sys` and `dev` are in a folder.
    pub fn under(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), only: Vec::new(), without: Vec::new(), gpus: None }
    }

    /// Changes the root of the search.
    #[must_use]
    pub fn moved_to(mut self, root: impl Into<PathBuf>) -> Self {
        self.root = root.into();
        self
    }

    /// Selects devices by name. A second call selects the intersection. An empty list changes
    /// nothing.
    #[must_use]
    pub fn only<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        let names = cleaned(names);
        if !names.is_empty() {
            self.only.push(names);
        }
        self
    }

    /// Excludes devices by name.
    #[must_use]
    pub fn without<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.without.extend(cleaned(names));
        self
    }

    /// Sets the PCI addresses of the GPUs (`0000:3b:00.0`), in the order of their numbers. Without
    /// it, the numbers are those of the driver, if this process uses it.
    #[must_use]
    pub fn gpus<S: Into<String>>(mut self, addresses: impl IntoIterator<Item = S>) -> Self {
        self.gpus = Some(addresses.into_iter().map(|address| address.into().to_ascii_lowercase()).collect());
        self
    }

    /// Returns whether a device of that name is selected.
    pub fn counts(&self, name: &str) -> bool {
        let is_in = |list: &Vec<String>| list.iter().any(|known| known == name);
        self.only.iter().all(is_in) && !is_in(&self.without)
    }

    /// Searches for hardware.
    pub fn hardware(&self) -> Hardware {
        let mut nodes: Vec<u32> = self
            .names("sys/devices/system/node")
            .filter_map(|name| name.strip_prefix("node").and_then(|number| number.parse().ok()))
            .collect();
        nodes.sort_unstable();
        if nodes.is_empty() {
            nodes.push(0);
        }
        let mut found = Hardware { nodes, gpus: self.find_gpus(), ..Hardware::default() };
        let verbs = self.verbs();
        let mut names: Vec<String> = self.names("sys/class/infiniband").collect();
        names.sort_unstable();
        for name in names {
            match self.unusable_reason(&name, verbs.get(&name)) {
                Some(reason) => found.unusable.push((name, reason)),
                None => found.nics.push(self.nic(name)),
            }
        }
        found
    }

    /// Returns the NUMA node of an RDMA device, if known. A software device is on the node of its
    /// network interface.
    pub fn node_of(&self, device: &str) -> Option<u32> {
        self.nic(device.to_owned()).node
    }

    /// Searches for hardware, and derives the topology.
    pub fn topology(&self) -> Topology {
        let found = self.hardware();
        for (name, reason) in &found.unusable {
            tracing::debug!(name, reason, "an RDMA device is not used");
        }
        found.topology()
    }

    pub(super) fn unusable_reason(&self, name: &str, verbs: Option<&String>) -> Option<String> {
        if !self.counts(name) {
            return Some("filtered out".into());
        }
        let Some(verbs) = verbs else { return Some("it has no verbs device".into()) };
        let device = self.root.join("dev/infiniband").join(verbs);
        if let Err(error) = fs::OpenOptions::new().read(true).write(true).open(&device) {
            return Some(format!("/dev/infiniband/{verbs} cannot be opened: {error}"));
        }
        let ports = format!("sys/class/infiniband/{name}/ports");
        let active = self.names(&ports).any(|port| {
            let port = self.root.join(&ports).join(port);
            text(&port.join("state")).is_some_and(|state| state.contains("ACTIVE"))
                && has_gid(&port.join("gids"))
        });
        (!active).then(|| "no port is active".into())
    }

    fn nic(&self, name: String) -> Nic {
        let folder = self.root.join("sys/class/infiniband").join(&name);
        // A software device has no hardware of its own, but a network interface.
        let interface = text(&folder.join("parent"))
            .map(|parent| self.root.join("sys/class/net").join(parent).join("device"));
        let pci = pci_device(&folder.join("device")).or_else(|| interface.and_then(|path| pci_device(&path)));
        Nic { name, node: pci.as_deref().and_then(numa_node), pci }
    }

    fn find_gpus(&self) -> Vec<Gpu> {
        let folder = self.root.join("sys/bus/pci/devices");
        let gpu = |number, pci: PathBuf| Gpu { number, node: numa_node(&pci), pci };
        let this_host = || (self.root == Path::new("/")).then(device_driver).flatten();
        if let Some(addresses) = self.gpus.clone().or_else(|| this_host()?.pci_addresses()) {
            let addresses = (0..).zip(addresses);
            let present = addresses
                .filter_map(|(number, name)| Some((number, fs::canonicalize(folder.join(name)).ok()?)));
            return present.map(|(number, pci)| gpu(number, pci)).collect();
        }
        let mut names: Vec<String> = self.names("sys/bus/pci/devices").collect();
        names.sort_unstable();
        let is_gpu = |name: &String| {
            let of = |file: &str| text(&folder.join(name).join(file)).unwrap_or_default();
            of("vendor") == NVIDIA && GPU_CLASSES.iter().any(|class| of("class").starts_with(class))
        };
        let gpus =
            names.into_iter().filter(is_gpu).filter_map(|name| fs::canonicalize(folder.join(name)).ok());
        (0..).zip(gpus).map(|(number, pci)| gpu(number, pci)).collect()
    }

    /// Returns the verbs devices by the name of the RDMA device.
    pub(super) fn verbs(&self) -> BTreeMap<String, String> {
        let folder = "sys/class/infiniband_verbs";
        let device = |verbs: String| Some((text(&self.root.join(folder).join(&verbs).join("ibdev"))?, verbs));
        self.names(folder).filter_map(device).collect()
    }

    pub(super) fn names(&self, folder: &str) -> impl Iterator<Item = String> + use<> {
        let entries = fs::read_dir(self.root.join(folder)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    }
}

impl Hardware {
    /// Returns the devices near each memory location. For a NUMA node these are its own devices.
    /// For a GPU these are the devices of its node with the shortest PCI path.
    pub fn topology(&self) -> Topology {
        let mut topology = Topology::default();
        for &node in &self.nodes {
            topology.insert(format!("cpu:{node}"), self.split(|nic| nic.node == Some(node)));
        }
        for gpu in &self.gpus {
            let of_node = |nic: &Nic| nic.node.is_some() && nic.node == gpu.node;
            let any = self.nics.iter().any(of_node);
            let path_len = |nic: &Nic| match &nic.pci {
                Some(pci) if of_node(nic) || !any => distance(pci, &gpu.pci),
                _ => usize::MAX,
            };
            let shortest = self.nics.iter().map(path_len).min().unwrap_or(usize::MAX);
            let near = |nic: &Nic| shortest < usize::MAX && path_len(nic) == shortest;
            topology.insert(format!("cuda:{}", gpu.number), self.split(near));
        }
        topology
    }

    fn split(&self, near: impl Fn(&Nic) -> bool) -> Devices {
        let (preferred, others): (Vec<&Nic>, Vec<&Nic>) = self.nics.iter().partition(|nic| near(nic));
        let names = |nics: Vec<&Nic>| nics.into_iter().map(|nic| nic.name.clone()).collect();
        Devices { preferred: names(preferred), others: names(others) }
    }
}

/// Returns the number of steps between two PCI devices: the `/` in their paths after the common
/// prefix.
fn distance(a: &Path, b: &Path) -> usize {
    let (a, b) = (a.as_os_str().as_encoded_bytes(), b.as_os_str().as_encoded_bytes());
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let left = |path: &[u8]| path[same..].iter().filter(|byte| **byte == b'/').count();
    left(a) + left(b)
}

/// Returns the PCI device that a link leads to or into.
fn pci_device(link: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(link).ok()?;
    path.ancestors()
        .find(|folder| folder.file_name().is_some_and(|name| is_pci_address(&name.to_string_lossy())))
        .map(Path::to_owned)
}

/// Returns whether a name is a PCI address such as `0000:01:00.0`. The domain has four digits or
/// more.
fn is_pci_address(name: &str) -> bool {
    let hex = |text: &str, len: std::ops::RangeInclusive<usize>| {
        len.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let mut parts = name.split([':', '.']);
    let parts = [parts.next(), parts.next(), parts.next(), parts.next(), parts.next()];
    matches!(parts, [Some(domain), Some(bus), Some(device), Some(function), None]
        if hex(domain, 4..=8) && hex(bus, 2..=2) && hex(device, 2..=2) && hex(function, 1..=1))
}

fn numa_node(device: &Path) -> Option<u32> {
    // The value is -1 if the system does not know the node.
    text(&device.join("numa_node")).and_then(|node| node.parse().ok())
}

fn has_gid(folder: &Path) -> bool {
    let set = |gid: String| gid.bytes().any(|byte| !matches!(byte, b'0' | b':'));
    fs::read_dir(folder).into_iter().flatten().flatten().any(|entry| text(&entry.path()).is_some_and(set))
}

/// Reads a file without its final line end. Returns `None` for a missing or empty file.
pub(super) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn cleaned<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Vec<String> {
    names.into_iter().map(|name| name.into().trim().to_owned()).filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_distances() {
        assert!(is_pci_address("0000:01:00.0") && is_pci_address("10000:e1:00.1"));
        for name in ["pci0000:00", "virtio3", "0000:01:00", "0000:01:00.0.1", "0000:1:00.0", "gggg:01:00.0"] {
            assert!(!is_pci_address(name), "{name}");
        }
        let path = |text: &str| PathBuf::from(format!("/sys/devices/{text}"));
        let gpu = path("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0");
        let near = path("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0");
        let far = path("pci0000:00/0000:00:02.0/0000:05:00.0");
        assert_eq!(distance(&gpu, &gpu), 0);
        assert_eq!(distance(&gpu, &near), 2);
        assert_eq!(distance(&gpu, &far), 4);
        assert_eq!(distance(&far, &gpu), 4);
    }

    #[test]
    fn filters_name_devices() {
        let names = |discovery: &Discovery| {
            ["a", "b", "c"]
                .into_iter()
                .filter(|name| {
                    discovery.unusable_reason(name, None).is_none_or(|reason| reason != "filtered out")
                })
                .collect::<String>()
        };
        let all = Discovery::under("/no/such/folder");
        assert_eq!(names(&all), "abc");
        assert_eq!(names(&all.clone().only(["a", " b "])), "ab");
        assert_eq!(names(&all.clone().only(["a", "b"]).only(["b", "c"])), "b");
        assert_eq!(names(&all.clone().only(["a"]).only([""])), "a", "no names are no filter");
        assert_eq!(names(&all.clone().without(["b"])), "ac");
        assert_eq!(names(&all.only(["a"]).only(["c"])), "", "nothing is named by both");
    }
}
