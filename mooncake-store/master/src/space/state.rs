//! State of the space: the directory, the segments, and the tables beside them.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, Rng, SharedClock};
use mooncake_core::evict::{MergeableOrder, Place};
use mooncake_core::ids::ReplicaId;

use super::backoff::EvictionBackoff;
use super::client_disks::ClientDisks;
use super::curve_state::SpaceCurve;
use super::group_rests::{GroupRests, RunBlocking};
use super::hot_table::HotTable;
#[cfg(feature = "testkit")]
use super::injected_bug::InjectedBug;
use super::random::SharedRng;
use super::registry::Registry;
use super::retired::RetiredSegments;
use super::timers::Timers;
use crate::directory::Directory;
use crate::model::announcements::Announcements;
use crate::model::counters::Counters;
use crate::model::ledger::Ledgers;
use crate::model::options::MasterOptions;
use crate::model::promise::EarlierPromises;
use crate::model::readers::Readers;
use crate::model::suspicion::Suspicions;
use crate::model::tenants::Tenants;
use crate::model::weights::ManagedWeights;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use crate::sync::{Mutex, OnceLock, RwLock};

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
    /// Logical time: the number of copies and promotions that have begun.
    pub(crate) logical_time: AtomicU64,
    pub(crate) tenants: Arc<Tenants>,
    pub(crate) directory: Directory<A, E>,
    pub(crate) segments: RwLock<Registry<A>>,
    /// True once a segment with a locality was mounted.
    pub(crate) has_localities: AtomicBool,
    /// Number of reports of unreachable clients. While it is 0, a ping looks at no segment.
    pub(crate) unreachable_reports: AtomicU64,
    pub(crate) ledgers: Mutex<Ledgers>,
    /// Suspicions of clients. The lock is taken inside that of the table of clients.
    pub(crate) suspicions: Suspicions,
    /// Retired segments. The lock serializes mounts, unmounts and expiry.
    pub(crate) retired: Mutex<RetiredSegments<A>>,
    /// Lock of the search for replicas in retired segments. It is taken before that of a shard and
    /// before that of the retired segments.
    pub(crate) sweeping: Mutex<()>,
    pub(crate) promises: EarlierPromises,
    pub(crate) announcements: Announcements,
    pub(crate) eviction: EvictionBackoff,
    /// Readers that report the end of their reads. Their lock is taken inside that of a shard.
    pub(crate) readers: Readers,
    /// Groups of which a part was evicted.
    pub(crate) groups: GroupRests,
    /// Function that runs long parts of calls, if the program has one.
    pub(crate) run_blocking: OnceLock<RunBlocking>,
    pub(crate) timers: Timers,
    pub(crate) counters: Counters,
    pub(crate) hot: Option<HotTable>,
    pub(crate) disks: ClientDisks,
    pub(crate) curve: SpaceCurve<E>,
    pub(crate) weights: ManagedWeights,
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
        let random = SharedRng::new(rng.next_u64());
        let directory = Directory::new(options.shards, rng.next_u64(), eviction, &tenants);
        let epoch = rng.next_u64();
        directory.record_removals(epoch);
        Self {
            started: clock.now(),
            random,
            directory,
            tenants,
            segments: RwLock::default(),
            has_localities: AtomicBool::new(false),
            unreachable_reports: AtomicU64::new(0),
            ledgers: Mutex::new(Ledgers::new(options.ledger_bytes)),
            suspicions: Suspicions::default(),
            retired: Mutex::default(),
            sweeping: Mutex::default(),
            promises: EarlierPromises::default(),
            announcements: Announcements::new(epoch),
            eviction: EvictionBackoff::default(),
            readers: Readers::default(),
            groups: GroupRests::default(),
            run_blocking: OnceLock::new(),
            timers: Timers::default(),
            counters: Counters::default(),
            hot: options.hot.map(HotTable::new),
            disks: ClientDisks::default(),
            curve: SpaceCurve::new(eviction, clock.now()),
            weights: ManagedWeights::new(epoch),
            epoch,
            next_replica: AtomicU64::new(ReplicaId::first(rng.next_u64()).0),
            #[cfg(feature = "testkit")]
            injected_bug: InjectedBug::default(),
            logical_time: AtomicU64::new(0),
            allocator: allocator.clone(),
            clock,
            options,
        }
    }

    /// Returns the place of a use that happens now, of which only the number is known.
    pub(crate) fn next_place(&self) -> Place {
        Place::numbered(self.directory.next_use_number())
    }

    /// Returns the logical time at which a copy or promotion begins now.
    pub(crate) fn next_logical_time(&self) -> u64 {
        self.logical_time.fetch_add(1, SeqCst) + 1
    }

    /// Returns the number of a new replica.
    pub(crate) fn new_replica(&self) -> ReplicaId {
        ReplicaId(self.next_replica.fetch_add(1, Relaxed))
    }
}
