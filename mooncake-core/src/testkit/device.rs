//! Fake devices with memory that only copies reach, for tests without a GPU.
//!
//! The addresses of such memory are reserved and inaccessible, so any direct access ends the test
//! process; the bytes lie elsewhere. Copies run on a thread of their own, in any order and after
//! delays that a seed decides, and fail when a test says so.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock};

use crate::clock::Rng;
use crate::memory::{
    DeviceDriver, HostMemory, Location, MemorySource, MemorySpan, PendingCopy, serve_device_memory,
};
use crate::{Error, ErrorCode, Result};

/// Longest delay of a copy.
const DELAY_MICROS: u64 = 300;

/// Driver of all test devices of a process.
#[derive(Debug)]
struct TestDriver {
    allocations: RwLock<BTreeMap<u64, Arc<Allocation>>>,
    queue: Arc<Queue>,
    staging: AtomicBool,
    staged: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Allocation {
    /// Inaccessible address range.
    span: MemorySpan,
    /// Bytes of the memory.
    bytes: HostMemory,
    device: Arc<Device>,
    copies: AtomicU64,
}

#[derive(Debug)]
struct Device {
    ordinal: u32,
    copies: AtomicU64,
    failing: AtomicU64,
    held: AtomicBool,
}

/// Fake device with faults of its own, so that tests of one process do not interfere.
#[derive(Debug)]
pub struct TestDevice {
    driver: &'static TestDriver,
    device: Arc<Device>,
}

/// Memory of a test device, zero-filled. A drop during a copy ends the process.
#[derive(Debug)]
pub struct TestDeviceMemory {
    driver: &'static TestDriver,
    allocation: Arc<Allocation>,
}

/// Returns the driver of this process. The first call installs it.
///
/// # Panics
/// Panics when another driver is installed already.
fn driver() -> &'static TestDriver {
    static SERVING: OnceLock<Arc<TestDriver>> = OnceLock::new();
    SERVING.get_or_init(|| {
        let queue = Arc::new(Queue::default());
        let driver = Arc::new(TestDriver {
            allocations: RwLock::default(),
            queue: queue.clone(),
            staging: AtomicBool::new(true),
            staged: Arc::default(),
        });
        std::thread::Builder::new()
            .name("test-devices".into())
            .spawn(move || queue.work())
            .expect("cannot start the thread of test devices");
        serve_device_memory(driver.clone()).expect("a test process has no other driver of device memory");
        driver
    })
}

impl TestDevice {
    /// Creates a device, with a number of its own.
    pub fn new() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let device = Device {
            ordinal: LAST.fetch_add(1, Ordering::Relaxed),
            copies: AtomicU64::new(0),
            failing: AtomicU64::new(0),
            held: AtomicBool::new(false),
        };
        Self { driver: driver(), device: Arc::new(device) }
    }

    /// Returns the location of the device.
    pub fn location(&self) -> Location {
        Location::Cuda(self.device.ordinal)
    }

    /// Allocates so many bytes of device memory.
    ///
    /// # Errors
    /// Returns an error if no memory is left.
    pub fn memory(&self, len: usize) -> Result<TestDeviceMemory> {
        let bytes = HostMemory::new(len)?;
        let span =
            MemorySpan { location: self.location(), ..MemorySpan::new(reserve_inaccessible(len)?, len) };
        let allocation =
            Arc::new(Allocation { span, bytes, device: self.device.clone(), copies: AtomicU64::new(0) });
        self.driver.allocations.write().insert(span.addr(), allocation.clone());
        Ok(TestDeviceMemory { driver: self.driver, allocation })
    }

    /// Returns the number of copies from and to the device so far.
    pub fn copies(&self) -> u64 {
        self.device.copies.load(Ordering::SeqCst)
    }

    /// Makes the next copies of the device fail, after half of the bytes.
    pub fn fail_copies(&self, next: u64) {
        self.device.failing.store(next, Ordering::SeqCst);
    }

    /// Holds the copies of the device back, or releases them.
    pub fn hold(&self, yes: bool) {
        let _order = self.driver.queue.jobs.lock();
        self.device.held.store(yes, Ordering::SeqCst);
        self.driver.queue.changed.notify_all();
    }

    /// Returns the number of waiting copies of the device.
    pub fn waiting(&self) -> usize {
        let jobs = self.driver.queue.jobs.lock();
        let ours = |side: &Arc<Allocation>| Arc::ptr_eq(&side.device, &self.device);
        jobs.iter().filter(|job| job.sides.iter().any(ours)).count()
    }

    /// Releases the held copies after a while.
    pub fn let_go_after(&self, span: Duration) -> std::thread::JoinHandle<()> {
        let device = Self { driver: self.driver, device: self.device.clone() };
        std::thread::spawn(move || {
            std::thread::park_timeout(span);
            device.hold(false);
        })
    }

    /// Allows or refuses page-locked memory, for all test devices of the process.
    pub fn allow_staging(&self, yes: bool) {
        self.driver.staging.store(yes, Ordering::SeqCst);
    }

    /// Returns the bytes of page-locked memory that are in use in this process.
    pub fn staged_bytes(&self) -> u64 {
        self.driver.staged.load(Ordering::SeqCst)
    }
}

