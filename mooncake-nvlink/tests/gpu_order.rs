//! Transfers in stream order, on the fake libcuda.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_nvlink::testkit::{FakeCuda, Fault, load};
use mooncake_nvlink::{Device, DeviceMemory, NvlinkConfig, NvlinkPeer, NvlinkTransport, Stream, StreamOrder};
use mooncake_transport::fallback::PartialTransport;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, Slice, Transport, ticket};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

const LEN: usize = 256 << 10;
/// Delay that exposes work which does not wait.
const SLOW: u64 = 3_000;
/// Limit that no transfer of these tests reaches.
const LIMIT: Duration = Duration::from_secs(60);

/// Lock of one test at a time: faults concern the whole process.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

struct World {
    fake: FakeCuda,
    node: Arc<NvlinkTransport>,
    peer: NvlinkPeer,
    device: Arc<Device>,
    remote: Region<NvlinkTransport>,
    local: Slice<NvlinkTransport>,
    memory: Arc<DeviceMemory>,
    order: StreamOrder,
    _runtime: Runtime,
    _guard: MutexGuard<'static, ()>,
}

impl World {
    fn new(no_wait_value: bool) -> Self {
        let guard = EXCLUSIVE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let fake = load();
        fake.inject(Fault::Slow, SLOW);
        fake.inject(Fault::NoWaitValue, no_wait_value.into());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let node = Arc::new(NvlinkTransport::start(NvlinkConfig::default(), runtime.handle()).unwrap());
        let device = node.driver().device(0).unwrap();
        let allocate = || Arc::new(DeviceMemory::new(&device, LEN).unwrap());
        let remote = Region::register(&*node, allocate(), Access::Remote).unwrap();
        let memory = allocate();
        let local = Region::register(&*node, memory.clone(), Access::Local).unwrap();
        let local = local.slice(0..LEN).unwrap();
        let mut desc = SegmentDesc::new("n");
        desc.buffers.push(BufferDesc::default());
        node.describe(&mut desc);
        let peer = runtime.block_on(node.connect(&desc)).unwrap();
        let order = StreamOrder::new(node.driver().clone(), runtime.handle());
        Self { fake, node, peer, device, remote, local, memory, order, _runtime: runtime, _guard: guard }
    }

    fn write(&self) -> impl Future<Output = Result<()>> + Send + 'static {
        let (node, peer, at, local) =
            (self.node.clone(), self.peer.clone(), self.remote.addr(), self.local.clone());
        async move {
            let deadline = Some(node.clock().now().after(Duration::from_secs(20)));
            transfer::write(&*node, &peer, [Transfer::new(at, local)], deadline).await.0
        }
    }

    fn contains_only(&self, byte: u8) -> bool {
        let mut bytes = vec![0; LEN];
        self.remote.slice(0..LEN).unwrap().copy_to(0, &mut bytes).unwrap();
        bytes.iter().all(|b| *b == byte)
    }
}

/// Checks many times that the stream fills memory, writes it to a peer, and fills it again, and
/// that the peer sees each filling whole.
fn race(world: &World, stream: u64, fill: impl Fn(u8), wait: impl Fn()) {
    for round in 1..20u8 {
        fill(round);
        // SAFETY: the stream lives until the end of the test.
        unsafe { world.order.after_stream(stream, LIMIT, world.write()) }.unwrap();
        fill(0xff);
        wait();
        assert!(world.contains_only(round), "round {round}");
    }
    world.order.wait_for_all().unwrap();
    assert_eq!(world.order.in_progress(), 0);
}

fn race_on_a_stream(world: &World) {
    let stream = Stream::new(&world.device).unwrap();
    // SAFETY: the memory lives until the end of the test, and is used in the order of the stream.
    let fill = |byte| unsafe { stream.fill(world.memory.span(), byte) }.unwrap();
    race(world, stream.handle(), fill, || stream.wait().unwrap());
}

#[test]
fn a_transfer_runs_between_earlier_and_later_work() {
    let world = World::new(false);
    race_on_a_stream(&world);
    assert!(world.fake.calls("cuStreamWaitValue32") > 0);
}

#[test]
fn a_transfer_runs_in_order_if_streams_wait_in_functions() {
    let before = load().calls("cuLaunchHostFunc");
    let world = World::new(true);
    race_on_a_stream(&world);
    assert!(world.fake.calls("cuLaunchHostFunc") > before);
    world.fake.inject(Fault::NoWaitValue, 0);
}

/// Most programs use the default stream, and all others that do not opt out wait for it.
#[test]
fn transfers_are_ordered_with_the_default_stream() {
    let world = World::new(false);
    let driver = world.node.driver().clone();
    let stream = Stream::new(&world.device).unwrap();
    // SAFETY: the memory lives until the end of the test; the default stream and this stream wait
    // for each other.
    let fill = |byte| unsafe { stream.fill(world.memory.span(), byte) }.unwrap();
    race(&world, 0, fill, || driver.wait_for_default_stream(0).unwrap());
}

