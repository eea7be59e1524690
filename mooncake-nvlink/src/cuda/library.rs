//! libcuda, loaded when it is first asked for, and what it says of the machine.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use mooncake_core::memory::{Location, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use super::device::Device;
use super::ffi::{self, Functions, Status};

const NAME: &CStr = c"libcuda.so.1";

static CUDA: OnceLock<Cuda> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());
/// What [`loaded`] said when the library was not there.
static ABSENT: AtomicU64 = AtomicU64::new(0);
#[cfg(test)]
static LOOKS: AtomicU64 = AtomicU64::new(0);

/// The CUDA driver's library in this process. One, however many ask for it; it is never unloaded.
pub struct Cuda {
    functions: Functions,
    initialised: Mutex<bool>,
    /// Devices somebody uses, by number.
    devices: Mutex<Vec<Weak<Device>>>,
    /// Ids of all devices, by number.
    uuids: OnceLock<Vec<[u8; 16]>>,
}

impl Cuda {
    /// Loads the library, `libcuda.so.1` or the one at `path`, unless this process has it already, and initialises the driver. After that children made by
    /// `fork` cannot use it, as with every user of CUDA.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`: there is no library, no driver or no device, and what to install.
    pub fn open(path: Option<&Path>) -> Result<&'static Self> {
        let cuda = Self::load(path)?;
        cuda.initialise()?;
        Ok(cuda)
    }

    /// The library, if somebody in this process has loaded it. Loads and initialises nothing. Cheap: where there is no CUDA, this is asked of memory of the host's all the time.
    pub fn present() -> Option<&'static Self> {
        if let Some(cuda) = CUDA.get() {
            return Some(cuda);
        }
        let loaded = loaded();
        if ABSENT.load(Ordering::Acquire) == loaded && loaded != 0 {
            return None;
        }
        let found = Self::look();
        if found.is_none() {
            ABSENT.store(loaded, Ordering::Release);
        }
        found
    }

    /// The same by asking the system, which looks through its folders if the library is not there.
    fn look() -> Option<&'static Self> {
        let _turn = LOADING.lock();
        #[cfg(test)]
        LOOKS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: a constant name; nothing is loaded.
        let handle = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
        keep(handle).ok()
    }

    fn load(path: Option<&Path>) -> Result<&'static Self> {
        if let Some(cuda) = Self::present() {
            return Ok(cuda);
        }
        let _turn = LOADING.lock();
        let name = match path {
            Some(path) => CString::new(path.as_os_str().as_bytes())
                .map_err(|_| Error::invalid("the path of the CUDA library has a zero byte in it"))?,
            None => NAME.into(),
        };
        // SAFETY: a text with an end; the library's own initialisers are those of every program that links it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: after a failed `dlopen` this is a text, or null, which stays until the next call from this thread.
            let why = unsafe { libc::dlerror() };
            let why = match why.is_null() {
                true => Cow::Borrowed("it is not there"),
                // SAFETY: not null, as just seen.
                false => unsafe { CStr::from_ptr(why) }.to_string_lossy(),
            };
            return Err(missing(format!("cannot be loaded ({why})")));
        }
        keep(handle).map_err(missing)
    }

    fn initialise(&self) -> Result<()> {
        let mut initialised = self.initialised.lock();
        if *initialised {
            return Ok(());
        }
        // SAFETY: no flags exist.
        let status = unsafe { (self.functions.init)(0) };
        if status == ffi::NO_DEVICE {
            return Err(missing("finds no device"));
        }
        self.check(status, "the driver cannot be initialised").map_err(|error| missing(error.to_string()))?;
        *initialised = true;
        Ok(())
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Devices there are.
    ///
    /// # Errors
    /// What the driver says.
    pub fn device_count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: the driver fills the number in.
        let status = unsafe { (self.functions.device_count)(&raw mut count) };
        self.check(status, "devices cannot be counted")?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The version of CUDA the driver is of, as in 12080 for 12.8.
    pub fn driver_version(&self) -> i32 {
        let mut version: c_int = 0;
        // SAFETY: the driver fills the number in.
        unsafe { (self.functions.driver_version)(&raw mut version) };
        version
    }

    /// A device, with its primary context, which is given back when the last user of it is gone. One whose context was lost is opened anew.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when there is no such device; what the driver says.
    pub fn device(&'static self, number: u32) -> Result<Arc<Device>> {
        let mut devices = self.devices.lock();
        let known = devices.get(number as usize).and_then(Weak::upgrade).filter(|device| !device.is_lost());
        if let Some(device) = known {
            return Ok(device);
        }
        let count = self.device_count()?;
        if number >= count {
            return Err(Error::invalid(format!("there is no {}: {count} devices", Location::Cuda(number))));
        }
        let device = Arc::new(Device::open(self, number)?);
        if devices.len() <= number as usize {
            devices.resize_with(number as usize + 1, Weak::new);
        }
        devices[number as usize] = Arc::downgrade(&device);
        Ok(device)
    }

    /// The first device that somebody in this process uses: asking for it makes no context that was not there.
    pub(crate) fn in_use(&self) -> Option<u32> {
        let count = self.device_count().unwrap_or(0);
        (0..count).find(|&number| {
            let (mut flags, mut active) = (0, 0);
            let Ok(handle) = self.handle(number) else { return false };
            // SAFETY: the driver fills the numbers in.
            let status = unsafe { (self.functions.primary_state)(handle, &raw mut flags, &raw mut active) };
            status == ffi::SUCCESS && active != 0
        })
    }

    /// The context that is this thread's; null for none.
    pub(super) fn current_context(&self) -> ffi::Context {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver fills the context in.
        unsafe { (self.functions.context_current)(&raw mut context) };
        context
    }

    /// The device whose primary context that is.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for another context; what the driver says.
    ///
    /// # Safety
    /// It is a context.
    pub(super) unsafe fn device_of_context(&'static self, context: ffi::Context) -> Result<Arc<Device>> {
        let (mut handle, mut before) = (0, std::ptr::null_mut());
        // SAFETY: promised; undone below.
        let status = unsafe { (self.functions.context_push)(context) };
        self.check(status, "a context")?;
        // SAFETY: the driver fills the number in, and takes back what was pushed.
        let status = unsafe {
            let status = (self.functions.context_device)(&raw mut handle);
            (self.functions.context_pop)(&raw mut before);
            status
        };
        self.check(status, "the device of a context")?;
        for number in 0..self.device_count()? {
            if self.handle(number)? == handle {
                let device = self.device(number)?;
                if device.is_context(context) {
                    return Ok(device);
                }
            }
        }
        Err(Error::invalid("the stream is of a context that is not its device's primary one"))
    }

    /// PCI addresses of all devices, by number.
    pub(crate) fn pci_addresses(&self) -> Option<Vec<String>> {
        let address = |number| {
            let mut text = [0u8; 32];
            let handle = self.handle(number).ok()?;
            // SAFETY: the driver writes a text of at most that length.
            let status = unsafe {
                (self.functions.device_pci_address)(text.as_mut_ptr().cast::<c_char>(), 32, handle)
            };
            let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
            (status == ffi::SUCCESS).then(|| text.to_ascii_lowercase())
        };
        (0..self.device_count().ok()?).map(address).collect()
    }

    fn handle(&self, number: u32) -> Result<ffi::Device> {
        let mut handle = 0;
        // SAFETY: the driver fills the number in.
        let status = unsafe { (self.functions.device)(&raw mut handle, number as c_int) };
        self.check(status, "a device").map(|()| handle)
    }

    /// The device with that id, if it is one of ours.
    pub(crate) fn device_of_uuid(&'static self, uuid: &[u8; 16]) -> Option<u32> {
        let all = self.uuids.get_or_init(|| {
            let count = self.device_count().unwrap_or(0);
            (0..count).map(|number| self.uuid(number).unwrap_or_default()).collect()
        });
        let at = all.iter().position(|other| other == uuid && *other != [0; 16])?;
        u32::try_from(at).ok()
    }

    pub(super) fn uuid(&self, number: u32) -> Result<[u8; 16]> {
        let (device, mut uuid) = (self.handle(number)?, [0; 16]);
        // SAFETY: the driver fills the bytes in.
        let status = unsafe { (self.functions.device_uuid)(&raw mut uuid, device) };
        self.check(status, "a device's id")?;
        Ok(uuid)
    }

    /// The allocation of a device that an address lies in; `None` for everything else, managed memory too, which the processor can touch.
    pub fn allocation(&self, addr: u64) -> Option<MemorySpan> {
        let about = self.pointer(addr)?;
        if about.kind != ffi::MEMORY_TYPE_DEVICE || about.managed || about.size == 0 {
            return None;
        }
        let ptr = std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(
            usize::try_from(about.start).ok()?,
        ))?;
        let location = Location::Cuda(u32::try_from(about.device).ok()?);
        Some(MemorySpan { location, ..MemorySpan::new(ptr, about.size) })
    }

    /// Whether the driver knows an address at all, as memory of a device's or as page-locked memory of the host's.
    pub(crate) fn knows(&self, addr: u64) -> bool {
        self.pointer(addr).is_some_and(|about| about.kind != 0)
    }

    /// What tells an allocation of this process from all that were there before it and will be after it; 0 where the driver does not say.
    pub(super) fn buffer_id(&self, addr: u64) -> u64 {
        let mut id = 0u64;
        let (what, into) = ([ffi::POINTER_BUFFER_ID], [(&raw mut id).cast::<c_void>()]);
        // SAFETY: one place for one attribute, of its size.
        let status = unsafe { (self.functions.pointer_attributes)(1, what.as_ptr(), into.as_ptr(), addr) };
        if status == ffi::SUCCESS { id } else { 0 }
    }

    fn pointer(&self, addr: u64) -> Option<Pointer> {
        let mut about = Pointer { kind: 0, managed: false, device: -1, start: 0, size: 0 };
        let what = [
            ffi::POINTER_MEMORY_TYPE,
            ffi::POINTER_IS_MANAGED,
            ffi::POINTER_DEVICE_ORDINAL,
            ffi::POINTER_RANGE_START,
            ffi::POINTER_RANGE_SIZE,
        ];
        let into: [*mut c_void; 5] = [
            (&raw mut about.kind).cast(),
            (&raw mut about.managed).cast(),
            (&raw mut about.device).cast(),
            (&raw mut about.start).cast(),
            (&raw mut about.size).cast(),
        ];
        // SAFETY: as many places as attributes, each of its attribute's size. For memory the driver does not know it fills in zeros; not initialised, it says so.
        let status = unsafe { (self.functions.pointer_attributes)(5, what.as_ptr(), into.as_ptr(), addr) };
        (status == ffi::SUCCESS).then_some(about)
    }

    /// What a call of the driver's came to, in our words.
    pub(super) fn check(&self, status: Status, what: &str) -> Result<()> {
        if status == ffi::SUCCESS {
            return Ok(());
        }
        let text = |say: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text: *const c_char = null();
            // SAFETY: the driver fills in a constant text, or null.
            unsafe { say(status, &raw mut text) };
            // SAFETY: as just said.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let name = text(self.functions.error_name).unwrap_or_else(|| format!("CUDA error {status}").into());
        let said = text(self.functions.error_text).unwrap_or_default();
        let code = match status {
            1 | ffi::INVALID_HANDLE => ErrorCode::InvalidParams,
            ffi::OUT_OF_MEMORY => ErrorCode::BufferOverflow,
            ffi::NOT_INITIALIZED | ffi::NO_DEVICE | ffi::NOT_SUPPORTED => ErrorCode::NotSupported,
            _ => ErrorCode::TransferFail,
        };
        Err(Error::new(code, format!("{what}: {said} ({name})")))
    }
}

