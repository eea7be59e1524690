//! A slower transport as the fallback of a faster one: each operation that the faster transport
//! does not carry, or that fails there, is submitted to the slower one.

use std::ops::Range;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::{Error, ErrorKind};
use parking_lot::Mutex;

use crate::protocol::Protocol;
pub use crate::statistics::FallbackCounter;
use crate::ticket::{Completion, was_cancelled};
use crate::transport::{Op, Transport};

/// Operation for the slower transport, and its share of the completion. It has no registration and
/// no key, because the slower transport needs none.
pub type Retry<S> = (Op<'static, S>, Completion);

/// Submission to the faster transport, wrapped by [`with_fallback`].
#[derive(Debug)]
pub struct Guarded<'a, R> {
    /// Operations to submit to the faster transport.
    pub ops: Vec<Op<'a, R>>,
    /// Completion to submit with the operations.
    pub done: Completion,
    /// Operations that the slower transport carries already.
    pub final_operations: FinalOperations,
}

/// Set of the operations of a submission whose failure is final.
#[derive(Clone, Debug, Default)]
pub struct FinalOperations(Arc<Mutex<Vec<Range<usize>>>>);

impl FinalOperations {
    /// Adds the operations of a share. The slower transport carries them, so that their outcome is
    /// final.
    pub fn add(&self, share: &Completion) {
        let (numbers, mut ranges) = (share.numbers(), self.0.lock());
        match ranges.last_mut() {
            // Transports handle operations in order, so that one range is the usual case.
            Some(last) if last.end == numbers.start => last.end = numbers.end,
            _ => ranges.push(numbers),
        }
    }

    /// Takes the operations, as ranges in order.
    fn take(&self) -> Vec<Range<usize>> {
        let mut ranges = std::mem::take(&mut *self.0.lock());
        ranges.sort_unstable_by_key(|range| range.start);
        ranges
    }
}

/// Returns whether an error is one of the path or the peer, so that another transport may succeed.
/// An invalid request, such as one for memory that the peer has not registered, fails on every
/// transport.
pub fn is_path_error(error: &Error) -> bool {
    error.kind() != ErrorKind::Invalid
}

/// Accepts every error. For a transport that knows a part of the peer's memory only, and cannot
/// tell an invalid range from one of the other part.
pub fn is_any_error(_: &Error) -> bool {
    true
}

/// Wraps a submission to the faster transport. When all operations are finished, those that failed
/// before the deadline with an error accepted by `is_retryable` ([`is_path_error`],
/// [`is_any_error`]) are passed to `retry` together. Each operation finishes once, with its last
/// outcome.
///
/// The cost is a few allocations per submission, and none per operation.
pub fn with_fallback<'a, R: 'a, S: Send + Sync + 'static>(
    ops: impl ExactSizeIterator<Item = Op<'a, R>>,
    done: Completion,
    clock: &SharedClock,
    is_retryable: fn(&Error) -> bool,
    retry: impl FnOnce(Vec<Retry<S>>) + Send + 'static,
) -> Guarded<'a, R> {
    let ops: Vec<Op<'a, R>> = ops.collect();
    // SAFETY: the promises for an operation hold until its completion is finished, and `done`
    // finishes after all operations made from these.
    let without_registration: Vec<Op<'static, S>> =
        ops.iter().map(|op| unsafe { Op::new(op.opcode(), None, op.local(), op.remote(), &[]) }).collect();
    let (clock, final_operations) = (Arc::clone(clock), FinalOperations::default());
    let final_ranges = final_operations.clone();
    let done = done.intercept(move |failures, outer| {
        let deadline = outer.deadline();
        let in_time = deadline.is_none_or(|at| clock.now() < at);
        let is_active = !outer.is_cancelled();
        let final_ranges = final_ranges.take();
        let is_final = |index: usize| {
            let after = final_ranges.partition_point(|range| range.start <= index);
            after.checked_sub(1).is_some_and(|last| final_ranges[last].contains(&index))
        };
        let mut failed = Vec::new();
        for (index, (failure, share)) in failures.into_iter().zip(outer.each()).enumerate() {
            match failure {
                None => share.finish(Ok(())),
                Some(error) if was_cancelled(&error) => share.finish_cancelled(),
                Some(error) if in_time && is_active && is_retryable(&error) && !is_final(index) => {
                    failed.push((without_registration[index], share));
                }
                Some(error) => share.finish(Err(error)),
            }
        }
        if !failed.is_empty() {
            tracing::debug!(operations = failed.len(), "operations fall back to the slower transport");
            retry(failed);
        }
    });
    Guarded { ops, done, final_operations }
}

/// Transport that reaches a part of the peers' memory, in front of a slower one that reaches all.
pub trait PartialTransport: Transport {
    /// Accepts the errors after which the slower transport is tried.
    const IS_RETRYABLE: fn(&Error) -> bool;

    /// Returns the clock of completion deadlines.
    fn clock(&self) -> &SharedClock;

    /// Returns the length of submissions that finish before the submit call returns.
    fn inline_bytes(&self) -> usize {
        0
    }

