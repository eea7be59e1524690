//! Transfers in the order of a CUDA stream, over any wire of the engine.
//!
//! ```no_run
//! # use mooncake_engine::TransferEngine;
//! # use mooncake_transport::engine::Target;
//! # async fn run(engine: TransferEngine, peer: Target<mooncake_engine::TransportSet>, local: mooncake_transport::Slice<mooncake_engine::TransportSet>, at: u64, stream: u64) -> mooncake_core::Result<()> {
//! let writer = engine.clone();
//! let limit = engine.patience(local.len() as u64);
//! let write = async move {
//!     let deadline = writer.clock().now().after(limit);
//!     writer.write(&peer, at, local, Some(deadline)).await.0
//! };
//! // The kernels on the stream so far have filled `local`; those put on it from here on may overwrite it.
//! // SAFETY: the stream lives until the transfer is over.
//! unsafe { engine.after_stream(stream, 2 * limit, write) }?;
//! // What failed is told by the next call, or here.
//! engine.check_streams()
//! # }
//! ```

use std::sync::OnceLock;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::memory::Location;
use mooncake_nvlink::{Cuda, CudaDriver, StreamOrder};
use mooncake_transport::{Protocol, Transport, device};

use crate::engine::TransferEngine;
use crate::ids::AddressRequest;
use crate::transport_set::TransportSet;

/// The order of an engine's transfers with streams, from the first that asks for it.
#[derive(Debug, Default)]
pub(crate) struct Streams(OnceLock<StreamOrder>);

/// Waits until the work is over that the default stream of a device has now, for calls that name no stream and are expected to come after it: as in the existing
/// system, over every wire but RDMA, which reads memory as it is. Nothing for memory of the host's.
/// Without wires it is a copy of the driver's that is to come after it.
///
/// # Errors
/// What that work came to.
pub fn after_default_stream(wires: Option<&TransportSet>, location: Location) -> Result<()> {
    match location {
        Location::Cuda(number)
            if wires.is_none_or(|wires| wires.protocol() != Protocol::RDMA) && Cuda::present().is_some() =>
        {
            CudaDriver::serve(None)?.wait_for_default_stream(number)
        }
        _ => Ok(()),
    }
}

impl TransferEngine {
    fn stream_order(&self) -> Result<&StreamOrder> {
        if let Some(order) = self.parts.streams.0.get() {
            return Ok(order);
        }
        let driver = CudaDriver::serve(None)?;
        Ok(self.parts.streams.0.get_or_init(|| StreamOrder::new(driver, &self.parts.runtime)))
    }

    /// Has `transfer` run on the engine's runtime when the work is over that the stream has now, and has the stream's further work wait until it is over, well
    /// or not. Returns at once. It must not do anything before it is first polled (an `async` block does not), nor block. A failure never ends the process: it is
    /// kept.
    ///
    /// The stream waits for it no longer than `limit` from when it begins. If it is not over then, whatever deadline it has itself, that is a failure, and it is seen
    /// through without the stream.
    ///
    /// Nobody may wait for the stream, or for one that waits for it, on the way of the transfer.
    ///
    /// # Errors
    /// The failure of an earlier one that was not told yet: then this one is not begun. `NOT_SUPPORTED` without a CUDA driver, or while the stream is captured
    /// into a graph. `INVALID_PARAMS` for what is no stream.
    ///
    /// # Safety
    /// `stream` is a `cudaStream_t` (`CUstream`), 0 for the default one, that lives until the transfer is over.
    pub unsafe fn after_stream(
        &self,
        stream: u64,
        limit: Duration,
        transfer: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.stream_order()?.after_stream(stream, limit, transfer) }
    }

    /// [`after_default_stream`] for the local memory of requests. Where no memory of a device's is registered, it looks at nothing.
    ///
    /// # Errors
    /// As there.
    pub fn after_default_streams(&self, requests: &[AddressRequest]) -> Result<()> {
        if !device::in_use() {
            return Ok(());
        }
        let mut over = Vec::new();
        for request in requests {
            let Ok(local) = self.regions().slice(request.local, request.len) else { continue };
            if local.location().is_device() && !over.contains(&local.location()) {
                after_default_stream(Some(&**self.transport()), local.location())?;
                over.push(local.location());
            }
        }
        Ok(())
    }

    /// Tells the first failure of a transfer in stream order that was not told yet, once.
    ///
    /// # Errors
    /// That.
    pub fn check_streams(&self) -> Result<()> {
        self.parts.streams.0.get().map_or(Ok(()), StreamOrder::check)
    }

    /// Waits until no transfer in stream order is under way, and tells as [`check_streams`](Self::check_streams) does. Blocks the thread.
    ///
    /// # Errors
    /// As there.
    pub fn settle_streams(&self) -> Result<()> {
        self.parts.streams.0.get().map_or(Ok(()), StreamOrder::wait_for_all)
    }
}
