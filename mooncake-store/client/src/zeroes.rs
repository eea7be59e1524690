//! Memory of this client that the master wants zeroed, before it grants the memory to a writer that
//! must not see bytes of other tenants.

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use mooncake_core::{ErrorCode, Result};
use mooncake_protocol::master_client::is_missing_call;
use mooncake_protocol::message::FetchZeroWork;
use mooncake_protocol::wire::ZeroExtent;
use mooncake_transport::Transport;
use mooncake_transport::engine::Request;

use crate::deadline::Deadline;
use crate::mounted::Mounted;
use crate::state::Inner;

/// Number of bytes that are zeroed at a time.
const CHUNK: usize = 1 << 20;
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
                match self.zero(extent, deadline).await {
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
    async fn zero(&self, extent: &ZeroExtent, deadline: &Deadline) -> Result<()> {
        let mounted = |mounted: &&Mounted<T>| mounted.id() == extent.segment;
        let base = self.segments.lock().iter().find(mounted).map(|mounted| mounted.segment.base);
        let start = base.ok_or(ErrorCode::SegmentNotFound)?.saturating_add(extent.offset);
        let own = deadline.bound("connecting to the own memory", self.engine.open(&self.endpoint)).await?;
        let len = usize::try_from(extent.len).unwrap_or(usize::MAX);
        let zeroes = Bytes::from(vec![0; len.min(CHUNK)]);
        let mut at = 0;
        while at < len {
            let part = zeroes.slice(..zeroes.len().min(len - at));
            let next = at + part.len();
            let request = Request::new(&own, start.saturating_add(at as u64), part);
            let (results, _) = self.engine.write_batch(vec![request], Some(deadline.portion(7, 8))).await;
            results.into_iter().collect::<Result<()>>()?;
            at = next;
        }
        Ok(())
    }
}
