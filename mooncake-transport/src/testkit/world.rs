//! Two nodes of a fixture, with helpers that keep the cases short.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::memory::{MemorySource, MemorySpan};
use mooncake_core::{Error, Result};

use super::fixture::Fixture;
use crate::region::{Local, Region, Sink, SliceMut, Source};
use crate::segment::{BufferDesc, SegmentDesc};
use crate::ticket::Ticket;
use crate::transfer::{self, Transfer};
use crate::transport::{Access, Transport};

/// Timeout, longer than any healthy transfer of the suite takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Node that owns memory, and node that transfers.
pub(super) struct World<'f, F: Fixture> {
    pub(super) fixture: &'f mut F,
    pub(super) owner: Arc<F::T>,
    pub(super) user: Arc<F::T>,
}

pub(super) type PeerOf<F> = <<F as Fixture>::T as Transport>::Peer;

impl<'f, F: Fixture> World<'f, F> {
    pub(super) fn new(fixture: &'f mut F) -> Self {
        let (owner, user) = (fixture.node(), fixture.node());
        Self { fixture, owner, user }
    }

    /// Returns memory of the owner, open to peers, filled with a pattern.
    pub(super) fn open(&self, len: usize, seed: u8) -> Region<F::T> {
        self.region(&self.owner, len, Access::Remote, seed)
    }

    /// Returns memory of the user, filled with a pattern.
    pub(super) fn local(&self, len: usize, seed: u8) -> SliceMut<F::T> {
        self.region(&self.user, len, Access::Local, seed).exclusive().expect("the one handle")
    }

    /// Returns local bytes to read into: plain ones, unless the transport needs registered ones.
    pub(super) fn blank(&self, len: usize) -> Buffer<F::T> {
        self.local_bytes(&vec![0; len])
    }

    /// Returns local bytes to write from.
    pub(super) fn local_bytes(&self, bytes: &[u8]) -> Buffer<F::T> {
        let plain = self.fixture.local_memory(1).is_none();
        if plain && !self.user.capabilities().needs_registration {
            return Buffer::Plain(bytes.to_vec());
        }
        let mut slice = self.local(bytes.len(), 0);
        slice.copy_from(0, bytes).expect("in range");
        Buffer::Registered(slice)
    }

    /// Returns registered memory filled with the pattern of `seed`.
    pub(super) fn region(&self, node: &Arc<F::T>, len: usize, access: Access, seed: u8) -> Region<F::T> {
        let local = if access == Access::Local { self.fixture.local_memory(len) } else { None };
        let memory = local.unwrap_or_else(|| self.fixture.memory(len));
        let region = Region::register(&**node, memory, access).expect("memory can be registered");
        let mut all = region.exclusive().expect("the one handle");
        all.copy_from(0, &patterned(seed, len)).expect("in range");
        all.into_region().expect("the one range")
    }

    /// Returns the path to the owner, from a descriptor with these regions after a round trip
    /// through JSON.
    pub(super) fn connect(&self, regions: &[&Region<F::T>]) -> PeerOf<F> {
        let desc = describe(&*self.owner, regions);
        assert!(self.user.reaches(&desc), "a transport reaches the descriptors of its own nodes");
        self.fixture.block_on(self.user.connect(&desc)).expect("a live node can be reached")
    }

    /// Returns a deadline that a healthy transfer does not reach.
    pub(super) fn deadline(&self) -> Option<Moment> {
        Some(self.fixture.clock().now().after(TIMEOUT))
    }

    pub(super) fn post_read<B: Sink<F::T>>(
        &self,
        peer: &PeerOf<F>,
        at: u64,
        into: B,
    ) -> Ticket<[Transfer<B>; 1]> {
        let deadline = self.deadline();
        self.run(|user| transfer::read(user, peer, [Transfer::new(at, into)], deadline))
    }

    pub(super) fn read<B: Sink<F::T>>(&self, peer: &PeerOf<F>, at: u64, into: B) -> (Result<()>, B) {
        self.finish(self.post_read(peer, at, into))
    }

    pub(super) fn write<B: Source<F::T>>(&self, peer: &PeerOf<F>, at: u64, from: B) -> (Result<()>, B) {
        let deadline = self.deadline();
        self.finish(self.run(|user| transfer::write(user, peer, [Transfer::new(at, from)], deadline)))
    }

