//! The master of `mooncake-master`, compiled with locks and atomics that give way to other threads
//! at each call.
//!
//! The modules are those of `mooncake-master/src`, except `sync`. A test runs threads of calls
//! under [`shuttle`], which chooses their order, and can repeat it from a seed. Locks and atomics
//! of `mooncake-core` do not give way: the values that an eviction policy learns, its notes of next
//! victims and the clock. None of them is held while the master runs, and they decide which object
//! is evicted, never what a key holds.

#![deny(unsafe_code)]
#![allow(dead_code, missing_docs, unreachable_pub, reason = "`mooncake-master` is checked by itself")]
#![allow(rustdoc::private_intra_doc_links, rustdoc::broken_intra_doc_links, reason = "the same")]

#[path = "../../master/src/calls/mod.rs"]
mod calls;
#[path = "../../master/src/directory/mod.rs"]
mod directory;
#[path = "../../master/src/jobs/mod.rs"]
mod jobs;
#[path = "../../master/src/model/mod.rs"]
mod model;
#[path = "../../master/src/space/mod.rs"]
mod space;
mod sync;

pub use self::calls::Master;
pub use self::calls::put::Put;
pub use self::calls::tick::TickReport;
pub use self::model::curve::{CurvePoint, CurveReport};
pub use self::model::drain::{DrainInfo, DrainRequest, DrainStatus};
pub use self::model::journal::Journal;
pub use self::model::misses::{MissCause, MissCounts};
pub use self::model::options::{
    DiskOptions, FileOptions, HotOptions, MasterOptions, ParsePlacementError, Placement, PromotionOptions,
    TaskOptions,
};
pub use self::model::pattern;
pub use self::model::promise::GRANT_USE;
pub use self::model::snapshot::Snapshot;
pub use self::model::stats::{DiskStats, SegmentStats, Stats};
pub use self::model::tenants::{TenantInfo, TenantQuota, is_tenant};
pub use self::model::value::Writer;
#[cfg(feature = "testkit")]
pub use self::space::injected_bug::Bug;
