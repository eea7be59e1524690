//! The master behind the RPC server, with its calls counted.

use std::sync::Arc;

use super::State;
use crate::master::Master;
use crate::protocol::server::{Refusal, Service};
use crate::protocol::service::MasterService;

/// Counts calls on their way to the master.
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
        let clock = self.state.master.clock();
        let begun = clock.now();
        let (outcome, tally) = self.calls.counted(function, body, out);
        self.state.requests.count(function, tally, clock.now().since(begun));
        outcome
    }
}
