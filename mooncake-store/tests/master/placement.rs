//! Placement as properties: each strategy on random clusters, compared with the free space of the
//! segments.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::rig::{KIB, Rig, client, endpoint, segment};
use mooncake_core::error::ErrorCode;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::testkit::effort;
use mooncake_store::master::{MasterOptions, Placement};
use proptest::prelude::*;

const BLOCK: u64 = 64 * KIB;

/// Expected state of the master: for each segment its host, its size in blocks, and the number of
/// taken blocks.
struct Cluster {
    rig: Rig,
    segments: BTreeMap<String, Node>,
    puts: u64,
}

struct Node {
    name: String,
    host: String,
    blocks: u64,
    used: u64,
}

impl Cluster {
    fn new(placement: Placement, nodes: &[(u8, u64)]) -> Self {
        let options = MasterOptions { placement, high_watermark: 1.0, ..MasterOptions::default() };
        let mut cluster = Self { rig: Rig::with(options), segments: BTreeMap::new(), puts: 0 };
        nodes.iter().for_each(|(host, blocks)| cluster.join(*host, *blocks));
        cluster
    }

    fn join(&mut self, host: u8, blocks: u64) {
        let number = self.segments.len() as u64 + 1;
        let mut segment = segment(number, blocks * BLOCK);
        segment.host_id = format!("host {host}");
        self.rig.master.mount(client(number), &segment).unwrap();
        let node = Node { name: segment.name, host: segment.host_id, blocks, used: 0 };
        self.segments.insert(segment.endpoint, node);
    }

    /// Puts one block, pinned so that nothing is ever evicted. Returns its endpoints.
    fn put(&mut self, config: &ReplicateConfig) -> Result<Vec<String>, ErrorCode> {
        self.puts += 1;
        let config = ReplicateConfig { hard_pin: true, ..config.clone() };
        let replicas = self.rig.put_with(1, &format!("key {}", self.puts), BLOCK, &config)?;
        let endpoints: Vec<String> = replicas.iter().map(|replica| endpoint(replica).to_owned()).collect();
        for endpoint in &endpoints {
            self.segments.get_mut(endpoint).unwrap().used += 1;
        }
        Ok(endpoints)
    }

    fn host(&self, endpoint: &str) -> &str {
        &self.segments[endpoint].host
    }

    fn roomy(&self) -> impl Iterator<Item = (&String, &Node)> {
        self.segments.iter().filter(|(_, node)| node.used < node.blocks)
    }

    fn roomy_hosts(&self) -> BTreeSet<String> {
        self.roomy().map(|(_, node)| node.host.clone()).collect()
    }
}

fn writer_on(host: u8) -> ReplicateConfig {
    ReplicateConfig { host_id: format!("host {host}"), ..ReplicateConfig::default() }
}

/// Strategy for up to five hosts and up to eight segments of up to twelve blocks.
fn nodes() -> impl Strategy<Value = Vec<(u8, u64)>> {
    proptest::collection::vec((0..5u8, 1..12u64), 1..9)
}

