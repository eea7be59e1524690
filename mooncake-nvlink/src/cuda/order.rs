//! Order between a caller's stream and work outside of it: transfers that begin after the current
//! work of the stream, and hold the stream back until they are complete.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Condvar, Mutex};

use super::device::{Device, Event};
use super::ffi::{self, call, sys};
use super::library::Cuda;
use super::memory::Pinned;
use sys::{CUdevice_attribute as Attribute, CUstreamWaitValue_flags as Wait};

/// Stream of the caller (a `CUstream`, which a `cudaStream_t` is), with its device.
#[derive(Debug)]
pub struct StreamRef {
    device: Arc<Device>,
    stream: usize,
}

impl StreamRef {
    /// Wraps the stream of that handle. 0 is the default stream: of `device` if given, otherwise of
    /// the device that is current on this thread, or of the first device that this process uses.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a handle that is not a stream of a primary context, and
    /// `NOT_SUPPORTED` while the stream is being captured into a graph.
    ///
    /// # Safety
    /// The handle is a stream that lives at least until the work ordered with it is complete.
    pub unsafe fn new(cuda: &'static Cuda, stream: u64, device: Option<u32>) -> Result<Self> {
        let handle = match usize::try_from(stream) {
            // The explicit handle of the default stream, which does not depend on the API variant.
            Ok(0) => ffi::LEGACY_STREAM,
            Ok(handle) => handle,
            Err(_) => return Err(Error::invalid(format!("invalid stream handle {stream:#x}"))),
        };
        let device = match device {
            Some(number) => cuda.device(number)?,
            // SAFETY: the driver returned the context.
            None if handle <= 2 && !cuda.current_context().is_null() => unsafe {
                cuda.device_of_context(cuda.current_context())?
            },
            None if handle <= 2 => cuda.device(cuda.in_use().unwrap_or(0))?,
            None => device_of(cuda, handle)?,
        };
        let stream = Self { device, stream: handle };
        let _current = stream.device.enter()?;
        let mut capturing = 0u32;
        // SAFETY: the caller promises a stream.
        let status =
            unsafe { call!(stream.device, cuStreamIsCapturing(stream.raw(), (&raw mut capturing).cast())) };
        stream.device.check(status, "cannot query stream")?;
        if capturing != 0 {
            return Err(Error::new(
                ErrorCode::NotSupported,
                "cannot order transfer: the stream is being captured into a graph",
            ));
        }
        drop(_current);
        Ok(stream)
    }

    /// Returns the device of the stream.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn raw(&self) -> sys::CUstream {
        with_exposed_provenance_mut(self.stream)
    }

    /// Creates an event that occurs when the current work of the stream is complete.
    pub(crate) fn mark(&self) -> Result<Event> {
        self.device.event_on(self.raw())
    }

    /// Holds the stream back: later work on it does not begin before the result is dropped. The
    /// holder must not wait for that stream, nor for one that waits for it, such as the default
    /// stream.
    ///
    /// # Errors
    /// Returns the errors of the driver; the stream is then unchanged.
    pub fn hold(&self, flags: &Arc<Flags>) -> Result<Hold> {
        if let Some(waits) = &self.device.cuda().stream_waits {
            let flag = flags.take(&self.device)?;
            // The next work of the stream sees what a NIC has written to the device by then.
            let flush = match self.device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) {
                0 => 0,
                _ => Wait::CU_STREAM_WAIT_VALUE_FLUSH as u32,
            };
            let at_least = Wait::CU_STREAM_WAIT_VALUE_GEQ as u32;
            let _current = self.device.enter()?;
            // SAFETY: the flag is not reused before this stream has seen it raised.
            let status =
                unsafe { call!(waits, cuStreamWaitValue32_v2(self.raw(), flag as u64, 1, at_least | flush)) };
            if status == ffi::SUCCESS {
                let passed = self.device.event_on(self.raw());
                return Ok(Hold(HoldMethod::Flag { flags: flags.clone(), flag, passed: passed.ok() }));
            }
            flags.put_back(flag);
            if status != ffi::NOT_SUPPORTED {
                self.device.check(status, "cannot hold stream back")?;
            }
        }
        let gate = Arc::new(Gate::default());
        let driver_reference = Arc::into_raw(gate.clone());
        let _current = self.device.enter()?;
        // SAFETY: the function owns the reference; the driver calls it once, or never if this
        // fails.
        let status = unsafe {
            call!(self.device, cuLaunchHostFunc(self.raw(), Some(pass), driver_reference.cast_mut().cast()))
        };
        if let Err(error) = self.device.check(status, "cannot hold stream back") {
            // SAFETY: the function was not called.
            drop(unsafe { Arc::from_raw(driver_reference) });
            return Err(error);
        }
        Ok(Hold(HoldMethod::Gate(gate)))
    }
}

