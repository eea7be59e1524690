//! One device: its primary context, and the streams and events that copies are made with.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use mooncake_core::Result;
use mooncake_core::memory::Location;
use parking_lot::Mutex;

use super::ffi::{self, Functions, Status};
use super::library::Cuda;

/// Streams that copies are spread over.
const STREAMS: usize = 4;
/// Events kept for reuse; a copy under way has one.
const EVENTS: usize = 64;

/// A GPU as this process uses it.
pub struct Device {
    cuda: &'static Cuda,
    number: u32,
    handle: ffi::Device,
    context: usize,
    uuid: [u8; 16],
    streams: Vec<usize>,
    next: AtomicUsize,
    events: Mutex<Vec<usize>>,
    /// Devices whose memory copies of this one may touch directly.
    peers: Mutex<Vec<u32>>,
    lost: AtomicBool,
}

/// The device's context as that of this thread.
pub(super) struct Current<'a> {
    device: &'a Device,
    // It is this thread's.
    _here: PhantomData<*mut ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut context = null_mut();
        // SAFETY: undoes the push; what was current before is again.
        unsafe { (self.device.functions().context_pop)(&raw mut context) };
    }
}

/// One event of a device, given back when it is dropped.
pub(crate) struct Event {
    device: Arc<Device>,
    event: usize,
}

impl Device {
    pub(super) fn open(cuda: &'static Cuda, number: u32) -> Result<Self> {
        let functions = cuda.functions();
        let (mut handle, mut context) = (0, null_mut());
        // SAFETY: the driver fills the number in.
        let status = unsafe { (functions.device)(&raw mut handle, number as c_int) };
        cuda.check(status, "a device")?;
        // SAFETY: the driver fills the context in; it is released when the device is dropped.
        let status = unsafe { (functions.primary_retain)(&raw mut context, handle) };
        cuda.check(status, "a device's context")?;
        let mut device = Self {
            cuda,
            number,
            handle,
            context: context.expose_provenance(),
            uuid: [0; 16],
            streams: Vec::new(),
            next: AtomicUsize::new(0),
            events: Mutex::default(),
            peers: Mutex::default(),
            lost: AtomicBool::new(false),
        };
        // From here on it is dropped as a whole.
        device.uuid = cuda.uuid(number)?;
        device.make_streams()?;
        Ok(device)
    }

    fn make_streams(&mut self) -> Result<()> {
        let mut streams = Vec::new();
        let made = (|| {
            let _here = self.enter()?;
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the driver fills the numbers in.
            let status = unsafe { (self.functions().stream_priorities)(&raw mut least, &raw mut greatest) };
            self.check(status, "priorities of streams")?;
            for _ in 0..STREAMS {
                let mut stream = null_mut();
                // Of the highest priority: other queues of the device than those a caller's stream may be waiting in.
                // SAFETY: the driver fills the stream in; it is destroyed with the device.
                let status = unsafe {
                    (self.functions().stream_create)(&raw mut stream, ffi::STREAM_NON_BLOCKING, greatest)
                };
                self.check(status, "a stream")?;
                streams.push(stream.expose_provenance());
            }
            Ok(())
        })();
        self.streams = streams;
        made
    }

    /// Its number, as in `cuda:N`.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its location.
    pub fn location(&self) -> Location {
        Location::Cuda(self.number)
    }

    /// The name of the model.
    pub fn name(&self) -> String {
        let mut name = [0u8; 128];
        // SAFETY: the driver writes a text of at most that length.
        unsafe { (self.functions().device_name)(name.as_mut_ptr().cast::<c_char>(), 128, self.handle) };
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        String::from_utf8_lossy(&name[..end]).into_owned()
    }

