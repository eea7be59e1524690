//! NUMA affinity of memory and devices.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::ptr::NonNull;

use mooncake_core::memory::{Location, MemorySpan};
use mooncake_transport::topology::{Devices, Topology};
use serde_json::{Value, json};

/// Returns the NUMA node of the first page of memory, from its location or from the kernel.
pub(crate) fn node_of_memory(span: MemorySpan) -> Option<u32> {
    match span.location {
        Location::Cpu(node) => Some(node),
        Location::Any => node_of_page(span.ptr),
        _ => None,
    }
}

fn node_of_page(at: NonNull<u8>) -> Option<u32> {
    let mut pages = [at.as_ptr().cast::<libc::c_void>()];
    let mut status = [-1i32];
    // SAFETY: one page and one status; without target nodes, the call only reports the node of the
    // page.
    let code = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            1usize,
            pages.as_mut_ptr(),
            std::ptr::null::<i32>(),
            status.as_mut_ptr(),
            0,
        )
    };
    (code == 0).then(|| u32::try_from(status[0]).ok()).flatten()
}

/// Returns for each NUMA node the devices near it and the others, in the format of descriptors.
pub(crate) fn matrix(devices: &[(String, Option<u32>)]) -> Value {
    let nodes = nodes();
    let mut matrix = BTreeMap::new();
    for node in nodes {
        let (preferred, others): (Vec<_>, Vec<_>) =
            devices.iter().partition(|(_, at)| at.is_none_or(|at| at == node));
        let names = |devices: Vec<&(String, Option<u32>)>| -> Vec<String> {
            devices.into_iter().map(|(name, _)| name.clone()).collect()
        };
        matrix.insert(format!("cpu:{node}"), json!([names(preferred), names(others)]));
    }
    json!(matrix)
}

/// Returns the configured topology without unused devices, in the format of descriptors. Peers
/// would choose an unused device, and find neither its address nor a key.
pub(crate) fn published(topology: &Topology, devices: &[(String, Option<u32>)]) -> Value {
    let used = |list: &[String]| -> Vec<String> {
        list.iter().filter(|name| devices.iter().any(|(used, _)| used == *name)).cloned().collect()
    };
    let entry = |(place, lists): (&str, &Devices)| {
        (place.to_owned(), json!([used(&lists.preferred), used(&lists.others)]))
    };
    topology.places().map(entry).collect()
}

fn nodes() -> Vec<u32> {
    let folder = PathBuf::from("/sys/devices/system/node");
    let mut nodes: Vec<u32> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    nodes.sort_unstable();
    if nodes.is_empty() {
        nodes.push(0);
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::memory::{HostMemory, MemorySource};

    #[test]
    fn devices_are_near_their_node() {
        let node = nodes()[0];
        let devices = [("a".to_owned(), Some(node)), ("b".into(), None), ("c".into(), Some(9999))];
        assert_eq!(matrix(&devices)[format!("cpu:{node}")], json!([["a", "b"], ["c"]]));
    }

    #[test]
    fn unused_devices_are_not_published() {
        let text = r#"{"cpu:0":[["a","gone"],["b"]],"cpu:1":[["gone"],["b","gone"]],"cuda:0":[["gone"],[]]}"#;
        let devices = [("b".to_owned(), None), ("a".into(), Some(0))];
        let published = published(&Topology::parse(text).unwrap(), &devices);
        assert_eq!(published, json!({"cpu:0": [["a"], ["b"]], "cpu:1": [[], ["b"]], "cuda:0": [[], []]}));
    }

    #[test]
    fn a_used_page_has_a_known_node_or_none() {
        let memory = HostMemory::new(4096).unwrap();
        // SAFETY: in range, and no other user.
        unsafe { memory.span().ptr.write(1) };
        if let Some(node) = node_of_memory(memory.span()) {
            assert!(nodes().contains(&node));
        }
        let located = MemorySpan { location: Location::Cpu(3), ..memory.span() };
        assert_eq!(node_of_memory(located), Some(3));
    }
}
