//! RPC service of a master that counts its calls.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::state::State;
use tokio::sync::Semaphore;

use mooncake_core::fault_injection::is_planted;
use mooncake_master::Master;
use mooncake_protocol::message::{RemoveAll, RemoveByRegex, Request};
use mooncake_protocol::server::{Class, Refusal, Service};
use mooncake_protocol::service::MasterService;

/// Length of a body from which a call counts as long: some thousands of keys.
const LONG_BODY: usize = 256 << 10;
/// Length of a body from which a call waits for its turn: some hundreds of keys.
const TURN_BODY: usize = 8 << 10;

/// Service that counts calls on their way to the master.
pub(super) struct Counted {
    state: Arc<State>,
    calls: MasterService<Master>,
}

impl Counted {
    pub(super) fn new(state: Arc<State>) -> Self {
        state.master.set_run_blocking(|work| run_blocking(work));
        let calls = MasterService(state.master.clone());
        Self { state, calls }
    }
}

impl Service for Counted {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.call_received(function, body, self.receipt(), out)
    }

    fn receipt(&self) -> u64 {
        self.calls.0.logical_time()
    }

    fn call_received(
        &self,
        function: u32,
        body: &[u8],
        receipt: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let clock = self.calls.0.clock();
        let begun = clock.now();
        let mut call = || self.calls.counted(function, body, Some(receipt), out);
        // A long call would block the other connections of a thread.
        let is_long = body.len() > LONG_BODY || self.calls.treatment(function).visits_all;
        let (outcome, tally) = if is_long { run_blocking(call) } else { call() };
        self.state.requests.count(function, tally, clock.now().since(begun));
        if let (Some(feed), Ok(())) = (&self.state.events, &outcome) {
            feed.observe(function, body);
        }
        outcome
    }

    fn permits(&self, function: u32, body: usize) -> Option<&Semaphore> {
        let treatment = self.calls.treatment(function);
        match (treatment.visits_all, treatment.class) {
            (true, Class::Sheddable) => Some(&self.state.long_calls.lists),
            (true, _) if is_removal(function) => Some(&self.state.long_calls.removals),
            (true, _) => Some(&self.state.long_calls.mounts),
            (false, _) if body > LONG_BODY => Some(&self.state.long_calls.batches),
            (false, _) if body > TURN_BODY => Some(&self.state.long_calls.turns),
            (false, _) => None,
        }
    }

    fn has_heartbeats(&self) -> bool {
        true
    }

    fn class(&self, function: u32) -> Class {
        self.calls.class(function)
    }

    fn note_shed(&self) {
        self.state.requests.shed.fetch_add(1, Relaxed);
    }

    fn may_answer(&self) -> bool {
        self.state.leadership.leads()
    }
}

/// Returns whether a call removes every object that meets a condition.
fn is_removal(function: u32) -> bool {
    matches!(function, RemoveAll::FUNCTION | RemoveByRegex::FUNCTION)
        && !is_planted("mounts-wait-for-removals")
}

/// Runs a long call. On a multi-threaded runtime other threads take over the work of this one.
fn run_blocking<R>(call: impl FnOnce() -> R) -> R {
    #[cfg(feature = "cli")]
    {
        use tokio::runtime::{Handle, RuntimeFlavor};
        if Handle::try_current().is_ok_and(|here| here.runtime_flavor() == RuntimeFlavor::MultiThread) {
            return tokio::task::block_in_place(call);
        }
    }
    call()
}
