//! What this crate synchronises with. `tests/interleavings.rs` gives [`room`](crate::room) another; unit tests count the locks a thread takes.

#[cfg(not(test))]
pub(crate) use parking_lot::{Mutex, RwLock};
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

#[cfg(test)]
pub(crate) use crate::costs::{Mutex, RwLock};
