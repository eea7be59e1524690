//! One wire as the fallback of another: what fails on the faster one is asked of the slower one, operation by operation.

use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use parking_lot::Mutex;

use crate::ticket::{Completion, is_given_back};
use crate::transport::Op;

/// An operation as the slower wire is asked for it, and its share. It has neither registration nor key: the slower wire needs none.
pub type Retry<S> = (Op<'static, S>, Completion);

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

/// Wraps a submission to the faster wire. Those operations that fail there while there is time are handed to `again`, together, when all
/// are over; each finishes once, with what became of it last.
///
/// Costs a few allocations per submission, and none per operation.
pub fn with_fallback<'a, R: 'a, S: Send + Sync + 'static>(
    ops: impl ExactSizeIterator<Item = Op<'a, R>>,
    done: Completion,
    clock: &SharedClock,
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
                Some(_) if in_time && wanted && !final_ones.contains(&index) => {
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
