//! Synchronisation primitives of the crate. `tests/interleavings.rs` replaces those of
//! [`send_credits`](crate::send_credits); unit tests count the locks of a thread.

#[cfg(not(test))]
pub(crate) use parking_lot::{Mutex, RwLock};
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

#[cfg(test)]
pub(crate) use crate::slice_cost_tests::{Mutex, RwLock};
