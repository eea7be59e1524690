//! [`Transport`] by copies of the device.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::{Location, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::{Endpoint, Limits, Links, OpenRegion, Owner};
use mooncake_transport::config::NvlinkConfig;
use mooncake_transport::fallback::{PartialTransport, is_path_error};
use mooncake_transport::{Access, Capabilities, Completion, Op, Protocol, SegmentDesc, Transport};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::codec::{self, ExportedRegion, Remote};
use crate::copier::{Copier, Copy, Refusal, not_registered_error, owner_ended_error};
use crate::cuda::{Allocation, HandleKind};
use crate::descriptor_only::{self, DescriptorMemory};
use crate::driver::CudaDriver;
use crate::peer::NvlinkPeer;

/// Key of this project in descriptors: the host by the id of its boot, and the name of the socket.
/// Other peers ignore it.
const ENDPOINT: &str = "nvlink_endpoint";

/// Node that opens the memory of its GPUs to peers, and copies from and to the memory of peers.
///
/// The tasks of the transport run on the runtime given to [`NvlinkTransport::start`]; calls may
/// come from any thread. Dropping the transport closes its socket, and peers see the node as dead.
pub struct NvlinkTransport {
    config: NvlinkConfig,
    runtime: Handle,
    copier: Arc<Copier>,
    owner: Arc<Owner<ExportedRegion>>,
    exports: Exports,
    /// Endpoint of this node, published under [`ENDPOINT`].
    endpoint: Endpoint,
    links: Arc<Links<Remote>>,
    descriptor_memory: Mutex<HashMap<String, Weak<DescriptorMemory>>>,
    tasks: [JoinHandle<()>; 2],
}

/// Open allocations by first address.
type Exports = Arc<Mutex<HashMap<u64, Allocation>>>;

/// Memory that an [`NvlinkTransport`] knows. Dropping it closes the memory to peers.
#[derive(Debug)]
pub struct Registration {
    location: Location,
    // Drop order: removed from the descriptor first.
    _export: Option<Export>,
    open_region: Option<OpenRegion<ExportedRegion>>,
}

#[derive(Debug)]
struct Export {
    exports: Exports,
    addr: u64,
}

impl Drop for Export {
    fn drop(&mut self) {
        self.exports.lock().remove(&self.addr);
    }
}

impl Registration {
    /// Returns whether peers can reach the memory: it is registered for peers, device memory, and
    /// of an allocation that can be exported.
    pub fn is_reachable(&self) -> bool {
        self.open_region.as_ref().is_some_and(OpenRegion::is_open)
    }
}

impl NvlinkTransport {
    /// Loads the CUDA driver, opens the socket and serves it on `runtime`.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` without a driver or a device, with what to install, `INVALID_PARAMS`
    /// for a configuration that cannot work, and another error where the system has no such sockets
    /// or no boot id.
    pub fn start(config: NvlinkConfig, runtime: &Handle) -> Result<Self> {
        Self::start_with_clock(config, runtime, SystemClock::shared())
    }

    /// Starts the transport with a clock for the deadlines of completions.
    ///
    /// # Errors
    /// Returns the errors of [`start`](Self::start).
    pub fn start_with_clock(config: NvlinkConfig, runtime: &Handle, clock: SharedClock) -> Result<Self> {
        config.check()?;
        let driver = CudaDriver::serve(config.libcuda.clone())?;
        driver.cuda()?;
        let owner =
            Owner::new(Limits { drain_timeout: config.drain_timeout, max_served: config.max_served })?;
        let links = Links::new(runtime, config.response_timeout);
        let _guard = runtime.enter();
        let (listener, name) = mooncake_ipc::listen("nvlink")?;
        let endpoint = Endpoint::here(name)?;
        let tasks = [
            runtime.spawn(mooncake_ipc::serve(owner.clone(), listener, config.response_timeout)),
            runtime.spawn(links.clone().maintain(config.upkeep_interval)),
        ];
        Ok(Self {
            config,
            copier: Arc::new(Copier { driver, clock, runtime: runtime.clone() }),
            runtime: runtime.clone(),
            owner,
            exports: Exports::default(),
            endpoint,
            links,
            descriptor_memory: Mutex::default(),
            tasks,
        })
    }

