//! Locks and atomics whose calls are points at which another thread may go on. Names and methods
//! are those of `sync` in `mooncake-master`.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

pub(crate) use shuttle::sync::atomic;
pub(crate) use shuttle::thread::yield_now;
/// Set before the first call is served, so no thread waits for it.
pub(crate) use std::sync::OnceLock;

/// Lock without poisoning.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard of a [`Mutex`].
pub(crate) struct MutexGuard<'a, T>(shuttle::sync::MutexGuard<'a, T>);

impl<T> MutexGuard<'_, T> {
    /// Unlocks. The schedule decides who is next.
    pub(crate) fn unlock_fair(guard: Self) {
        drop(guard);
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Lock of many readers or one writer, without poisoning.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(shuttle::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> shuttle::sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
