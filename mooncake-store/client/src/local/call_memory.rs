//! Operations on memory that a program names by its address, registered or not.

use std::sync::Arc;

use mooncake_core::memory::Location;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::addressed::{Landing, Regions, UNUSED_WITHIN, Unregistered};
use mooncake_engine::on_stream::after_default_stream;
use mooncake_engine::transport_set::TransportSet;
use mooncake_transport::engine::EngineCode;
use mooncake_transport::{Slice, SliceMut, Transport};

use super::store_client::{StoreClient, missing_result};
use crate::metrics::Operation;

/// Memory of one call, which names it by its address.
///
/// The program may free unregistered memory after the call, so the call ends with
/// [`wait`](Self::wait) or [`unused`](Self::unused), whatever its outcome.
#[derive(Debug)]
pub struct CallMemory {
    client: StoreClient,
    regions: Arc<Regions>,
    /// Memory of the transfer engine that the client shares with the program.
    engine: Option<Arc<Regions>>,
    unregistered: Unregistered,
}

impl CallMemory {
    /// Creates the memory of a call, which is empty at first. Registered memory lies in `regions`
    /// or in those of a transfer engine.
    ///
    /// # Safety
    /// Memory whose address is passed to this value stays allocated until it is unregistered, or
    /// until [`wait`](Self::wait) or [`unused`](Self::unused) returns if it is not registered.
    pub unsafe fn new(client: &StoreClient, regions: &Arc<Regions>, engine: Option<&Arc<Regions>>) -> Self {
        Self {
            client: client.clone(),
            regions: regions.clone(),
            engine: engine.cloned(),
            unregistered: regions.unregistered(),
        }
    }

    /// Returns memory to write from.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a range that is not memory of this process, and for
    /// unregistered memory where the client needs registered memory.
    pub fn source(&self, address: u64, len: usize) -> Result<Slice<TransportSet>> {
        let slice = match self.registered(|regions| regions.slice(address, len)) {
            Err(error) if is_unknown(&error) => {
                self.takes_unregistered(address, len)?;
                // SAFETY: promised by the creator.
                unsafe { self.unregistered.slice(address, len) }
            }
            registered => registered,
        }?;
        self.after_default_stream(slice.location())?;
        Ok(slice)
    }

    /// Returns the pieces of a value to write from. Empty ranges are left out.
    ///
    /// # Errors
    /// Returns the errors of [`source`](Self::source).
    pub fn pieces(&self, ranges: impl IntoIterator<Item = (u64, usize)>) -> Result<Vec<Slice<TransportSet>>> {
        let some = ranges.into_iter().filter(|(_, len)| *len > 0);
        some.map(|(address, len)| self.source(address, len)).collect()
    }

    /// Returns memory to read into.
    ///
    /// # Errors
    /// Returns the errors of [`source`](Self::source), and `INVALID_PARAMS` for read-only memory.
    pub fn sink(&self, address: u64, len: usize) -> Result<SliceMut<TransportSet>> {
        self.sink_until(address, len, None)
    }

