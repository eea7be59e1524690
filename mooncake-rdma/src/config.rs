//! Settings, with the existing system's defaults where it has them and they can be lived with.

use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_transport::handshake::HandshakeConfig;
use mooncake_transport::topology::{Discovery, Topology};

use crate::verbs::MAX_RETRIES;

/// Settings of an [`RdmaTransport`](crate::RdmaTransport). Nothing here is read from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Devices to use, by name; empty for every device whose port is active and has an address.
    pub devices: Vec<String>,
    /// Which devices count when none is named.
    pub discovery: Discovery,
    /// Which devices are near which memory, in place of what the machine says; when none is named, no others count.
    pub topology: Option<Topology>,
    /// Devices of peers that ours prefer, by our device's name; without an entry, one of the same name.
    pub partners: Vec<(String, Vec<String>)>,
    /// Host that peers reach our handshake port by for this wire, and its port where that is another; empty when that is the
    /// segment's name.
    pub server_name: String,
    /// Port of each device.
    pub port: u8,
    /// Index of the global address; `None` chooses (see [`gid`](crate::gid)).
    pub gid_index: Option<u8>,
    /// How many other addresses are tried when there is no way from the chosen one.
    pub gid_retries: u32,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Traffic class of our packets.
    pub traffic_class: u8,
    /// Service level of our packets.
    pub service_level: u8,
    /// Largest packet in bytes: 256, 512, 1024, 2048 or 4096, as far as the port goes.
    pub mtu: u32,
    /// How long an answer may take: 4.096 µs times two to this power.
    pub timeout: u8,
    /// How often a packet without an answer is sent again, at most 6.
    pub retries: u8,
    /// Queue pairs per connection. The other side must have as many.
    pub pairs: usize,
    /// Requests in one queue pair, as far as the device goes.
    pub requests: u32,
    /// Completions in one device's queue, as far as it goes. At most so many requests are under way on it.
    pub completions: u32,
    /// Connections per device, as far as it goes; the one used longest ago gives way.
    pub max_endpoints: usize,
    /// Messages that may wait for room on one connection; more are refused.
    pub max_waiting: usize,
    /// Bytes per message.
    pub slice_bytes: usize,
    /// A last message that would be no longer than this goes with the one before.
    pub fragment_bytes: usize,
    /// Shortest transfer in bytes that is spread over several devices.
    pub stripe_bytes: usize,
    /// How often a message is tried again, here or elsewhere.
    pub attempts: u32,
    /// How long a way that failed is left alone while there is another.
    pub rail_pause: Duration,
    /// How long a way on which connecting failed is not tried again: what is to go there fails at once.
    pub connect_pause: Duration,
    /// How long a queue pair that was given up may take to hand back its requests.
    pub drain_timeout: Duration,
    /// How long a peer that connected to us may take to say that it is ready.
    pub ready_timeout: Duration,
    /// Longest registration in bytes, as far as every device goes; longer memory is registered in parts.
    pub region_bytes: u64,
    /// Lets devices write in any order where they can.
    pub relaxed_ordering: bool,
    /// Limits and patience at the handshake port.
    pub handshake: HandshakeConfig,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            discovery: Discovery::default(),
            topology: None,
            partners: Vec::new(),
            server_name: String::new(),
            port: 1,
            gid_index: None,
            gid_retries: 2,
            pkey_index: 0,
            traffic_class: 0,
            service_level: 0,
            mtu: 4096,
            timeout: 14,
            retries: MAX_RETRIES,
            pairs: 2,
            requests: 256,
            completions: 4096,
            max_endpoints: 65536,
            max_waiting: 65536,
            slice_bytes: 64 << 10,
            fragment_bytes: 16 << 10,
            stripe_bytes: 1 << 20,
            attempts: 9,
            rail_pause: Duration::from_secs(30),
            connect_pause: Duration::ZERO,
            drain_timeout: Duration::from_secs(30),
            ready_timeout: Duration::from_secs(10),
            region_bytes: 1 << 40,
            relaxed_ordering: true,
            handshake: HandshakeConfig::default(),
        }
    }
}

