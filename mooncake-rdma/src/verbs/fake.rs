//! Fake library with one device that behaves as a test tells it, for faults that no available
//! device has: lost devices, dma-bufs.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use super::ffi::{self, Functions};
use crate::slice_cost_tests::Costs;

thread_local! {
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

static EXCLUSIVE: Mutex<()> = Mutex::new(());
static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
static REGISTERING: Condvar = Condvar::new();
/// Time after which a registration stops waiting for others.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(20);

/// Requests to the device, and its prepared behaviour.
#[derive(Default)]
pub(crate) struct State {
    /// Registrations, in order.
    pub(crate) registered: Vec<Registration>,
    /// Number of deregistrations.
    pub(crate) deregistered: usize,
    /// True if the driver accepts dma-bufs.
    pub(crate) takes_buffers: bool,
    /// True if the driver accepts addresses.
    pub(crate) takes_addresses: bool,
    /// Number of registrations in progress for which a registration waits.
    pub(crate) awaited_registrations: usize,
    registering: usize,
    pub(crate) port_is_up: bool,
    /// Last byte of the device's address.
    pub(crate) address: u8,
    pub(crate) events: VecDeque<c_uint>,
    /// Number of event reads.
    pub(crate) event_reads: usize,
    /// Number of polls of the queue.
    pub(crate) polled: usize,
    pub(crate) queue_works: bool,
    pub(crate) posting_works: bool,
    /// Number of accepted requests.
    pub(crate) posted: usize,
    /// True if requests complete as soon as they are posted; otherwise none completes.
    pub(crate) completes: bool,
    /// Ids of signalled requests that are pending.
    pending: VecDeque<u64>,
    /// Ids of completed requests.
    completed: VecDeque<u64>,
    /// Descriptor of the completion channel.
    channel: Option<c_int>,
    /// Costs of the polling thread at its last poll.
    pub(crate) costs: Option<Costs>,
    /// True if the device destroys queue pairs.
    pub(crate) destroying_works: bool,
    /// Number of refused destructions.
    pub(crate) refused_destructions: usize,
    pub(crate) pairs_created: u32,
    pub(crate) pairs_destroyed: u32,
    event_fd: Option<OwnedFd>,
}

impl State {
    fn report(&mut self) {
        self.completed.append(&mut self.pending);
        let Some(fd) = self.channel else { return };
        // SAFETY: the descriptor of the channel, which is never closed.
        let channel = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        rustix::io::write(channel, &1u64.to_ne_bytes()).unwrap();
    }
}

/// Registration, as requested from the library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registration {
    /// Descriptor and offset of the dma-buf, if any.
    pub(crate) buffer: Option<(c_int, u64)>,
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) access: c_uint,
}

/// Use of the fake as the library of this thread, until dropped. One test uses it at a time.
pub(crate) struct Fake {
    _guard: MutexGuard<'static, ()>,
}

impl Fake {
    pub(crate) fn new() -> Self {
        let guard = EXCLUSIVE.lock();
        *STATE.lock() = State {
            takes_buffers: true,
            takes_addresses: true,
            port_is_up: true,
            address: 1,
            queue_works: true,
            posting_works: true,
            destroying_works: true,
            // None of the lists of the fake grows while costs are counted.
            pending: VecDeque::with_capacity(4096),
            completed: VecDeque::with_capacity(4096),
            event_fd: eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK).ok(),
            ..State::default()
        };
        IN_USE.set(true);
        Self { _guard: guard }
    }

    pub(crate) fn state(&self) -> MutexGuard<'static, State> {
        STATE.lock()
    }

    /// Raises an event of the device.
    pub(crate) fn event(&self, number: c_uint) {
        STATE.lock().events.push_back(number);
        self.make_readable();
    }

    /// Makes the descriptor of the device readable, whether there is an event or not.
    pub(crate) fn make_readable(&self) {
        rustix::io::write(STATE.lock().event_fd.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
    }

    /// Completes posted requests, and later ones at once.
    pub(crate) fn complete(&self) {
        let mut state = STATE.lock();
        state.completes = true;
        state.report();
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        IN_USE.set(false);
    }
}

/// Returns the functions of the fake, on a thread that uses it.
pub(super) fn library() -> Option<&'static Functions> {
    static FUNCTIONS: LazyLock<Functions> = LazyLock::new(functions);
    IN_USE.get().then(|| &*FUNCTIONS)
}

fn functions() -> Functions {
    Functions {
        get_device_list,
        free_device_list: nothing_list,
        get_device_name,
        open_device,
        close_device,
        query_device,
        query_port,
        query_gid,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        reg_mr_iova2: Some(reg_mr_iova2),
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        destroy_qp,
        get_async_event,
        ack_async_event,
        ..Functions::none()
    }
}

/// Allocates an object of the library of which only the address matters. Never freed: tests are
/// short.
fn leaked<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

