//! Memory of this client that the master wants zeroed, before it grants the memory to a writer that
//! must not see bytes of other tenants.

use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::{ErrorCode, Result};
use mooncake_protocol::master_client::is_missing_call;
use mooncake_protocol::message::FetchZeroWork;
use mooncake_protocol::wire::ZeroExtent;
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::mounted::Mounted;
use crate::state::Inner;

/// Bytes that are zeroed at a time.
static ZEROES: [u8; 256 << 10] = [0; 256 << 10];
/// Part of the time between two heartbeats after which no further work is requested: one in this
/// number.
const TIME_DIVISOR: u32 = 10;

impl<T: Transport> Inner<T> {
    /// Zeroes what the master requests, and reports it. A request without a report is repeated, so
    /// a failure has no other effect than that the memory stays unused.
    pub(crate) async fn zero_requested(&self, deadline: &Deadline) -> Result<()> {
        if self.zeroes_nothing.load(Relaxed) || self.segments.lock().is_empty() {
            return Ok(());
        }
        // No segment is mounted again meanwhile. To another master the extents are free, and it
        // grants them to writers.
        let _unchanged = self.changing(deadline).await?;
        let clock = &self.config.clock;
        let stop = clock.now().after(self.config.ping_interval / TIME_DIVISOR);
        let mut done = Vec::new();
        loop {
            // A number is reported once: the same request may come again after a lost response.
            let call = self.master.call(FetchZeroWork { client: self.id, zeroed: done.into() });
            let work = match deadline.bound("request for memory to zero", call).await {
                Ok(work) if work.needed => work,
                Err(error) if !is_missing_call(&error) => return Err(error),
                // The next master may need it.
                _ => {
                    self.zeroes_nothing.store(true, Relaxed);
                    return Ok(());
                }
            };
            if work.extents.is_empty() || clock.now() >= stop {
                return Ok(());
            }
            done = Vec::with_capacity(work.extents.len());
            for extent in &work.extents {
                match self.zero(extent).await {
                    Ok(()) => done.push(extent.number),
                    Err(error) => tracing::debug!(client = %self.id, "memory was not zeroed: {error}"),
                }
            }
            if done.is_empty() {
                return Ok(());
            }
        }
    }

    /// Zeroes one extent. The engine refuses memory that is not mounted any more.
    async fn zero(&self, extent: &ZeroExtent) -> Result<()> {
        let mounted = |mounted: &&Mounted<T>| mounted.id() == extent.segment;
        let base = self.segments.lock().iter().find(mounted).map(|mounted| mounted.segment.base);
        let mut at = base.ok_or(ErrorCode::SegmentNotFound)?.saturating_add(extent.offset);
        let end = at.saturating_add(extent.len);
        while at < end {
            let len = usize::try_from(end - at).map_or(ZEROES.len(), |left| left.min(ZEROES.len()));
            self.engine.overwrite(at, &ZEROES[..len])?;
            at += len as u64;
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}
