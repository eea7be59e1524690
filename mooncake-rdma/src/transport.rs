//! [`Transport`] over RDMA verbs.

use std::cell::RefCell;
use std::fmt;
use std::net::Ipv6Addr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use async_trait::async_trait;
use mooncake_core::clock::{Moment, SystemClock};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result, SharedClock};
use mooncake_transport::config::RdmaConfig;
use mooncake_transport::fallback::{PartialTransport, is_path_error};
use mooncake_transport::handshake::{AcceptConnection, ConnectionDescriptor};
use mooncake_transport::statistics::NicLoad;
use mooncake_transport::{Access, Capabilities, Completion, Op, Protocol, SegmentDesc, Transport};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use crate::endpoint::{Peer, Piece, RdmaPeer, Registered, deadline_error};
use crate::gid;
use crate::message::INSTANCE_KEY;
use crate::node::{Node, PiecesByRail};
use crate::peer::PeerDescriptor;
use crate::poller;
use crate::registration::{self, Registration};
use crate::slices::SliceLengths;
use crate::topology;
use crate::verbs::Domain;

/// RDMA devices of a node, and its connections to the devices of peers.
///
/// Each device has a thread of its own. Connections are set up on the runtime given to
/// [`start`](Self::start). Peers connect through a handshake port; its owner passes their requests
/// to [`accept`](mooncake_transport::handshake::AcceptConnection::accept). Dropping the transport
/// fails transfers in progress.
pub struct RdmaTransport {
    pub(crate) node: Arc<Node>,
    domains: Vec<Arc<Domain>>,
    threads: Vec<JoinHandle<()>>,
}

/// Device in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicInfo {
    /// Name of the device.
    pub name: String,
    /// GID in use.
    pub gid: Ipv6Addr,
    /// Index of the GID in the table of the port.
    pub gid_index: u8,
    /// True if the port is active.
    pub up: bool,
    /// NUMA node, if known.
    pub node: Option<u32>,
    /// Longest message in bytes.
    pub message_bytes: usize,
    /// Number of connections, those that are being destroyed included.
    pub connections: usize,
}

thread_local! {
    // Lists for splitting submissions, kept from one submission to the next.
    static PIECE_LISTS: RefCell<PiecesByRail> = const { RefCell::new(Vec::new()) };
}

impl RdmaTransport {
    /// Opens the devices.
    ///
    /// # Errors
    ///
    /// Returns `Unsupported` without the library or a usable device, with the reason, and `Invalid`
    /// for a configuration that cannot work.
    pub fn start(config: RdmaConfig, runtime: &Handle) -> Result<Self> {
        Self::start_with_clock(config, runtime, SystemClock::shared())
    }

    /// Opens the devices with a clock for the deadlines of completions. The clock has to run at the
    /// speed of the machine.
    pub fn start_with_clock(config: RdmaConfig, runtime: &Handle, clock: SharedClock) -> Result<Self> {
        let node = Node::open(config, runtime, clock)?;
        let domains = node.nics.iter().map(|nic| nic.domain.clone()).collect();
        let mut transport = Self { node, domains, threads: Vec::new() };
        for nic in &transport.node.nics {
            let (node, nic) = (transport.node.clone(), nic.clone());
            let thread = std::thread::Builder::new().name(format!("rdma-{}", nic.name));
            let thread = thread.spawn(move || poller::run(&node, &nic)).map_err(Error::from)?;
            transport.threads.push(thread);
        }
        Ok(transport)
    }

    /// Returns the devices in use.
    pub fn devices(&self) -> Vec<NicInfo> {
        let info = |nic: &Arc<crate::endpoint::Nic>| NicInfo {
            name: nic.name.clone(),
            gid: nic.gid().addr,
            gid_index: nic.gid().index,
            up: nic.is_up(),
            node: nic.node,
            message_bytes: nic.max_message_bytes(),
            connections: nic.endpoints.read().len(),
        };
        self.node.nics.iter().map(info).collect()
    }

