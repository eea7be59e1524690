//! Counters of an engine by peer and transport, written without a lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::protocol::Protocol;
use crate::statistics::FallbackCounter;
use crate::transport::Opcode;

/// Number of latency buckets, by powers of two of a microsecond. The last bucket has all longer
/// latencies.
const BUCKETS: usize = 32;

/// Counters of one peer over one transport.
#[derive(Debug, Default)]
pub(super) struct Meter {
    reads: AtomicU64,
    writes: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    failures: AtomicU64,
    nanos: AtomicU64,
    latency: [AtomicU64; BUCKETS],
    fallback: Arc<FallbackCounter>,
}

/// Name under which the counters of departed peers are summed.
const DEPARTED: &str = "departed";

/// Counters of an engine's peers.
#[derive(Debug, Default)]
pub(super) struct Meters(Mutex<BTreeMap<(String, Protocol), Arc<Meter>>>);

/// Counters of requests to one peer over one transport, since the engine was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMetrics {
    /// Name of the segment, or `departed` for the sums of the segments that the engine has closed.
    pub peer: String,
    /// Name of the transport: `memory` for copies inside the process, `shm+tcp` and the like for a
    /// transport with a fallback.
    pub wire: Protocol,
    /// Sums of the requests.
    pub counts: Counts,
    /// Number of requests that fell back to the second transport (TCP in `shm+tcp`), because the
    /// first one does not reach the memory or failed. `counts` has each request once.
    pub fallback_requests: u64,
    /// Bytes of those requests.
    pub fallback_bytes: u64,
}

/// Sums of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes of the reads.
    pub bytes_read: u64,
    /// Bytes of the writes.
    pub bytes_written: u64,
    /// Requests that failed after all attempts.
    pub failures: u64,
    /// Time from posting to the end, summed over postings.
    pub time: Duration,
    /// Number of postings by latency. A posting is a call, or the part of a batch for one peer. The
    /// first bucket is below one microsecond; the limit of each further bucket is twice that of the
    /// one before.
    pub latency: [u64; BUCKETS],
}

impl Counts {
    /// Returns the total number of postings.
    pub fn postings(&self) -> u64 {
        self.latency.iter().sum()
    }

    /// Returns an upper bound of the latency of `per_thousand` of a thousand postings. Returns zero
    /// if there are none.
    pub fn latency_at(&self, per_thousand: u64) -> Duration {
        let rank = (self.postings() * per_thousand.min(1000)).div_ceil(1000);
        let mut seen = 0;
        for (bucket, count) in self.latency.iter().enumerate() {
            seen += count;
            if rank > 0 && seen >= rank {
                return Duration::from_micros(1 << bucket);
            }
        }
        Duration::ZERO
    }

    /// Returns the difference from `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            reads: self.reads - earlier.reads,
            writes: self.writes - earlier.writes,
            bytes_read: self.bytes_read - earlier.bytes_read,
            bytes_written: self.bytes_written - earlier.bytes_written,
            failures: self.failures - earlier.failures,
            time: self.time - earlier.time,
            latency: std::array::from_fn(|i| self.latency[i] - earlier.latency[i]),
        }
    }

    /// Returns the sum of both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            bytes_read: self.bytes_read + other.bytes_read,
            bytes_written: self.bytes_written + other.bytes_written,
            failures: self.failures + other.failures,
            time: self.time + other.time,
            latency: std::array::from_fn(|i| self.latency[i] + other.latency[i]),
        }
    }
}

impl Meters {
    /// Returns the counters of a peer over a transport. They exist while the result does, and until
    /// [`merge_unused`](Self::merge_unused).
    pub(super) fn meter(&self, peer: &str, wire: Protocol) -> Arc<Meter> {
        self.0.lock().entry((peer.to_owned(), wire)).or_default().clone()
    }
}

impl Meters {
    /// Adds the counters of peers without a route to those of [`DEPARTED`], by transport.
    pub(super) fn merge_unused(&self) {
        let mut meters = self.0.lock();
        let is_unused = |(peer, _): &(String, Protocol), meter: &Arc<Meter>| {
            peer != DEPARTED && Arc::strong_count(meter) == 1
        };
        let unused = meters.iter().filter(|(key, meter)| is_unused(key, meter)).map(|(key, _)| key.clone());
        for key in unused.collect::<Vec<_>>() {
            let Some(meter) = meters.remove(&key) else { continue };
            meters.entry((DEPARTED.to_owned(), key.1)).or_default().merge(&meter);
        }
    }
}

