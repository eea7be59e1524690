//! Reserved space, and ranges to write to it.

use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorCode};
use mooncake_transport::{Slice, Transport};
use std::borrow::Cow;
use std::sync::Arc;

use super::written::Written;
use crate::errors::display_key;
use crate::grants::ReservedSpace;

/// Space granted for an object that cannot be read yet.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    /// Options of the call that requested the space.
    pub(super) config: Arc<ReplicateConfig>,
    /// Index of the object in this call, and the number of its objects.
    pub(super) item: (usize, usize),
    /// Space and state of the writes, shared with the tasks that wait for the transfers of dropped
    /// calls.
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
    /// four reasons:
    ///
    /// - a range was never written,
    /// - a write of the object is in progress,
    /// - a write failed or was dropped, and its range has not been written since,
    /// - a write timed out and may still arrive.
    pub fn is_incomplete(&self) -> bool {
        self.written.is_incomplete(self.size)
    }

    /// Returns whether the object may still be committed or given back. An object whose
    /// [`commit`](crate::ClientRanges::commit) has lost its response is open: a second commit has
    /// the result. Nothing more can be written to such an object.
    pub fn is_open(&self) -> bool {
        self.written.is_open()
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

pub(crate) fn refused(key: &[u8], why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorCode::UnavailableInCurrentStatus, why).context(display_key(key))
}

/// Returns the error for space that the master may have reclaimed.
pub(super) fn too_old(key: &[u8]) -> Error {
    Error::new(
        ErrorCode::UnavailableInCurrentStatus,
        "the space was reserved so long ago that the master may have taken it back",
    )
    .context(display_key(key))
}
