//! [`Transport`] over files.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::{Rng, SharedClock, SystemClock};
use mooncake_core::memory::{MemorySpan, shared_pages};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::device::not_host_memory;
use mooncake_transport::{Access, Capabilities, Completion, Op, Protocol, SegmentDesc, Transport};
use parking_lot::Mutex;

use crate::config::DiskConfig;
use crate::file::BlockFile;
use crate::file_ranges::{RangeRegistration, RangeTable, RangeUse};
use crate::io::{self, RunningEngine};
use crate::queue::{Job, Queue, SharedFile, closed_error, deadline_error};
use crate::segment::{DiskSegment, OpenSegment};
use crate::stats::DiskStats;

/// Key in descriptors of a node of this process.
const NODE: &str = "disk_node";

static NODES: Mutex<Vec<Weak<Node>>> = Mutex::new(Vec::new());
static NEXT_NODE_ID: AtomicU64 = AtomicU64::new(0);

/// Transport to files of this process, which are read and written like the memory of a peer.
///
/// The files of a node are reached by the node and by other nodes of the same process: a file has
/// one owner, and other processes request its bytes from the owner. Calls may come from any thread
/// and need no runtime.
pub struct DiskTransport {
    node: Arc<Node>,
    queue: Arc<Queue>,
    engine: RunningEngine,
    config: DiskConfig,
    clock: SharedClock,
}

/// State of a transport that other nodes see.
struct Node {
    name: String,
    is_open: AtomicBool,
    ranges: Arc<RangeTable<SharedFile>>,
    config: DiskConfig,
    /// Open files by device and inode, so that all partial writes to a file are coordinated.
    files: Mutex<HashMap<(u64, u64), Weak<SharedFile>>>,
}

/// Connection to the files of one node.
#[derive(Clone)]
pub struct DiskPeer {
    node: Arc<Node>,
}

/// Memory that this transport may use.
#[derive(Debug)]
pub struct Registration {
    _range: Option<RangeRegistration<SharedFile>>,
}

impl DiskTransport {
    /// Starts the threads of the engine.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` when the configuration cannot work, and `Unsupported` when the required
    /// engine is missing.
    pub fn start(config: DiskConfig) -> Result<Self> {
        Self::start_with_clock(config, SystemClock::shared())
    }

    /// Starts the transport with a clock for the deadlines of completions.
    pub fn start_with_clock(config: DiskConfig, clock: SharedClock) -> Result<Self> {
        config.check()?;
        let (queue, engine) =
            io::start(&config, |event| Queue::new(event, clock.clone(), config.faults.clone()))?;
        let id = NEXT_NODE_ID.fetch_add(1, Ordering::Relaxed);
        let node = Arc::new(Node {
            // The name has a random part, so that a node of another process is never taken for one
            // of this process.
            name: format!("{}-{id}-{:016x}", std::process::id(), Rng::from_os().next_u64()),
            is_open: AtomicBool::new(true),
            ranges: Arc::default(),
            config: config.clone(),
            files: Mutex::default(),
        });
        let mut nodes = NODES.lock();
        nodes.retain(|node| node.strong_count() != 0);
        nodes.push(Arc::downgrade(&node));
        drop(nodes);
        Ok(Self { node, queue, engine, config, clock })
    }

    /// Returns the running engine.
    pub fn engine(&self) -> RunningEngine {
        self.engine
    }

    /// Returns the clock of the deadlines.
    pub fn clock(&self) -> &SharedClock {
        &self.clock
    }

    /// Opens a file or block device as a segment of this node.
    ///
    /// # Errors
    ///
    /// The message names the file and the reason. Returns `Invalid` when a device is too short.
    pub fn open(&self, open: &OpenSegment) -> Result<DiskSegment> {
        let len = (!open.grows).then_some(open.len);
        let direct = self.config.direct && !open.grows;
        let file = SharedFile::new(BlockFile::open(&open.path, len, direct)?);
        Ok(DiskSegment { range: self.node.ranges.register_anywhere(open.len, file)? })
    }

    /// Returns the connection to the files of this node.
    pub fn own_peer(&self) -> DiskPeer {
        DiskPeer { node: self.node.clone() }
    }

    /// Returns the statistics of reads and writes.
    pub fn stats(&self) -> DiskStats {
        self.queue.counters.stats()
    }

    /// Returns the time for which requests to the disk have been pending without a completion.
    pub fn stalled_for(&self) -> Duration {
        self.queue.stalled_for()
    }

    /// Makes the node unreachable for good, for its peers and for itself. Does not wait for
    /// requests in the kernel.
    pub fn stop(&self) {
        self.node.is_open.store(false, Ordering::SeqCst);
        self.queue.close();
    }
}

impl Drop for DiskTransport {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for DiskTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskTransport").field("node", &self.node.name).field("engine", &self.engine).finish()
    }
}

impl fmt::Debug for DiskPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiskPeer({})", self.node.name)
    }
}

