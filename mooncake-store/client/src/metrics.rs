//! Metrics of a client, counted without locks and allocations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{ErrorKind, Result};

use crate::payload::PutOutcome;
use mooncake_protocol::meter::CallMeter;
use mooncake_protocol::metrics::Micros;

/// Declares the operations that are counted by name, in the order of the page.
macro_rules! operations {
    ($($name:ident $label:literal $direction:ident;)*) => {
        /// Calls of the store, with the names of the metrics of Mooncake C++.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Operation {
            $(#[doc = concat!("`", $label, "`.")] $name,)*
        }

        impl Operation {
            const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the name of the operation in metrics.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }

            fn direction(self) -> Direction {
                match self {
                    $(Self::$name => Direction::$direction,)*
                }
            }
        }
    };
}

operations! {
    GetBuffer "get_buffer" Read;
    BatchGetBuffer "batch_get_buffer" Read;
    GetInto "get_into" Read;
    BatchGetInto "batch_get_into" Read;
    BatchGetIntoMultiBuffers "batch_get_into_multi_buffers" Read;
    BatchGetIntoMultiBufferRanges "batch_get_into_multi_buffer_ranges" Read;
    GetIntoRanges "get_into_ranges" Read;
    Put "put" Write;
    PutBatch "put_batch" Write;
    PutFrom "put_from" Write;
    PutParts "put_parts" Write;
    BatchPutFrom "batch_put_from" Write;
    BatchPutFromMultiBuffers "batch_put_from_multi_buffers" Write;
    BatchPutFromMultiBufferRanges "batch_put_from_multi_buffer_ranges" Write;
    Upsert "upsert" Write;
    UpsertBatch "upsert_batch" Write;
    UpsertFrom "upsert_from" Write;
    UpsertParts "upsert_parts" Write;
    BatchUpsertFrom "batch_upsert_from" Write;
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Operation {
    /// Returns whether the operation may replace a value.
    pub fn replaces(self) -> bool {
        use Operation::{BatchUpsertFrom, Upsert, UpsertBatch, UpsertFrom, UpsertParts};
        matches!(self, Upsert | UpsertBatch | UpsertFrom | UpsertParts | BatchUpsertFrom)
    }

    fn is_single(self) -> bool {
        use Operation::{GetBuffer, GetInto, Put, PutFrom, PutParts, Upsert, UpsertFrom, UpsertParts};
        matches!(self, GetBuffer | GetInto | Put | PutFrom | PutParts | Upsert | UpsertFrom | UpsertParts)
    }
}

tokio::task_local! {
    /// Call that the task executes. Calls inside it are counted as this call.
    pub(crate) static CURRENT_CALL: StartedCall;
}

/// Call that consists of other calls, and its start time.
#[derive(Clone, Copy, Debug)]
pub struct StartedCall(pub(crate) Operation, pub(crate) Option<Moment>);

/// Counters of one operation.
#[derive(Debug, Default)]
pub(crate) struct OperationCounts {
    bytes: AtomicU64,
    pub(crate) latency: Micros,
}

impl OperationCounts {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

/// Counters of one direction, by the outcome of objects.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// Bytes that were transferred. A write counts its bytes once per replica.
    pub(crate) bytes: AtomicU64,
    pub(crate) done: AtomicU64,
    /// Reads of missing objects, or writes of existing objects.
    pub(crate) other: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Transfer time of calls with one object.
    pub(crate) single: Micros,
    /// Transfer time of calls with several objects.
    pub(crate) batch: Micros,
}

impl Objects {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Returns the counts of objects that were done, were missing or existed, and failed.
    pub(crate) fn outcomes(&self) -> [u64; 3] {
        [&self.done, &self.other, &self.failed].map(|count| count.load(Relaxed))
    }
}

/// Metrics of a client since its start.
#[derive(Debug)]
pub struct Metrics {
    pub(crate) clock: SharedClock,
    pub(crate) started: Moment,
    pub(crate) calls: Arc<CallMeter>,
    pub(crate) read: Objects,
    pub(crate) written: Objects,
    pub(crate) operations: Box<[OperationCounts]>,
    /// Time of the last response to a heartbeat in milliseconds since 1970; 0 for none.
    heartbeat_ms: AtomicU64,
    /// True if the master knew the client at that time.
    is_known: AtomicBool,
}

impl Metrics {
    pub(crate) fn new(clock: SharedClock) -> Self {
        Self {
            started: clock.now(),
            calls: Arc::new(CallMeter::new(clock.clone())),
            read: Objects::default(),
            written: Objects::default(),
            operations: Operation::ALL.iter().map(|_| OperationCounts::default()).collect(),
            heartbeat_ms: AtomicU64::new(0),
            is_known: AtomicBool::new(false),
            clock,
        }
    }

    /// Records a response of the master to a heartbeat, and whether the master knows the client.
    pub(crate) fn record_heartbeat(&self, is_known: bool) {
        self.heartbeat_ms.store(self.clock.wall_ms(), Relaxed);
        self.is_known.store(is_known, Relaxed);
    }

    /// Returns whether the master knew the client at the last heartbeat, and the time of that in
    /// seconds since 1970; 0 for none.
    pub(crate) fn heartbeat(&self) -> (bool, u64) {
        (self.is_known.load(Relaxed), self.heartbeat_ms.load(Relaxed) / 1000)
    }

    /// Returns the operations that were called at least once.
    pub(crate) fn operations(
        &self,
        direction: Direction,
    ) -> impl Iterator<Item = (&'static str, &OperationCounts)> {
        let all = Operation::ALL.iter().zip(&self.operations);
        all.filter(move |(operation, counts)| {
            operation.direction() == direction && counts.latency.count() > 0
        })
        .map(|(operation, counts)| (operation.name(), counts))
    }

    /// Returns the time since the start of the client.
    pub(crate) fn age(&self) -> Duration {
        self.clock.now().since(self.started)
    }

    fn objects(&self, direction: Direction) -> &Objects {
        match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.written,
        }
    }
}

