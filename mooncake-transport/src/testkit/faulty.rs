//! Transport with injected faults, reproducible by seed.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::Rng;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use crate::handshake::AcceptConnection;
use crate::protocol::Protocol;
use crate::segment::SegmentDesc;
use crate::ticket::{Completion, ticket};
use crate::transport::{Access, Capabilities, Op, Opcode, Transport};

/// Fault of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The operation fails before a byte moves.
    Fail,
    /// The share of the completion is dropped.
    Drop,
    /// Half of the bytes move, then the operation fails.
    Cut,
    /// All bytes move, but the operation is reported as timed out.
    LoseResponse,
    /// The operation is held until [`Faulty::release`], and then runs normally.
    Delay,
    /// The operation is reported as timed out at once. A write is held until [`Faulty::release`],
    /// and its bytes are written then. A read ends. Only for transports that send from unregistered
    /// memory.
    LandLate,
}

/// Rate of each fault, in operations per thousand.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    rates: Vec<(Fault, u16)>,
    next_faults: VecDeque<Fault>,
}

impl Faults {
    /// Returns rates of zero.
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds a fault.
    #[must_use]
    pub fn with(mut self, fault: Fault, per_thousand: u16) -> Self {
        self.rates.push((fault, per_thousand));
        self
    }

    /// Adds a fault of one operation. The first call is for the next operation, the second for the
    /// one after it.
    #[must_use]
    pub fn next(mut self, fault: Fault) -> Self {
        self.next_faults.push_back(fault);
        self
    }

    fn pick(&mut self, rng: &mut Rng) -> Option<Fault> {
        if let Some(fault) = self.next_faults.pop_front() {
            return Some(fault);
        }
        let mut roll = rng.below(1000);
        for (fault, rate) in &self.rates {
            match roll.checked_sub(u64::from(*rate)) {
                None => return Some(*fault),
                Some(left) => roll = left,
            }
        }
        None
    }
}

/// Transport with faults injected into its operations.
pub struct Faulty<T: Transport> {
    inner: Arc<T>,
    state: Mutex<State<T>>,
}

struct State<T: Transport> {
    rng: Rng,
    faults: Faults,
    held: VecDeque<HeldOperation<T>>,
    injected: u64,
}

struct HeldOperation<T: Transport> {
    peer: T::Peer,
    op: Op<'static, T::Registration>,
    // Borrowed by the operation beside the registration.
    _key: Box<[u8]>,
    done: Completion,
}

impl<T: Transport> Faulty<T> {
    /// Wraps a transport.
    pub fn new(inner: Arc<T>, seed: u64, faults: Faults) -> Self {
        let state = State { rng: Rng::seeded(seed), faults, held: VecDeque::new(), injected: 0 };
        Self { inner, state: Mutex::new(state) }
    }

