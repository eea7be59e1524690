//! Locks and atomics of the master.
//!
//! Every lock and every atomic of this crate comes from here, and no other module names
//! `parking_lot` or `std::sync::atomic`. A test can thus compile the other modules with types that
//! give way to other threads at each call. `Arc` needs no such type: nothing depends on a count of
//! references.

pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic;
pub(crate) use std::thread::yield_now;

pub(crate) use parking_lot::{Mutex, MutexGuard, RwLock};
