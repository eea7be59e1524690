//! Transfers of one call that writes ranges.

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{ErrorKind, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::ticket::Results;
use mooncake_transport::{Slice, Transport};
use std::sync::Arc;

use super::reservation::{RangeWrite, Reservation, refused};
use crate::attempt::Attempt;
use crate::state::Inner;

/// The transfers of one call, and the client and the range of each transfer.
type Transfers<T> = (Vec<(usize, usize)>, Results<Vec<Request<T, Slice<T>>>>);

/// Writes of one call of [`ClientRanges::write`](super::ClientRanges::write). If they are dropped
/// before the end, their ranges stay unwritten.
pub(super) struct Flight<'a, T: Transport> {
    client: &'a Arc<Inner<T>>,
    writes: &'a [RangeWrite<'a, T>],
    /// Number of each range while its write is open, and whether its bytes may arrive after its
    /// end.
    open: Vec<(Option<u64>, bool)>,
    transfers: Option<Transfers<T>>,
}

impl<'a, T: Transport> Flight<'a, T> {
    /// Records the beginning of every write that is not refused. Refuses writes to closed
    /// reservations.
    pub(super) fn begin(
        client: &'a Arc<Inner<T>>,
        writes: &'a [RangeWrite<'a, T>],
        outcomes: &mut [Result<()>],
    ) -> Self {
        let begin = |(write, outcome): (&RangeWrite<'_, T>, &mut Result<()>)| {
            // A range outside its object does not make the object incomplete.
            if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Invalid) {
                return (None, false);
            }
            let end = write.offset.saturating_add(write.from.len() as u64);
            let number = write.object.written.begin(write.offset..end);
            if number.is_none() && outcome.is_ok() {
                *outcome = Err(refused(&write.object.key, "it was committed or given back"));
            }
            (number, false)
        };
        let open = writes.iter().zip(outcomes).map(begin).collect();
        Self { client, writes, open, transfers: None }
    }

    /// Stores the transfers, so that they are waited for even if the call is dropped.
    pub(super) fn post(&mut self, of: Vec<(usize, usize)>, results: Results<Vec<Request<T, Slice<T>>>>) {
        self.transfers = Some((of, results));
    }

    /// Waits for all transfers. Returns the client, the range and the outcome of each.
    pub(super) async fn landed(&mut self) -> impl Iterator<Item = ((usize, usize), Result<()>)> + use<T> {
        let results = match &mut self.transfers {
            Some((_, results)) => results.await.0,
            None => Vec::new(),
        };
        let of = self.transfers.take().map_or_else(Vec::new, |(of, _)| of);
        of.into_iter().zip(results)
    }

    /// Records the outcome of one transfer of a range.
    pub(super) fn note(&mut self, write: usize, result: &Result<()>) {
        self.open[write].1 |= is_late(result);
    }

    /// Records the end of all writes.
    pub(super) fn end(mut self, outcomes: &[Result<()>]) {
        for ((number, may_land), (write, outcome)) in
            self.open.drain(..).zip(self.writes.iter().zip(outcomes))
        {
            if let Some(number) = number {
                write.object.written.end(number, outcome.is_ok(), may_land);
            }
        }
        self.give_back();
    }

    /// Returns the space of reservations that were given up during the writes.
    fn give_back(&self) {
        for write in self.writes {
            if write.object.written.take_given_up() {
                let Reservation { key, attempt, .. } = write.object;
                self.client.runtime.spawn(revoke(self.client.clone(), *attempt, key.clone()));
            }
        }
    }
}

impl<T: Transport> Drop for Flight<'_, T> {
    fn drop(&mut self) {
        let open = std::mem::take(&mut self.open).into_iter().enumerate();
        let mut open: Vec<_> = open
            .filter_map(|(write, (number, late))| {
                let Reservation { key, attempt, written, .. } = self.writes[write].object;
                Some((write, number?, late, written.clone(), key.clone(), *attempt))
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
            if let Some((of, results)) = transfers {
                for ((_, landed), result) in of.into_iter().zip(results.await.0) {
                    let of_range = open.iter_mut().filter(|(write, ..)| *write == landed);
                    of_range.for_each(|(_, _, late, ..)| *late |= is_late(&result));
                }
            }
            // The caller has not received a success, so the ranges stay unwritten.
            open.iter().for_each(|(_, number, late, written, ..)| written.end(*number, false, *late));
            for (_, _, _, written, key, attempt) in open {
                if written.take_given_up() {
                    revoke(client.clone(), attempt, key).await;
                }
            }
        });
    }
}

async fn revoke<T: Transport>(client: Arc<Inner<T>>, attempt: Attempt, key: Vec<u8>) {
    attempt.revoke_until_heard(&client, &[&key]).await;
}

fn is_late(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout)
}
