//! Peer as its descriptor presents it: memory with keys, and devices.

use mooncake_core::{Error, Result};
use mooncake_transport::instance::Instance;
use mooncake_transport::net::{DEFAULT_PORT, HostPort};
use mooncake_transport::{BufferDesc, Protocol, SegmentDesc};
use serde_json::Value;

use crate::message::INSTANCE_KEY;

/// Maximum number of devices in a descriptor.
const MAX_DEVICES: usize = 256;

/// Parsed descriptor of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerDescriptor {
    /// Prefix of the paths of its devices.
    pub(crate) server: String,
    /// Address of its handshake port.
    pub(crate) at: HostPort,
    /// Instance of the process that has the memory. `None` for Mooncake C++.
    pub(crate) instance: Option<Instance>,
    /// Names of its devices.
    pub(crate) devices: Vec<String>,
    pub(crate) regions: Vec<Range>,
    /// First address and end of memory listed without keys, sorted. The peer's devices do not reach
    /// it.
    without_keys: Vec<(u64, u64)>,
}

/// Registered range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    start: u64,
    end: u64,
    /// Keys by the peer's device.
    keys: Vec<u32>,
    /// True if the range continues the memory of the range before it, which ends where it begins.
    continues: bool,
}

impl PeerDescriptor {
    /// Parses a descriptor.
    ///
    /// # Errors
    ///
    /// Returns `Invalid`, with the faulty part.
    pub(crate) fn read(desc: &SegmentDesc) -> Result<Self> {
        let invalid = |what: String| Error::invalid(format!("segment {:?}: {what}", desc.name));
        if !desc.supports(&Protocol::RDMA) {
            return Err(invalid("is not served over rdma".into()));
        }
        let devices = match desc.extra.get("devices") {
            Some(Value::Array(devices)) if devices.len() <= MAX_DEVICES => devices,
            Some(Value::Array(devices)) => {
                return Err(invalid(format!("{} devices are too many", devices.len())));
            }
            _ => return Err(invalid("has no \"devices\"".into())),
        };
        let devices = devices
            .iter()
            .map(|device| device["name"].as_str().filter(|name| !name.is_empty()).map(str::to_owned))
            .collect::<Option<Vec<_>>>()
            .filter(|devices| !devices.is_empty())
            .ok_or_else(|| invalid("has no device, or a device without a name".into()))?;
        let mut regions: Vec<Range> = Vec::new();
        let mut buffers: Vec<&BufferDesc> = desc.buffers.iter().collect();
        buffers.sort_unstable_by_key(|buffer| buffer.addr);
        let (mut before, mut without_keys): (Option<&BufferDesc>, _) = (None, Vec::new());
        for buffer in buffers {
            let continues = before.replace(buffer).is_some_and(|before| buffer.continues(before));
            let Some(end) = buffer.addr.checked_add(buffer.length) else { continue };
            let keys = keys(buffer)
                .ok_or_else(|| invalid(format!("the keys of {:#x} are not numbers", buffer.addr)))?;
            match keys.len() {
                // Closed to peers, or open on another transport.
                0 => {
                    before = None;
                    without_keys.push((buffer.addr, end));
                }
                n if n == devices.len() => {
                    regions.push(Range { start: buffer.addr, end, keys, continues });
                }
                n => {
                    return Err(invalid(format!(
                        "{n} keys at {:#x} for {} devices",
                        buffer.addr,
                        devices.len()
                    )));
                }
            }
        }
        let server =
            if desc.rdma_server_name.is_empty() { desc.name.clone() } else { desc.rdma_server_name.clone() };
        let at = match &desc.handshake {
            Some(at) if desc.rdma_server_name.is_empty() => at.clone(),
            _ => HostPort::parse(&server, DEFAULT_PORT),
        };
        let instance = Instance::of_segment(desc, INSTANCE_KEY)?;
        Ok(Self { server, at, instance, devices, regions, without_keys })
    }

    /// Returns the region that contains all of a range, or the first of its parts that do.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` if none does.
    pub(crate) fn region(&self, addr: u64, len: usize) -> Result<usize> {
        let wrong = |reason: &str| {
            Err(Error::invalid(format!(
                "cannot transfer {len} bytes at {addr:#x} of {:?}: {reason}",
                self.server
            )))
        };
        let Some(end) = addr.checked_add(len as u64) else { return wrong("range overflows") };
        if len == 0 {
            return wrong("no bytes");
        }
        let after = self.regions.partition_point(|region| region.start <= addr);
        match after.checked_sub(1) {
            Some(i) if addr < self.regions[i].end && end <= self.last_of(i, end) => Ok(i),
            _ => wrong("range is not in one registered buffer"),
        }
    }

    /// Returns whether a range lies in memory that is listed without keys. Another transport may
    /// reach it.
    pub(crate) fn has_no_keys(&self, addr: u64, len: usize) -> bool {
        let after = self.without_keys.partition_point(|(start, _)| *start <= addr);
        let end = after.checked_sub(1).and_then(|i| self.without_keys.get(i)).map_or(0, |(_, end)| *end);
        addr.checked_add(len as u64).is_some_and(|last| len != 0 && last <= end)
    }

    /// Returns the end of the memory that a region is part of, up to the requested end.
    fn last_of(&self, region: usize, requested: u64) -> u64 {
        let first = self.regions[region].end;
        let parts = self.regions[region + 1..].iter().take_while(|part| part.continues);
        parts.map(|part| part.end).find(|end| *end >= requested).unwrap_or(first)
    }

    /// Returns the part of a memory that contains an address. It is the given region or a later
    /// one.
    pub(crate) fn part(&self, region: usize, addr: u64) -> usize {
        self.regions.partition_point(|part| part.start <= addr).saturating_sub(1).max(region)
    }

