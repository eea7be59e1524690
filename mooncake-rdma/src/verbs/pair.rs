//! Reliable connected queue pairs, and their requests.

use std::fmt;
use std::net::Ipv6Addr;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use mooncake_core::{Error, Reason, Result};
use mooncake_transport::Opcode;
use mooncake_transport::config::MAX_RETRIES;

use super::ffi::{self, QpAttr, SendRequest, Sge};
use super::memory::Domain;
use super::queue::CompletionQueue;
use super::{Counted, PAIRS, check, last_error};

/// Local end of a reliable connection.
pub struct QueuePair {
    raw: NonNull<ffi::QueuePair>,
    domain: Arc<Domain>,
    _queue: Arc<CompletionQueue>,
    destroyed: bool,
    _counted: Counted,
}

// SAFETY: libibverbs does its own locking.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// Capacity of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Number of requests.
    pub requests: u32,
    /// Number of memory ranges per request.
    pub ranges: u32,
    /// Number of bytes inside a request.
    pub inline_bytes: u32,
}

/// Path to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Number of the local port.
    pub port: u8,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Index of the local GID.
    pub own_gid: u8,
    /// GID of the other end.
    pub gid: Ipv6Addr,
    /// Local address (LID) of the other end, on InfiniBand.
    pub lid: u16,
    /// Largest packet, as a number of the verbs interface.
    pub mtu: u32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
}

/// Timeouts and parallelism of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Timeout of an acknowledgement: 4.096 µs times two to this power, at most 31.
    pub timeout: u8,
    /// Number of retransmissions of a packet, at most 6: Soft-RoCE takes 7 as "for ever".
    pub retries: u8,
    /// Number of reads in flight that this side requests.
    pub reads: u8,
    /// Number of reads that this side serves at once.
    pub served_reads: u8,
}

/// Number of the verbs interface for "for ever".
const RECEIVER_RETRIES: u8 = 7;
/// Timer of 0.64 ms, as in Mooncake C++.
const MIN_RNR_TIMER: u8 = 12;
const HOP_LIMIT: u8 = 16;

impl QueuePair {
    /// Creates a pair whose requests report to `queue`. Requests can be posted once the pair is
    /// [connected](Self::connect).
    pub fn new(domain: &Arc<Domain>, queue: &Arc<CompletionQueue>, sizes: QueueSizes) -> Result<Self> {
        let mut attr = ffi::QpInitAttr {
            user: ptr::null_mut(),
            send_cq: queue.raw.as_ptr(),
            recv_cq: queue.raw.as_ptr(),
            srq: ptr::null_mut(),
            cap: ffi::QpCap {
                max_send_wr: sizes.requests,
                // Nothing is ever received; some drivers refuse a queue of length zero.
                max_recv_wr: 1,
                max_send_sge: sizes.ranges,
                max_recv_sge: 1,
                max_inline_data: sizes.inline_bytes,
            },
            kind: ffi::QP_TYPE_RC,
            signal_all: 0,
        };
        // SAFETY: domain and queue are alive and kept; the structure has the layout of the library.
        let raw = unsafe { (domain.device.calls.create_qp)(domain.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            last_error(format_args!("cannot create queue pair on RDMA device {:?}", domain.device.name()))
        })?;
        let counted = Counted::one(&PAIRS);
        Ok(Self { raw, domain: domain.clone(), _queue: queue.clone(), destroyed: false, _counted: counted })
    }

    /// Destroys the pair now. After `Ok` the device touches no memory for it any more. After an
    /// error the device still may, and the pair is returned for another attempt.
    pub fn destroy(mut self) -> Result<(), (Self, Error)> {
        self.destroy_once().map_err(|error| (self, error))
    }

