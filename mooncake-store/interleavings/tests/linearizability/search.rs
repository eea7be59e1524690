//! Search for an order of calls that explains their results (Wing and Gong 1993).

use std::collections::HashSet;

use crate::model::{Model, Step};

/// Call about one key, with the times of its begin and end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) step: Step,
}

/// Returns whether an order of the events explains all results. An event that ends before another
/// one begins comes before it.
pub(crate) fn is_linearizable(events: &[Event]) -> bool {
    assert!(events.len() <= 128, "the set of finished events is a number");
    let all = if events.len() == 128 { u128::MAX } else { (1 << events.len()) - 1 };
    let mut seen = HashSet::new();
    let mut open = vec![(0u128, Model::default())];
    while let Some((done, model)) = open.pop() {
        if done == all {
            return true;
        }
        let left = || (0..events.len()).filter(|at| done & (1 << at) == 0);
        let first_end = left().map(|at| events[at].end).min().unwrap_or(u64::MAX);
        for at in left().filter(|at| events[*at].begin < first_end) {
            for next in model.apply(&events[at].step) {
                let state = (done | 1 << at, next);
                if !seen.contains(&state) {
                    seen.insert(state.clone());
                    open.push(state);
                }
            }
        }
    }
    false
}