fn fails<T>(number: c_int) -> *mut T {
    // SAFETY: the variable belongs to this thread.
    unsafe { *libc::__errno_location() = number };
    ptr::null_mut()
}

unsafe extern "C" fn get_device_list(len: *mut c_int) -> *mut *mut ffi::Device {
    // SAFETY: promised by the caller of the library.
    unsafe { *len = 1 };
    leaked(leaked(ffi::Device { _opaque: [] }))
}

unsafe extern "C" fn nothing_list(_: *mut *mut ffi::Device) {}

unsafe extern "C" fn get_device_name(_: *mut ffi::Device) -> *const c_char {
    c"fake0".as_ptr()
}

unsafe extern "C" fn open_device(_: *mut ffi::Device) -> *mut ffi::Context {
    // SAFETY: the fields are numbers, pointers and optional functions.
    let mut context: ffi::Context = unsafe { std::mem::zeroed() };
    context.ops.poll_cq = Some(poll_cq);
    context.ops.req_notify_cq = Some(req_notify_cq);
    context.ops.post_send = Some(post_send);
    context.async_fd = STATE.lock().event_fd.as_ref().unwrap().as_raw_fd();
    leaked(context)
}

unsafe extern "C" fn close_device(_: *mut ffi::Context) -> c_int {
    0
}

unsafe extern "C" fn query_device(_: *mut ffi::Context, attr: *mut ffi::DeviceAttr) -> c_int {
    // SAFETY: promised by the caller of the library; the fields are numbers.
    unsafe {
        let mut limits: ffi::DeviceAttr = std::mem::zeroed();
        (limits.max_mr_size, limits.max_qp, limits.max_qp_wr, limits.max_cqe) = (1 << 40, 100, 64, 256);
        (limits.max_qp_rd_atom, limits.max_qp_init_rd_atom) = (16, 16);
        *attr = limits;
    }
    0
}

unsafe extern "C" fn query_port(_: *mut ffi::Context, _: u8, attr: *mut ffi::PortAttr) -> c_int {
    let state = if STATE.lock().port_is_up { ffi::PORT_ACTIVE } else { 1 };
    let port = ffi::PortAttr {
        state,
        active_mtu: 5,
        gids: 2,
        max_msg_sz: 8 << 20,
        link_layer: 2,
        ..Default::default()
    };
    // SAFETY: promised by the caller of the library.
    unsafe { *attr = port };
    0
}

unsafe extern "C" fn query_gid(_: *mut ffi::Context, _: u8, index: c_int, gid: *mut ffi::RawGid) -> c_int {
    let addr = std::net::Ipv4Addr::new(10, 0, 0, STATE.lock().address).to_ipv6_mapped();
    let of_index = if index == 1 { addr.octets() } else { [0; 16] };
    // SAFETY: promised by the caller of the library.
    unsafe { *gid = ffi::RawGid(of_index) };
    0
}

unsafe extern "C" fn alloc_pd(_: *mut ffi::Context) -> *mut ffi::Domain {
    ptr::without_provenance_mut(8)
}

unsafe extern "C" fn dealloc_pd(_: *mut ffi::Domain) -> c_int {
    0
}

fn registered(
    is_accepted: impl Fn(&State) -> bool,
    refusal: c_int,
    what: Registration,
) -> *mut ffi::MemoryRegion {
    let mut state = STATE.lock();
    state.registering += 1;
    REGISTERING.notify_all();
    let outcome = REGISTERING.wait_while_for(
        &mut state,
        |state| state.registering < state.awaited_registrations,
        REGISTRATION_TIMEOUT,
    );
    if outcome.timed_out() || !is_accepted(&state) {
        return fails(refusal);
    }
    state.registered.push(what);
    let key = u32::try_from(state.registered.len()).unwrap();
    // SAFETY: the fields are numbers and pointers.
    let region = unsafe { std::mem::zeroed() };
    leaked(ffi::MemoryRegion { lkey: key, rkey: 1000 + key, ..region })
}

