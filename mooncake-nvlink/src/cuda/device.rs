//! Device: its primary context, and the streams and events for copies.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use mooncake_core::memory::Location;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use super::ffi::{self, CopyBatches, Functions, Status, call, sys};
use super::library::Cuda;

const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
const WITHOUT_TIMING: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
/// Number of streams that copies are spread over.
const STREAMS: usize = 4;
/// Number of events kept for reuse. Each copy in progress uses one.
const EVENTS: usize = 64;

/// Devices in use, by number. The process has one driver.
static DEVICES: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

/// GPU as used by this process.
pub struct Device {
    cuda: &'static Cuda,
    number: u32,
    handle: sys::CUdevice,
    context: usize,
    uuid: [u8; 16],
    streams: Vec<usize>,
    next: AtomicUsize,
    events: Mutex<Vec<usize>>,
    /// Devices whose memory the copies of this device may access directly.
    peers: Mutex<Vec<u32>>,
    lost: AtomicBool,
    /// True if memory can be exported to the fabric, once tried.
    pub(super) fabric: OnceLock<bool>,
}

/// Guard that makes the device's context current on this thread.
pub(super) struct Current<'a> {
    device: &'a Device,
    // The current context belongs to this thread.
    _not_send: PhantomData<*mut ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut context = null_mut();
        // SAFETY: undoes the push, which restores the earlier context.
        unsafe { call!(self.device, cuCtxPopCurrent_v2(&raw mut context)) };
    }
}

/// Event of a device, released on drop.
pub(crate) struct Event {
    device: Arc<Device>,
    event: usize,
}

impl Cuda {
    /// Returns a device with its primary context, which is released with its last user. A device
    /// with a lost context is opened again.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an unknown device, and the errors of the driver.
    pub fn device(&'static self, number: u32) -> Result<Arc<Device>> {
        let mut devices = DEVICES.lock();
        let existing =
            devices.get(number as usize).and_then(Weak::upgrade).filter(|device| !device.is_lost());
        if let Some(device) = existing {
            return Ok(device);
        }
        let count = self.device_count()?;
        if number >= count {
            return Err(Error::invalid(format!(
                "unknown device {}: there are {count} devices",
                Location::Cuda(number)
            )));
        }
        let device = Arc::new(Device::open(self, number)?);
        if devices.len() <= number as usize {
            devices.resize_with(number as usize + 1, Weak::new);
        }
        devices[number as usize] = Arc::downgrade(&device);
        Ok(device)
    }

    /// Returns the device with this primary context.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for another context, and the errors of the driver.
    ///
    /// # Safety
    /// `context` is a context.
    pub(super) unsafe fn device_of_context(&'static self, context: sys::CUcontext) -> Result<Arc<Device>> {
        let (mut handle, mut before) = (0, std::ptr::null_mut());
        // SAFETY: promised by the caller; undone below.
        let status = unsafe { call!(self, cuCtxPushCurrent_v2(context)) };
        self.check(status, "cannot use context")?;
        // SAFETY: the driver writes the number, and pops the pushed context.
        let status = unsafe {
            let status = call!(self, cuCtxGetDevice(&raw mut handle));
            call!(self, cuCtxPopCurrent_v2(&raw mut before));
            status
        };
        self.check(status, "cannot get the device of a context")?;
        for number in 0..self.device_count()? {
            if self.handle(number)? == handle {
                let device = self.device(number)?;
                if device.is_context(context) {
                    return Ok(device);
                }
            }
        }
        Err(Error::invalid("invalid stream: its context is not the primary context of its device"))
    }
}

