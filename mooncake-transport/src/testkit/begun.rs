//! Event in the middle of a submission.

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};

use crate::ticket::ticket;
use crate::transport::{Op, Opcode, Transport};

/// Writes `bytes` to the address that `meanwhile` returns. The function is called when the
/// transport takes the operation from the iterator, so any earlier check by the transport is out of
/// date.
///
/// # Errors
/// Returns the error of the write.
pub fn write_when_begun<T: Transport>(
    wire: &T,
    peer: &T::Peer,
    bytes: Vec<u8>,
    meanwhile: impl FnOnce() -> u64,
) -> Result<()> {
    let first =
        std::ptr::NonNull::new(bytes.as_ptr().cast_mut()).ok_or_else(|| Error::internal("no bytes"))?;
    let local = MemorySpan::new(first, bytes.len());
    let (done, ticket) = ticket(bytes, 1, None);
    let op = std::iter::once_with(meanwhile)
        // SAFETY: the ticket keeps the bytes until `done` is finished, and no code writes them.
        .map(|remote| unsafe { Op::new(Opcode::Write, None, local, remote, &[]) });
    wire.submit(peer, op, done);
    ticket.wait().0
}
