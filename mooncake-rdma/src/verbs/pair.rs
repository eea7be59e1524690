//! Reliable connected queue pairs, and what is posted to them.

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

/// One end of a reliable connection.
pub struct QueuePair {
    raw: NonNull<ffi::QueuePair>,
    domain: Arc<Domain>,
    _queue: Arc<CompletionQueue>,
    destroyed: bool,
    _counted: Counted,
}

// SAFETY: libibverbs locks what it must.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// Room in a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Requests it holds.
    pub requests: u32,
    /// Ranges of memory per request.
    pub ranges: u32,
    /// Bytes that may travel inside a request.
    pub inline_bytes: u32,
}

/// The way to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Our port.
    pub port: u8,
    /// Index of the port's key.
    pub pkey_index: u16,
    /// Index of our global address.
    pub own_gid: u8,
    /// The other end's global address.
    pub gid: Ipv6Addr,
    /// The other end's local address, on InfiniBand.
    pub lid: u16,
    /// Largest packet, as the interface numbers them.
    pub mtu: u32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
}

/// Patience and parallelism of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long an answer may take: 4.096 µs times two to this power, at most 31.
    pub timeout: u8,
    /// How often a packet without an answer is sent again, at most 6: Soft-RoCE takes 7 for "for ever".
    pub retries: u8,
    /// Reads under way at once, as the asking side.
    pub reads: u8,
    /// Reads served at once.
    pub served_reads: u8,
}

/// The interface's number for "for ever".
const RECEIVER_RETRIES: u8 = 7;
/// 0.64 ms, as the existing system has it.
const MIN_RNR_TIMER: u8 = 12;
const HOP_LIMIT: u8 = 16;

impl QueuePair {
    /// A pair whose requests report to `queue`. It can be posted to when it is [connected](Self::connect).
    pub fn new(domain: &Arc<Domain>, queue: &Arc<CompletionQueue>, sizes: QueueSizes) -> Result<Self> {
        let mut attr = ffi::QpInitAttr {
            user: ptr::null_mut(),
            send_cq: queue.raw.as_ptr(),
            recv_cq: queue.raw.as_ptr(),
            srq: ptr::null_mut(),
            cap: ffi::QpCap {
                max_send_wr: sizes.requests,
                // Nothing is ever received; some drivers refuse none.
                max_recv_wr: 1,
                max_send_sge: sizes.ranges,
                max_recv_sge: 1,
                max_inline_data: sizes.inline_bytes,
            },
            kind: ffi::QP_TYPE_RC,
            signal_all: 0,
        };
        // SAFETY: domain and queue are alive and kept; the structure is as the library expects it.
        let raw = unsafe { (domain.device.calls.create_qp)(domain.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            last_error(format_args!("making a queue pair on RDMA device {:?}", domain.device.name()))
        })?;
        let counted = Counted::one(&PAIRS);
        Ok(Self { raw, domain: domain.clone(), _queue: queue.clone(), destroyed: false, _counted: counted })
    }

    /// Destroys it now. After `Ok` the device touches nothing for it any more; after an error it still may, and the pair comes back, to be
    /// destroyed another time.
    pub fn destroy(mut self) -> Result<(), (Self, Error)> {
        self.give_back().map_err(|error| (self, error))
    }

    fn give_back(&mut self) -> Result<()> {
        // SAFETY: made by us; not asked for again once it worked, and after a refusal the library still has the pair.
        let code = unsafe { (self.domain.device.calls.destroy_qp)(self.raw.as_ptr()) };
        check(code, format_args!("destroying a queue pair of RDMA device {:?}", self.domain.device.name()))?;
        self.destroyed = true;
        Ok(())
    }

    /// Its number, by which the other end names it.
    pub fn number(&self) -> u32 {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw.as_ptr()).number }
    }

    /// Connects it to a pair of the other end. It may take as long as finding the way there; a fault names the step.
    pub fn connect(&self, path: &Path, number: u32, timing: Timing) -> Result<()> {
        if timing.retries > MAX_RETRIES {
            return Err(Error::invalid(format!(
                "{} retries; more than {MAX_RETRIES} may mean for ever",
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
        self.modify(init, mask, "preparing")?;
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
        let found = self.modify(receive, mask, "finding the route of");
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
        self.modify(send, mask, "opening")
    }

    /// Ends the connection: every request that is not over comes out of the queue as [flushed](super::Status::Flushed), or done if it was.
    pub fn fail(&self) -> Result<()> {
        self.modify(QpAttr { state: ffi::STATE_ERR, ..QpAttr::default() }, ffi::ATTR_STATE, "closing")
    }

    fn modify(&self, mut attr: QpAttr, mask: i32, what: &str) -> Result<()> {
        let device = &self.domain.device;
        // SAFETY: the pair is alive; the structure is as the library expects it.
        let code = unsafe { (device.calls.modify_qp)(self.raw.as_ptr(), &raw mut attr, mask) };
        check(code, format_args!("{what} queue pair {} of RDMA device {:?}", self.number(), device.name()))
    }

    /// Posts all requests with one ring of the doorbell. On failure says how many were taken; the rest was not.
    ///
    /// # Safety
    /// Until a request has come out of the completion queue, or the pair is gone: its local bytes stay allocated and registered in
    /// this pair's domain; those of a read are touched by nobody else, those of a write are written by nobody.
    pub unsafe fn post(&self, posting: &mut Posting) -> Result<(), (usize, Error)> {
        let Some(first) = posting.link() else { return Ok(()) };
        // SAFETY: the context outlives the pair; its table is filled before the device is handed out.
        let post = unsafe { (*self.domain.device.raw.as_ptr()).ops.post_send };
        let mut bad = ptr::null_mut();
        let code = match post {
            // SAFETY: a list of requests that ends in null and stays where it is during the call; what it names the caller vouches for.
            Some(post) => unsafe { post(self.raw.as_ptr(), first, &raw mut bad) },
            None => libc::ENOSYS,
        };
        check(code, "posting requests").map_err(|error| (posting.position(bad), error))
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
            && let Err(error) = self.give_back()
        {
            tracing::error!(%error, "what was posted to it may be under way still");
        }
    }
}

/// Requests to be posted together. Keeps its room.
#[derive(Default)]
pub struct Posting {
    requests: Vec<SendRequest>,
    ranges: Vec<Sge>,
}

// SAFETY: the pointers in it lead nowhere but to its own vectors, and are made anew for each posting.
unsafe impl Send for Posting {}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it is known by when it completes.
    pub id: u64,
    /// Which way.
    pub opcode: Opcode,
    /// First local byte.
    pub local: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the local memory.
    pub local_key: u32,
    /// First byte at the other end.
    pub remote: u64,
    /// Key of the other end's memory.
    pub remote_key: u32,
    /// Whether it comes out of the completion queue when all is well. One that fails does in any case.
    pub signalled: bool,
}

impl Posting {
    /// Room for that many requests.
    pub fn with_capacity(n: usize) -> Self {
        Self { requests: Vec::with_capacity(n), ranges: Vec::with_capacity(n) }
    }

    /// Adds one.
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

    /// Empties it.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.ranges.clear();
    }

    fn link(&mut self) -> Option<*mut SendRequest> {
        let (first, len) = (self.requests.as_mut_ptr(), self.requests.len());
        for (i, request) in self.requests.iter_mut().enumerate() {
            request.sges = &raw mut self.ranges[i];
            // Inside the vector, or null behind the last.
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
