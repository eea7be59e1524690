//! Custom eviction policy, used by a master and checked by the public conformance suite.
//!
//! Evicts the largest object first, and the oldest of equals, to keep as many objects as possible.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::{BuiltinAllocator, BuiltinAllocatorConfig};
use mooncake_core::clock::SystemClock;
use mooncake_core::evict::{EvictionPolicy, MergeableOrder};
use mooncake_core::ids::SlotId;
use mooncake_store::client::Client;
use mooncake_store::master::{Master, MasterOptions};

/// Policy that evicts the largest object first.
#[derive(Debug)]
pub struct LargestFirst {
    /// Victims in order: large before small, old before new.
    order: BTreeMap<(Reverse<u64>, u64), SlotId>,
    place: HashMap<SlotId, (Reverse<u64>, u64)>,
    arrivals: u64,
}

impl EvictionPolicy for LargestFirst {
    type Config = ();

    fn new(slots: usize, (): &()) -> Self {
        Self { order: BTreeMap::new(), place: HashMap::with_capacity(slots), arrivals: 0 }
    }

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        if self.place.contains_key(&slot) {
            return self.touch(slot);
        }
        self.arrivals += 1;
        let place = (Reverse(bytes), self.arrivals);
        self.order.insert(place, slot);
        self.place.insert(slot, place);
    }

    fn touch(&mut self, _slot: SlotId) {}

    fn remove(&mut self, slot: SlotId) {
        if let Some(place) = self.place.remove(&slot) {
            self.order.remove(&place);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let victim = self.order.values().copied().find(|&slot| allowed(slot))?;
        self.remove(victim);
        Some(victim)
    }

    fn len(&self) -> usize {
        self.place.len()
    }
}

// The defaults suit a policy that knows nothing of other shards.
impl MergeableOrder for LargestFirst {}

#[cfg(test)]
mooncake_core::eviction_conformance!(LargestFirst);

#[tokio::main]
async fn main() -> mooncake_core::Result<()> {
    // Without a lease, an object may be evicted as soon as it is read.
    let options = MasterOptions { lease_ttl: Duration::ZERO, ..MasterOptions::default() };
    let clock = SystemClock::shared();
    let master: Master<BuiltinAllocator, LargestFirst> =
        Master::with_parts(options, &BuiltinAllocatorConfig::default(), &(), clock, 1)?;
    let client = Client::builder().master(Arc::new(master)).segment(1 << 20).connect().await?;
    client.put("large", vec![1; 600 << 10]).await?;
    for index in 0..20 {
        client.put(format!("small/{index}"), vec![2; 40 << 10]).await?;
    }
    let large = client.exist("large").await?;
    let small = client.batch_exist(&(0..20).map(|i| format!("small/{i}")).collect::<Vec<_>>()).await?;
    let kept = small.into_iter().filter(|there| matches!(there, Ok(true))).count();
    println!(
        "largest first: the large object is {}, {kept} of 20 small ones are kept",
        if large { "kept" } else { "gone" }
    );
    client.close().await
}
