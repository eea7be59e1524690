//! Batches by number, for callers that cannot hold a future: the C interface and Python.

use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Opcode;
use mooncake_transport::engine::{Batch, EngineCode, Finished, Progress, Status, Target};
use mooncake_transport::handshake::Notification;
use tokio::sync::watch;

use crate::batches::{BatchPart, POSTING};
use crate::engine::TransferEngine;
use crate::transport_set::TransportSet;

/// Number that no batch has.
pub const INVALID_BATCH: u64 = u64::MAX;
/// Number of the next batch of any engine in this process, so that engines do not share numbers.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Request that names local memory by its address.
#[derive(Clone, Debug)]
pub struct AddressRequest {
    /// Direction.
    pub opcode: Opcode,
    /// Local address, in registered or managed memory.
    pub local: u64,
    /// Remote side.
    pub target: Target<TransportSet>,
    /// Address in the other process.
    pub remote: u64,
    /// Length in bytes. A request of length 0 succeeds without a transfer, at any addresses.
    pub len: usize,
}

impl TransferEngine {
    /// Transfers requests on the caller's task, without a batch number, and returns when all have
    /// ended. If all succeed, sends the notification to the first request's target. The default
    /// deadline is [the engine's](Self::timeout_for).
    ///
    /// # Errors
    /// Returns the first failure, also that of the notification, and
    /// [`EngineCode::AddressNotRegistered`] for local memory that is not registered.
    pub async fn transfer(
        &self,
        requests: &[AddressRequest],
        notify: Option<Notification>,
        deadline: Option<Moment>,
    ) -> Result<()> {
        let deadline = deadline.unwrap_or_else(|| self.deadline_for(requests));
        let (batch, _) = self.batch_of(requests, notify)?;
        let Finished { results, notified, .. } = self.submit(batch, Some(deadline)).await;
        let outcomes = results.into_iter().chain(notified).collect::<Vec<_>>();
        self.parts.failures.record(&outcomes);
        outcomes.into_iter().collect()
    }

    /// Returns the default deadline of requests that are made now.
    fn deadline_for(&self, requests: &[AddressRequest]) -> Moment {
        let bytes = requests.iter().fold(0u64, |sum, request| sum.saturating_add(request.len as u64));
        self.clock().now().after(self.timeout_for(bytes))
    }

    /// Allocates a batch for up to `capacity` requests. Returns its number, which is never zero and
    /// never reused.
    ///
    /// Batches that are never freed are bounded: above 65,536 batches or 4,194,304 requests, the
    /// oldest batches that have ended are dropped, and their numbers become unknown.
    pub fn allocate_batch(&self, capacity: usize) -> u64 {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.parts.batches.add(id, capacity);
        id
    }

    /// Posts requests as the next ones of a batch, and returns at once. If all of *these* requests
    /// succeed, sends the notification to the first request's target. The default deadline is [the
    /// engine's](Self::timeout_for).
    ///
    /// # Errors
    /// Returns [`EngineCode::TooManyRequests`] if the batch has not enough capacity,
    /// [`EngineCode::AddressNotRegistered`] for local memory that is not registered, and
    /// `INVALID_PARAMS` for a freed or foreign number. Nothing is sent then.
    pub fn submit_batch(
        &self,
        id: u64,
        requests: &[AddressRequest],
        notify: Option<Notification>,
        deadline: Option<Moment>,
    ) -> Result<()> {
        let deadline = deadline.unwrap_or_else(|| self.deadline_for(requests));
        let notifies = notify.is_some();
        let (batch, numbers) = self.batch_of(requests, notify)?;
        // The requests get their numbers first. The posting comes afterwards, because it must not
        // delay other batches.
        let part = self.parts.batches.with(id, |entry| {
            if entry.requests.len() + requests.len() > entry.capacity {
                let (have, more) = (entry.requests.len(), requests.len());
                let text = format!(
                    "cannot submit to batch {id}: too many requests. capacity={} submitted={have} more={more}",
                    entry.capacity
                );
                return Err(
                    Error::new(ErrorCode::InvalidParams, text).with_engine_code(EngineCode::TooManyRequests)
                );
            }
            let part = entry.parts.len();
            entry.requests.extend(numbers.into_iter().map(|number| number.map(|number| (part, number))));
            entry.parts.push(None);
            Ok(part)
        })?;
        let posted = self.post_part(batch, notifies, deadline);
        self.parts.batches.with(id, |entry| {
            if let Some(slot) = entry.parts.get_mut(part) {
                *slot = Some(posted);
            }
            Ok(())
        })
    }

