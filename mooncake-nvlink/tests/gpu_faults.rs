//! Faults of devices, on the fake libcuda: every call ends with an error that names the fault, and
//! nothing hangs.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use mooncake_core::memory::{
    DeviceDriver, HostMemory, Location, MemorySource, MemorySpan, copy_memory, device_driver, dma_buf,
};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_nvlink::testkit::{FakeCuda, Fault, load};
use mooncake_nvlink::{Cuda, CudaDriver, Device, DeviceMemory, NvlinkConfig, NvlinkPeer, NvlinkTransport};
use mooncake_transport::fallback::PartialTransport;
use mooncake_transport::testkit::write_when_begun;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, Ticket, Transport};
use tokio::runtime::Runtime;

/// Lock of one test at a time: faults concern the whole process.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

struct World {
    fake: FakeCuda,
    owner: NvlinkTransport,
    user: NvlinkTransport,
    runtime: Runtime,
    _guard: MutexGuard<'static, ()>,
}

impl World {
    fn new() -> Self {
        let guard = EXCLUSIVE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let fake = load();
        for fault in
            [Fault::Slow, Fault::NoBatch, Fault::Fabric, Fault::CopyFails, Fault::OutOfMemory, Fault::NoPeers]
        {
            fake.inject(fault, 0);
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let start = || NvlinkTransport::start(NvlinkConfig::default(), runtime.handle()).unwrap();
        Self { fake, owner: start(), user: start(), runtime, _guard: guard }
    }

    fn device(&self) -> Arc<Device> {
        self.user.driver().device(0).unwrap()
    }

    fn open(&self, len: usize) -> Region<NvlinkTransport> {
        let memory = Arc::new(DeviceMemory::new(&self.device(), len).unwrap());
        Region::register(&self.owner, memory, Access::Remote).unwrap()
    }

    fn connect(&self) -> NvlinkPeer {
        let mut desc = SegmentDesc::new("owner");
        desc.buffers.push(BufferDesc::default());
        self.owner.describe(&mut desc);
        self.runtime.block_on(self.user.connect(&desc)).unwrap()
    }

    fn local(&self, len: usize) -> Region<NvlinkTransport> {
        let memory = Arc::new(DeviceMemory::new(&self.device(), len).unwrap());
        Region::register(&self.user, memory, Access::Local).unwrap()
    }

    fn write(
        &self,
        peer: &NvlinkPeer,
        from: &Region<NvlinkTransport>,
        at: u64,
    ) -> Ticket<impl Send + 'static> {
        let deadline = Some(self.user.clock().now().after(Duration::from_secs(20)));
        let from = from.slice(0..from.len()).unwrap();
        transfer::write(&self.user, peer, [Transfer::new(at, from)], deadline)
    }
}

fn ended<B: Send + 'static>(ticket: Ticket<B>) -> Result<()> {
    let ended = ticket.wait_timeout(Duration::from_secs(20));
    ended.unwrap_or_else(|_| panic!("the transfer hangs")).0
}

fn code(result: Result<impl Sized>) -> ErrorCode {
    result.err().as_ref().map(Error::code).expect("the call fails")
}

/// The peer asks the owner again in the middle of the submission.
#[test]
fn memory_announced_in_the_middle_of_a_submission_is_found() {
    let world = World::new();
    let _first = world.open(4096);
    let peer = world.connect();
    let mut second = None;
    let result = write_when_begun(&world.user, &peer, vec![7; 64], || {
        let region = second.insert(world.open(4096));
        world.connect();
        region.addr()
    });
    result.unwrap();
}

#[test]
fn out_of_memory_is_reported_and_temporary() {
    let world = World::new();
    world.fake.inject(Fault::OutOfMemory, 1);
    let error = DeviceMemory::new(&world.device(), 4096).unwrap_err();
    assert_eq!((error.code(), error.kind()), (ErrorCode::BufferOverflow, ErrorKind::NoSpace), "{error}");
    assert!(error.to_string().contains("out of memory"), "{error}");
    DeviceMemory::new(&world.device(), 4096).unwrap();
    world.fake.inject(Fault::OutOfMemory, 1);
    assert_eq!(code(device_driver().unwrap().staging(12345)), ErrorCode::BufferOverflow);
    device_driver().unwrap().staging(12345).unwrap();
}

