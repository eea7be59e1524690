//! Later leases for objects whose transfers are in progress, so that a batch may take longer than
//! one lease.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{ReplicaList, ReplicaStatus};
use mooncake_protocol::master_client::ReadNumber;
use mooncake_transport::Transport;

use super::{Read, Renewal, ReplicaAttempt};
use crate::deadline::Deadline;
use crate::state::Inner;

/// Shortest pause between two requests for later leases.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// Returns the replicas in progress whose leases may be renewed, by index.
fn renewable<'r, T: Transport>(
    reads: &'r [Read<'_, T>],
    attempts: &'r [ReplicaAttempt],
    now: Moment,
) -> impl Iterator<Item = usize> + 'r {
    let in_progress = move |&index: &usize| {
        let read = &reads[attempts[index].read];
        read.buffer.is_none() && read.loan.is_none() && read.renews && now < read.lease
    };
    (0..attempts.len()).filter(in_progress)
}

impl ReplicaAttempt {
    /// Returns the time until the first lease in progress is to be renewed: half of the rest of the
    /// lease. Returns `None` if there is no such lease.
    pub(super) fn renewal_pause<T: Transport>(
        attempts: &[Self],
        reads: &[Read<'_, T>],
        now: Moment,
    ) -> Option<Duration> {
        let remaining =
            renewable(reads, attempts, now).map(|index| reads[attempts[index].read].lease.since(now));
        remaining.min().map(|time| (time / 2).max(SHORTEST_PAUSE))
    }
}

impl<T: Transport> Inner<T> {
    /// Requests later leases on the objects in progress.
    pub(super) fn request_leases<'f>(
        &'f self,
        number: Option<ReadNumber>,
        reads: &[Read<'f, T>],
        attempts: &[ReplicaAttempt],
        deadline: &'f Deadline,
    ) -> impl Future<Output = Renewal> + Send + use<'f, T> {
        let indices: Vec<usize> = renewable(reads, attempts, self.config.clock.now()).collect();
        let keys: Vec<&'f [u8]> = indices.iter().map(|&index| reads[attempts[index].read].key).collect();
        let last_replicas =
            indices.iter().map(|&index| reads[attempts[index].read].last_replica.unwrap_or(ReplicaId(0)));
        let last_replicas: Vec<ReplicaId> = last_replicas.collect();
        async move {
            let stamp = self.request_stamp();
            let results = match number {
                Some(number) => {
                    deadline.bound("a later lease", self.locate_for_read(&keys, &last_replicas, number)).await
                }
                None => {
                    let call = self.master.locate_again(&self.config.tenant, &keys, &last_replicas);
                    deadline.bound("a later lease", call).await
                }
            };
            if let Err(error) = &results {
                tracing::debug!("no lease was renewed: {error}");
            }
            Renewal { indices, stamp, results }
        }
    }
}

impl Renewal {
    /// Extends the leases of objects whose replicas are still where they are read. A lease that has
    /// ended is not extended, because the space may have been reused in between.
    pub(super) fn apply<T: Transport>(
        self,
        reads: &mut [Read<'_, T>],
        attempts: &[ReplicaAttempt],
        now: Moment,
    ) {
        // Without a response, the master is asked again while the leases last.
        let Ok(results) = self.results else { return };
        for (index, result) in self.indices.into_iter().zip(results) {
            let ReplicaAttempt { read, replica, at, .. } = &attempts[index];
            let read = &mut reads[*read];
            if read.buffer.is_some() {
                continue;
            }
            let stays = |list: &ReplicaList| {
                let same = read.checksum.is_none() || list.checksum == read.checksum;
                same && list.replicas.iter().any(|now| {
                    let complete = now.status == ReplicaStatus::Complete;
                    complete && now.id == *replica && now.location.memory() == Some(at)
                })
            };
            let later = result.ok().filter(stays).map(|list| self.stamp.at.after(list.lease));
            match later.filter(|_| now < read.lease && !is_planted("batches-do-not-renew-leases")) {
                Some(later) => read.lease = read.lease.max(later),
                None => read.renews = false,
            }
        }
    }
}
