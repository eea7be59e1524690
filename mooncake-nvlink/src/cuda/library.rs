//! libcuda, loaded on first use, and its information about the machine.

use std::error::Error as _;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr::null;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mooncake_core::memory::{Location, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use super::ffi::{
    self, Address, CopyBatches, Describe, Functions, RangeHandles, Status, StreamWaits, VirtualMemory, call,
    sys,
};

use sys::CUpointer_attribute as PointerAttribute;

const NAME: &str = "libcuda.so.1";

static CUDA: OnceLock<Cuda> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());
/// Value of [`loaded`] when the library was last found missing.
static ABSENT: AtomicU64 = AtomicU64::new(0);
#[cfg(test)]
static SEARCHES: AtomicU64 = AtomicU64::new(0);

/// Library of the CUDA driver in this process. There is one, which is never unloaded.
pub struct Cuda {
    functions: Functions,
    pub(super) stream_waits: Option<StreamWaits>,
    pub(super) copy_batches: Option<CopyBatches>,
    pub(super) range_handles: Option<RangeHandles>,
    pub(super) virtual_memory: Option<VirtualMemory>,
    initialised: Mutex<bool>,
    /// Ids of all devices, by number.
    uuids: OnceLock<Vec<[u8; 16]>>,
}

impl Cuda {
    /// Loads the library, `libcuda.so.1` or the one at `path`, unless this process has loaded it
    /// already, and initialises the driver. Children of a later `fork` cannot use it, as with every
    /// user of CUDA.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` without a library, a driver or a device, with what to install.
    pub fn open(path: Option<&Path>) -> Result<&'static Self> {
        let cuda = Self::load(path)?;
        cuda.initialise()?;
        Ok(cuda)
    }

    /// Returns the library if this process has loaded it. Loads and initialises nothing. Cheap,
    /// because it is called for all host memory, also on machines without CUDA.
    pub fn present() -> Option<&'static Self> {
        if let Some(cuda) = CUDA.get() {
            return Some(cuda);
        }
        let loaded = loaded();
        if ABSENT.load(Ordering::Acquire) == loaded && loaded != 0 {
            return None;
        }
        let found = Self::find_loaded();
        if found.is_none() {
            ABSENT.store(loaded, Ordering::Release);
        }
        found
    }

    /// Asks the system for the library, which searches its folders if the library is missing.
    fn find_loaded() -> Option<&'static Self> {
        let _guard = LOADING.lock();
        #[cfg(test)]
        SEARCHES.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the call loads nothing.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | libc::RTLD_NOLOAD) };
        load_functions(library.ok()?).ok()
    }

    fn load(path: Option<&Path>) -> Result<&'static Self> {
        if let Some(cuda) = Self::present() {
            return Ok(cuda);
        }
        let _guard = LOADING.lock();
        let name = path.map_or(OsStr::new(NAME), Path::as_os_str);
        // SAFETY: every program that links the library runs the same initialisers.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| match error {
            libloading::Error::InteriorZeroElements => {
                Error::invalid("invalid path of the CUDA library: it contains a zero byte")
            }
            error => {
                let reason = error.source().map_or_else(|| error.to_string(), |reason| reason.to_string());
                missing(format!("cannot load libcuda.so.1: {reason}"))
            }
        })?;
        load_functions(library).map_err(missing)
    }

    fn initialise(&self) -> Result<()> {
        let mut initialised = self.initialised.lock();
        if *initialised {
            return Ok(());
        }
        // SAFETY: the call has no flags.
        let status = unsafe { call!(self, cuInit(0)) };
        if status == ffi::NO_DEVICE {
            return Err(missing("libcuda.so.1 finds no device"));
        }
        self.check(status, "cannot initialise the driver").map_err(|error| missing(error.to_string()))?;
        *initialised = true;
        Ok(())
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the number of devices.
    ///
    /// # Errors
    /// Returns the errors of the driver.
    pub fn device_count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: the driver writes the number.
        let status = unsafe { call!(self, cuDeviceGetCount(&raw mut count)) };
        self.check(status, "cannot count devices")?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Returns the CUDA version of the driver, as in 12080 for 12.8.
    pub fn driver_version(&self) -> i32 {
        let mut version: c_int = 0;
        // SAFETY: the driver writes the number.
        unsafe { call!(self, cuDriverGetVersion(&raw mut version)) };
        version
    }

    /// Returns the first device that this process uses. The call creates no context.
    pub(crate) fn in_use(&self) -> Option<u32> {
        let count = self.device_count().unwrap_or(0);
        (0..count).find(|&number| {
            let (mut flags, mut active) = (0, 0);
            let Ok(handle) = self.handle(number) else { return false };
            // SAFETY: the driver writes the numbers.
            let status =
                unsafe { call!(self, cuDevicePrimaryCtxGetState(handle, &raw mut flags, &raw mut active)) };
            status == ffi::SUCCESS && active != 0
        })
    }

    /// Returns the current context of this thread, or null.
    pub(super) fn current_context(&self) -> sys::CUcontext {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes the context.
        unsafe { call!(self, cuCtxGetCurrent(&raw mut context)) };
        context
    }

    /// Returns the PCI addresses of all devices, by number.
    pub(crate) fn pci_addresses(&self) -> Option<Vec<String>> {
        let address = |number| {
            let mut text = [0u8; 32];
            let handle = self.handle(number).ok()?;
            // SAFETY: the driver writes a string of at most that length.
            let status =
                unsafe { call!(self, cuDeviceGetPCIBusId(text.as_mut_ptr().cast::<c_char>(), 32, handle)) };
            let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
            (status == ffi::SUCCESS).then(|| text.to_ascii_lowercase())
        };
        (0..self.device_count().ok()?).map(address).collect()
    }

    /// Returns the driver's handle of a device.
    pub(super) fn handle(&self, number: u32) -> Result<sys::CUdevice> {
        let mut handle = 0;
        // SAFETY: the driver writes the number.
        let status = unsafe { call!(self, cuDeviceGet(&raw mut handle, number as c_int)) };
        self.check(status, "cannot get device").map(|()| handle)
    }

    /// Returns the local device with that id, if there is one.
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
        // SAFETY: the driver writes the bytes.
        let status = unsafe { call!(self, cuDeviceGetUuid((&raw mut uuid).cast(), device)) };
        self.check(status, "cannot get the id of a device")?;
        Ok(uuid)
    }

    /// Returns the device allocation that an address lies in. Returns `None` for all other memory,
    /// and for managed memory, which the processor can touch.
    pub fn allocation(&self, addr: u64) -> Option<MemorySpan> {
        let attributes = self.pointer(addr)?;
        if attributes.kind != sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32
            || attributes.managed
            || attributes.size == 0
        {
            return None;
        }
        let ptr = std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(
            usize::try_from(attributes.start).ok()?,
        ))?;
        let location = Location::Cuda(u32::try_from(attributes.device).ok()?);
        Some(MemorySpan { location, ..MemorySpan::new(ptr, attributes.size) })
    }

    /// Returns whether the driver knows an address, as device memory or as page-locked host memory.
    pub(crate) fn has_address(&self, addr: u64) -> bool {
        self.pointer(addr).is_some_and(|attributes| attributes.kind != 0)
    }

    /// Returns the id that distinguishes an allocation of this process from all earlier and later
    /// ones, or 0 if the driver reports none.
    pub(super) fn buffer_id(&self, addr: u64) -> u64 {
        let mut id = 0u64;
        let mut what = [PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID];
        let mut into = [(&raw mut id).cast::<c_void>()];
        // SAFETY: the list has one destination for one attribute, with its size.
        let status =
            unsafe { call!(self, cuPointerGetAttributes(1, what.as_mut_ptr(), into.as_mut_ptr(), addr)) };
        if status == ffi::SUCCESS { id } else { 0 }
    }

    fn pointer(&self, addr: u64) -> Option<PointerAttributes> {
        let mut attributes = PointerAttributes { kind: 0, managed: false, device: -1, start: 0, size: 0 };
        let mut what = [
            PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            PointerAttribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut into: [*mut c_void; 5] = [
            (&raw mut attributes.kind).cast(),
            (&raw mut attributes.managed).cast(),
            (&raw mut attributes.device).cast(),
            (&raw mut attributes.start).cast(),
            (&raw mut attributes.size).cast(),
        ];
        // SAFETY: the list has one destination per attribute, each with the size of its attribute.
        // For unknown memory the driver writes zeros, and before its initialisation it returns an
        // error.
        let status =
            unsafe { call!(self, cuPointerGetAttributes(5, what.as_mut_ptr(), into.as_mut_ptr(), addr)) };
        (status == ffi::SUCCESS).then_some(attributes)
    }

    /// Converts the status of a driver call.
    pub(super) fn check(&self, status: Status, what: &str) -> Result<()> {
        if status == ffi::SUCCESS {
            return Ok(());
        }
        let text = |address: Address| {
            let mut text: *const c_char = null();
            // SAFETY: the two functions below have this type, and take any number. The driver
            // writes a pointer to a constant string, or null.
            unsafe { std::mem::transmute::<Address, Describe>(address)(status, &raw mut text) };
            // SAFETY: as above.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let name =
            text(self.functions.cuGetErrorName).unwrap_or_else(|| format!("CUDA error {status}").into());
        let description = text(self.functions.cuGetErrorString).unwrap_or_default();
        let code = match status {
            ffi::INVALID_VALUE | ffi::INVALID_HANDLE => ErrorCode::InvalidParams,
            ffi::OUT_OF_MEMORY => ErrorCode::BufferOverflow,
            ffi::NOT_INITIALIZED | ffi::NO_DEVICE | ffi::NOT_PERMITTED | ffi::NOT_SUPPORTED => {
                ErrorCode::NotSupported
            }
            _ => ErrorCode::TransferFail,
        };
        Err(Error::new(code, format!("{what}: {description} ({name})")))
    }
}

/// Returns the number of libraries that this process has loaded so far. While it stays the same, no
/// library has been added.
fn loaded() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _: usize, into: *mut c_void) -> c_int {
        // SAFETY: the description of a library by the loader, and the number below.
        unsafe { into.cast::<u64>().write((*info).dlpi_adds) };
        1
    }
    let mut loaded = 0u64;
    // SAFETY: the callback gets the number, and is not called after this returns.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loaded).cast()) };
    loaded
}