/// Returns the device whose primary context has the stream.
fn device_of(cuda: &'static Cuda, handle: usize) -> Result<Arc<Device>> {
    let mut context = null_mut();
    // SAFETY: the caller promises a stream; the driver writes the context.
    let status =
        unsafe { call!(cuda, cuStreamGetCtx(with_exposed_provenance_mut(handle), &raw mut context)) };
    cuda.check(status, "cannot get the context of a stream")?;
    // SAFETY: the driver returned the context.
    unsafe { cuda.device_of_context(context) }
}

/// Stream that is held back. It continues when this is dropped.
#[derive(Debug)]
pub struct Hold(HoldMethod);

enum HoldMethod {
    /// Wait of the stream for a word of host memory. Letting it continue needs no thread and no
    /// driver call.
    Flag { flags: Arc<Flags>, flag: usize, passed: Option<Event> },
    /// Function on the stream that waits in a thread of the driver, for older drivers. It calls
    /// nothing of CUDA.
    Gate(Arc<Gate>),
}

impl Drop for Hold {
    fn drop(&mut self) {
        match &mut self.0 {
            HoldMethod::Flag { flags, flag, passed } => flags.raise(*flag, passed.take()),
            HoldMethod::Gate(gate) => gate.open(),
        }
    }
}

impl fmt::Debug for HoldMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HoldMethod::Flag { .. } => "by a flag",
            HoldMethod::Gate(_) => "by a function",
        })
    }
}

/// Words in page-locked memory that streams wait for.
#[derive(Default)]
pub struct Flags {
    state: Mutex<FlagState>,
}

#[derive(Default)]
struct FlagState {
    pages: Vec<Pinned>,
    free: Vec<usize>,
    /// Raised flags, with the event that the stream has passed.
    passing: Vec<(usize, Event)>,
}

const PAGE: usize = 4096;
const WORD: usize = size_of::<u32>();

impl Flags {
    /// Takes an unused word with value 0.
    fn take(&self, device: &Arc<Device>) -> Result<usize> {
        let mut state = self.state.lock();
        let FlagState { pages, free, passing } = &mut *state;
        passing.retain(|(flag, passed)| {
            let has_passed = passed.poll().is_some();
            if has_passed {
                free.push(*flag);
            }
            !has_passed
        });
        if free.is_empty() {
            let page = Pinned::new(device, PAGE)?;
            let first = page.span().ptr.as_ptr().expose_provenance();
            free.extend((0..PAGE / WORD).map(|word| first + word * WORD));
            pages.push(page);
        }
        let flag = free.pop().ok_or_else(|| Error::internal("internal error: page without a flag"))?;
        word(flag).store(0, Ordering::SeqCst);
        Ok(flag)
    }

    fn put_back(&self, flag: usize) {
        self.state.lock().free.push(flag);
    }

    /// Lets the stream continue. If it is unknown when the stream has passed, the word is not
    /// reused.
    fn raise(&self, flag: usize, passed: Option<Event>) {
        word(flag).store(1, Ordering::SeqCst);
        if let Some(passed) = passed {
            self.state.lock().passing.push((flag, passed));
        }
    }
}

impl Drop for Flags {
    fn drop(&mut self) {
        // All are raised, and the pages go after this.
        for (_, passed) in self.state.get_mut().passing.drain(..) {
            let _ = passed.wait();
        }
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flags({} pages)", self.state.lock().pages.len())
    }
}

fn word(flag: usize) -> &'static AtomicU32 {
    // SAFETY: an aligned word of a page that lives as long as the flags; this process and devices
    // access it only as one word.
    unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(flag)) }
}

#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock() = true;
        self.opened.notify_all();
    }
}

/// Waits for the gate. The driver calls this function on the stream.
unsafe extern "C" fn pass(gate: *mut c_void) {
    // SAFETY: the reference was created for this one call.
    let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
    let mut open = gate.open.lock();
    while !*open {
        gate.opened.wait(&mut open);
    }
}