    fn destroy_once(&mut self) -> Result<()> {
        // SAFETY: created by `new`; not repeated after a success, and after a refusal the library
        // still has the pair.
        let code = unsafe { (self.domain.device.calls.destroy_qp)(self.raw.as_ptr()) };
        check(
            code,
            format_args!("cannot destroy queue pair of RDMA device {:?}", self.domain.device.name()),
        )?;
        self.destroyed = true;
        Ok(())
    }

    /// Returns the number by which the other end refers to the pair.
    pub fn number(&self) -> u32 {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw.as_ptr()).number }
    }

    /// Connects the pair to a pair of the other end. Blocks as long as the route lookup takes.
    ///
    /// # Errors
    ///
    /// The message names the failed step.
    pub fn connect(&self, path: &Path, number: u32, timing: Timing) -> Result<()> {
        if timing.retries > MAX_RETRIES {
            return Err(Error::invalid(format!(
                "invalid number of retries {}: more than {MAX_RETRIES} may mean for ever",
                timing.retries
            )));
        }
        let init = QpAttr {
            state: ffi::STATE_INIT,
            pkey_index: path.pkey_index,
            port: path.port,
            access: ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ,
            ..QpAttr::default()
        };
        let mask = ffi::ATTR_STATE | ffi::ATTR_PKEY_INDEX | ffi::ATTR_PORT | ffi::ATTR_ACCESS;
        self.modify(init, mask, "cannot prepare")?;
        let receive = QpAttr {
            state: ffi::STATE_RTR,
            path_mtu: path.mtu,
            dest_qp_num: number,
            rq_psn: 0,
            max_dest_rd_atomic: timing.served_reads,
            min_rnr_timer: MIN_RNR_TIMER,
            ah: ffi::AhAttr {
                grh: ffi::GlobalRoute {
                    dgid: ffi::RawGid(path.gid.octets()),
                    flow_label: 0,
                    sgid_index: path.own_gid,
                    hop_limit: HOP_LIMIT,
                    traffic_class: path.traffic_class,
                },
                dlid: path.lid,
                sl: path.service_level,
                is_global: 1,
                port: path.port,
                ..ffi::AhAttr::default()
            },
            ..QpAttr::default()
        };
        let mask = ffi::ATTR_STATE
            | ffi::ATTR_AV
            | ffi::ATTR_PATH_MTU
            | ffi::ATTR_DEST_QPN
            | ffi::ATTR_RQ_PSN
            | ffi::ATTR_MAX_DEST_RD_ATOMIC
            | ffi::ATTR_MIN_RNR_TIMER;
        // The device looks up the route of the address in this step.
        let found = self.modify(receive, mask, "cannot find a route for");
        found.map_err(|error| error.with_reason(Reason::RouteLookup))?;
        let send = QpAttr {
            state: ffi::STATE_RTS,
            timeout: timing.timeout,
            retry_cnt: timing.retries,
            rnr_retry: RECEIVER_RETRIES,
            sq_psn: 0,
            max_rd_atomic: timing.reads,
            ..QpAttr::default()
        };
        let mask = ffi::ATTR_STATE
            | ffi::ATTR_TIMEOUT
            | ffi::ATTR_RETRY_CNT
            | ffi::ATTR_RNR_RETRY
            | ffi::ATTR_SQ_PSN
            | ffi::ATTR_MAX_RD_ATOMIC;
        self.modify(send, mask, "cannot open")
    }

    /// Ends the connection. The queue returns every pending request as
    /// [flushed](super::Status::Flushed), or as done if it was complete.
    pub fn fail(&self) -> Result<()> {
        self.modify(QpAttr { state: ffi::STATE_ERR, ..QpAttr::default() }, ffi::ATTR_STATE, "cannot close")
    }

    fn modify(&self, mut attr: QpAttr, mask: i32, what: &str) -> Result<()> {
        let device = &self.domain.device;
        // SAFETY: the pair is alive; the structure has the layout of the library.
        let code = unsafe { (device.calls.modify_qp)(self.raw.as_ptr(), &raw mut attr, mask) };
        check(code, format_args!("{what} queue pair {} of RDMA device {:?}", self.number(), device.name()))
    }

    /// Posts all requests with one ring of the doorbell.
    ///
    /// # Errors
    ///
    /// Returns how many requests were accepted; the rest was not.
    ///
    /// # Safety
    /// Until a request has left the completion queue, or the pair is destroyed: its local bytes
    /// stay allocated and registered in the domain of this pair; no other code touches those of a
    /// read, and no code writes those of a write.
    pub unsafe fn post(&self, posting: &mut Posting) -> Result<(), (usize, Error)> {
        let Some(first) = posting.link() else { return Ok(()) };
        // SAFETY: the context outlives the pair; its table is filled in before the device is
        // returned.
        let post = unsafe { (*self.domain.device.raw.as_ptr()).ops.post_send };
        let mut bad = ptr::null_mut();
        let code = match post {
            // SAFETY: a list of requests that ends in null and does not move during the call; the
            // caller promises the bytes that it names.
            Some(post) => unsafe { post(self.raw.as_ptr(), first, &raw mut bad) },
            None => libc::ENOSYS,
        };
        check(code, "cannot post requests").map_err(|error| (posting.position(bad), error))
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({}, {})", self.domain.device.name(), self.number())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.destroyed
            && let Err(error) = self.destroy_once()
        {
            tracing::error!(%error, "cannot destroy queue pair; its requests may still be in flight");
        }
    }
}