/// How many libraries this process has loaded so far: while that stays, none is there that was not.
fn loaded() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _: usize, into: *mut c_void) -> c_int {
        // SAFETY: the loader's description of a library, and the number below.
        unsafe { into.cast::<u64>().write((*info).dlpi_adds) };
        1
    }
    let mut loaded = 0u64;
    // SAFETY: called with the number, and not after this returns.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loaded).cast()) };
    loaded
}

struct Pointer {
    kind: u32,
    managed: bool,
    device: c_int,
    start: u64,
    size: usize,
}

/// Takes the library's functions. [`LOADING`] is held.
fn keep(handle: *mut c_void) -> Result<&'static Cuda, String> {
    if let Some(cuda) = CUDA.get() {
        return Ok(cuda);
    }
    // SAFETY: the handle is open and never closed; names are constants, and those the driver exports these functions by.
    let functions = unsafe { Functions::load(|name| libc::dlsym(handle, name.as_ptr())) };
    let functions = functions.map_err(|name| format!("has no {name}: the driver is too old"))?;
    Ok(CUDA.get_or_init(|| Cuda {
        functions,
        initialised: Mutex::new(false),
        devices: Mutex::default(),
        uuids: OnceLock::new(),
    }))
}

fn missing(what: impl fmt::Display) -> Error {
    Error::new(
        ErrorCode::NotSupported,
        format!(
            "GPU memory needs libcuda.so.1, which {what}; install NVIDIA's driver (Debian: libcuda1 and its kernel module)"
        ),
    )
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", self.driver_version())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each look opens folders and files, and takes longer than a small value takes to be put.
    #[test]
    fn what_is_not_there_is_not_looked_for_each_time() {
        let before = LOOKS.load(Ordering::Relaxed);
        let asked = (0..1000).filter(|_| Cuda::present().is_none()).count();
        let looks = LOOKS.load(Ordering::Relaxed) - before;
        assert!(asked == 0 || looks < 10, "{looks} looks for {asked} questions");
    }
}