    /// Submits operations as [`Transport::submit`] does, and passes each operation that this
    /// transport does not carry to `missed` before it returns.
    fn submit_or<'a, I, F>(&self, peer: &Self::Peer, ops: I, done: Completion, missed: F)
    where
        I: ExactSizeIterator<Item = Op<'a, Self::Registration>>,
        F: FnMut(Op<'a, Self::Registration>, Completion);
}

/// Peer of a faster transport, with its peer of the slower transport if that reaches it.
#[derive(Clone, Debug)]
pub struct FallbackPeer<F, S> {
    fast: F,
    slow: Option<S>,
    counter: Arc<FallbackCounter>,
}

impl<F, S: Clone + Send + Sync + 'static> FallbackPeer<F, S> {
    /// Joins the peers of both transports.
    pub fn new(fast: F, slow: Option<S>) -> Self {
        Self { fast, slow, counter: Arc::default() }
    }

    /// Returns the name of the path: that of the faster transport, or `fast+slow`.
    pub fn path_name(&self, fast: &Protocol, slow: &Protocol) -> Protocol {
        match self.slow {
            Some(_) => Protocol::new(format!("{fast}+{slow}")),
            None => fast.clone(),
        }
    }

    /// Returns whether one of the transports has a connection to the peer.
    pub fn is_connected<T, U>(&self, fast: Option<&T>, slow: Option<&U>) -> bool
    where
        T: Transport<Peer = F>,
        U: Transport<Peer = S>,
    {
        fast.is_some_and(|fast| fast.is_connected(&self.fast))
            || slow.zip(self.slow.as_ref()).is_some_and(|(slow, peer)| slow.is_connected(peer))
    }

    /// Sets the counter of operations that fall back.
    pub fn count_fallback(&mut self, counter: &Arc<FallbackCounter>) {
        self.counter.clone_from(counter);
    }

    /// Submits operations to the faster transport, and to the slower one those that the faster
    /// transport does not carry or that fail there. The slower transport needs no registrations.
    pub fn submit<'a, T, U, I>(&self, fast: &T, slow: Option<&Arc<U>>, ops: I, done: Completion)
    where
        T: PartialTransport<Peer = F>,
        U: Transport<Peer = S>,
        I: ExactSizeIterator<Item = Op<'a, T::Registration>>,
    {
        let (Some(slow), Some(peer)) = (slow, &self.slow) else {
            return fast.submit(&self.fast, ops, done);
        };
        let (ops, mut missed): (Vec<_>, _) = (ops.collect(), Vec::new());
        // SAFETY: no registration is given.
        let without_registration = |op: &Op<'a, T::Registration>| unsafe { op.with_registration(None) };
        let inline = fast.inline_bytes();
        // A short submission finishes before the call returns, and its missed operations are known.
        if inline > 0 && ops.iter().map(Op::len).sum::<usize>() <= inline {
            fast.submit_or(&self.fast, ops.into_iter(), done, |op, share| {
                missed.push((without_registration(&op), share))
            });
        } else {
            let (weak, peer, counter) = (Arc::downgrade(slow), peer.clone(), self.counter.clone());
            let guarded =
                with_fallback(ops.into_iter(), done, fast.clock(), T::IS_RETRYABLE, move |failed| {
                    if let Some(slow) = weak.upgrade() {
                        count(&counter, &failed);
                        slow.submit_shares(&peer, failed);
                    }
                });
            let final_operations = guarded.final_operations;
            fast.submit_or(&self.fast, guarded.ops.into_iter(), guarded.done, |op, share| {
                final_operations.add(&share);
                missed.push((without_registration(&op), share));
            });
        }
        if !missed.is_empty() {
            count(&self.counter, &missed);
            slow.submit_shares(peer, missed);
        }
    }
}

fn count<S>(counter: &FallbackCounter, ops: &[(Op<'_, S>, Completion)]) {
    counter.add(ops.len(), ops.iter().map(|(op, _)| op.len()).sum());
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::ErrorCode;
    use mooncake_core::clock::SystemClock;
    use mooncake_core::memory::{HostMemory, MemorySource};

    use crate::ticket::ticket;
    use crate::transport::Opcode;

    /// An invalid request finishes with the error of the faster transport.
    #[test]
    fn only_path_errors_are_retried() {
        let memory = HostMemory::new(64).unwrap();
        for (is_retryable, retried) in
            [(is_path_error as fn(&Error) -> bool, vec![2, 3]), (is_any_error, vec![1, 2, 3])]
        {
            // SAFETY: no byte is moved.
            let op = |i: u64| unsafe { Op::<()>::new(Opcode::Read, None, memory.span(), i, &[]) };
            let (done, ticket) = ticket((), 4, None);
            let retry = move |failed: Vec<Retry<()>>| {
                assert_eq!(failed.iter().map(|(op, _)| op.remote()).collect::<Vec<_>>(), retried);
                failed.into_iter().for_each(|(_, share)| share.finish(Ok(())));
            };
            let guarded = with_fallback(
                [0, 1, 2, 3].into_iter().map(op),
                done,
                &SystemClock::shared(),
                is_retryable,
                retry,
            );
            let outcomes = [
                Ok(()),
                Err(Error::invalid("no such memory")),
                Err(Error::new(ErrorCode::TransferFail, "gone")),
                Err(Error::new(ErrorCode::NoAvailableHandle, "full")),
            ];
            guarded.done.each().zip(outcomes).for_each(|(share, outcome)| share.finish(outcome));
            let (results, ()) = ticket.results().wait();
            let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
            match is_retryable(&Error::invalid("")) {
                true => assert!(failed.is_empty(), "{failed:?}"),
                false => assert!(failed.len() == 1 && failed[0].message() == "no such memory", "{failed:?}"),
            }
        }
    }
}
