//! Requests of transfers through an engine.

use super::target::Target;
use crate::transfer::Transfer;
use crate::transport::{Opcode, Transport};

/// One transfer to or from an opened segment.
#[derive(Debug)]
pub struct Request<T: Transport, B> {
    /// The other side.
    pub target: Target<T>,
    /// What to move.
    pub transfer: Transfer<B>,
    /// Its place in the caller's batch.
    pub(super) index: usize,
    /// Which way, in a posting of both.
    pub(super) opcode: Opcode,
}

/// Which way the requests of a posting go. Reads come with sinks: the callers see to that.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    All(Opcode),
    /// As each request says.
    Own,
}

impl Way {
    pub(super) fn of<T: Transport, B>(self, request: &Request<T, B>) -> Opcode {
        match self {
            Way::All(opcode) => opcode,
            Way::Own => request.opcode,
        }
    }
}

impl<T: Transport, B> Request<T, B> {
    /// All of `buffer` against as many bytes at a remote address.
    pub fn new(target: &Target<T>, remote: u64, buffer: B) -> Self {
        Self {
            target: target.clone(),
            transfer: Transfer::new(remote, buffer),
            index: 0,
            opcode: Opcode::Read,
        }
    }
}

/// Several requests in one value: an array or a `Vec`.
pub trait Requests<T: Transport, B>: AsRef<[Request<T, B>]> + Send + sealed::Sealed + 'static {}

impl<T: Transport, B: Send + 'static, const N: usize> Requests<T, B> for [Request<T, B>; N] {}
impl<T: Transport, B: Send + 'static> Requests<T, B> for Vec<Request<T, B>> {}

mod sealed {
    pub trait Sealed {}
}

impl<T: Transport, B, const N: usize> sealed::Sealed for [Request<T, B>; N] {}
impl<T: Transport, B> sealed::Sealed for Vec<Request<T, B>> {}
