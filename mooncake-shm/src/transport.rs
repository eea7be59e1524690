//! [`Transport`] by copies in shared memory.

use std::fmt;
use std::sync::Arc;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::{MemorySpan, shared_pages};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::{Endpoint, Limits, Links, Owner};
use mooncake_transport::config::ShmConfig;
use mooncake_transport::fallback::{PartialTransport, is_any_error};
use mooncake_transport::{Access, Capabilities, Completion, Op, Opcode, Protocol, SegmentDesc, Transport};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::copy::{Copy, CopyThreads, Link, Outcome, not_registered_error, owner_ended_error};
use crate::pages::{MappedFile, Pages, Registration};

/// Key of this project in descriptors: the host by the id of its boot, and the name of the socket.
/// Other peers ignore it.
const ENDPOINT: &str = "shm_endpoint";

/// Node that shares memory with other nodes on its host.
///
/// Tasks run on the runtime given to [`ShmTransport::start`]; calls may come from any thread.
/// Dropping the transport closes its socket, and peers see the node as dead.
pub struct ShmTransport {
    config: ShmConfig,
    clock: SharedClock,
    runtime: Handle,
    owner: Arc<Owner<Pages>>,
    /// Endpoint of this node, published under [`ENDPOINT`].
    endpoint: Endpoint,
    links: Arc<Links<MappedFile>>,
    copy_threads: CopyThreads,
    tasks: [JoinHandle<()>; 3],
}

/// Connection to one owner. Clones share it.
#[derive(Clone)]
pub struct ShmPeer {
    link: Arc<Link>,
}

impl ShmPeer {
    /// Returns the number of bytes of the owner's memory that are mapped here, or zero once the
    /// owner is known to be dead.
    pub fn mapped_bytes(&self) -> u64 {
        self.link.mapped().bytes()
    }
}

impl ShmTransport {
    /// Opens the socket and serves it on `runtime`.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` when the configuration cannot work, and another error where the system has
    /// no such sockets or no boot id.
    pub fn start(config: ShmConfig, runtime: &Handle) -> Result<Self> {
        Self::start_with_clock(config, runtime, SystemClock::shared())
    }

    /// Starts the transport with a clock for the deadlines of completions.
    pub fn start_with_clock(config: ShmConfig, runtime: &Handle, clock: SharedClock) -> Result<Self> {
        config.check()?;
        let owner =
            Owner::new(Limits { drain_timeout: config.drain_timeout, max_served: config.max_served })?;
        let links = Links::new(runtime, config.response_timeout);
        let _guard = runtime.enter();
        let (listener, name) = mooncake_ipc::listen("shm")?;
        let endpoint = Endpoint::here(name)?;
        let tasks = [
            runtime.spawn(mooncake_ipc::serve(owner.clone(), listener, config.response_timeout)),
            runtime.spawn(Owner::detach_stalled_regularly(Arc::downgrade(&owner), config.stall_timeout)),
            runtime.spawn(links.clone().maintain(config.upkeep_interval)),
        ];
        Ok(Self {
            endpoint,
            copy_threads: CopyThreads::new(config.copy_threads, clock.clone()),
            config,
            clock,
            runtime: runtime.clone(),
            owner,
            links,
            tasks,
        })
    }

    /// Splits a long copy between the copying threads and, as far as possible, this one.
    fn copy_in_pieces(&self, copy: Copy, share: Completion, inline: &mut usize) {
        let piece = self.config.piece_bytes;
        let inline_len = if piece <= *inline { piece } else { 0 };
        let len = copy.local.len;
        let mut parent_share = Some(share);
        let shares = (inline_len..len).step_by(piece).filter_map(|from| {
            // If this thread copies nothing, the last piece takes the share of the whole.
            let last = inline_len == 0 && len - from <= piece;
            let share = if last { parent_share.take() } else { parent_share.as_mut().map(Completion::share) };
            // SAFETY: `from` is less than the length.
            Some((unsafe { copy.part(from, piece) }, share?))
        });
        // SAFETY: as for the copy as a whole; each piece has a share.
        unsafe { self.copy_threads.queue(shares) };
        let Some(share) = parent_share else { return };
        *inline -= inline_len;
        // SAFETY: not empty, and the share of the whole covers this piece.
        let outcome = unsafe { copy.part(0, inline_len).run(share.deadline(), &self.clock) };
        share.finish(copy.to_result(outcome));
    }
}

