//! Copies: the operations of one submission go to each device as one batch, and complete when the
//! device reports it.

use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::{Location, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Completion, Opcode};
use tokio::runtime::Handle;

use crate::codec::CopyGuard;
use crate::cuda::{Device, Imported};
use crate::driver::CudaDriver;
use crate::peer::{NvlinkPeer, View};
use crate::poller::{OnEvent, Poller};

/// Copy of one operation.
#[derive(Clone, Copy)]
pub(crate) struct Copy {
    pub(crate) opcode: Opcode,
    pub(crate) local: MemorySpan,
    /// Address in the process of the owner.
    pub(crate) remote: u64,
}

/// Reason for which this transport cannot perform an operation.
#[derive(Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// Dead owner, or a remote range that no open region contains.
    Unreachable,
    /// Failure to open the memory of the peer, or to use a device.
    Failed(Error),
}

/// Copies of one device that begin together.
pub(crate) struct Batch {
    device: Arc<Device>,
    /// True if some local memory is host memory that is not page-locked. The thread that begins
    /// such copies waits for them.
    blocks: bool,
    copies: Vec<(u64, u64, usize)>,
    resources: Vec<CopyResources>,
}

/// Resources that a copy holds until it is complete.
struct CopyResources {
    // Drop order: first the owner stops counting this copy, then the memory may be unmapped here.
    _guard: Option<CopyGuard>,
    _import: Option<Arc<Imported>>,
    share: Completion,
}

/// Copier of one node.
pub(crate) struct Copier {
    pub(crate) driver: Arc<CudaDriver>,
    pub(crate) clock: SharedClock,
    pub(crate) runtime: Handle,
}

impl Copier {
    /// Prepares an operation. A refused operation is returned.
    pub(crate) fn add(
        &self,
        batches: &mut Vec<Batch>,
        view: &View<'_>,
        copy: Copy,
        share: Completion,
    ) -> Result<(), (Refusal, Completion)> {
        let (device, copied, guard, import) = match self.prepare(view, copy) {
            Ok(prepared) => prepared,
            Err(reason) => return Err((reason, share)),
        };
        let blocks = self.blocks(copy.local);
        let existing = batches
            .iter()
            .position(|batch| batch.device.number() == device.number() && batch.blocks == blocks);
        let at = existing.unwrap_or_else(|| {
            batches.push(Batch { device, blocks, copies: Vec::new(), resources: Vec::new() });
            batches.len() - 1
        });
        batches[at].copies.push(copied);
        batches[at].resources.push(CopyResources { _guard: guard, _import: import, share });
        Ok(())
    }

    #[allow(clippy::type_complexity, reason = "destructured at once")]
    fn prepare(
        &self,
        view: &View<'_>,
        copy: Copy,
    ) -> Result<(Arc<Device>, (u64, u64, usize), Option<CopyGuard>, Option<Arc<Imported>>), Refusal> {
        let len = copy.local.len;
        let found = view.find(copy.remote, len as u64).ok_or(Refusal::Unreachable)?;
        let remote = found.remote();
        let device = self.device_for(copy.local, &remote.allocation().uuid).map_err(Refusal::Failed)?;
        // Counted before any memory is opened: a region that is open now stays open until the copy
        // is complete.
        let guard = view.enter(&found).ok_or(Refusal::Unreachable)?;
        let mapped = remote.at(&device).map_err(Refusal::Failed)?;
        if mapped.import.is_none()
            && let Some(owner) = device.cuda().device_of_uuid(&remote.allocation().uuid)
            && owner != device.number()
        {
            let owner = self.driver.device(owner).map_err(Refusal::Failed)?;
            device.enable_peer(&owner);
        }
        let (remote_addr, local) = (mapped.at + found.offset_of(copy.remote), copy.local.addr());
        let copied = match copy.opcode {
            Opcode::Read => (local, remote_addr, len),
            Opcode::Write => (remote_addr, local, len),
        };
        Ok((device, copied, guard, mapped.import))
    }