/// Call that is being counted. Nothing is counted if the client has no metrics, or if the call is
/// dropped before its end.
#[derive(Debug)]
pub(crate) struct Counting<'m> {
    pub(crate) metrics: Option<&'m Metrics>,
    pub(crate) operation: Operation,
    pub(crate) started: Moment,
    /// Time of the transfers of the call.
    pub(crate) transfer_time: Duration,
    pub(crate) bytes: u64,
    pub(crate) transferred: u64,
    pub(crate) outcomes: [u64; 3],
}

impl Counting<'_> {
    /// Returns a value that counts nothing, for work outside a call of the application.
    pub(crate) fn nothing() -> Self {
        Self {
            metrics: None,
            operation: Operation::GetBuffer,
            started: Moment::default(),
            transfer_time: Duration::ZERO,
            bytes: 0,
            transferred: 0,
            outcomes: [0; 3],
        }
    }

    /// Returns the start time of a transfer.
    pub(crate) fn transfer_start(&self) -> Moment {
        self.metrics.map_or(Moment::default(), |metrics| metrics.clock.now())
    }

    /// Records a transfer that started at `start`.
    pub(crate) fn record_transfer(&mut self, start: Moment, bytes: u64) {
        if let Some(metrics) = self.metrics {
            self.transfer_time += metrics.clock.now().since(start);
            self.transferred += bytes;
        }
    }

    /// Counts an object that was read or written.
    pub(crate) fn done(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.outcomes[0] += 1;
    }

    /// Counts the outcome of a read.
    pub(crate) fn read(&mut self, outcome: &Result<Option<usize>>) {
        match outcome {
            Ok(Some(len)) => self.done(*len),
            Ok(None) => self.outcomes[1] += 1,
            Err(error) => self.failed(error.kind()),
        }
    }

    /// Counts the outcome of a write.
    pub(crate) fn written(&mut self, outcome: &Result<PutOutcome>, len: usize) {
        match outcome {
            Ok(PutOutcome::Stored) => self.done(len),
            Ok(PutOutcome::Existed) => self.outcomes[1] += 1,
            Err(error) => self.failed(error.kind()),
        }
    }

    /// Counts the outcome of the transfer of a part.
    pub(crate) fn part(&mut self, outcome: &Result<()>, len: usize) {
        match outcome {
            Ok(()) => self.done(len),
            Err(error) => self.failed(error.kind()),
        }
    }

    /// Counts an object that was not read or written, by the kind of the error.
    pub(crate) fn failed(&mut self, kind: ErrorKind) {
        self.outcomes[if kind == ErrorKind::NotFound { 1 } else { 2 }] += 1;
    }

    /// Adds the call to the metrics.
    pub(crate) fn end(self) {
        let Some(metrics) = self.metrics else { return };
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let counts = &metrics.operations[self.operation as usize];
        counts.bytes.fetch_add(self.bytes, Relaxed);
        counts.latency.note(micros(metrics.clock.now().since(self.started)));
        let objects = metrics.objects(self.operation.direction());
        for (counter, count) in
            [&objects.done, &objects.other, &objects.failed].into_iter().zip(self.outcomes)
        {
            counter.fetch_add(count, Relaxed);
        }
        if self.transferred > 0 {
            objects.bytes.fetch_add(self.transferred, Relaxed);
            let latency = if self.operation.is_single() { &objects.single } else { &objects.batch };
            latency.note(micros(self.transfer_time));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_numbered_as_they_are_listed() {
        for (at, operation) in Operation::ALL.iter().enumerate() {
            assert_eq!(*operation as usize, at, "{}", operation.name());
        }
    }
}
