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

    /// Records a failed transfer. After a timeout its bytes may still arrive.
    pub(crate) fn lose(&mut self, error: Error) {
        self.late |= error.kind() == ErrorKind::Timeout;
        self.fail(error);
    }
}

/// Puts between their start and their end. If dropped before the end, it waits in the background
/// for the transfers in progress and then revokes the grants.
pub(crate) struct Writing<'a, T: Transport> {
    pub(crate) client: &'a Arc<Inner<T>>,
    pub(crate) deadline: &'a Deadline,
    pub(crate) attempt: Attempt,
    /// Keys of the request for space that has no response yet.
    pub(crate) asking: Vec<&'a [u8]>,
    pub(crate) grants: Vec<Grant<'a>>,
    pub(crate) targets: Vec<Target>,
    pub(crate) endpoints: Vec<String>,
    /// Look-ups that the engine had made before the request for space.
    pub(crate) known: LookUps,
    /// Connections to the targets, in the order of `endpoints`.
    pub(crate) peers: Vec<Result<engine::Target<T>>>,
    pub(crate) flights: VecDeque<Flight<T>>,
    /// True if some replica is of a kind that this client does not write.
    pub(crate) others: bool,
}

/// Replica to write.
pub(crate) struct Target {
    /// Index of the grant.
    pub(crate) grant: usize,
    /// Index of the endpoint.
    pub(crate) peer: usize,
    /// First address of the replica at that endpoint.
    pub(crate) remote: u64,
}

/// A submission in progress.
pub(crate) struct Flight<T: Transport> {
    pub(crate) results: Results<Vec<Request<T, Outgoing<T>>>>,
    /// Grant and endpoint of each transfer.
    pub(crate) of: Vec<(usize, usize)>,
}

impl<T: Transport> Flight<T> {
    /// Waits for all transfers. Returns the outcome of each with its grant.
    pub(crate) async fn landed(self) -> impl Iterator<Item = (usize, Result<()>)> {
        let (results, _) = self.results.await;
        self.of.into_iter().map(|(grant, _)| grant).zip(results)
    }
}
