//! State of the space: the directory, the segments, and the tables beside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, Rng, SharedClock};
use mooncake_core::evict::{MergeableOrder, Place};
use mooncake_core::ids::ReplicaId;
use parking_lot::{Mutex, RwLock};

use super::backoff::EvictionBackoff;
use super::client_disks::ClientDisks;
use super::curve_state::SpaceCurve;
use super::hot_table::HotTable;
#[cfg(feature = "testkit")]
use super::injected_bug::InjectedBug;
use super::random::SharedRng;
use super::registry::Registry;
use super::retired::RetiredSegments;
use super::timers::Timers;
use crate::directory::Directory;
use crate::model::counters::Counters;
use crate::model::ledger::Ledgers;
use crate::model::options::MasterOptions;
use crate::model::promise::EarlierPromises;
use crate::model::tenants::Tenants;

/// Directory and segments of a master, and everything that placing and evicting needs.
pub(crate) struct Space<A: SegmentAllocator, E: MergeableOrder> {
    pub(crate) options: MasterOptions,
    pub(crate) allocator: A::Config,
    pub(crate) clock: SharedClock,
    pub(crate) started: Moment,
    /// Number that tells this master from the masters before and after it.
    pub(crate) epoch: u64,
    pub(crate) random: SharedRng,
    pub(crate) next_replica: AtomicU64,
    pub(crate) tenants: Arc<Tenants>,
    pub(crate) directory: Directory<A, E>,
    pub(crate) segments: RwLock<Registry<A>>,
    /// Number of reports of unreachable clients. While it is 0, a ping looks at no segment.
    pub(crate) doubts: AtomicU64,
    pub(crate) ledgers: Mutex<Ledgers>,
    /// Retired segments. The lock serializes mounts, unmounts and expiry.
    pub(crate) retired: Mutex<RetiredSegments<A>>,
    pub(crate) promises: EarlierPromises,
    pub(crate) eviction: EvictionBackoff,
    pub(crate) timers: Timers,
    pub(crate) counters: Counters,
    pub(crate) hot: Option<HotTable>,
    pub(crate) disks: ClientDisks,
    pub(crate) curve: SpaceCurve<E>,
    #[cfg(feature = "testkit")]
    pub(crate) injected_bug: InjectedBug,
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Creates an empty space. `options` have been checked.
    pub(crate) fn new(
        options: MasterOptions,
        allocator: &A::Config,
        eviction: &E::Config,
        clock: SharedClock,
        rng: &mut Rng,
    ) -> Self {
        let tenants = Arc::new(Tenants::new(options.tenants.as_deref()));
        Self {
            started: clock.now(),
            random: SharedRng::new(rng.next_u64()),
            directory: Directory::new(options.shards, rng.next_u64(), eviction, &tenants),
            tenants,
            segments: RwLock::default(),
            doubts: AtomicU64::new(0),
            ledgers: Mutex::default(),
            retired: Mutex::default(),
            promises: EarlierPromises::default(),
            eviction: EvictionBackoff::default(),
            timers: Timers::default(),
            counters: Counters::default(),
            hot: options.hot.map(HotTable::new),
            disks: ClientDisks::default(),
            curve: SpaceCurve::new(eviction, clock.now()),
            epoch: rng.next_u64(),
            next_replica: AtomicU64::new(ReplicaId::first(rng.next_u64()).0),
            #[cfg(feature = "testkit")]
            injected_bug: InjectedBug::default(),
            allocator: allocator.clone(),
            clock,
            options,
        }
    }

    /// Returns the place of a use that happens now, of which only the number is known.
    pub(crate) fn next_place(&self) -> Place {
        Place::numbered(self.directory.next_use_number())
    }

    /// Returns the number of a new replica.
    pub(crate) fn new_replica(&self) -> ReplicaId {
        ReplicaId(self.next_replica.fetch_add(1, Relaxed))
    }
}