impl RdmaConfig {
    /// Names the first setting that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let fault = if self.retries > MAX_RETRIES {
            "retries must be 0 to 6: more may mean for ever, and a dead peer is then never noticed"
        } else if self.timeout == 0 || self.timeout > 31 {
            "timeout must be 1 to 31: an answer that may take for ever is never missed"
        } else if self.mtu_number().is_none() {
            "mtu must be 256, 512, 1024, 2048 or 4096"
        } else if self.port == 0 {
            "ports are numbered from 1"
        } else if !(1..=MAX_PAIRS).contains(&self.pairs) {
            "pairs must be 1 to 255"
        } else if self.requests == 0
            || self.completions == 0
            || self.max_endpoints == 0
            || self.max_waiting == 0
        {
            "requests, completions, max_endpoints and max_waiting must not be 0"
        } else if self.region_bytes < 4096 {
            "region_bytes must be a page at least, 4096"
        } else if self.slice_bytes == 0 || self.service_level > 15 {
            "slice_bytes must not be 0, and service_level at most 15"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("rdma configuration"))
    }

    /// Whether a device is used when none is named.
    pub(crate) fn counts(&self, name: &str) -> bool {
        let listed = |topology: &Topology| topology.devices().contains(&name);
        self.discovery.counts(name) && self.topology.as_ref().is_none_or(listed)
    }

    /// The NUMA node that a device is near; `None` when it is not known, or near several.
    pub(crate) fn node_of(&self, name: &str) -> Option<u32> {
        let Some(topology) = &self.topology else { return self.discovery.node_of(name) };
        let near = topology.places().filter(|(_, devices)| devices.preferred.iter().any(|near| near == name));
        let mut nodes = near.filter_map(|(place, _)| place.strip_prefix("cpu:")?.parse().ok());
        nodes.next().filter(|_| nodes.next().is_none())
    }

    /// Whether a device of a peer's is one that ours goes to rather than to others of the same peer.
    pub(crate) fn are_partners(&self, ours: &str, theirs: &str) -> bool {
        match self.partners.iter().find(|(name, _)| name == ours) {
            Some((_, partners)) => partners.iter().any(|name| name == theirs),
            None => ours == theirs,
        }
    }

    /// The interface's number for the largest packet.
    pub(crate) fn mtu_number(&self) -> Option<u32> {
        [256, 512, 1024, 2048, 4096].iter().position(|mtu| *mtu == self.mtu).map(|i| i as u32 + 1)
    }
}

/// A queue pair's place fits a byte of a request's number.
pub(crate) const MAX_PAIRS: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_devices_count_and_where_they_are() {
        let all = RdmaConfig::default();
        assert!(all.counts("a") && all.node_of("no such device").is_none());
        let filtered = RdmaConfig { discovery: Discovery::default().only(["a"]), ..RdmaConfig::default() };
        assert!(filtered.counts("a") && !filtered.counts("b"));
        let text = r#"{"cpu:0": [["a", "c"], ["b"]], "cpu:1": [["b", "c"], ["a"]], "cuda:0": [["a"], []]}"#;
        let told = RdmaConfig { topology: Some(Topology::parse(text).unwrap()), ..RdmaConfig::default() };
        assert!(told.counts("a") && told.counts("b") && !told.counts("d"));
        let nodes = ["a", "b", "c"].map(|name| told.node_of(name));
        assert_eq!(nodes, [Some(0), Some(1), None], "what is near both nodes is as good for either");
    }

    #[test]
    fn who_goes_to_whom() {
        let same = RdmaConfig::default();
        assert!(same.are_partners("a", "a") && !same.are_partners("a", "b"));
        let partners = vec![("a".into(), vec!["c".into(), "b".into()])];
        let told = RdmaConfig { partners, ..RdmaConfig::default() };
        assert!(told.are_partners("a", "b") && told.are_partners("a", "c") && !told.are_partners("a", "a"));
        assert!(told.are_partners("b", "b"), "of others nothing was said");
    }

    #[test]
    fn what_cannot_work_is_named() {
        let good = RdmaConfig::default();
        good.check().unwrap();
        assert_eq!(good.mtu_number(), Some(5));
        let bad = [
            RdmaConfig { retries: 7, ..good.clone() },
            RdmaConfig { timeout: 0, ..good.clone() },
            RdmaConfig { mtu: 1500, ..good.clone() },
            RdmaConfig { pairs: 256, ..good.clone() },
            RdmaConfig { slice_bytes: 0, ..good.clone() },
            RdmaConfig { region_bytes: 4095, ..good.clone() },
        ];
        for config in bad {
            config.check().unwrap_err();
        }
    }
}