impl Default for TestDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl TestDeviceMemory {
    /// Returns all bytes, as a device would see them.
    pub fn bytes(&self) -> Vec<u8> {
        let span = self.allocation.bytes.span();
        let mut bytes = vec![0; span.len];
        // SAFETY: the vector has as many bytes. The test is responsible for concurrent copies.
        unsafe { span.ptr.copy_to_nonoverlapping(NonNull::from(&mut bytes[..]).cast(), span.len) };
        bytes
    }

    /// Writes bytes at the front, as a device would.
    ///
    /// # Panics
    /// Panics when the bytes exceed the memory.
    pub fn fill(&self, bytes: &[u8]) {
        let span = self.allocation.bytes.span();
        assert!(
            bytes.len() <= span.len,
            "cannot fill memory: too many bytes. bytes={} len={}",
            bytes.len(),
            span.len
        );
        // SAFETY: in range, and `bytes` refers to other memory.
        unsafe { span.ptr.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// Returns the address range without the device, as a program that knows only the address would
    /// pass it.
    pub fn unlocated(&self) -> MemorySpan {
        MemorySpan { location: Location::Any, ..self.allocation.span }
    }
}

// SAFETY: the addresses are reserved until the value is dropped. Only the driver reads or writes
// there.
unsafe impl MemorySource for TestDeviceMemory {
    fn span(&self) -> MemorySpan {
        self.allocation.span
    }
}

impl Drop for TestDeviceMemory {
    fn drop(&mut self) {
        let span = self.allocation.span;
        let listed = self.driver.allocations.write().remove(&span.addr());
        drop(listed);
        if self.allocation.copies.load(Ordering::SeqCst) != 0 {
            // A panic could be caught, and the test would pass.
            std::process::abort();
        }
        // SAFETY: reserved by `reserve_inaccessible`, and no longer listed.
        unsafe { libc::munmap(span.ptr.as_ptr().cast(), span.len.max(1)) };
    }
}

/// Reserves an inaccessible address range.
fn reserve_inaccessible(len: usize) -> Result<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len.max(1), libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    // Addresses are passed as numbers, as programs do.
    let _ = at.expose_provenance();
    NonNull::new(at.cast()).ok_or_else(|| Error::internal("the kernel mapped at address zero"))
}

/// Source or destination of a copy.
struct CopySide {
    ptr: NonNull<u8>,
    allocation: Option<Arc<Allocation>>,
}

impl TestDriver {
    fn find(&self, addr: u64) -> Option<Arc<Allocation>> {
        let allocations = self.allocations.read();
        let (_, allocation) = allocations.range(..=addr).next_back()?;
        allocation.span.contains(addr, 1).then(|| allocation.clone())
    }

    fn side(&self, span: MemorySpan) -> Result<CopySide> {
        let unknown =
            || Error::invalid(format!("no device memory there. address={:#x} len={}", span.addr(), span.len));
        let Some(allocation) = self.find(span.addr()) else {
            let host = !span.location.is_device();
            return host.then_some(CopySide { ptr: span.ptr, allocation: None }).ok_or_else(unknown);
        };
        if !allocation.span.contains(span.addr(), span.len as u64) {
            return Err(unknown());
        }
        let offset = (span.addr() - allocation.span.addr()) as usize;
        // SAFETY: inside, as checked above.
        let ptr = unsafe { allocation.bytes.span().ptr.add(offset) };
        Ok(CopySide { ptr, allocation: Some(allocation) })
    }
}

impl DeviceDriver for TestDriver {
    fn allocation(&self, addr: u64) -> Option<MemorySpan> {
        self.find(addr).map(|allocation| allocation.span)
    }

