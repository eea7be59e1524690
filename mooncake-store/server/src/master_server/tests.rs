use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use mooncake_core::alloc::{AllocError, Extent, Tlsf, TlsfConfig};
use mooncake_core::evict::{EvictionPolicy, Lru};
use mooncake_core::ids::{ClientId, SegmentId, SlotId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_protocol::api::{Caller, EndItem, ObjectService, PutItem, SegmentService, WriteMode};
use mooncake_protocol::client::RpcOptions;
use mooncake_protocol::remote::RemoteMaster;

use super::*;

/// Counters of the calls of an allocator or a policy.
#[derive(Clone, Debug, Default)]
struct Calls {
    allocate: Arc<AtomicU64>,
    release: Arc<AtomicU64>,
    insert: Arc<AtomicU64>,
    touch: Arc<AtomicU64>,
    evict: Arc<AtomicU64>,
}

/// Allocator that counts its calls.
#[derive(Debug)]
struct CountingAllocator(Tlsf, Calls);

impl SegmentAllocator for CountingAllocator {
    type Config = Calls;

    fn new(capacity: u64, calls: &Calls) -> Self {
        Self(Tlsf::new(capacity, &TlsfConfig::default()), calls.clone())
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        self.1.allocate.fetch_add(1, SeqCst);
        self.0.allocate(len, align)
    }

    fn release(&mut self, extent: Extent) {
        self.1.release.fetch_add(1, SeqCst);
        self.0.release(extent);
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        self.0.reserve(extent)
    }

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn used(&self) -> u64 {
        self.0.used()
    }

    fn largest_free(&self) -> u64 {
        self.0.largest_free()
    }
}

/// Policy that counts its calls.
#[derive(Debug)]
struct CountingPolicy(Lru, Calls);

impl MergeableOrder for CountingPolicy {}

impl EvictionPolicy for CountingPolicy {
    type Config = Calls;

    fn new(slots: usize, calls: &Calls) -> Self {
        Self(Lru::new(slots, &()), calls.clone())
    }

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.1.insert.fetch_add(1, SeqCst);
        self.0.insert(slot, bytes);
    }

    fn touch(&mut self, slot: SlotId) {
        self.1.touch.fetch_add(1, SeqCst);
        self.0.touch(slot);
    }

    fn remove(&mut self, slot: SlotId) {
        self.0.remove(slot);
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.1.evict.fetch_add(1, SeqCst);
        self.0.evict(allowed)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// A server with a custom allocator and policy uses both for the objects that arrive by RPC.
#[tokio::test(flavor = "multi_thread")]
async fn custom_parts_work_behind_the_server() {
    let (allocator, policy) = (Calls::default(), Calls::default());
    let mut config = MasterConfig::default();
    config.rpc_address = "127.0.0.1".into();
    config.rpc_port = 0;
    config.metrics_host = "127.0.0.1".into();
    config.metrics_port = 0;
    // No lease protects an object, so that a put can evict the one before it.
    config.options.lease_ttl = Duration::ZERO;
    config.options.high_watermark = 1.0;
    let server = MasterServer::<CountingAllocator, CountingPolicy>::start_with_parts(
        config,
        allocator.clone(),
        policy.clone(),
        SystemClock::shared(),
    );
    let server = server.await.unwrap();

    let remote = RemoteMaster::new(server.addresses().rpc.to_string(), RpcOptions::default());
    let client = ClientId(Uuid { first: 1, second: 2 });
    let segment = Segment {
        id: SegmentId(Uuid { first: 3, second: 4 }),
        name: "node:1".into(),
        base: 1 << 40,
        size: 1 << 20,
        endpoint: "127.0.0.1:1".into(),
        protocol: "tcp".into(),
        host_id: String::new(),
    };
    remote.mount(client, &segment).await.unwrap();

    let caller = Caller { client, tenant: "default", attempt: 0 };
    let config = ReplicateConfig::default();
    let keys: Vec<Vec<u8>> = (0..8).map(|number| format!("key{number}").into_bytes()).collect();
    for key in &keys {
        let item = PutItem { key, len: 300 << 10 };
        let mut started = remote.put_start(caller, WriteMode::Put, &[item], &config).await.unwrap();
        started.pop().unwrap().unwrap();
        let item = EndItem { key, checksum: None };
        let mut ended = remote.put_end(caller, WriteMode::Put, &[item], ReplicaType::Memory).await.unwrap();
        ended.pop().unwrap().unwrap();
    }
    // The last object is in memory, and a read of it is a use.
    let found = remote.locate("default", &[keys.last().unwrap()]).await.unwrap();
    assert!(found[0].is_ok(), "{found:?}");

    let read = |counter: &AtomicU64| counter.load(SeqCst);
    assert!(read(&allocator.allocate) >= keys.len() as u64, "{allocator:?}");
    assert!(read(&allocator.release) > 0, "the evicted objects are released: {allocator:?}");
    assert_eq!(read(&policy.insert), keys.len() as u64, "{policy:?}");
    assert!(read(&policy.evict) > 0, "eight objects do not fit: {policy:?}");
    assert_eq!(read(&policy.touch), 1, "one object is read once: {policy:?}");
    let stats = server.master().stats();
    assert!(stats.evicted_keys > 0 && stats.keys < keys.len() as u64, "{stats:?}");
    server.stop().await;
}
