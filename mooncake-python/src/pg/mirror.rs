//! Tensor of the program that shows which slots are active.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use mooncake_core::{Error, Result};
use mooncake_pg::view::{Slot, View};
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::sync::watch;

use crate::args::Keep;

/// Integers of 32 bits in memory of the program, 1 for each active slot and 0 for the others.
pub(super) struct Mirror {
    own: Slot,
    address: usize,
    capacity: usize,
    views: watch::Receiver<Option<Arc<View>>>,
    /// Epoch of the view that the memory shows.
    shown: Mutex<Option<u64>>,
    // Keeps the memory.
    _keep: Keep,
}

impl Mirror {
    /// Creates a mirror at `address`, which `owner` keeps allocated, and fills it.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for memory that is not aligned.
    pub(super) fn new(
        own: Slot,
        address: usize,
        capacity: usize,
        views: watch::Receiver<Option<Arc<View>>>,
        owner: Py<PyAny>,
    ) -> Result<Self> {
        if address == 0 || !address.is_multiple_of(align_of::<AtomicI32>()) {
            let text = "cannot show active ranks: the tensor is not aligned";
            return Err(Error::invalid(format!("{text}. address={address:#x}")));
        }
        let mut keep = Keep::default();
        keep.object(owner);
        let mirror = Self { own, address, capacity, views, shown: Mutex::new(None), _keep: keep };
        mirror.show(None);
        mirror.refresh();
        Ok(mirror)
    }

    /// Shows the present view.
    pub(super) fn refresh(&self) {
        // The lock is taken first: a later view is never overwritten by an earlier one.
        let mut shown = self.shown.lock();
        let view = self.views.borrow().clone();
        let epoch = view.as_ref().map(|view| view.epoch);
        if *shown != epoch {
            self.show(view.as_deref());
            *shown = epoch;
        }
    }

    /// Shows every view until the group ends or the mirror is dropped.
    pub(super) async fn follow(mirror: std::sync::Weak<Self>, mut views: watch::Receiver<Option<Arc<View>>>) {
        while views.changed().await.is_ok() {
            let Some(mirror) = mirror.upgrade() else { return };
            mirror.refresh();
        }
    }

    fn show(&self, view: Option<&View>) {
        let active = view
            .map_or(1 << self.own.0, |view| view.active().fold(0u64, |active, slot| active | 1 << slot.0));
        for slot in 0..self.capacity {
            let at = std::ptr::with_exposed_provenance_mut::<i32>(self.address + slot * size_of::<i32>());
            // SAFETY: the memory is aligned, has `capacity` integers, and is kept by its owner. The
            // program may read it at the same time, as the contract of `active_ranks` says.
            #[allow(unsafe_code)]
            let cell = unsafe { AtomicI32::from_ptr(at) };
            cell.store(i32::from(active >> slot & 1 != 0), Ordering::Release);
        }
    }
}
