//! Destinations of reads into memory of the caller, and the parts of such reads.

use mooncake_core::{Error, Result};
use mooncake_protocol::wire::MemoryRange;
use mooncake_transport::{SliceMut, Transport};

use super::call::PartResults;
use super::client::LocalInner;
use super::shared::LocalBuf;
use crate::batch_parts::part_len;
use crate::deadline::Deadline;

/// Outcome of a read into memory of the caller, and the memory.
#[derive(Debug)]
pub struct LocalRead<R, T: Transport> {
    /// Outcome of the read.
    pub result: Result<R>,
    /// Memory of the caller, or `None` if the daemon may still write to it.
    pub into: Option<SliceMut<T>>,
}

impl<R, T: Transport> LocalRead<R, T> {
    pub(super) fn failed(error: Error, into: Option<SliceMut<T>>) -> Self {
        Self { result: Err(error), into }
    }
}

/// Destination of the bytes of a read.
pub(super) enum Sink<T: Transport> {
    /// Memory of the caller, which the daemon also maps.
    Direct(SliceMut<T>),
    /// Shared buffer, from which the bytes are then copied to the caller.
    Copied(LocalBuf),
}

impl LocalInner {
    /// Returns the shared memory that receives the bytes for `into`. If the daemon does not map
    /// `into`, the slice is returned, too, for a later copy.
    async fn sink<T: Transport>(
        &self,
        into: SliceMut<T>,
        deadline: &Deadline,
    ) -> Result<(Sink<T>, MemoryRange, Option<SliceMut<T>>), (Error, SliceMut<T>)> {
        match self.memories.find_range(into.addr(), into.len()) {
            Some(range) => Ok((Sink::Direct(into), range, None)),
            None => match self.allocate(into.len(), deadline).await {
                Ok(buffer) => {
                    let range = buffer.shared_range(0, buffer.len());
                    Ok((Sink::Copied(buffer), range, Some(into)))
                }
                Err(error) => Err((error, into)),
            },
        }
    }
}

impl<T: Transport> Sink<T> {
    /// Returns the memory of the caller, with the first `len` bytes of the read in it.
    fn finish(self, caller_slice: Option<SliceMut<T>>, len: usize) -> LocalRead<(), T> {
        match (self, caller_slice) {
            (Sink::Direct(into), _) => LocalRead { result: Ok(()), into: Some(into) },
            (Sink::Copied(buffer), Some(mut into)) => {
                LocalRead { result: into.copy_from(0, &buffer[..len.min(buffer.len())]), into: Some(into) }
            }
            (Sink::Copied(_), None) => LocalRead::failed(Error::internal("a read lost its memory"), None),
        }
    }
}

/// Reads with the destinations of their bytes.
pub(super) struct ReadPlan<T: Transport> {
    /// Index and memory range of each read that is sent to the daemon.
    pub(super) ranges: Vec<(usize, MemoryRange)>,
    /// Destinations of these reads, in the same order.
    pub(super) sinks: Vec<Sink<T>>,
    pub(super) slices: CallerSlices<T>,
}

/// Results of the reads that were sent, and their destinations.
pub(super) type SentResults<A, T> = PartResults<A, Vec<Sink<T>>>;

/// State of every read on the side of the caller.
pub(super) struct CallerSlices<T: Transport>(Vec<CallerSlice<T>>);

/// Slice that the bytes are copied to, if they are copied. The error holds the reason for which the
/// read was not sent, and its slice.
type CallerSlice<T> = Result<Option<SliceMut<T>>, (Error, SliceMut<T>)>;

impl<T: Transport> ReadPlan<T> {
    pub(super) async fn of(inner: &LocalInner, slices: Vec<SliceMut<T>>, deadline: &Deadline) -> Self {
        let mut plan = Self {
            ranges: Vec::new(),
            sinks: Vec::new(),
            slices: CallerSlices(Vec::with_capacity(slices.len())),
        };
        for (i, into) in slices.into_iter().enumerate() {
            plan.slices.0.push(match inner.sink(into, deadline).await {
                Ok((sink, range, caller_slice)) => {
                    plan.ranges.push((i, range));
                    plan.sinks.push(sink);
                    Ok(caller_slice)
                }
                Err(failed) => Err(failed),
            });
        }
        plan
    }
}

/// Outcomes of the reads of a part, and the error of a call that the daemon has not answered.
pub(super) type PartOutcome<R, T> = (Vec<LocalRead<R, T>>, Option<Error>);

impl<T: Transport> CallerSlices<T> {
    /// Combines results with memory. `len` returns the number of bytes of a successful read.
    pub(super) fn combine<A, R>(
        self,
        response: Result<SentResults<A, T>>,
        read: impl Fn(A) -> R,
        len: impl Fn(&R) -> usize,
    ) -> PartOutcome<R, T> {
        let (results, sinks, failure) = match response {
            Ok(answered) => (answered.results, answered.held, answered.failure),
            Err(error) => (Vec::new(), Vec::new(), Some(error)),
        };
        let mut ended = results.into_iter().zip(sinks.into_iter().flatten());
        let combined = self.0.into_iter().map(|caller_slice| match caller_slice {
            Err((error, into)) => LocalRead::failed(error, Some(into)),
            Ok(caller_slice) => {
                let Some((result, sink)) = ended.next() else {
                    let error =
                        failure.clone().unwrap_or_else(|| Error::internal("response without an item"));
                    return LocalRead::failed(error, caller_slice);
                };
                match result.map(&read) {
                    Ok(value) => {
                        let LocalRead { result, into } = sink.finish(caller_slice, len(&value));
                        LocalRead { result: result.map(|()| value), into }
                    }
                    Err(error) => LocalRead::failed(error, sink.finish(caller_slice, 0).into),
                }
            }
        });
        (combined.collect(), failure)
    }
}

/// Splits the items of a batch into parts. `len` returns the number of bytes of an item.
pub(super) fn by_parts<I>(items: Vec<I>, len: impl Fn(&I) -> usize) -> Vec<Vec<I>> {
    let lens: Vec<u64> = items.iter().map(|item| len(item) as u64).collect();
    let (mut rest, mut parts) = (&lens[..], Vec::new());
    let mut items = items.into_iter();
    while !rest.is_empty() {
        let count = part_len(rest.iter().copied());
        parts.push(items.by_ref().take(count).collect());
        rest = &rest[count..];
    }
    parts
}

/// Reads parts of a batch one after the other. After a part without a response of the daemon, the
/// others have its error, and their memory is returned.
pub(super) async fn each_part<I, R, T: Transport, F: Future<Output = PartOutcome<R, T>>>(
    parts: Vec<Vec<I>>,
    into: impl Fn(I) -> SliceMut<T>,
    read: impl Fn(Vec<I>) -> F,
) -> Vec<LocalRead<R, T>> {
    let (mut reads, mut failure) = (Vec::new(), None);
    for part in parts {
        match &failure {
            None => {
                let (ended, error) = read(part).await;
                reads.extend(ended);
                failure = error;
            }
            Some(error) => {
                reads.extend(
                    part.into_iter().map(|one| LocalRead::failed(Error::clone(error), Some(into(one)))),
                );
            }
        }
    }
    reads
}
