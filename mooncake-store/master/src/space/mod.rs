//! Space: mounted and retired segments, placement, leases, eviction.
//!
//! [`Space`](state::Space) owns the directory and the segments. Its methods are grouped by subject.
//! A module uses those on its left:
//!
//! ```text
//! state <- usage, lease <- lifetimes, offload_first <- victim <- group_eviction <- contiguous, quota, hot_replicas <- eviction
//! state <- placement, weights; promises <- mount
//! ```

pub(crate) mod announcements;
pub(crate) mod backoff;
pub(crate) mod client_disks;
mod contiguous;
mod curve;
mod curve_state;
mod eviction;
pub(crate) mod gap_searches;
mod group_eviction;
pub(crate) mod group_rests;
mod hot_replicas;
pub(crate) mod hot_table;
#[cfg(feature = "testkit")]
pub(crate) mod injected_bug;
mod lease;
mod lifetimes;
pub(crate) mod mount;
mod offload_first;
pub(crate) mod outlook;
mod placement;
mod promises;
mod quota;
pub(crate) mod random;
pub(crate) mod registry;
pub(crate) mod retired;
pub(crate) mod state;
pub(crate) mod timers;
mod usage;
mod victim;
pub(crate) mod weights;

pub(crate) use self::state::Space;
pub(crate) use self::victim::Victim;