fn free_to_choose() -> impl Strategy<Value = Placement> {
    prop_oneof![
        Just(Placement::Random),
        Just(Placement::FreeRatioFirst),
        Just(Placement::SsdFreeRatioFirst),
        Just(Placement::LocalFirst),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(effort(60, 300)))]

    /// Replicas take as many segments, and as many hosts, as have free space.
    #[test]
    fn replicas_lie_apart(
        placement in free_to_choose(),
        nodes in nodes(),
        puts in proptest::collection::vec((1..5u64, 0..6u8), 1..60),
    ) {
        let mut cluster = Cluster::new(placement, &nodes);
        for (replicas, host) in puts {
            let (segments, hosts) = (cluster.roomy().count(), cluster.roomy_hosts().len());
            let outcome = cluster.put(&ReplicateConfig { replicas, ..writer_on(host) });
            if segments == 0 {
                prop_assert_eq!(outcome, Err(ErrorCode::NoAvailableHandle));
                continue;
            }
            let placed = outcome.unwrap();
            prop_assert_eq!(placed.len(), segments.min(replicas as usize));
            prop_assert_eq!(placed.iter().collect::<BTreeSet<_>>().len(), placed.len(), "one segment twice");
            let on: BTreeSet<_> = placed.iter().map(|endpoint| cluster.host(endpoint)).collect();
            prop_assert_eq!(on.len(), hosts.min(placed.len()), "{:?}", placed);
        }
    }

    /// A single replica goes to the host of the writer, or to the next host by name with free
    /// space. The choice of one put is stable.
    #[test]
    fn near_ones_come_first(
        always in any::<bool>(),
        nodes in nodes(),
        writers in proptest::collection::vec(0..5u8, 1..60),
    ) {
        let placement = if always { Placement::LocalFirst } else { Placement::FreeRatioFirst };
        let mut cluster = Cluster::new(placement, &nodes);
        for writer in writers {
            let config = ReplicateConfig { same_node: !always, ..writer_on(writer) };
            let hosts = cluster.roomy_hosts();
            let member = cluster.segments.values().any(|node| node.host == config.host_id);
            let Ok(placed) = cluster.put(&config) else {
                prop_assert!(hosts.is_empty());
                break;
            };
            if member {
                let next = hosts.range(config.host_id.clone()..).next().or(hosts.first());
                prop_assert_eq!(Some(cluster.host(&placed[0])), next.map(String::as_str));
            }
        }
    }

    /// Preferred segments come first, in order, for every strategy.
    #[test]
    fn preferred_ones_come_first(
        placement in free_to_choose(),
        nodes in nodes(),
        puts in proptest::collection::vec(proptest::collection::vec(1..10u64, 1..4), 1..60),
    ) {
        let mut cluster = Cluster::new(placement, &nodes);
        for preferred in puts {
            let preferred_segments: Vec<String> = preferred.iter().map(|n| format!("node{n}:1")).collect();
            let roomy: BTreeSet<String> = cluster.roomy().map(|(_, node)| node.name.clone()).collect();
            let first = preferred_segments.iter().find(|name| roomy.contains(*name)).cloned();
            let Ok(placed) = cluster.put(&ReplicateConfig { preferred_segments, ..writer_on(0) }) else {
                prop_assert!(roomy.is_empty());
                break;
            };
            if let Some(first) = first {
                prop_assert_eq!(&cluster.segments[&placed[0]].name, &first);
            }
        }
    }

    /// `cxl` places objects in the first named segment, or nowhere.
    #[test]
    fn cxl_goes_where_it_is_configured(nodes in nodes(), puts in proptest::collection::vec(0..10u64, 1..40)) {
        let mut cluster = Cluster::new(Placement::Cxl, &nodes);
        prop_assert_eq!(cluster.put(&ReplicateConfig::default()), Err(ErrorCode::InvalidParams));
        for n in puts {
            let name = format!("node{n}:1");
            let roomy = cluster.roomy().any(|(_, node)| node.name == name);
            let preferred_segments = vec![name.clone(), "node1:1".to_owned()];
            match cluster.put(&ReplicateConfig { replicas: 2, preferred_segments, ..ReplicateConfig::default() }) {
                Ok(placed) => {
                    prop_assert!(roomy && placed.len() == 1);
                    prop_assert_eq!(&cluster.segments[&placed[0]].name, &name);
                }
                Err(error) => prop_assert_eq!((error, roomy), (ErrorCode::NoAvailableHandle, false)),
            }
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// A segment that has just joined takes a part of the writes: beside `n` others at least a
    /// third of an even share, and at most nineteen twentieths.
    #[test]
    fn a_fresh_segment_does_not_take_everything(
        placement in free_to_choose(),
        others in 1..7u8,
        filled in 0..80u64,
    ) {
        // All segments are on one host, so that none is nearer.
        let mut cluster = Cluster::new(placement, &vec![(0, 400); usize::from(others)]);
        for _ in 0..filled * u64::from(others) * 4 {
            cluster.put(&writer_on(0)).unwrap();
        }
        cluster.join(0, 400);
        let fresh = format!("10.0.0.{}:1", others + 1);
        let writes = 300;
        let took = (0..writes).filter(|_| cluster.put(&writer_on(0)).unwrap() == [fresh.clone()]).count();
        let share = writes / (usize::from(others) + 1);
        prop_assert!(took >= share / 3 && took <= writes * 19 / 20, "{} of {} to the fresh one", took, writes);
    }
}

/// Eviction for a put that may go to one segment only frees nothing elsewhere.
#[test]
fn cxl_evicts_where_it_is_configured() {
    let mut cluster = Cluster::new(Placement::Cxl, &[(0, 4), (1, 4)]);
    let to = |n: u64| ReplicateConfig {
        preferred_segments: vec![format!("node{n}:1")],
        ..ReplicateConfig::default()
    };
    for n in 0..8 {
        cluster.rig.put_with(1, &format!("old {n}"), BLOCK, &to(1 + n % 2)).unwrap();
    }
    for n in 0..3 {
        cluster.rig.put_with(1, &format!("new {n}"), BLOCK, &to(2)).unwrap();
    }
    assert_eq!(cluster.rig.master.stats().evicted_keys, 3);
    assert!((0..8).step_by(2).all(|n| cluster.rig.has(&format!("old {n}"))), "the other segment's");
    cluster.puts += 1;
}