/// The default stream is that of the device which the thread has made current, as everywhere in
/// CUDA.
#[test]
fn the_default_stream_is_that_of_the_current_device() {
    let world = World::new(false);
    let (driver, device) = (world.node.driver().clone(), world.node.driver().device(1).unwrap());
    let memory = Arc::new(DeviceMemory::new(&device, LEN).unwrap());
    let local = Region::register(&*world.node, memory.clone(), Access::Local).unwrap().slice(0..LEN).unwrap();
    let world = World { local, memory, ..world };
    let stream = Stream::new(&device).unwrap();
    let fill = |byte| {
        // Takes longer than a copy that waits for nothing.
        for byte in [0xee, 0xee, byte] {
            // SAFETY: the memory lives until the end of the test; the default stream of its device
            // and this stream wait for each other.
            unsafe { stream.fill(world.memory.span(), byte) }.unwrap();
        }
    };
    let _current = world.fake.make_current(1);
    race(&world, 0, fill, || driver.wait_for_default_stream(1).unwrap());
}

/// A stalled device does not hold a stream back for ever.
#[test]
fn a_transfer_that_does_not_end_fails_and_the_stream_continues() {
    let world = World::new(false);
    let stream = Stream::new(&world.device).unwrap();
    let (done, pending) = ticket(world.memory.clone(), 1, None);
    let never = async move { pending.await.0 };
    // SAFETY: the stream lives until the end of the test.
    unsafe { world.order.after_stream(stream.handle(), Duration::from_millis(20), never) }.unwrap();
    stream.wait().unwrap();
    assert_eq!(world.order.wait_for_all().unwrap_err().code(), ErrorCode::RpcTimeout);
    assert_eq!(world.order.in_progress(), 0);
    // The memory is still kept for the transfer.
    assert!(Arc::strong_count(&world.memory) > 2);
    done.finish(Ok(()));
}

#[test]
fn the_stream_waits_for_a_transfer_however_long_it_takes() {
    let world = World::new(false);
    let stream = Stream::new(&world.device).unwrap();
    let (done, pending) = ticket((), 1, None);
    // SAFETY: the stream lives until the end of the test.
    unsafe { world.order.after_stream(stream.handle(), LIMIT, async move { pending.await.0 }) }.unwrap();
    // SAFETY: the memory is allocated, and only this stream uses it.
    unsafe { stream.fill(world.memory.span(), 1) }.unwrap();
    // Work of another stream continues meanwhile, and takes longer than the delayed work.
    let other_device = world.node.driver().device(1).unwrap();
    let other = Stream::new(&other_device).unwrap();
    let busy = DeviceMemory::new(&other_device, LEN).unwrap();
    for _ in 0..4 {
        // SAFETY: the memory is allocated until the wait for the stream, and only that stream uses
        // it.
        unsafe { other.fill(busy.span(), 1) }.unwrap();
    }
    other.wait().unwrap();
    assert!(!stream.is_idle().unwrap() && world.order.in_progress() == 1);
    done.finish(Ok(()));
    stream.wait().unwrap();
    world.order.wait_for_all().unwrap();
}

#[test]
fn a_failure_is_reported_at_the_next_call_and_the_stream_continues() {
    let world = World::new(false);
    let stream = Stream::new(&world.device).unwrap();
    let fails = async { Err(Error::new(ErrorCode::TransferFail, "injected failure")) };
    // SAFETY: the stream lives until the end of the test.
    unsafe { world.order.after_stream(stream.handle(), LIMIT, fails) }.unwrap();
    stream.wait().unwrap();
    // SAFETY: as above.
    let error = unsafe { world.order.after_stream(stream.handle(), LIMIT, world.write()) }.unwrap_err();
    assert_eq!(error.message(), "injected failure");
    // The failure is reported once.
    // SAFETY: as above.
    unsafe { world.order.after_stream(stream.handle(), LIMIT, world.write()) }.unwrap();
    world.order.wait_for_all().unwrap();
    // SAFETY: as above.
    let refused = unsafe {
        world.order.after_stream(stream.handle(), LIMIT, async { Err(Error::invalid("not begun")) })
    };
    refused.unwrap();
    assert_eq!(world.order.wait_for_all().unwrap_err().message(), "not begun");
    world.order.check().unwrap();
}

#[test]
fn a_thousand_transfers_leave_nothing_behind() {
    let world = World::new(false);
    world.fake.inject(Fault::Slow, 0);
    let stream = Stream::new(&world.device).unwrap();
    let gate = Arc::new(Semaphore::new(0));
    // A hundred at once, so that the pools have the same size every time.
    let go = || {
        for _ in 0..100 {
            let gate = gate.clone();
            let transfer =
                async move { gate.acquire().await.map(drop).map_err(|_| Error::internal("closed")) };
            // SAFETY: the stream lives until the end of the test.
            unsafe { world.order.after_stream(stream.handle(), LIMIT, transfer) }.unwrap();
        }
        gate.add_permits(1);
        world.order.wait_for_all().unwrap();
        stream.wait().unwrap();
        gate.try_acquire().unwrap().forget();
    };
    go();
    go();
    let before = world.fake.live_objects();
    for _ in 0..10 {
        go();
    }
    let after = world.fake.live_objects();
    assert!(after - before < 16, "{before} -> {after}");
}
