//! Tests of faults that no available device has, on a fake library: lost devices, refused requests,
//! dma-bufs.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_core::memory::{HostMemory, ListedDmaBuf, MemorySource, MemorySpan};
use mooncake_transport::fallback::{PartialTransport, Retry, is_any_error, with_fallback};
use mooncake_transport::ticket::{OpState, Watch, ticket, watched};
use mooncake_transport::topology::Topology;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{
    Access, BufferDesc, Op, Opcode, Region, SegmentDesc, SliceMut, Source, Ticket, Transport,
};
use tokio::runtime::Runtime;

use crate::endpoint::{Piece, Registered};
use crate::node::Node;
use crate::peer::PeerDescriptor;
use crate::registration::Registration;
use crate::verbs::fake::{Fake, Registration as FakeRegistration};
use crate::verbs::{Domain, MemoryRegion, Rights, object_counts};
use crate::{RdmaConfig, RdmaPeer, RdmaTransport};

const LEN: usize = 64 << 10;

const PORT_UP: u32 = 9;
const PORT_DOWN: u32 = 10;
const GIDS: u32 = 18;
const FATAL: u32 = 8;
const QUEUE_FATAL: u32 = 0;

/// Requests that the two queue pairs of a connection hold, and more than that.
const CAPACITY: usize = 128;
const OPS: usize = 300;

const REMOTE: u32 = 1 | 2 | 4;
const RELAXED: u32 = 1 << 20;

/// Node on the device of the fake. It is its own peer, which needs no handshake.
pub(crate) struct LoopbackNode {
    pub(crate) node: RdmaTransport,
    region: Region<RdmaTransport>,
    runtime: Runtime,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn node(runtime: &Runtime, config: RdmaConfig) -> RdmaTransport {
    let config = RdmaConfig { server_name: "10.0.0.1:1".into(), ..config };
    RdmaTransport::start(config, runtime.handle()).unwrap()
}

impl LoopbackNode {
    fn new() -> Self {
        Self::with(RdmaConfig::default())
    }

    pub(crate) fn with(config: RdmaConfig) -> Self {
        let runtime = runtime();
        let node = node(&runtime, config);
        let memory = Arc::new(HostMemory::new(LEN).unwrap());
        let region = Region::register(&node, memory, Access::Remote).unwrap();
        Self { node, region, runtime }
    }

    /// Returns the address of its memory.
    pub(crate) fn addr(&self) -> u64 {
        self.region.addr()
    }

    /// Returns memory to read into and to write from.
    pub(crate) fn local(&self, len: usize) -> SliceMut<RdmaTransport> {
        let memory = Arc::new(HostMemory::new(len).unwrap());
        Region::register(&self.node, memory, Access::Local).unwrap().exclusive().unwrap()
    }

    pub(crate) fn peer(&self) -> RdmaPeer {
        self.runtime.block_on(self.node.connect(&self.desc())).unwrap()
    }

    fn desc(&self) -> SegmentDesc {
        let mut desc = SegmentDesc::new("alone");
        let key = self.node.export(self.region.registration().unwrap());
        let (addr, length) = (self.region.addr(), LEN as u64);
        desc.buffers = vec![BufferDesc { name: "alone".into(), addr, length, key, ..BufferDesc::default() }];
        self.node.describe(&mut desc);
        desc
    }

    /// Posts a read without a deadline.
    fn read(&self) -> Ticket<[Transfer<SliceMut<RdmaTransport>>; 1]> {
        let into = [Transfer::new(self.addr(), self.local(64))];
        transfer::read(&self.node, &self.peer(), into, None)
    }