    /// Returns the driver.
    pub fn driver(&self) -> &Arc<CudaDriver> {
        &self.copier.driver
    }

    /// Returns the number of regions that are open to peers.
    pub fn opened(&self) -> usize {
        self.exports.lock().len()
    }

    /// Submits operations, and passes those whose remote range cannot be opened here to `other`
    /// with the reason.
    pub fn submit_or_refuse<'a, I, F>(&self, peer: &NvlinkPeer, ops: I, done: Completion, mut other: F)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
        F: FnMut(Op<'a, Registration>, Completion, Refusal),
    {
        let (mut batches, view) = (Vec::new(), peer.view());
        for (op, share) in ops.zip(done.each()) {
            let copy = Copy { opcode: op.opcode(), local: local(&op), remote: op.remote() };
            if let Err((reason, share)) = self.copier.add(&mut batches, &view, copy, share) {
                other(op, share, reason);
            }
        }
        self.copier.post(batches);
    }

    /// Returns the kind of the handles in a descriptor of another host, as far as known. Returns
    /// `None` for handles that only the other host can open: their numbers may by chance be those
    /// of memory here.
    fn kind_of(&self, desc: &SegmentDesc) -> Option<HandleKind> {
        let fabric = desc.supports(&Protocol::NVLINK)
            && self.config.fabric
            && self.copier.driver.any_device().is_ok_and(|device| device.has_fabric());
        if fabric {
            return Some(HandleKind::Fabric);
        }
        endpoint(desc).is_none().then_some(HandleKind::Ipc)
    }

    fn export_kinds(&self) -> &'static [HandleKind] {
        if self.config.fabric && !self.config.intra_node {
            &[HandleKind::Fabric, HandleKind::Ipc]
        } else {
            &[HandleKind::Ipc]
        }
    }

    /// Opens device memory to peers, if the driver can export it.
    fn open(
        &self,
        number: u32,
        span: MemorySpan,
    ) -> Result<(Option<OpenRegion<ExportedRegion>>, Option<Export>)> {
        let device = self.copier.driver.device(number)?;
        let allocation = match Allocation::export(&device, span, self.export_kinds()) {
            Ok(allocation) => allocation,
            Err(error) if matches!(error.code(), ErrorCode::NotSupported | ErrorCode::InvalidParams) => {
                tracing::warn!(%error, addr = span.addr(), "memory of {} cannot be exported to peers", device.location());
                return Ok((None, None));
            }
            Err(error) => return Err(error),
        };
        let open_region = self.owner.open(span, ExportedRegion { span, allocation });
        let export = open_region.is_some().then(|| {
            self.exports.lock().insert(span.addr(), allocation);
            Export { exports: self.exports.clone(), addr: span.addr() }
        });
        Ok((open_region, export))
    }
}

// SAFETY: remote bytes are touched through mappings that flights hold, only while the owner counts
// this node inside an open region (`mooncake_ipc`). The registration of an owner ends when no node
// is inside. Local bytes are touched by copies whose flights hold a share of their own until the
// device has reported their end.
unsafe impl Transport for NvlinkTransport {
    type Registration = Registration;
    type Peer = NvlinkPeer;

