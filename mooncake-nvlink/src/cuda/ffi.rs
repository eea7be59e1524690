//! Used part of the CUDA driver API: types and numbers from its documentation, and the table of its
//! functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

pub(crate) type Status = c_uint;
pub(crate) type Device = c_int;
pub(crate) type Ptr = u64;
pub(crate) type Context = *mut c_void;
pub(crate) type Stream = *mut c_void;
pub(crate) type Event = *mut c_void;
pub(crate) type Handle = c_ulonglong;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const NOT_INITIALIZED: Status = 3;
pub(crate) const NO_DEVICE: Status = 100;
pub(crate) const INVALID_HANDLE: Status = 400;
pub(crate) const NOT_READY: Status = 600;
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Status = 704;
pub(crate) const NOT_SUPPORTED: Status = 801;

/// Stream that waits for all other streams of its context that do not opt out, and the stream of
/// the calling thread.
pub(crate) const LEGACY_STREAM: usize = 1;

pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const HOST_ALLOC_PORTABLE: c_uint = 1;
pub(crate) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
pub(crate) const WAIT_VALUE_GEQ: c_uint = 0;
/// Flag of a wait: the work after the wait sees what others wrote to the device before the word was
/// set.
pub(crate) const WAIT_VALUE_FLUSH: c_uint = 1 << 30;

/// Attributes of a device.
pub(crate) const FLUSH_SUPPORTED: c_int = 98;
pub(crate) const VIRTUAL_MEMORY_SUPPORTED: c_int = 102;
pub(crate) const RDMA_WITH_VMM_SUPPORTED: c_int = 110;
pub(crate) const DMA_BUF_SUPPORTED: c_int = 124;
pub(crate) const FABRIC_HANDLE_SUPPORTED: c_int = 128;

/// Attributes of a pointer.
pub(crate) const POINTER_MEMORY_TYPE: c_int = 2;
pub(crate) const POINTER_BUFFER_ID: c_int = 7;
pub(crate) const POINTER_IS_MANAGED: c_int = 8;
pub(crate) const POINTER_DEVICE_ORDINAL: c_int = 9;
pub(crate) const POINTER_RANGE_START: c_int = 11;
pub(crate) const POINTER_RANGE_SIZE: c_int = 12;
/// Memory type of a pointer to device memory.
pub(crate) const MEMORY_TYPE_DEVICE: c_uint = 2;

/// Constants for memory of `cuMemCreate`.
pub(crate) const ALLOCATION_PINNED: c_int = 1;
pub(crate) const LOCATION_DEVICE: c_int = 1;
pub(crate) const HANDLE_FABRIC: c_int = 8;
pub(crate) const GRANULARITY_MINIMUM: c_int = 0;
pub(crate) const ACCESS_READ_WRITE: c_int = 3;

/// Type of a range handle that is the descriptor of a dma-buf.
pub(crate) const HANDLE_DMA_BUF: c_int = 1;

/// Source order of a batch of copies whose sources are read in stream order.
pub(crate) const SOURCE_IN_STREAM_ORDER: c_uint = 1;

/// Size of the handle by which another process opens an allocation; both kinds of handle have it.
pub(crate) const HANDLE_BYTES: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; HANDLE_BYTES]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AllocationFlags {
    pub(crate) compression: u8,
    pub(crate) gpu_direct_rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProperties {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) windows: *mut c_void,
    pub(crate) flags: AllocationFlags,
}

