//! Transfers of one call that writes ranges.

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{ErrorKind, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::ticket::Results;
use mooncake_transport::{Slice, Transport};
use std::sync::Arc;

use super::reservation::{RangeWrite, Reservation, refused, too_old};
use super::written::{GrantedSpace, StartedWrite};
use crate::attempt::{Attempt, UNFENCED_GRANT_LIFETIME};
use crate::state::Inner;

/// The transfers of one call, and the client and the range of each transfer.
type Transfers<T> = (Vec<(usize, usize)>, Results<Vec<Request<T, Slice<T>>>>);

/// Writes of one call of [`ClientRanges::write`](super::ClientRanges::write). If they are dropped
/// before the end, their ranges stay unwritten.
pub(super) struct WriteBatch<'a, T: Transport> {
    client: &'a Arc<Inner<T>>,
    writes: &'a [RangeWrite<'a, T>],
    /// Number and space of each range while its write is open, and whether its bytes may arrive
    /// after its end.
    open: Vec<(Option<StartedWrite>, bool)>,
    transfers: Option<Transfers<T>>,
}

impl<'a, T: Transport> WriteBatch<'a, T> {
    /// Records the beginning of every write that is not refused. Refuses writes to closed
    /// reservations.
    pub(super) fn begin(
        client: &'a Arc<Inner<T>>,
        writes: &'a [RangeWrite<'a, T>],
        outcomes: &mut [Result<()>],
        now: Moment,
    ) -> Self {
        let begin = |(write, outcome): (&RangeWrite<'_, T>, &mut Result<()>)| {
            // A range outside its object does not make the object incomplete.
            if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Invalid) {
                return (None, false);
            }
            let end = write.offset.saturating_add(write.from.len() as u64);
            let started = write.object.written.begin(write.offset..end);
            let refusal = match &started {
                Ok((_, space)) if now.since(space.attempt.requested_at) > UNFENCED_GRANT_LIFETIME => {
                    Some(too_old(&write.object.key))
                }
                Ok(_) => None,
                Err(why) => Some(refused(&write.object.key, *why)),
            };
            if let Some(error) = refusal.filter(|_| outcome.is_ok()) {
                *outcome = Err(error);
            }
            (started.ok(), false)
        };
        let open = writes.iter().zip(outcomes).map(begin).collect();
        Self { client, writes, open, transfers: None }
    }

    /// Returns the space that a range is written to, if its write is open.
    pub(super) fn space(&self, write: usize) -> Option<&Arc<GrantedSpace>> {
        self.open[write].0.as_ref().map(|(_, space)| space)
    }

    /// Returns the numbers of those writes that are open. Returns `None` if bytes of one of them
    /// may still arrive.
    pub(super) fn numbers_of(&self, writes: &[usize]) -> Option<Vec<u64>> {
        let open = writes.iter().filter_map(|&write| match &self.open[write] {
            (Some((number, _)), may_land) => Some((*number, *may_land)),
            (None, _) => None,
        });
        open.map(|(number, may_land)| (!may_land).then_some(number)).collect()
    }

    /// Lets those writes that are open use the new space of their object.
    pub(super) fn move_to(&mut self, writes: &[usize], space: &Arc<GrantedSpace>) {
        for &write in writes {
            if let Some((_, used)) = &mut self.open[write].0 {
                *used = space.clone();
            }
        }
    }

    /// Stores the transfers, so that they are waited for even if the call is dropped.
    pub(super) fn post(&mut self, targets: Vec<(usize, usize)>, results: Results<Vec<Request<T, Slice<T>>>>) {
        self.transfers = Some((targets, results));
    }

    /// Waits for all transfers. Returns the client, the range and the outcome of each.
    pub(super) async fn landed(&mut self) -> impl Iterator<Item = ((usize, usize), Result<()>)> + use<T> {
        let results = match &mut self.transfers {
            Some((_, results)) => results.await.0,
            None => Vec::new(),
        };
        let targets = self.transfers.take().map_or_else(Vec::new, |(targets, _)| targets);
        targets.into_iter().zip(results)
    }

    /// Records the outcome of one transfer of a range.
    pub(super) fn record_outcome(&mut self, write: usize, result: &Result<()>) {
        self.open[write].1 |= is_timeout(result);
    }

    /// Records the end of all writes.
    pub(super) fn end(mut self, outcomes: &[Result<()>]) {
        for ((number, may_land), (write, outcome)) in
            self.open.drain(..).zip(self.writes.iter().zip(outcomes))
        {
            if let Some((number, _)) = number {
                write.object.written.end(number, outcome.is_ok(), may_land);
            }
        }
        self.give_back();
    }

    /// Returns the space of reservations that were given up during the writes.
    fn give_back(&self) {
        for write in self.writes {
            if let Some(attempt) = write.object.written.take_given_up() {
                let key = write.object.key.clone();
                self.client.runtime.spawn(revoke(self.client.clone(), attempt, key));
            }
        }
    }
}

impl<T: Transport> Drop for WriteBatch<'_, T> {
    fn drop(&mut self) {
        let open = std::mem::take(&mut self.open).into_iter().enumerate();
        let mut open: Vec<_> = open
            .filter_map(|(write, (started, may_land))| {
                let Reservation { key, written, .. } = self.writes[write].object;
                Some((write, started?.0, may_land, written.clone(), key.clone()))
            })
            .collect();
        if open.is_empty() {
            return;
        }
        if is_planted("session-forgets-dropped-writes") {
            open.iter().for_each(|(_, number, _, written, ..)| written.end(*number, true, false));
            return;
        }
        let client = self.client.clone();
        let transfers = self.transfers.take();
        self.client.runtime.spawn(async move {
            if let Some((targets, results)) = transfers {
                for ((_, landed), result) in targets.into_iter().zip(results.await.0) {
                    // The open writes are in the order of the call.
                    if let Ok(at) = open.binary_search_by_key(&landed, |(write, ..)| *write) {
                        open[at].2 |= is_timeout(&result);
                    }
                }
            }
            // The caller has not received a success, so the ranges stay unwritten.
            open.iter().for_each(|(_, number, may_land, written, ..)| written.end(*number, false, *may_land));
            for (_, _, _, written, key) in open {
                if let Some(attempt) = written.take_given_up() {
                    revoke(client.clone(), attempt, key).await;
                }
            }
        });
    }
}

pub(super) async fn revoke<T: Transport>(client: Arc<Inner<T>>, attempt: Attempt, key: Vec<u8>) {
    attempt.revoke_until_confirmed(&client, &[&key]).await;
}

fn is_timeout(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout)
}