impl Device {
    pub(super) fn open(cuda: &'static Cuda, number: u32) -> Result<Self> {
        let (mut handle, mut context) = (0, null_mut());
        // SAFETY: the driver writes the number.
        let status = unsafe { call!(cuda, cuDeviceGet(&raw mut handle, number as c_int)) };
        cuda.check(status, "cannot get device")?;
        // SAFETY: the driver writes the context, which is released when the device is dropped.
        let status = unsafe { call!(cuda, cuDevicePrimaryCtxRetain(&raw mut context, handle)) };
        cuda.check(status, "cannot get the context of a device")?;
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
            fabric: OnceLock::new(),
        };
        // From here on the device is dropped as a whole.
        device.uuid = cuda.uuid(number)?;
        device.create_streams()?;
        Ok(device)
    }

    fn create_streams(&mut self) -> Result<()> {
        let mut streams = Vec::new();
        let result = (|| {
            let _current = self.enter()?;
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the driver writes the numbers.
            let status =
                unsafe { call!(self, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)) };
            self.check(status, "cannot get stream priorities")?;
            for _ in 0..STREAMS {
                let mut stream = null_mut();
                // Streams of the highest priority use other queues of the device than a stream that
                // the caller may hold back.
                // SAFETY: the driver writes the stream, which is destroyed with the device.
                let status = unsafe {
                    call!(self, cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, greatest))
                };
                self.check(status, "cannot create stream")?;
                streams.push(stream.expose_provenance());
            }
            Ok(())
        })();
        self.streams = streams;
        result
    }

    /// Returns the number of the device, as in `cuda:N`.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the location of the device.
    pub fn location(&self) -> Location {
        Location::Cuda(self.number)
    }

    /// Returns the name of the model.
    pub fn name(&self) -> String {
        let mut name = [0u8; 128];
        // SAFETY: the driver writes a string of at most that length.
        unsafe { call!(self, cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 128, self.handle)) };
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        String::from_utf8_lossy(&name[..end]).into_owned()
    }

    /// Returns the bytes of device memory that are in use by any process.
    ///
    /// # Errors
    /// Returns the errors of the driver.
    pub fn memory_in_use(&self) -> Result<usize> {
        let (mut free, mut all) = (0, 0);
        let _current = self.enter()?;
        // SAFETY: the driver writes the numbers.
        let status = unsafe { call!(self, cuMemGetInfo_v2(&raw mut free, &raw mut all)) };
        self.check(status, "cannot query device memory").map(|()| all - free.min(all))
    }

    /// Returns the library of the device.
    pub fn cuda(&self) -> &'static Cuda {
        self.cuda
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    pub(super) fn functions(&self) -> &'static Functions {
        self.cuda.functions()
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> c_int {
        let mut value = 0;
        // SAFETY: the driver writes the number.
        let status = unsafe { call!(self, cuDeviceGetAttribute(&raw mut value, attribute, self.handle)) };
        if status == ffi::SUCCESS { value } else { 0 }
    }

    /// Returns whether the driver has reported the loss of the context. Later copies fail.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Converts the status of a call, and remembers errors that never go away.
    pub(super) fn check(&self, status: Status, what: &str) -> Result<()> {
        // Except for unknown symbols, a context that was destroyed, reset or hit by a fault returns
        // these errors for every later call.
        if matches!(status, 4 | 201 | 214 | 219 | 220 | 226 | 700..=703 | 709 | 714..=719) {
            self.lost.store(true, Ordering::Release);
        }
        self.cuda.check(status, what)
    }

    pub(super) fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: a context that this device retains.
        let status =
            unsafe { call!(self, cuCtxPushCurrent_v2(std::ptr::with_exposed_provenance_mut(self.context))) };
        self.check(status, "cannot use the context of a device")?;
        Ok(Current { device: self, _not_send: PhantomData })
    }

    pub(super) fn is_context(&self, context: sys::CUcontext) -> bool {
        context.addr() == self.context
    }

    fn stream(&self) -> sys::CUstream {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.streams.len();
        std::ptr::with_exposed_provenance_mut(self.streams[next])
    }

    /// Allows copies of this device to access the memory of another directly instead of through the
    /// host, if the machine supports it.
    pub(crate) fn enable_peer(&self, other: &Device) {
        if other.number == self.number || self.peers.lock().contains(&other.number) {
            return;
        }
        let mut can_access = 0;
        // SAFETY: the driver writes the number.
        let status =
            unsafe { call!(self, cuDeviceCanAccessPeer(&raw mut can_access, self.handle, other.handle)) };
        if status == ffi::SUCCESS && can_access != 0 {
            let Ok(_current) = self.enter() else { return };
            // SAFETY: a context that the other device retains.
            let status = unsafe {
                call!(self, cuCtxEnablePeerAccess(std::ptr::with_exposed_provenance_mut(other.context), 0,))
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

    /// Begins independent copies. The event occurs when all are complete. After an error, no copy
    /// or only the first few have begun, and those are complete.
    ///
    /// # Safety
    /// Until the event has occurred or has been dropped, all addresses stay memory of the host or
    /// of a device with that many bytes.
    pub(crate) unsafe fn copy(self: &Arc<Self>, copies: &[(u64, u64, usize)]) -> Result<Event> {
        let event = self.event()?;
        let _current = self.enter()?;
        let stream = self.stream();
        // SAFETY: promised by the caller.
        let result = unsafe { self.begin(copies, stream) };
        // SAFETY: an event and a stream of this device.
        let status = unsafe { call!(self, cuEventRecord(event.raw(), stream)) };
        let result = result.and(self.check(status, "cannot record event"));
        if let Err(error) = result {
            // SAFETY: a stream of this device.
            unsafe { call!(self, cuStreamSynchronize(stream)) };
            return Err(error);
        }
        Ok(event)
    }

    unsafe fn begin(&self, copies: &[(u64, u64, usize)], stream: sys::CUstream) -> Result<()> {
        /// Number of copies from which one call for all is cheaper.
        const BATCH: usize = 4;
        if let Some(batches) = self.cuda.copy_batches.as_ref().filter(|_| copies.len() >= BATCH) {
            // SAFETY: promised by the caller.
            let status = unsafe { begin_batch(batches, copies, stream) };
            if status != ffi::NOT_SUPPORTED {
                return self.check(status, "copies");
            }
        }
        for &(to, from, len) in copies {
            // SAFETY: promised by the caller.
            let status = unsafe { call!(self, cuMemcpyAsync(to, from, len, stream)) };
            self.check(status, "cannot begin copy")?;
        }
        Ok(())
    }

    /// Fills memory with a byte, and waits for the end. For tests and measurements.
    ///
    /// # Errors
    /// Returns the errors of the driver.
    ///
    /// # Safety
    /// The span is memory of this device without another user during the call.
    pub unsafe fn fill(&self, span: mooncake_core::memory::MemorySpan, byte: u8) -> Result<()> {
        let _current = self.enter()?;
        let stream = self.stream();
        // SAFETY: promised by the caller.
        let status = unsafe { call!(self, cuMemsetD8Async(span.addr(), byte, span.len, stream)) };
        self.check(status, "cannot fill memory")?;
        // SAFETY: a stream of this device.
        self.check(unsafe { call!(self, cuStreamSynchronize(stream)) }, "cannot fill memory")
    }

    /// Waits until the current work of the default stream is complete.
    pub(crate) fn wait_for_default_stream(self: &Arc<Self>) -> Result<()> {
        self.event_on(std::ptr::without_provenance_mut(ffi::LEGACY_STREAM))?.wait()
    }

    fn event(self: &Arc<Self>) -> Result<Event> {
        if let Some(event) = self.events.lock().pop() {
            return Ok(Event { device: self.clone(), event });
        }
        let _current = self.enter()?;
        let mut event = null_mut();
        // SAFETY: the driver writes the event, which is destroyed with the device, or by `Event`.
        let status = unsafe { call!(self, cuEventCreate(&raw mut event, WITHOUT_TIMING)) };
        self.check(status, "cannot create event")?;
        Ok(Event { device: self.clone(), event: event.expose_provenance() })
    }

    /// Creates an event that occurs when the current work of the stream is complete.
    pub(super) fn event_on(self: &Arc<Self>, stream: sys::CUstream) -> Result<Event> {
        let event = self.event()?;
        let _current = self.enter()?;
        // SAFETY: an event of this device; the caller promises the stream.
        let status = unsafe { call!(self, cuEventRecord(event.raw(), stream)) };
        self.check(status, "cannot wait for stream")?;
        Ok(event)
    }
}

/// Begins copies with one call. They read their sources in the order of the stream.
///
/// # Safety
/// As for [`Device::copy`].
unsafe fn begin_batch(batches: &CopyBatches, copies: &[(u64, u64, usize)], stream: sys::CUstream) -> Status {
    let mut to: Vec<u64> = copies.iter().map(|copy| copy.0).collect();
    let mut from: Vec<u64> = copies.iter().map(|copy| copy.1).collect();
    let mut len: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
    let no_hint = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
    let mut attributes = sys::CUmemcpyAttributes {
        srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        srcLocHint: no_hint,
        dstLocHint: no_hint,
        flags: 0,
    };
    let (mut first, mut failed) = (0, usize::MAX);
    // SAFETY: the lists have one entry per copy, and the attributes apply to all; the caller
    // promises the addresses.
    unsafe {
        call!(
            batches,
            cuMemcpyBatchAsync(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                len.as_mut_ptr(),
                copies.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream,
            )
        )
    }
}

impl Event {
    fn raw(&self) -> sys::CUevent {
        std::ptr::with_exposed_provenance_mut(self.event)
    }

    /// Returns the outcome of the work before the event, or `None` if the event has not occurred.
    pub(crate) fn poll(&self) -> Option<Result<()>> {
        let current = self.device.enter();
        if let Err(error) = current {
            return Some(Err(error));
        }
        // SAFETY: an event of this device.
        match unsafe { call!(self.device, cuEventQuery(self.raw())) } {
            ffi::NOT_READY => None,
            status => Some(self.device.check(status, "copy failed")),
        }
    }

    /// Waits for the event.
    pub(crate) fn wait(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: an event of this device.
        let status = unsafe { call!(self.device, cuEventSynchronize(self.raw())) };
        self.device.check(status, "copy failed")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut events = self.device.events.lock();
        if events.len() < EVENTS {
            return events.push(self.event);
        }
        drop(events);
        if let Ok(_current) = self.device.enter() {
            // SAFETY: an event of this device, without another user.
            unsafe { call!(self.device, cuEventDestroy_v2(self.raw())) };
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Ok(_current) = self.enter() {
            for event in self.events.lock().drain(..) {
                // SAFETY: an event without a user.
                unsafe { call!(self.cuda, cuEventDestroy_v2(std::ptr::with_exposed_provenance_mut(event))) };
            }
            for &stream in &self.streams {
                // SAFETY: a stream without a user.
                unsafe {
                    call!(self.cuda, cuStreamDestroy_v2(std::ptr::with_exposed_provenance_mut(stream)))
                };
            }
        }
        // SAFETY: retained by `open`.
        unsafe { call!(self.cuda, cuDevicePrimaryCtxRelease_v2(self.handle)) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}{})", self.number, if self.is_lost() { ", lost" } else { "" })
    }
}