/// Requests to be posted together. Keeps its allocation.
#[derive(Default)]
pub struct Posting {
    requests: Vec<SendRequest>,
    ranges: Vec<Sge>,
}

// SAFETY: its pointers refer only to its own vectors, and are computed again for each posting.
unsafe impl Send for Posting {}

/// Request to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Id of the completion.
    pub id: u64,
    /// Direction of the transfer.
    pub opcode: Opcode,
    /// Address of the first local byte.
    pub local: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the local memory.
    pub local_key: u32,
    /// Address of the first byte at the other end.
    pub remote: u64,
    /// Key of the other end's memory.
    pub remote_key: u32,
    /// True if the request reports a success to the completion queue. A failed request always
    /// reports.
    pub signalled: bool,
}

impl Posting {
    /// Creates a list with capacity for that many requests.
    pub fn with_capacity(n: usize) -> Self {
        Self { requests: Vec::with_capacity(n), ranges: Vec::with_capacity(n) }
    }

    /// Adds a request.
    pub fn push(&mut self, request: Request) {
        self.ranges.push(Sge { addr: request.local, length: request.len, lkey: request.local_key });
        self.requests.push(SendRequest {
            id: request.id,
            sge_count: 1,
            opcode: match request.opcode {
                Opcode::Read => ffi::OP_READ,
                Opcode::Write => ffi::OP_WRITE,
            },
            flags: if request.signalled { ffi::SEND_SIGNALED } else { 0 },
            remote_addr: request.remote,
            rkey: request.remote_key,
            ..SendRequest::EMPTY
        });
    }

    /// Removes all requests.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.ranges.clear();
    }

    fn link(&mut self) -> Option<*mut SendRequest> {
        let (first, len) = (self.requests.as_mut_ptr(), self.requests.len());
        for (i, request) in self.requests.iter_mut().enumerate() {
            request.sges = &raw mut self.ranges[i];
            // The address is inside the vector, or null behind the last request.
            request.next = if i + 1 < len { first.wrapping_add(i + 1) } else { ptr::null_mut() };
        }
        (len != 0).then_some(first)
    }

    fn position(&self, request: *const SendRequest) -> usize {
        let (first, at) = (self.requests.as_ptr().addr(), request.addr());
        (at.saturating_sub(first) / size_of::<SendRequest>()).min(self.requests.len())
    }
}

impl fmt::Debug for Posting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Posting({})", self.requests.len())
    }
}
