//! Jobs that go on between calls: copies and moves, drains, hot replicas, offload and promotion.
//!
//! [`Jobs`](state::Jobs) owns the space below.

mod copy;
mod drain;
mod drain_recovery;
pub(crate) mod drain_table;
mod hot_copies;
mod offload;
mod promotion;
pub(crate) mod recovery;
pub(crate) mod state;
mod task;
pub(crate) mod task_table;

pub(crate) use self::state::Jobs;
