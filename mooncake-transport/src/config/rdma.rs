//! Settings of the RDMA transport. Most defaults are those of Mooncake C++.

use std::time::Duration;

use super::TransportConfig;
use crate::handshake::HandshakeConfig;
use crate::topology::{Discovery, Topology};
use mooncake_core::{Error, Result};

/// Maximum of [`RdmaConfig::retries`]: 7 means no limit on some devices.
pub const MAX_RETRIES: u8 = 6;
/// Maximum of [`RdmaConfig::pairs`]: the index of a queue pair is one byte of a request number.
pub const MAX_PAIRS: usize = 255;

/// Settings of the RDMA transport (crate `mooncake-rdma`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Names of the devices to use. Empty for every device whose port is active and has an address.
    pub devices: Vec<String>,
    /// Filter of the devices when `devices` is empty.
    pub discovery: Discovery,
    /// Affinity of devices and memory, instead of the discovered one. When `devices` is empty, only
    /// the devices of the topology are used.
    pub topology: Option<Topology>,
    /// Preferred devices of peers, by the name of the local device. Without an entry, the device of
    /// the same name is preferred.
    pub partners: Vec<(String, Vec<String>)>,
    /// Host of the handshake port for this transport, and its port if it differs. Empty if it is
    /// the name of the segment.
    pub server_name: String,
    /// Port number of each device.
    pub port: u8,
    /// Index of the GID; `None` chooses one.
    pub gid_index: Option<u8>,
    /// Number of other GIDs to try when there is no route from the chosen one.
    pub gid_retries: u32,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Traffic class of sent packets.
    pub traffic_class: u8,
    /// Service level of sent packets.
    pub service_level: u8,
    /// Largest packet in bytes: 256, 512, 1024, 2048 or 4096, limited by the port.
    pub mtu: u32,
    /// Timeout of an acknowledgement: 4.096 µs times two to this power.
    pub timeout: u8,
    /// Number of retransmissions of a packet without an acknowledgement, at most 6.
    pub retries: u8,
    /// Number of queue pairs per connection. Both sides must use the same number.
    pub pairs: usize,
    /// Number of requests in one queue pair, limited by the device.
    pub requests: u32,
    /// Number of completions in the queue of one device, limited by the device. At most so many
    /// requests are in flight on it.
    pub completions: u32,
    /// Maximum number of connections per device, limited by the device. The least recently used one
    /// is closed for a new one.
    pub max_endpoints: usize,
    /// Maximum number of messages that wait for send credit on one connection. More are refused.
    pub max_waiting: usize,
    /// Length of a message in bytes.
    pub slice_bytes: usize,
    /// Maximum length of a last message that is merged with the one before.
    pub fragment_bytes: usize,
    /// Shortest transfer in bytes that is striped over several devices.
    pub stripe_bytes: usize,
    /// Number of retries of a message, on this rail or another.
    pub attempts: u32,
    /// Time for which a failed rail is avoided while there is another.
    pub rail_pause: Duration,
    /// Time for which a rail is not connected again after a failed connection attempt. Messages for
    /// it fail at once.
    pub connect_pause: Duration,
    /// Timeout for the completion of the requests of a retired queue pair.
    pub drain_timeout: Duration,
    /// Timeout for the ready message of a peer that has connected.
    pub ready_timeout: Duration,
    /// Longest registration in bytes, limited by every device. Longer memory is registered in
    /// parts.
    pub region_bytes: u64,
    /// Permits devices to write in any order, if they support it.
    pub relaxed_ordering: bool,
    /// Limits and timeouts of the handshake port.
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
            max_waiting: 1 << 24,
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
    /// Checks the settings.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the name of the first invalid setting.
    pub fn check(&self) -> Result<()> {
        let fault = if self.retries > MAX_RETRIES {
            "retries must be 0 to 6: a higher number may mean for ever, and a dead peer is then never detected"
        } else if self.timeout == 0 || self.timeout > 31 {
            "timeout must be 1 to 31: 0 waits for ever"
        } else if self.mtu_number().is_none() {
            "mtu must be 256, 512, 1024, 2048 or 4096"
        } else if self.port == 0 {
            "port must not be 0: ports are numbered from 1"
        } else if !(1..=MAX_PAIRS).contains(&self.pairs) {
            "pairs must be 1 to 255"
        } else if self.requests == 0
            || self.completions == 0
            || self.max_endpoints == 0
            || self.max_waiting == 0
        {
            "requests, completions, max_endpoints and max_waiting must not be 0"
        } else if self.region_bytes < 4096 {
            "region_bytes must be at least 4096, a page"
        } else if self.slice_bytes == 0 || self.service_level > 15 {
            "slice_bytes must not be 0, and service_level at most 15"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("cannot use RdmaConfig"))
    }

    /// Returns whether a device is used when none is named.
    pub fn selects(&self, name: &str) -> bool {
        let listed = |topology: &Topology| topology.devices().contains(&name);
        self.discovery.counts(name) && self.topology.as_ref().is_none_or(listed)
    }

    /// Returns the NUMA node near a device, or `None` if it is unknown or there are several.
    pub fn node_of(&self, name: &str) -> Option<u32> {
        let Some(topology) = &self.topology else { return self.discovery.node_of(name) };
        let near = topology.places().filter(|(_, devices)| devices.preferred.iter().any(|near| near == name));
        let mut nodes = near.filter_map(|(place, _)| place.strip_prefix("cpu:")?.parse().ok());
        nodes.next().filter(|_| nodes.next().is_none())
    }

    /// Returns whether local device `ours` prefers device `theirs` of a peer.
    pub fn are_partners(&self, ours: &str, theirs: &str) -> bool {
        match self.partners.iter().find(|(name, _)| name == ours) {
            Some((_, partners)) => partners.iter().any(|name| name == theirs),
            None => ours == theirs,
        }
    }

    /// Returns the verbs number of the maximum packet size.
    pub fn mtu_number(&self) -> Option<u32> {
        [256, 512, 1024, 2048, 4096].iter().position(|mtu| *mtu == self.mtu).map(|i| i as u32 + 1)
    }
}

