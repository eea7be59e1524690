//! Fake libcuda: the driver calls of this crate, on host memory. Device addresses are mapped
//! without access rights, so that a direct access by the processor crashes. The bytes lie in files
//! that another process opens by the handle. Streams are threads with delays.
//!
//! The fake is one C file, built by the compiler of the system. [`load`] makes it the
//! `libcuda.so.1` of this process. Another process loads it by [`path`] or with `LD_LIBRARY_PATH`.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Source files of the fake. The first file is the one to compile.
const SOURCE: [(&str, &str); 4] = [
    ("cuda.c", include_str!("../../fake/cuda.c")),
    ("handles.h", include_str!("../../fake/handles.h")),
    ("streams.h", include_str!("../../fake/streams.h")),
    ("devices.h", include_str!("../../fake/devices.h")),
];

/// Builds the fake in the folder for temporary files, once per version and user. Returns its path.
///
/// # Panics
/// Panics when the fake cannot be built.
pub fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build(&std::env::temp_dir()))
}

/// Builds the fake in a folder of its own below `folder`. Returns its path, which ends in
/// `libcuda.so.1`.
///
/// # Panics
/// Panics when there is no C compiler, or when it fails.
pub fn build(folder: &Path) -> PathBuf {
    // FNV-1a: the same source is built once.
    let sum = SOURCE
        .iter()
        .flat_map(|(_, text)| text.bytes())
        .fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    // SAFETY: the call returns a number.
    let user = unsafe { libc::getuid() };
    let folder = folder.join(format!("mooncake-fake-cuda-{user}-{sum:016x}"));
    let library = folder.join("libcuda.so.1");
    if library.exists() {
        return library;
    }
    // Other processes may build it at the same time; each file is complete when it gets its final
    // name.
    let build_folder = folder.join(format!("build-{}", std::process::id()));
    std::fs::create_dir_all(&build_folder).expect("cannot create the folder of the fake libcuda");
    for (name, text) in SOURCE {
        std::fs::write(build_folder.join(name), text).expect("cannot write the source of the fake libcuda");
    }
    let (source, built) = (build_folder.join(SOURCE[0].0), build_folder.join("built"));
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"])
        .args(["-Wl,-soname,libcuda.so.1", "-o"])
        .arg(&built)
        .arg(&source)
        .arg("-lrt")
        .status()
        .expect("cannot run the C compiler (`cc`), which builds the fake libcuda");
    assert!(status.success(), "cannot build the fake libcuda: {status}");
    std::fs::rename(&built, &library).expect("cannot rename the fake libcuda");
    let _ = std::fs::remove_dir_all(&build_folder);
    library
}

/// Makes the fake the CUDA driver of this process. Call it before anything else uses a driver.
///
/// # Panics
/// Panics when the fake cannot be built or loaded.
pub fn load() -> FakeCuda {
    let name = CString::new(path().as_os_str().as_bytes()).expect("the path has no zero byte");
    // SAFETY: the library of this crate, which has no initialisers.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "cannot load the fake libcuda");
    FakeCuda { handle }
}

/// Fake in this process, and its control functions.
#[derive(Clone, Copy, Debug)]
pub struct FakeCuda {
    handle: *mut c_void,
}

// SAFETY: the library of the handle is never unloaded.
unsafe impl Send for FakeCuda {}
// SAFETY: as above.
unsafe impl Sync for FakeCuda {}

/// Fault that the fake can simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Failure of the next allocations, as many as given, with out of memory.
    OutOfMemory = 1,
    /// Loss of the context: copies in progress and all later calls fail, until
    /// [`Reset`](Fault::Reset).
    Lost = 2,
    /// New context after a loss.
    Reset = 3,
    /// Failure of the next openings of handles, as many as given, with an invalid handle.
    InvalidHandle = 4,
    /// No support of waits for a word of memory (1), as with old drivers, or support (0).
    NoWaitValue = 5,
    /// Minimum duration of copies in microseconds.
    Slow = 6,
    /// No batches of copies (1), as with older drivers, or batches (0).
    NoBatch = 7,
    /// Device in a fabric (1), or not (0). With 2 it reports a fabric and refuses to allocate
    /// memory for it, with 3 to export it, as without a channel of the IMEX service.
    Fabric = 8,
    /// Failure of the next copies, as many as given, at their beginning.
    CopyFails = 9,
    /// No access of devices to the memory of each other (1), or access (0). Enabled access stays
    /// enabled.
    NoPeers = 10,
}

