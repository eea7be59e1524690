//! RDMA devices, their ports and addresses from sysfs, for diagnosis.

use std::fmt;
use std::net::Ipv6Addr;

use super::Discovery;
use super::discover::text;

/// RDMA device, usable or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name of the device, such as `mlx5_0`.
    pub name: String,
    /// NUMA node of the device, if known.
    pub node: Option<u32>,
    /// Ports of the device, by number.
    pub ports: Vec<Port>,
    /// Reason why the device is not used.
    pub fault: Option<String>,
}

/// Port of a device. Texts come from the kernel, and are empty if it has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Number of the port, from 1.
    pub number: u32,
    /// State of the port: `4: ACTIVE`, `1: DOWN`, ..
    pub state: String,
    /// Link layer: `Ethernet` or `InfiniBand`.
    pub link: String,
    /// Rate, such as `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// Addresses of the port, by index, without unused entries.
    pub gids: Vec<Gid>,
}

/// Global address (GID) of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the port's table, as in `MC_GID_INDEX`.
    pub index: u32,
    /// Address. An IPv4 address is mapped.
    pub addr: Ipv6Addr,
    /// Type: `RoCE v2`, `IB/RoCE v1`.
    pub kind: String,
    /// Network interface of the address.
    pub interface: String,
}

impl Discovery {
    /// Returns every RDMA device with its ports, and the reason if it is not used.
    pub fn devices(&self) -> Vec<Device> {
        let verbs = self.verbs();
        let mut names: Vec<String> = self.names("sys/class/infiniband").collect();
        names.sort_unstable();
        let device = |name: String| Device {
            node: self.node_of(&name),
            ports: self.ports(&name),
            fault: self.unusable_reason(&name, verbs.get(&name)),
            name,
        };
        names.into_iter().map(device).collect()
    }

    fn ports(&self, device: &str) -> Vec<Port> {
        let folder = format!("sys/class/infiniband/{device}/ports");
        let mut numbers: Vec<u32> = self.names(&folder).filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        let port = |number| {
            let folder = format!("{folder}/{number}");
            let of = |file: &str| text(&self.root.join(&folder).join(file)).unwrap_or_default();
            let mut indexes: Vec<u32> =
                self.names(&format!("{folder}/gids")).filter_map(|name| name.parse().ok()).collect();
            indexes.sort_unstable();
            let gid = |index| {
                let addr: Ipv6Addr = of(&format!("gids/{index}")).parse().ok()?;
                let attribute = |which: &str| of(&format!("gid_attrs/{which}/{index}"));
                let gid = Gid { index, addr, kind: attribute("types"), interface: attribute("ndevs") };
                (!addr.is_unspecified()).then_some(gid)
            };
            Port {
                number,
                state: of("state"),
                link: of("link_layer"),
                rate: of("rate"),
                gids: indexes.into_iter().filter_map(gid).collect(),
            }
        };
        numbers.into_iter().map(port).collect()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(node) = self.node {
            write!(f, " on NUMA node {node}")?;
        }
        for port in &self.ports {
            write!(f, "; {port}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {} is {}", self.number, self.state.rsplit(": ").next().unwrap_or_default())?;
        for about in [&self.link, &self.rate].into_iter().filter(|about| !about.is_empty()) {
            write!(f, ", {about}")?;
        }
        for gid in &self.gids {
            write!(f, ", address {} is ", gid.index)?;
            match gid.addr.to_ipv4_mapped() {
                Some(addr) => write!(f, "{addr}")?,
                None => write!(f, "{}", gid.addr)?,
            }
            let about = [&gid.kind, &gid.interface].into_iter().filter(|about| !about.is_empty());
            let about: Vec<&str> = about.map(String::as_str).collect();
            if !about.is_empty() {
                write!(f, " ({})", about.join(", "))?;
            }
        }
        Ok(())
    }
}
