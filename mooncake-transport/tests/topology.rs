//! Discovery of devices in folders that stand for hosts.
#![cfg(not(miri))]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use mooncake_transport::topology::{Discovery, Topology};
use tempfile::TempDir;

/// A host made of files, in the shape of sysfs.
struct Host {
    folder: TempDir,
}

impl Host {
    fn new(nodes: u32) -> Self {
        let host = Self { folder: tempfile::tempdir().unwrap() };
        for node in 0..nodes {
            host.write(&format!("sys/devices/system/node/node{node}/cpulist"), "0-3");
        }
        host.write("sys/devices/system/node/online", "0");
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn link(&self, from: &str, to: &Path) {
        let from = self.path(from);
        fs::create_dir_all(from.parent().unwrap()).unwrap();
        symlink(to, from).unwrap();
    }

    /// Adds a PCI device at a position in the tree, such as `pci0000:00/0000:00:01.0`.
    fn pci(&self, place: &str, node: i32, vendor: &str, class: &str) -> PathBuf {
        let device = format!("sys/devices/{place}");
        self.write(&format!("{device}/numa_node"), &node.to_string());
        self.write(&format!("{device}/vendor"), vendor);
        self.write(&format!("{device}/class"), class);
        let address = place.rsplit('/').next().unwrap();
        self.link(&format!("sys/bus/pci/devices/{address}"), &self.path(&device));
        self.path(&device)
    }

    fn gpu(&self, place: &str, node: i32) {
        self.pci(place, node, "0x10de", "0x030200");
    }

    /// An RDMA device whose hardware is linked as `device`.
    fn nic(&self, name: &str, place: &str, node: i32) {
        let device = self.pci(place, node, "0x15b3", "0x020700");
        self.rdma(name, "4: ACTIVE", "fe80:0000:0000:0000:0000:0000:0000:0001");
        self.link(&format!("sys/class/infiniband/{name}/device"), &device);
    }

    fn rdma(&self, name: &str, state: &str, gid: &str) {
        self.write(&format!("sys/class/infiniband/{name}/ports/1/state"), state);
        self.write(&format!("sys/class/infiniband/{name}/ports/1/gids/0"), gid);
        self.write(&format!("sys/class/infiniband_verbs/uverbs_{name}/ibdev"), name);
        self.write(&format!("dev/infiniband/uverbs_{name}"), "");
    }

    fn discovery(&self) -> Discovery {
        Discovery::under(self.folder.path())
    }
}

#[test]
fn ports_and_addresses_are_shown() {
    let host = server();
    host.rdma("down0", "1: DOWN", "fe80:0000:0000:0000:0000:0000:0000:0009");
    for (file, text) in [
        ("link_layer", "Ethernet"),
        ("rate", "100 Gb/sec (4X EDR)"),
        ("gids/1", "0000:0000:0000:0000:0000:0000:0000:0000"),
        ("gids/3", "0000:0000:0000:0000:0000:ffff:0a4d:0001"),
        ("gid_attrs/types/3", "RoCE v2"),
        ("gid_attrs/ndevs/3", "eth7"),
    ] {
        host.write(&format!("sys/class/infiniband/mlx5_0/ports/1/{file}"), text);
    }
    let devices = host.discovery().devices();
    let by_name = |name: &str| devices.iter().find(|device| device.name == name).unwrap();
    assert_eq!(
        by_name("mlx5_0").to_string(),
        "mlx5_0 on NUMA node 0; port 1 is ACTIVE, Ethernet, 100 Gb/sec (4X EDR), address 0 is fe80::1, \
         address 3 is 10.77.0.1 (RoCE v2, eth7)"
    );
    assert_eq!((&by_name("mlx5_0").fault, by_name("mlx5_0").ports[0].gids.len()), (&None, 2));
    assert_eq!(by_name("down0").fault.as_deref(), Some("no port is active"));
    assert_eq!(by_name("down0").to_string(), "down0; port 1 is DOWN, address 0 is fe80::9");
    assert_eq!(Discovery::under("/no/such/folder").devices(), []);
}

/// Two sockets, a switch with two devices and a GPU on the first, one of each on the second.
fn server() -> Host {
    let host = Host::new(2);
    host.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", 0);
    host.nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:05:00.0", 0);
    host.nic("mlx5_2", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    host.gpu("pci0000:80/0000:80:03.0/0000:83:00.0", 1);
    host.gpu("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0);
    // Not a GPU of ours.
    host.pci("pci0000:00/0000:00:1f.0", 0, "0x8086", "0x030000");
    host
}

#[test]
fn memory_prefers_the_devices_near_it() {
    let matrix = server().discovery().topology().to_json().to_string();
    assert_eq!(
        matrix,
        concat!(
            r#"{"cpu:0":[["mlx5_0","mlx5_1"],["mlx5_2"]],"#,
            r#""cpu:1":[["mlx5_2"],["mlx5_0","mlx5_1"]],"#,
            r#""cuda:0":[["mlx5_0"],["mlx5_1","mlx5_2"]],"#,
            r#""cuda:1":[["mlx5_2"],["mlx5_0","mlx5_1"]]}"#
        )
    );
}

/// CUDA puts the fastest GPU first, and leaves out excluded ones.
#[test]
fn gpus_have_the_numbers_that_their_driver_gives_them() {
    let host = server();
    let topology = host.discovery().gpus(["0000:83:00.0", "0000:99:00.0", "0000:04:00.0"]).topology();
    assert_eq!(topology.near("cuda:0").preferred, ["mlx5_2"]);
    assert_eq!(topology.near("cuda:2").preferred, ["mlx5_0"]);
    assert!(topology.places().all(|(place, _)| place != "cuda:1"), "one that is not there");
    let only = host.discovery().gpus(["0000:83:00.0"]).hardware();
    assert_eq!((only.gpus.len(), only.gpus[0].number), (1, 0));
}

#[test]
fn a_gpu_alone_on_its_node_takes_the_nearest_of_all() {
    let host = Host::new(2);
    host.nic("far", "pci0000:00/0000:00:02.0/0000:05:00.0/0000:06:00.0", 0);
    host.nic("near", "pci0000:00/0000:00:02.0/0000:05:01.0", 0);
    host.gpu("pci0000:80/0000:80:03.0", 1);
    let topology = host.discovery().topology();
    assert_eq!(topology.near("cuda:0").preferred, ["near"]);
    assert_eq!(topology.near("cuda:0").others, ["far"]);
    assert_eq!(topology.near("cpu:1").preferred, [""; 0]);
}

#[test]
fn unusable_settings_are_left_out_with_the_reason() {
    let host = server();
    host.rdma("down", "1: DOWN", "fe80:0000:0000:0000:0000:0000:0000:0001");
    host.rdma("nogid", "4: ACTIVE", "0000:0000:0000:0000:0000:0000:0000:0000");
    host.rdma("nodev", "4: ACTIVE", "fe80:0000:0000:0000:0000:0000:0000:0001");
    fs::remove_file(host.path("dev/infiniband/uverbs_nodev")).unwrap();
    host.rdma("noverbs", "4: ACTIVE", "fe80:0000:0000:0000:0000:0000:0000:0001");
    fs::remove_dir_all(host.path("sys/class/infiniband_verbs/uverbs_noverbs")).unwrap();
    let found = host.discovery().without(["mlx5_1"]).hardware();
    let names: Vec<&str> = found.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["mlx5_0", "mlx5_2"]);
    let why = |name: &str| found.unusable.iter().find(|(known, _)| known == name).unwrap().1.clone();
    assert!(why("down").contains("no port is active") && why("nogid").contains("no port is active"));
    assert!(why("nodev").contains("uverbs_nodev cannot be opened"), "{}", why("nodev"));
    assert!(why("noverbs").contains("verbs") && why("mlx5_1").contains("filtered"));
    let some = host.discovery().only(["mlx5_2", "mlx5_1"]).only(["mlx5_2"]).topology();
    assert_eq!(some.devices(), ["mlx5_2"]);
}

#[test]
fn a_device_in_software_is_where_its_interface_is() {
    let host = Host::new(2);
    let pci = host.pci("pci0000:40/0000:40:00.0", 1, "0x1af4", "0x020000");
    // As virtio has it: the interface's device is one level below the PCI device.
    host.write("sys/devices/pci0000:40/0000:40:00.0/virtio0/driver", "");
    host.link("sys/class/net/eth0/device", &pci.join("virtio0"));
    for (name, parent) in [("rxe0", "eth0"), ("rxe1", "veth0")] {
        host.rdma(name, "4: ACTIVE", "fe80:0000:0000:0000:0000:0000:0000:0001");
        host.write(&format!("sys/class/infiniband/{name}/parent"), parent);
    }
    let found = host.discovery().hardware();
    assert_eq!(
        (found.nics[0].node, found.nics[0].pci.as_ref()),
        (Some(1), Some(&fs::canonicalize(&pci).unwrap()))
    );
    assert_eq!((found.nics[1].node, found.nics[1].pci.as_ref()), (None, None));
    let topology = found.topology();
    assert_eq!(topology.near("cpu:1").preferred, ["rxe0"]);
    assert_eq!(topology.near("cpu:0").others, ["rxe0", "rxe1"]);
}

#[test]
fn a_host_without_anything_has_one_node() {
    let folder = tempfile::tempdir().unwrap();
    let topology = Discovery::under(folder.path()).topology();
    assert_eq!(topology.to_json().to_string(), r#"{"cpu:0":[[],[]]}"#);
    // Every machine has memory.
    assert!(Discovery::default().topology().places().any(|(location, _)| location.starts_with("cpu:")));
}

#[test]
fn a_custom_file_goes_before_what_is_found() {
    let host = server();
    let file = host.path("topology.json");
    fs::write(&file, r#"{"cpu:0":[["mine"],[]]}"#).unwrap();
    let custom = Topology::of_this_host(&host.discovery(), Some(&file));
    assert_eq!(custom.devices(), ["mine"]);
    fs::write(&file, "{").unwrap();
    let found = Topology::of_this_host(&host.discovery(), Some(&file));
    assert_eq!(found, host.discovery().topology(), "one that cannot be read is passed over");
}