impl Default for AllocationProperties {
    fn default() -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location: Location::default(),
            windows: std::ptr::null_mut(),
            flags: AllocationFlags::default(),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AccessDescription {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CopyAttributes {
    pub(crate) source_order: c_uint,
    pub(crate) source: Location,
    pub(crate) destination: Location,
    pub(crate) flags: c_uint,
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<CopyAttributes>() == 24);

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Declares the table: each function by the name that the library exports. Functions of newer
/// drivers may be missing.
macro_rules! functions {
    (needed { $($name:ident = $symbol:literal ($($arg:ty),*);)* } optional { $($opt:ident = $opt_symbol:literal ($($opt_arg:ty),*);)* }) => {
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> Status,)*
            $(pub(crate) $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> Status>,)*
        }

        impl Functions {
            /// Looks the functions up with `find`.
            ///
            /// # Errors
            ///
            /// Returns the name of the first missing function.
            ///
            /// # Safety
            /// `find` returns the function of the driver API with that name, which stays loaded for
            /// good.
            pub(crate) unsafe fn load(find: impl Fn(&CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let found = find($symbol);
                        if found.is_null() {
                            return Err($symbol.to_str().unwrap_or("a function"));
                        }
                        // SAFETY: promised by the caller.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> Status>(found) }
                    },)*
                    $($opt: {
                        let found = find($opt_symbol);
                        // SAFETY: promised by the caller; a null pointer is `None`.
                        unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($opt_arg),*) -> Status>>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    needed {
    init = c"cuInit" (c_uint);
    driver_version = c"cuDriverGetVersion" (*mut c_int);
    error_name = c"cuGetErrorName" (Status, *mut *const c_char);
    error_text = c"cuGetErrorString" (Status, *mut *const c_char);
    device_count = c"cuDeviceGetCount" (*mut c_int);
    device = c"cuDeviceGet" (*mut Device, c_int);
    device_name = c"cuDeviceGetName" (*mut c_char, c_int, Device);
    device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, Device);
    device_uuid = c"cuDeviceGetUuid" (*mut [u8; 16], Device);
    device_can_access_peer = c"cuDeviceCanAccessPeer" (*mut c_int, Device, Device);
    device_pci_address = c"cuDeviceGetPCIBusId" (*mut c_char, c_int, Device);
    primary_state = c"cuDevicePrimaryCtxGetState" (Device, *mut c_uint, *mut c_int);
    primary_retain = c"cuDevicePrimaryCtxRetain" (*mut Context, Device);
    primary_release = c"cuDevicePrimaryCtxRelease_v2" (Device);
    context_push = c"cuCtxPushCurrent_v2" (Context);
    context_pop = c"cuCtxPopCurrent_v2" (*mut Context);
    context_current = c"cuCtxGetCurrent" (*mut Context);
    context_device = c"cuCtxGetDevice" (*mut Device);
    context_enable_peer = c"cuCtxEnablePeerAccess" (Context, c_uint);
    pointer_attributes = c"cuPointerGetAttributes" (c_uint, *const c_int, *const *mut c_void, Ptr);
    address_range = c"cuMemGetAddressRange_v2" (*mut Ptr, *mut usize, Ptr);
    memory_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    alloc = c"cuMemAlloc_v2" (*mut Ptr, usize);
    free = c"cuMemFree_v2" (Ptr);
    host_alloc = c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free = c"cuMemFreeHost" (*mut c_void);
    copy_async = c"cuMemcpyAsync" (Ptr, Ptr, usize, Stream);
    set_async = c"cuMemsetD8Async" (Ptr, u8, usize, Stream);
    stream_create = c"cuStreamCreateWithPriority" (*mut Stream, c_uint, c_int);
    stream_priorities = c"cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    stream_destroy = c"cuStreamDestroy_v2" (Stream);
    stream_query = c"cuStreamQuery" (Stream);
    stream_synchronize = c"cuStreamSynchronize" (Stream);
    stream_context = c"cuStreamGetCtx" (Stream, *mut Context);
    stream_is_capturing = c"cuStreamIsCapturing" (Stream, *mut c_int);
    event_create = c"cuEventCreate" (*mut Event, c_uint);
    event_destroy = c"cuEventDestroy_v2" (Event);
    event_record = c"cuEventRecord" (Event, Stream);
    event_query = c"cuEventQuery" (Event);
    event_synchronize = c"cuEventSynchronize" (Event);
    launch_host_function = c"cuLaunchHostFunc" (Stream, HostFunction, *mut c_void);
    ipc_export = c"cuIpcGetMemHandle" (*mut IpcHandle, Ptr);
    ipc_open = c"cuIpcOpenMemHandle_v2" (*mut Ptr, IpcHandle, c_uint);
    ipc_close = c"cuIpcCloseMemHandle" (Ptr);
    }
    optional {
    stream_wait_value = c"cuStreamWaitValue32_v2" (Stream, Ptr, u32, c_uint);
    copy_batch = c"cuMemcpyBatchAsync" (*mut Ptr, *mut Ptr, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut usize, Stream);
    create = c"cuMemCreate" (*mut Handle, usize, *const AllocationProperties, c_ulonglong);
    release = c"cuMemRelease" (Handle);
    reserve = c"cuMemAddressReserve" (*mut Ptr, usize, usize, Ptr, c_ulonglong);
    unreserve = c"cuMemAddressFree" (Ptr, usize);
    map = c"cuMemMap" (Ptr, usize, usize, Handle, c_ulonglong);
    unmap = c"cuMemUnmap" (Ptr, usize);
    set_access = c"cuMemSetAccess" (Ptr, usize, *const AccessDescription, usize);
    granularity = c"cuMemGetAllocationGranularity" (*mut usize, *const AllocationProperties, c_int);
    shareable_export = c"cuMemExportToShareableHandle" (*mut c_void, Handle, c_int, c_ulonglong);
    shareable_import = c"cuMemImportFromShareableHandle" (*mut Handle, *mut c_void, c_int);
    handle_of = c"cuMemRetainAllocationHandle" (*mut Handle, *mut c_void);
    range_handle = c"cuMemGetHandleForAddressRange" (*mut c_void, Ptr, usize, c_int, c_ulonglong);
    properties_of = c"cuMemGetAllocationPropertiesFromHandle" (*mut AllocationProperties, Handle);
    }
}
