//! What a client has done, counted without a lock and without allocating.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{ErrorKind, Result};

use crate::payload::PutOutcome;
use mooncake_protocol::meter::CallMeter;
use mooncake_protocol::metrics::Micros;

/// Declares the calls that are counted by name, in the order of the page.
macro_rules! operations {
    ($($name:ident $label:literal $direction:ident;)*) => {
        /// Calls of the store, by the names that the existing system counts them under.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Operation {
            $(#[doc = concat!("`", $label, "`.")] $name,)*
        }

        impl Operation {
            const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Its name.
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

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Operation {
    /// Whether it is a write that may replace a value.
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
    /// The call that the task is in, for whoever makes it of others.
    pub(crate) static CALLED: Begun;
}

/// A call that others are part of, and when it began.
#[derive(Clone, Copy, Debug)]
pub struct Begun(pub(crate) Operation, pub(crate) Option<Moment>);

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

/// Objects of one direction, by what became of them.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// Bytes that were moved; of a write, to every replica.
    pub(crate) bytes: AtomicU64,
    pub(crate) done: AtomicU64,
    /// Read: not there. Written: there already.
    pub(crate) other: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Time bytes were under way, for calls of one object and of several.
    pub(crate) single: Micros,
    pub(crate) batch: Micros,
}

impl Objects {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Done, the other good outcome, and failed.
    pub(crate) fn outcomes(&self) -> [u64; 3] {
        [&self.done, &self.other, &self.failed].map(|count| count.load(Relaxed))
    }
}

/// What a client has done since it joined.
#[derive(Debug)]
pub struct Metrics {
    pub(crate) clock: SharedClock,
    pub(crate) began: Moment,
    pub(crate) calls: Arc<CallMeter>,
    pub(crate) read: Objects,
    pub(crate) written: Objects,
    pub(crate) operations: Box<[OperationCounts]>,
}

impl Metrics {
    pub(crate) fn new(clock: SharedClock) -> Self {
        Self {
            began: clock.now(),
            calls: Arc::new(CallMeter::new(clock.clone())),
            read: Objects::default(),
            written: Objects::default(),
            operations: Operation::ALL.iter().map(|_| OperationCounts::default()).collect(),
            clock,
        }
    }

    /// Those made at least once.
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

    /// How long it has been.
    pub(crate) fn age(&self) -> Duration {
        self.clock.now().since(self.began)
    }

    fn objects(&self, direction: Direction) -> &Objects {
        match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.written,
        }
    }
}

/// A call that is being counted. Nothing is, where the client has no metrics; a call that is given
/// up is not, either.
#[derive(Debug)]
pub(crate) struct Counting<'m> {
    pub(crate) metrics: Option<&'m Metrics>,
    pub(crate) operation: Operation,
    pub(crate) began: Moment,
    /// Time that bytes were under way.
    pub(crate) moving: Duration,
    pub(crate) bytes: u64,
    pub(crate) moved: u64,
    pub(crate) outcomes: [u64; 3],
}

impl Counting<'_> {
    /// Of what is no call of the caller's.
    pub(crate) fn nothing() -> Self {
        Self {
            metrics: None,
            operation: Operation::GetBuffer,
            began: Moment::default(),
            moving: Duration::ZERO,
            bytes: 0,
            moved: 0,
            outcomes: [0; 3],
        }
    }

    /// Bytes are under way from now on.
    pub(crate) fn moving(&self) -> Moment {
        self.metrics.map_or(Moment::default(), |metrics| metrics.clock.now())
    }

    /// They were, since then.
    pub(crate) fn moved(&mut self, since: Moment, bytes: u64) {
        if let Some(metrics) = self.metrics {
            self.moving += metrics.clock.now().since(since);
            self.moved += bytes;
        }
    }

    /// An object was read or written.
    pub(crate) fn done(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.outcomes[0] += 1;
    }

    /// The value of a key that was read, or not there.
    pub(crate) fn read(&mut self, outcome: &Result<Option<usize>>) {
        match outcome {
            Ok(Some(len)) => self.done(*len),
            Ok(None) => self.outcomes[1] += 1,
            Err(error) => self.failed(error.kind()),
        }
    }

    /// A value that was written, or there already.
    pub(crate) fn written(&mut self, outcome: &Result<PutOutcome>, len: usize) {
        match outcome {
            Ok(PutOutcome::Stored) => self.done(len),
            Ok(PutOutcome::Existed) => self.outcomes[1] += 1,
            Err(error) => self.failed(error.kind()),
        }
    }

    /// A part that was moved, or not.
    pub(crate) fn part(&mut self, outcome: &Result<()>, len: usize) {
        match outcome {
            Ok(()) => self.done(len),
            Err(error) => self.failed(error.kind()),
        }
    }

    /// An object of which nothing came, for this reason.
    pub(crate) fn failed(&mut self, kind: ErrorKind) {
        self.outcomes[if kind == ErrorKind::NotFound { 1 } else { 2 }] += 1;
    }

    /// The call is over.
    pub(crate) fn end(self) {
        let Some(metrics) = self.metrics else { return };
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let counts = &metrics.operations[self.operation as usize];
        counts.bytes.fetch_add(self.bytes, Relaxed);
        counts.latency.note(micros(metrics.clock.now().since(self.began)));
        let objects = metrics.objects(self.operation.direction());
        for (counter, count) in
            [&objects.done, &objects.other, &objects.failed].into_iter().zip(self.outcomes)
        {
            counter.fetch_add(count, Relaxed);
        }
        if self.moved > 0 {
            objects.bytes.fetch_add(self.moved, Relaxed);
            let latency = if self.operation.is_single() { &objects.single } else { &objects.batch };
            latency.note(micros(self.moving));
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
