//! Reserved space, and ranges to write to it.

use mooncake_core::replica::MemoryLocation;
use mooncake_core::{Error, ErrorCode};
use mooncake_transport::engine::LookUps;
use mooncake_transport::{Slice, Transport};
use std::sync::Arc;

use super::written::Written;
use crate::attempt::Attempt;
use crate::errors::shown;

/// Space granted for an object that nobody can read yet.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) replicas: Vec<MemoryLocation>,
    pub(crate) attempt: Attempt,
    /// Processes that were found before the master was last asked for the space.
    pub(crate) known: LookUps,
    /// Shared with the tasks that wait for the transfers of dropped calls.
    pub(super) written: Arc<Written>,
}

impl Reservation {
    /// The key it is for.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether [`Client::commit`](crate::Client::commit) would refuse the object: a write of it is
    /// under way, a range of it was not written since a write of that range failed or was dropped,
    /// or a write timed out and may still land.
    pub fn is_incomplete(&self) -> bool {
        self.written.is_incomplete()
    }
}

/// A part of a reserved object to write.
#[derive(Debug)]
pub struct RangeWrite<'a, T: Transport> {
    /// Of which object.
    pub object: &'a Reservation,
    /// From which byte on.
    pub offset: u64,
    /// The bytes.
    pub from: Slice<T>,
}

pub(crate) fn refused(key: &[u8], why: &'static str) -> Error {
    Error::new(ErrorCode::UnavailableInCurrentStatus, why).context(shown(key))
}
