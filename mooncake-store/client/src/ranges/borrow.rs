//! Parts of objects that no replica in memory returns. The owners of disks read the parts into
//! buffers of their own and lend the buffers for a while.

use std::collections::HashMap;
use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::Replica;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use super::{BorrowedRange, Range};
use crate::deadline::{Deadline, deadline_exceeded};
use crate::disk::{BUSY_PAUSE, Loan, MAX_BORROWED_BYTES, PartToBorrow};
use crate::errors::is_busy;
use crate::located::{ObjectLocation, Verdict, identity};
use crate::replicas::on_disk;
use crate::state::Inner;

/// Maximum distance in bytes between ranges of an object that are requested as one piece. Owners
/// verify the bytes that they read in pieces of this length.
const GAP: u64 = 64 << 10;

/// Request to an owner of a disk: pieces of objects, and the ranges in each piece.
struct DiskRequest {
    endpoint: String,
    pieces: Vec<RequestedPiece>,
    bytes: u64,
}

struct RequestedPiece {
    location: Arc<ObjectLocation>,
    start: u64,
    end: u64,
    ranges: Vec<usize>,
}

impl RequestedPiece {
    fn to_part(&self) -> PartToBorrow<'_> {
        PartToBorrow { key: &self.location.key, size: self.location.size, range: self.start..self.end }
    }
}

impl<T: Transport> Range<T> {
    /// Returns the endpoint and the address to read next. Returns `None` if the next replica is not
    /// in memory. A returned replica counts as tried.
    pub(super) fn next_memory(&mut self) -> Option<(String, u64)> {
        if let Some(borrowed) = &self.borrowed {
            return Some((borrowed.loan.endpoint.clone(), borrowed.address));
        }
        let at = self.response.replica(self.left)?.location.memory()?;
        self.left -= 1;
        Some((at.endpoint.clone(), at.address.saturating_add(self.offset)))
    }

    /// Returns the next replica and the endpoint of its owner, if the replica is on a disk.
    fn next_disk(&self) -> Option<(&Replica, &str)> {
        let copy = self.response.replica(self.left)?;
        on_disk(copy).map(|(_, endpoint)| (copy, endpoint))
    }

    pub(super) fn take_from_disk(&mut self, borrowed: BorrowedRange, now: Moment) -> Result<()> {
        match self.object.location.deliver_from_disk(&self.response, borrowed.version.as_ref(), now)? {
            Verdict::Deliver => {}
            Verdict::Confirm => self.unconfirmed = Some(borrowed),
        }
        Ok(())
    }

    fn end(&self) -> u64 {
        self.offset + self.into.as_ref().map_or(0, |into| into.len() as u64)
    }
}

impl<T: Transport> Inner<T> {
    /// Asks the owners of disks for open ranges. Each request has a limited size. Returns whether
    /// there is something to read now, or another owner to ask.
    pub(super) async fn borrow(&self, ranges: &mut [Range<T>], deadline: &Deadline) -> bool {
        let requests = plan(ranges);
        if requests.is_empty() {
            return false;
        }
        // An owner that does not respond must not use up the time for the transfers from the
        // others.
        let request_deadline = Deadline::until(&self.config.clock, deadline.portion(1, 2));
        let request_deadline = &request_deadline;
        let loans =
            futures::future::join_all(requests.iter().map(|DiskRequest { endpoint, pieces, .. }| {
                let parts: Vec<PartToBorrow<'_>> = pieces.iter().map(RequestedPiece::to_part).collect();
                async move { self.borrow_parts(endpoint, &parts, request_deadline).await }
            }))
            .await;
        for (DiskRequest { endpoint, pieces, .. }, loan) in requests.iter().zip(loans) {
            match loan {
                Ok(Ok(loan)) => assign_loan(ranges, endpoint, pieces, loan),
                // An object is missing or the request is too large. The next request has fewer
                // pieces, and the last one has one piece per range.
                Ok(Err(_)) if pieces.len() > 1 || pieces[0].ranges.len() > 1 => {
                    for &i in pieces.iter().flat_map(|piece| &piece.ranges) {
                        ranges[i].left += 1;
                        ranges[i].max_batch = pieces.len() / 2;
                    }
                }
                // The object is there. The owner is asked again after the other replicas.
                Ok(Err(error)) if is_busy(&error) => {
                    for &i in pieces.iter().flat_map(|piece| &piece.ranges) {
                        (ranges[i].waits, ranges[i].busy) = (true, Some(error.clone()));
                    }
                }
                Ok(Err(error)) | Err(error) => {
                    // Every reason counts as loss of the copy on this disk.
                    let error = Error::new(ErrorCode::TransferFail, error.to_string());
                    pieces.iter().for_each(|piece| self.verify_refused_object(endpoint, &piece.location.key));
                    for &i in pieces.iter().flat_map(|piece| &piece.ranges) {
                        ranges[i].failure = Some(error.clone());
                        if !ranges[i].waits && !deadline.is_over() {
                            ranges[i].busy = None;
                        }
                    }
                }
            }
        }
        if deadline.is_over() {
            for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
                range.failure.get_or_insert_with(|| deadline_exceeded("a part of an object from a disk"));
            }
            return false;
        }
        true
    }

    /// Waits for a moment if owners of disks had no free buffer for ranges that no other replica
    /// returned. Returns whether there are owners to ask again.
    pub(super) async fn wait_for_disks(&self, ranges: &mut [Range<T>], deadline: &Deadline) -> bool {
        let waits = |range: &&mut Range<T>| range.is_open() && range.waits;
        let mut waiting = ranges.iter_mut().filter(waits).peekable();
        if deadline.is_over() || waiting.peek().is_none() || is_planted("full-disk-buffers-lose-objects") {
            return false;
        }
        for range in waiting {
            (range.waits, range.left) = (false, range.response.replica_count());
        }
        tokio::time::sleep(BUSY_PAUSE.min(deadline.left())).await;
        true
    }

    /// Asks the master to confirm bytes from disks that may belong to another value than its
    /// response.
    pub(super) async fn confirm(&self, ranges: &mut [Range<T>], deadline: &Deadline) {
        let mut locations: Vec<Arc<ObjectLocation>> = Vec::new();
        let mut positions: HashMap<usize, usize> = HashMap::new();
        for range in ranges.iter().filter(|range| range.unconfirmed.is_some()) {
            let location = &range.object.location;
            positions.entry(identity(location)).or_insert_with(|| {
                locations.push(location.clone());
                locations.len() - 1
            });
        }
        if locations.is_empty() {
            return;
        }
        let later = self.request_locations(&locations, deadline).await;
        for range in ranges {
            let Some(BorrowedRange { copy, version, .. }) = range.unconfirmed.take() else { continue };
            let location = &range.object.location;
            let at = positions.get(&identity(location));
            let counts = match at.and_then(|at| later.get(*at)) {
                Some(Ok((_, later))) => location.confirm(&range.response, (&copy, version), later),
                _ => Err(Error::from(ErrorCode::LeaseExpired)),
            };
            match counts {
                Ok(()) => range.outcome = Some(Ok(())),
                Err(error) => (range.left, range.failure) = (0, Some(error)),
            }
        }
    }
}

