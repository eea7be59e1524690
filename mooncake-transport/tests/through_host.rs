//! Device memory on a transport that supports host memory only: failures, waits and limits.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use mooncake_core::ErrorKind;
use mooncake_core::clock::{Clock, ManualClock, Moment, SharedClock, SystemClock};
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::testkit::device::{TestDevice, TestDeviceMemory};
use mooncake_transport::engine::{Batch, Engine, Status};
use mooncake_transport::testkit::{Fault, Faults, Faulty};
use mooncake_transport::transfer::{Transfer, read, write};
use mooncake_transport::{
    Access, BufferDesc, Loopback, LoopbackNet, Region, SegmentDesc, SliceMut, ThroughHost, Transport,
};

type Inner = Faulty<Loopback>;
type Wire = ThroughHost<Inner>;
type Peer = <Wire as Transport>::Peer;

const MIB: usize = 1 << 20;

/// Two nodes, the second with memory that is open to the first.
struct World {
    user: Arc<Wire>,
    peer: Peer,
    remote: Region<Inner>,
    device: TestDevice,
    /// Keeps the remote memory open.
    _owner: Arc<Inner>,
}

impl World {
    fn new(len: usize, clock: SharedClock, listed: bool) -> Self {
        let net = LoopbackNet::with_clock(clock.clone());
        let node = || Arc::new(Faulty::new(Arc::new(net.node()), 1, Faults::none()));
        let (owner, user) = (node(), Arc::new(ThroughHost::new(node(), clock)));
        let remote =
            Region::register(&*owner, Arc::new(HostMemory::new(len).unwrap()), Access::Remote).unwrap();
        let mut desc = SegmentDesc::new("owner");
        if listed {
            let (addr, length) = (remote.addr(), remote.len() as u64);
            desc.buffers.push(BufferDesc { name: "owner".into(), addr, length, ..BufferDesc::default() });
        }
        owner.describe(&mut desc);
        let peer = user.connect(&desc).now_or_never().unwrap().unwrap();
        Self { user, peer, remote, device: TestDevice::new(), _owner: owner }
    }

    fn local(&self, bytes: &[u8]) -> (Arc<TestDeviceMemory>, SliceMut<Wire>) {
        let memory = Arc::new(self.device.memory(bytes.len()).unwrap());
        memory.fill(bytes);
        let region = Region::register(&*self.user, memory.clone(), Access::Local).unwrap();
        (memory, region.exclusive().unwrap())
    }

    fn there(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.remote.len()];
        self.remote.slice(0..bytes.len()).unwrap().copy_to(0, &mut bytes).unwrap();
        bytes
    }
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn in_time(world: SystemClock) -> Option<Moment> {
    Some(world.now().after(Duration::from_secs(20)))
}

#[test]
fn long_and_short_operations_arrive_whole() {
    let world = World::new(9 * MIB, SystemClock::shared(), true);
    let sent = bytes(9 * MIB, 1);
    // Cut, brought together, and both at once.
    let cuts = [0..1, 1..1000, 1000..5 * MIB + 7, 5 * MIB + 7..5 * MIB + 8, 5 * MIB + 8..9 * MIB];
    let at = |start: usize| world.remote.addr() + start as u64;
    let writes: Vec<_> =
        cuts.iter().map(|cut| Transfer::new(at(cut.start), world.local(&sent[cut.clone()]).1)).collect();
    let (results, _) = write(&*world.user, &world.peer, writes, in_time(SystemClock::new())).results().wait();
    results.into_iter().for_each(|result| result.unwrap());
    assert!(world.there() == sent);
    let (looks, reads): (Vec<_>, Vec<_>) = cuts
        .iter()
        .map(|cut| {
            let (look, into) = world.local(&vec![0; cut.len()]);
            (look, Transfer::new(at(cut.start), into))
        })
        .unzip();
    read(&*world.user, &world.peer, reads, in_time(SystemClock::new())).wait().0.unwrap();
    for (look, cut) in looks.into_iter().zip(cuts) {
        assert!(look.bytes() == sent[cut.clone()], "{cut:?}");
    }
}

#[test]
fn page_locked_memory_is_bounded() {
    let world = World::new(64 * MIB, SystemClock::shared(), true);
    let before = world.device.staged_bytes();
    let sent = bytes(64 * MIB, 2);
    let writes: Vec<_> = (0..8)
        .map(|i| {
            Transfer::new(
                world.remote.addr() + (i * 8 * MIB) as u64,
                world.local(&sent[i * 8 * MIB..(i + 1) * 8 * MIB]).1,
            )
        })
        .map(|transfer| write(&*world.user, &world.peer, [transfer], in_time(SystemClock::new())))
        .collect();
    writes.into_iter().for_each(|write| write.wait().0.unwrap());
    assert!(world.there() == sent);
    // Other tests of this process have some, too.
    let most = world.device.staged_bytes().saturating_sub(before);
    assert!(most <= (5 * 32) << 20, "{most} bytes");
}

/// A peer without published memory decides about each operation as a whole.
#[test]
fn what_is_not_listed_is_not_cut() {
    let world = World::new(5 * MIB, SystemClock::shared(), false);
    let sent = bytes(5 * MIB, 3);
    let (_look, source) = world.local(&sent);
    let (result, [back]) =
        write(&*world.user, &world.peer, [Transfer::new(world.remote.addr() + 1, source)], None).wait();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(world.there().iter().all(|byte| *byte == 0), "refused as a whole");
    let again = Transfer::new(world.remote.addr(), back.buffer);
    write(&*world.user, &world.peer, [again], None).wait().0.unwrap();
    assert!(world.there() == sent);
}

