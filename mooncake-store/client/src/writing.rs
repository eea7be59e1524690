//! State of a put between the grant of space and the call that ends it.

use mooncake_core::{Error, ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::Request;
use mooncake_transport::engine::{self, LookUps};
use mooncake_transport::ticket::Results;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::attempt::Attempt;
use crate::buffers::Outgoing;
use crate::deadline::Deadline;
use crate::offload::FileGrant;
use crate::state::Inner;

/// Granted space whose write has neither ended nor been revoked.
pub(crate) struct Grant<'a> {
    /// Index of the item that the space is for.
    pub(crate) item: usize,
    pub(crate) key: &'a [u8],
    /// Checksum of the value, if this client computes checksums.
    pub(crate) checksum: Option<u64>,
    /// Reason why the bytes were not written.
    pub(crate) failure: Option<Error>,
    /// Index of the endpoint that failed first.
    pub(crate) failed_at: Option<usize>,
    /// True if bytes may still arrive in the space.
    pub(crate) late: bool,
    /// True if the write has ended, was revoked, or is left to the master.
    pub(crate) settled: bool,
    /// File that also stores the value.
    pub(crate) file: Option<FileGrant>,
}

impl Grant<'_> {
    /// Records a failure after which no byte can arrive any more.
    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// Records a failure of the client at an endpoint.
    pub(crate) fn fail_at(&mut self, peer: usize, error: Error) {
        if self.failure.is_none() {
            self.failed_at = Some(peer);
        }
        self.fail(error);
    }

    /// Records a failed transfer to an endpoint. After a timeout its bytes may still arrive.
    pub(crate) fn fail_transfer(&mut self, peer: usize, error: Error) {
        self.late |= error.kind() == ErrorKind::Timeout;
        self.fail_at(peer, error);
    }
}

/// Puts between their start and their end. If dropped before the end, it waits in the background
/// for the transfers in progress and then revokes the grants.
pub(crate) struct Writing<'a, T: Transport> {
    pub(crate) client: &'a Arc<Inner<T>>,
    pub(crate) deadline: &'a Deadline,
    pub(crate) attempt: Attempt,
    /// Keys of the request for space that has no response yet.
    pub(crate) unanswered_keys: Vec<&'a [u8]>,
    pub(crate) grants: Vec<Grant<'a>>,
    pub(crate) targets: Vec<ReplicaTarget>,
    pub(crate) endpoints: Vec<String>,
    /// Look-ups that the engine had made before the request for space.
    pub(crate) look_ups: LookUps,
    /// Connections to the targets, in the order of `endpoints`.
    pub(crate) peers: Vec<Result<engine::Target<T>>>,
    pub(crate) submissions: VecDeque<Submission<T>>,
    /// True if some replica is of a kind that this client does not write.
    pub(crate) has_other_replicas: bool,
}

/// Replica to write.
pub(crate) struct ReplicaTarget {
    /// Index of the grant.
    pub(crate) grant: usize,
    /// Index of the endpoint.
    pub(crate) peer: usize,
    /// First address of the replica at that endpoint.
    pub(crate) remote: u64,
}

/// A submission in progress.
pub(crate) struct Submission<T: Transport> {
    pub(crate) results: Results<Vec<Request<T, Outgoing<T>>>>,
    /// Grant and endpoint of each transfer.
    pub(crate) targets: Vec<(usize, usize)>,
}

impl<T: Transport> Submission<T> {
    /// Waits for all transfers. Returns the outcome of each with its grant.
    pub(crate) async fn landed(self) -> impl Iterator<Item = (usize, Result<()>)> {
        let (results, _) = self.results.await;
        self.targets.into_iter().map(|(grant, _)| grant).zip(results)
    }
}