    fn gid(&self) -> String {
        self.node.devices()[0].gid.to_string()
    }
}

/// Waits for an effect of a device thread, as long as it may take on a busy machine.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let clock = mooncake_core::clock::SystemClock::shared();
    let end = clock.now().after(Duration::from_secs(30));
    while !holds() {
        assert!(clock.now() < end, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_port_that_goes_down_and_comes_back() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    assert!(loopback.node.has_active_device());
    fake.state().port_is_up = false;
    fake.event(PORT_DOWN);
    eventually("the port is down", || !loopback.node.has_active_device());
    let error = loopback.read().wait().0.unwrap_err();
    assert!(error.to_string().contains("no local RDMA device is up"), "{error}");
    fake.state().port_is_up = true;
    fake.event(PORT_UP);
    eventually("the port is up", || loopback.node.has_active_device());
    fake.state().address = 7;
    fake.event(GIDS);
    eventually("another address", || loopback.gid() == "::ffff:10.0.0.7");
}

#[test]
fn a_lost_device_ends_its_requests_and_costs_nothing_afterwards() {
    for event in [FATAL, QUEUE_FATAL] {
        let fake = Fake::new();
        let loopback = LoopbackNode::new();
        let tickets = [loopback.read(), loopback.read()];
        eventually("both are posted", || fake.state().posted == 2);
        fake.event(event);
        for ticket in tickets {
            let error = ticket.wait().0.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
        assert!(!loopback.node.has_active_device());
        eventually("its queue pairs are destroyed", || {
            let state = fake.state();
            state.pairs_created == 2 && state.pairs_destroyed == 2
        });
        // From now on its descriptor reports an event that does not exist, as that of a removed
        // device does.
        let event_reads = fake.state().event_reads;
        fake.event(PORT_UP);
        for _ in 0..50 {
            loopback.read().wait().0.unwrap_err();
        }
        assert_eq!(fake.state().event_reads, event_reads, "events of a lost device are ignored");
        assert!(!loopback.node.has_active_device(), "a lost device does not come back");
    }
}

#[test]
fn a_queue_that_fails_loses_its_device() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    let ticket = loopback.read();
    eventually("it is posted", || fake.state().posted == 1);
    fake.state().queue_works = false;
    // Any event makes the thread look.
    fake.event(PORT_UP);
    let error = ticket.wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let polled = fake.state().polled;
    for _ in 0..20 {
        loopback.read().wait().0.unwrap_err();
    }
    assert_eq!(fake.state().polled, polled, "a lost queue is not polled");
}

#[test]
fn a_device_whose_events_cannot_be_read_is_lost() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    let ticket = loopback.read();
    eventually("it is posted", || fake.state().posted == 1);
    // The descriptor of the event queue reports an event, and reading it fails.
    fake.make_readable();
    let error = ticket.wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(!loopback.node.has_active_device());
    let error = loopback.read().wait().0.unwrap_err();
    assert!(error.to_string().contains("no local RDMA device is up"), "{error}");
    let event_reads = fake.state().event_reads;
    fake.event(PORT_UP);
    loopback.read().wait().0.unwrap_err();
    assert_eq!((event_reads, fake.state().event_reads), (1, 1), "the event is not read again");
}

#[test]
fn nobody_connects_over_a_lost_device() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    let config = RdmaConfig { server_name: "10.0.0.1:2".into(), ..RdmaConfig::default() };
    let node = Node::open(config, loopback.runtime.handle(), loopback.node.clock().clone()).unwrap();
    let peer = Arc::new(node.peer(PeerDescriptor::read(&loopback.desc()).unwrap()));
    // The rail was chosen a moment before.
    node.nics[0].mark_lost();
    let local = loopback.local(64);
    let (done, ticket) = ticket((), 1, None);
    let piece = Piece {
        opcode: Opcode::Read,
        local: local.addr(),
        len: 64,
        local_key: 0,
        remote: loopback.addr(),
        remote_key: 0,
        region: 0,
        attempts: 0,
        flushes: 0,
        begun: false,
        registration: Registered(local.local().registration.unwrap().into()),
        peer: peer.clone(),
        done,
    };
    node.send(&peer.rails[0][0], &mut vec![piece]);
    let error = ticket.wait().0.unwrap_err();
    assert!(error.to_string().contains("lost"), "{error}");
    assert_eq!((fake.state().pairs_created, node.nics[0].endpoints.read().len()), (0, 0));
}

/// The device refuses to destroy queue pairs with requests in flight: it may still write to the
/// memory, so no user gets the memory back.
#[test]
fn requests_of_undestroyed_pairs_stay_pending() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    let ticket = loopback.read();
    eventually("it is posted", || fake.state().posted == 1);
    fake.state().destroying_works = false;
    fake.event(FATAL);
    eventually("the destruction is retried", || fake.state().refused_destructions > 4);
    assert!(!ticket.is_done());
    fake.state().destroying_works = true;
    let error = ticket.wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let state = fake.state();
    assert_eq!(state.pairs_created, state.pairs_destroyed);
}