impl TransportConfig for RdmaConfig {
    const TRANSPORT: &'static str = "rdma";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_and_topology_select_devices_and_nodes() {
        let all = RdmaConfig::default();
        assert!(all.selects("a") && all.node_of("no such device").is_none());
        let filtered = RdmaConfig { discovery: Discovery::default().only(["a"]), ..RdmaConfig::default() };
        assert!(filtered.selects("a") && !filtered.selects("b"));
        let text = r#"{"cpu:0": [["a", "c"], ["b"]], "cpu:1": [["b", "c"], ["a"]], "cuda:0": [["a"], []]}"#;
        let config = RdmaConfig { topology: Some(Topology::parse(text).unwrap()), ..RdmaConfig::default() };
        assert!(config.selects("a") && config.selects("b") && !config.selects("d"));
        let nodes = ["a", "b", "c"].map(|name| config.node_of(name));
        assert_eq!(nodes, [Some(0), Some(1), None], "a device near both nodes has no node");
    }

    #[test]
    fn partner_is_configured_or_same_device() {
        let same = RdmaConfig::default();
        assert!(same.are_partners("a", "a") && !same.are_partners("a", "b"));
        let partners = vec![("a".into(), vec!["c".into(), "b".into()])];
        let config = RdmaConfig { partners, ..RdmaConfig::default() };
        assert!(
            config.are_partners("a", "b") && config.are_partners("a", "c") && !config.are_partners("a", "a")
        );
        assert!(config.are_partners("b", "b"), "a device without an entry");
    }

    #[test]
    fn an_invalid_setting_is_refused() {
        let valid = RdmaConfig::default();
        valid.check().unwrap();
        assert_eq!(valid.mtu_number(), Some(5));
        let invalid = [
            RdmaConfig { retries: 7, ..valid.clone() },
            RdmaConfig { timeout: 0, ..valid.clone() },
            RdmaConfig { mtu: 1500, ..valid.clone() },
            RdmaConfig { pairs: 256, ..valid.clone() },
            RdmaConfig { slice_bytes: 0, ..valid.clone() },
            RdmaConfig { region_bytes: 4095, ..valid.clone() },
        ];
        for config in invalid {
            config.check().unwrap_err();
        }
    }
}
