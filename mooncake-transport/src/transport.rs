//! The one interface every wire implements: one-sided reads and writes between registered memory.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::memory::MemorySpan;

use serde_json::Value;

use crate::fallback::Behind;
use crate::handshake;
use crate::segment::SegmentDesc;
use crate::ticket::Completion;

/// Name of a wire as segment descriptors spell it. An open set: the constants are those this project knows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Protocol(Cow<'static, str>);

impl Protocol {
    /// TCP, crate `mooncake-tcp`.
    pub const TCP: Protocol = Protocol(Cow::Borrowed("tcp"));
    /// RDMA verbs.
    pub const RDMA: Protocol = Protocol(Cow::Borrowed("rdma"));
    /// NVLink between GPUs.
    pub const NVLINK: Protocol = Protocol(Cow::Borrowed("nvlink"));
    /// Shared memory of one host, crate `mooncake-shm`.
    pub const SHM: Protocol = Protocol(Cow::Borrowed("shm"));
    /// Files and block devices, crate `mooncake-disk`.
    pub const DISK: Protocol = Protocol(Cow::Borrowed("disk"));
    /// Inside one process, [`Loopback`](crate::loopback::Loopback).
    pub const LOOPBACK: Protocol = Protocol(Cow::Borrowed("loopback"));

    /// A wire by its name.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self(name.into())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a wire can do and needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Longest operation in bytes. The engine refuses longer ones, it does not cut them.
    pub max_op_bytes: u64,
    /// Local memory of an operation must be registered; without it [`Op::registration`] may be `None`.
    pub needs_registration: bool,
    /// Local and remote memory may be a device's.
    pub device_memory: bool,
    /// Peers of this host have a shorter way to memory that is shared ([`HostMemoryOptions::shared`](mooncake_core::memory::HostMemoryOptions)).
    pub shared_memory: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { max_op_bytes: u64::MAX, needs_registration: false, device_memory: false, shared_memory: false }
    }
}

impl Capabilities {
    /// The same with [`needs_registration`](Self::needs_registration) as given.
    #[must_use]
    pub fn needs_registration(self, yes: bool) -> Self {
        Self { needs_registration: yes, ..self }
    }

    /// The same with [`device_memory`](Self::device_memory) as given.
    #[must_use]
    pub fn device_memory(self, yes: bool) -> Self {
        Self { device_memory: yes, ..self }
    }

    /// The same with [`shared_memory`](Self::shared_memory) as given.
    #[must_use]
    pub fn shared_memory(self, yes: bool) -> Self {
        Self { shared_memory: yes, ..self }
    }
}

/// Who may touch registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only operations of this process, as their local side. Peers are refused.
    Local,
    /// Peers as well, reading and writing.
    Remote,
}

/// Direction of an operation, as numbered by the existing system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// Remote to local.
    Read = 0,
    /// Local to remote.
    Write = 1,
}

/// One contiguous transfer. Borrowed for the call of [`Transport::submit`]; the wire copies out what it needs later.
#[derive(Debug)]
pub struct Op<'a, R> {
    opcode: Opcode,
    registration: Option<&'a R>,
    local: MemorySpan,
    remote: u64,
    key: &'a [u8],
}

impl<'a, R> Op<'a, R> {
    /// An operation between `local` and the `local.len` bytes at the peer's address `remote`.
    ///
    /// # Safety
    /// Until the completion that is submitted along with it is done, and the call that submits it is over: the bytes of `local` stay allocated and, if given,
    /// `registration` covers them and stays alive; a `Read`'s bytes are touched by nobody else; a `Write`'s are written by nobody.
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

    /// Which way.
    pub fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// The registration that covers the local bytes; `None` when they are not registered.
    pub fn registration(&self) -> Option<&'a R> {
        self.registration
    }

    /// The local bytes: destination of a read, source of a write.
    pub fn local(&self) -> MemorySpan {
        self.local
    }

    /// First local byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.local.ptr
    }

    /// Length in bytes, the same on both sides.
    pub fn len(&self) -> usize {
        self.local.len
    }

    /// Whether it moves nothing. Such an operation is an error, as it is for the existing system's targets.
    pub fn is_empty(&self) -> bool {
        self.local.len == 0
    }

    /// Absolute address in the peer's process.
    pub fn remote(&self) -> u64 {
        self.remote
    }

    /// Opaque right to touch the remote address, empty where none is needed. What [`Transport::export`] made on the other side.
    pub fn key(&self) -> &'a [u8] {
        self.key
    }

    /// The same operation for a wire inside this one, with that wire's registration.
    ///
    /// # Safety
    /// As for [`Op::new`]: if given, `registration` covers the local bytes and lives as long as this operation's own.
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