    /// Replaces the rates.
    pub fn set(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    /// Releases the oldest `n` held operations. Returns how many there were.
    pub fn release(&self, n: usize) -> usize {
        let held: Vec<_> = {
            let mut state = self.state.lock();
            let n = n.min(state.held.len());
            state.held.drain(..n).collect()
        };
        let n = held.len();
        for HeldOperation { peer, op, _key, mut done } in held {
            // The buffer must have no other holder by now, and must outlive the call that borrows
            // its registration.
            let extra_share = done.share();
            self.inner.submit(&peer, std::iter::once(op), done);
            extra_share.finish(Ok(()));
        }
        n
    }

    /// Returns the number of held operations.
    pub fn held(&self) -> usize {
        self.state.lock().held.len()
    }

    /// Returns the number of injected faults.
    pub fn injected(&self) -> u64 {
        self.state.lock().injected
    }

    /// Returns the inner transport.
    pub fn inner(&self) -> &Arc<T> {
        &self.inner
    }

    fn pick(&self) -> Option<Fault> {
        let state = &mut *self.state.lock();
        let fault = state.faults.pick(&mut state.rng);
        state.injected += u64::from(fault.is_some());
        fault
    }

    fn hold(&self, peer: &T::Peer, op: &Op<'_, T::Registration>, done: Completion) {
        let key: Box<[u8]> = op.key().into();
        // SAFETY: the bytes of the box do not move, and the box is kept beside the operation.
        let key_ref: &'static [u8] = unsafe { &*std::ptr::from_ref(&*key) };
        // SAFETY: the registration outlives the completion of the operation, as promised to
        // `Op::new`, and so outlives this.
        let registration = op.registration().map(|r| unsafe { &*std::ptr::from_ref(r) });
        // SAFETY: the same promise; the operation runs, or is dropped, before `done`.
        let op = unsafe { Op::new(op.opcode(), registration, op.local(), op.remote(), key_ref) };
        self.state.lock().held.push_back(HeldOperation { peer: peer.clone(), op, _key: key, done });
    }

    /// Keeps a copy of the bytes of a write, as the buffers of a network do.
    fn hold_copy(&self, peer: &T::Peer, op: &Op<'_, T::Registration>) {
        // SAFETY: the local bytes of an operation may be read until its completion is finished,
        // which happens later.
        let local = unsafe { std::slice::from_raw_parts(op.local().ptr.as_ptr(), op.len()) };
        let mut bytes: Box<[u8]> = local.into();
        let Some(ptr) = std::ptr::NonNull::new(bytes.as_mut_ptr()) else { return };
        let (done, _) = ticket(bytes, 1, None);
        let key: Box<[u8]> = op.key().into();
        // SAFETY: the bytes of the box do not move, and the box is kept beside the operation.
        let key_ref: &'static [u8] = unsafe { &*std::ptr::from_ref(&*key) };
        let local = MemorySpan { ptr, ..op.local() };
        // SAFETY: the completion keeps the bytes, and the operation runs, or is dropped, before it.
        let op = unsafe { Op::new(op.opcode(), None, local, op.remote(), key_ref) };
        self.state.lock().held.push_back(HeldOperation { peer: peer.clone(), op, _key: key, done });
    }

    fn submit_one(&self, peer: &T::Peer, op: Op<'_, T::Registration>, mut done: Completion) {
        let submit = |op, done| self.inner.submit(peer, std::iter::once(op), done);
        match self.pick() {
            None => submit(op, done),
            Some(Fault::Fail) => done.finish(Err(injected(ErrorCode::TransferFail, "failed"))),
            Some(Fault::Drop) => drop(done),
            Some(Fault::Delay) => self.hold(peer, &op, done),
            Some(Fault::Cut) => {
                let half = MemorySpan { len: op.len() / 2, ..op.local() };
                if half.len != 0 {
                    // SAFETY: a part of a permitted operation is permitted.
                    let part =
                        unsafe { Op::new(op.opcode(), op.registration(), half, op.remote(), op.key()) };
                    submit(part, done.share());
                }
                done.finish(Err(injected(ErrorCode::TransferFail, "cut in the middle")));
            }
            Some(Fault::LandLate) => {
                if op.opcode() == Opcode::Write {
                    self.hold_copy(peer, &op);
                }
                done.finish(Err(injected(ErrorCode::RpcTimeout, "late")));
            }
            Some(Fault::LoseResponse) => {
                submit(op, done.share());
                done.finish(Err(injected(ErrorCode::RpcTimeout, "answer lost")));
            }
        }
    }
}

fn injected(code: ErrorCode, what: &str) -> Error {
    Error::new(code, format!("injected fault: {what}"))
}

impl<T: Transport> fmt::Debug for Faulty<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").field("inner", &self.inner).field("held", &self.held()).finish()
    }
}

// SAFETY: the inner transport moves every byte, in operations that it could have received directly.
unsafe impl<T: Transport> Transport for Faulty<T> {
    type Registration = T::Registration;
    type Peer = T::Peer;

    fn protocol(&self) -> Protocol {
        self.inner.protocol()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<T::Registration> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.register(span, access) }
    }

    fn export(&self, registration: &T::Registration) -> Vec<u8> {
        self.inner.export(registration)
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        self.inner.describe(desc);
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        self.inner.reaches(desc)
    }

    fn connect(&self, desc: &SegmentDesc) -> impl Future<Output = Result<T::Peer>> + Send {
        self.inner.connect(desc)
    }

    fn is_connected(&self, peer: &T::Peer) -> bool {
        self.inner.is_connected(peer)
    }

    fn release_departed(&self) {
        self.inner.release_departed();
    }

    fn stop_transfers(&self) {
        self.inner.stop_transfers();
    }

    fn is_stopped(&self) -> bool {
        self.inner.is_stopped()
    }

    fn connection_handler(&self) -> Option<&dyn AcceptConnection> {
        self.inner.connection_handler()
    }

    fn submit<'a, I>(&self, peer: &T::Peer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, T::Registration>>,
    {
        for (op, share) in ops.zip(done.each()) {
            self.submit_one(peer, op, share);
        }
    }
}
