//! The master.

use std::fmt;

use mooncake_core::alloc::{BuiltinAllocator, SegmentAllocator};
use mooncake_core::clock::{Rng, SharedClock, SystemClock};
use mooncake_core::evict::{BuiltinPolicy, MergeableOrder};
use mooncake_protocol::wire::WeightId;

use super::announce_pace::AnnouncePace;
use super::client_table::ClientTable;
use crate::jobs::Jobs;
use crate::model::address_checks::AddressChecks;
use crate::model::options::MasterOptions;
use crate::space::Space;
use crate::space::group_rests::RunBlocking;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Metadata of a cluster.
///
/// The type is generic over the allocator of segments and over the eviction policy. The defaults
/// choose both by configuration. Share a master by `Arc`; every method takes `&self`.
///
/// A caller runs [`Master::tick`] periodically; the server does so every 10 ms. A tick expires
/// clients without a heartbeat, frees space whose quarantine has ended, and evicts above the high
/// watermark. Without ticks no wrong value is read; space only returns later.
pub struct Master<A: SegmentAllocator = BuiltinAllocator, E: MergeableOrder = BuiltinPolicy> {
    pub(crate) jobs: Jobs<A, E>,
    pub(crate) clients: Mutex<ClientTable>,
    pub(crate) address_checks: Mutex<AddressChecks>,
    pub(crate) announcements: AnnouncePace,
    /// True once a put had the hint that the front of its chain stays.
    pub(crate) keeps_fronts: AtomicBool,
    /// Last revision of managed weights whose objects were inspected; none before the first one.
    pub(crate) weight_position: Mutex<Option<WeightId>>,
}

impl Master {
    /// Creates a master with the built-in allocator and policy in their defaults, on the clock of
    /// the machine.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the options contradict each other.
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

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Creates a master with every part chosen: the types of allocator and policy, their options,
    /// the clock, and the seed of all random numbers. The same calls at the same times with the
    /// same seed give the same results.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the options contradict each other.
    pub fn with_parts(
        options: MasterOptions,
        allocator: &A::Config,
        eviction: &E::Config,
        clock: SharedClock,
        seed: u64,
    ) -> mooncake_core::Result<Self> {
        options.check()?;
        let mut rng = Rng::seeded(seed);
        let space = Space::new(options, allocator, eviction, clock, &mut rng);
        Ok(Self {
            jobs: Jobs::new(space, &mut rng),
            clients: Mutex::default(),
            address_checks: Mutex::default(),
            announcements: AnnouncePace::default(),
            keeps_fronts: AtomicBool::new(false),
            weight_position: Mutex::default(),
        })
    }

    /// Sets the function that runs a long part of a call, such as the eviction of very many objects
    /// for one put, so that other calls of the same thread need not wait. Only the first call of
    /// this method has an effect.
    pub fn set_run_blocking(&self, run_blocking: RunBlocking) {
        let _ = self.space().run_blocking.set(run_blocking);
    }

    /// Returns the logical time, which grows with each copy and promotion that begins. A request
    /// that was read at an earlier logical time than that of a copy is not about that copy.
    pub fn logical_time(&self) -> u64 {
        self.space().logical_time.load(SeqCst)
    }

    /// Returns the options that this master was created with.
    pub fn options(&self) -> &MasterOptions {
        &self.space().options
    }

    /// Returns the clock of this master.
    pub fn clock(&self) -> &SharedClock {
        &self.space().clock
    }

    /// Returns the space that the jobs own.
    pub(crate) fn space(&self) -> &Space<A, E> {
        &self.jobs.space
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> fmt::Debug for Master<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Master").field("options", self.options()).finish_non_exhaustive()
    }
}