    fn protocol(&self) -> Protocol {
        self.config.protocol()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default().device_memory(true)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Registration> {
        span.check()?;
        let span = span.located();
        let (open_region, export) = match (access, span.location) {
            (Access::Remote, Location::Cuda(number)) if !span.read_only => self.open(number, span)?,
            _ => (None, None),
        };
        Ok(Registration { location: span.location, _export: export, open_region })
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.extra.insert(ENDPOINT.into(), self.endpoint.to_string().into());
        // Older peers read only one protocol, so beside another transport only the key announces
        // this one.
        if desc.protocols.is_empty() {
            desc.protocols.push(self.protocol());
            descriptor_only::describe(&self.exports.lock(), desc);
        }
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        endpoint(desc).is_some_and(|target| target.same_host(&self.endpoint))
            || ((desc.supports(&Protocol::NVLINK) || desc.supports(&Protocol::NVLINK_INTRA))
                && desc.buffers.iter().any(descriptor_only::has_handle)
                && self.kind_of(desc).is_some())
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<NvlinkPeer> {
        if let Some(target) = endpoint(desc).filter(|target| target.same_host(&self.endpoint)) {
            let link = self.links.to(target.socket()).await?;
            return Ok(NvlinkPeer::from_link(link));
        }
        let kind = self.kind_of(desc).ok_or_else(|| {
            let text = format!(
                "cannot connect to segment {:?}: it is on another host, and not in the same fabric",
                desc.name
            );
            Error::new(ErrorCode::NotSupported, text)
        })?;
        let existing = self.descriptor_memory.lock().get(&desc.name).and_then(Weak::upgrade);
        let memory = Arc::new(DescriptorMemory::new(desc, kind, existing.as_deref())?);
        let mut by_name = self.descriptor_memory.lock();
        by_name.retain(|_, memory| memory.strong_count() != 0);
        by_name.insert(desc.name.clone(), Arc::downgrade(&memory));
        Ok(NvlinkPeer::from_descriptor(memory))
    }

    fn is_connected(&self, peer: &NvlinkPeer) -> bool {
        peer.is_connected()
    }

    fn release_departed(&self) {
        self.descriptor_memory.lock().retain(|_, memory| memory.strong_count() != 0);
        codec::release_closed();
    }

    fn submit<'a, I>(&self, peer: &NvlinkPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
    {
        let mut deferred = Vec::new();
        self.submit_or_refuse(peer, ops, done, |op, share, reason| match reason {
            Refusal::Failed(error) => share.finish(Err(error)),
            Refusal::Unreachable if peer.is_owner_dead() => share.finish(Err(owner_ended_error())),
            Refusal::Unreachable if op.is_empty() => {
                share.finish(Err(not_registered_error(op.remote(), op.len())))
            }
            // The refreshed list of regions may contain this range.
            Refusal::Unreachable => {
                deferred.push((Copy { opcode: op.opcode(), local: local(&op), remote: op.remote() }, share));
            }
        });
        if let (Some(link), false) = (peer.stale_link(), deferred.is_empty()) {
            let (link, peer, copier) = (link.clone(), peer.clone(), self.copier.clone());
            self.runtime.spawn(async move {
                let refreshed = link.refresh().await.is_ok();
                copier.after_refresh(&peer, deferred, refreshed);
            });
        } else {
            self.copier.after_refresh(peer, deferred, true);
        }
    }
}

/// The faster transport beside others: it carries operations with device memory of the peer that
/// can be opened here.
impl PartialTransport for NvlinkTransport {
    const IS_RETRYABLE: fn(&Error) -> bool = is_path_error;

    fn clock(&self) -> &SharedClock {
        &self.copier.clock
    }

    fn submit_or<'a, I, F>(&self, peer: &NvlinkPeer, ops: I, done: Completion, mut missed: F)
    where
        I: ExactSizeIterator<Item = Op<'a, Registration>>,
        F: FnMut(Op<'a, Registration>, Completion),
    {
        self.submit_or_refuse(peer, ops, done, |op, share, reason| {
            tracing::debug!(?reason, "operation falls back to the next transport");
            missed(op, share);
        });
    }
}

/// Returns the local bytes, with their device.
fn local(op: &Op<'_, Registration>) -> MemorySpan {
    let span = op.local();
    match op.registration() {
        _ if span.location.is_device() => span,
        Some(registration) => MemorySpan { location: registration.location, ..span },
        None => span.located(),
    }
}

/// Returns the endpoint that a descriptor names.
fn endpoint(desc: &SegmentDesc) -> Option<Endpoint> {
    Endpoint::parse(desc.extra.get(ENDPOINT)?.as_str()?)
}

impl Drop for NvlinkTransport {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl fmt::Debug for NvlinkTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvlinkTransport")
            .field("endpoint", &self.endpoint.to_string())
            .finish_non_exhaustive()
    }
}
