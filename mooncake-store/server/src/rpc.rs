//! The master behind the RPC server, with its calls counted.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::State;
use mooncake_master::Master;
use mooncake_protocol::message::{
    FetchExpired, GetReplicaListByRegex, PollRemoveAll, RemoveAll, RemoveByRegex, Request,
    UnmountLocalDiskSegment,
};
use mooncake_protocol::server::{Class, Refusal, Service};
use mooncake_protocol::service::MasterService;

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
        let mut call = || self.calls.counted(function, body, out);
        let (outcome, tally) = if sees_all(function) { aside(call) } else { call() };
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
        self.state.standing.leads()
    }
}

/// Calls that look at every object: with millions of them the other connections of a thread would wait for long.
fn sees_all(function: u32) -> bool {
    [
        GetReplicaListByRegex::FUNCTION,
        RemoveByRegex::FUNCTION,
        RemoveAll::FUNCTION,
        PollRemoveAll::FUNCTION,
        UnmountLocalDiskSegment::FUNCTION,
        FetchExpired::FUNCTION,
    ]
    .contains(&function)
}

/// Has other threads go on with what this one has to do, where there are others.
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
