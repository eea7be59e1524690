//! The bytes of a put: to every replica at once, as far as the local buffer goes.

use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, Result};
use mooncake_transport::engine::{self, Request};
use mooncake_transport::{PoolBuf, Transport};

use crate::buffers::{Outgoing, Part};
use crate::deadline::late;
use crate::payload::Item;
use crate::staging::{Cutter, Piece, Staging};
use crate::writing::{Flight, Grant, Writing};

/// Ways to the members of a put.
type Peers<T> = [Result<engine::Target<T>>];

impl<T: Transport> Writing<'_, T> {
    /// Writes every replica of every grant; failures are noted in the grants.
    pub(crate) async fn transfer(&mut self, items: &[Item<'_, T>]) {
        let peers = std::mem::take(&mut self.peers);
        for target in &self.targets {
            if let Err(error) = &peers[target.peer] {
                self.grants[target.grant].fail(error.clone());
            }
        }
        // What is left after this is for the call that ends the put.
        let landing = self.deadline.portion(7, 8);
        self.send_direct(items, &peers, landing);
        self.send_staged(items, &peers, landing).await;
        self.sum(items);
        while !self.flights.is_empty() {
            self.land_first().await;
        }
    }

    /// Computes checksums, while the bytes are under way.
    fn sum(&mut self, items: &[Item<'_, T>]) {
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

    /// Posts what can be sent from where it lies.
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

    /// Copies the rest through staging buffers: one is filled while others are under way.
    async fn send_staged(&mut self, items: &[Item<'_, T>], peers: &Peers<T>, landing: Moment) {
        let client = self.client;
        let Some(staging) = &client.staging else { return };
        let needs_registration = client.needs_registration();
        let bytes_of = |grant: &Grant<'_>| items[grant.item].value.staged(needs_registration);
        let to_send = self.grants.iter().enumerate().filter(|(_, grant)| grant.failure.is_none());
        let values: Vec<(usize, usize)> =
            to_send.filter_map(|(index, grant)| Some((index, bytes_of(grant)?.len()))).collect();
        let mut cutter = Cutter::new(values.into_iter(), staging.chunk());
        let mut pieces = Vec::new();
        while cutter.fill(&mut pieces) {
            let mut buffer = match self.room(staging, pieces.iter().map(|p| p.len).sum()).await {
                Ok(buffer) => buffer,
                Err(error) => return self.give_up(pieces, cutter, &error),
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

    /// Fails what could not be copied. It was not posted; earlier parts of the same values answer
    /// for themselves.
    fn give_up(
        &mut self,
        mut pieces: Vec<Piece>,
        mut cutter: Cutter<impl Iterator<Item = (usize, usize)>>,
        error: &Error,
    ) {
        loop {
            for piece in &pieces {
                self.grants[piece.value].fail(error.clone());
            }
            if !cutter.fill(&mut pieces) {
                return;
            }
        }
    }

    /// A staging buffer; waits for our own transfers first, then for those of others.
    async fn room(&mut self, staging: &Staging<T>, len: usize) -> Result<PoolBuf<T>> {
        loop {
            if let Some(buffer) = staging.room(len) {
                return Ok(buffer);
            }
            if self.flights.is_empty() {
                let wait = staging.wait_for_room(len);
                return self.deadline.bound("waiting for room in the local buffer", wait).await;
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

    /// Adds bytes for every replica of a grant, unless a part of it has failed: the rest would be
    /// for nothing.
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

    /// Posts everything at once.
    fn post(&mut self, mut posting: Posting<T>, landing: Moment) {
        if posting.is_empty() {
            return;
        }
        // One run per member.
        posting.sort_by_key(|((_, peer), _)| *peer);
        let (of, requests): (Vec<_>, Vec<_>) = posting.into_iter().unzip();
        let ticket = self.client.engine.post_write(requests, Some(landing));
        self.flights.push_back(Flight { results: ticket.results(), of });
    }

    /// Waits for the oldest submission. It stays in the guard meanwhile.
    async fn land_first(&mut self) {
        let Some(flight) = self.flights.front_mut() else { return };
        // A wire ends its transfers in time; should one not, the caller is not to pay for it.
        let landed = tokio::time::timeout(self.deadline.left(), &mut flight.results).await;
        let Some(flight) = self.flights.pop_front() else { return };
        let Ok((results, buffers)) = landed else {
            for (grant, peer) in flight.of {
                let error = late("a transfer");
                self.client.failed(&self.endpoints[peer], &error);
                self.grants[grant].lose(error);
            }
            return;
        };
        // Room for others as soon as it is not needed.
        drop(buffers);
        for ((grant, peer), result) in flight.of.into_iter().zip(results) {
            self.client.note(&self.endpoints[peer], &result);
            if let Err(error) = result {
                self.grants[grant].lose(error);
            }
        }
    }
}

/// Transfers to post, with grant and member of each.
type Posting<T> = Vec<((usize, usize), Request<T, Outgoing<T>>)>;
