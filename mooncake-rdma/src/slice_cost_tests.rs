//! Costs of a slice: no allocation and no lock, on either of its two threads.
//!
//! Each thread counts separately, so that other tests of this program do not interfere.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use mooncake_transport::transfer::{self, Transfer};
use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

use crate::RdmaConfig;
use crate::device_fault_tests::{LoopbackNode, eventually};
use crate::verbs::fake::Fake;

thread_local! {
    static COSTS: Cell<Costs> = const { Cell::new(Costs { allocations: 0, locks: 0 }) };
}

/// Costs of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Costs {
    pub(crate) allocations: usize,
    pub(crate) locks: usize,
}

impl Costs {
    /// Returns the costs of this thread since it began.
    pub(crate) fn of_this_thread() -> Self {
        COSTS.get()
    }

    fn since(self, before: Self) -> Self {
        Self { allocations: self.allocations - before.allocations, locks: self.locks - before.locks }
    }

    fn add(allocations: usize, locks: usize) {
        // Counting is not possible while the thread is being torn down.
        let _ = COSTS.try_with(|costs| {
            let before = costs.get();
            costs.set(Self { allocations: before.allocations + allocations, locks: before.locks + locks });
        });
    }
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: all calls are passed on to the system allocator. Growth in place is not passed on, so
// that it counts as an allocation, too.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Costs::add(1, 0);
        // SAFETY: promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: promised by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Mutex of the crate, with counted locks.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        Costs::add(0, 1);
        self.0.lock()
    }
}

/// Read-write lock of the crate, with counted locks.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(parking_lot::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        Costs::add(0, 1);
        self.0.read()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        Costs::add(0, 1);
        self.0.write()
    }
}

const SLICE: usize = 64;
const FEW: usize = 10;
const MANY: usize = 1000;
/// Event without an action, which makes the device thread look at its queue.
const NOTHING: u32 = 17;

/// Measures the costs of one operation of so many slices, or of so many operations of one: those of
/// the caller until they are posted, and those of the device thread until they are complete.
fn measure_slices(fake: &Fake, loopback: &LoopbackNode, slices: usize, operations: usize) -> [Costs; 2] {
    let len = slices * SLICE / operations;
    let from = loopback.local(slices * SLICE).into_shared();
    let part = |i: usize| Transfer::new(loopback.addr(), from.slice(i * len..(i + 1) * len).unwrap());
    let writes: Vec<_> = (0..operations).map(part).collect();
    let peer = loopback.peer();
    let thread = || {
        fake.state().costs = None;
        fake.event(NOTHING);
        eventually("the device thread looks", || fake.state().costs.is_some());
        fake.state().costs.unwrap()
    };
    let posted = fake.state().posted;
    let thread_before = thread();
    let before = Costs::of_this_thread();
    let ticket = transfer::write(&loopback.node, &peer, writes, None);
    let caller = Costs::of_this_thread().since(before);
    ticket.wait().0.unwrap();
    assert_eq!(fake.state().posted - posted, slices, "each slice is a request");
    [caller, thread().since(thread_before)]
}

#[test]
fn slices_cost_no_allocation_and_no_lock() {
    let fake = Fake::new();
    fake.state().completes = true;
    let loopback = LoopbackNode::with(RdmaConfig {
        slice_bytes: SLICE,
        fragment_bytes: 0,
        // Fewer than the queue pairs hold.
        completions: 64,
        ..RdmaConfig::default()
    });
    // More than queue pairs and queue hold, so that some wait, too. The lists reach their length.
    for _ in 0..3 {
        measure_slices(&fake, &loopback, MANY, 1);
        measure_slices(&fake, &loopback, MANY, MANY);
    }
    for operations in [1, FEW] {
        let few = measure_slices(&fake, &loopback, FEW, operations);
        let many = measure_slices(&fake, &loopback, MANY, operations * MANY / FEW);
        let many = if operations == 1 { measure_slices(&fake, &loopback, MANY, 1) } else { many };
        for (who, (few, many)) in ["the caller", "the device thread"].iter().zip(few.into_iter().zip(many)) {
            assert_eq!(few.allocations, many.allocations, "{who}, {operations} operations");
            // The thread takes some locks in each round, which covers many slices.
            assert!(many.locks < few.locks + MANY / 2, "{who}, {operations} operations: {few:?}, {many:?}");
        }
        let [few, many] = [few[0].locks, many[0].locks];
        assert!(
            many < few + FEW,
            "{operations} operations: the caller takes {few} locks for few slices, {many} for many"
        );
    }
}
