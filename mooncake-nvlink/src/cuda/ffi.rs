//! Tables of the driver functions that this crate uses, filled at run time. Types, constants and
//! signatures are those of [`sys`], which is generated from the headers of CUDA.

use std::ffi::c_char;

use libloading::os::unix::Library;

pub(super) use cudarc::driver::sys;

/// Result of a driver function. [`sys::CUresult`] has the results of one version of CUDA only, and
/// a result that an enum does not have is undefined behaviour.
pub(super) type Status = u32;

pub(super) const SUCCESS: Status = sys::CUresult::CUDA_SUCCESS as Status;
pub(super) const INVALID_VALUE: Status = sys::CUresult::CUDA_ERROR_INVALID_VALUE as Status;
pub(super) const OUT_OF_MEMORY: Status = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as Status;
pub(super) const NOT_INITIALIZED: Status = sys::CUresult::CUDA_ERROR_NOT_INITIALIZED as Status;
pub(super) const NO_DEVICE: Status = sys::CUresult::CUDA_ERROR_NO_DEVICE as Status;
pub(super) const INVALID_HANDLE: Status = sys::CUresult::CUDA_ERROR_INVALID_HANDLE as Status;
pub(super) const NOT_READY: Status = sys::CUresult::CUDA_ERROR_NOT_READY as Status;
pub(super) const PEER_ACCESS_ALREADY_ENABLED: Status =
    sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as Status;
pub(super) const NOT_PERMITTED: Status = sys::CUresult::CUDA_ERROR_NOT_PERMITTED as Status;
pub(super) const NOT_SUPPORTED: Status = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as Status;

/// Handle of the stream that waits for all other streams of its context that do not opt out
/// (`CU_STREAM_LEGACY`, a macro, which [`sys`] lacks).
pub(super) const LEGACY_STREAM: usize = 1;

/// Size of the handle by which another process opens an allocation; both kinds of handle have it.
pub(crate) const HANDLE_BYTES: usize = sys::CU_IPC_HANDLE_SIZE as usize;

/// Address of a driver function, whose type [`call`] knows.
pub(super) type Address = unsafe extern "C" fn();

/// Function that describes a result, which may be newer than [`sys::CUresult`].
pub(super) type Describe = unsafe extern "C" fn(Status, *mut *const c_char) -> Status;

/// Signature in [`sys`] of a driver function, as a function of Rust.
pub(super) trait Signature {
    /// Type of the driver function.
    type Function;
}

macro_rules! signatures {
    ($($($argument:ident)+;)*) => {$(
        impl<$($argument),+> Signature for unsafe fn($($argument),+) -> sys::CUresult {
            type Function = unsafe extern "C" fn($($argument),+) -> Status;
        }
    )*};
}

signatures! { A; A B; A B C; A B C D; A B C D E; A B C D E F G H I; }

/// Returns the function at an address with the type of its signature.
///
/// # Safety
/// The address is that of the function with this signature.
pub(super) unsafe fn typed<S: Signature>(_signature: S, address: Address) -> S::Function {
    // SAFETY: promised by the caller; all function pointers have the same size.
    unsafe { std::mem::transmute_copy(&address) }
}

/// Calls a driver function of a table, or of the owner of [`Functions`]:
/// `call!(device, cuFunction(arguments))`. Unsafe as the function itself.
macro_rules! call {
    (@any $argument:expr) => { _ };
    ($owner:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let signature: unsafe fn($(call!(@any $argument)),*) -> _ = $crate::cuda::ffi::sys::$name;
        $crate::cuda::ffi::typed(signature, $owner.functions().$name)($($argument),*)
    }};
}
pub(super) use call;

macro_rules! tables {
    ($($(#[$attribute:meta])* $table:ident { $($name:ident)* })*) => {$(
        $(#[$attribute])*
        #[allow(non_snake_case, reason = "names of the driver")]
        pub(super) struct $table {
            $(pub(super) $name: Address,)*
        }

        impl $table {
            /// Looks the functions up.
            ///
            /// # Errors
            /// Returns the name of the first missing function.
            pub(super) fn load(library: &Library) -> Result<Self, &'static str> {
                let find = |name| {
                    // SAFETY: the function is called with its own type only, and the library is
                    // never closed.
                    unsafe { library.get::<Address>(name) }.map(|function| *function).map_err(|_| name)
                };
                Ok(Self { $($name: find(stringify!($name))?,)* })
            }

            #[allow(dead_code, reason = "[`Functions`] has owners with this method")]
            pub(super) fn functions(&self) -> &Self {
                self
            }
        }
    )*};
}

tables! {
    /// Functions of every driver that this crate supports.
    Functions {
        cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString
        cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDeviceGetUuid
        cuDeviceCanAccessPeer cuDeviceGetPCIBusId
        cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2
        cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetCurrent cuCtxGetDevice cuCtxEnablePeerAccess
        cuCtxGetStreamPriorityRange
        cuPointerGetAttributes cuMemGetAddressRange_v2 cuMemGetInfo_v2
        cuMemAlloc_v2 cuMemFree_v2 cuMemHostAlloc cuMemFreeHost cuMemcpyAsync cuMemsetD8Async
        cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamQuery cuStreamSynchronize
        cuStreamGetCtx cuStreamIsCapturing
        cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize
        cuLaunchHostFunc
        cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
    }

    /// Waits of streams for words of memory, which older drivers lack.
    StreamWaits { cuStreamWaitValue32_v2 }

    /// Batches of copies, which older drivers lack.
    CopyBatches { cuMemcpyBatchAsync }

    /// Exports as dma-buf, which older drivers lack.
    RangeHandles { cuMemGetHandleForAddressRange }

    /// Virtual memory management, which older drivers lack.
    VirtualMemory {
        cuMemCreate cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap
        cuMemSetAccess cuMemGetAllocationGranularity cuMemExportToShareableHandle
        cuMemImportFromShareableHandle cuMemRetainAllocationHandle
        cuMemGetAllocationPropertiesFromHandle
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_missing_function_is_named() {
        // The test program contains no function of the driver.
        let library = Library::this();
        assert_eq!(Functions::load(&library).err(), Some("cuInit"));
        assert_eq!(VirtualMemory::load(&library).err(), Some("cuMemCreate"));
    }
}