/// A wire: moves bytes between registered memory of two processes, one side passive.
///
/// Contract (the conformance suite, feature `testkit`, has one case per sentence):
/// - A completed read has put exactly the remote bytes into the local range, and nothing outside it.
/// - Completed means applied: a completed write can be read back by anybody at once.
/// - A remote range must be non-empty and lie in one registration with [`Access::Remote`]; one that is empty, overflows,
///   lies outside or crosses two registrations fails with kind `Invalid`, and no byte changes on either side.
/// - So does a write to memory that can only be read ([`MemorySpan::read_only`]).
/// - Addresses are checked at each operation: once the registration is dropped, they are refused.
/// - Dropping a registration returns when no operation of a peer touches its memory any more.
/// - Once an operation's share of the completion is finished, its local bytes are never touched again.
/// - Every share finishes: a peer that is dead, silent or slow is an error of kind `Unavailable` or `Timeout` when the
///   completion's deadline comes, never a hang; what was not begun by then is not sent afterwards.
/// - Operations of one submission may fail one by one and run in any order.
///
/// # Safety
/// Implementors touch memory through raw pointers and answer for the contract above, whatever the peer sends.
#[allow(unsafe_code)]
pub unsafe trait Transport: fmt::Debug + Send + Sync + 'static {
    /// What registering memory gives; deregisters on drop.
    type Registration: fmt::Debug + Send + Sync + 'static;
    /// A way to one peer, with whatever it caches (connections, queue pairs). Cheap to clone.
    type Peer: Clone + fmt::Debug + Send + Sync + 'static;

    /// The wire's name, and the `protocol` of descriptors it can reach.
    fn protocol(&self) -> Protocol;

    /// What it can do and needs.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Makes memory usable; for peers as well when `access` says so.
    ///
    /// # Safety
    /// The span's bytes stay allocated until the registration has been dropped.
    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Self::Registration>;

    /// The key a peer needs for this memory, empty where none is needed. Only this wire parses it.
    fn export(&self, registration: &Self::Registration) -> Vec<u8> {
        let _ = registration;
        Vec::new()
    }

    /// Writes into our own descriptor how peers reach us: protocol, data port and the like. Called whenever the descriptor is
    /// built, with the buffers already in it (each with its exported key).
    fn describe(&self, desc: &mut SegmentDesc);

    /// Whether this wire leads to that segment. Answers from the descriptor alone.
    fn reaches(&self, desc: &SegmentDesc) -> bool {
        desc.speaks(&self.protocol())
    }

    /// A way to that segment's owner. May connect lazily.
    fn connect(&self, desc: &SegmentDesc) -> impl Future<Output = Result<Self::Peer>> + Send;

    /// Answers a peer that sets up a connection of this wire at the node's handshake port, both in JSON; by default as one that has
    /// nothing to set up.
    fn accept(&self, request: Value) -> impl Future<Output = Value> + Send {
        let _ = request;
        std::future::ready(handshake::no_connection())
    }

    /// The wire that leads to this peer, where there are several in one; for figures only.
    fn wire_to(&self, peer: &Self::Peer) -> Protocol {
        let _ = peer;
        self.protocol()
    }

    /// Has what the first of several wires to this peer leaves to the one behind it counted; for figures only.
    fn count_behind(&self, peer: &mut Self::Peer, behind: &Arc<Behind>) {
        let _ = (peer, behind);
    }

    /// Posts operations to one peer and returns without waiting. `ops.len()` equals `done.ops()`.
    /// Nothing may be allocated per operation on the usual path; shares of `done` are how single operations finish.
    fn submit<'a, I>(&self, peer: &Self::Peer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Self::Registration>>;
}