#[test]
fn a_copy_that_cannot_begin_fails_and_the_next_one_does_not() {
    let world = World::new();
    let (remote, local) = (world.open(4096), world.local(4096));
    let peer = world.connect();
    for no_batch in [0, 1] {
        world.fake.inject(Fault::NoBatch, no_batch);
        world.fake.inject(Fault::CopyFails, 1);
        let error = ended(world.write(&peer, &local, remote.addr())).unwrap_err();
        assert!(error.to_string().contains("invalid argument"), "{error}");
        ended(world.write(&peer, &local, remote.addr())).unwrap();
        let deadline = Some(world.user.clock().now().after(Duration::from_secs(20)));
        let parts = |from: usize| Transfer::new(remote.addr(), local.slice(from..from + 1).unwrap());
        // Enough copies for a batch.
        world.fake.inject(Fault::CopyFails, 1);
        let ticket = transfer::write(&world.user, &peer, (0..16).map(parts).collect::<Vec<_>>(), deadline);
        assert!(ended(ticket).is_err());
        let ticket = transfer::write(&world.user, &peer, (0..16).map(parts).collect::<Vec<_>>(), deadline);
        ended(ticket).unwrap();
    }
    assert!(world.fake.calls("cuMemcpyBatchAsync") > 0);
}

