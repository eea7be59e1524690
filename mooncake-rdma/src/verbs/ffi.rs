//! Binary interface of libibverbs, as far as it is used here: layouts, numbers, function types.
//! Written for 64-bit little-endian Linux, where the two checked processors agree.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Device known to the library.
#[repr(C)]
pub(crate) struct Device {
    pub(super) _opaque: [u8; 0],
}

/// Opened device. Only the beginning of the structure; the rest is private to the library.
#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) completion_vectors: c_int,
}

/// Calls of the data path, which go directly to the driver of the device.
#[repr(C)]
pub(crate) struct ContextOps {
    pub(super) _unused_1: [*mut c_void; 11],
    pub(crate) poll_cq:
        Option<unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int>,
    pub(super) _unused_2: [*mut c_void; 12],
    pub(crate) post_send:
        Option<unsafe extern "C" fn(*mut QueuePair, *mut SendRequest, *mut *mut SendRequest) -> c_int>,
    pub(super) _unused_3: [*mut c_void; 6],
}

/// Limits of a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceAttr {
    pub(super) _versions: [u8; 80],
    pub(crate) max_mr_size: u64,
    pub(super) _pages: [u32; 5],
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(super) _capabilities: c_uint,
    pub(crate) max_sge: c_int,
    pub(super) _max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(super) _max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(super) _more_1: [c_int; 2],
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(super) _more_2: [u8; 67],
    pub(crate) ports: u8,
    pub(super) _end: [u8; 4],
}

/// State and limits of a port.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(super) _max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gids: c_int,
    pub(super) _capabilities: u32,
    pub(crate) max_msg_sz: u32,
    pub(super) _counters: [u32; 2],
    pub(super) _pkeys: u16,
    pub(crate) lid: u16,
    pub(super) _subnet: [u8; 8],
    pub(super) _speed: [u8; 2],
    pub(crate) link_layer: u8,
    pub(super) _flags: u8,
    pub(super) _more: [u16; 2],
}

/// GID, aligned like the union of the library.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct RawGid(pub(crate) [u8; 16]);

/// GID of a port.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct GidEntry {
    pub(crate) gid: RawGid,
    pub(crate) index: u32,
    pub(crate) port: u32,
    pub(crate) kind: u32,
    pub(crate) interface: u32,
}

/// Protection domain.
#[repr(C)]
pub(crate) struct Domain {
    pub(super) _opaque: [u8; 0],
}

/// Registered memory.
#[repr(C)]
pub(crate) struct MemoryRegion {
    pub(super) _context: *mut Context,
    pub(super) _domain: *mut Domain,
    pub(super) _addr: *mut c_void,
    pub(super) _length: usize,
    pub(super) _handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// Channel that reports completions.
#[repr(C)]
pub(crate) struct Channel {
    pub(super) _context: *mut Context,
    pub(crate) fd: c_int,
    pub(super) _references: c_int,
}

/// Completion queue. Only the beginning of the structure.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub(crate) context: *mut Context,
    pub(super) _channel: *mut Channel,
    pub(super) _user: *mut c_void,
    pub(super) _handle: u32,
    pub(crate) cqe: c_int,
}

/// Queue pair. Only the beginning of the structure.
#[repr(C)]
pub(crate) struct QueuePair {
    pub(crate) context: *mut Context,
    pub(super) _user: *mut c_void,
    pub(super) _domain: *mut Domain,
    pub(super) _queues: [*mut c_void; 3],
    pub(super) _handle: u32,
    pub(crate) number: u32,
}

/// Sizes of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// Attributes of a new queue pair.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) user: *mut c_void,
    pub(crate) send_cq: *mut CompletionQueue,
    pub(crate) recv_cq: *mut CompletionQueue,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) kind: c_uint,
    pub(crate) signal_all: c_int,
}

/// Global part of a path.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: RawGid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// Path to a peer.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(super) _path_bits: u8,
    pub(super) _static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port: u8,
}