unsafe extern "C" fn reg_mr(
    _: *mut ffi::Domain,
    at: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ffi::MemoryRegion {
    let what = Registration { buffer: None, addr: at.addr() as u64, len, access: access.cast_unsigned() };
    registered(|state| state.takes_addresses, libc::EFAULT, what)
}

unsafe extern "C" fn reg_mr_iova2(
    _: *mut ffi::Domain,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ffi::MemoryRegion {
    assert_eq!(at.addr() as u64, iova);
    registered(
        |state| state.takes_addresses,
        libc::EFAULT,
        Registration { buffer: None, addr: iova, len, access },
    )
}

unsafe extern "C" fn reg_dmabuf_mr(
    _: *mut ffi::Domain,
    offset: u64,
    len: usize,
    addr: u64,
    fd: c_int,
    access: c_int,
) -> *mut ffi::MemoryRegion {
    let what = Registration { buffer: Some((fd, offset)), addr, len, access: access.cast_unsigned() };
    registered(|state| state.takes_buffers, libc::EOPNOTSUPP, what)
}

unsafe extern "C" fn dereg_mr(_: *mut ffi::MemoryRegion) -> c_int {
    STATE.lock().deregistered += 1;
    0
}

unsafe extern "C" fn create_comp_channel(_: *mut ffi::Context) -> *mut ffi::Channel {
    use std::os::fd::IntoRawFd;
    // SAFETY: the fields are numbers and pointers.
    let channel: ffi::Channel = unsafe { std::mem::zeroed() };
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap().into_raw_fd();
    STATE.lock().channel = Some(fd);
    leaked(ffi::Channel { fd, ..channel })
}

unsafe extern "C" fn destroy_comp_channel(_: *mut ffi::Channel) -> c_int {
    0
}

unsafe extern "C" fn create_cq(
    context: *mut ffi::Context,
    cqe: c_int,
    _: *mut c_void,
    _: *mut ffi::Channel,
    _: c_int,
) -> *mut ffi::CompletionQueue {
    // SAFETY: the fields are numbers and pointers.
    let queue: ffi::CompletionQueue = unsafe { std::mem::zeroed() };
    leaked(ffi::CompletionQueue { context, cqe, ..queue })
}

unsafe extern "C" fn destroy_cq(_: *mut ffi::CompletionQueue) -> c_int {
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ffi::Channel,
    _: *mut *mut ffi::CompletionQueue,
    _: *mut *mut c_void,
) -> c_int {
    // SAFETY: the channel of `create_comp_channel`, and its descriptor.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw((*channel).fd) };
    if rustix::io::read(fd, &mut [0; 8]).is_ok() { 0 } else { -1 }
}

unsafe extern "C" fn ack_cq_events(_: *mut ffi::CompletionQueue, _: c_uint) {}

unsafe extern "C" fn poll_cq(
    _: *mut ffi::CompletionQueue,
    num_entries: c_int,
    into: *mut ffi::WorkCompletion,
) -> c_int {
    let mut state = STATE.lock();
    state.polled += 1;
    state.costs = Some(Costs::of_this_thread());
    if !state.queue_works {
        return -1;
    }
    let n = state.completed.len().min(usize::try_from(num_entries).unwrap());
    for (i, id) in state.completed.drain(..n).enumerate() {
        // SAFETY: promised by the caller of the library: the buffer has so many entries.
        unsafe { into.add(i).write(ffi::WorkCompletion { id, ..Default::default() }) };
    }
    c_int::try_from(n).unwrap()
}

unsafe extern "C" fn req_notify_cq(_: *mut ffi::CompletionQueue, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn create_qp(_: *mut ffi::Domain, attr: *mut ffi::QpInitAttr) -> *mut ffi::QueuePair {
    let mut state = STATE.lock();
    state.pairs_created += 1;
    // SAFETY: promised by the caller of the library; the fields are numbers and pointers.
    unsafe {
        let pair: ffi::QueuePair = std::mem::zeroed();
        leaked(ffi::QueuePair { context: (*(*attr).send_cq).context, number: state.pairs_created, ..pair })
    }
}

unsafe extern "C" fn modify_qp(_: *mut ffi::QueuePair, _: *mut ffi::QpAttr, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn destroy_qp(_: *mut ffi::QueuePair) -> c_int {
    let mut state = STATE.lock();
    if !state.destroying_works {
        state.refused_destructions += 1;
        return libc::EBUSY;
    }
    state.pairs_destroyed += 1;
    0
}

unsafe extern "C" fn post_send(
    _: *mut ffi::QueuePair,
    first: *mut ffi::SendRequest,
    bad: *mut *mut ffi::SendRequest,
) -> c_int {
    let mut state = STATE.lock();
    let mut at = first;
    while !at.is_null() {
        if !state.posting_works {
            // SAFETY: promised by the caller of the library.
            unsafe { *bad = at };
            return libc::ENOMEM;
        }
        state.posted += 1;
        // SAFETY: a list that ends in null.
        let request = unsafe { &*at };
        if request.flags & ffi::SEND_SIGNALED != 0 {
            state.pending.push_back(request.id);
        }
        at = request.next;
    }
    if state.completes {
        state.report();
    }
    0
}

unsafe extern "C" fn get_async_event(_: *mut ffi::Context, event: *mut ffi::AsyncEvent) -> c_int {
    let mut state = STATE.lock();
    state.event_reads += 1;
    let Some(kind) = state.events.pop_front() else { return -1 };
    let _ = rustix::io::read(state.event_fd.as_ref().unwrap(), &mut [0; 8]);
    // SAFETY: promised by the caller of the library.
    unsafe { *event = ffi::AsyncEvent { element: 1, kind } };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut ffi::AsyncEvent) {}