#[test]
fn a_lost_context_ends_its_copies_and_a_new_one_serves() {
    let world = World::new();
    let (remote, local) = (world.open(1 << 20), world.local(1 << 20));
    let peer = world.connect();
    ended(world.write(&peer, &local, remote.addr())).unwrap();
    world.fake.inject(Fault::Slow, 50_000);
    let in_flight: Vec<_> = (0..8).map(|_| world.write(&peer, &local, remote.addr())).collect();
    let device = device_driver().unwrap();
    let copying = device.staging(64).unwrap();
    let part = MemorySpan { len: 64, ..remote.span() };
    // SAFETY: both are allocated until the copy is complete.
    let pending = unsafe { device.copy(part, copying.span()) };
    world.fake.inject(Fault::Lost, 1);
    for ticket in in_flight {
        assert_eq!(ended(ticket).unwrap_err().kind(), ErrorKind::Unavailable);
    }
    assert_eq!(pending.unwrap().wait().unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(ended(world.write(&peer, &local, remote.addr())).is_err());
    assert_eq!(
        world.user.driver().device(0).and_then(|device| DeviceMemory::new(&device, 64)).unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    world.fake.inject(Fault::Slow, 0);
    drop((remote, local));

    world.fake.inject(Fault::Reset, 1);
    let (remote, local) = (world.open(4096), world.local(4096));
    let peer = world.connect();
    ended(world.write(&peer, &local, remote.addr())).unwrap();
}

#[test]
fn a_peer_that_is_gone_is_an_error_at_once() {
    let World { owner, user, runtime, _guard, .. } = World::new();
    let device = user.driver().device(0).unwrap();
    let memory = Arc::new(DeviceMemory::new(&device, 4096).unwrap());
    let remote = Region::register(&owner, memory, Access::Remote).unwrap();
    let mut desc = SegmentDesc::new("owner");
    desc.buffers.push(BufferDesc::default());
    owner.describe(&mut desc);
    let peer = runtime.block_on(user.connect(&desc)).unwrap();
    let at = remote.addr();
    drop((remote, owner));
    // The tasks end with the runtime, sooner or later; in either case the memory is refused.
    let read = [Transfer::new(at, vec![0u8; 64])];
    let error = ended(transfer::read(&user, &peer, read, None)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Invalid), "{error}");
}

#[test]
fn host_memory_is_not_of_this_transport() {
    let world = World::new();
    let memory = Arc::new(HostMemory::new(4096).unwrap());
    let region = Region::register(&world.owner, memory, Access::Remote).unwrap();
    assert!(!region.registration().unwrap().is_reachable());
    let _some = world.open(64);
    let peer = world.connect();
    let local = world.local(64);
    assert_eq!(ended(world.write(&peer, &local, region.addr())).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(world.owner.opened(), 1);
}

#[test]
fn pointers_are_known_and_copies_of_every_kind_arrive() {
    let world = World::new();
    let driver = CudaDriver::serve(None).unwrap();
    let device = world.device();
    let (a, b) = (
        DeviceMemory::new(&device, 5000).unwrap(),
        DeviceMemory::new(&driver.device(1).unwrap(), 5000).unwrap(),
    );
    let host = HostMemory::new(5000).unwrap();
    assert!(driver.allocation(host.span().addr()).is_none());
    let inside = driver.allocation(a.span().addr() + 4999).unwrap();
    assert_eq!((inside.addr(), inside.len, inside.location), (a.span().addr(), 5000, Location::Cuda(0)));
    assert_eq!(driver.allocation(b.span().addr()).unwrap().location, Location::Cuda(1));
    let staging = driver.staging(5000).unwrap();
    assert!(driver.allocation(staging.span().addr()).is_none());
    // SAFETY: all are allocated and used by this test only; each is copied to before it is read.
    unsafe {
        for (i, from) in (0..5000).enumerate() {
            staging.span().ptr.add(from).write(i as u8);
        }
        copy_memory(staging.span(), a.span()).unwrap();
        copy_memory(a.span(), b.span()).unwrap();
        let mut back = driver.copy(b.span(), host.span()).unwrap();
        while back.poll().is_none() {
            std::thread::yield_now();
        }
        back.poll().unwrap().unwrap();
        assert!((0..5000).all(|i| host.span().ptr.add(i).read() == i as u8));
        assert!(driver.copy(MemorySpan { len: 7, ..a.span() }, b.span()).is_err());
    }
    let (addr, live_objects) = (staging.span().addr(), world.fake.live_objects());
    drop(staging);
    assert_eq!(driver.staging(5000).unwrap().span().addr(), addr, "staging memory is reused");
    assert_eq!(world.fake.live_objects(), live_objects);
}

/// A process that uses one device has a context on that device only, whatever is asked about the
/// others: each context takes hundreds of megabytes.
#[test]
fn unused_devices_get_no_context() {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["on_the_second_device", "--exact", "--ignored", "--nocapture"])
        .status();
    assert!(status.unwrap().success());
}

#[test]
#[ignore = "runs as a process of its own in the test before it"]
fn on_the_second_device() {
    let fake = load();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let node = NvlinkTransport::start(NvlinkConfig::default(), runtime.handle()).unwrap();
    // The only context is the one that the program has made current.
    let _current = fake.make_current(1);
    let stream = mooncake_nvlink::Stream::new(&Cuda::open(None).unwrap().device(1).unwrap()).unwrap();
    let driver = device_driver().unwrap();
    drop(driver.staging(4096).unwrap());
    let order = mooncake_nvlink::StreamOrder::new(node.driver().clone(), runtime.handle());
    for stream in [0, stream.handle()] {
        // SAFETY: the stream lives until the end of the test.
        unsafe { order.after_stream(stream, Duration::from_secs(20), async { Ok(()) }) }.unwrap();
    }
    order.wait_for_all().unwrap();
    assert!(!node.reaches(&SegmentDesc::new("nobody")));
    assert_eq!(fake.contexts(0), 0, "an unused device has a context");
    assert!(fake.contexts(1) > 0);
}

/// Copies between devices access the memory of the other directly if possible, and otherwise go
/// through the host.
#[test]
fn devices_get_access_to_each_other() {
    let world = World::new();
    let driver = world.user.driver().clone();
    let (zero, one) = (driver.device(0).unwrap(), driver.device(1).unwrap());
    let remote = world.open(4096);
    let memory = Arc::new(DeviceMemory::new(&one, 4096).unwrap());
    let local = Region::register(&world.user, memory, Access::Local).unwrap();
    let peer = world.connect();
    ended(world.write(&peer, &local, remote.addr())).unwrap();
    let (a, b) = (DeviceMemory::new(&zero, 64).unwrap(), DeviceMemory::new(&one, 64).unwrap());
    // SAFETY: both are allocated, and have no other user.
    unsafe {
        copy_memory(a.span(), b.span()).unwrap();
        copy_memory(b.span(), a.span()).unwrap();
    }
    assert!(world.fake.calls("cuCtxEnablePeerAccess") >= 2);
    assert_eq!(world.fake.unaided(), 0, "copies went through the host");
}

/// A handle is a number, which may by chance be that of memory on this host.
#[test]
fn memory_of_another_host_is_not_opened_by_a_handle_of_this_one() {
    let world = World::new();
    let remote = world.open(4096);
    let mut desc = SegmentDesc::new("owner");
    desc.buffers.push(BufferDesc { addr: remote.addr(), length: 4096, ..BufferDesc::default() });
    world.owner.describe(&mut desc);
    assert!(world.user.reaches(&desc));
    desc.extra.insert("nvlink_endpoint".into(), "another-boot:mooncake-nvlink-0".into());
    assert!(!world.user.reaches(&desc), "CUDA IPC reaches memory only from its own host");
    let error = world.runtime.block_on(world.user.connect(&desc)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// Between two processes handles are refused in the same way; here no other handle can be opened.
#[test]
fn a_handle_that_is_not_valid_is_an_error_of_its_operation() {
    let world = World::new();
    let mut desc = SegmentDesc::new("foreign");
    desc.buffers.push(BufferDesc {
        name: "foreign".into(),
        addr: 0x10_0000,
        length: 4096,
        extra: [("shm_name".to_owned(), "AB".repeat(64).into())].into_iter().collect(),
        ..BufferDesc::default()
    });
    desc.protocols.push(mooncake_transport::Protocol::NVLINK);
    let peer = world.runtime.block_on(world.user.connect(&desc)).unwrap();
    let local = world.local(64);
    let error = ended(world.write(&peer, &local, 0x10_0000)).unwrap_err();
    assert!(error.to_string().contains("cannot be opened"), "{error}");
    assert_eq!(ended(world.write(&peer, &local, 0x10_0fff)).unwrap_err().kind(), ErrorKind::Invalid);
    desc.buffers[0].extra.insert("shm_name".into(), "AB".into());
    assert!(world.runtime.block_on(world.user.connect(&desc)).is_err());
}

/// A NIC registers a part of an allocation by the descriptor of the whole allocation.
#[test]
fn memory_is_listed_as_a_dma_buf() {
    let world = World::new();
    let memory = DeviceMemory::new(&world.device(), 3 * 4096 + 17).unwrap();
    let driver = world.user.driver();
    // SAFETY: inside the span.
    let part = MemorySpan { ptr: unsafe { memory.span().ptr.add(5000) }, len: 4096, ..memory.span() };
    let listed = driver.list_dma_buf(part).unwrap();
    assert_eq!(dma_buf(part).unwrap().offset(), 5000);
    assert!(dma_buf(memory.span()).is_none());
    drop(listed);
    assert!(dma_buf(part).is_none());
    assert_eq!(code(driver.list_dma_buf(MemorySpan { len: 1 << 20, ..part })), ErrorCode::NotSupported);
    let host = HostMemory::new(64).unwrap();
    assert_eq!(code(driver.list_dma_buf(host.span())), ErrorCode::InvalidParams);
}

/// The library is loaded already, so another path changes nothing. An unknown device is named.
#[test]
fn devices_are_numbered() {
    let world = World::new();
    let cuda = Cuda::open(None).unwrap();
    assert_eq!(cuda.device_count().unwrap(), 2);
    let error = cuda.device(2).unwrap_err();
    assert!(error.to_string().contains("cuda:2"), "{error}");
    assert!(world.device().name().contains("Double"));
    assert_eq!(device_driver().unwrap().pci_addresses().unwrap(), ["0000:a0:00.0", "0000:9f:00.0"]);
}