/// Attributes of a changed queue pair.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpAttr {
    pub(crate) state: c_uint,
    pub(super) _cur_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(super) _migration: c_uint,
    pub(super) _qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) access: c_uint,
    pub(super) _cap: QpCap,
    pub(crate) ah: AhAttr,
    pub(super) _alt_ah: AhAttr,
    pub(crate) pkey_index: u16,
    pub(super) _alt_pkey_index: u16,
    pub(super) _sqd: [u8; 2],
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(super) _alt: [u8; 2],
    pub(super) _rate_limit: u32,
}

/// Range of registered memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// Request of a send queue, with the variant for one-sided operations of the C union.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendRequest {
    pub(crate) id: u64,
    pub(crate) next: *mut SendRequest,
    pub(crate) sges: *mut Sge,
    pub(crate) sge_count: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) flags: c_uint,
    pub(super) _immediate: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(super) _rest: [u64; 9],
}

impl SendRequest {
    pub(crate) const EMPTY: SendRequest = SendRequest {
        id: 0,
        next: std::ptr::null_mut(),
        sges: std::ptr::null_mut(),
        sge_count: 0,
        opcode: 0,
        flags: 0,
        _immediate: 0,
        remote_addr: 0,
        rkey: 0,
        _rest: [0; 9],
    };
}

/// Completion of a request.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct WorkCompletion {
    pub(crate) id: u64,
    pub(crate) status: c_uint,
    pub(super) _opcode: c_uint,
    pub(crate) vendor: u32,
    pub(super) _byte_len: u32,
    pub(super) _immediate: u32,
    pub(super) _numbers: [u32; 2],
    pub(super) _flags: c_uint,
    pub(super) _end: [u16; 4],
}

/// Event of a device.
#[repr(C)]
pub(crate) struct AsyncEvent {
    /// Number of a port, or a pointer, depending on `kind`.
    pub(crate) element: u64,
    pub(crate) kind: c_uint,
}

macro_rules! layout {
    ($($type:ident: $size:literal $({ $($field:ident @ $offset:literal),* })?;)*) => {
        #[cfg(all(target_endian = "little", target_pointer_width = "64"))]
        const _: () = {
            $(assert!(size_of::<$type>() == $size);
            $($(assert!(std::mem::offset_of!($type, $field) == $offset);)*)?)*
        };
    };
}

// The numbers are those that a C compiler computes from the headers of the library.
layout! {
    ContextOps: 256 { poll_cq @ 88, req_notify_cq @ 96, post_send @ 200 };
    Context: 280 { ops @ 8, cmd_fd @ 264, async_fd @ 268, completion_vectors @ 272 };
    DeviceAttr: 232 {
        max_mr_size @ 80, max_qp @ 108, max_qp_wr @ 112, max_sge @ 120, max_cq @ 128, max_cqe @ 132, max_mr @ 136,
        max_qp_rd_atom @ 144, max_qp_init_rd_atom @ 156, ports @ 227
    };
    PortAttr: 52 { active_mtu @ 8, gids @ 12, max_msg_sz @ 20, lid @ 34, link_layer @ 46 };
    GidEntry: 32 { index @ 16, port @ 20, kind @ 24, interface @ 28 };
    MemoryRegion: 48 { lkey @ 36, rkey @ 40 };
    Channel: 16 { fd @ 8 };
    CompletionQueue: 32 { context @ 0, cqe @ 28 };
    QueuePair: 56 { context @ 0, number @ 52 };
    QpCap: 20;
    QpInitAttr: 64 { send_cq @ 8, recv_cq @ 16, cap @ 32, kind @ 52, signal_all @ 56 };
    GlobalRoute: 24;
    AhAttr: 32 { dlid @ 24, sl @ 26, is_global @ 29, port @ 30 };
    QpAttr: 144 {
        path_mtu @ 8, rq_psn @ 20, sq_psn @ 24, dest_qp_num @ 28, access @ 32, ah @ 56, pkey_index @ 120, max_rd_atomic @ 126,
        max_dest_rd_atomic @ 127, min_rnr_timer @ 128, port @ 129, timeout @ 130, retry_cnt @ 131, rnr_retry @ 132
    };
    Sge: 16;
    SendRequest: 128 { sges @ 16, opcode @ 28, flags @ 32, remote_addr @ 40, rkey @ 48 };
    WorkCompletion: 48 { status @ 8, vendor @ 16 };
    AsyncEvent: 16 { kind @ 8 };
}