struct PointerAttributes {
    kind: u32,
    managed: bool,
    device: c_int,
    start: u64,
    size: usize,
}

/// Looks up the functions of the library. The caller holds [`LOADING`].
fn load_functions(library: Library) -> Result<&'static Cuda, String> {
    if let Some(cuda) = CUDA.get() {
        return Ok(cuda);
    }
    let functions = Functions::load(&library);
    let optional = (
        StreamWaits::load(&library).ok(),
        CopyBatches::load(&library).ok(),
        RangeHandles::load(&library).ok(),
        VirtualMemory::load(&library).ok(),
    );
    // The functions stay valid, because the library is not closed.
    let _ = library.into_raw();
    let functions = functions.map_err(|name| format!("libcuda.so.1 has no {name}: the driver is too old"))?;
    let (stream_waits, copy_batches, range_handles, virtual_memory) = optional;
    Ok(CUDA.get_or_init(|| Cuda {
        functions,
        stream_waits,
        copy_batches,
        range_handles,
        virtual_memory,
        initialised: Mutex::new(false),
        uuids: OnceLock::new(),
    }))
}

fn missing(what: impl fmt::Display) -> Error {
    Error::new(
        ErrorCode::NotSupported,
        format!(
            "cannot use GPU memory: {what}; install the driver of NVIDIA (Debian: libcuda1 and its kernel module)"
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

    /// Each search opens folders and files, and takes longer than a put of a small value.
    #[test]
    fn a_missing_library_is_not_searched_each_time() {
        let before = SEARCHES.load(Ordering::Relaxed);
        let misses = (0..1000).filter(|_| Cuda::present().is_none()).count();
        let searches = SEARCHES.load(Ordering::Relaxed) - before;
        assert!(misses == 0 || searches < 10, "{searches} searches for {misses} calls");
    }
}