    fn post_part(&self, batch: Batch<TransportSet>, notifies: bool, deadline: Moment) -> BatchPart {
        let running = self.submit(batch, Some(deadline));
        let view = running.view();
        let (sender, outcome) = watch::channel(None);
        let failures = self.parts.failures.clone();
        let task = self.parts.runtime.spawn(async move {
            let Finished { results, buffers, notified } = running.await;
            // The memory is released before the result is published, so that the program can free
            // it then.
            drop(buffers);
            let outcomes = results.into_iter().chain(notified).collect::<Vec<_>>();
            failures.record(&outcomes);
            let failed = outcomes.into_iter().find_map(Result::err);
            let outcome = failed.map_or(Ok(()), |error| Err((error.code(), error.message().to_owned())));
            sender.send_replace(Some(outcome));
        });
        BatchPart { view, outcome, task: task.abort_handle(), notifies }
    }

    /// Returns the progress of a request of a batch.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a freed or foreign number, and for a request that was not
    /// submitted.
    pub fn request_progress(&self, id: u64, index: usize) -> Result<Progress> {
        self.parts.batches.with(id, |entry| {
            let missing = || Error::invalid(format!("batch {id} has no request {index}"));
            entry.request(index).ok_or_else(missing)
        })
    }

    /// Returns the progress of a batch: completed when all its requests are, failed as soon as one
    /// has failed.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a freed or foreign number.
    pub fn batch_progress(&self, id: u64) -> Result<Progress> {
        self.parts.batches.with(id, |entry| {
            let parts = entry.parts.iter().map(|part| part.as_ref().map_or(POSTING, BatchPart::overall));
            Ok(parts.fold(Progress { status: Status::Completed, transferred: 0 }, Progress::and))
        })
    }

    /// Returns whether every request of a batch and its notification have ended.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a freed or foreign number.
    pub fn is_batch_finished(&self, id: u64) -> Result<bool> {
        self.parts.batches.with(id, |entry| Ok(entry.is_finished()))
    }

    /// Waits until every request of a batch has ended.
    ///
    /// # Errors
    /// Returns the first failure, also that of a notification, and `INVALID_PARAMS` for a freed or
    /// foreign number.
    pub async fn finish_batch(&self, id: u64) -> Result<()> {
        let parts = self.parts.batches.with(id, |entry| {
            Ok(entry.parts.iter().flatten().map(|part| part.outcome.clone()).collect::<Vec<_>>())
        })?;
        let mut failed = None;
        for mut part in parts {
            let outcome = match part.wait_for(Option::is_some).await {
                Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
                Err(_) => Err((ErrorCode::TransferFail, "the batch was cancelled".into())),
            };
            failed = failed.or(outcome.err());
        }
        failed.map_or(Ok(()), |(code, text)| Err(Error::new(code, text)))
    }

    /// Cancels the requests of a batch that are not sent yet. Failed requests are not repeated, and
    /// no notification is sent. Operations in progress continue to their end, so the batch may stay
    /// busy for a while.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a freed or foreign number.
    pub fn cancel_batch(&self, id: u64) -> Result<()> {
        self.parts.batches.with(id, |entry| {
            entry.parts.iter().flatten().for_each(|part| part.view.cancel());
            Ok(())
        })
    }

    /// Frees a batch that has ended.
    ///
    /// # Errors
    /// Returns [`EngineCode::BatchBusy`] for a batch in progress, which stays. Returns
    /// `INVALID_PARAMS` for a freed or foreign number.
    pub fn free_batch(&self, id: u64) -> Result<()> {
        self.parts.batches.with(id, |entry| {
            if entry.is_finished() {
                return Ok(());
            }
            let text = format!("cannot free batch {id}: it is in progress");
            Err(Error::new(ErrorCode::ObjectReplicaBusy, text).with_engine_code(EngineCode::BatchBusy))
        })?;
        self.parts.batches.remove(id);
        Ok(())
    }

    /// Converts requests into a batch. Returns it with the number of each request in it.
    fn batch_of(
        &self,
        requests: &[AddressRequest],
        notify: Option<Notification>,
    ) -> Result<(Batch<TransportSet>, Vec<Option<usize>>)> {
        let mut batch = Batch::new();
        let mut numbers = Vec::with_capacity(requests.len());
        for AddressRequest { opcode, local, target, remote, len } in requests {
            if *len == 0 {
                numbers.push(None);
                continue;
            }
            let slice = self.parts.regions.slice_mut(*local, *len)?;
            numbers.push(Some(match opcode {
                Opcode::Read => batch.read(target, *remote, slice),
                Opcode::Write => batch.write(target, *remote, slice),
            }));
        }
        if let Some(notification) = notify {
            match requests.first() {
                Some(first) => batch.notify(&first.target, notification),
                None => {
                    return Err(Error::invalid("cannot send notification: the batch has no target"));
                }
            }
        }
        Ok((batch, numbers))
    }
}
