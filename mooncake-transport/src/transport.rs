//! Interface of a transport: one-sided reads and writes between registered memory.

use std::fmt;
use std::future::Future;
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::memory::MemorySpan;

use crate::handshake::AcceptConnection;
use crate::protocol::Protocol;
use crate::segment::SegmentDesc;
use crate::statistics::FallbackCounter;
use crate::ticket::Completion;

/// Abilities and requirements of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Maximum length of an operation in bytes. The engine refuses longer operations.
    pub max_op_bytes: u64,
    /// True if local memory must be registered. [`Op::registration`] may be `None` otherwise.
    pub needs_registration: bool,
    /// True if local and remote memory may be device memory.
    pub device_memory: bool,
    /// True if peers on this host access shared memory directly
    /// ([`HostMemoryOptions::shared`](mooncake_core::memory::HostMemoryOptions)).
    pub shared_memory: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { max_op_bytes: u64::MAX, needs_registration: false, device_memory: false, shared_memory: false }
    }
}

impl Capabilities {
    /// Sets [`needs_registration`](Self::needs_registration).
    #[must_use]
    pub fn needs_registration(self, yes: bool) -> Self {
        Self { needs_registration: yes, ..self }
    }

    /// Sets [`device_memory`](Self::device_memory).
    #[must_use]
    pub fn device_memory(self, yes: bool) -> Self {
        Self { device_memory: yes, ..self }
    }

    /// Sets [`shared_memory`](Self::shared_memory).
    #[must_use]
    pub fn shared_memory(self, yes: bool) -> Self {
        Self { shared_memory: yes, ..self }
    }
}

/// Access to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Operations of this process use the memory as their local side. Peers are refused.
    Local,
    /// Peers read and write the memory as well.
    Remote,
}

/// Direction of an operation, with the numbers of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// Remote to local.
    Read = 0,
    /// Local to remote.
    Write = 1,
}

/// Contiguous transfer. A transport borrows it for the call of [`Transport::submit`] and copies
/// what it needs later.
#[derive(Debug)]
pub struct Op<'a, R> {
    opcode: Opcode,
    registration: Option<&'a R>,
    local: MemorySpan,
    remote: u64,
    key: &'a [u8],
}

impl<'a, R> Op<'a, R> {
    /// Creates an operation between `local` and the `local.len` bytes at address `remote` of the
    /// peer.
    ///
    /// # Safety
    /// Until the completion submitted with the operation is done and the submitting call has
    /// returned: the bytes of `local` stay allocated; `registration`, if given, covers them and
    /// stays alive; no other code reads or writes the bytes of a `Read`; no code writes the bytes
    /// of a `Write`.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        opcode: Opcode,
        registration: Option<&'a R>,
        local: MemorySpan,
        remote: u64,
        key: &'a [u8],
    ) -> Self {
        Self { opcode, registration, local, remote, key }
    }

    /// Returns the direction.
    pub fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// Returns the registration that covers the local bytes, or `None` if they are not registered.
    pub fn registration(&self) -> Option<&'a R> {
        self.registration
    }

    /// Returns the local bytes: destination of a read, source of a write.
    pub fn local(&self) -> MemorySpan {
        self.local
    }

    /// Returns the address of the first local byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.local.ptr
    }

    /// Returns the length in bytes, the same on both sides.
    pub fn len(&self) -> usize {
        self.local.len
    }

    /// Returns whether the operation moves no bytes. Such an operation fails, as with Mooncake C++.
    pub fn is_empty(&self) -> bool {
        self.local.len == 0
    }

    /// Returns the absolute address in the peer's process.
    pub fn remote(&self) -> u64 {
        self.remote
    }

    /// Returns the opaque key of the remote memory, made by [`Transport::export`] of the peer.
    /// Empty if the transport needs none.
    pub fn key(&self) -> &'a [u8] {
        self.key
    }

    /// Returns the same operation for an inner transport, with the registration of that transport.
    ///
    /// # Safety
    /// As for [`Op::new`]: `registration`, if given, covers the local bytes and lives as long as
    /// the registration of this operation.
    #[allow(unsafe_code)]
    pub unsafe fn with_registration<S>(&self, registration: Option<&'a S>) -> Op<'a, S> {
        Op { opcode: self.opcode, registration, local: self.local, remote: self.remote, key: self.key }
    }
}

impl<R> Clone for Op<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Op<'_, R> {}

