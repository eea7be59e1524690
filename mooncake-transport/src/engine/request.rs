//! Requests of transfers through an engine.

use super::target::Target;
use crate::transfer::Transfer;
use crate::transport::{Opcode, Transport};

/// Transfer to or from an opened segment.
#[derive(Debug)]
pub struct Request<T: Transport, B> {
    /// Remote side.
    pub target: Target<T>,
    /// Remote address and local buffer.
    pub transfer: Transfer<B>,
    /// Index in the caller's batch.
    pub(super) index: usize,
    /// Direction, in a posting of both directions.
    pub(super) opcode: Opcode,
}

/// Direction of the requests of a posting. The callers ensure that the buffers of reads are sinks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direction {
    All(Opcode),
    /// Direction of each request.
    PerRequest,
}

impl Direction {
    pub(super) fn of_request<T: Transport, B>(self, request: &Request<T, B>) -> Opcode {
        match self {
            Direction::All(opcode) => opcode,
            Direction::PerRequest => request.opcode,
        }
    }
}

impl<T: Transport, B> Request<T, B> {
    /// Creates a request for all of `buffer` and as many bytes at a remote address.
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
