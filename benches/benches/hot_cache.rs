//! Time of the hot cache of a client beside `moka`: hit, miss, insert with eviction, and forget,
//! with one and two threads.
//!
//! Work: the cache is full. Each thread repeats a batch of hits, of misses, of inserts of new keys
//! and of forgets. Only the calls are timed. The caches take turns, and the fastest turn counts,
//! because other work on the machine only adds time. `over` is the highest number of values in
//! memory above the budget: the client cannot allocate them.
//!
//! "moka" evicts when its own housekeeping runs. "moka, at once" runs the housekeeping after each
//! insert and forget. Both return the memory of a value in the eviction listener.

#![allow(clippy::print_stdout)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaList, ReplicaLocation, ReplicaStatus};
use mooncake_store::client::programs::{CacheTable, CachedValue};
use parking_lot::Mutex;

/// Budget of a cache, in values.
const VALUES: usize = 4096;
/// Length of a value. Nothing reads the bytes, so that only the work of the cache is timed.
const LEN: usize = 64 << 10;
const BATCH: usize = 256;
static BYTES: [u8; LEN] = [0; LEN];

/// Number of values whose memory is taken, now and at the peak.
#[derive(Default)]
struct Memory {
    taken: AtomicU64,
    peak: AtomicU64,
}

/// Memory of one value.
struct Extent(Arc<Memory>);

impl AsRef<[u8]> for Extent {
    fn as_ref(&self) -> &[u8] {
        &BYTES
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Relaxed);
    }
}

impl Memory {
    /// Allocates a value, if fewer than `limit` are allocated.
    fn try_take(self: &Arc<Self>, limit: u64) -> Option<Bytes> {
        let next = |taken: u64| (taken < limit).then_some(taken + 1);
        let before = self.taken.fetch_update(Relaxed, Relaxed, next).ok()?;
        self.peak.fetch_max(before + 1, Relaxed);
        Some(Bytes::from_owner(Extent(self.clone())))
    }
}

/// Key of a value, and the response of the master for it.
struct Object {
    key: Box<[u8]>,
    list: ReplicaList,
}

impl Object {
    fn new(number: u64) -> Self {
        let location = MemoryLocation {
            size: LEN as u64,
            address: number * LEN as u64,
            protocol: "tcp".into(),
            endpoint: "10.0.0.1:12345".into(),
            locality: None,
        };
        let replica = Replica {
            id: ReplicaId(ReplicaId::first(0).0 + number),
            location: ReplicaLocation::Memory(location),
            status: ReplicaStatus::Complete,
        };
        let list = ReplicaList {
            replicas: vec![replica],
            lease: Duration::ZERO,
            checksum: None,
            resolved_tenant: None,
        };
        Self { key: format!("model/layer/{number:032x}").into_bytes().into(), list }
    }

    fn value(&self, bytes: Bytes) -> CachedValue {
        CachedValue { bytes, replicas: self.list.replicas.clone(), checksum: None }
    }
}

/// Operations of the client on its cache.
trait HotCache: Sync {
    fn find(&self, object: &Object) -> Option<Bytes>;
    fn insert(&self, object: &Object);
    fn forget(&self, object: &Object);
    fn memory(&self) -> &Memory;
}

/// Cache of this project.
struct Table {
    table: Mutex<CacheTable>,
    memory: Arc<Memory>,
}

impl HotCache for Table {
    fn find(&self, object: &Object) -> Option<Bytes> {
        self.table.lock().find(&object.key, &object.list)
    }

    fn insert(&self, object: &Object) {
        if !self.table.lock().begin(&object.key) {
            return;
        }
        let bytes = loop {
            if let Some(bytes) = self.memory.try_take(VALUES as u64) {
                break bytes;
            }
            self.table.lock().evict();
        };
        self.table.lock().end(&object.key, Some(object.value(bytes)));
    }