    /// Returns the number of bytes from an address to the end of its registered part.
    pub(crate) fn bytes_to_part_end(&self, region: usize, addr: u64) -> usize {
        let end = self.regions.get(self.part(region, addr)).map_or(addr, |part| part.end);
        usize::try_from(end.saturating_sub(addr)).unwrap_or(usize::MAX)
    }

    /// Returns the key of a region on one of the peer's devices.
    pub(crate) fn key(&self, region: usize, device: usize) -> Option<u32> {
        self.regions.get(region)?.keys.get(device).copied()
    }
}

fn keys(buffer: &BufferDesc) -> Option<Vec<u32>> {
    match buffer.extra.get("rkey") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(keys)) if keys.len() <= MAX_DEVICES => {
            keys.iter().map(|key| key.as_u64().and_then(|key| u32::try_from(key).ok())).collect()
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn desc(overrides: Value) -> SegmentDesc {
        let mut value = json!({
            "name": "10.0.0.1:15001", "protocol": "rdma", "devices": [{"name": "a"}, {"name": "b"}],
            "buffers": [
                {"name": "cpu:0", "addr": 1000, "length": 100, "rkey": [1, 2], "lkey": [0, 0]},
                {"name": "cpu:0", "addr": 1100, "length": 100, "rkey": [3, 4], "lkey": [0, 0], "continues": false},
                {"name": "cpu:0", "addr": 5000, "length": 100, "rkey": []},
            ],
        });
        for (key, with) in overrides.as_object().unwrap() {
            value[key] = with.clone();
        }
        SegmentDesc::decode(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn ranges_lie_in_one_open_region() {
        let descriptor = PeerDescriptor::read(&desc(json!({}))).unwrap();
        assert_eq!(descriptor.at, HostPort::new("10.0.0.1", 15001));
        assert_eq!((descriptor.region(1000, 100).unwrap(), descriptor.region(1199, 1).unwrap()), (0, 1));
        assert_eq!(descriptor.key(1, 1), Some(4));
        for (addr, len) in
            [(999, 1), (1000, 0), (1050, 100), (1200, 1), (5000, 1), (u64::MAX, 1), (u64::MAX, 2), (0, 9)]
        {
            descriptor.region(addr, len).unwrap_err();
        }
        for (addr, len, without) in
            [(5000, 100, true), (5001, 100, false), (1000, 1, false), (4999, 2, false)]
        {
            assert_eq!(descriptor.has_no_keys(addr, len), without, "{addr}+{len}");
        }
    }

    #[test]
    fn memory_in_parts_is_one() {
        let part = |addr: u64, length: u64, key: u32, continues: Value| json!({"name": "*", "addr": addr, "length": length, "rkey": [key], "lkey": [0], "continues": continues});
        let old = |addr: u64, key: u32| json!({"name": "*", "addr": addr, "length": 100, "rkey": [key], "lkey": [0]});
        let overrides = json!({"devices": [{"name": "a"}], "buffers": [
            part(1200, 50, 3, true.into()), part(1000, 100, 1, false.into()), part(1100, 100, 2, true.into()),
            part(1250, 100, 4, false.into()), part(1400, 100, 5, true.into()), old(2000, 6), old(2100, 7),
        ]});
        let descriptor = PeerDescriptor::read(&desc(overrides)).unwrap();
        assert_eq!((descriptor.region(1000, 250).unwrap(), descriptor.region(1150, 100).unwrap()), (0, 1));
        assert_eq!((descriptor.part(0, 1099), descriptor.part(0, 1100), descriptor.part(0, 1249)), (0, 1, 2));
        assert_eq!(
            (
                descriptor.bytes_to_part_end(0, 1000),
                descriptor.bytes_to_part_end(0, 1100),
                descriptor.bytes_to_part_end(0, 1249)
            ),
            (100, 100, 1)
        );
        assert_eq!(
            (descriptor.region(2000, 200).unwrap(), descriptor.part(5, 2150)),
            (5, 6),
            "nodes of Mooncake C++ do not publish it"
        );
        for (addr, len) in [(1000, 251), (1240, 20), (1390, 20), (1350, 1), (2000, 201)] {
            descriptor.region(addr, len).unwrap_err();
        }
    }

    #[test]
    fn another_name_leads_to_another_host() {
        let renamed = PeerDescriptor::read(&desc(json!({"rdma_server_name": "10.9.9.9:7"}))).unwrap();
        assert_eq!((renamed.server.as_str(), &renamed.at), ("10.9.9.9:7", &HostPort::new("10.9.9.9", 7)));
        let mut directory = desc(json!({"name": "node"}));
        directory.handshake = Some(HostPort::new("10.1.1.1", 9));
        let resolved = PeerDescriptor::read(&directory).unwrap();
        assert_eq!((resolved.server.as_str(), resolved.at), ("node", HostPort::new("10.1.1.1", 9)));
    }

    #[test]
    fn malformed_descriptor_error_states_cause() {
        for (overrides, word) in [
            (json!({"protocol": "tcp"}), "rdma"),
            (json!({"devices": 1}), "devices"),
            (json!({"devices": []}), "name"),
            (json!({"devices": [{"name": ""}]}), "name"),
            (json!({"devices": [{"name": "a"}]}), "2 keys"),
            (json!({"buffers": [{"name": "x", "addr": 1, "length": 1, "rkey": ["a"]}]}), "numbers"),
            (
                json!({"buffers": [{"name": "x", "addr": 1, "length": 1, "rkey": [1, 4_294_967_296u64]}]}),
                "numbers",
            ),
        ] {
            let error = PeerDescriptor::read(&desc(overrides.clone())).unwrap_err().to_string();
            assert!(error.contains(word), "{overrides}: {error}");
        }
    }
}
