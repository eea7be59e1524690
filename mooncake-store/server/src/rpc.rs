//! RPC service of a master that counts its calls.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::state::State;
use mooncake_master::Master;
use mooncake_protocol::server::{Class, Refusal, Service};
use mooncake_protocol::service::MasterService;

/// Service that counts calls on their way to the master.
pub(super) struct Counted {
    state: Arc<State>,
    calls: MasterService<Master>,
}

impl Counted {
    pub(super) fn new(state: Arc<State>) -> Self {
        let calls = MasterService(state.master.clone());
        Self { state, calls }
    }
}

impl Service for Counted {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let clock = self.calls.0.clock();
        let begun = clock.now();
        let mut call = || self.calls.counted(function, body, out);
        // A call that visits every object would block the other connections of a thread.
        let visits_all = self.calls.treatment(function).visits_all;
        let (outcome, tally) = if visits_all { aside(call) } else { call() };
        self.state.requests.count(function, tally, clock.now().since(begun));
        outcome
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

/// Runs a long call. On a multi-threaded runtime other threads take over the work of this one.
fn aside<R>(call: impl FnOnce() -> R) -> R {
    #[cfg(feature = "cli")]
    {
        use tokio::runtime::{Handle, RuntimeFlavor};
        if Handle::try_current().is_ok_and(|here| here.runtime_flavor() == RuntimeFlavor::MultiThread) {
            return tokio::task::block_in_place(call);
        }
    }
    call()
}