impl Node {
    /// Opens the file behind shared memory, bypassing the page cache if configured.
    fn file_of(&self, file: &std::fs::File) -> Result<Arc<SharedFile>> {
        use std::os::fd::AsRawFd;
        let metadata = file.metadata().map_err(Error::from)?;
        let id = (metadata.dev(), metadata.ino());
        let mut files = self.files.lock();
        files.retain(|_, file| file.strong_count() != 0);
        if let Some(file) = files.get(&id).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let plain = file.try_clone().map_err(Error::from)?;
        let file = SharedFile::new(BlockFile::from_open(plain, &path, self.config.direct)?);
        files.insert(id, Arc::downgrade(&file));
        Ok(file)
    }
}

// SAFETY: only a `Run` touches local bytes. It holds the share of the completion, or has parked it
// while neither the kernel nor the run uses the bytes. Remote bytes are bytes of files in ranges
// that are registered and held.
unsafe impl Transport for DiskTransport {
    type Registration = Registration;
    type Peer = DiskPeer;

    fn protocol(&self) -> Protocol {
        Protocol::DISK
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Registers memory. For peers, only memory that maps a file ([`shared_pages`]) is possible:
    /// they access the file directly. Other memory returns `Invalid`.
    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registration> {
        if span.location.is_device() {
            return Err(not_host_memory(span));
        }
        if access == Access::Local {
            return Ok(Registration { _range: None });
        }
        let pages = shared_pages(span).filter(|_| !span.read_only).ok_or_else(|| {
            Error::invalid(format!(
                "cannot open memory to peers: it maps no file. len={} address={:#x}",
                span.len,
                span.addr()
            ))
        })?;
        let file = self.node.file_of(pages.file())?;
        let offset = pages.offset_of(span.addr());
        let range = self.node.ranges.register(span.addr(), span.len as u64, file, offset)?;
        Ok(Registration { _range: Some(range) })
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.protocols.push(Protocol::DISK);
        desc.extra.insert(NODE.into(), self.node.name.clone().into());
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<DiskPeer> {
        let name = desc.extra.get(NODE).and_then(|name| name.as_str());
        let name = name.ok_or_else(|| {
            Error::invalid(format!(
                "cannot connect to segment {:?}: it is not on a disk (no {NODE:?})",
                desc.name
            ))
        })?;
        let nodes: Vec<_> = NODES.lock().iter().filter_map(Weak::upgrade).collect();
        let node = nodes.into_iter().find(|node| node.name == name && node.is_open.load(Ordering::SeqCst));
        node.map(|node| DiskPeer { node }).ok_or_else(|| {
            Error::new(
                ErrorCode::TransferFail,
                format!("cannot connect to disk {name}: it is not open in this process"),
            )
        })
    }

    fn submit<'a, I>(&self, peer: &DiskPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
    {
        let mut jobs = 0;
        for (op, share) in ops.zip(done.each()) {
            match self.check(peer, &op, &share) {
                Err(error) => share.finish(Err(error)),
                Ok((used, start)) => jobs += self.post(&op, used, start, share),
            }
        }
        if jobs != 0 {
            self.queue.wake(jobs);
        }
    }
}

impl DiskTransport {
    fn check(
        &self,
        peer: &DiskPeer,
        op: &Op<'_, Registration>,
        share: &Completion,
    ) -> Result<(RangeUse<SharedFile>, u64)> {
        if !peer.node.is_open.load(Ordering::SeqCst) {
            return Err(closed_error());
        }
        if self.queue.is_expired(share.deadline()) {
            return Err(deadline_error());
        }
        if op.local().location.is_device() {
            // `ThroughHost` handles such memory.
            return Err(not_host_memory(op.local()));
        }
        peer.node.ranges.find(op.remote(), op.len() as u64)
    }

    /// Splits an operation at the boundaries of file pieces, so that all jobs but the first and
    /// last are whole blocks.
    fn post(
        &self,
        op: &Op<'_, Registration>,
        used: RangeUse<SharedFile>,
        start: u64,
        share: Completion,
    ) -> usize {
        let piece = self.config.piece_bytes as u64;
        let (mut share, mut at, mut jobs) = (Some(share), 0, 0);
        while at < op.len() {
            let from = start + at as u64;
            let bytes_to_boundary = usize::try_from(piece - from % piece).unwrap_or(usize::MAX);
            let len = bytes_to_boundary.min(op.len() - at);
            // SAFETY: inside the bytes of the operation.
            let ptr = unsafe { op.ptr().add(at) };
            at += len;
            // The last piece takes the share of the operation.
            let piece_share =
                if at == op.len() { share.take() } else { share.as_mut().map(Completion::share) };
            let Some(piece_share) = piece_share else { break };
            let key = match self.queue.enter(piece_share) {
                Ok(key) => key,
                Err(piece_share) => {
                    piece_share.finish(Err(closed_error()));
                    continue;
                }
            };
            let local = MemorySpan { ptr, len, ..op.local() };
            let (queue, opcode, used) = (self.queue.clone(), op.opcode(), used.clone());
            let job = Job { queue, key, opcode, used, start: from, local, claim: None };
            if let Some(job) = job.file().clone().admit(job) {
                self.queue.push(job);
                jobs += 1;
            }
        }
        jobs
    }
}
