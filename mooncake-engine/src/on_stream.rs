//! Transfers in the order of a CUDA stream, over any transport of the engine.
//!
//! ```no_run
//! # use mooncake_engine::TransferEngine;
//! # use mooncake_transport::engine::Target;
//! # async fn run(engine: TransferEngine, peer: Target<mooncake_engine::TransportSet>, local: mooncake_transport::Slice<mooncake_engine::TransportSet>, at: u64, stream: u64) -> mooncake_core::Result<()> {
//! let writer = engine.clone();
//! let limit = engine.timeout_for(local.len() as u64);
//! let write = async move {
//!     let deadline = writer.clock().now().after(limit);
//!     writer.write(&peer, at, local, Some(deadline)).await.0
//! };
//! // Earlier kernels of the stream have filled `local`; later ones may overwrite it.
//! // SAFETY: the stream lives until the transfer is over.
//! unsafe { engine.after_stream(stream, 2 * limit, write) }?;
//! // The next call reports a failure, or this one.
//! engine.check_streams()
//! # }
//! ```

use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::memory::Location;
use mooncake_transport::{Protocol, Transport, device};

use crate::built_in::{Cuda, CudaDriver, StreamOrder};
use crate::engine::TransferEngine;
use crate::ids::AddressRequest;
use crate::transport_set::TransportSet;

/// Waits for the work that the default stream of a device has now. Calls without a stream come
/// after that work as in Mooncake C++, over every transport but RDMA, which reads memory as it is.
/// Does nothing for host memory. Without transports, the caller is a copy by the driver.
///
/// # Errors
/// The error of that work.
pub fn after_default_stream(transports: Option<&TransportSet>, location: Location) -> Result<()> {
    match location {
        Location::Cuda(number)
            if transports.is_none_or(|set| set.protocol() != Protocol::RDMA) && Cuda::present().is_some() =>
        {
            CudaDriver::serve(None)?.wait_for_default_stream(number)
        }
        _ => Ok(()),
    }
}

impl TransferEngine {
    fn stream_order(&self) -> Result<&StreamOrder> {
        if let Some(order) = self.parts.streams.get() {
            return Ok(order);
        }
        let driver = CudaDriver::serve(None)?;
        Ok(self.parts.streams.get_or_init(|| StreamOrder::new(driver, &self.parts.runtime)))
    }

    /// Runs `transfer` on the engine's runtime after the work that the stream has now, and lets
    /// later work of the stream wait until the transfer is over. Returns at once. `transfer` must
    /// not act before its first poll (an `async` block does not), and must not block. A failed
    /// transfer never ends the process; its error is kept.
    ///
    /// The stream waits at most `limit` from the begin of the transfer. A longer transfer counts as
    /// failed, whatever its deadline, and finishes without the stream.
    ///
    /// The transfer must not depend on the stream, nor on a stream that waits for it.
    ///
    /// # Errors
    /// The unreported error of an earlier transfer; this one is not begun then. `NOT_SUPPORTED`
    /// without a CUDA driver or feature `transport-nvlink`, or while the stream is captured into a
    /// graph. `INVALID_PARAMS` for an invalid stream.
    ///
    /// # Safety
    /// `stream` is a `cudaStream_t` (`CUstream`), or 0 for the default one, and lives until the
    /// transfer is over.
    pub unsafe fn after_stream(
        &self,
        stream: u64,
        limit: Duration,
        transfer: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.stream_order()?.after_stream(stream, limit, transfer) }
    }

    /// Calls [`after_default_stream`] for the local memory of requests, if any device memory is
    /// registered.
    ///
    /// # Errors
    /// Those of [`after_default_stream`].
    pub fn after_default_streams(&self, requests: &[AddressRequest]) -> Result<()> {
        if !device::in_use() {
            return Ok(());
        }
        let mut waited = Vec::new();
        for request in requests {
            let Ok(local) = self.regions().slice(request.local, request.len) else { continue };
            if local.location().is_device() && !waited.contains(&local.location()) {
                after_default_stream(Some(&**self.transport()), local.location())?;
                waited.push(local.location());
            }
        }
        Ok(())
    }

    /// Reports the first unreported error of a transfer in stream order, once.
    ///
    /// # Errors
    /// That error.
    pub fn check_streams(&self) -> Result<()> {
        self.parts.streams.get().map_or(Ok(()), StreamOrder::check)
    }

    /// Waits until no transfer in stream order is in flight, and reports as
    /// [`check_streams`](Self::check_streams) does. Blocks the thread.
    ///
    /// # Errors
    /// Those of [`check_streams`](Self::check_streams).
    pub fn settle_streams(&self) -> Result<()> {
        self.parts.streams.get().map_or(Ok(()), StreamOrder::wait_for_all)
    }
}