impl FakeCuda {
    /// Injects a fault.
    pub fn inject(self, fault: Fault, value: u64) {
        // SAFETY: the function of the fake has that type.
        let function: extern "C" fn(c_int, c_long) =
            unsafe { std::mem::transmute(self.symbol(c"fake_cuda_inject")) };
        function(fault as c_int, value.cast_signed() as c_long);
    }

    /// Returns the number of live driver objects: memory, streams, events, imports and retained
    /// contexts together.
    pub fn live_objects(self) -> c_long {
        // SAFETY: the function of the fake has that type.
        let function: extern "C" fn() -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"fake_cuda_live")) };
        function()
    }

    /// Makes the primary context of a device current on this thread, as programs do that use CUDA,
    /// until the result is dropped.
    ///
    /// # Panics
    /// Panics when there is no such device.
    pub fn make_current(self, device: u32) -> CurrentContext {
        let (mut context, number) = (std::ptr::null_mut::<c_void>(), device as c_int);
        // SAFETY: the driver functions of those names have these types.
        unsafe {
            let retain: extern "C" fn(*mut *mut c_void, c_int) -> u32 =
                std::mem::transmute(self.symbol(c"cuDevicePrimaryCtxRetain"));
            let push: extern "C" fn(*mut c_void) -> u32 =
                std::mem::transmute(self.symbol(c"cuCtxPushCurrent_v2"));
            assert_eq!(retain(&raw mut context, number), 0, "cannot retain the context of device {device}");
            assert_eq!(push(context), 0);
        }
        CurrentContext { fake: self, device: number, _not_send: PhantomData }
    }

    /// Returns how often the primary context of a device is retained.
    pub fn contexts(self, device: u32) -> c_long {
        // SAFETY: the function of the fake has that type.
        let function: extern "C" fn(c_int) -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"fake_cuda_contexts")) };
        function(device as c_int)
    }

    /// Returns the number of copies between devices without access to the memory of the other.
    pub fn unaided(self) -> c_long {
        // SAFETY: the function of the fake has that type.
        let function: extern "C" fn() -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"fake_cuda_unaided")) };
        function()
    }

    /// Returns the number of calls of a function, by its name (`cuMemcpyAsync`).
    pub fn calls(self, of: &str) -> c_long {
        let name = CString::new(of).expect("the name has no zero byte");
        // SAFETY: the function of the fake has that type.
        let function: extern "C" fn(*const c_char) -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"fake_cuda_calls")) };
        function(name.as_ptr())
    }

    fn symbol(self, name: &std::ffi::CStr) -> *mut c_void {
        // SAFETY: the library is open and the name is a constant.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "the fake libcuda has no {name:?}");
        symbol
    }
}

/// Context that is current on this thread.
#[derive(Debug)]
pub struct CurrentContext {
    fake: FakeCuda,
    device: c_int,
    // The context belongs to this thread.
    _not_send: PhantomData<*mut ()>,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut::<c_void>();
        // SAFETY: the driver functions of those names have these types; the pushed and retained
        // context is released.
        unsafe {
            let pop: extern "C" fn(*mut *mut c_void) -> u32 =
                std::mem::transmute(self.fake.symbol(c"cuCtxPopCurrent_v2"));
            let release: extern "C" fn(c_int) -> u32 =
                std::mem::transmute(self.fake.symbol(c"cuDevicePrimaryCtxRelease_v2"));
            pop(&raw mut context);
            release(self.device);
        }
    }
}
