//! Parts of objects that no replica in memory returns. The owners of disks read the parts into
//! buffers of their own and lend the buffers for a while.

use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::replica::Replica;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use super::{Lent, Range};
use crate::deadline::{Deadline, late};
use crate::disk::{BYTES_BORROWED, Loan, Wanted};
use crate::located::{ObjectLocation, Verdict, name};
use crate::replicas::on_disk;
use crate::state::Inner;

/// Maximum distance in bytes between ranges of an object that are requested as one piece. Owners
/// verify the bytes that they read in pieces of this length.
const GAP: u64 = 64 << 10;

/// Request to an owner of a disk: pieces of objects, and the ranges in each piece.
struct Asking {
    endpoint: String,
    pieces: Vec<Piece>,
    bytes: u64,
}

struct Piece {
    location: Arc<ObjectLocation>,
    start: u64,
    end: u64,
    of: Vec<usize>,
}

impl Piece {
    fn wanted(&self) -> Wanted<'_> {
        Wanted { key: &self.location.key, size: self.location.size, range: self.start..self.end }
    }
}

impl<T: Transport> Range<T> {
    /// Returns the endpoint and the address to read next. Returns `None` if the next replica is not
    /// in memory. A returned replica counts as tried.
    pub(super) fn next_place(&mut self) -> Option<(String, u64)> {
        if let Some(lent) = &self.lent {
            return Some((lent.loan.endpoint.clone(), lent.address));
        }
        let at = self.answer.replica(self.left)?.location.memory()?;
        self.left -= 1;
        Some((at.endpoint.clone(), at.address.saturating_add(self.offset)))
    }

    /// Returns the next replica and the endpoint of its owner, if the replica is on a disk.
    fn next_disk(&self) -> Option<(&Replica, &str)> {
        let copy = self.answer.replica(self.left)?;
        on_disk(copy).map(|(_, endpoint)| (copy, endpoint))
    }

    pub(super) fn take_from_disk(&mut self, lent: Lent, now: Moment) -> Result<()> {
        match self.object.location.give_from_disk(&self.answer, lent.version.as_ref(), now)? {
            Verdict::Given => {}
            Verdict::Ask => self.came = Some(lent),
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
        let asked = plan(ranges);
        if asked.is_empty() {
            return false;
        }
        // An owner that does not respond must not use up the time for the transfers from the
        // others.
        let asking = Deadline::until(&self.config.clock, deadline.portion(1, 2));
        let asking = &asking;
        let lent = futures::future::join_all(asked.iter().map(|Asking { endpoint, pieces, .. }| {
            let wanted: Vec<Wanted<'_>> = pieces.iter().map(Piece::wanted).collect();
            async move { self.borrow_parts(endpoint, &wanted, asking).await }
        }))
        .await;
        for (Asking { endpoint, pieces, .. }, lent) in asked.iter().zip(lent) {
            match lent {
                Ok(Ok(loan)) => hand_out(ranges, endpoint, pieces, loan),
                // An object is missing or the request is too large. The next request has fewer
                // pieces, and the last one has one piece per range.
                Ok(Err(_)) if pieces.len() > 1 || pieces[0].of.len() > 1 => {
                    for &i in pieces.iter().flat_map(|piece| &piece.of) {
                        ranges[i].left += 1;
                        ranges[i].company = pieces.len() / 2;
                    }
                }
                Ok(Err(error)) | Err(error) => {
                    // Every reason counts as loss of the copy on this disk.
                    let error = Error::new(ErrorCode::TransferFail, error.to_string());
                    for &i in pieces.iter().flat_map(|piece| &piece.of) {
                        ranges[i].failure = Some(error.clone());
                    }
                }
            }
        }
        if deadline.is_over() {
            for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
                range.failure.get_or_insert_with(|| late("a part of an object from a disk"));
            }
            return false;
        }
        true
    }

    /// Asks the master to confirm bytes from disks that may belong to another value than its
    /// response.
    pub(super) async fn confirm(&self, ranges: &mut [Range<T>], deadline: &Deadline) {
        let mut locations: Vec<Arc<ObjectLocation>> = Vec::new();
        for range in ranges.iter().filter(|range| range.came.is_some()) {
            if !locations.iter().any(|location| Arc::ptr_eq(location, &range.object.location)) {
                locations.push(range.object.location.clone());
            }
        }
        if locations.is_empty() {
            return;
        }
        let later = self.ask(&locations, deadline).await;
        let now = self.config.clock.now();
        for range in ranges {
            let Some(Lent { copy, version, .. }) = range.came.take() else { continue };
            let location = &range.object.location;
            let at = locations.iter().position(|asked| Arc::ptr_eq(asked, location));
            let counts = match at.and_then(|at| later.get(at)) {
                Some(Ok((_, later))) => location.confirm(&range.answer, (&copy, version), later, now),
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
fn plan<T: Transport>(ranges: &mut [Range<T>]) -> Vec<Asking> {
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
    open.sort_by_key(|&i| (name(&ranges[i].object.location), ranges[i].offset));
    let most = open.iter().map(|&i| ranges[i].company.max(1)).min().unwrap_or(1);
    let mut asked: Vec<Asking> = Vec::new();
    for i in open {
        let range = &ranges[i];
        let Some((_, endpoint)) = range.next_disk() else { continue };
        let of = asked.iter().position(|asking| asking.endpoint == endpoint).unwrap_or_else(|| {
            asked.push(Asking { endpoint: endpoint.to_owned(), pieces: Vec::new(), bytes: 0 });
            asked.len() - 1
        });
        if asked[of].take(i, range, most) {
            ranges[i].left -= 1;
        }
    }
    asked
}

impl Asking {
    /// Adds a range to the request, which has at most `most` pieces. Returns whether the range
    /// fits.
    fn take<T: Transport>(&mut self, i: usize, range: &Range<T>, most: usize) -> bool {
        let (location, start, end) = (&range.object.location, range.offset, range.end());
        if let Some(last) = self.pieces.last_mut()
            && range.company > 0
            && Arc::ptr_eq(&last.location, location)
            && start <= last.end.saturating_add(GAP)
        {
            let more = end.saturating_sub(last.end);
            if self.bytes.saturating_add(more) > BYTES_BORROWED {
                return false;
            }
            (self.bytes, last.end) = (self.bytes + more, last.end.max(end));
            last.of.push(i);
            return true;
        }
        let full = self.pieces.len() >= most || self.bytes.saturating_add(end - start) > BYTES_BORROWED;
        if full && !self.pieces.is_empty() {
            return false;
        }
        self.pieces.push(Piece { location: location.clone(), start, end, of: vec![i] });
        self.bytes += end - start;
        true
    }
}

fn hand_out<T: Transport>(ranges: &mut [Range<T>], endpoint: &str, pieces: &[Piece], loan: Loan) {
    let loan = Arc::new(loan);
    for (at, piece) in pieces.iter().enumerate() {
        let version = loan.versions.get(at).map(|version| (endpoint.to_owned(), *version));
        for &i in &piece.of {
            let range = &mut ranges[i];
            // The replica was the next one, and counts as tried since the request.
            let Some(copy) = range.answer.replica(range.left + 1).cloned() else { continue };
            let address = loan.addresses[at].saturating_add(range.offset - piece.start);
            range.lent = Some(Lent { loan: loan.clone(), address, copy, version: version.clone() });
        }
    }
}