    /// Returns the load of each device.
    pub fn loads(&self) -> Vec<NicLoad> {
        let now = self.node.clock.now();
        let load = |nic: &Arc<crate::endpoint::Nic>| NicLoad {
            device_name: nic.name.clone(),
            in_flight_bytes: nic.endpoints.read().values().map(|endpoint| endpoint.bytes()).sum(),
            bytes_per_second: nic.throughput.mean_at(now),
        };
        self.node.nics.iter().map(load).collect()
    }

    /// Closes every connection, refuses handshakes and sends nothing any more. Transfers in
    /// progress fail.
    pub fn close(&self) {
        self.node.close();
    }

    /// Returns whether a local device is up.
    pub fn has_active_device(&self) -> bool {
        self.node.nics.iter().any(|nic| nic.is_up())
    }

    /// Ends waiting messages when the caller cancels them, if the caller can cancel. Returns the
    /// flag that reports the cancellation.
    fn watch_cancellation(&self, peer: &RdmaPeer, done: &Completion) -> Option<Arc<AtomicBool>> {
        let mut cancelled = None;
        done.on_cancel(|| {
            let flag = cancelled.insert(Arc::new(AtomicBool::new(false))).clone();
            let (node, peer) = (Arc::downgrade(&self.node), Arc::downgrade(&peer.shared));
            move || {
                flag.store(true, Ordering::SeqCst);
                if let (Some(node), Some(peer)) = (node.upgrade(), peer.upgrade()) {
                    node.finish_cancelled(&peer);
                }
            }
        });
        cancelled
    }

    fn split(
        &self,
        peer: &RdmaPeer,
        op: &Op<'_, Registration>,
        done: Completion,
        plan: &SubmissionPlan,
        lists: &mut PiecesByRail,
    ) {
        let checked = self.check(op).and_then(|registration| {
            Ok((registration, peer.shared.descriptor.region(op.remote(), op.len())?))
        });
        let (registration, region) = match checked {
            Ok(found) => found,
            Err(error) => return done.finish(Err(error)),
        };
        let config = &self.node.config;
        let Some(first) =
            self.node.choose(&peer.shared, registration.node, None, plan.now, plan.round_robin, None)
        else {
            return done.finish(Err(no_device()));
        };
        let nics = &self.node.nics;
        let lengths = SliceLengths {
            slice: config.slice_bytes,
            fragment: config.fragment_bytes,
            max_message_bytes: plan.max_message_bytes,
        };
        let (local, remote, descriptor) = (op.local().addr(), op.remote(), &peer.shared.descriptor);
        let bytes_to_part_end = |at: usize| {
            registration
                .bytes_to_part_end(local + at as u64)
                .min(descriptor.bytes_to_part_end(region, remote + at as u64))
        };
        // Long operations are spread over all devices that are as near as the best one, in
        // stretches of equal length.
        let spread = op.len() >= config.stripe_bytes && nics.len() > 1;
        let is_as_near = |nic: &crate::endpoint::Nic| nic.is_up() && (nic.node == nics[first.local].node);
        let stripes = if spread { nics.iter().filter(|nic| is_as_near(nic)).count().max(1) } else { 1 };
        let per_stripe = if stripes > 1 {
            lengths.pieces(op.len(), bytes_to_part_end).count().div_ceil(stripes)
        } else {
            usize::MAX
        };
        let mut candidate = first;
        let mut stripe_nics =
            nics.iter().filter(|nic| is_as_near(nic)).cycle().skip(plan.round_robin % stripes);
        let mut done = Some(done);
        let mut pieces = lengths.pieces(op.len(), bytes_to_part_end).enumerate().peekable();
        while let Some((i, (offset, len))) = pieces.next() {
            if stripes > 1 && i % per_stripe == 0 {
                let local = stripe_nics.next().map(|nic| nic.index);
                let choice = self.node.choose(&peer.shared, None, local, plan.now, plan.round_robin, None);
                candidate = choice.unwrap_or(first);
            }
            let Some(share) =
                (if pieces.peek().is_some() { done.as_mut().map(Completion::share) } else { done.take() })
            else {
                return;
            };
            let (local, remote) = (local + offset as u64, remote + offset as u64);
            let region = descriptor.part(region, remote);
            let keys =
                registration.local_key(candidate.local, local).zip(descriptor.key(region, candidate.remote));
            let Some((local_key, remote_key)) = keys else {
                share.finish(Err(Error::internal("internal error: region without keys")));
                continue;
            };
            let piece = Piece {
                opcode: op.opcode(),
                local,
                len: u32::try_from(len).unwrap_or(u32::MAX),
                local_key,
                remote,
                remote_key,
                region: u32::try_from(region).unwrap_or(u32::MAX),
                attempts: 0,
                flushes: 0,
                begun: false,
                registration: Registered(NonNull::from(registration)),
                peer: peer.shared.clone(),
                done: share,
            };
            let rail_index = candidate.local * peer.shared.descriptor.devices.len() + candidate.remote;
            let list_index = lists.iter().position(|(at, list)| *at == rail_index && !list.is_empty());
            match list_index.or_else(|| lists.iter().position(|(_, list)| list.is_empty())) {
                Some(list_index) => {
                    lists[list_index].0 = rail_index;
                    lists[list_index].1.push(piece);
                }
                None => lists.push((rail_index, vec![piece])),
            }
        }
    }