    /// Returns the device that copies: the one of the local bytes, or else the one of the remote
    /// bytes.
    fn device_for(&self, local: MemorySpan, uuid: &[u8; 16]) -> Result<Arc<Device>> {
        match local.location {
            Location::Cuda(number) => self.driver.device(number),
            _ => match self.driver.cuda()?.device_of_uuid(uuid) {
                Some(number) => self.driver.device(number),
                None => self.driver.any_device(),
            },
        }
    }

    /// Returns whether a copy blocks the thread that begins it, because of host memory that is not
    /// page-locked.
    fn blocks(&self, local: MemorySpan) -> bool {
        !local.location.is_device() && !self.driver.cuda().is_ok_and(|cuda| cuda.has_address(local.addr()))
    }

    /// Begins the prepared copies.
    pub(crate) fn post(&self, batches: Vec<Batch>) {
        for batch in batches {
            let clock = self.clock.clone();
            if batch.blocks {
                self.runtime.spawn_blocking(move || batch.post(&clock));
            } else {
                batch.post(&clock);
            }
        }
    }

    /// Retries operations whose range was unknown, after the owner has sent its current regions.
    pub(crate) fn after_refresh(&self, peer: &NvlinkPeer, copies: Vec<(Copy, Completion)>, refreshed: bool) {
        let (mut batches, view) = (Vec::new(), peer.view());
        for (copy, share) in copies {
            if !refreshed || peer.is_owner_dead() {
                share.finish(Err(owner_ended_error()));
                continue;
            }
            match self.add(&mut batches, &view, copy, share) {
                Ok(()) => {}
                Err((Refusal::Unreachable, share)) => {
                    share.finish(Err(not_registered_error(copy.remote, copy.local.len)))
                }
                Err((Refusal::Failed(error), share)) => share.finish(Err(error)),
            }
        }
        self.post(batches);
    }
}

impl Batch {
    fn post(mut self, clock: &SharedClock) {
        self.remove_expired_and_cancelled(clock);
        if self.copies.is_empty() {
            return;
        }
        // SAFETY: the maker of the operations promises the local bytes until their shares are
        // completed, and each flight holds the resources of its remote bytes. Both are kept until
        // the device has reported the end of the copies.
        match unsafe { self.device.copy(&self.copies) } {
            Ok(event) => Poller::shared().watch(event, Box::new(CopiesInFlight(self.resources))),
            Err(error) => CopiesInFlight(self.resources).finish(Err(error)),
        }
    }

    /// Removes copies that are late or cancelled.
    fn remove_expired_and_cancelled(&mut self, clock: &SharedClock) {
        let mut at = 0;
        while at < self.resources.len() {
            let share = &self.resources[at].share;
            let is_expired = share.deadline().is_some_and(|deadline| clock.now() >= deadline);
            let is_cancelled = share.is_cancelled();
            if !is_expired && !is_cancelled {
                at += 1;
                continue;
            }
            self.copies.swap_remove(at);
            let CopyResources { share, .. } = self.resources.swap_remove(at);
            if is_cancelled {
                share.finish_cancelled();
            } else {
                let text = "cannot copy: the deadline passed before the copy began";
                share.finish(Err(Error::new(ErrorCode::RpcTimeout, text)));
            }
        }
    }
}

struct CopiesInFlight(Vec<CopyResources>);

impl CopiesInFlight {
    fn finish(self, result: Result<()>) {
        for CopyResources { _guard: guard, _import: import, share } in self.0 {
            drop((guard, import));
            share.finish(result.clone());
        }
    }
}

impl OnEvent for CopiesInFlight {
    fn complete(self: Box<Self>, result: Result<()>) {
        self.finish(result);
    }
}

pub(crate) fn owner_ended_error() -> Error {
    Error::new(ErrorCode::TransferFail, "cannot access device memory: its owner has ended")
}

pub(crate) fn not_registered_error(addr: u64, len: usize) -> Error {
    Error::invalid(format!("{len} bytes at {addr:#x} do not lie in one registered buffer of device memory"))
}
