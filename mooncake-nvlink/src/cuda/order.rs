//! Order between a caller's stream and what is not on it: transfers that begin when the stream's work so far is over, and hold it back until they are over.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Condvar, Mutex};

use super::device::{Device, Event};
use super::ffi;
use super::library::Cuda;
use super::memory::Pinned;

/// A stream of the caller's (a `CUstream`, which a `cudaStream_t` is), with the device it is of.
#[derive(Debug)]
pub struct StreamRef {
    device: Arc<Device>,
    stream: usize,
}

impl StreamRef {
    /// The stream of that handle. 0 is the default stream: of `device` where one is given, of the device that this thread has made current otherwise, and without one
    /// of the first that this process uses.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for what is no stream of a primary context; `NOT_SUPPORTED` while the stream is being captured into a graph.
    ///
    /// # Safety
    /// The handle is that of a stream, which lives at least until the work is over that is put in order with it.
    pub unsafe fn new(cuda: &'static Cuda, stream: u64, device: Option<u32>) -> Result<Self> {
        let handle = match usize::try_from(stream) {
            // The default stream by its own name, so that it is that whatever way the driver was asked.
            Ok(0) => ffi::LEGACY_STREAM,
            Ok(handle) => handle,
            Err(_) => return Err(Error::invalid(format!("{stream:#x} is no stream"))),
        };
        let device = match device {
            Some(number) => cuda.device(number)?,
            // SAFETY: the driver's own word.
            None if handle <= 2 && !cuda.current_context().is_null() => unsafe {
                cuda.device_of_context(cuda.current_context())?
            },
            None if handle <= 2 => cuda.device(cuda.in_use().unwrap_or(0))?,
            None => device_of(cuda, handle)?,
        };
        let stream = Self { device, stream: handle };
        let _here = stream.device.enter()?;
        let mut capturing = 0;
        // SAFETY: promised to be a stream.
        let status =
            unsafe { (stream.device.functions().stream_is_capturing)(stream.raw(), &raw mut capturing) };
        stream.device.check(status, "a stream")?;
        if capturing != 0 {
            return Err(Error::new(
                ErrorCode::NotSupported,
                "a transfer cannot be captured into a graph: it is not the device's work",
            ));
        }
        drop(_here);
        Ok(stream)
    }

    /// The device it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn raw(&self) -> ffi::Stream {
        with_exposed_provenance_mut(self.stream)
    }

    /// An event that happens when the work is over that it has now.
    pub(crate) fn mark(&self) -> Result<Event> {
        self.device.event_on(self.raw())
    }

    /// Holds it back: what is put on it from now on does not begin before the result is dropped. Whoever has it must not wait for that stream, nor for one that
    /// waits for it, the default stream above all.
    ///
    /// # Errors
    /// What the driver says; the stream is as it was then.
    pub fn hold(&self, flags: &Arc<Flags>) -> Result<Hold> {
        if let Some(wait) = self.device.functions().stream_wait_value {
            let flag = flags.take(&self.device)?;
            // What a NIC has written to the device by then is seen by what the stream does next.
            let flush =
                if self.device.attribute(ffi::FLUSH_SUPPORTED) != 0 { ffi::WAIT_VALUE_FLUSH } else { 0 };
            let _here = self.device.enter()?;
            // SAFETY: the flag is not given to another before this stream has seen it raised.
            let status = unsafe { wait(self.raw(), flag as u64, 1, ffi::WAIT_VALUE_GEQ | flush) };
            if status == ffi::SUCCESS {
                let passed = self.device.event_on(self.raw());
                return Ok(Hold(With::Flag { flags: flags.clone(), flag, passed: passed.ok() }));
            }
            flags.put_back(flag);
            if status != ffi::NOT_SUPPORTED {
                self.device.check(status, "the stream cannot be held back")?;
            }
        }
        let gate = Arc::new(Gate::default());
        let theirs = Arc::into_raw(gate.clone());
        let _here = self.device.enter()?;
        // SAFETY: the function takes the reference back; the driver calls it once, or, when this fails, never.
        let status = unsafe {
            (self.device.functions().launch_host_function)(self.raw(), pass, theirs.cast_mut().cast())
        };
        if let Err(error) = self.device.check(status, "the stream cannot be held back") {
            // SAFETY: it was not called.
            drop(unsafe { Arc::from_raw(theirs) });
            return Err(error);
        }
        Ok(Hold(With::Gate(gate)))
    }
}

/// The device whose primary context a stream is of.
fn device_of(cuda: &'static Cuda, handle: usize) -> Result<Arc<Device>> {
    let mut context = null_mut();
    // SAFETY: promised to be a stream; the driver fills the context in.
    let status =
        unsafe { (cuda.functions().stream_context)(with_exposed_provenance_mut(handle), &raw mut context) };
    cuda.check(status, "a stream")?;
    // SAFETY: the driver's own word.
    unsafe { cuda.device_of_context(context) }
}

/// A stream held back; goes on when this is dropped.
#[derive(Debug)]
pub struct Hold(With);

enum With {
    /// The stream reads a word of the host's memory until it is set: no thread and no call of the driver's is needed to let it go on.
    Flag { flags: Arc<Flags>, flag: usize, passed: Option<Event> },
    /// A function on the stream waits in a thread of the driver's, where the driver has nothing better. It calls nothing of CUDA.
    Gate(Arc<Gate>),
}

impl Drop for Hold {
    fn drop(&mut self) {
        match &mut self.0 {
            With::Flag { flags, flag, passed } => flags.raise(*flag, passed.take()),
            With::Gate(gate) => gate.open(),
        }
    }
}

impl fmt::Debug for With {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            With::Flag { .. } => "by a flag",
            With::Gate(_) => "by a function",
        })
    }
}

/// Words that streams wait for, in page-locked memory.
#[derive(Default)]
pub struct Flags {
    state: Mutex<FlagState>,
}

#[derive(Default)]
struct FlagState {
    pages: Vec<Pinned>,
    free: Vec<usize>,
    /// Raised, with the event that the stream has passed.
    passing: Vec<(usize, Event)>,
}

const PAGE: usize = 4096;
const WORD: usize = size_of::<u32>();

impl Flags {
    /// A word that is 0, and nobody else's.
    fn take(&self, device: &Arc<Device>) -> Result<usize> {
        let mut state = self.state.lock();
        let FlagState { pages, free, passing } = &mut *state;
        passing.retain(|(flag, passed)| {
            let over = passed.poll().is_some();
            if over {
                free.push(*flag);
            }
            !over
        });
        if free.is_empty() {
            let page = Pinned::new(device, PAGE)?;
            let first = page.span().ptr.as_ptr().expose_provenance();
            free.extend((0..PAGE / WORD).map(|word| first + word * WORD));
            pages.push(page);
        }
        let flag = free.pop().ok_or_else(|| Error::internal("a page without a flag"))?;
        word(flag).store(0, Ordering::SeqCst);
        Ok(flag)
    }

    fn put_back(&self, flag: usize) {
        self.state.lock().free.push(flag);
    }

    /// Lets the stream go on. Where it is not known when it has, the word is not used again.
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
    // SAFETY: a word of a page that lives as long as the flags, aligned; touched by us and by devices as one word only.
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

/// What the driver calls on the stream.
unsafe extern "C" fn pass(gate: *mut c_void) {
    // SAFETY: given away for this one call.
    let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
    let mut open = gate.open.lock();
    while !*open {
        gate.opened.wait(&mut open);
    }
}