pub(crate) const ACCESS_LOCAL_WRITE: c_uint = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_uint = 2;
pub(crate) const ACCESS_REMOTE_READ: c_uint = 4;
pub(crate) const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

pub(crate) const QP_TYPE_RC: c_uint = 2;
pub(crate) const STATE_INIT: c_uint = 1;
pub(crate) const STATE_RTR: c_uint = 2;
pub(crate) const STATE_RTS: c_uint = 3;
pub(crate) const STATE_ERR: c_uint = 6;

pub(crate) const ATTR_STATE: c_int = 1;
pub(crate) const ATTR_ACCESS: c_int = 1 << 3;
pub(crate) const ATTR_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const ATTR_PORT: c_int = 1 << 5;
pub(crate) const ATTR_AV: c_int = 1 << 7;
pub(crate) const ATTR_PATH_MTU: c_int = 1 << 8;
pub(crate) const ATTR_TIMEOUT: c_int = 1 << 9;
pub(crate) const ATTR_RETRY_CNT: c_int = 1 << 10;
pub(crate) const ATTR_RNR_RETRY: c_int = 1 << 11;
pub(crate) const ATTR_RQ_PSN: c_int = 1 << 12;
pub(crate) const ATTR_MAX_RD_ATOMIC: c_int = 1 << 13;
pub(crate) const ATTR_MIN_RNR_TIMER: c_int = 1 << 15;
pub(crate) const ATTR_SQ_PSN: c_int = 1 << 16;
pub(crate) const ATTR_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(crate) const ATTR_DEST_QPN: c_int = 1 << 20;

pub(crate) const OP_WRITE: c_uint = 0;
pub(crate) const OP_READ: c_uint = 4;
pub(crate) const SEND_SIGNALED: c_uint = 2;

pub(crate) const PORT_ACTIVE: c_uint = 4;
pub(crate) const LINK_INFINIBAND: u8 = 1;

/// Declares the used functions, with their exported names and versions.
macro_rules! functions {
    ($($(#[$optional:ident])? $field:ident = $name:literal @ $version:literal: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// Function pointers into the loaded library.
        pub(crate) struct Functions {
            $(pub(crate) $field: functions!(@type $($optional)? unsafe extern "C" fn($($arg),*) -> $ret),)*
        }

        #[cfg(test)]
        impl Functions {
            /// Creates a table of functions that panic, for tests, which replace those that they
            /// need.
            pub(crate) fn none() -> Self {
                Self {
                    $($field: {
                        unsafe extern "C" fn none($(_: $arg),*) -> $ret {
                            unreachable!("the fake library has no {:?}", $name)
                        }
                        functions!(@none $($optional)? none)
                    },)*
                }
            }
        }

        impl Functions {
            /// Looks all functions up by name and version with `find`.
            ///
            /// # Errors
            ///
            /// Returns the name of a missing function.
            ///
            /// # Safety
            /// `find` returns the address of that function of libibverbs, which is never unloaded.
            pub(crate) unsafe fn load(
                find: impl Fn(&'static std::ffi::CStr, &'static std::ffi::CStr) -> Option<std::ptr::NonNull<c_void>>,
            ) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let address = find($name, $version);
                        // SAFETY: promised by the caller; function pointers are as wide as data
                        // pointers, and null is not among them.
                        let function = address.map(|address| unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(address.as_ptr())
                        });
                        functions!(@need $($optional)? function, $name)
                    },)*
                })
            }
        }
    };
    (@none optional $none:ident) => { { let _ = $none; None } };
    (@none $none:ident) => { $none };
    (@type optional $type:ty) => { Option<$type> };
    (@type $type:ty) => { $type };
    (@need optional $found:ident, $name:literal) => { $found };
    (@need $found:ident, $name:literal) => { $found.ok_or_else(|| format!("it has no {:?}", $name))? };
}