#[test]
fn a_failed_copy_fails_its_operation_only() {
    let world = World::new(8 * MIB, SystemClock::shared(), true);
    let sent = bytes(4 * MIB, 4);
    for failing in [1, 2] {
        world.device.fail_copies(failing);
        let (_look, source) = world.local(&sent);
        let (result, _) =
            write(&*world.user, &world.peer, [Transfer::new(world.remote.addr(), source)], None).wait();
        // The error belongs to this process.
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Internal);
        world.device.fail_copies(0);
        let healthy = TestDevice::new();
        let memory = Arc::new(healthy.memory(MIB).unwrap());
        let other =
            Region::register(&*world.user, memory.clone(), Access::Local).unwrap().exclusive().unwrap();
        let (sick_look, sick) = world.local(&vec![7; MIB]);
        world.device.fail_copies(1);
        let reads = [
            Transfer::new(world.remote.addr() + 5 * MIB as u64, sick),
            Transfer::new(world.remote.addr(), other),
        ];
        let (results, _) = read(&*world.user, &world.peer, reads, None).results().wait();
        assert!(results[0].is_err() && results[1].is_ok(), "{results:?}");
        assert_eq!(memory.bytes(), world.there()[..MIB]);
        drop(sick_look);
    }
}

#[test]
fn a_transport_that_fails_in_the_middle_fails_the_operation() {
    let world = World::new(8 * MIB, SystemClock::shared(), true);
    let sent = bytes(8 * MIB, 5);
    for fault in [Fault::Fail, Fault::Drop, Fault::Cut, Fault::LoseResponse] {
        world.user.transport().set(Faults::none().with(fault, 1000));
        let (_look, source) = world.local(&sent);
        let transfer = [Transfer::new(world.remote.addr(), source)];
        let (result, _) = write(&*world.user, &world.peer, transfer, None).wait();
        assert!(result.is_err(), "{fault:?}");
        let (look, into) = world.local(&sent);
        let (result, _) =
            read(&*world.user, &world.peer, [Transfer::new(world.remote.addr(), into)], None).wait();
        assert!(result.is_err(), "{fault:?}");
        if fault == Fault::Fail {
            assert!(look.bytes() == sent, "what did not come is not copied");
        }
        world.user.transport().set(Faults::none());
    }
    let (look, into) = world.local(&vec![1; 8 * MIB]);
    read(&*world.user, &world.peer, [Transfer::new(world.remote.addr(), into)], None).wait().0.unwrap();
    assert!(look.bytes() == world.there());
}

/// An operation waits for a buffer until its deadline. If others have the buffers until then, it
/// does not begin.
#[test]
fn who_waits_for_a_buffer_has_a_deadline() {
    let clock = Arc::new(ManualClock::new());
    let world = World::new(64 * MIB, clock.clone(), true);
    world.device.hold(true);
    let write_to = |at: usize, deadline| {
        let source = world.local(&vec![9; 8 * MIB]).1;
        write(&*world.user, &world.peer, [Transfer::new(world.remote.addr() + at as u64, source)], deadline)
    };
    let holders: Vec<_> = (0..7).map(|i| write_to(i * 8 * MIB, None)).collect();
    let waiter = write_to(56 * MIB, Some(clock.now().after(Duration::from_secs(1))));
    let waiter = waiter.wait_timeout(Duration::from_millis(20)).unwrap_err();
    clock.advance(Duration::from_secs(2));
    let (result, _) = waiter.wait();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Timeout);
    world.device.hold(false);
    holders.into_iter().for_each(|holder| holder.wait().0.unwrap());
    let there = world.there();
    assert!(
        there[..56 * MIB].iter().all(|byte| *byte == 9) && there[56 * MIB..].iter().all(|byte| *byte == 0)
    );
}

#[tokio::test]
async fn what_is_given_up_before_it_began_goes_back() {
    let clock = SystemClock::shared();
    let net = LoopbackNet::with_clock(clock.clone());
    let wire = || Arc::new(ThroughHost::new(Arc::new(net.node()), clock.clone()));
    let device = TestDevice::new();
    let start = |wire| Engine::builder(wire).local_copies(mooncake_transport::engine::LocalCopies::Never);
    let owner = start(wire()).name("owner").start().await.unwrap();
    let directory = owner.directory().clone();
    let user = start(wire()).name("user").directory(directory).start().await.unwrap();
    let remote = owner.register(Arc::new(HostMemory::new(64 * MIB).unwrap())).await.unwrap();
    let target = user.open("owner").await.unwrap();
    device.hold(true);
    let mut batch = Batch::new();
    for i in 0..64 {
        let memory: Arc<dyn MemorySource> = Arc::new(device.memory(MIB).unwrap());
        let source = user.register_local(memory).unwrap().slice(0..MIB).unwrap();
        batch.write(&target, remote.addr() + (i * MIB) as u64, source);
    }
    let running = user.submit(batch, None);
    let view = running.view();
    view.cancel();
    device.hold(false);
    let finished = running.await;
    let given_back = finished.results.iter().filter(|result| result.is_err()).count();
    assert!(given_back >= 32, "{given_back} of 64");
    let canceled = (0..64).filter(|&i| view.request(i).unwrap().status == Status::Canceled).count();
    assert_eq!(canceled, given_back);
}