/// Sums of the requests of one posting to one peer.
#[derive(Default)]
pub(super) struct Sums {
    requests: [u64; 2],
    bytes: [u64; 2],
    failures: u64,
}

impl Sums {
    /// Adds a finished request of `len` bytes.
    pub(super) fn add(&mut self, opcode: Opcode, len: u64, failed: bool) {
        if failed {
            self.failures += 1;
        } else {
            self.requests[opcode as usize] += 1;
            self.bytes[opcode as usize] += len;
        }
    }
}

impl Meter {
    /// Returns the counter of operations that fall back to the slower of two transports.
    pub(super) fn fallback(&self) -> &Arc<FallbackCounter> {
        &self.fallback
    }

    /// Adds the requests of one posting that took the time `took`.
    pub(super) fn add(&self, sums: &Sums, took: Duration) {
        let add = |counter: &AtomicU64, n: u64| {
            if n > 0 {
                counter.fetch_add(n, Ordering::Relaxed);
            }
        };
        let [reads, writes] = sums.requests;
        let [bytes_read, bytes_written] = sums.bytes;
        add(&self.reads, reads);
        add(&self.writes, writes);
        add(&self.bytes_read, bytes_read);
        add(&self.bytes_written, bytes_written);
        add(&self.failures, sums.failures);
        add(&self.nanos, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX >> 8));
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - micros.leading_zeros()) as usize;
        self.latency[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the counters of another peer.
    fn merge(&self, other: &Self) {
        let pairs = [
            (&self.reads, &other.reads),
            (&self.writes, &other.writes),
            (&self.bytes_read, &other.bytes_read),
            (&self.bytes_written, &other.bytes_written),
            (&self.failures, &other.failures),
            (&self.nanos, &other.nanos),
        ];
        for (sum, more) in pairs.into_iter().chain(self.latency.iter().zip(&other.latency)) {
            sum.fetch_add(more.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        let (requests, bytes) = other.fallback.totals();
        self.fallback.add(
            usize::try_from(requests).unwrap_or(usize::MAX),
            usize::try_from(bytes).unwrap_or(usize::MAX),
        );
    }

    fn counts(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            reads: get(&self.reads),
            writes: get(&self.writes),
            bytes_read: get(&self.bytes_read),
            bytes_written: get(&self.bytes_written),
            failures: get(&self.failures),
            time: Duration::from_nanos(get(&self.nanos)),
            latency: std::array::from_fn(|i| get(&self.latency[i])),
        }
    }
}

impl Meters {
    /// Returns the counters by peer and transport.
    pub(super) fn by_peer(&self) -> Vec<PeerMetrics> {
        let meters = self.0.lock();
        let line = |((peer, wire), meter): (&(String, Protocol), &Arc<Meter>)| {
            let (fallback_requests, fallback_bytes) = meter.fallback.totals();
            let (peer, wire, counts) = (peer.clone(), wire.clone(), meter.counts());
            PeerMetrics { peer, wire, counts, fallback_requests, fallback_bytes }
        };
        meters.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_fall_into_powers_of_two() {
        let meter = Meter::default();
        for micros in [0, 1, 3, 100, 1 << 40] {
            meter.add(&Sums { requests: [1, 0], bytes: [10, 0], failures: 0 }, Duration::from_micros(micros));
        }
        let counts = meter.counts();
        assert_eq!((counts.postings(), counts.reads, counts.bytes_read), (5, 5, 50));
        assert_eq!([0, 1, 2, 7, BUCKETS - 1].map(|i| counts.latency[i]), [1; 5]);
        assert_eq!(counts.latency_at(500), Duration::from_micros(4), "three of five");
        assert_eq!(counts.latency_at(200), Duration::from_micros(1));
        assert_eq!(Counts::default().latency_at(999), Duration::ZERO);
        assert_eq!(counts.since(&counts), Counts::default());
        assert_eq!(counts.and(&Counts::default()), counts);
    }
}
