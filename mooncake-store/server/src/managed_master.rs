//! Interface of a master to the servers beside its RPC service, whatever its allocator and policy.

use std::borrow::Cow;
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::replica::{Replica, SegmentStatus};
use mooncake_master::{
    DrainInfo, DrainRequest, Journal, Master, MasterOptions, SegmentStats, Snapshot, Stats, TenantInfo,
    TenantQuota, TickReport,
};

/// Declares [`ManagedMaster`] and its implementation by the methods of [`Master`].
macro_rules! managed {
    ($(fn $name:ident $(<$life:lifetime>)? (&self $(, $argument:ident: $type:ty)* $(,)?) -> $out:ty;)*) => {
        /// A [`Master`] without the types of its allocator and eviction policy.
        ///
        /// RPCs do not come this way: their service knows both types.
        pub(super) trait ManagedMaster: Debug + Send + Sync + 'static {
            $(
                #[doc = concat!("Calls `Master::", stringify!($name), "`.")]
                fn $name $(<$life>)? (&self $(, $argument: $type)*) -> $out;
            )*
        }

        impl<A: SegmentAllocator, E: MergeableOrder> ManagedMaster for Master<A, E> {
            $(
                fn $name $(<$life>)? (&self $(, $argument: $type)*) -> $out {
                    Master::<A, E>::$name(self $(, $argument)*)
                }
            )*
        }
    };
}

managed! {
    fn options(&self) -> &MasterOptions;
    fn clock(&self) -> &SharedClock;
    fn stats(&self) -> Stats;
    fn segment_stats(&self) -> Vec<SegmentStats>;
    fn segment_status_named(&self, name: &str) -> Result<SegmentStatus>;
    fn scoped<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>>;
    fn peek(&self, key: &[u8]) -> Result<Vec<Replica>>;
    fn leased_for(&self, key: &[u8]) -> Option<Duration>;
    fn keys_of(&self, tenant: &str) -> Vec<ObjectKey>;
    fn remove_all(&self, force: bool) -> u64;
    fn remove_all_of(&self, tenant: &str, force: bool) -> u64;
    fn tenants(&self) -> Vec<TenantInfo>;
    fn tenant(&self, name: &str) -> Result<TenantInfo>;
    fn set_tenant(&self, tenant: &TenantQuota) -> Result<TenantInfo>;
    fn remove_tenant(&self, name: &str) -> Result<()>;
    fn drain_start(&self, request: &DrainRequest<'_>) -> Result<Uuid>;
    fn drain(&self, id: Uuid) -> Result<DrainInfo>;
    fn drain_cancel(&self, id: Uuid) -> Result<()>;
    fn snapshot(&self, write: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<u64>;
    fn recall(&self, snapshot: Snapshot) -> ();
    fn note_promise(&self, promise: Duration, source: &dyn Display) -> ();
    fn set_journal(&self, journal: &Arc<dyn Journal>) -> ();
    fn was_stopped(&self, span: Duration) -> ();
    fn tick_at(&self, now: Moment) -> TickReport;
}
