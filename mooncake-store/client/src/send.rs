//! Transfer of the bytes of a put to all replicas at the same time, as far as the local buffer
//! allows.

use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, Result};
use mooncake_transport::engine::{self, Request};
use mooncake_transport::{PoolBuf, Transport};

use crate::buffers::{Outgoing, Part};
use crate::deadline::{deadline_exceeded, within};
use crate::errors::transfer_error;
use crate::payload::Item;
use crate::staging::{Chunker, Piece, Staging};
use crate::writing::{Grant, Submission, Writing};

/// Connections to the clients of a put.
type Peers<T> = [Result<engine::Target<T>>];

impl<T: Transport> Writing<'_, T> {
    /// Writes every replica of every grant. Failures are recorded in the grants.
    pub(crate) async fn transfer(&mut self, items: &[Item<'_, T>]) {
        let peers = std::mem::take(&mut self.peers);
        for target in &self.targets {
            if let Err(error) = &peers[target.peer] {
                self.grants[target.grant].fail_at(target.peer, error.clone());
            }
        }
        // The time after `landing` is left for the call that ends the put.
        let landing = self.deadline.portion(7, 8);
        self.send_direct(items, &peers, landing);
        self.send_staged(items, &peers, landing).await;
        self.compute_checksums(items);
        while !self.submissions.is_empty() {
            self.land_first().await;
        }
    }

    /// Computes checksums during the transfers.
    fn compute_checksums(&mut self, items: &[Item<'_, T>]) {
        if !self.client.config.checksum {
            return;
        }
        for grant in self.grants.iter_mut().filter(|grant| grant.failure.is_none()) {
            match items[grant.item].value.checksum() {
                Ok(sum) => grant.checksum = Some(sum),
                Err(error) => grant.fail(error),
            }
        }
    }

    /// Posts the pieces that can be sent without a copy.
    fn send_direct(&mut self, items: &[Item<'_, T>], peers: &Peers<T>, landing: Moment) {
        let needs_registration = self.client.needs_registration();
        let mut posting = Vec::new();
        for (index, grant) in self.grants.iter().enumerate() {
            let value = &items[grant.item].value;
            let mut offset = 0;
            for piece in 0..value.pieces() {
                self.add(&mut posting, peers, index, offset, || value.direct(piece, needs_registration));
                offset += value.piece_len(piece);
            }
        }
        self.post(posting, landing);
    }

    /// Copies the other pieces through staging buffers. A buffer is filled while others are sent.
    async fn send_staged(&mut self, items: &[Item<'_, T>], peers: &Peers<T>, landing: Moment) {
        let client = self.client;
        let Some(staging) = &client.staging else { return };
        let needs_registration = client.needs_registration();
        let bytes_of = |grant: &Grant<'_>| items[grant.item].value.staged(needs_registration);
        let to_send = self.grants.iter().enumerate().filter(|(_, grant)| grant.failure.is_none());
        let values: Vec<(usize, usize)> =
            to_send.filter_map(|(index, grant)| Some((index, bytes_of(grant)?.len()))).collect();
        let mut chunker = Chunker::new(values.into_iter(), staging.chunk());
        let mut pieces = Vec::new();
        while chunker.fill(&mut pieces) {
            let mut buffer = match self.allocate_staging(staging, pieces.iter().map(|p| p.len).sum()).await {
                Ok(buffer) => buffer,
                Err(error) => return self.fail_unsent(pieces, chunker, &error),
            };
            let mut at = 0;
            for piece in &pieces {
                if let Some(bytes) = bytes_of(&self.grants[piece.value]) {
                    buffer[at..at + piece.len]
                        .copy_from_slice(&bytes[piece.offset..piece.offset + piece.len]);
                }
                at += piece.len;
            }
            self.send_pieces(&pieces, &Arc::new(buffer), peers, landing);
        }
    }

    /// Fails the values that could not be copied. Their remaining pieces are not posted. Transfers
    /// of their earlier pieces report outcomes of their own.
    fn fail_unsent(
        &mut self,
        mut pieces: Vec<Piece>,
        mut chunker: Chunker<impl Iterator<Item = (usize, usize)>>,
        error: &Error,
    ) {
        loop {
            for piece in &pieces {
                self.grants[piece.value].fail(error.clone());
            }
            if !chunker.fill(&mut pieces) {
                return;
            }
        }
    }

    /// Allocates a staging buffer. Waits for the transfers of this put first, then for those of
    /// other calls.
    async fn allocate_staging(&mut self, staging: &Staging<T>, len: usize) -> Result<PoolBuf<T>> {
        loop {
            if let Some(buffer) = staging.try_allocate(len) {
                return Ok(buffer);
            }
            if self.submissions.is_empty() {
                let wait = staging.allocate(len);
                return self.deadline.bound("waiting for space in the local buffer", wait).await;
            }
            self.land_first().await;
        }
    }

    fn send_pieces(&mut self, pieces: &[Piece], buffer: &Arc<PoolBuf<T>>, peers: &Peers<T>, landing: Moment) {
        let mut posting = Vec::new();
        let mut at = 0;
        for piece in pieces {
            let range = at..at + piece.len;
            at = range.end;
            self.add(&mut posting, peers, piece.value, piece.offset, || {
                Some(Outgoing::Staged(Part::new(buffer.clone(), range.clone())))
            });
        }
        self.post(posting, landing);
    }

    /// Adds bytes for every replica of a grant. Adds nothing if a part of the grant has failed,
    /// because the rest is useless then.
    fn add(
        &self,
        posting: &mut Posting<T>,
        peers: &Peers<T>,
        grant: usize,
        offset: usize,
        bytes: impl Fn() -> Option<Outgoing<T>>,
    ) {
        if self.grants[grant].failure.is_some() {
            return;
        }
        // Targets are in the order of their grants.
        let first = self.targets.partition_point(|target| target.grant < grant);
        for target in self.targets[first..].iter().take_while(|target| target.grant == grant) {
            let (Ok(peer), Some(bytes)) = (&peers[target.peer], bytes()) else { continue };
            let remote = target.remote.saturating_add(offset as u64);
            posting.push(((grant, target.peer), Request::new(peer, remote, bytes)));
        }
    }

    /// Posts all transfers at once.
    fn post(&mut self, mut posting: Posting<T>, landing: Moment) {
        if posting.is_empty() {
            return;
        }
        // The transfers to one client become one consecutive run.
        posting.sort_by_key(|((_, peer), _)| *peer);
        let (targets, requests): (Vec<_>, Vec<_>) = posting.into_iter().unzip();
        let ticket = self.client.engine.post_write(requests, Some(landing));
        self.submissions.push_back(Submission { results: ticket.results(), targets });
    }

    /// Waits for the oldest submission. The submission stays in `submissions` meanwhile, so that a
    /// drop of the put waits for it, too.
    async fn land_first(&mut self) {
        let Some(submission) = self.submissions.front_mut() else { return };
        // A transport ends its transfers in time. If it does not, the timeout releases the caller.
        let landed = within(self.deadline.left(), &mut submission.results).await;
        let Some(submission) = self.submissions.pop_front() else { return };
        let Some((results, buffers)) = landed else {
            for (grant, peer) in submission.targets {
                let error = deadline_exceeded("a transfer");
                self.client.record_failure(&self.endpoints[peer], &error);
                self.grants[grant].fail_transfer(peer, error);
            }
            return;
        };
        // The buffers are freed early, so that other calls can use the space.
        drop(buffers);
        for ((grant, peer), result) in submission.targets.into_iter().zip(results) {
            self.client.record_outcome(&self.endpoints[peer], &result);
            if let Err(error) = result {
                self.grants[grant].fail_transfer(peer, transfer_error(error));
            }
        }
    }
}

/// Transfers to post, with the grant and the client of each.
type Posting<T> = Vec<((usize, usize), Request<T, Outgoing<T>>)>;