/// Transport of bytes between registered memory of two processes, of which one is passive.
///
/// Contract (the conformance suite, feature `testkit`, has one case per sentence):
/// - A completed read has put exactly the remote bytes into the local range, and nothing outside
///   it.
/// - A completed write is applied: a read by any node returns it at once.
/// - A remote range must be non-empty and lie in one registration with [`Access::Remote`]. A range
///   that is empty, overflows, lies outside or crosses two registrations fails with kind `Invalid`,
///   and no byte changes on either side.
/// - A write to read-only memory ([`MemorySpan::read_only`]) fails in the same way.
/// - Each operation checks its addresses: they are refused once the registration is dropped.
/// - The drop of a registration returns when no operation of a peer uses its memory.
/// - Registrations with [`Access::Local`] may overlap each other and those for peers. The drop of
///   one leaves the others as they are.
/// - The local bytes of an operation are not used after its share of the completion is finished.
/// - Every share finishes: a dead, silent or slow peer causes an error of kind `Unavailable` or
///   `Timeout` at the completion's deadline. An operation that has not begun by then is not sent.
/// - Operations of one submission fail independently and run in any order.
///
/// # Safety
/// Implementors access memory through raw pointers and uphold the contract above, whatever the peer
/// sends.
#[allow(unsafe_code)]
pub unsafe trait Transport: fmt::Debug + Send + Sync + 'static {
    /// Registered memory. Its drop deregisters the memory.
    type Registration: fmt::Debug + Send + Sync + 'static;
    /// Path to one peer with its cached resources (connections, queue pairs). Cheap to clone.
    type Peer: Clone + fmt::Debug + Send + Sync + 'static;

    /// Returns the name of the transport, which is also the `protocol` of reachable descriptors.
    fn protocol(&self) -> Protocol;

    /// Returns the abilities and requirements of the transport.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Registers memory for this process, and for peers with [`Access::Remote`].
    ///
    /// # Safety
    /// The span's bytes stay allocated until the registration has been dropped.
    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Self::Registration>;

    /// Returns the key that peers need for this memory, empty if they need none. Only this
    /// transport parses it.
    fn export(&self, registration: &Self::Registration) -> Vec<u8> {
        let _ = registration;
        Vec::new()
    }

    /// Writes into the local descriptor how peers reach this node: protocol, data port and the
    /// like. It is called whenever the descriptor is built, with the buffers and their exported
    /// keys in it.
    fn describe(&self, desc: &mut SegmentDesc);

    /// Returns whether this transport reaches a segment, judged by its descriptor alone.
    fn reaches(&self, desc: &SegmentDesc) -> bool {
        desc.supports(&self.protocol())
    }

    /// Opens a path to the owner of a segment. The connection may be set up lazily.
    fn connect(&self, desc: &SegmentDesc) -> impl Future<Output = Result<Self::Peer>> + Send;

    /// Returns whether this node has a connection to the process of a peer. An engine closes a
    /// segment that is neither used nor connected, and looks it up again at its next use.
    fn is_connected(&self, peer: &Self::Peer) -> bool {
        let _ = peer;
        false
    }

    /// Releases what belongs to peers that have departed. An engine calls this at intervals.
    fn release_departed(&self) {}

    /// Ends all transfers of this node, each with an error as soon as nothing uses its memory, and
    /// refuses later ones. For a program that ends.
    fn stop_transfers(&self) {}

    /// Returns whether [`stop_transfers`](Self::stop_transfers) was called. An engine does not
    /// repeat failed transfers then.
    fn is_stopped(&self) -> bool {
        false
    }

    /// Returns the handler of connection requests at the handshake port, if the transport sets up
    /// connections there.
    fn connection_handler(&self) -> Option<&dyn AcceptConnection> {
        None
    }

    /// Returns the statistics of paths, if the transport consists of several transports.
    fn path_statistics(&self) -> Option<&dyn PathStatistics<Self::Peer>> {
        None
    }

    /// Posts operations to one peer and returns without waiting. `ops.len()` equals `done.ops()`.
    /// Shares of `done` finish single operations. The usual path does not allocate per operation.
    fn submit<'a, I>(&self, peer: &Self::Peer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Self::Registration>>;

    /// Posts operations that have a completion each. A transport overrides this method if a joint
    /// submission is cheaper than one submission per operation.
    fn submit_shares(&self, peer: &Self::Peer, ops: Vec<(Op<'_, Self::Registration>, Completion)>) {
        for (op, share) in ops {
            self.submit(peer, std::iter::once(op), share);
        }
    }
}

/// Statistics of the paths of a transport that consists of several transports.
pub trait PathStatistics<P> {
    /// Returns the name of the transport to a peer, `fast+slow` if there are two.
    fn path_name(&self, peer: &P) -> Protocol;

    /// Sets the counter of operations that fall back to the slower transport of this peer.
    fn count_fallback(&self, peer: &mut P, counter: &Arc<FallbackCounter>);
}
