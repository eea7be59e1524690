//! One wire as the fallback of another: what fails on the faster one is asked of the slower one, operation by operation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::clock::SharedClock;
use mooncake_core::{Error, ErrorKind};
use parking_lot::Mutex;

use crate::ticket::{Completion, is_given_back};
use crate::transport::Op;

/// An operation as the slower wire is asked for it, and its share. It has neither registration nor key: the slower wire needs none.
pub type Retry<S> = (Op<'static, S>, Completion);

/// Counts what a faster wire has left to the slower one behind it.
#[derive(Debug, Default)]
pub struct Behind {
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Behind {
    /// These operations go to the slower wire.
    pub fn add<S>(&self, left: &[(Op<'_, S>, Completion)]) {
        self.requests.fetch_add(left.len() as u64, Ordering::Relaxed);
        let bytes: usize = left.iter().map(|(op, _)| op.len()).sum();
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Requests and their bytes.
    pub fn so_far(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

/// A submission to the faster wire, wrapped by [`with_fallback`].
#[derive(Debug)]
pub struct Guarded<'a, R> {
    /// What to submit,
    pub ops: Vec<Op<'a, R>>,
    /// and the completion to submit it with.
    pub done: Completion,
    /// Operations that are with the slower wire already.
    pub elsewhere: Elsewhere,
}

/// Which operations of a submission are not to be tried again.
#[derive(Clone, Debug, Default)]
pub struct Elsewhere(Arc<Mutex<Vec<usize>>>);

impl Elsewhere {
    /// The operations of this share are with the slower wire: what comes of them there is final.
    pub fn add(&self, share: &Completion) {
        self.0.lock().extend(share.numbers());
    }
}

/// Whether an error says that the way to the peer failed, or the peer: another way may lead there. A request that is wrong, of memory that the
/// peer has not registered for one, is wrong on every way.
pub fn of_the_way(error: &Error) -> bool {
    error.kind() != ErrorKind::Invalid
}

/// Any error, for a wire that knows of part of the peer's memory only, and cannot say that there is no other.
pub fn any(_: &Error) -> bool {
    true
}

/// Wraps a submission to the faster wire. Those operations that fail there while there is time, with an error that `is_worth_it`
/// ([`of_the_way`], [`any`]), are handed to `again`, together, when all are over; each finishes once, with what became of it last.
///
/// Costs a few allocations per submission, and none per operation.
pub fn with_fallback<'a, R: 'a, S: Send + Sync + 'static>(
    ops: impl ExactSizeIterator<Item = Op<'a, R>>,
    done: Completion,
    clock: &SharedClock,
    is_worth_it: fn(&Error) -> bool,
    again: impl FnOnce(Vec<Retry<S>>) + Send + 'static,
) -> Guarded<'a, R> {
    let ops: Vec<Op<'a, R>> = ops.collect();
    // SAFETY: what was promised for an operation holds until its completion is finished; the one that was given is not before all
    // that is made from these is over.
    let bare: Vec<Op<'static, S>> =
        ops.iter().map(|op| unsafe { Op::new(op.opcode(), None, op.local(), op.remote(), &[]) }).collect();
    let (clock, elsewhere) = (Arc::clone(clock), Elsewhere::default());
    let final_ones = elsewhere.clone();
    let done = done.intercept(move |failures, outer| {
        let deadline = outer.deadline();
        let in_time = deadline.is_none_or(|at| clock.now() < at);
        let wanted = !outer.is_given_up();
        let final_ones = std::mem::take(&mut *final_ones.0.lock());
        let mut failed = Vec::new();
        for (index, (failure, share)) in failures.into_iter().zip(outer.each()).enumerate() {
            match failure {
                None => share.finish(Ok(())),
                Some(error) if is_given_back(&error) => share.give_back(),
                Some(error) if in_time && wanted && is_worth_it(&error) && !final_ones.contains(&index) => {
                    failed.push((bare[index], share));
                }
                Some(error) => share.finish(Err(error)),
            }
        }
        if !failed.is_empty() {
            tracing::debug!(operations = failed.len(), "the faster wire failed; going on with the other one");
            again(failed);
        }
    });
    Guarded { ops, done, elsewhere }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::ErrorCode;
    use mooncake_core::clock::SystemClock;
    use mooncake_core::memory::{HostMemory, MemorySource};

    use crate::ticket::ticket;
    use crate::transport::Opcode;

    /// A request that is wrong is answered by the wire that found it out, and costs the other one nothing.
    #[test]
    fn only_what_failed_on_the_way_is_tried_again() {
        let memory = HostMemory::new(64).unwrap();
        for (is_worth_it, asked) in [(of_the_way as fn(&Error) -> bool, vec![2, 3]), (any, vec![1, 2, 3])] {
            // SAFETY: nothing is moved.
            let op = |i: u64| unsafe { Op::<()>::new(Opcode::Read, None, memory.span(), i, &[]) };
            let (done, ticket) = ticket((), 4, None);
            let again = move |failed: Vec<Retry<()>>| {
                assert_eq!(failed.iter().map(|(op, _)| op.remote()).collect::<Vec<_>>(), asked);
                failed.into_iter().for_each(|(_, share)| share.finish(Ok(())));
            };
            let guarded = with_fallback(
                [0, 1, 2, 3].into_iter().map(op),
                done,
                &SystemClock::shared(),
                is_worth_it,
                again,
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
            match is_worth_it(&Error::invalid("")) {
                true => assert!(failed.is_empty(), "{failed:?}"),
                false => assert!(failed.len() == 1 && failed[0].message() == "no such memory", "{failed:?}"),
            }
        }
    }
}
