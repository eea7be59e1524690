//! Something that happens while a wire is in the middle of taking a submission.

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};

use crate::ticket::ticket;
use crate::transport::{Op, Opcode, Transport};

/// Writes those bytes to the address that `meanwhile` comes to, which is called when the wire asks for the operation: what it looked at before is of before.
///
/// # Errors
/// What became of the write.
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
        // SAFETY: the ticket keeps the bytes until `done` is finished, and nobody writes them.
        .map(|remote| unsafe { Op::new(Opcode::Write, None, local, remote, &[]) });
    wire.submit(peer, op, done);
    ticket.wait().0
}