functions! {
    get_device_list = c"ibv_get_device_list" @ c"IBVERBS_1.1": fn(*mut c_int) -> *mut *mut Device;
    free_device_list = c"ibv_free_device_list" @ c"IBVERBS_1.1": fn(*mut *mut Device) -> ();
    get_device_name = c"ibv_get_device_name" @ c"IBVERBS_1.1": fn(*mut Device) -> *const c_char;
    open_device = c"ibv_open_device" @ c"IBVERBS_1.1": fn(*mut Device) -> *mut Context;
    close_device = c"ibv_close_device" @ c"IBVERBS_1.1": fn(*mut Context) -> c_int;
    query_device = c"ibv_query_device" @ c"IBVERBS_1.1": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = c"ibv_query_port" @ c"IBVERBS_1.1": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid = c"ibv_query_gid" @ c"IBVERBS_1.1": fn(*mut Context, u8, c_int, *mut RawGid) -> c_int;
    #[optional] query_gid_table = c"_ibv_query_gid_table" @ c"IBVERBS_1.11": fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    alloc_pd = c"ibv_alloc_pd" @ c"IBVERBS_1.1": fn(*mut Context) -> *mut Domain;
    dealloc_pd = c"ibv_dealloc_pd" @ c"IBVERBS_1.1": fn(*mut Domain) -> c_int;
    reg_mr = c"ibv_reg_mr" @ c"IBVERBS_1.1": fn(*mut Domain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
    #[optional] reg_mr_iova2 = c"ibv_reg_mr_iova2" @ c"IBVERBS_1.8": fn(*mut Domain, *mut c_void, usize, u64, c_uint) -> *mut MemoryRegion;
    #[optional] reg_dmabuf_mr = c"ibv_reg_dmabuf_mr" @ c"IBVERBS_1.12": fn(*mut Domain, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;
    dereg_mr = c"ibv_dereg_mr" @ c"IBVERBS_1.1": fn(*mut MemoryRegion) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel" @ c"IBVERBS_1.0": fn(*mut Context) -> *mut Channel;
    destroy_comp_channel = c"ibv_destroy_comp_channel" @ c"IBVERBS_1.0": fn(*mut Channel) -> c_int;
    create_cq = c"ibv_create_cq" @ c"IBVERBS_1.1": fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut CompletionQueue;
    destroy_cq = c"ibv_destroy_cq" @ c"IBVERBS_1.1": fn(*mut CompletionQueue) -> c_int;
    get_cq_event = c"ibv_get_cq_event" @ c"IBVERBS_1.1": fn(*mut Channel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events" @ c"IBVERBS_1.1": fn(*mut CompletionQueue, c_uint) -> ();
    create_qp = c"ibv_create_qp" @ c"IBVERBS_1.1": fn(*mut Domain, *mut QpInitAttr) -> *mut QueuePair;
    modify_qp = c"ibv_modify_qp" @ c"IBVERBS_1.1": fn(*mut QueuePair, *mut QpAttr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp" @ c"IBVERBS_1.1": fn(*mut QueuePair) -> c_int;
    get_async_event = c"ibv_get_async_event" @ c"IBVERBS_1.1": fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event = c"ibv_ack_async_event" @ c"IBVERBS_1.1": fn(*mut AsyncEvent) -> ();
}
