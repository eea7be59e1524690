//! Transfers in stream order, over any transport: they begin after the current work of the stream,
//! and the stream continues after them.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::cuda::{Flags, Hold, StreamRef};
use crate::driver::CudaDriver;
use crate::poller::Poller;

/// Order of transfers and streams. The next call reports the error of a failed transfer. No thread
/// of the driver waits for the network, if streams can wait for a word of memory, and none calls
/// CUDA.
///
/// A stream that is held back delays all streams that wait for it. So the transfer, here and at the
/// peer, must not wait for that stream: the copies of this crate use streams of their own that wait
/// for no others.
#[derive(Clone, Debug)]
pub struct StreamOrder {
    driver: Arc<CudaDriver>,
    runtime: Handle,
    flags: Arc<Flags>,
    state: Arc<OrderState>,
}

#[derive(Debug, Default)]
struct OrderState {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    in_progress: usize,
    failed: Option<Error>,
}

/// Transfer in stream order. However it is dropped, the stream continues.
#[derive(Debug)]
pub struct Ordered {
    state: Arc<OrderState>,
    result: Option<Result<()>>,
    hold: Option<Hold>,
}

impl Drop for Ordered {
    fn drop(&mut self) {
        let dropped = || Err(Error::internal("transfer in stream order was dropped: its runtime has ended"));
        let result = self.result.take().unwrap_or_else(dropped);
        let mut progress = self.state.progress.lock();
        if let Err(error) = result {
            tracing::warn!(%error, "transfer in stream order failed");
            progress.failed.get_or_insert(error);
        }
        progress.in_progress -= 1;
        drop(progress);
        // The error is stored first: a caller that sees the stream continue also finds the error.
        self.hold = None;
        self.state.changed.notify_all();
    }
}

impl StreamOrder {
    /// Creates the order. Transfers are awaited on that runtime.
    pub fn new(driver: Arc<CudaDriver>, runtime: &Handle) -> Self {
        Self { driver, runtime: runtime.clone(), flags: Arc::default(), state: Arc::default() }
    }

    /// Runs `transfer` on the runtime after the current work of the stream, and delays later work
    /// of the stream until the transfer has ended, successfully or not. Returns at once. The
    /// transfer must do nothing before its first poll (as an `async` block), and must not block.
    ///
    /// The stream waits for the transfer at most `limit` from its beginning. After that, the
    /// transfer counts as failed, and the stream continues. The transfer still runs to its end, and
    /// may still touch the memory, which it keeps: a device cannot release it on request.
    ///
    /// # Errors
    /// Returns the error of the first earlier transfer that failed and was not reported yet; this
    /// transfer then does not begin. Returns `NOT_SUPPORTED` without a driver, and for a stream
    /// that is being captured, and `INVALID_PARAMS` for an invalid stream.
    ///
    /// # Safety
    /// `stream` is a `CUstream` (a `cudaStream_t`), or 0 for the default one, and lives until the
    /// transfer has ended.
    pub unsafe fn after_stream(
        &self,
        stream: u64,
        limit: Duration,
        transfer: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        self.check()?;
        // SAFETY: promised by the caller.
        let stream = unsafe { StreamRef::new(self.driver.cuda()?, stream, None) }?;
        let mark = stream.mark()?;
        let hold = stream.hold(&self.flags)?;
        self.state.progress.lock().in_progress += 1;
        let mut ordered = Ordered { state: self.state.clone(), result: None, hold: Some(hold) };
        let (sender, before) = oneshot::channel();
        let on_complete = move |result| {
            let _ = sender.send(result);
        };
        Poller::shared().watch(mark, Box::new(on_complete));
        self.runtime.spawn(async move {
            let before = match before.await {
                Ok(before) => before.map_err(|error| error.context("work of the stream before the transfer")),
                Err(_) => Err(Error::internal("the thread that waits for devices has ended")),
            };
            if let Err(error) = before {
                ordered.result = Some(Err(error));
                return drop(ordered);
            }
            let mut transfer = std::pin::pin!(transfer);
            let in_time = tokio::time::timeout(limit, &mut transfer).await;
            let has_ended = in_time.is_ok();
            ordered.result = Some(in_time.unwrap_or_else(|_| Err(limit_error(limit))));
            drop(ordered);
            if !has_ended && let Err(error) = transfer.await {
                tracing::debug!(%error, "transfer failed after its stream had continued");
            }
        });
        Ok(())
    }

    /// Reports the first failure that was not reported yet, once.
    ///
    /// # Errors
    /// Returns that failure.
    pub fn check(&self) -> Result<()> {
        self.state.progress.lock().failed.take().map_or(Ok(()), Err)
    }

    /// Returns the number of transfers that wait for their stream, or are in progress.
    pub fn in_progress(&self) -> usize {
        self.state.progress.lock().in_progress
    }

    /// Waits until no transfer is in progress, and reports failures as [`check`](Self::check) does.
    ///
    /// # Errors
    /// Returns the error of [`check`](Self::check).
    pub fn wait_for_all(&self) -> Result<()> {
        let mut progress = self.state.progress.lock();
        while progress.in_progress > 0 {
            self.state.changed.wait(&mut progress);
        }
        progress.failed.take().map_or(Ok(()), Err)
    }
}

fn limit_error(limit: Duration) -> Error {
    let text =
        format!("transfer in stream order did not end within {limit:?}; the stream continues without it");
    Error::new(ErrorCode::RpcTimeout, text)
}
