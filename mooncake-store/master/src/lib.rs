//! The master: who holds which object where. It places, grants, leases and evicts; it never touches an object's bytes.
//!
//! Locks, outermost first; nobody holds two of one kind, and nothing is locked while another party is called:
//! drain jobs, membership (mounts, unmounts, expiry) -> a shard of the directory -> the list of segments -> one segment's space.
//! The tables of disks and of what one of them is to do come after a shard.
//! A ledger is inside all of these, too, and the table of ledgers inside the membership.
//! The table of tenants is inside all of these. Inside a shard, too: the table of groups, then the members of one; the table of
//! hot objects; what a snapshot said.
//! The tables of clients, of tasks and of copies under way are each locked inside of none but the drain jobs. Every method is synchronous and short; `tick` does what takes longer.

#![deny(unsafe_code)]

mod calls;
mod clients;
mod copy;
mod directory;
mod disks;
mod drain;
mod evict;
mod expired;
mod graves;
mod groups;
mod hot;
mod inventory;
mod journal;
mod lookup;
mod options;
#[doc(hidden)]
pub mod pattern;
mod placement;
mod promise;
mod promote;
mod put;
mod remove;
mod segments;
mod service;
mod slots;
mod snapshot;
mod stats;
mod tasks;
mod tenants;
mod tick;
mod window;

#[cfg(feature = "testkit")]
mod planted;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use mooncake_core::alloc::{BuiltinAllocator, SegmentAllocator};
use mooncake_core::clock::{Moment, Rng, SharedClock, SystemClock};
use mooncake_core::evict::{BuiltinPolicy, EvictionPolicy};
use mooncake_core::ids::{ObjectKey, ReplicaId};
use parking_lot::{Mutex, RwLock};

use self::clients::Clients;
use self::directory::Directory;
use self::disks::Disks;
use self::drain::Drains;
use self::evict::EvictionState;
use self::graves::Graves;
use self::hot::Hot;
use self::inventory::Ledgers;
use self::placement::Dice;
use self::promote::Reads;
use self::segments::Registry;
use self::snapshot::Past;
use self::stats::Counters;
use self::tasks::Tasks;
use self::tenants::Tenants;

pub use self::disks::{DiskOptions, FileOptions, PromotionOptions};
pub use self::drain::{DrainInfo, DrainRequest, DrainStatus};
pub use self::journal::Journal;
pub use self::options::{HotOptions, MasterOptions, ParsePlacementError, Placement, TaskOptions};
#[cfg(feature = "testkit")]
pub use self::planted::Bug;
pub use self::put::{Put, Writer};
pub use self::snapshot::Snapshot;
pub use self::stats::{DiskStats, SegmentStats, Stats};
pub use self::tenants::{TenantInfo, TenantQuota, is_tenant};
pub use self::tick::TickReport;

/// Holds all metadata of a cluster.
///
/// Generic over how space inside a segment is found and over what goes first when memory runs out; the defaults choose
/// both by configuration. Share it by `Arc`; every method takes `&self`.
///
/// Somebody has to call [`Master::tick`] now and then (the server does, every 10 ms): it expires silent clients, frees
/// what waited for its time, and evicts above the high watermark. Without it nothing wrong is ever read; space just
/// comes back later.
pub struct Master<A: SegmentAllocator = BuiltinAllocator, E: EvictionPolicy = BuiltinPolicy> {
    options: MasterOptions,
    allocator: A::Config,
    clock: SharedClock,
    started: Moment,
    /// Tells this master from those before and after it.
    epoch: u64,
    dice: Dice,
    next_replica: AtomicU64,
    tenants: Arc<Tenants>,
    directory: Directory<A, E>,
    segments: RwLock<Registry<A>>,
    /// Not 0 while some segment may be doubted, so that the usual ping looks at none.
    doubts: AtomicU64,
    clients: Mutex<Clients>,
    ledgers: Mutex<Ledgers>,
    promised: promise::Promised,
    announcing: promise::AnnouncePace,
    membership: Mutex<Graves<A>>,
    eviction: EvictionState,
    timers: tick::Timers,
    counters: Counters,
    /// Copies that were begun, each with the time when it counts as abandoned.
    copies: Mutex<BTreeSet<(Moment, ObjectKey)>>,
    tasks: Mutex<Tasks>,
    drains: Drains<A>,
    hot: Option<Hot>,
    disks: Disks,
    reads_from_disk: Reads,
    /// What the master before knew, if it wrote that down.
    past: OnceLock<Past>,
    #[cfg(feature = "testkit")]
    planted: planted::Planted,
}

impl Master {
    /// A master with the built-in allocator and policy as they come, on the machine's clock.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when the options contradict each other.
    pub fn new(options: MasterOptions) -> mooncake_core::Result<Self> {
        Self::with_parts(
            options,
            &Default::default(),
            &Default::default(),
            SystemClock::shared(),
            Rng::from_os().next_u64(),
        )
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// A master with every part chosen: allocator and policy by the type, their settings, the clock, and the seed of all
    /// chance. The same calls at the same times with the same seed give the same answers.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when the options contradict each other.
    pub fn with_parts(
        options: MasterOptions,
        allocator: &A::Config,
        eviction: &E::Config,
        clock: SharedClock,
        seed: u64,
    ) -> mooncake_core::Result<Self> {
        options.check()?;
        let mut rng = Rng::seeded(seed);
        let tenants = Arc::new(Tenants::new(options.tenants.as_deref()));
        Ok(Self {
            started: clock.now(),
            dice: Dice::new(rng.next_u64()),
            directory: Directory::new(options.shards, rng.next_u64(), eviction, &tenants),
            tenants,
            segments: RwLock::default(),
            doubts: AtomicU64::new(0),
            clients: Mutex::default(),
            ledgers: Mutex::default(),
            promised: promise::Promised::default(),
            announcing: promise::AnnouncePace::default(),
            membership: Mutex::default(),
            eviction: EvictionState::default(),
            timers: tick::Timers::default(),
            counters: Counters::default(),
            copies: Mutex::default(),
            hot: options.hot.map(|hot| Hot::new(hot, rng.next_u64())),
            disks: Disks::default(),
            reads_from_disk: Reads::default(),
            past: OnceLock::new(),
            tasks: Mutex::new(Tasks::new(rng.next_u64())),
            drains: Drains::new(rng.next_u64()),
            epoch: rng.next_u64(),
            next_replica: AtomicU64::new(ReplicaId::first(rng.next_u64()).0),
            #[cfg(feature = "testkit")]
            planted: planted::Planted::default(),
            allocator: allocator.clone(),
            clock,
            options,
        })
    }

    /// What it was told.
    pub fn options(&self) -> &MasterOptions {
        &self.options
    }

    /// Its clock.
    pub fn clock(&self) -> &SharedClock {
        &self.clock
    }

    /// Until when a lease granted now holds.
    fn lease_from(&self, now: Moment) -> Moment {
        #[cfg(feature = "testkit")]
        if self.planted.is(Bug::SkipLease) {
            return Moment(0);
        }
        now.after(self.options.lease_ttl)
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> fmt::Debug for Master<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Master").field("options", &self.options).finish_non_exhaustive()
    }
}