// SAFETY: remote bytes are touched through mappings that stay (`copy`), only while the owner counts
// this node inside an open region (`link`, `owner`). The registration of an owner ends when no node
// is inside, or the memory has been detached from those inside. Local bytes are touched inside
// `submit`, and by pieces that hold a share of their own.
unsafe impl Transport for ShmTransport {
    type Registration = Registration;
    type Peer = ShmPeer;

    fn protocol(&self) -> Protocol {
        Protocol::SHM
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default().shared_memory(true)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registration> {
        span.check()?;
        let pages = if access == Access::Remote && !span.read_only { shared_pages(span) } else { None };
        Ok(Registration::new(pages.and_then(|pages| self.owner.open(span, Pages(pages)))))
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        // Older peers read only one protocol, so beside another transport only the key announces
        // this one.
        if desc.protocols.is_empty() {
            desc.protocols.push(Protocol::SHM);
        }
        desc.extra.insert(ENDPOINT.into(), self.endpoint.to_string().into());
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        endpoint(desc).is_some_and(|target| target.same_host(&self.endpoint))
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<ShmPeer> {
        let target = endpoint(desc).ok_or_else(|| {
            Error::invalid(format!(
                "cannot connect to segment {:?}: its memory is not shared (no {ENDPOINT:?})",
                desc.name
            ))
        })?;
        if !target.same_host(&self.endpoint) {
            return Err(Error::new(
                ErrorCode::NotSupported,
                format!(
                    "cannot connect to segment {:?}: it is on another host, or from before the last boot",
                    desc.name
                ),
            ));
        }
        Ok(ShmPeer { link: self.links.to(target.socket()).await? })
    }

    fn is_connected(&self, peer: &ShmPeer) -> bool {
        peer.link.is_alive()
    }

    fn submit<'a, I>(&self, peer: &ShmPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
    {
        let mut deferred = Vec::new();
        self.submit_or(peer, ops, done, |op, share| {
            if !peer.link.is_alive() {
                share.finish(Err(owner_ended_error()));
            } else if op.local().location.is_device() {
                share.finish(Err(Error::invalid(format!(
                    "invalid transfer: local memory is not host memory. location={}",
                    op.local().location
                ))));
            } else if op.is_empty() {
                share.finish(Err(not_registered_error(op.remote(), op.len())));
            } else {
                // The refreshed list of regions may contain this range.
                deferred.push(DeferredOperation {
                    opcode: op.opcode(),
                    local: op.local(),
                    remote: op.remote(),
                    share,
                });
            }
        });
        if !deferred.is_empty() {
            let (link, clock) = (peer.link.clone(), self.clock.clone());
            self.runtime.spawn(after_refresh(link, deferred, clock));
        }
    }
}

/// The faster transport beside TCP: it does not carry operations if the owner of the memory is
/// gone, or if the remote range is not shared memory.
impl PartialTransport for ShmTransport {
    const IS_RETRYABLE: fn(&Error) -> bool = is_any_error;

    fn clock(&self) -> &SharedClock {
        &self.clock
    }

    fn inline_bytes(&self) -> usize {
        self.config.inline_bytes
    }

    fn submit_or<'a, I, F>(&self, peer: &ShmPeer, ops: I, done: Completion, mut missed: F)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
        F: FnMut(Op<'a, Registration>, Completion),
    {
        let link = &peer.link;
        let mapped = link.is_alive().then(|| link.mapped());
        let deadline = done.deadline();
        let (mut inline, mut any_missed) = (self.config.inline_bytes, false);
        for (op, share) in ops.zip(done.each()) {
            let region = mapped.as_ref().filter(|_| !op.local().location.is_device());
            let Some(region) = region.and_then(|mapped| mapped.find(op.remote(), op.len() as u64)) else {
                any_missed = true;
                missed(op, share);
                continue;
            };
            let copy = Copy {
                link: link.clone(),
                region: region.clone(),
                opcode: op.opcode(),
                local: op.local(),
                remote: op.remote(),
            };
            if op.len() <= inline {
                inline -= op.len();
                // SAFETY: `find` saw the range in the region; the maker of the operation promises
                // the local bytes until the share is completed.
                match unsafe { copy.run(deadline, &self.clock) } {
                    Outcome::Closed => {
                        any_missed = true;
                        missed(op, share);
                    }
                    outcome => share.finish(copy.to_result(outcome)),
                }
            } else {
                self.copy_in_pieces(copy, share, &mut inline);
            }
        }
        if any_missed && mapped.is_some() && link.is_stale() {
            self.runtime.spawn(link.clone().refresh_in_background());
        }
    }
}

/// Operation that waits for the refreshed list of the owner's regions.
struct DeferredOperation {
    opcode: Opcode,
    local: MemorySpan,
    remote: u64,
    share: Completion,
}

async fn after_refresh(link: Arc<Link>, ops: Vec<DeferredOperation>, clock: SharedClock) {
    let refreshed = link.refresh().await.is_ok();
    let mapped = link.mapped();
    for DeferredOperation { opcode, local, remote, share } in ops {
        let region = mapped.find(remote, local.len as u64).cloned();
        let result = match region {
            _ if !refreshed => Err(owner_ended_error()),
            None => Err(not_registered_error(remote, local.len)),
            Some(region) => {
                let copy = Copy { link: link.clone(), region, opcode, local, remote };
                // SAFETY: `find` saw the range in the region; the local bytes are promised until
                // the share is completed.
                copy.to_result(unsafe { copy.run(share.deadline(), &clock) })
            }
        };
        share.finish(result);
    }
}

/// Returns the endpoint that a descriptor names.
fn endpoint(desc: &SegmentDesc) -> Option<Endpoint> {
    Endpoint::parse(desc.extra.get(ENDPOINT)?.as_str()?)
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl fmt::Debug for ShmTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmTransport").field("endpoint", &self.endpoint.to_string()).finish_non_exhaustive()
    }
}

impl fmt::Debug for ShmPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShmPeer(alive: {})", self.link.is_alive())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use mooncake_core::ErrorKind;
    use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
    use mooncake_transport::testkit::write_when_begun;
    use mooncake_transport::transfer::{self, Transfer};
    use mooncake_transport::{BufferDesc, Region};
    use tokio::runtime::Runtime;

    use super::*;
    use crate::copy::MappedRegion;

    const LEN: usize = 3 * 4096;

    struct Pair {
        owner: ShmTransport,
        user: ShmTransport,
        runtime: Runtime,
    }

    fn pair() -> Pair {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let config = ShmConfig {
            drain_timeout: Duration::from_millis(50),
            // The tests run the turns of the check.
            stall_timeout: Duration::from_secs(3600),
            ..ShmConfig::default()
        };
        let start = || ShmTransport::start(config.clone(), runtime.handle()).unwrap();
        Pair { owner: start(), user: start(), runtime }
    }

    impl Pair {
        fn open(&self, memory: &Arc<HostMemory>) -> Region<ShmTransport> {
            Region::register(&self.owner, memory.clone(), Access::Remote).unwrap()
        }

        fn connect(&self) -> ShmPeer {
            let mut desc = SegmentDesc::new("owner");
            desc.buffers.push(BufferDesc::default());
            self.owner.describe(&mut desc);
            self.runtime.block_on(self.user.connect(&desc)).unwrap()
        }

        fn write(&self, peer: &ShmPeer, at: u64, byte: u8) -> Result<()> {
            let deadline = Some(self.user.clock.now().after(Duration::from_secs(20)));
            transfer::write(&self.user, peer, [Transfer::new(at, vec![byte; 64])], deadline).wait().0
        }
    }

    fn shared() -> Arc<HostMemory> {
        let options = HostMemoryOptions { shared: Some("t".into()), ..Default::default() };
        Arc::new(HostMemory::with(LEN, &options).unwrap())
    }

    fn byte(memory: &HostMemory, at: usize) -> u8 {
        // SAFETY: in range; volatile, because others may write it.
        unsafe { memory.span().ptr.add(at).read_volatile() }
    }

    /// Writes to the first byte of a region through the mapping of the peer, whatever state the
    /// owner has.
    fn scribble(region: &MappedRegion, value: u8) {
        // SAFETY: the mapping is held.
        unsafe { region.mapping().0.span().ptr.write_volatile(value) }
    }

    #[test]
    fn a_peer_that_stays_inside_is_detached_when_the_region_is_closed() {
        let pair = pair();
        let memory = shared();
        let region = pair.open(&memory);
        let peer = pair.connect();
        pair.write(&peer, region.addr(), 1).unwrap();
        let mapped = peer.link.mapped().find(region.addr(), 1).unwrap().clone();
        let inside = Link::enter(&*peer.link, &mapped).unwrap();
        scribble(&mapped, 2);
        drop(region);
        scribble(&mapped, 3);
        assert_eq!((byte(&memory, 0), byte(&memory, 1)), (2, 1), "the late write does not reach the memory");
        assert!(!inside.leave(), "the peer learns that the region was closed");
        assert_eq!(pair.write(&peer, memory.span().addr(), 4).unwrap_err().kind(), ErrorKind::Invalid);
        let again = pair.open(&memory);
        assert!(!again.registration().unwrap().is_reachable(), "the memory is detached from the file");
    }

    #[test]
    fn closing_waits_for_peers_inside() {
        let pair = pair();
        let memory = shared();
        let region = pair.open(&memory);
        let peer = pair.connect();
        let mapped = peer.link.mapped().find(region.addr(), 1).unwrap().clone();
        let (entered, is_inside) = channel();
        std::thread::scope(|scope| {
            let link = &peer.link;
            scope.spawn(move || {
                let inside = Link::enter(&**link, &mapped).unwrap();
                entered.send(()).unwrap();
                while !link.is_stale() {
                    std::thread::yield_now();
                }
                scribble(&mapped, 9);
                inside.leave()
            });
            is_inside.recv().unwrap();
            drop(region);
            assert_eq!(byte(&memory, 0), 9, "the last write came before the region was closed");
        });
        assert!(pair.open(&memory).registration().unwrap().is_reachable(), "no memory had to be detached");
    }

    #[test]
    fn a_peer_stopped_in_a_copy_loses_the_memory() {
        let pair = pair();
        let memory = shared();
        let region = pair.open(&memory);
        let peer = pair.connect();
        pair.write(&peer, region.addr(), 1).unwrap();
        let mapped = peer.link.mapped().find(region.addr(), 1).unwrap().clone();
        let owner = pair.owner.owner.clone();
        // A peer that enters and leaves is not affected.
        for _ in 0..3 {
            owner.detach_stalled();
            pair.write(&peer, region.addr(), 2).unwrap();
        }
        let inside = Link::enter(&*peer.link, &mapped).unwrap();
        owner.detach_stalled();
        assert!(region.registration().unwrap().is_reachable(), "the peer entered after the previous turn");
        owner.detach_stalled();
        assert!(!region.registration().unwrap().is_reachable());
        scribble(&mapped, 3);
        assert_eq!(byte(&memory, 0), 2, "the late write does not reach the memory");
        assert!(!inside.leave());
        assert_eq!(pair.write(&peer, region.addr(), 4).unwrap_err().kind(), ErrorKind::Invalid);
        owner.detach_stalled();
        drop(region);
    }

    #[test]
    fn memory_opened_later_is_found() {
        let pair = pair();
        let first = pair.open(&shared());
        let peer = pair.connect();
        let second = pair.open(&shared());
        pair.write(&peer, second.addr(), 7).unwrap();
        pair.write(&peer, first.addr(), 7).unwrap();
        let private = Arc::new(HostMemory::new(LEN).unwrap());
        let private = Region::register(&pair.owner, private, Access::Remote).unwrap();
        assert!(!private.registration().unwrap().is_reachable());
        assert_eq!(pair.write(&peer, private.addr(), 7).unwrap_err().kind(), ErrorKind::Invalid);
    }

    /// The peer refreshes the list of regions in the middle of the submission.
    #[test]
    fn memory_announced_in_the_middle_of_a_submission_is_found() {
        let pair = pair();
        let _first = pair.open(&shared());
        let peer = pair.connect();
        let mut second = None;
        let result = write_when_begun(&pair.user, &peer, vec![7; 64], || {
            let region = second.insert(pair.open(&shared()));
            pair.connect();
            assert!(!peer.link.is_stale());
            region.addr()
        });
        result.unwrap();
    }

    #[test]
    fn two_regions_never_share_a_page() {
        let pair = pair();
        let memory = shared();
        let part = |from, len| {
            // SAFETY: inside the memory, which outlives the registration.
            unsafe {
                let span = MemorySpan::new(memory.span().ptr.add(from), len);
                pair.owner.register(span, Access::Remote).unwrap()
            }
        };
        let first = part(0, 4097);
        let (second, third) = (part(4097, 100), part(8192, 100));
        assert!(first.is_reachable() && !second.is_reachable() && third.is_reachable());
        drop(first);
        assert!(part(4097, 100).is_reachable());
    }
}
