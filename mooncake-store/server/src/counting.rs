//! Counters of requests and failures by operation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_protocol::message::{ADDED, TABLE};
use mooncake_protocol::service::Tally;

use super::latency::Latency;

/// Counters of all operations that the table of calls names.
///
/// Upserts count as puts, and a numbered write as the write that it stands for, as in the
/// dashboards of Mooncake C++.
#[derive(Debug)]
pub(super) struct Requests {
    single: Vec<OperationCounters<Single>>,
    batch: Vec<OperationCounters<Batch>>,
    /// Counted calls by ascending number.
    calls: Box<[CountedCall]>,
    /// Requests refused because of overload.
    pub(super) shed: AtomicU64,
}

/// Counters with the name of their operation.
pub(super) type OperationCounters<T> = (&'static str, T);

/// Indexes of the counters of one call.
#[derive(Clone, Copy, Debug)]
struct CountedCall {
    function: u32,
    single: Option<usize>,
    batch: Option<usize>,
}

impl Default for Requests {
    fn default() -> Self {
        let (mut single, mut batch) = (Vec::new(), Vec::new());
        let mut calls: Vec<_> = TABLE
            .iter()
            .chain(ADDED)
            .map(|call| CountedCall {
                function: call.function,
                single: call.treatment.counter.map(|name| index_of(name, &mut single)),
                batch: call.treatment.batch_counter.map(|name| index_of(name, &mut batch)),
            })
            .filter(|call| call.single.is_some() || call.batch.is_some())
            .collect();
        calls.sort_unstable_by_key(|call| call.function);
        Self { single, batch, calls: calls.into(), shed: AtomicU64::new(0) }
    }
}

/// Returns the index of the counters of this name. Appends counters for a new name.
fn index_of<T: Default>(name: &'static str, counters: &mut Vec<OperationCounters<T>>) -> usize {
    counters.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
        counters.push((name, T::default()));
        counters.len() - 1
    })
}

impl Requests {
    /// Counts an answered call.
    pub(super) fn count(&self, function: u32, tally: Tally, took: Duration) {
        let found = self.calls.binary_search_by_key(&function, |call| call.function);
        let Some(call) = found.ok().map(|at| self.calls[at]) else { return };
        match (call.single, call.batch) {
            (Some(single), batch) if batch.is_none() || tally.items == 1 => {
                self.single[single].1.count(tally, took);
            }
            (_, Some(batch)) => self.batch[batch].1.count(tally, took),
            (_, None) => {}
        }
    }

    /// Returns the name and the counters of every operation.
    pub(super) fn all(&self) -> (&[OperationCounters<Single>], &[OperationCounters<Batch>]) {
        (&self.single, &self.batch)
    }
}

/// Counters of a call about one object.
#[derive(Debug, Default)]
pub(super) struct Single {
    requests: AtomicU64,
    failures: AtomicU64,
    pub(super) latency: Latency,
}

/// Counters of a call about many objects.
#[derive(Debug, Default)]
pub(super) struct Batch {
    requests: AtomicU64,
    failures: AtomicU64,
    partial: AtomicU64,
    items: AtomicU64,
    failed_items: AtomicU64,
    pub(super) latency: Latency,
}

impl Single {
    fn count(&self, tally: Tally, took: Duration) {
        self.latency.note(took);
        self.requests.fetch_add(1, Relaxed);
        if tally.failed > 0 {
            self.failures.fetch_add(1, Relaxed);
        }
    }

    /// Returns requests and failures.
    pub(super) fn read(&self) -> [u64; 2] {
        [self.requests.load(Relaxed), self.failures.load(Relaxed)]
    }
}

impl Batch {
    fn count(&self, tally: Tally, took: Duration) {
        self.latency.note(took);
        self.requests.fetch_add(1, Relaxed);
        self.items.fetch_add(tally.items, Relaxed);
        if tally.failed == 0 {
            return;
        }
        self.failed_items.fetch_add(tally.failed, Relaxed);
        let counter = if tally.failed == tally.items { &self.failures } else { &self.partial };
        counter.fetch_add(1, Relaxed);
    }

    /// Returns requests, failures, partial successes, items and failed items.
    pub(super) fn read(&self) -> [u64; 5] {
        [&self.requests, &self.failures, &self.partial, &self.items, &self.failed_items]
            .map(|c| c.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_protocol::message::{BatchExistKey, LocatePrefix, Request, StartWrites, UpsertStart};

    fn tally(outcomes: &[bool]) -> Tally {
        let failed = outcomes.iter().filter(|ok| !**ok).count();
        Tally { items: outcomes.len() as u64, failed: failed as u64 }
    }

    fn batch<'r>(requests: &'r Requests, name: &str) -> &'r Batch {
        &requests.batch.iter().find(|(known, _)| *known == name).unwrap().1
    }

    #[test]
    fn batch_counters_distinguish_partial_success() {
        let requests = Requests::default();
        for outcomes in [&[true, true][..], &[true, false], &[false, false, false]] {
            requests.count(BatchExistKey::FUNCTION, tally(outcomes), Duration::from_micros(3));
        }
        let counters = batch(&requests, "batch_exist_key");
        assert_eq!(counters.read(), [3, 1, 1, 7, 4]);
        assert_eq!(counters.latency.histogram().count(), 3);
    }

    #[test]
    fn writes_count_as_those_that_they_stand_for() {
        let requests = Requests::default();
        for (function, outcomes) in [
            (UpsertStart::FUNCTION, &[false][..]),
            (StartWrites::FUNCTION, &[true]),
            (StartWrites::FUNCTION, &[true, true]),
        ] {
            requests.count(function, tally(outcomes), Duration::ZERO);
        }
        let single = &requests.single.iter().find(|(name, _)| *name == "put_start").unwrap().1;
        assert_eq!(single.read(), [2, 1]);
        assert_eq!(batch(&requests, "batch_put_start").read(), [1, 0, 0, 2, 0]);
    }

    #[test]
    fn prefixes_have_counters_of_their_own() {
        let requests = Requests::default();
        for outcomes in [&[true][..], &[true, true, false]] {
            requests.count(LocatePrefix::FUNCTION, tally(outcomes), Duration::ZERO);
        }
        assert_eq!(batch(&requests, "locate_prefix").read(), [2, 0, 1, 4, 1]);
        assert_eq!(batch(&requests, "batch_exist_key").read(), [0; 5]);
    }
}
