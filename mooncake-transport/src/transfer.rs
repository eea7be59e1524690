//! Safe posting of transfers: buffers are passed by value and come back with the ticket.

use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, Result};

use crate::region::{Sink, Source};
use crate::ticket::{Completion, Ticket, ticket};
use crate::transport::{Op, Opcode, Transport};

/// Contiguous transfer between all of `buffer` and as many bytes at a remote address.
#[derive(Clone, Debug)]
pub struct Transfer<B> {
    /// Absolute address in the peer's process.
    pub remote: u64,
    /// Opaque access key, or `None` if none is needed.
    pub key: Option<Arc<[u8]>>,
    /// Local side.
    pub buffer: B,
}

impl<B> Transfer<B> {
    /// Creates a transfer without an access key.
    pub fn new(remote: u64, buffer: B) -> Self {
        Self { remote, key: None, buffer }
    }
}

/// Several transfers in one value: an array or a `Vec`.
pub trait Transfers<B>: AsRef<[Transfer<B>]> + Send + sealed::Sealed + 'static {}

impl<B: Send + 'static, const N: usize> Transfers<B> for [Transfer<B>; N] {}
impl<B: Send + 'static> Transfers<B> for Vec<Transfer<B>> {}

mod sealed {
    // The bytes behind the transfers must not move while the transport uses them. A foreign `AsRef`
    // could move them.
    pub trait Sealed {}
}

impl<B, const N: usize> sealed::Sealed for [Transfer<B>; N] {}
impl<B> sealed::Sealed for Vec<Transfer<B>> {}

/// Posts reads from one peer: one submission, one allocation, one wake-up.
///
/// Buffers are handed over, so that nothing else touches them meanwhile:
///
/// ```compile_fail,E0505
/// # use mooncake_transport::{Loopback, LoopbackNet, SliceMut, loopback::LoopbackPeer, transfer::{Transfer, read}};
/// # fn f(net: &Loopback, peer: &LoopbackPeer, mut slice: SliceMut<Loopback>) {
/// let bytes = &mut slice;
/// let ticket = read(net, peer, [Transfer::new(0x1000, slice)], None);
/// bytes.copy_from(0, b"while the read is under way"); // `slice` is gone
/// # }
/// ```
pub fn read<T, B, C>(transport: &T, peer: &T::Peer, transfers: C, deadline: Option<Moment>) -> Ticket<C>
where
    T: Transport,
    B: Sink<T>,
    C: Transfers<B>,
{
    post(transport, peer, Opcode::Read, transfers, deadline)
}

/// Posts writes to one peer.
///
/// ```compile_fail,E0277
/// # use mooncake_transport::{Loopback, Slice, loopback::LoopbackPeer, transfer::{Transfer, read}};
/// # fn f(net: &Loopback, peer: &LoopbackPeer, slice: Slice<Loopback>) {
/// let ticket = read(net, peer, [Transfer::new(0x1000, slice)], None); // a shared slice can be written from, not read into
/// # }
/// ```
pub fn write<T, B, C>(transport: &T, peer: &T::Peer, transfers: C, deadline: Option<Moment>) -> Ticket<C>
where
    T: Transport,
    B: Source<T>,
    C: Transfers<B>,
{
    post(transport, peer, Opcode::Write, transfers, deadline)
}

fn post<T, B, C>(
    transport: &T,
    peer: &T::Peer,
    opcode: Opcode,
    transfers: C,
    deadline: Option<Moment>,
) -> Ticket<C>
where
    T: Transport,
    B: Source<T>,
    C: Transfers<B>,
{
    let ops = transfers.as_ref().len();
    let (done, ticket) = ticket(transfers, ops, deadline);
    // SAFETY: the ticket keeps the buffers until `done` is finished. The buffers of reads are
    // sinks, as `read` demands, and were handed over.
    unsafe { post_some(transport, peer, (*ticket.buffer()).as_ref().iter().map(|t| (opcode, t)), done) };
    ticket
}

/// Checks transfers against the transport's capabilities and submits them. An unsupported transfer
/// fails before anything is sent.
///
/// # Safety
/// The buffers live in place until `done` is finished. Those of reads are sinks with no other
/// holder.
pub(crate) unsafe fn post_some<'a, T, B, I>(transport: &T, peer: &T::Peer, transfers: I, done: Completion)
where
    T: Transport,
    B: Source<T>,
    I: ExactSizeIterator<Item = (Opcode, &'a Transfer<B>)> + Clone,
{
    if let Err(error) = transfers.clone().try_for_each(|(_, transfer)| fits(transport, transfer)) {
        return done.finish(Err(error));
    }
    let ops = transfers.map(|(opcode, transfer)| {
        let local = transfer.buffer.local();
        let key = transfer.key.as_deref().unwrap_or_default();
        // SAFETY: promised by the caller, and by the buffer's own `unsafe impl`.
        unsafe { Op::new(opcode, local.registration, local.span, transfer.remote, key) }
    });
    transport.submit(peer, ops, done);
}

fn fits<T: Transport, B: Source<T>>(transport: &T, transfer: &Transfer<B>) -> Result<()> {
    let (local, can) = (transfer.buffer.local(), transport.capabilities());
    if local.span.len as u64 > can.max_op_bytes {
        return Err(Error::invalid(format!(
            "cannot transfer: operation too long. len={} transport={} max={}",
            local.span.len,
            transport.protocol(),
            can.max_op_bytes
        )));
    }
    if can.needs_registration && local.registration.is_none() {
        return Err(Error::invalid(format!(
            "cannot transfer: local memory is not registered. len={} address={:#x} transport={}",
            local.span.len,
            local.span.addr(),
            transport.protocol()
        )));
    }
    Ok(())
}
