//! RPC service of a master: finds each call in the table and runs its handler.

use std::sync::Arc;

pub use super::call::Tally;
use super::call::{Response, Treatment};
use super::frame::{Refusal, Status};
use super::message::{AddedCalls, MooncakeCalls};
use super::server::{Class, Service};

/// Handlers of all calls to a master.
pub trait MasterCalls: MooncakeCalls + AddedCalls {}

impl<M: MooncakeCalls + AddedCalls> MasterCalls for M {}

/// RPC service of a master.
#[derive(Debug)]
pub struct MasterService<M>(pub Arc<M>);

impl<M: MasterCalls> Service for MasterService<M> {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.counted(function, body, out).0
    }

    fn has_heartbeats(&self) -> bool {
        true
    }

    fn class(&self, function: u32) -> Class {
        self.treatment(function).class
    }
}

impl<M: MasterCalls> MasterService<M> {
    /// Handles a call like [`Service::call`], and also returns the outcomes of its items.
    pub fn counted(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> (Result<(), Refusal>, Tally) {
        let mut response = Response::new(out);
        let outcome = MooncakeCalls::dispatch(&*self.0, function, body, &mut response)
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
