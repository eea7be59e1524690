//! Parts of a batch of ranges. All ranges of an object belong to one part, so that they are
//! compared with its checksum.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode};
use mooncake_transport::Transport;

use super::{MAX_ROUNDS, Range, compare_parts};
use crate::batch_parts::part_len;
use crate::deadline::Deadline;
use crate::errors::{is_lost, last_replica_lost};
use crate::located::{ObjectLocation, identity};
use crate::metrics::Counting;
use crate::state::Inner;

/// Maximum number of additional requests if a client was found after the master was asked.
const MAX_EXTRA_ROUNDS: usize = 2;

/// Look-ups of objects that were located before.
struct RelocationLimits {
    /// Maximum number of objects of one look-up. The maximum is lowered when a look-up takes longer
    /// than the leases that it gives.
    max_objects: usize,
    /// True unless the master did not respond.
    responds: bool,
}

impl RelocationLimits {
    fn new() -> Self {
        Self { max_objects: usize::MAX, responds: true }
    }
}

/// Returns the ranges of each part, by index. Returns `None` if one part takes all ranges.
fn parts_of<T: Transport>(ranges: &[Range<T>]) -> Option<Vec<Vec<usize>>> {
    let len = |range: &Range<T>| range.into.as_ref().map_or(0, |into| into.len() as u64);
    if part_len(ranges.iter().map(len)) == ranges.len() {
        return None;
    }
    // Length and ranges of each object.
    let mut objects: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut positions: HashMap<usize, usize> = HashMap::new();
    for (i, range) in ranges.iter().enumerate() {
        let at = *positions.entry(identity(&range.object.location)).or_insert_with(|| {
            objects.push((0, Vec::new()));
            objects.len() - 1
        });
        let (bytes, indices) = &mut objects[at];
        *bytes = bytes.saturating_add(len(range));
        indices.push(i);
    }
    let (mut parts, mut rest) = (Vec::new(), &objects[..]);
    while !rest.is_empty() {
        let (part, later) = rest.split_at(part_len(rest.iter().map(|(bytes, _)| *bytes)));
        parts.push(part.iter().flat_map(|(_, indices)| indices.iter().copied()).collect());
        rest = later;
    }
    (parts.len() > 1).then_some(parts)
}

impl<T: Transport> Range<T> {
    /// Begins a read that has waited for its turn. An object whose lease has ended meanwhile is
    /// located again.
    fn begin(&mut self, now: Moment) {
        if self.outcome.is_some() {
            return;
        }
        self.response = self.object.location.response();
        self.left = self.response.replica_count();
        self.stale_response = now >= self.response.lease;
        self.failure = self.stale_response.then(|| Error::from(ErrorCode::LeaseExpired));
    }
}

impl<T: Transport> Inner<T> {
    /// Reads ranges, in consecutive parts if there are many. Returns them in their order.
    pub(super) async fn read_in_parts(
        self: &Arc<Self>,
        mut ranges: Vec<Range<T>>,
        counting: &mut Counting<'_>,
    ) -> Vec<Range<T>> {
        let (mut limits, mut deadline) = (RelocationLimits::new(), self.deadline());
        let Some(parts) = parts_of(&ranges) else {
            self.read_part(&mut ranges, &mut limits, &deadline, counting).await;
            return ranges;
        };
        let mut waiting: Vec<Option<Range<T>>> = ranges.into_iter().map(Some).collect();
        for indices in parts {
            let mut part: Vec<Range<T>> = indices.iter().filter_map(|&i| waiting[i].take()).collect();
            let now = self.config.clock.now();
            for range in &mut part {
                range.begin(now);
                if range.stale_response && !limits.responds {
                    range.outcome = range.failure.take().map(Err);
                }
            }
            self.read_part(&mut part, &mut limits, &deadline, counting).await;
            if !is_planted("batches-have-one-deadline") {
                deadline = self.deadline();
            }
            for (i, range) in indices.into_iter().zip(part) {
                waiting[i] = Some(range);
            }
        }
        waiting.into_iter().flatten().collect()
    }

    /// Reads the ranges of one part.
    async fn read_part(
        self: &Arc<Self>,
        ranges: &mut [Range<T>],
        limits: &mut RelocationLimits,
        deadline: &Deadline,
        counting: &mut Counting<'_>,
    ) {
        let (mut round, mut rounds) = (0, MAX_ROUNDS);
        while round < rounds {
            let left = ranges.iter().filter(|range| range.outcome.is_none()).count();
            if round > 0 && (deadline.is_over() || !self.locate_again(ranges, limits, deadline).await) {
                break;
            }
            self.copy_cached(ranges).await;
            loop {
                while self.fetch(ranges, deadline, counting).await {}
                if !(self.config.checksum && compare_parts(ranges)) {
                    break;
                }
            }
            rounds += usize::from(
                rounds < MAX_ROUNDS + MAX_EXTRA_ROUNDS && ranges.iter().any(Range::has_stale_response),
            );
            round += 1;
            // A batch that is larger than what one lease allows continues under the next lease.
            if round == rounds && ranges.iter().any(Range::is_late) {
                let ended = ranges.iter().filter(|range| range.outcome.is_none()).count() < left;
                rounds += usize::from(ended);
            }
        }
    }

    /// Asks the master once more for the locations of objects with unread ranges. Returns whether
    /// there is a new response to try, or another object to ask about.
    async fn locate_again(
        &self,
        ranges: &mut [Range<T>],
        limits: &mut RelocationLimits,
        deadline: &Deadline,
    ) -> bool {
        // Objects that were not asked about come first.
        let open = || ranges.iter().filter(|range| range.outcome.is_none());
        let ordered =
            open().filter(|range| range.stale_response).chain(open().filter(|range| !range.stale_response));
        let mut seen = HashSet::new();
        let mut locations: Vec<Arc<ObjectLocation>> = ordered
            .filter(|range| seen.insert(identity(&range.object.location)))
            .map(|range| range.object.location.clone())
            .collect();
        let all = locations.len();
        if all == 0 {
            return false;
        }
        let updated = loop {
            locations.truncate(limits.max_objects);
            let updated = self.refresh_locations(&locations, deadline).await;
            limits.responds = !updated.is_empty();
            let now = self.config.clock.now();
            let is_over = |location: &Arc<ObjectLocation>| {
                !matches!(updated.get(&identity(location)), Some(Ok(true)))
                    || !location.response().is_open(now)
            };
            let is_late =
                updated.values().any(|updated| matches!(updated, Ok(true))) && locations.iter().all(is_over);
            if !is_late
                || locations.len() == 1
                || deadline.is_over()
                || is_planted("late-look-ups-fail-batches")
            {
                break updated;
            }
            // A look-up of fewer objects is faster.
            limits.max_objects = locations.len() / 2;
        };
        let mut more = locations.len() < all && limits.responds;
        for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
            match updated.get(&identity(&range.object.location)) {
                Some(Ok(true)) => {
                    range.response = range.object.location.response();
                    (range.stale_response, range.busy, range.waits, range.renews) =
                        (false, None, false, true);
                    range.left = range.response.replica_count();
                    more = true;
                }
                Some(Err(error)) => {
                    let reason = range.failure.take().filter(|error| is_lost(error) && !range.stale_response);
                    let error = reason.map_or_else(|| error.clone(), last_replica_lost);
                    range.outcome = Some(Err(error));
                }
                Some(Ok(false)) => (range.stale_response, range.left) = (false, 0),
                None => {}
            }
        }
        more
    }
}