/// Plans the requests to the owners of disks. The replicas in the requests count as tried.
fn plan<T: Transport>(ranges: &mut [Range<T>]) -> Vec<DiskRequest> {
    let mut open: Vec<usize> = Vec::new();
    for (i, range) in ranges.iter_mut().enumerate() {
        if range.is_open() && range.next_disk().is_some() {
            match range.end() > range.offset {
                true => open.push(i),
                // An empty range needs no bytes.
                false => range.outcome = Some(Ok(())),
            }
        }
    }
    open.sort_by_key(|&i| (identity(&ranges[i].object.location), ranges[i].offset));
    let max_pieces = open.iter().map(|&i| ranges[i].max_batch.max(1)).min().unwrap_or(1);
    let mut requests: Vec<DiskRequest> = Vec::new();
    for i in open {
        let range = &ranges[i];
        let Some((_, endpoint)) = range.next_disk() else { continue };
        let index = requests.iter().position(|request| request.endpoint == endpoint).unwrap_or_else(|| {
            requests.push(DiskRequest { endpoint: endpoint.to_owned(), pieces: Vec::new(), bytes: 0 });
            requests.len() - 1
        });
        if requests[index].add_range(i, range, max_pieces) {
            ranges[i].left -= 1;
        }
    }
    requests
}

impl DiskRequest {
    /// Adds a range to the request, which has at most `max_pieces` pieces. Returns whether the
    /// range fits.
    fn add_range<T: Transport>(&mut self, i: usize, range: &Range<T>, max_pieces: usize) -> bool {
        let (location, start, end) = (&range.object.location, range.offset, range.end());
        if let Some(last) = self.pieces.last_mut()
            && range.max_batch > 0
            && Arc::ptr_eq(&last.location, location)
            && start <= last.end.saturating_add(GAP)
        {
            let more = end.saturating_sub(last.end);
            if self.bytes.saturating_add(more) > MAX_BORROWED_BYTES {
                return false;
            }
            (self.bytes, last.end) = (self.bytes + more, last.end.max(end));
            last.ranges.push(i);
            return true;
        }
        let full =
            self.pieces.len() >= max_pieces || self.bytes.saturating_add(end - start) > MAX_BORROWED_BYTES;
        if full && !self.pieces.is_empty() {
            return false;
        }
        self.pieces.push(RequestedPiece { location: location.clone(), start, end, ranges: vec![i] });
        self.bytes += end - start;
        true
    }
}

fn assign_loan<T: Transport>(ranges: &mut [Range<T>], endpoint: &str, pieces: &[RequestedPiece], loan: Loan) {
    let loan = Arc::new(loan);
    for (at, piece) in pieces.iter().enumerate() {
        let version = loan.versions.get(at).map(|version| (endpoint.to_owned(), *version));
        for &i in &piece.ranges {
            let range = &mut ranges[i];
            // The replica was the next one, and counts as tried since the request.
            let Some(copy) = range.response.replica(range.left + 1).cloned() else { continue };
            let address = loan.addresses[at].saturating_add(range.offset - piece.start);
            range.busy = None;
            range.borrowed =
                Some(BorrowedRange { loan: loan.clone(), address, copy, version: version.clone() });
        }
    }
}
