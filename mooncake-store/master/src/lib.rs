//! The master of a Mooncake store: places replicas, grants leases, evicts objects, and recovers
//! after a restart. It never touches the bytes of an object.
//!
//! # Layers
//!
//! Each layer is a folder. A layer uses the layers before it, never one behind it.
//!
//! | folder | subject | main types |
//! |---|---|---|
//! | `model/` | options, segments, disks, copy jobs, tenants, groups, weights, snapshots | [`MasterOptions`], `MountedSegment`, `CopyJobs` |
//! | `directory/` | objects by key, in shards; order of eviction; why objects left | `Directory`, `Shard`, `Object` |
//! | `space/` | placement, leases, quarantine, eviction | `Space` |
//! | `jobs/` | tasks, copies, drains, hot replicas, offload, recovery | `Jobs` |
//! | `calls/` | the public methods, by subject, and the handlers of the RPCs | [`Master`] |
//!
//! [`Master`] owns `Jobs`, and `Jobs` owns `Space`, so a lower layer has no way to call a higher
//! one.
//!
//! # Locks
//!
//! Locks are listed from the outside in. No caller holds two of one kind, and no lock is held while
//! another party is called.
//!
//! 1. The drain jobs.
//! 2. The search for replicas in retired segments, then the retired segments. The latter lock
//!    covers mounts, unmounts and expiry; the table of ledgers is inside of it.
//! 3. A shard of the directory. Inside of it: the table of groups, then the keys of a group; the
//!    table of hot objects; the table of managed weights; the recovered state; the table of disks,
//!    then one disk; the table of readers, then the work that waits for one of them.
//! 4. The registry of segments.
//! 5. The space of one segment.
//! 6. A ledger, and the table of tenants.
//!
//! The ledgers have a list for their budget, which is locked inside of a shard and around each of
//! them in turn. The groups of which a part was evicted are locked inside of nothing.
//!
//! The curve of hits by memory, and inside of it the queue of its events, are locked inside of
//! nothing. The table of clients is locked inside of nothing but the retired segments. While
//! clients expire, the table of ledgers is locked inside of it. The table of tasks is locked inside
//! of nothing but the drain jobs.
//! Every method is synchronous and short; [`Master::tick`] does the work that takes longer.

#![deny(unsafe_code)]

mod calls;
mod directory;
mod jobs;
mod model;
mod space;
mod sync;

pub use self::calls::Master;
pub use self::calls::put::Put;
pub use self::calls::tick::TickReport;
pub use self::model::address_checks::AdvertisedAddress;
pub use self::model::curve::{CurvePoint, CurveReport};
pub use self::model::drain::{DrainInfo, DrainRequest, DrainStatus};
pub use self::model::journal::Journal;
pub use self::model::misses::{MissCause, MissCounts};
pub use self::model::options::{
    DiskOptions, FileOptions, HotOptions, MasterOptions, ParsePlacementError, Placement, PromotionOptions,
    TaskOptions,
};
#[doc(hidden)]
pub use self::model::pattern;
pub use self::model::promise::GRANT_USE;
pub use self::model::snapshot::Snapshot;
pub use self::model::stats::{DiskStats, SegmentStats, Stats};
pub use self::model::tenants::{TenantInfo, TenantQuota, is_tenant};
pub use self::model::value::Writer;
pub use self::space::group_rests::RunBlocking;
#[cfg(feature = "testkit")]
pub use self::space::injected_bug::Bug;
