//! RPC service of a master: finds each call in the table and runs its handler.

use std::sync::Arc;

pub use super::call::Tally;
use super::call::{Response, Treatment};
use super::frame::{Refusal, Status};
use super::message::{AddedCalls, EARLIER, EarlierCalls, MooncakeCalls};
use super::server::{Class, Service};

/// Handlers of all calls to a master.
pub trait MasterCalls: MooncakeCalls + EarlierCalls + AddedCalls {}

impl<M: MooncakeCalls + EarlierCalls + AddedCalls> MasterCalls for M {}

/// RPC service of a master.
#[derive(Debug)]
pub struct MasterService<M>(pub Arc<M>);

impl<M: MasterCalls> Service for MasterService<M> {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.counted(function, body, None, out).0
    }

    fn has_heartbeats(&self) -> bool {
        true
    }

    fn class(&self, function: u32) -> Class {
        self.treatment(function).class
    }
}

impl<M: MasterCalls> MasterService<M> {
    /// Handles a call like [`Service::call_received`], and also returns the outcomes of its items.
    pub fn counted(
        &self,
        function: u32,
        body: &[u8],
        receipt: Option<u64>,
        out: &mut Vec<u8>,
    ) -> (Result<(), Refusal>, Tally) {
        let mut response = Response::new(out).received_at(receipt).to_request(body);
        let is_earlier = EARLIER.iter().any(|shape| shape.function == function && shape.takes(body));
        let earlier = is_earlier.then(|| EarlierCalls::dispatch(&*self.0, function, body, &mut response));
        let outcome = earlier
            .flatten()
            .or_else(|| MooncakeCalls::dispatch(&*self.0, function, body, &mut response))
            .or_else(|| AddedCalls::dispatch(&*self.0, function, body, &mut response))
            .unwrap_or_else(|| {
                Err((Status::NotRegistered, format!("unknown function. number={function:#010x}")))
            });
        (outcome, response.tally())
    }

    /// Returns the treatment of a call.
    pub fn treatment(&self, function: u32) -> Treatment {
        <M as MooncakeCalls>::treatment(function)
            .or_else(|| <M as AddedCalls>::treatment(function))
            .copied()
            .unwrap_or(Treatment::DEFAULT)
    }
}
