//! What [`room`](crate::room) synchronises with; `tests/interleavings.rs` gives it another.

pub(crate) use parking_lot::Mutex;
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
