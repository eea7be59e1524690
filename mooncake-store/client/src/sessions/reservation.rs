//! Reserved space, and ranges to write to it.

use mooncake_core::replica::MemoryLocation;
use mooncake_core::{Error, ErrorCode};
use mooncake_transport::engine::LookUps;
use mooncake_transport::{Slice, Transport};
use std::sync::Arc;

use super::written::Written;
use crate::attempt::Attempt;
use crate::errors::shown;

/// Space granted for an object that cannot be read yet.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) replicas: Vec<MemoryLocation>,
    pub(crate) attempt: Attempt,
    /// Look-ups that the engine had made before the master was last asked for the space.
    pub(crate) known: LookUps,
    /// State of the writes, shared with the tasks that wait for the transfers of dropped calls.
    pub(super) written: Arc<Written>,
}

impl Reservation {
    /// Returns the key of the object.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether [`commit`](crate::ClientRanges::commit) would refuse the object. There are
    /// three reasons:
    ///
    /// - a write of the object is in progress,
    /// - a write failed or was dropped, and its range has not been written since,
    /// - a write timed out and may still arrive.
    pub fn is_incomplete(&self) -> bool {
        self.written.is_incomplete()
    }
}

/// A part of a reserved object to write.
#[derive(Debug)]
pub struct RangeWrite<'a, T: Transport> {
    /// Object to write to.
    pub object: &'a Reservation,
    /// Offset of the first byte in the object.
    pub offset: u64,
    /// Bytes to write.
    pub from: Slice<T>,
}

pub(crate) fn refused(key: &[u8], why: &'static str) -> Error {
    Error::new(ErrorCode::UnavailableInCurrentStatus, why).context(shown(key))
}
