//! Transfers in the order of a stream, over whatever wire: they begin when the stream's work so far is over, and the stream goes on when they are.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::cuda::{Flags, Hold, StreamRef};
use crate::driver::CudaDriver;
use crate::poller::Poller;

/// Puts transfers in order with streams. What fails is kept and told at the next call; no thread of the driver's waits for the network, where the driver can
/// have a stream wait for a word of memory, and none calls CUDA.
///
/// A stream that is held back holds back all that waits for it. So the transfer, here and on the peer's side, must not wait for it in turn: copies of this
/// crate are made on streams of their own that wait for no others.
#[derive(Clone, Debug)]
pub struct StreamOrder {
    driver: Arc<CudaDriver>,
    runtime: Handle,
    flags: Arc<Flags>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    kept: Mutex<Kept>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Kept {
    under_way: usize,
    failed: Option<Error>,
}

/// One transfer in its order. Dropped in whatever way, the stream goes on.
#[derive(Debug)]
pub struct Ordered {
    state: Arc<State>,
    result: Option<Result<()>>,
    hold: Option<Hold>,
}

impl Drop for Ordered {
    fn drop(&mut self) {
        let dropped =
            || Err(Error::internal("a transfer in stream order was dropped: its runtime has ended"));
        let result = self.result.take().unwrap_or_else(dropped);
        let mut kept = self.state.kept.lock();
        if let Err(error) = result {
            tracing::warn!(%error, "a transfer in stream order failed");
            kept.failed.get_or_insert(error);
        }
        kept.under_way -= 1;
        drop(kept);
        // After the error is there: who sees the stream go on sees it too.
        self.hold = None;
        self.state.changed.notify_all();
    }
}

impl StreamOrder {
    /// Transfers are waited for on that runtime.
    pub fn new(driver: Arc<CudaDriver>, runtime: &Handle) -> Self {
        Self { driver, runtime: runtime.clone(), flags: Arc::default(), state: Arc::default() }
    }

    /// Has `transfer` run on the runtime when the work is over that the stream has now, and has the stream's further work wait until it is over, well or not.
    /// Returns at once. It must not do anything before it is first polled (an `async` block does not), nor block.
    ///
    /// The stream waits for it no longer than `limit` from when it begins. If it is not over then, that is a failure, and the stream goes on; the transfer is seen through
    /// all the same, and may still touch the memory, which it keeps: a device cannot be told to let go of it.
    ///
    /// # Errors
    /// That of the first transfer before that failed and was not yet told: this one is not begun then. `NOT_SUPPORTED` without a driver, and for a stream that
    /// is being captured; `INVALID_PARAMS` for what is no stream.
    ///
    /// # Safety
    /// `stream` is a `CUstream` (a `cudaStream_t`), 0 for the default one, that lives until the transfer is over.
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
        self.state.kept.lock().under_way += 1;
        let mut ordered = Ordered { state: self.state.clone(), result: None, hold: Some(hold) };
        let (tell, told) = oneshot::channel();
        let over = move |result| {
            let _ = tell.send(result);
        };
        Poller::shared().watch(mark, Box::new(over));
        self.runtime.spawn(async move {
            let before = match told.await {
                Ok(before) => before.map_err(|error| error.context("the stream's work before the transfer")),
                Err(_) => Err(Error::internal("nobody waits for streams any more")),
            };
            if let Err(error) = before {
                ordered.result = Some(Err(error));
                return drop(ordered);
            }
            let mut transfer = std::pin::pin!(transfer);
            let in_time = tokio::time::timeout(limit, &mut transfer).await;
            let is_over = in_time.is_ok();
            ordered.result = Some(in_time.unwrap_or_else(|_| Err(late(limit))));
            drop(ordered);
            if !is_over && let Err(error) = transfer.await {
                tracing::debug!(%error, "a transfer for which its stream did not wait any longer");
            }
        });
        Ok(())
    }

    /// Tells the first failure that was not yet told, once.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> Result<()> {
        self.state.kept.lock().failed.take().map_or(Ok(()), Err)
    }

    /// Transfers that are waiting for their stream, or under way.
    pub fn under_way(&self) -> usize {
        self.state.kept.lock().under_way
    }

    /// Waits until none is under way, and tells as [`check`](Self::check) does.
    ///
    /// # Errors
    /// As there.
    pub fn settle(&self) -> Result<()> {
        let mut kept = self.state.kept.lock();
        while kept.under_way > 0 {
            self.state.changed.wait(&mut kept);
        }
        kept.failed.take().map_or(Ok(()), Err)
    }
}

fn late(limit: Duration) -> Error {
    let text =
        format!("a transfer in stream order was not over after {limit:?}; the stream goes on without it");
    Error::new(ErrorCode::RpcTimeout, text)
}
