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
use crate::state::Inner;

/// Granted space that has neither been made readable nor given back.
pub(crate) struct Grant<'a> {
    /// Which item it is for.
    pub(crate) item: usize,
    pub(crate) key: &'a [u8],
    /// Of the value, when this client computes them.
    pub(crate) checksum: Option<u64>,
    /// Why the bytes are not there.
    pub(crate) failure: Option<Error>,
    /// They may still come.
    pub(crate) late: bool,
    /// Readable, given back, or to be left alone.
    pub(crate) settled: bool,
    /// The file that the value is to be in, too.
    pub(crate) file: Option<String>,
}

impl Grant<'_> {
    /// The bytes are not there, and nothing of them is under way.
    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// A transfer failed. The wire answers for its end, unless all it knows is that time is up.
    pub(crate) fn lose(&mut self, error: Error) {
        self.late |= error.kind() == ErrorKind::Timeout;
        self.fail(error);
    }
}

/// Puts between start and end. Dropped before that, it lets what is under way land and then gives the space back.
pub(crate) struct Writing<'a, T: Transport> {
    pub(crate) client: &'a Arc<Inner<T>>,
    pub(crate) deadline: &'a Deadline,
    pub(crate) attempt: Attempt,
    /// Keys that space was asked for, without an answer yet.
    pub(crate) asking: Vec<&'a [u8]>,
    pub(crate) grants: Vec<Grant<'a>>,
    pub(crate) targets: Vec<Target>,
    pub(crate) endpoints: Vec<String>,
    /// What the engine knew before the master was asked for space.
    pub(crate) known: LookUps,
    /// Ways to the members, in the order of `endpoints`.
    pub(crate) peers: Vec<Result<engine::Target<T>>>,
    pub(crate) flights: VecDeque<Flight<T>>,
    /// Some replica is of a kind that is not written from here.
    pub(crate) others: bool,
}

/// One replica to write.
pub(crate) struct Target {
    /// For which grant.
    pub(crate) grant: usize,
    /// At which member.
    pub(crate) peer: usize,
    /// Its first address there.
    pub(crate) remote: u64,
}

/// A submission under way.
pub(crate) struct Flight<T: Transport> {
    pub(crate) results: Results<Vec<Request<T, Outgoing<T>>>>,
    /// Grant and member of each transfer.
    pub(crate) of: Vec<(usize, usize)>,
}

impl<T: Transport> Flight<T> {
    /// Outcome of each transfer, with the grant it was for.
    pub(crate) async fn landed(self) -> impl Iterator<Item = (usize, Result<()>)> {
        let (results, _) = self.results.await;
        self.of.into_iter().map(|(grant, _)| grant).zip(results)
    }
}
