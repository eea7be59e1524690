//! Transport that fails at random, with TCP over real sockets as its fallback: every request gets
//! one response, with the right bytes or an error.
#![cfg(feature = "transport-tcp")]

use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::meta::MemoryMetadata;
use mooncake_tcp::{TcpConfig, TcpPeer, TcpTransport};
use mooncake_transport::engine::{Batch, Engine, LocalCopies};
use mooncake_transport::fallback::{self, with_fallback};
use mooncake_transport::loopback::{LoopbackPeer, LoopbackRegistration};
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::{
    Access, Completion, Directory, Loopback, LoopbackNet, Op, Protocol, SegmentDesc, Transport,
};
use proptest::prelude::*;
use tokio::runtime::Runtime;

/// Loopback transport with faults, and TCP as its fallback.
#[derive(Debug)]
struct Both {
    fast: Faulty<Loopback>,
    slow: Arc<TcpTransport>,
    clock: SharedClock,
}

#[derive(Debug)]
struct Registered {
    fast: LoopbackRegistration,
    _slow: mooncake_tcp::Registration,
}

// SAFETY: the two inner transports do all the work.
unsafe impl Transport for Both {
    type Registration = Registered;
    type Peer = (LoopbackPeer, TcpPeer);

    fn protocol(&self) -> Protocol {
        Protocol::TCP
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registered> {
        // SAFETY: passed on.
        unsafe {
            Ok(Registered {
                fast: self.fast.register(span, access)?,
                _slow: self.slow.register(span, access)?,
            })
        }
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        self.slow.describe(desc);
        self.fast.describe(desc);
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<Self::Peer> {
        Ok((self.fast.connect(desc).await?, self.slow.connect(desc).await?))
    }

    fn submit<'a, I>(&self, peer: &Self::Peer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registered>>,
    {
        let (wire, way) = (Arc::downgrade(&self.slow), peer.1.clone());
        let guarded = with_fallback(ops, done, &self.clock, fallback::is_path_error, move |failed| {
            if let Some(wire) = wire.upgrade() {
                wire.submit_shares(&way, failed);
            }
        });
        // SAFETY: the inner registration covers the same bytes, and lives as long as the composite.
        let ops = guarded
            .ops
            .into_iter()
            .map(|op| unsafe { op.with_registration(op.registration().map(|r| &r.fast)) });
        self.fast.submit(&peer.0, ops, guarded.done);
    }
}

const SLOT: usize = 3000;

struct World {
    runtime: Runtime,
    owner: Engine<Both>,
    user: Engine<Both>,
    memory: Arc<HostMemory>,
}

impl World {
    fn new(slots: usize, seed: u64) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (net, clock) = (LoopbackNet::new(), SystemClock::shared());
        let directory = Directory::new(Arc::<MemoryMetadata>::default());
        let start = |name: &str| {
            let tcp = TcpConfig { data_host: "127.0.0.1".into(), ..TcpConfig::default() };
            let tcp = TcpTransport::start_with_clock(tcp, runtime.handle(), clock.clone()).unwrap();
            let fast = Faulty::new(Arc::new(net.node()), seed, Faults::none());
            let wire = Both { fast, slow: Arc::new(tcp), clock: clock.clone() };
            let builder = Engine::builder(Arc::new(wire)).name(name).clock(clock.clone());
            let builder = builder.directory(directory.clone()).local_copies(LocalCopies::Never);
            runtime.block_on(builder.start()).unwrap()
        };
        let (owner, user) = (start("owner"), start("user"));
        let memory = Arc::new(HostMemory::new(slots * SLOT).unwrap());
        Self { runtime, owner, user, memory }
    }
}

fn pattern(slot: usize, len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8) ^ (slot as u8).wrapping_mul(31) ^ salt).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn every_request_is_answered_once_with_right_bytes(
        requests in proptest::collection::vec((any::<bool>(), 1..SLOT), 1..40),
        seed in any::<u64>(),
        rates in proptest::collection::vec(0u16..250, 5),
    ) {
        let world = World::new(requests.len(), seed);
        let region = world.runtime.block_on(world.owner.register(world.memory.clone())).unwrap();
        let target = world.runtime.block_on(world.user.open("owner")).unwrap();
        let mut batch = Batch::new();
        for (slot, (write, len)) in requests.iter().enumerate() {
            let at = region.addr() + (slot * SLOT) as u64;
            if *write {
                batch.write(&target, at, pattern(slot, *len, 1));
            } else {
                let bytes = pattern(slot, *len, 2);
                // SAFETY: a slot of its own, and no transfer has begun.
                unsafe {
                    let to = world.memory.span().ptr.add(slot * SLOT);
                    to.copy_from_nonoverlapping(std::ptr::NonNull::from(&bytes[..]).cast(), *len);
                }
                batch.read(&target, at, vec![0; *len]);
            }
        }
        let wire = &world.user.transport().fast;
        let kinds = [Fault::Fail, Fault::Drop, Fault::Cut, Fault::LoseResponse, Fault::Delay];
        wire.set(kinds.into_iter().zip(&rates).fold(Faults::none(), |f, (kind, rate)| f.with(kind, *rate)));
        let running = world.user.submit(batch, None);
        wire.set(Faults::none());
        while wire.release(1) > 0 {}
        let done = world.runtime.block_on(running);
        prop_assert_eq!(done.results.len(), requests.len());
        let mut there = vec![0; world.memory.len()];
        region.slice(0..there.len()).unwrap().copy_to(0, &mut there).unwrap();
        for (slot, ((result, buffer), (write, len))) in
            done.results.into_iter().zip(done.buffers).zip(&requests).enumerate()
        {
            // The fallback works, so no request may be lost.
            prop_assert!(result.is_ok(), "request {}: {:?}", slot, result);
            let local: Vec<u8> = buffer.try_into().unwrap();
            let remote = &there[slot * SLOT..slot * SLOT + len];
            prop_assert_eq!(&local[..], remote, "request {}", slot);
            prop_assert_eq!(&local, &pattern(slot, *len, if *write { 1 } else { 2 }));
        }
    }
}

#[test]
fn when_both_transports_fail_the_caller_gets_the_error() {
    let world = World::new(4, 1);
    let region = world.runtime.block_on(world.owner.register(world.memory.clone())).unwrap();
    let target = world.runtime.block_on(world.user.open("owner")).unwrap();
    world.user.transport().fast.set(Faults::none().with(Fault::Fail, 1000));
    let mut batch = Batch::new();
    batch.read(&target, region.addr(), vec![0; 10]);
    batch.read(&target, region.addr() + (4 * SLOT) as u64 - 5, vec![0; 10]);
    let done = world.runtime.block_on(world.user.submit(batch, None));
    assert!(done.results[0].is_ok());
    assert_eq!(done.results[1].as_ref().unwrap_err().kind(), mooncake_core::ErrorKind::Invalid);
}
