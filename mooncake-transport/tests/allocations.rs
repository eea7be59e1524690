//! Cost of a transfer: one allocation and one wake-up per batch, whatever its number of operations.
#![cfg(not(miri))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use futures::FutureExt;
use mooncake_core::memory::HostMemory;
use mooncake_transport::transfer::{Transfer, read, write};
use mooncake_transport::{Access, Engine, LoopbackNet, Region, Request, SegmentDesc, Ticket, Transport};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Not while the thread is being torn down.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations<R>(f: impl FnOnce() -> R) -> (usize, R) {
    // A thread's first wait makes the waker it keeps.
    Ticket::ready((), Ok(())).wait().0.unwrap();
    let before = COUNT.get();
    let result = f();
    (COUNT.get() - before, result)
}

#[test]
fn a_batch_on_a_transport_allocates_once() {
    let net = LoopbackNet::new();
    let (owner, user) = (net.node(), net.node());
    let memory = Arc::new(HostMemory::new(1 << 16).unwrap());
    let region = Region::register(&owner, memory, Access::Remote).unwrap();
    let mut desc = SegmentDesc::new("owner");
    owner.describe(&mut desc);
    let peer = user.connect(&desc).now_or_never().unwrap().unwrap();
    let local = Region::register(&user, Arc::new(HostMemory::new(4096).unwrap()), Access::Local).unwrap();
    for n in [1, 2, 64, 1000] {
        let to = (0..n).map(|i| Transfer::new(region.addr() + i * 64, vec![0u8; 64])).collect::<Vec<_>>();
        let (count, (result, _)) = allocations(|| read(&user, &peer, to, None).wait());
        result.unwrap();
        assert_eq!(count, 1, "a batch of {n} reads");
        let from = (0..n).map(|i| Transfer::new(region.addr() + i * 64, local.slice(0..64).unwrap()));
        let from = from.collect::<Vec<_>>();
        let (count, (result, _)) = allocations(|| write(&user, &peer, from, None).wait());
        result.unwrap();
        assert_eq!(count, 1, "a batch of {n} writes");
    }
}

#[test]
fn an_engine_adds_none() {
    let net = LoopbackNet::new();
    let start = || Engine::builder(Arc::new(net.node())).name("n").start().now_or_never().unwrap().unwrap();
    let engine = start();
    let memory = Arc::new(HostMemory::new(1 << 16).unwrap());
    let region = engine.register(memory).now_or_never().unwrap().unwrap();
    let target = engine.open("n").now_or_never().unwrap().unwrap();
    for n in [1, 64] {
        let request = |i: u64| Request::new(&target, region.addr() + i * 64, vec![0u8; 64]);
        let requests = (0..n).map(request).collect::<Vec<_>>();
        let (count, (result, _)) = allocations(|| engine.post_read(requests, None).wait());
        result.unwrap();
        assert_eq!(count, 1, "{n} posted reads");
    }
    let buffer = vec![0u8; 64];
    let (count, (result, _)) =
        allocations(|| engine.read(&target, region.addr(), buffer, None).now_or_never().unwrap());
    result.unwrap();
    assert_eq!(count, 1, "a single read");
}
