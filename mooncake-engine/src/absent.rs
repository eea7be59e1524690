//! Stand-ins for the transports and the CUDA driver that a build leaves out. Each has the name and
//! the methods of the real type, and no value: its constructor fails.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result, SharedClock};
use mooncake_transport::config::TransportConfig;
use mooncake_transport::fallback::{PartialTransport, is_path_error};
use mooncake_transport::statistics::NicLoad;
use mooncake_transport::{Access, Completion, Op, Protocol, SegmentDesc, Transport};
use tokio::runtime::Handle;

/// Returns the error for a transport that the build leaves out.
pub(crate) fn not_built(transport: &str) -> Error {
    Error::new(
        ErrorCode::NotSupported,
        format!(
            "cannot open transport {transport}: built without feature transport-{transport}. \
             enable the feature or choose another transport"
        ),
    )
}

/// Transport, with its registrations and peers.
#[derive(Clone, Debug)]
pub(crate) struct Absent(Infallible);

impl Absent {
    /// Fails for the transport of that configuration.
    pub(crate) fn start_with_clock<C: TransportConfig>(_: C, _: &Handle, _: SharedClock) -> Result<Self> {
        Err(not_built(C::TRANSPORT))
    }

    pub(crate) fn loads(&self) -> Vec<NicLoad> {
        match self.0 {}
    }

    pub(crate) fn contains(&self, _: u64, _: u64) -> bool {
        match self.0 {}
    }
}

// SAFETY: there is no value.

unsafe impl Transport for Absent {
    type Registration = Self;
    type Peer = Self;

    fn protocol(&self) -> Protocol {
        match self.0 {}
    }

    unsafe fn register(&self, _: MemorySpan, _: Access) -> Result<Self> {
        match self.0 {}
    }

    fn describe(&self, _: &mut SegmentDesc) {
        match self.0 {}
    }

    async fn connect(&self, _: &SegmentDesc) -> Result<Self> {
        match self.0 {}
    }

    fn submit<'a, I>(&self, _: &Self, _: I, _: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Self>>,
    {
        match self.0 {}
    }
}

impl PartialTransport for Absent {
    const IS_RETRYABLE: fn(&Error) -> bool = is_path_error;

    fn clock(&self) -> &SharedClock {
        match self.0 {}
    }

    fn submit_or<'a, I, F>(&self, _: &Self, _: I, _: Completion, _: F)
    where
        I: ExactSizeIterator<Item = Op<'a, Self>>,
        F: FnMut(Op<'a, Self>, Completion),
    {
        match self.0 {}
    }
}

/// Fails: the names of RDMA devices are unknown without the transport.
pub(crate) fn device_names() -> Result<Vec<String>> {
    Err(not_built("rdma"))
}

/// Fails: GPUs are unknown without the transport.
pub(crate) fn device_summaries() -> Result<Vec<Result<String>>> {
    Err(not_built("nvlink"))
}

/// CUDA library.
#[derive(Debug)]
pub(crate) struct Cuda(Infallible);

impl Cuda {
    pub(crate) fn present() -> Option<&'static Self> {
        None
    }
}

/// CUDA driver.
#[derive(Debug)]
pub(crate) struct CudaDriver(Infallible);

impl CudaDriver {
    pub(crate) fn serve(_: Option<PathBuf>) -> Result<Arc<Self>> {
        Err(not_built("nvlink"))
    }

    pub(crate) fn list_dma_buf(&self, _: MemorySpan) -> Result<Absent> {
        match self.0 {}
    }

    pub(crate) fn wait_for_default_stream(&self, _: u32) -> Result<()> {
        match self.0 {}
    }
}

/// Order of transfers with CUDA streams.
#[derive(Debug)]
pub(crate) struct StreamOrder(Infallible);

impl StreamOrder {
    pub(crate) fn new(driver: Arc<CudaDriver>, _: &Handle) -> Self {
        match driver.0 {}
    }

    pub(crate) unsafe fn after_stream(
        &self,
        _: u64,
        _: Duration,
        _: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn wait_for_all(&self) -> Result<()> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::clock::SystemClock;
    use mooncake_transport::config::RdmaConfig;

    #[tokio::test]
    async fn opening_an_absent_transport_names_its_feature() {
        let (handle, clock) = (Handle::current(), SystemClock::shared());
        let error = Absent::start_with_clock(RdmaConfig::default(), &handle, clock).unwrap_err();
        assert_eq!(error.code(), ErrorCode::NotSupported);
        let text = "cannot open transport rdma: built without feature transport-rdma";
        assert!(error.message().starts_with(text), "{error}");
    }
}