#[test]
fn memory_of_undestroyed_pairs_is_leaked_and_delays_nobody() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    let ticket = loopback.read();
    eventually("it is posted", || fake.state().posted == 1);
    let (regions, devices) = (object_counts().regions, object_counts().devices);
    fake.state().destroying_works = false;
    // Ends although no pair is destroyed.
    drop(loopback);
    assert!(!ticket.is_done());
    let waited = ticket.wait_timeout(Duration::ZERO).unwrap_err();
    drop(waited);
    assert_eq!(
        object_counts().regions,
        regions - 1,
        "memory registered for peers is deregistered, the other is not"
    );
    assert_eq!(object_counts().devices, devices);
}

/// Cancelled messages that wait for credit end; posted ones continue.
#[test]
fn unposted_messages_can_be_cancelled() {
    for behind in [false, true] {
        let fake = Fake::new();
        let loopback = LoopbackNode::new();
        let peer = loopback.peer();
        let clock = loopback.node.clock().clone();
        let submit = |early: bool| {
            let into = loopback.local(OPS * 8);
            let local = into.local();
            let (registration, span) = (local.registration, local.span);
            let op = |i: usize| {
                // SAFETY: inside the span, which consists of so many parts of that length.
                let part = MemorySpan { ptr: unsafe { span.ptr.add(i * 8) }, len: 8, ..span };
                // SAFETY: `into` is kept below until the completion is done.
                unsafe { Op::new(Opcode::Read, registration, part, loopback.addr(), &[]) }
            };
            let (done, ticket, watch) = watched((), OPS, None);
            if early {
                watch.cancel();
            }
            let ops: Vec<_> = (0..OPS).map(op).collect();
            match behind {
                false => loopback.node.submit(&peer, ops.into_iter(), done),
                true => {
                    let guarded = with_fallback(
                        ops.into_iter(),
                        done,
                        &clock,
                        is_any_error,
                        |failed: Vec<Retry<()>>| panic!("{} operations are tried again", failed.len()),
                    );
                    loopback.node.submit(&peer, guarded.ops.into_iter(), guarded.done);
                }
            }
            (into, ticket, watch)
        };
        let states = |watch: &Watch| {
            let states: Vec<_> = (0..OPS).map(|op| watch.state(op).unwrap()).collect();
            let of = |expected| states.iter().filter(|state| **state == expected).count();
            (of(OpState::Pending), of(OpState::Done), of(OpState::Cancelled))
        };
        let (into, ticket, watch) = submit(false);
        eventually("the queue pairs are full", || fake.state().posted == CAPACITY);
        watch.cancel();
        // Over RDMA alone each operation ends at once; with a fallback transport, all end with the
        // last one.
        if !behind {
            assert_eq!(states(&watch), (CAPACITY, 0, OPS - CAPACITY));
        }
        assert!(!ticket.is_done());
        fake.complete();
        let (results, ()) = ticket.results().wait();
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), CAPACITY);
        assert_eq!(states(&watch), (0, CAPACITY, OPS - CAPACITY));
        drop(into);
        // Cancelled before any was posted.
        let (into, ticket, watch) = submit(true);
        ticket.wait().0.unwrap_err();
        let (pending, done, given_up) = states(&watch);
        assert_eq!((pending, done + given_up), (0, OPS));
        assert!(given_up >= OPS - 2 * CAPACITY, "{done} were done nevertheless");
        drop(into);
    }
}

#[test]
fn the_published_topology_names_only_used_devices() {
    let _fake = Fake::new();
    let runtime = runtime();
    let topology = Topology::parse(r#"{"cpu:0": [["gone0", "fake0"], ["gone1"]]}"#).unwrap();
    let node = node(&runtime, RdmaConfig { topology: Some(topology), ..RdmaConfig::default() });
    let mut desc = SegmentDesc::new("test");
    node.describe(&mut desc);
    assert_eq!(desc.extra["priority_matrix"], serde_json::json!({"cpu:0": [["fake0"], []]}));
    assert_eq!(desc.extra["devices"].as_array().unwrap().len(), 1);
}

#[test]
fn a_device_that_refuses_requests_is_an_error_and_no_hang() {
    let fake = Fake::new();
    let loopback = LoopbackNode::new();
    fake.state().posting_works = false;
    let error = loopback.read().wait().0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("repeatedly"), "{error}");
    fake.state().posting_works = true;
    let ticket = loopback.read();
    eventually("the device accepts them again", || fake.state().posted == 1);
    fake.event(FATAL);
    ticket.wait().0.unwrap_err();
}

