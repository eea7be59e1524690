//! Communicator of one group: its membership as Python sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_pg::comm::{Communicator, CommunicatorOptions};
use mooncake_pg::control::GroupHandle;
use mooncake_pg::link::DataPlane;
use mooncake_pg::protocol::{Change, ProposalOutcome};
use mooncake_pg::view::{Membership, Slot, SyncOutcome, View};
use parking_lot::RwLock;
use pyo3::prelude::*;
use tokio::sync::watch;

use super::arguments::slot_of;
use super::local::LocalMembership;
use super::mirror::Mirror;
use crate::error::exception;
use crate::runtime::{not_forked, wait};

/// Longest wait for operations in progress before this rank joins its group.
const DRAIN_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for the coordinator when a group ends.
const UNREGISTER_WITHIN: Duration = Duration::from_secs(2);

/// Settings of a new group.
pub(super) struct GroupSettings {
    pub(super) slot: Slot,
    /// Number of ranks that the program has declared.
    pub(super) size: usize,
    pub(super) capacity: usize,
    pub(super) syncs: bool,
    /// Address of the mirror.
    pub(super) mirror: usize,
    /// Owner of the mirror.
    pub(super) owner: Py<PyAny>,
}

/// Parts of a group in this process.
pub(super) struct GroupParts {
    pub(super) communicator: Communicator,
    pub(super) mirror: Arc<Mirror>,
    /// Registration. `None` if the coordinator has refused the group.
    group: Option<Arc<GroupHandle>>,
    membership: Arc<dyn Membership>,
    views: watch::Receiver<Option<Arc<View>>>,
    size: usize,
    /// True while this rank joins its group.
    is_joining: AtomicBool,
}

impl GroupParts {
    /// Creates the communicator of a registration. Runs inside the runtime.
    pub(super) fn new(
        plane: &DataPlane,
        group: Option<Arc<GroupHandle>>,
        settings: GroupSettings,
    ) -> Result<Self> {
        let GroupSettings { slot, size, capacity, syncs, mirror, owner } = settings;
        let membership: Arc<dyn Membership> = match &group {
            Some(group) => group.clone(),
            None => Arc::new(LocalMembership::new(slot)),
        };
        if membership.slot() != slot {
            let given = membership.slot();
            return Err(Error::internal(format!("the group gives another slot. given={given} slot={slot}")));
        }
        let views = membership.view();
        let mirror = Arc::new(Mirror::new(slot, mirror, capacity, views.clone(), owner)?);
        tokio::spawn(Mirror::follow(Arc::downgrade(&mirror), views.clone()));
        let options = CommunicatorOptions { capacity, syncs_after_failure: syncs };
        let communicator = Communicator::new(plane, membership.clone(), options)?;
        Ok(Self { communicator, mirror, group, membership, views, size, is_joining: AtomicBool::new(false) })
    }

    /// Waits until all founding ranks are there.
    pub(super) async fn wait_until_ready(&self) -> Result<()> {
        if let Some(group) = &self.group {
            group.wait_until_ready().await?;
        }
        self.mirror.refresh();
        Ok(())
    }

    fn group(&self) -> Result<&Arc<GroupHandle>> {
        self.group.as_ref().ok_or_else(|| {
            Error::invalid("cannot change group: the coordinator has refused it, and this rank is alone")
        })
    }

    fn size(&self) -> usize {
        if self.is_joining.load(Ordering::SeqCst) {
            return self.size;
        }
        self.views.borrow().as_ref().map_or(self.size, |view| view.extent())
    }

    async fn join(&self) -> Result<()> {
        let group = self.group()?;
        let _joining = Joining::begin(self);
        if !self.communicator.drain(DRAIN_WITHIN).await {
            tracing::warn!("operations are still in progress while the rank joins its group");
        }
        let own = group.slot();
        let was_active = self.views.borrow().is_some();
        let is_active =
            self.views.borrow().as_ref().is_some_and(|view| view.active().any(|slot| slot == own));
        if was_active && !is_active {
            self.communicator.rejoin();
        }
        group.join().await
    }
}

/// Time while operations are refused because this rank joins its group.
struct Joining<'a>(&'a GroupParts);

impl<'a> Joining<'a> {
    fn begin(parts: &'a GroupParts) -> Self {
        parts.is_joining.store(true, Ordering::SeqCst);
        parts.communicator.set_quiescing(true);
        Self(parts)
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        self.0.communicator.set_quiescing(false);
        self.0.is_joining.store(false, Ordering::SeqCst);
        self.0.mirror.refresh();
    }
}