    unsafe fn copy(&self, from: MemorySpan, to: MemorySpan) -> Result<Box<dyn PendingCopy>> {
        if from.len != to.len || from.len == 0 {
            return Err(Error::invalid(format!(
                "cannot copy memory: lengths differ or are zero. from={} to={}",
                from.len, to.len
            )));
        }
        let (from, len, to) = (self.side(from)?, from.len, self.side(to)?);
        let outcome = Arc::new(Outcome::default());
        let sides: Vec<_> = [&from, &to].into_iter().filter_map(|side| side.allocation.clone()).collect();
        sides.iter().for_each(|side| _ = side.copies.fetch_add(1, Ordering::SeqCst));
        let (from, to) = (from.ptr, to.ptr);
        self.queue.jobs.lock().push(Job { from, to, len, sides, outcome: outcome.clone() });
        self.queue.changed.notify_all();
        Ok(Box::new(Pending { outcome }))
    }

    fn staging(&self, len: usize) -> Result<Box<dyn MemorySource>> {
        if !self.staging.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorCode::BufferOverflow, "no page-locked memory is left"));
        }
        let memory = HostMemory::new(len)?;
        self.staged.fetch_add(len as u64, Ordering::SeqCst);
        Ok(Box::new(StagingMemory { memory, staged: self.staged.clone() }))
    }
}

/// Page-locked memory that is counted while in use.
struct StagingMemory {
    memory: HostMemory,
    staged: Arc<AtomicU64>,
}

// SAFETY: the memory inside keeps the contract.
unsafe impl MemorySource for StagingMemory {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}

impl Drop for StagingMemory {
    fn drop(&mut self) {
        self.staged.fetch_sub(self.memory.span().len as u64, Ordering::SeqCst);
    }
}

/// Queue of pending copies.
#[derive(Default)]
struct Queue {
    jobs: Mutex<Vec<Job>>,
    changed: Condvar,
}

struct Job {
    from: NonNull<u8>,
    to: NonNull<u8>,
    len: usize,
    sides: Vec<Arc<Allocation>>,
    outcome: Arc<Outcome>,
}

// SAFETY: the caller of the copy keeps both sides until it is complete, on whatever thread.
unsafe impl Send for Job {}

impl Queue {
    /// Performs copies for as long as the process runs.
    fn work(&self) {
        let mut rng = Rng::seeded(0x6d6f_6f6e);
        loop {
            let job = {
                let mut jobs = self.jobs.lock();
                loop {
                    let free: Vec<usize> = (0..jobs.len()).filter(|&i| !jobs[i].is_held()).collect();
                    if !free.is_empty() {
                        let any = rng.below(free.len() as u64) as usize;
                        break jobs.swap_remove(free[any]);
                    }
                    self.changed.wait(&mut jobs);
                }
            };
            // Runs some copies at once, some late.
            if rng.below(2) == 0 {
                std::thread::park_timeout(Duration::from_micros(rng.below(DELAY_MICROS)));
            }
            job.run();
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({})", self.jobs.lock().len())
    }
}

impl Job {
    fn is_held(&self) -> bool {
        self.sides.iter().any(|side| side.device.held.load(Ordering::SeqCst))
    }