    /// Returns the registration of the operation's local bytes, if it belongs to this transport and
    /// covers them.
    fn check<'a>(&self, op: &Op<'a, Registration>) -> Result<&'a Registration> {
        let registration = op
            .registration()
            .ok_or_else(|| Error::invalid("invalid transfer: local memory is not registered for rdma"))?;
        let is_covered = registration.span.contains(op.local().addr(), op.len() as u64);
        if registration.owner != self.node.id || !(is_covered || op.is_empty()) {
            return Err(Error::invalid(
                "invalid transfer: the registration belongs to other memory, or to another transport",
            ));
        }
        Ok(registration)
    }
}

/// Values shared by all operations of a submission.
struct SubmissionPlan {
    now: Moment,
    round_robin: usize,
    /// Longest message in bytes that every local device supports.
    max_message_bytes: usize,
}

// SAFETY: devices touch local bytes only for requests that were posted and did not complete. A
// share is completed only when its request has completed or its queue pair is destroyed. The peer's
// device guards remote bytes: it knows registrations and their ends.
unsafe impl Transport for RdmaTransport {
    type Registration = Registration;
    type Peer = RdmaPeer;

    fn protocol(&self) -> Protocol {
        Protocol::RDMA
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default().needs_registration(true)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registration> {
        let config = &self.node.config;
        let max_part_bytes =
            self.node.nics.iter().map(|nic| nic.limits.region_bytes).filter(|bytes| *bytes != 0);
        let max_part_bytes = max_part_bytes.chain([config.region_bytes]).min().unwrap_or(0);
        // SAFETY: promised by the caller.
        unsafe {
            Registration::new(
                &self.domains,
                span,
                access,
                (max_part_bytes, config.relaxed_ordering),
                self.node.id,
            )
        }
    }

    fn export(&self, registration: &Registration) -> Vec<u8> {
        registration.export()
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.rdma_server_name = self.node.learn_name(desc);
        if !desc.supports(&Protocol::RDMA) {
            desc.protocols.push(Protocol::RDMA);
        }
        let nics = &self.node.nics;
        let devices: Vec<Value> = nics
            .iter()
            .map(|nic| json!({"name": nic.name, "lid": nic.lid(), "gid": gid::text(nic.gid().addr)}))
            .collect();
        desc.extra.insert("devices".into(), devices.into());
        desc.extra.insert(INSTANCE_KEY.into(), self.node.instance.to_string().into());
        let device_nodes: Vec<_> = nics.iter().map(|nic| (nic.name.clone(), nic.node)).collect();
        let matrix = match &self.node.config.topology {
            Some(configured) => topology::published(configured, &device_nodes),
            None => topology::matrix(&device_nodes),
        };
        desc.extra.insert("priority_matrix".into(), matrix);
        desc.buffers = desc.buffers.iter().flat_map(registration::describe).collect();
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<RdmaPeer> {
        let descriptor = PeerDescriptor::read(desc)?;
        Ok(RdmaPeer { shared: Arc::new(self.node.peer(descriptor)) })
    }

    fn is_connected(&self, peer: &RdmaPeer) -> bool {
        peer.shared.rails.iter().flatten().any(|rail| rail.active_endpoint().is_some())
    }

    fn release_departed(&self) {
        self.node.release_departed();
    }

    fn stop_transfers(&self) {
        self.close();
    }

    fn is_stopped(&self) -> bool {
        self.node.closed.load(Ordering::Acquire)
    }

    fn connection_handler(&self) -> Option<&dyn AcceptConnection> {
        Some(self)
    }

    fn submit<'a, I>(&self, peer: &RdmaPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
    {
        self.submit_or(peer, ops, done, |op, share| {
            share.finish(Err(match op.registration() {
                None => Error::invalid("invalid transfer: local memory is not registered for rdma"),
                Some(_) if peer.shared.descriptor.has_no_keys(op.remote(), op.len()) => {
                    Error::invalid("invalid transfer: the remote memory is not registered for rdma")
                }
                Some(_) => no_device(),
            }));
        });
    }
}

#[async_trait]
impl AcceptConnection for RdmaTransport {
    async fn accept(&self, request: ConnectionDescriptor) -> ConnectionDescriptor {
        ConnectionDescriptor(self.node.accept(&request.0).await)
    }
}

/// The faster transport beside TCP: it does not carry operations with unregistered local memory,
/// with remote memory listed without keys, or while no device works.
impl PartialTransport for RdmaTransport {
    const IS_RETRYABLE: fn(&Error) -> bool = is_path_error;

    fn clock(&self) -> &SharedClock {
        &self.node.clock
    }

    fn submit_or<'a, I, F>(&self, peer: &RdmaPeer, ops: I, done: Completion, mut missed: F)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
        F: FnMut(Op<'a, Registration>, Completion),
    {
        if peer.shared.owner != self.node.id {
            return done.finish(Err(Error::invalid("invalid peer: it was connected by another transport")));
        }
        let plan = SubmissionPlan {
            now: self.node.clock.now(),
            round_robin: peer.shared.round_robin.fetch_add(1, Ordering::Relaxed),
            max_message_bytes: self.node.nics.iter().map(|nic| nic.max_message_bytes()).min().unwrap_or(1),
        };
        if done.deadline().is_some_and(|at| plan.now >= at) {
            return done.finish(Err(deadline_error()));
        }
        let cancelled = self.watch_cancellation(peer, &done);
        let has_active_device = self.has_active_device();
        // Taken out of the cell, because completing a share may call this function again.
        let mut lists = PIECE_LISTS.take();
        for (op, share) in ops.zip(done.each()) {
            let has_no_keys = peer.shared.descriptor.has_no_keys(op.remote(), op.len());
            match has_active_device && op.registration().is_some() && !has_no_keys {
                true => self.split(peer, &op, share, &plan, &mut lists),
                false => missed(op, share),
            }
        }
        self.post(&peer.shared, &mut lists);
        PIECE_LISTS.set(lists);
        // A cancellation before the messages were posted has not found them.
        if cancelled.is_some_and(|cancelled| cancelled.load(Ordering::SeqCst)) {
            self.node.finish_cancelled(&peer.shared);
        }
    }
}

impl RdmaTransport {
    fn post(&self, peer: &Peer, lists: &mut PiecesByRail) {
        for (rail_index, list) in lists.iter_mut().filter(|(_, list)| !list.is_empty()) {
            let devices = peer.descriptor.devices.len();
            self.node.send(&peer.rails[*rail_index / devices][*rail_index % devices], list);
        }
    }
}

fn no_device() -> Error {
    Error::new(ErrorCode::TransferFail, "no local RDMA device is up")
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        self.node.close();
        for thread in self.threads.drain(..) {
            // The last handle may be dropped by a device thread, with a buffer whose transfer that
            // thread completes.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for RdmaTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaTransport").field("devices", &self.node.nics).finish()
    }
}