    /// Bytes of its memory that are in use, by whomever.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory_in_use(&self) -> Result<usize> {
        let (mut free, mut all) = (0, 0);
        let _here = self.enter()?;
        // SAFETY: the driver fills the numbers in.
        let status = unsafe { (self.functions().memory_info)(&raw mut free, &raw mut all) };
        self.check(status, "memory cannot be counted").map(|()| all - free.min(all))
    }

    /// The library it is of.
    pub fn cuda(&self) -> &'static Cuda {
        self.cuda
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    pub(super) fn functions(&self) -> &'static Functions {
        self.cuda.functions()
    }

    pub(super) fn attribute(&self, which: c_int) -> c_int {
        let mut value = 0;
        // SAFETY: the driver fills the number in.
        let status = unsafe { (self.functions().device_attribute)(&raw mut value, which, self.handle) };
        if status == ffi::SUCCESS { value } else { 0 }
    }

    /// Whether its memory can be opened by other hosts of the same NVLink fabric.
    pub fn has_fabric(&self) -> bool {
        self.functions().shareable_export.is_some()
            && self.attribute(ffi::VIRTUAL_MEMORY_SUPPORTED) != 0
            && self.attribute(ffi::FABRIC_HANDLE_SUPPORTED) != 0
    }

    /// Whether the driver has said that its context is no more. What is copied after that fails.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// What a call came to; errors that never go away again are remembered.
    pub(super) fn check(&self, status: Status, what: &str) -> Result<()> {
        // Unknown symbols apart: a context that was destroyed, reset or has run into a fault says so to every call from then on.
        if matches!(status, 4 | 201 | 214 | 219 | 220 | 226 | 700..=703 | 709 | 714..=719) {
            self.lost.store(true, Ordering::Release);
        }
        self.cuda.check(status, what)
    }

    pub(super) fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: a context this device retains.
        let status =
            unsafe { (self.functions().context_push)(std::ptr::with_exposed_provenance_mut(self.context)) };
        self.check(status, "a device's context")?;
        Ok(Current { device: self, _here: PhantomData })
    }

    pub(super) fn is_context(&self, context: ffi::Context) -> bool {
        context.addr() == self.context
    }

    fn stream(&self) -> ffi::Stream {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.streams.len();
        std::ptr::with_exposed_provenance_mut(self.streams[next])
    }

    /// Has copies of this device reach another's memory without a way through the host, where the machine can.
    pub(crate) fn enable_peer(&self, other: &Device) {
        if other.number == self.number || self.peers.lock().contains(&other.number) {
            return;
        }
        let mut can = 0;
        // SAFETY: the driver fills the number in.
        let status =
            unsafe { (self.functions().device_can_access_peer)(&raw mut can, self.handle, other.handle) };
        if status == ffi::SUCCESS && can != 0 {
            let Ok(_here) = self.enter() else { return };
            // SAFETY: a context that the other device retains.
            let status = unsafe {
                (self.functions().context_enable_peer)(
                    std::ptr::with_exposed_provenance_mut(other.context),
                    0,
                )
            };
            if status != ffi::SUCCESS && status != ffi::PEER_ACCESS_ALREADY_ENABLED {
                tracing::debug!(
                    status,
                    "copies from {} to {} go through the host",
                    self.number,
                    other.number
                );
            }
        }
        self.peers.lock().push(other.number);
    }

    /// Begins copies, of which none depends on another; the event tells when all are over. With an error none, or the first few, have begun, and those are over.
    ///
    /// # Safety
    /// Until the event has happened, or has been dropped, all addresses stay memory of the host's or a device's of that many bytes.
    pub(crate) unsafe fn copy(self: &Arc<Self>, copies: &[(u64, u64, usize)]) -> Result<Event> {
        let event = self.event()?;
        let _here = self.enter()?;
        let stream = self.stream();
        // SAFETY: passed on.
        let begun = unsafe { self.begin(copies, stream) };
        // SAFETY: an event and a stream of this device's.
        let status = unsafe { (self.functions().event_record)(event.raw(), stream) };
        let begun = begun.and(self.check(status, "an event"));
        if let Err(error) = begun {
            // SAFETY: a stream of this device's.
            unsafe { (self.functions().stream_synchronize)(stream) };
            return Err(error);
        }
        Ok(event)
    }

    unsafe fn begin(&self, copies: &[(u64, u64, usize)], stream: ffi::Stream) -> Result<()> {
        /// From here on one call for all is cheaper.
        const BATCH: usize = 4;
        if let Some(batch) = self.functions().copy_batch.filter(|_| copies.len() >= BATCH) {
            let mut to: Vec<u64> = copies.iter().map(|copy| copy.0).collect();
            let mut from: Vec<u64> = copies.iter().map(|copy| copy.1).collect();
            let mut len: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
            let mut how =
                ffi::CopyAttributes { source_order: ffi::SOURCE_IN_STREAM_ORDER, ..Default::default() };
            let (mut first, mut failed) = (0usize, usize::MAX);
            // SAFETY: as many of each as there are copies, all of one kind; the addresses are promised.
            let status = unsafe {
                batch(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    len.as_mut_ptr(),
                    copies.len(),
                    &raw mut how,
                    &raw mut first,
                    1,
                    &raw mut failed,
                    stream,
                )
            };
            if status != ffi::NOT_SUPPORTED {
                return self.check(status, "copies");
            }
        }
        for &(to, from, len) in copies {
            // SAFETY: promised.
            let status = unsafe { (self.functions().copy_async)(to, from, len, stream) };
            self.check(status, "a copy")?;
        }
        Ok(())
    }

    /// Fills memory with a byte, and waits for it. For tests and measurements.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The span is memory of this device's that nobody else uses meanwhile.
    pub unsafe fn fill(&self, span: mooncake_core::memory::MemorySpan, byte: u8) -> Result<()> {
        let _here = self.enter()?;
        let stream = self.stream();
        // SAFETY: promised.
        let status = unsafe { (self.functions().set_async)(span.addr(), byte, span.len, stream) };
        self.check(status, "memory cannot be filled")?;
        // SAFETY: a stream of this device's.
        self.check(unsafe { (self.functions().stream_synchronize)(stream) }, "memory cannot be filled")
    }

    /// Waits until the work is over that the default stream has now.
    pub(crate) fn settle(self: &Arc<Self>) -> Result<()> {
        self.event_on(std::ptr::without_provenance_mut(ffi::LEGACY_STREAM))?.wait()
    }

    fn event(self: &Arc<Self>) -> Result<Event> {
        if let Some(event) = self.events.lock().pop() {
            return Ok(Event { device: self.clone(), event });
        }
        let _here = self.enter()?;
        let mut event = null_mut();
        // SAFETY: the driver fills the event in; it is destroyed with the device, or by `Event`.
        let status = unsafe { (self.functions().event_create)(&raw mut event, ffi::EVENT_DISABLE_TIMING) };
        self.check(status, "an event")?;
        Ok(Event { device: self.clone(), event: event.expose_provenance() })
    }

    /// An event that happens when the work is over that the stream has now.
    pub(super) fn event_on(self: &Arc<Self>, stream: ffi::Stream) -> Result<Event> {
        let event = self.event()?;
        let _here = self.enter()?;
        // SAFETY: an event of this device's; the caller vouches for the stream.
        let status = unsafe { (self.functions().event_record)(event.raw(), stream) };
        self.check(status, "the stream cannot be waited for")?;
        Ok(event)
    }
}

