//! Nodes of one process with a catalogue in memory, and memory that tests inspect.

pub(crate) mod silent;

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use mooncake_core::clock::{ManualClock, Rng};
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::meta::{MemoryMetadata, MetadataBackend};
use mooncake_engine::TransferEngine;
use mooncake_p2p::{Catalogue, P2pOptions, P2pStore, Payload};
use mooncake_transport::engine::LocalCopies;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// Length of a shard in bytes.
pub(crate) const SHARD: usize = 64 << 10;

/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(90);

/// Waits for an event. Panics with its description if it does not come.
pub(crate) async fn patiently<R>(event: &str, wait: impl Future<Output = R>) -> R {
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("no event: {event}"))
}

pub(crate) struct Cluster {
    pub(crate) backend: Arc<MemoryMetadata>,
    pub(crate) catalogue: Catalogue,
    pub(crate) clock: Arc<ManualClock>,
    hosts: AtomicU8,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let backend = Arc::new(MemoryMetadata::new());
        let catalogue = Catalogue::new(backend.clone(), Rng::seeded(1)).unwrap();
        Self { backend, catalogue, clock: Arc::new(ManualClock::new()), hosts: AtomicU8::new(2) }
    }

    /// Starts an engine at a loopback address of its own, so that the others count as other hosts.
    /// All bytes travel over TCP.
    pub(crate) async fn engine(&self) -> TransferEngine {
        let host = self.hosts.fetch_add(1, Ordering::SeqCst);
        let builder = TransferEngine::builder().name(format!("127.0.0.{host}")).protocol("tcp");
        builder.local_copies(LocalCopies::Never).clock(self.clock.clone()).start().await.unwrap()
    }

    pub(crate) async fn node(&self) -> P2pStore {
        let options = P2pOptions { poll_interval: Duration::from_millis(20), ..P2pOptions::default() };
        P2pStore::open_with(self.engine().await, self.backend.clone(), options).await.unwrap()
    }

    /// Starts a node with a runtime of its own, so that it can be killed.
    pub(crate) fn isolated_node(&self) -> IsolatedNode {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let store = std::thread::scope(|scope| scope.spawn(|| runtime.block_on(self.node())).join().unwrap());
        IsolatedNode { store, runtime }
    }

    pub(crate) async fn payload(&self, name: &str) -> Option<Payload> {
        self.catalogue.read(name).await.unwrap().map(|entry| entry.payload)
    }

    pub(crate) async fn keys(&self, prefix: &str) -> Vec<String> {
        self.backend.list(prefix).await.unwrap().into_iter().map(|(key, _)| key).collect()
    }
}

/// Node whose tasks all end when it is killed.
pub(crate) struct IsolatedNode {
    pub(crate) store: P2pStore,
    runtime: Runtime,
}

impl IsolatedNode {
    pub(crate) async fn run<R: Send + 'static>(&self, call: impl Future<Output = R> + Send + 'static) -> R {
        self.runtime.spawn(call).await.unwrap()
    }

    pub(crate) fn start<R: Send + 'static>(&self, call: impl Future<Output = R> + Send + 'static) {
        self.runtime.spawn(call);
    }

    /// Ends all tasks of the node at once. None of them cleans up.
    pub(crate) fn kill(self) {
        self.runtime.shutdown_background();
    }
}

/// Memory of an object. The last owner of the memory notifies a waiter.
pub(crate) struct Memory {
    ranges: Vec<Arc<Owned>>,
}

struct Owned {
    memory: HostMemory,
    released: Arc<Notify>,
}

// SAFETY: as for the inner memory.
unsafe impl MemorySource for Owned {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.released.notify_one();
    }
}

/// Part of a range.
struct Part(Arc<Owned>, Range<usize>);

// SAFETY: the part keeps the range that it lies in.
unsafe impl MemorySource for Part {
    fn span(&self) -> MemorySpan {
        let whole = self.0.span();
        // SAFETY: the range is inside, as `part` checks.
        let ptr = unsafe { whole.ptr.add(self.1.start) };
        MemorySpan { ptr, len: self.1.len(), ..whole }
    }
}

impl Memory {
    pub(crate) fn zeroed(sizes: &[usize]) -> Self {
        let own = |size: &usize| {
            let memory = HostMemory::new(*size).unwrap();
            Arc::new(Owned { memory, released: Arc::new(Notify::new()) })
        };
        let memory = Self { ranges: sizes.iter().map(own).collect() };
        for (range, size) in memory.ranges.iter().zip(sizes) {
            // SAFETY: just made, and that long.
            unsafe { range.span().ptr.write_bytes(0, *size) };
        }
        memory
    }

    pub(crate) fn random(sizes: &[usize], seed: u64) -> Self {
        let (memory, mut rng) = (Self::zeroed(sizes), Rng::seeded(seed));
        for (range, size) in sizes.iter().enumerate() {
            let mut bytes = vec![0; *size];
            rng.fill(&mut bytes);
            memory.write(range, &bytes);
        }
        memory
    }

    pub(crate) fn copy(&self) -> Self {
        let bytes: Vec<_> = (0..self.ranges.len()).map(|range| self.bytes(range)).collect();
        let copy = Self::zeroed(&bytes.iter().map(Vec::len).collect::<Vec<_>>());
        bytes.iter().enumerate().for_each(|(range, bytes)| copy.write(range, bytes));
        copy
    }

    fn write(&self, range: usize, bytes: &[u8]) {
        let span = self.ranges[range].span();
        assert!(bytes.len() <= span.len);
        // SAFETY: inside, and no engine knows the memory yet.
        unsafe { span.ptr.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn bytes(&self, range: usize) -> Vec<u8> {
        let span = self.ranges[range].span();
        let byte = |index| {
            // SAFETY: inside.
            unsafe { span.ptr.add(index).read_volatile() }
        };
        (0..span.len).map(byte).collect()
    }

    /// Changes a byte.
    pub(crate) fn corrupt(&self, range: usize, index: usize) {
        let span = self.ranges[range].span();
        assert!(index < span.len);
        // SAFETY: inside.
        unsafe { span.ptr.add(index).write_volatile(span.ptr.add(index).read_volatile() ^ 0x40) };
    }

    pub(crate) fn sources(&self) -> Vec<Arc<dyn MemorySource>> {
        self.ranges.iter().map(|range| range.clone() as Arc<dyn MemorySource>).collect()
    }

    pub(crate) fn part(&self, range: usize, part: Range<usize>) -> Arc<dyn MemorySource> {
        assert!(part.end <= self.ranges[range].span().len);
        Arc::new(Part(self.ranges[range].clone(), part))
    }

    /// Returns the notification that the first range has no owner any more.
    pub(crate) fn released(&self) -> Arc<Notify> {
        self.ranges[0].released.clone()
    }
}

impl PartialEq for Memory {
    fn eq(&self, other: &Self) -> bool {
        self.ranges.len() == other.ranges.len()
            && (0..self.ranges.len()).all(|range| self.bytes(range) == other.bytes(range))
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} ranges)", self.ranges.len())
    }
}
