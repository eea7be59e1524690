//! Memory of the program that it has not registered, for the calls that name it by its address.

use std::sync::{Arc, Once};

use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use mooncake_transport::{Region, Slice, SliceMut};
use parking_lot::Mutex;

use super::leaving::Leaving;
use super::{UNUSED_WITHIN, UnusedSignal, caller_memory};
use crate::TransportSet;

/// Unregistered memory that one call uses.
///
/// The program keeps such memory only while the call runs, so the call ends with
/// [`unused`](Self::unused) or [`wait`](Self::wait), whatever its outcome. A call that is dropped
/// leaves its memory in the list of the [`Regions`](super::Regions).
#[derive(Debug)]
pub struct Unregistered {
    leaving: Arc<Leaving>,
    used: Mutex<Vec<Arc<UnusedSignal>>>,
}

impl Unregistered {
    pub(super) fn new(leaving: Arc<Leaving>) -> Self {
        Self { leaving, used: Mutex::default() }
    }

    /// Returns a range to write from.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a range that is not memory of this process.
    ///
    /// # Safety
    /// The bytes stay allocated until the call has waited for them.
    pub unsafe fn slice(&self, address: u64, len: usize) -> Result<Slice<TransportSet>> {
        // SAFETY: promised by the caller.
        unsafe { self.region(address, len) }?.slice(0..len)
    }

    /// Returns a range to read into.
    ///
    /// # Errors
    /// Returns the errors of [`slice`](Self::slice), and `INVALID_PARAMS` for read-only memory.
    ///
    /// # Safety
    /// As for [`slice`](Self::slice).
    pub unsafe fn slice_mut(&self, address: u64, len: usize) -> Result<SliceMut<TransportSet>> {
        // SAFETY: promised by the caller. If the program lets two calls write to the memory, it
        // gets a mixture of both.
        unsafe { self.region(address, len)?.slice_mut_unchecked(0..len) }
    }

    /// Looks the range up in the mappings of the process, at each use: the result is not kept,
    /// because the program may unmap the memory after the call. It must not do so during the call.
    /// The look-up refuses addresses outside of the memory of the process. It cannot guard against
    /// a thread that unmaps the memory in the middle of the call, and neither could a later check.
    unsafe fn region(&self, address: u64, len: usize) -> Result<Region<TransportSet>> {
        static WARNED: Once = Once::new();
        // SAFETY: promised by the caller.
        let (memory, signal) = unsafe { caller_memory(address, len) }?;
        let region = Region::unregistered(memory)?;
        if !is_planted("unregistered-memory-is-not-waited-for") {
            self.leaving.add(None, signal.clone());
            self.used.lock().push(signal);
        }
        WARNED.call_once(|| {
            tracing::warn!(
                address = format_args!("{address:#x}"),
                len,
                "memory is not registered; each call looks it up, and waits until no transfer uses it"
            );
        });
        Ok(region)
    }

    /// Returns whether the call has used no such memory.
    pub fn is_empty(&self) -> bool {
        self.used.lock().is_empty()
    }

    /// Waits until no transfer uses the memory, for at most [`UNUSED_WITHIN`] each. Needs a tokio
    /// runtime.
    pub async fn unused(&self) {
        let used = self.used.lock().clone();
        for signal in used {
            report(signal.within(UNUSED_WITHIN).await);
        }
    }

    /// Waits like [`unused`](Self::unused), and parks the thread.
    pub fn wait(&self) {
        let used = self.used.lock().clone();
        used.iter().for_each(|signal| report(signal.wait(UNUSED_WITHIN)));
    }
}

fn report(is_unused: bool) {
    if !is_unused {
        tracing::warn!(
            "transfer has not ended and may still use unregistered memory of a call that has returned"
        );
    }
}