/// Communicator of one group.
#[pyclass(frozen, weakref, module = "mooncake._mooncake", name = "GroupCommunicator")]
pub(crate) struct GroupCommunicator {
    parts: RwLock<Option<Arc<GroupParts>>>,
}

impl GroupCommunicator {
    pub(super) fn new(parts: GroupParts) -> Self {
        Self { parts: RwLock::new(Some(Arc::new(parts))) }
    }

    /// Returns the parts of the group.
    ///
    /// # Errors
    /// `INVALID_PARAMS` after [`close`](Self::close).
    pub(super) fn parts(&self, py: Python<'_>) -> PyResult<Arc<GroupParts>> {
        not_forked()?;
        let parts = self.parts.read().clone();
        parts.ok_or_else(|| exception(py, &Error::invalid("cannot use group: it is closed")))
    }
}

fn slots_of(py: Python<'_>, ranks: &[i64]) -> PyResult<Vec<Slot>> {
    let slots: Result<Vec<Slot>> = ranks.iter().map(|rank| slot_of(*rank)).collect();
    slots.map_err(|error| exception(py, &error))
}

#[pymethods]
impl GroupCommunicator {
    /// Returns whether this rank is alone because the coordinator has refused the group.
    fn is_local(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.parts(py)?.group.is_none())
    }

    /// Returns the highest active slot plus one. Before this rank is active, the declared size.
    fn size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.parts(py)?.size())
    }

    /// Returns the epoch of the view, which grows with every change.
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.parts(py)?.group.as_ref().map_or(0, |group| group.epoch()))
    }

    /// Returns the number of slots that are active or can be activated.
    fn num_synced(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.parts(py)?.group.as_ref().map_or(0, |group| group.num_synced()))
    }

    /// Returns for each rank whether it is active or can be activated.
    fn peer_state(&self, py: Python<'_>, ranks: Vec<i64>) -> PyResult<Vec<bool>> {
        let parts = self.parts(py)?;
        let slots = slots_of(py, &ranks)?;
        Ok(parts.group.as_ref().map_or_else(|| vec![false; slots.len()], |group| group.peer_state(&slots)))
    }

    /// Shows the present view in the mirror.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        self.parts(py)?.mirror.refresh();
        Ok(())
    }

    /// Proposes to activate or deactivate ranks, and waits until the change is in force. Returns
    /// the epoch, the ranks that did not acknowledge, and the reason of a refusal.
    fn propose(
        &self,
        py: Python<'_>,
        activates: bool,
        ranks: Vec<i64>,
    ) -> PyResult<(u64, Vec<u8>, Option<String>)> {
        let parts = self.parts(py)?;
        let mut slots = slots_of(py, &ranks)?;
        slots.sort_unstable();
        slots.dedup();
        let change = if activates { Change::Activate } else { Change::Deactivate };
        let outcome = parts.group().and_then(|group| wait(py, group.propose(change, &slots)));
        parts.mirror.refresh();
        match outcome.map_err(|error| exception(py, &error))? {
            ProposalOutcome::Rejected(reason) => Ok((0, Vec::new(), Some(reason))),
            ProposalOutcome::Applied { epoch, dropped } => {
                Ok((epoch, dropped.into_iter().map(|slot| slot.0).collect(), None))
            }
        }
    }

    /// Waits for the end of the open reconciliation window. Returns whether one was open, and the
    /// reason of a refusal.
    fn sync(&self, py: Python<'_>) -> PyResult<(bool, Option<String>)> {
        let parts = self.parts(py)?;
        let outcome = wait(py, async { Ok(parts.membership.sync_after_failure().await) });
        parts.mirror.refresh();
        Ok(match outcome.map_err(|error| exception(py, &error))? {
            SyncOutcome::Reconciled(_) => (true, None),
            SyncOutcome::NoPending(_) => (false, None),
            SyncOutcome::Rejected(reason) => (false, Some(reason)),
        })
    }

    /// Declares that this rank may be activated, and waits until it is active.
    fn join(&self, py: Python<'_>) -> PyResult<()> {
        let parts = self.parts(py)?;
        wait(py, parts.join()).map_err(|error| exception(py, &error))
    }

    /// Ends all operations and leaves the group. Later calls raise.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        not_forked()?;
        let Some(parts) = self.parts.write().take() else { return Ok(()) };
        let closed = wait(py, async move {
            parts.communicator.close();
            if let Some(group) = &parts.group
                && let Ok(Err(error)) = tokio::time::timeout(UNREGISTER_WITHIN, group.unregister()).await
            {
                tracing::debug!(%error, "group ended without the coordinator");
            }
            Ok(())
        });
        closed.map_err(|error| exception(py, &error))
    }
}