    fn run(self) {
        let less = |n: u64| n.checked_sub(1);
        let fails = self.sides.iter().any(|side| {
            side.device.copies.fetch_add(1, Ordering::SeqCst);
            side.device.failing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok()
        });
        let len = if fails { self.len / 2 } else { self.len };
        // SAFETY: promised by the caller of the copy (`DeviceDriver::copy`); the sides may overlap
        // inside one allocation.
        unsafe { self.from.copy_to(self.to, len) };
        self.sides.iter().for_each(|side| _ = side.copies.fetch_sub(1, Ordering::SeqCst));
        *self.outcome.ended.lock() = Some(!fails);
        self.outcome.changed.notify_all();
    }
}

/// Outcome of a copy: whether it is complete, and whether it succeeded.
#[derive(Default)]
struct Outcome {
    ended: Mutex<Option<bool>>,
    changed: Condvar,
}

struct Pending {
    outcome: Arc<Outcome>,
}

impl Pending {
    fn wait_until_ended(&self) -> Result<()> {
        let mut ended = self.outcome.ended.lock();
        self.outcome.changed.wait_while(&mut ended, |ended| ended.is_none());
        result(ended.unwrap_or_default())
    }
}

impl PendingCopy for Pending {
    fn poll(&mut self) -> Option<Result<()>> {
        (*self.outcome.ended.lock()).map(result)
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.wait_until_ended()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let _ = self.wait_until_ended();
    }
}

fn result(well: bool) -> Result<()> {
    well.then_some(())
        .ok_or_else(|| Error::new(ErrorCode::TransferFail, "injected fault: the device failed to copy"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{copy_memory, device_driver};

    fn host(bytes: &[u8]) -> HostMemory {
        let memory = HostMemory::new(bytes.len()).unwrap();
        // SAFETY: the memory is new, and has that length.
        unsafe { memory.span().ptr.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        memory
    }

    fn part(span: MemorySpan, from: usize, len: usize) -> MemorySpan {
        // SAFETY: the tests pass ranges inside, or pass the result to a call that checks it.
        MemorySpan { ptr: unsafe { span.ptr.add(from) }, len, ..span }
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memory without rights there")]
    fn bytes_travel_there_and_back() {
        let device = TestDevice::new();
        let (memory, bytes) = (device.memory(100).unwrap(), host(b"0123456789"));
        let there = part(memory.span(), 40, 10);
        // SAFETY: both are allocated, and have no other user.
        unsafe { copy_memory(bytes.span(), there) }.unwrap();
        assert_eq!(&memory.bytes()[39..51], b"\x000123456789\0");
        let (back, other) = (host(&[0; 10]), device.memory(10).unwrap());
        // SAFETY: as above.
        unsafe { copy_memory(there, other.span()) }.unwrap();
        // SAFETY: as above. An address without a device works, too.
        unsafe { device_driver().unwrap().copy(other.unlocated(), back.span()).unwrap().wait() }.unwrap();
        // SAFETY: in range, and the copy is over.
        assert_eq!(unsafe { back.span().ptr.cast::<[u8; 10]>().read() }, *b"0123456789");
        assert_eq!(device.copies(), 4);
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memory without rights there")]
    fn devices_are_found_by_address() {
        let (one, two) = (TestDevice::new(), TestDevice::new());
        let (memory, bytes) = (one.memory(100).unwrap(), host(&[0; 8]));
        assert_ne!(one.location(), two.location());
        assert_eq!(part(memory.unlocated(), 99, 1).located().location, one.location());
        assert_eq!(bytes.span().located(), bytes.span());
        assert_eq!(device_driver().unwrap().allocation(memory.span().addr() + 99), Some(memory.span()));
        let freed = memory.unlocated();
        drop(memory);
        assert_eq!(freed.located(), freed);
        let beyond = two.memory(8).unwrap();
        let beyond = part(beyond.span(), 1, 8);
        // SAFETY: the call refuses the range before any access.
        assert!(unsafe { copy_memory(bytes.span(), beyond) }.is_err());
        // SAFETY: as above.
        assert!(unsafe { copy_memory(bytes.span(), part(beyond, 0, 7)) }.is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memory without rights there")]
    fn faults_are_a_devices_own() {
        let (sick, well) = (TestDevice::new(), TestDevice::new());
        let bytes = host(b"01234567");
        let (there, here) = (sick.memory(8).unwrap(), well.memory(8).unwrap());
        sick.fail_copies(1);
        // SAFETY: all are allocated, and have no other user.
        unsafe {
            copy_memory(bytes.span(), here.span()).unwrap();
            assert!(copy_memory(bytes.span(), there.span()).is_err());
            assert_eq!(&there.bytes(), b"0123\0\0\0\0");
            copy_memory(bytes.span(), there.span()).unwrap();
        }
        assert_eq!(there.bytes(), here.bytes());
        sick.hold(true);
        // SAFETY: as above.
        let mut waits = unsafe { device_driver().unwrap().copy(there.span(), bytes.span()) }.unwrap();
        // SAFETY: as above.
        unsafe { copy_memory(here.span(), part(bytes.span(), 0, 8)) }.unwrap();
        assert!(waits.poll().is_none());
        sick.hold(false);
        waits.wait().unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memory without rights there")]
    fn staging_is_counted() {
        let device = TestDevice::new();
        let staging = device_driver().unwrap().staging(4096).unwrap();
        assert!(device.staged_bytes() >= 4096);
        assert!(!staging.span().located().location.is_device());
    }
}