    pub(super) fn finish<B: Send + 'static>(&self, ticket: Ticket<[Transfer<B>; 1]>) -> (Result<()>, B) {
        let (result, [transfer]) = self.fixture.block_on(ticket);
        (result, transfer.buffer)
    }

    /// Calls a function on the user's node inside the runtime of the fixture.
    pub(super) fn run<R>(&self, f: impl FnOnce(&F::T) -> R) -> R {
        self.run_on(&self.user, f)
    }

    /// Calls a function on any node inside the runtime of the fixture.
    pub(super) fn run_on<R>(&self, node: &F::T, f: impl FnOnce(&F::T) -> R) -> R {
        let mut f = Some(f);
        let call = std::future::poll_fn(|_| std::task::Poll::Ready(f.take().map(|f| f(node))));
        self.fixture.block_on(call).expect("polled once")
    }
}

/// Local bytes in the form that a transport needs.
pub(super) enum Buffer<T: Transport> {
    Plain(Vec<u8>),
    Registered(SliceMut<T>),
}

impl<T: Transport> Buffer<T> {
    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Buffer::Plain(bytes) => bytes.clone(),
            Buffer::Registered(slice) => {
                let mut bytes = vec![0; slice.len()];
                slice.copy_to(0, &mut bytes).expect("in range");
                bytes
            }
        }
    }

    pub(super) fn set(&mut self, to: &[u8]) {
        match self {
            Buffer::Plain(bytes) => bytes.copy_from_slice(to),
            Buffer::Registered(slice) => slice.copy_from(0, to).expect("in range"),
        }
    }
}

// SAFETY: as for the content, whose variant never changes.
#[allow(unsafe_code)]
unsafe impl<T: Transport> Source<T> for Buffer<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        match self {
            Buffer::Plain(bytes) => Source::<T>::local(bytes),
            Buffer::Registered(slice) => slice.local(),
        }
    }
}

// SAFETY: both are sinks.
#[allow(unsafe_code)]
unsafe impl<T: Transport> Sink<T> for Buffer<T> {}

/// Returns the bytes of a region.
pub(super) fn bytes_of<T: Transport>(region: &Region<T>) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    let slice = region.slice(0..region.len()).expect("all of it");
    slice.copy_to(0, &mut bytes).expect("in range");
    bytes
}

/// Returns the published descriptor of a node with these regions, after a round trip through JSON.
pub(super) fn describe<T: Transport>(node: &T, regions: &[&Region<T>]) -> SegmentDesc {
    let mut desc = SegmentDesc::new("conformance");
    desc.buffers = regions
        .iter()
        .map(|region| BufferDesc {
            name: "conformance".into(),
            addr: region.addr(),
            length: region.len() as u64,
            key: region.registration().map(|r| node.export(r)).unwrap_or_default(),
            ..BufferDesc::default()
        })
        .collect();
    node.describe(&mut desc);
    SegmentDesc::decode(&desc.encode()).expect("a published descriptor can be read")
}

/// Returns byte `i` of the pattern of a seed.
pub(super) fn pattern(seed: u8, i: usize) -> u8 {
    // The pattern has no period of a power of two, so that bytes shifted by a page or a chunk are
    // noticed.
    ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ seed
}

pub(super) fn patterned(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| pattern(seed, i)).collect()
}

pub(super) fn kind<T>(result: Result<T>) -> mooncake_core::ErrorKind {
    result.err().as_ref().map(Error::kind).expect("this must fail")
}

/// Part of some memory as a source of its own.
pub(super) struct Part {
    memory: Arc<dyn MemorySource>,
    from: usize,
    len: usize,
    read_only: bool,
}

impl Part {
    pub(super) fn new(memory: Arc<dyn MemorySource>, from: usize, len: usize) -> Self {
        assert!(len != 0 && from + len <= memory.span().len);
        Self { memory, from, len, read_only: false }
    }

    /// Wraps all of some memory as read-only.
    pub(super) fn read_only(memory: Arc<dyn MemorySource>) -> Self {
        Self { from: 0, len: memory.span().len, memory, read_only: true }
    }
}

// SAFETY: the memory is kept, never moves, and `new` checked the range.
#[allow(unsafe_code)]
unsafe impl MemorySource for Part {
    fn span(&self) -> MemorySpan {
        let full = self.memory.span();
        // SAFETY: in range, as `new` checked.
        let ptr = unsafe { full.ptr.add(self.from) };
        MemorySpan { ptr, len: self.len, read_only: self.read_only, ..full }
    }
}
