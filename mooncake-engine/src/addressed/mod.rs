//! Memory that programs name by its address: the registrations, and the end of their use.

mod leaving;
mod overlapping;
mod regions;
mod unregistered;

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{Mapped, MemorySource, MemorySpan, device_driver, mapped};
use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

pub use leaving::Leaving;
pub use regions::Regions;
pub(crate) use regions::still_in_use_error;
pub use unregistered::Unregistered;

/// Timeout of the wait for transfers that use memory to be unregistered. A transport ends its
/// transfers long before.
pub const UNUSED_WITHIN: Duration = Duration::from_secs(60);
/// Upper bound of the addresses that a process can map on the supported machines.
const MAX_ADDRESS: u64 = 1 << 57;

/// Signal that some memory has no users any more.
#[derive(Debug, Default)]
pub struct UnusedSignal {
    is_set: Mutex<bool>,
    changed: Condvar,
    notify: tokio::sync::Notify,
}

impl UnusedSignal {
    /// Parks the thread until the signal is set, for at most `limit`. Returns whether it is set.
    pub fn wait(&self, limit: Duration) -> bool {
        let mut is_set = self.is_set.lock();
        if !*is_set {
            self.changed.wait_while_for(&mut is_set, |is_set| !*is_set, limit);
        }
        *is_set
    }

    /// Waits like [`wait`](Self::wait), without parking the thread. Needs a tokio runtime.
    pub async fn within(&self, limit: Duration) -> bool {
        let notified = async {
            loop {
                let notified = self.notify.notified();
                if self.is_set() {
                    return;
                }
                notified.await;
            }
        };
        tokio::time::timeout(limit, notified).await.is_ok()
    }

    /// Returns whether the memory is unused.
    pub fn is_set(&self) -> bool {
        *self.is_set.lock()
    }

    /// Marks the memory as unused, and wakes the waiters.
    pub fn set(&self) {
        *self.is_set.lock() = true;
        self.changed.notify_all();
        self.notify.notify_waiters();
    }
}

/// Memory that transfers of one call may write to. The signal is set when the last of them has
/// ended.
#[derive(Debug, Default)]
pub struct Landing {
    signal: Arc<UnusedSignal>,
}

impl Landing {
    /// Creates the memory of a call, and the signal that no transfer writes to it any more.
    pub fn new() -> (Arc<Self>, Arc<UnusedSignal>) {
        let landing = Self::default();
        let signal = landing.signal.clone();
        (Arc::new(landing), signal)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.signal.set();
    }
}

/// Memory of the caller at an address.
struct CallerMemory {
    span: MemorySpan,
    signal: Arc<UnusedSignal>,
}

// SAFETY: the creator vouches for the memory until `signal` is set.
unsafe impl MemorySource for CallerMemory {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for CallerMemory {
    fn drop(&mut self) {
        self.signal.set();
    }
}

/// Returns host or device memory at an address for which the caller vouches, and the signal that it
/// is unused. Memory that the kernel maps read-only is a source only: operations that would write
/// to it are refused, those of peers too.
///
/// # Errors
/// Returns `INVALID_PARAMS` for a range that is not memory of this process, as far as the kernel
/// reports it.
///
/// # Safety
/// Until the signal is set, the bytes stay allocated, and readable and writable if they were. The
/// caller expects that any request for their address reads and writes them at any time.
pub unsafe fn caller_memory(address: u64, len: usize) -> Result<(Arc<dyn MemorySource>, Arc<UnusedSignal>)> {
    let ptr = usize::try_from(address)
        .ok()
        .and_then(|a| NonNull::new(std::ptr::with_exposed_provenance_mut(a)))
        .ok_or_else(|| Error::invalid("cannot use memory: the address is null"))?;
    if len == 0 || address.checked_add(len as u64).is_none_or(|end| end > MAX_ADDRESS) {
        return Err(Error::invalid(format!("invalid memory range: address={address:#x} len={len}")));
    }
    let span = MemorySpan::new(ptr, len).located();
    let covers_range = |device: MemorySpan| device.contains(address, len as u64);
    let rights = match device_driver().filter(|_| span.location.is_device()) {
        Some(driver) if driver.allocation(address).is_some_and(covers_range) => Mapped::Writable,
        Some(_) => Mapped::Not,
        None => mapped(address, len),
    };
    if rights == Mapped::Not {
        return Err(Error::invalid(format!(
            "cannot use memory: the range is not mapped and readable. address={address:#x} len={len}"
        )));
    }
    let span = MemorySpan { read_only: rights == Mapped::ReadOnly, may_be_unmapped: true, ..span };
    let signal = Arc::new(UnusedSignal::default());
    Ok((Arc::new(CallerMemory { span, signal: signal.clone() }), signal))
}
