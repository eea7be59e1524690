//! Memory that one call names by its address, registered or not.

use std::sync::Arc;

use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_engine::addressed::{Landing, Regions, Unregistered};
use mooncake_transport::engine::EngineCode;
use mooncake_transport::{Slice, SliceMut, Transport};
use pyo3::prelude::*;

use super::Session;
use crate::client::PythonClient;

/// Memory of one call. The call ends with [`wait`](Self::wait) or [`unused`](Self::unused), because
/// the program may free unregistered memory afterwards.
pub(super) struct CallMemory {
    session: Arc<Session>,
    unregistered: Unregistered,
}

impl CallMemory {
    pub(super) fn new(session: &Arc<Session>) -> Self {
        Self { session: session.clone(), unregistered: session.regions.unregistered() }
    }

    /// Returns memory to write from.
    pub(super) fn source(&self, address: u64, len: usize) -> Result<Slice<TransportSet>> {
        let slice = match self.registered(|regions| regions.slice(address, len)) {
            Err(error) if is_unknown(&error) => {
                self.takes_unregistered(address, len)?;
                #[allow(unsafe_code)]
                // SAFETY: the program keeps the memory during the call, which waits at its end.
                unsafe {
                    self.unregistered.slice(address, len)
                }
            }
            registered => registered,
        }?;
        self.session.client.after_default_stream(slice.location())?;
        Ok(slice)
    }

    /// Returns memory to read into.
    pub(super) fn sink(&self, address: u64, len: usize) -> Result<SliceMut<TransportSet>> {
        self.sink_until(address, len, None)
    }

    /// Returns memory like [`sink`](Self::sink), and keeps a clone of `landing` until nothing
    /// writes to registered memory any more.
    pub(super) fn sink_until(
        &self,
        address: u64,
        len: usize,
        landing: Option<&Arc<Landing>>,
    ) -> Result<SliceMut<TransportSet>> {
        let registered = self.registered(|regions| match landing {
            Some(landing) => regions.slice_mut_until(address, len, landing),
            None => regions.slice_mut(address, len),
        });
        let slice = match registered {
            Err(error) if is_unknown(&error) => {
                self.takes_unregistered(address, len)?;
                #[allow(unsafe_code)]
                // SAFETY: as in `source`.
                unsafe {
                    self.unregistered.slice_mut(address, len)
                }
            }
            registered => registered,
        }?;
        self.session.client.after_default_stream(slice.location())?;
        Ok(slice)
    }

    /// Looks for memory that this store has registered, and then for memory of the engine that was
    /// given to setup.
    fn registered<R>(&self, find: impl Fn(&Regions) -> Result<R>) -> Result<R> {
        match (&self.session.engine, find(&self.session.regions)) {
            (Some(engine), Err(error)) if is_unknown(&error) => find(engine),
            (_, found) => found,
        }
    }

    /// Refuses unregistered memory where the client needs registered memory.
    fn takes_unregistered(&self, address: u64, len: usize) -> Result<()> {
        let client = &self.session.client;
        let needs = if client.as_ipc().is_some() {
            "mooncake_client sees registered memory only".to_owned()
        } else if client.needs_registration() {
            format!("transport {} needs registration", client.full()?.engine().transport().protocol())
        } else {
            return Ok(());
        };
        let text = format!(
            "cannot use memory: it is not registered, and {needs}. address={address:#x} len={len}; call register_buffer first"
        );
        Err(Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered))
    }

    /// Returns whether the call uses unregistered memory.
    pub(super) fn has_unregistered(&self) -> bool {
        !self.unregistered.is_empty()
    }

    /// Waits until no transfer uses unregistered memory of the call, also if the call was
    /// interrupted.
    pub(super) fn wait(&self, py: Python<'_>) {
        if self.has_unregistered() {
            py.detach(|| self.unregistered.wait());
        }
    }

    /// Waits like [`wait`](Self::wait), without parking the thread.
    pub(super) async fn unused(&self) {
        self.unregistered.unused().await;
    }
}

/// Returns whether the memory is not registered.
fn is_unknown(error: &Error) -> bool {
    error.engine_code() == EngineCode::AddressNotRegistered
}