impl Event {
    fn raw(&self) -> ffi::Event {
        std::ptr::with_exposed_provenance_mut(self.event)
    }

    /// Whether it has happened, and how what came before it went.
    pub(crate) fn poll(&self) -> Option<Result<()>> {
        let here = self.device.enter();
        if let Err(error) = here {
            return Some(Err(error));
        }
        // SAFETY: an event of this device's.
        match unsafe { (self.device.functions().event_query)(self.raw()) } {
            ffi::NOT_READY => None,
            status => Some(self.device.check(status, "the copy failed")),
        }
    }

    /// Waits until it has happened.
    pub(crate) fn wait(&self) -> Result<()> {
        let _here = self.device.enter()?;
        // SAFETY: an event of this device's.
        let status = unsafe { (self.device.functions().event_synchronize)(self.raw()) };
        self.device.check(status, "the copy failed")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut events = self.device.events.lock();
        if events.len() < EVENTS {
            return events.push(self.event);
        }
        drop(events);
        if let Ok(_here) = self.device.enter() {
            // SAFETY: an event of this device's, and ours alone.
            unsafe { (self.device.functions().event_destroy)(self.raw()) };
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Ok(_here) = self.enter() {
            for event in self.events.lock().drain(..) {
                // SAFETY: an event nobody uses any more.
                unsafe {
                    (self.cuda.functions().event_destroy)(std::ptr::with_exposed_provenance_mut(event))
                };
            }
            for &stream in &self.streams {
                // SAFETY: a stream nobody uses any more.
                unsafe {
                    (self.cuda.functions().stream_destroy)(std::ptr::with_exposed_provenance_mut(stream))
                };
            }
        }
        // SAFETY: retained when it was opened.
        unsafe { (self.cuda.functions().primary_release)(self.handle) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}{})", self.number, if self.is_lost() { ", lost" } else { "" })
    }
}
