//! Stores of this process, by number.

use std::sync::{Arc, OnceLock};

use mooncake_client::local::{CallMemory, StoreClient};
use mooncake_client::{Client, ClientEnvironment, StoreSetup};
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_engine::addressed::{Regions, caller_memory};
use mooncake_transport::wait_inline;
use parking_lot::{Mutex, RwLock};

use crate::handles::Handles;
use crate::runtime::Runtime;

static STORES: Handles<Store> = Handles::new("store");

/// Store, which joins a cluster once.
pub(super) struct Store {
    // Dropped first: no task outlives what it uses.
    runtime: Runtime,
    session: OnceLock<Session>,
    /// Held by a setup.
    joining: Mutex<()>,
    /// True once the store is destroyed. Locked by each call, so that the end of the store waits
    /// for them.
    is_destroyed: RwLock<bool>,
}

/// Membership in a cluster.
pub(super) struct Session {
    pub(super) client: StoreClient,
    pub(super) full: Client<TransportSet>,
    pub(super) regions: Arc<Regions>,
}

impl Store {
    /// Creates a store and returns its number.
    pub(super) fn create() -> Result<usize> {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let runtime = Runtime::start("mooncake-store", cores.clamp(2, 8))?;
        Ok(STORES.add(Self {
            runtime,
            session: OnceLock::new(),
            joining: Mutex::default(),
            is_destroyed: RwLock::default(),
        }))
    }

    /// Runs a call on a store.
    pub(super) fn call<R>(number: usize, work: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        STORES.find(number)?.run(work)
    }

    fn run<R>(&self, work: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let is_destroyed = self.is_destroyed.read();
        if *is_destroyed {
            return Err(Error::invalid("cannot use store: another thread destroyed it meanwhile"));
        }
        work(self)
    }

    /// Waits for the calls in progress, and leaves the cluster. When it returns, nothing uses
    /// memory of the program any more.
    pub(super) fn destroy(number: usize) -> Result<()> {
        let store = STORES.take(number)?;
        let mut is_destroyed = store.is_destroyed.write();
        *is_destroyed = true;
        let Some(session) = store.session.get() else { return Ok(()) };
        store.wait(async {
            let closed = session.client.close().await;
            session.regions.clear().await;
            closed
        })
    }

    /// Joins a cluster.
    pub(super) fn join(&self, setup: StoreSetup) -> Result<()> {
        let _joining = self.joining.lock();
        if self.session.get().is_some() {
            return Err(Error::invalid("cannot set up store: it is set up already; create another one"));
        }
        let environment: ClientEnvironment = StoreSetup::environment();
        let full = self.wait(async { setup.builder(environment.config)?.connect().await })?;
        let client = StoreClient::Full(full.clone());
        let _ = self.session.set(Session { client, full, regions: Arc::default() });
        Ok(())
    }

    /// Returns the session, once the store is set up.
    pub(super) fn session(&self) -> Result<&Session> {
        let session = self.session.get();
        session.ok_or_else(|| Error::invalid("store is not set up: call mooncake_store_setup() first"))
    }

    /// Waits for `work` on this thread.
    pub(super) fn wait<R>(&self, work: impl Future<Output = Result<R>>) -> Result<R> {
        self.runtime.block_on(wait_inline(work))
    }
}

impl Session {
    /// Creates the memory of a call.
    ///
    /// # Safety
    /// The conditions of [`CallMemory::new`] hold.
    pub(super) unsafe fn call_memory(&self) -> CallMemory {
        // SAFETY: promised by the caller.
        unsafe { CallMemory::new(&self.client, &self.regions, None) }
    }

    /// Registers memory of the program.
    ///
    /// # Safety
    /// The conditions of [`caller_memory`] hold until the memory is unregistered.
    pub(super) unsafe fn register(&self, address: u64, len: usize) -> Result<()> {
        // SAFETY: promised by the caller; unregistering waits for the signal.
        let (memory, signal) = unsafe { caller_memory(address, len) }?;
        self.regions.add(self.full.memory().register(memory)?, signal);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call may find its store, and begin only after another thread has destroyed the store.
    #[test]
    fn no_call_begins_after_the_end() {
        let number = Store::create().unwrap();
        let found = STORES.find(number).unwrap();
        assert_eq!(found.run(|_| Ok(1)).unwrap(), 1);
        Store::destroy(number).unwrap();
        assert!(found.run(|_| Ok(1)).is_err() && Store::call(number, |_| Ok(1)).is_err());
    }
}