    /// Returns memory like [`sink`](Self::sink), and keeps a clone of `landing` until nothing
    /// writes to registered memory any more.
    fn sink_until(
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
                // SAFETY: promised by the creator.
                unsafe { self.unregistered.slice_mut(address, len) }
            }
            registered => registered,
        }?;
        self.after_default_stream(slice.location())?;
        Ok(slice)
    }

    /// Looks for memory that the program has registered with the store, and then for memory of the
    /// engine.
    fn registered<R>(&self, find: impl Fn(&Regions) -> Result<R>) -> Result<R> {
        match (&self.engine, find(&self.regions)) {
            (Some(engine), Err(error)) if is_unknown(&error) => find(engine),
            (_, found) => found,
        }
    }

    /// Refuses unregistered memory where the client needs registered memory.
    fn takes_unregistered(&self, address: u64, len: usize) -> Result<()> {
        let needs = match &self.client {
            StoreClient::Ipc(_) => "mooncake_client sees registered memory only".to_owned(),
            StoreClient::Full(client) if self.client.needs_registration() => {
                format!("transport {} needs registration", client.engine().transport().protocol())
            }
            StoreClient::Full(_) => return Ok(()),
        };
        let text = format!(
            "cannot use memory: it is not registered, and {needs}. address={address:#x} len={len}; call register_buffer first"
        );
        Err(Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered))
    }

    /// Orders the following transfers behind the work that the default stream of the device has
    /// been given. See [`after_default_stream`].
    fn after_default_stream(&self, location: Location) -> Result<()> {
        if !location.is_device() {
            return Ok(());
        }
        // An IPC client copies by itself.
        let transports = self.client.as_full().map(|client| &**client.engine().transport());
        // The work that the stream waits for may need this very thread.
        tokio::task::block_in_place(|| after_default_stream(transports, location))
    }

    /// Reads values to the start of each range. Returns their lengths, with the codes of Mooncake
    /// C++; a missing object is an error, whatever its range.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn read_into<K: AsRef<[u8]>>(
        &self,
        operation: Operation,
        items: impl IntoIterator<Item = (K, (u64, usize))>,
    ) -> Result<Vec<Result<u64>>> {
        self.read_until(operation, items, None).await
    }

    /// Reads like [`read_into`](Self::read_into), but returns only when nothing writes to the
    /// memory any more. The response may have come sooner.
    ///
    /// # Errors
    /// Returns the errors of [`read_into`](Self::read_into).
    pub async fn read_landed<K: AsRef<[u8]>>(
        &self,
        operation: Operation,
        items: impl IntoIterator<Item = (K, (u64, usize))>,
    ) -> Result<Vec<Result<u64>>> {
        let (landing, landed) = Landing::new();
        let outcomes = self.read_until(operation, items, Some(landing)).await;
        if !landed.within(UNUSED_WITHIN).await {
            tracing::warn!(
                "transfer has not ended and may still write to memory of a call that has returned"
            );
        }
        self.unused().await;
        outcomes
    }

    async fn read_until<K: AsRef<[u8]>>(
        &self,
        operation: Operation,
        items: impl IntoIterator<Item = (K, (u64, usize))>,
        landing: Option<Arc<Landing>>,
    ) -> Result<Vec<Result<u64>>> {
        let (mut refused, mut reads) = (Vec::new(), Vec::new());
        for (key, (address, len)) in items {
            match self.sink_until(address, len, landing.as_ref()) {
                Ok(slice) => {
                    reads.push((key, slice));
                    refused.push(None);
                }
                Err(error) => refused.push(Some((key, error))),
            }
        }
        drop(landing);
        self.find_missing(&mut refused).await;
        let started = self.client.begin(operation);
        let read = self.client.counted(started, self.client.batch_get_into(reads)).await?;
        let is_full = self.client.as_full().is_some();
        let mut read = read.into_iter().map(|outcome| match outcome {
            Ok(len) => Ok(len as u64),
            Err(error) if is_full => Err(unify_read_error(error)),
            Err(error) => Err(error),
        });
        let outcome = |refused: Option<(K, Error)>| match refused {
            Some((_, error)) => Err(error),
            None => read.next().unwrap_or_else(missing_result),
        };
        Ok(refused.into_iter().map(outcome).collect())
    }

    /// Replaces the errors of keys that do not exist. In Mooncake C++, the object is looked up
    /// before the memory is examined.
    async fn find_missing<K: AsRef<[u8]>>(&self, refused: &mut [Option<(K, Error)>]) {
        let mut refused: Vec<&mut (K, Error)> = refused.iter_mut().flatten().collect();
        if refused.is_empty() {
            return;
        }
        let keys: Vec<&[u8]> = refused.iter().map(|(key, _)| key.as_ref()).collect();
        let Ok(exists) = self.client.batch_exist(&keys).await else { return };
        let exists: Vec<bool> = exists.into_iter().map(|exists| exists.unwrap_or(true)).collect();
        for ((_, error), exists) in refused.iter_mut().map(|refused| &mut **refused).zip(exists) {
            if !exists {
                *error = ErrorCode::ObjectNotFound.into();
            }
        }
    }

    /// Returns whether the call uses unregistered memory.
    pub fn has_unregistered(&self) -> bool {
        !self.unregistered.is_empty()
    }

    /// Waits until no transfer uses unregistered memory of the call, also if the call was
    /// interrupted. Parks the thread.
    pub fn wait(&self) {
        self.unregistered.wait();
    }

    /// Waits like [`wait`](Self::wait), without parking the thread.
    pub async fn unused(&self) {
        self.unregistered.unused().await;
    }
}

/// Maps every failed read of bytes to one code, as in Mooncake C++. The message names the cause.
pub fn unify_read_error(error: Error) -> Error {
    let is_it = matches!(error.code(), ErrorCode::ObjectNotFound | ErrorCode::TransferFail);
    match error.kind() {
        ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::NotFound if !is_it => {
            Error::new(ErrorCode::TransferFail, error.to_string()).with_source(error)
        }
        _ => error,
    }
}

/// Returns whether the memory is not registered.
fn is_unknown(error: &Error) -> bool {
    error.engine_code() == EngineCode::AddressNotRegistered
}