    fn forget(&self, object: &Object) {
        self.table.lock().forget(&object.key);
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Value in `moka`. The eviction listener takes the bytes, because `moka` drops the value later.
struct MokaValue {
    value: CachedValue,
    bytes: Mutex<Option<Bytes>>,
}

/// The same operations on `moka`, with the least recently used value evicted first.
struct Moka {
    cache: Cache<Box<[u8]>, Arc<MokaValue>>,
    /// Keys that are being fetched, and whether their values are still needed.
    coming: Mutex<HashMap<Box<[u8]>, bool>>,
    at_once: bool,
    memory: Arc<Memory>,
}

impl Moka {
    fn new(at_once: bool) -> Self {
        let cache = Cache::<Box<[u8]>, Arc<MokaValue>>::builder()
            .max_capacity((VALUES * LEN) as u64)
            .weigher(|_, _| LEN as u32)
            .eviction_policy(EvictionPolicy::lru())
            .eviction_listener(|_, value, _| drop(value.bytes.lock().take()))
            .build();
        Self { cache, coming: Mutex::default(), at_once, memory: Arc::default() }
    }

    fn housekeep(&self) {
        if self.at_once {
            self.cache.run_pending_tasks();
        }
    }
}

impl HotCache for Moka {
    fn find(&self, object: &Object) -> Option<Bytes> {
        let found = self.cache.get(&object.key)?;
        if found.value.matches(&object.list) {
            return found.bytes.lock().clone();
        }
        self.cache.invalidate(&object.key);
        None
    }

    fn insert(&self, object: &Object) {
        if self.cache.contains_key(&object.key) {
            return;
        }
        self.coming.lock().insert(object.key.clone(), true);
        let Some(bytes) = self.memory.try_take(u64::MAX) else { return };
        let mut coming = self.coming.lock();
        if coming.remove(&object.key) == Some(true) {
            let value = MokaValue { value: object.value(Bytes::new()), bytes: Mutex::new(Some(bytes)) };
            self.cache.insert(object.key.clone(), Arc::new(value));
        }
        drop(coming);
        self.housekeep();
    }

    fn forget(&self, object: &Object) {
        if let Some(wanted) = self.coming.lock().get_mut(&object.key) {
            *wanted = false;
        }
        self.cache.invalidate(&object.key);
        self.housekeep();
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Creates an empty cache.
type NewCache = fn() -> Box<dyn HotCache>;

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let (batches, turns) = if quick { (40, 1) } else { (200, 7) };
    let caches: [(&str, NewCache); 3] = [
        ("table", || Box::new(Table { table: Mutex::new(CacheTable::new(1)), memory: Arc::default() })),
        ("moka", || Box::new(Moka::new(false))),
        ("moka, at once", || Box::new(Moka::new(true))),
    ];
    println!("ns per call, and values above the budget at the peak");
    println!(
        "{:<8} {:<14} {:>8} {:>8} {:>8} {:>8} {:>6}",
        "threads", "cache", "hit", "miss", "insert", "forget", "over"
    );
    for threads in [1, 2] {
        let mut runs = caches.map(|_| Vec::new());
        for turn in 0..turns {
            for ((_, new), runs) in caches.iter().zip(&mut runs) {
                runs.push(run(&*new(), threads, batches, turn));
            }
        }
        for ((name, _), runs) in caches.iter().zip(&runs) {
            let [hit, miss, insert, forget] = [0, 1, 2, 3].map(|at| least(runs.iter().map(|(ns, _)| ns[at])));
            let over = runs.iter().map(|(_, over)| *over).max().unwrap_or_default();
            println!("{threads:<8} {name:<14} {hit:>8.0} {miss:>8.0} {insert:>8.0} {forget:>8.0} {over:>6}");
        }
    }
}

/// Measures the ns of a hit, a miss, an insert and a forget, and the values above the budget at the
/// peak.
fn run(cache: &dyn HotCache, threads: usize, batches: usize, seed: u64) -> ([f64; 4], u64) {
    let spent: Vec<[Duration; 4]> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(cache, thread as u64, threads, batches, seed)))
            .collect();
        all.into_iter().map(|thread| thread.join().expect("the work ends")).collect()
    });
    let calls = (threads * batches * BATCH) as f64;
    let of = |at: usize| spent.iter().map(|spent| spent[at].as_nanos()).sum::<u128>() as f64 / calls;
    let over = cache.memory().peak.load(Relaxed).saturating_sub(VALUES as u64);
    ([of(0), of(1), of(2), of(3)], over)
}

/// Runs the batches of one thread on keys of its own. Returns the time of each operation.
fn work(cache: &dyn HotCache, thread: u64, threads: usize, batches: usize, seed: u64) -> [Duration; 4] {
    let (clock, mut rng) = (SystemClock::new(), Rng::seeded(seed << 1 | thread));
    let ring: Vec<Object> = (0..2 * VALUES as u64).map(|n| Object::new(thread << 32 | n)).collect();
    let missing: Vec<Object> = (0..BATCH as u64).map(|n| Object::new(thread << 32 | 1 << 31 | n)).collect();
    ring[..VALUES].iter().for_each(|object| cache.insert(object));
    let (mut next, mut found) = (VALUES, 0);
    let mut spent = [Duration::ZERO; 4];
    for _ in 0..batches {
        // The newer half of what the thread has inserted last is in the cache.
        let recent = |rng: &mut Rng| {
            (next + ring.len() - 1 - rng.below((VALUES / threads / 2) as u64) as usize) % ring.len()
        };
        let hits: Vec<usize> = (0..BATCH).map(|_| recent(&mut rng)).collect();

        let start = clock.now();
        found += hits.iter().filter(|&&at| cache.find(&ring[at]).is_some()).count();
        spent[0] += clock.now().since(start);

        let start = clock.now();
        let none = missing.iter().filter(|object| cache.find(object).is_some()).count();
        spent[1] += clock.now().since(start);
        assert_eq!(none, 0, "keys that were never inserted");

        let inserted: Vec<&Object> = (0..BATCH).map(|at| &ring[(next + at) % ring.len()]).collect();
        next = (next + BATCH) % ring.len();
        let start = clock.now();
        inserted.iter().for_each(|object| cache.insert(object));
        spent[2] += clock.now().since(start);

        let start = clock.now();
        inserted.iter().for_each(|object| cache.forget(object));
        spent[3] += clock.now().since(start);
        inserted.iter().for_each(|object| cache.insert(object));
    }
    assert!(found * 10 > batches * BATCH * 9, "only {found} of {} reads were hits", batches * BATCH);
    spent
}

fn least(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::INFINITY, f64::min)
}
