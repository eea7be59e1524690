//! A double of libcuda: the driver calls this crate makes, on memory of the host's. Device addresses are mapped without any right, so that
//! whatever touches them by the processor crashes; the bytes lie in files another process opens by the handle; streams are threads that take their time.
//!
//! It is one C file, built by the system's compiler. [`load`] makes it this process's `libcuda.so.1`; another process loads it by
//! [`path`] or with `LD_LIBRARY_PATH`.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The double's source; the first file is the one to compile.
const SOURCE: [(&str, &str); 4] = [
    ("cuda.c", include_str!("../../double/cuda.c")),
    ("handles.h", include_str!("../../double/handles.h")),
    ("streams.h", include_str!("../../double/streams.h")),
    ("devices.h", include_str!("../../double/devices.h")),
];

/// The double, built; once for each version of it and user, in the folder for temporary files.
///
/// # Panics
/// It cannot be built.
pub fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build(&std::env::temp_dir()))
}

/// Builds the double in a folder of its own below `folder`; its path, whose last part is `libcuda.so.1`.
///
/// # Panics
/// There is no C compiler, or it refuses.
pub fn build(folder: &Path) -> PathBuf {
    // FNV-1a: the same source is built once.
    let sum = SOURCE
        .iter()
        .flat_map(|(_, text)| text.bytes())
        .fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    // SAFETY: asks for a number.
    let user = unsafe { libc::getuid() };
    let folder = folder.join(format!("mooncake-cuda-double-{user}-{sum:016x}"));
    let library = folder.join("libcuda.so.1");
    if library.exists() {
        return library;
    }
    // Others may build it at the same time; each file is whole when it gets its name.
    let own = folder.join(format!("build-{}", std::process::id()));
    std::fs::create_dir_all(&own).expect("a folder for the double of libcuda");
    for (name, text) in SOURCE {
        std::fs::write(own.join(name), text).expect("the double's source");
    }
    let (source, built) = (own.join(SOURCE[0].0), own.join("built"));
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"])
        .args(["-Wl,-soname,libcuda.so.1", "-o"])
        .arg(&built)
        .arg(&source)
        .arg("-lrt")
        .status()
        .expect("a C compiler (`cc`), to build the double of libcuda with");
    assert!(status.success(), "the double of libcuda cannot be built: {status}");
    std::fs::rename(&built, &library).expect("the double in its place");
    let _ = std::fs::remove_dir_all(&own);
    library
}

/// Makes the double this process's CUDA driver. To be called before anything else uses one.
///
/// # Panics
/// It cannot be built or loaded.
pub fn load() -> Double {
    let name = CString::new(path().as_os_str().as_bytes()).expect("a path without zeros");
    // SAFETY: our own library, which has no initialisers.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "the double of libcuda cannot be loaded");
    Double { handle }
}

/// The double in this process, and what it does beside CUDA.
#[derive(Clone, Copy, Debug)]
pub struct Double {
    handle: *mut c_void,
}

// SAFETY: a handle of a library that is never unloaded.
unsafe impl Send for Double {}
// SAFETY: as above.
unsafe impl Sync for Double {}

/// What the double can be made to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next allocations, as many as given, find no room.
    OutOfMemory = 1,
    /// Copies under way and all calls from now on fail: the context is lost, until [`Reset`](Fault::Reset).
    Lost = 2,
    /// A new context: what was lost is forgotten.
    Reset = 3,
    /// The next openings of handles, as many as given, say that the handle is not valid.
    InvalidHandle = 4,
    /// Streams cannot wait for a word of memory (1), as with old drivers, or can (0).
    NoWaitValue = 5,
    /// Copies take at least that many microseconds.
    Slow = 6,
    /// There are no batches of copies (1), as with older drivers, or there are (0).
    NoBatch = 7,
    /// The device is in a fabric (1), or not (0).
    Fabric = 8,
    /// The next copies, as many as given, fail when they are begun.
    CopyFails = 9,
    /// Devices cannot touch each other's memory (1), or can (0). What was enabled before stays so.
    NoPeers = 10,
}

impl Double {
    /// Makes it do something.
    pub fn inject(self, fault: Fault, how: u64) {
        // SAFETY: the double's function of that name.
        let function: extern "C" fn(c_int, c_long) =
            unsafe { std::mem::transmute(self.symbol(c"double_inject")) };
        function(fault as c_int, how.cast_signed() as c_long);
    }

    /// Objects of the driver's that are alive: memory, streams, events, imports, retained contexts, together.
    pub fn live(self) -> c_long {
        // SAFETY: the double's function of that name.
        let function: extern "C" fn() -> c_long = unsafe { std::mem::transmute(self.symbol(c"double_live")) };
        function()
    }

    /// Makes a device's primary context this thread's, as programs do that use CUDA, until the result is dropped.
    ///
    /// # Panics
    /// There is no such device.
    pub fn make_current(self, device: u32) -> MadeCurrent {
        let (mut context, number) = (std::ptr::null_mut::<c_void>(), device as c_int);
        // SAFETY: the driver's functions of those names.
        unsafe {
            let retain: extern "C" fn(*mut *mut c_void, c_int) -> u32 =
                std::mem::transmute(self.symbol(c"cuDevicePrimaryCtxRetain"));
            let push: extern "C" fn(*mut c_void) -> u32 =
                std::mem::transmute(self.symbol(c"cuCtxPushCurrent_v2"));
            assert_eq!(retain(&raw mut context, number), 0, "a context of device {device}");
            assert_eq!(push(context), 0);
        }
        MadeCurrent { double: self, device: number, _here: PhantomData }
    }

    /// How often the primary context of a device is retained.
    pub fn contexts(self, device: u32) -> c_long {
        // SAFETY: the double's function of that name.
        let function: extern "C" fn(c_int) -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"double_contexts")) };
        function(device as c_int)
    }

    /// Copies so far between devices of which the one that copied had no access to the other's memory.
    pub fn unaided(self) -> c_long {
        // SAFETY: the double's function of that name.
        let function: extern "C" fn() -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"double_unaided")) };
        function()
    }

    /// Calls of one function so far, by its name (`cuMemcpyAsync`).
    pub fn calls(self, of: &str) -> c_long {
        let name = CString::new(of).expect("a name without zeros");
        // SAFETY: the double's function of that name.
        let function: extern "C" fn(*const c_char) -> c_long =
            unsafe { std::mem::transmute(self.symbol(c"double_calls")) };
        function(name.as_ptr())
    }

    fn symbol(self, name: &std::ffi::CStr) -> *mut c_void {
        // SAFETY: an open library and a constant name.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "the double has no {name:?}");
        symbol
    }
}

/// A context that is this thread's.
#[derive(Debug)]
pub struct MadeCurrent {
    double: Double,
    device: c_int,
    // It is this thread's.
    _here: PhantomData<*mut ()>,
}

impl Drop for MadeCurrent {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut::<c_void>();
        // SAFETY: the driver's functions of those names; what was pushed and retained is given back.
        unsafe {
            let pop: extern "C" fn(*mut *mut c_void) -> u32 =
                std::mem::transmute(self.double.symbol(c"cuCtxPopCurrent_v2"));
            let release: extern "C" fn(c_int) -> u32 =
                std::mem::transmute(self.double.symbol(c"cuDevicePrimaryCtxRelease_v2"));
            pop(&raw mut context);
            release(self.device);
        }
    }
}
