//! A master server with an allocator and an eviction policy of the application.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::alloc::{AllocError, CustomAllocator, Extent, SegmentAllocator, Tlsf, TlsfConfig};
use mooncake_core::evict::{CustomPolicy, EvictionPolicy, MergeableOrder};
use mooncake_core::ids::{ClientId, SegmentId, SlotId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_master::{Master, MasterOptions, Put};
use mooncake_protocol::api::WriteMode;
use mooncake_server::MasterServer;
use mooncake_server::config::MasterConfig;

/// Allocator that counts its allocations.
struct Counting {
    inner: Tlsf,
    allocations: Arc<AtomicU64>,
}

impl SegmentAllocator for Counting {
    type Config = Arc<AtomicU64>;

    fn new(capacity: u64, allocations: &Arc<AtomicU64>) -> Self {
        Self { inner: Tlsf::new(capacity, &TlsfConfig::default()), allocations: allocations.clone() }
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        self.allocations.fetch_add(1, SeqCst);
        self.inner.allocate(len, align)
    }

    fn release(&mut self, extent: Extent) {
        self.inner.release(extent);
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        self.inner.reserve(extent)
    }

    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    fn used(&self) -> u64 {
        self.inner.used()
    }

    fn largest_free(&self) -> u64 {
        self.inner.largest_free()
    }
}

/// Policy that evicts the newest object first.
#[derive(Default)]
struct NewestFirst {
    order: BTreeMap<u64, SlotId>,
    arrivals: HashMap<SlotId, u64>,
    next: u64,
}

impl EvictionPolicy for NewestFirst {
    type Config = ();

    fn new(_slots: usize, (): &()) -> Self {
        Self::default()
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        if !self.arrivals.contains_key(&slot) {
            self.next += 1;
            self.order.insert(self.next, slot);
            self.arrivals.insert(slot, self.next);
        }
    }

    fn touch(&mut self, _slot: SlotId) {}

    fn remove(&mut self, slot: SlotId) {
        if let Some(arrival) = self.arrivals.remove(&slot) {
            self.order.remove(&arrival);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let victim = self.order.values().rev().copied().find(|slot| allowed(*slot))?;
        self.remove(victim);
        Some(victim)
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

impl MergeableOrder for NewestFirst {}

const CLIENT: ClientId = ClientId(Uuid::new(1, 1));
const OBJECT: u64 = 64 << 10;

fn put(master: &Master, key: &str) -> mooncake_core::Result<()> {
    let config = ReplicateConfig::default();
    let writer = CLIENT.into();
    let put = Put {
        writer,
        mode: WriteMode::Put,
        key: key.as_bytes(),
        len: OBJECT,
        config: &config,
        group: "",
        session: None,
    };
    master.put_start(&put)?;
    master.put_end(writer, key.as_bytes(), None, ReplicaType::All)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_uses_the_allocator_and_the_policy_of_the_application() {
    let allocations = Arc::new(AtomicU64::new(0));
    let config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        // One shard: victims of several shards are merged by age. No background eviction.
        options: MasterOptions {
            lease_ttl: Duration::ZERO,
            shards: 1,
            high_watermark: 1.0,
            ..MasterOptions::default()
        },
        allocator: CustomAllocator::new::<Counting>(allocations.clone()).into(),
        eviction: CustomPolicy::new::<NewestFirst>(()).into(),
        ..MasterConfig::default()
    };
    let server = MasterServer::start(config).await.unwrap();
    let master = server.master();
    let segment = Segment {
        id: SegmentId(Uuid::new(2, 2)),
        name: "node:1".into(),
        base: 1 << 40,
        size: 4 * OBJECT,
        endpoint: "node:1".into(),
        protocol: "tcp".into(),
        host_id: "node".into(),
        locality: None,
    };
    master.mount(CLIENT, &segment).unwrap();
    for key in ["first", "second", "third", "fourth", "fifth", "sixth"] {
        put(master, key).unwrap();
    }
    let exists = |key: &str| master.find(key.as_bytes()).map_err(|error| error.code());
    assert_eq!(exists("first"), Ok(()), "the built-in policies would have evicted it");
    assert_eq!(exists("sixth"), Ok(()));
    assert_eq!(exists("fourth"), Err(ErrorCode::ObjectNotFound));
    // A shard chooses its next victim at an eviction, before the fifth object exists.
    assert_eq!(exists("third"), Err(ErrorCode::ObjectNotFound));
    assert!(allocations.load(SeqCst) >= 6, "every put allocates");
    server.stop().await;
}