#[test]
fn everything_is_released() {
    let fake = Fake::new();
    let before = object_counts();
    {
        let loopback = LoopbackNode::new();
        let ticket = loopback.read();
        eventually("it is posted", || fake.state().posted == 1);
        loopback.node.close();
        ticket.wait().0.unwrap_err();
    }
    let state = fake.state();
    assert_eq!(state.registered.len(), state.deregistered);
    assert_eq!(state.pairs_created, state.pairs_destroyed);
    assert_eq!(object_counts(), before);
}

#[test]
fn memory_of_a_dma_buf_is_registered_by_its_descriptor() {
    let fake = Fake::new();
    let runtime = runtime();
    let parts = RdmaConfig { region_bytes: 4096, ..RdmaConfig::default() };
    let node = node(&runtime, parts);
    let memory = HostMemory::new(3 * 4096).unwrap();
    let span = memory.span();
    // The descriptor is not a dma-buf, but the fake does not check it.
    let file = std::fs::File::open("/dev/null").unwrap();
    let fd = file.as_raw_fd();
    let listed = ListedDmaBuf::new(span, file.into(), 1 << 20).unwrap();
    // SAFETY: `memory` outlives the registration.
    let registration = unsafe { node.register(span, Access::Remote) }.unwrap();
    let registrations = fake.state().registered.clone();
    let expected: Vec<_> = (0..3u64)
        .map(|i| FakeRegistration {
            buffer: Some((fd, (1 << 20) + i * 4096)),
            addr: span.addr() + i * 4096,
            len: 4096,
            access: REMOTE | RELAXED,
        })
        .collect();
    assert_eq!(registrations, expected);
    assert_eq!(registration.local_key(0, span.addr() + 5000), Some(2));
    drop(registration);
    assert_eq!(fake.state().deregistered, 3);

    // A driver without dma-bufs may reach the memory by its address.
    fake.state().takes_buffers = false;
    // SAFETY: as above.
    let registration = unsafe { node.register(span, Access::Local) }.unwrap();
    let last = *fake.state().registered.last().unwrap();
    assert_eq!((last.buffer, last.addr, last.access), (None, span.addr() + 8192, 1 | RELAXED));
    drop(registration);
    fake.state().takes_addresses = false;
    // SAFETY: as above.
    let error = unsafe { node.register(span, Access::Local) }.unwrap_err().to_string();
    assert!(
        error.contains("dma-buf") && error.contains("driver does not support") && error.contains("register"),
        "{error}"
    );

    drop(listed);
    (fake.state().takes_addresses, fake.state().takes_buffers) = (true, true);
    // SAFETY: as above.
    drop(unsafe { node.register(span, Access::Local) }.unwrap());
    assert_eq!(fake.state().registered.last().unwrap().buffer, None, "the buffer is no longer listed");
}

#[test]
fn devices_register_memory_at_the_same_time() {
    let fake = Fake::new();
    let domains = [(); 2].map(|()| Domain::new(&crate::verbs::Device::open("fake0").unwrap()).unwrap());
    let memory = HostMemory::new(4096).unwrap();
    // Counted from the first on. A registration that waited for the end of the other would be
    // refused.
    fake.state().awaited_registrations = 2;
    // SAFETY: `memory` outlives the registration.
    let registered = unsafe { Registration::new(&domains, memory.span(), Access::Remote, (0, true), 1) };
    drop(registered.unwrap());
    let state = fake.state();
    assert_eq!((state.registered.len(), state.deregistered), (2, 2));
}

#[test]
fn devices_get_the_requested_rights() {
    let fake = Fake::new();
    let device = crate::verbs::Device::open("fake0").unwrap();
    let domain = Domain::new(&device).unwrap();
    let memory = HostMemory::new(4096).unwrap();
    let rights = |remote, write, relaxed| Rights { remote, write, relaxed };
    for (rights, access) in [
        (rights(true, true, true), REMOTE | RELAXED),
        (rights(true, true, false), REMOTE),
        (rights(false, true, false), 1),
        (rights(true, false, false), 4),
        (rights(false, false, false), 0),
    ] {
        // SAFETY: `memory` outlives the region.
        let region = unsafe { MemoryRegion::register(&domain, memory.span().ptr, 4096, rights) };
        drop(region.unwrap());
        assert_eq!(fake.state().registered.last().unwrap().access, access);
    }
}
