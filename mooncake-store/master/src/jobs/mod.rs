//! Jobs that go on between calls.
//!
//! Most of them are copies that clients make. All copies live as
//! [`CopyJobs`](crate::model::copy_jobs::CopyJobs) says. The modules here are the policies: they
//! queue copies and react to the outcomes.
//!
//! | module | queues a copy when | reacts to the end |
//! |---|---|---|
//! | `task` | a caller requests a copy or a move | keeps the outcome for queries |
//! | `drain` | a replica lies in a segment that is to be emptied | moves the next replica, or retries |
//! | `hot_copies` | an object is read often | keeps the replica while reads go on |
//! | `promotion` | an object that is only on disk is read often | makes the value readable |
//! | `offload` | an object is put or is about to be evicted | adds the disk replica |
//!
//! `copy` holds the space of a copy or move from its start to its end, and `client_loss` ends what
//! a lost client was doing. [`Jobs`](state::Jobs) owns the space below.

mod client_loss;
pub(crate) mod copy;
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
