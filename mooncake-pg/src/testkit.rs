//! Ranks in one process, each with a runtime, a transfer engine and a data plane of its own, and a
//! membership that a test drives.

use std::cell::UnsafeCell;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use mooncake_core::Result;
use mooncake_engine::TransferEngine;
use mooncake_transport::engine::LocalCopies;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use crate::call::{Buffer, Collective};
use crate::comm::{Communicator, CommunicatorOptions};
use crate::link::DataPlane;
use crate::operation::Operation;
use crate::view::{
    Evidence, GlobalRank, Member, MemberState, Membership, RankState, Slot, SyncOutcome, View,
};

/// Membership of a group that a test drives.
#[derive(Clone)]
pub struct TestGroup {
    inner: Arc<Mutex<GroupState>>,
    capacity: usize,
}

struct GroupState {
    view: View,
    founders: usize,
    views: Vec<watch::Sender<Option<Arc<View>>>>,
    /// Slots that do not get new views at present.
    held: u64,
    dead: u64,
    /// Time that a probe takes, and the number of probes that have begun.
    probe: Duration,
    probes: usize,
    /// True if a sync deactivates dead slots.
    deactivates: bool,
    reports: Vec<(Slot, Slot, Evidence)>,
    syncs: usize,
}

impl TestGroup {
    /// Creates a group whose first `founders` slots become active when all of them have published
    /// an endpoint.
    pub fn new(founders: usize, capacity: usize, deactivates: bool) -> Self {
        let member = |slot: usize| Member {
            rank: GlobalRank(slot as u8),
            incarnation: 1,
            state: if slot < founders { MemberState::Active } else { MemberState::Inactive },
            rank_state: RankState::Healthy,
            endpoint: None,
        };
        let view =
            View { epoch: 1, mask: 1, generation: 1, capacity, members: (0..capacity).map(member).collect() };
        let views = (0..capacity).map(|_| watch::channel(None).0).collect();
        let state = GroupState {
            view,
            founders,
            views,
            held: 0,
            dead: 0,
            probe: Duration::ZERO,
            probes: 0,
            deactivates,
            reports: Vec::new(),
            syncs: 0,
        };
        Self { inner: Arc::new(Mutex::new(state)), capacity }
    }

    /// Returns the membership of a slot.
    pub fn member(&self, slot: usize) -> Arc<TestMember> {
        Arc::new(TestMember { group: self.clone(), slot: Slot(slot as u8) })
    }

    /// Changes the view and sends it to the participants.
    pub fn change(&self, change: impl FnOnce(&mut View)) {
        let mut state = self.inner.lock();
        let active: Vec<(Slot, u64)> = state.active();
        change(&mut state.view);
        state.view.epoch += 1;
        if state.active() != active {
            state.view.mask = state.view.epoch;
        }
        state.send();
    }

    /// Sets the states of slots.
    pub fn set(&self, slots: &[usize], to: MemberState) {
        self.change(|view| slots.iter().for_each(|slot| view.members[*slot].state = to));
    }

    /// Stops or resumes the delivery of views to a slot.
    pub fn hold(&self, slot: usize, yes: bool) {
        let mut state = self.inner.lock();
        state.held = state.held & !(1 << slot) | u64::from(yes) << slot;
        state.send();
    }

    /// Makes a slot not respond to `is_alive`, and inactive at the next sync.
    pub fn set_dead(&self, slot: usize) {
        self.inner.lock().dead |= 1 << slot;
    }

    /// Makes a slot respond again.
    pub fn set_alive(&self, slot: usize) {
        self.inner.lock().dead &= !(1 << slot);
    }

    /// Makes each probe take a time.
    pub fn set_probe(&self, span: Duration) {
        self.inner.lock().probe = span;
    }

    /// Returns the number of probes that have begun.
    pub fn probes(&self) -> usize {
        self.inner.lock().probes
    }

    /// Gives a slot to a new process, which is inactive at first.
    #[must_use]
    pub fn revived(&self, slot: usize) -> Self {
        self.inner.lock().dead &= !(1 << slot);
        let member = |member: &mut Member| {
            member.incarnation += 1;
            (member.state, member.endpoint) = (MemberState::Inactive, None);
        };
        self.change(|view| member(&mut view.members[slot]));
        let mut state = self.inner.lock();
        state.views[slot] = watch::channel(None).0;
        drop(state);
        self.clone()
    }

    /// Returns the active slots as bits.
    pub fn active(&self) -> u64 {
        self.inner.lock().active().iter().fold(0, |active, (slot, _)| active | 1 << slot.0)
    }

    /// Returns the reported evidence: from, to, and what.
    pub fn reports(&self) -> Vec<(Slot, Slot, Evidence)> {
        self.inner.lock().reports.clone()
    }

    /// Returns the number of syncs.
    pub fn syncs(&self) -> usize {
        self.inner.lock().syncs
    }
}

impl GroupState {
    fn active(&self) -> Vec<(Slot, u64)> {
        self.view.active().map(|slot| (slot, self.view.members[usize::from(slot.0)].incarnation)).collect()
    }

    fn send(&self) {
        let is_ready = self.view.members[..self.founders].iter().all(|member| member.endpoint.is_some());
        let is_later = self.view.mask > 1;
        if !is_ready && !is_later {
            return;
        }
        let view = Arc::new(self.view.clone());
        for (slot, views) in self.views.iter().enumerate() {
            let was_active = views.borrow().is_some();
            let is_active = view.members[slot].state == MemberState::Active;
            if (was_active || is_active) && self.held >> slot & 1 == 0 {
                views.send_if_modified(|known| {
                    let is_new = known.as_ref().is_none_or(|known| known.epoch < view.epoch);
                    if is_new {
                        *known = Some(view.clone());
                    }
                    is_new
                });
            }
        }
    }
}

/// Membership of one slot of a [`TestGroup`].
pub struct TestMember {
    group: TestGroup,
    slot: Slot,
}

impl TestMember {
    /// Returns the mask of the present view.
    pub fn mask(&self) -> u64 {
        self.group.inner.lock().view.mask
    }
}

#[async_trait]
impl Membership for TestMember {
    fn slot(&self) -> Slot {
        self.slot
    }

    fn view(&self) -> watch::Receiver<Option<Arc<View>>> {
        self.group.inner.lock().views[usize::from(self.slot.0)].subscribe()
    }

    fn publish_endpoint(&self, endpoint: Bytes) {
        let slot = usize::from(self.slot.0);
        self.group.change(|view| view.members[slot].endpoint = Some(endpoint));
    }

    fn report(&self, slot: Slot, _incarnation: u64, evidence: Evidence) {
        self.group.inner.lock().reports.push((self.slot, slot, evidence));
    }

    async fn is_alive(&self, slot: Slot) -> bool {
        let (is_alive, span) = {
            let mut state = self.group.inner.lock();
            state.probes += 1;
            (state.dead >> slot.0 & 1 == 0, state.probe)
        };
        if !span.is_zero() {
            tokio::time::sleep(span).await;
        }
        is_alive
    }

    async fn sync_after_failure(&self) -> SyncOutcome {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut state = self.group.inner.lock();
        state.syncs += 1;
        let gone: Vec<usize> = (0..self.group.capacity)
            .filter(|slot| {
                state.dead >> slot & 1 != 0 && state.view.members[*slot].state == MemberState::Active
            })
            .collect();
        if state.deactivates && !gone.is_empty() {
            gone.iter().for_each(|slot| state.view.members[*slot].state = MemberState::Inactive);
            state.view.epoch += 1;
            state.view.mask = state.view.epoch;
        }
        state.send();
        SyncOutcome::Reconciled(Arc::new(state.view.clone()))
    }
}

/// Memory that an operation uses.
pub struct Memory(UnsafeCell<Box<[u8]>>);

// SAFETY: a test reads the bytes after the operations on them.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Creates memory with these bytes.
    pub fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(bytes.into())))
    }

    /// Returns the buffer.
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        // SAFETY: no other reference exists at the time.
        Buffer::of(unsafe { &mut *self.0.get() })
    }

    /// Returns a copy of the bytes.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: no operation uses the memory now.
        unsafe { (*self.0.get()).to_vec() }
    }
}

/// Rank with a runtime of one thread.
pub struct Rank {
    /// Slot in the group.
    pub slot: usize,
    runtime: Option<Runtime>,
    plane: Option<DataPlane>,
    communicator: Option<Communicator>,
}

/// Time after which a test fails.
pub const WITHIN: Duration = Duration::from_secs(120);

impl Rank {
    /// Starts a rank without a communicator.
    pub fn start(slot: usize) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let plane = runtime.block_on(async {
            let engine = TransferEngine::builder()
                .name("127.0.0.1")
                .protocol("tcp")
                .local_copies(LocalCopies::Never)
                .start()
                .await?;
            DataPlane::start(engine, "127.0.0.1")
        })?;
        Ok(Self { slot, runtime: Some(runtime), plane: Some(plane), communicator: None })
    }

    /// Starts all founders of a group.
    pub fn founders(group: &TestGroup, count: usize, syncs: bool) -> Result<Vec<Self>> {
        (0..count)
            .map(|slot| {
                let mut rank = Self::start(slot)?;
                rank.join(group, syncs)?;
                Ok(rank)
            })
            .collect()
    }

    /// Creates the communicator of the rank.
    pub fn join(&mut self, group: &TestGroup, syncs: bool) -> Result<()> {
        self.communicator = Some(self.communicator(group, self.slot, syncs)?);
        Ok(())
    }

    /// Creates another communicator.
    pub fn communicator(&self, group: &TestGroup, slot: usize, syncs: bool) -> Result<Communicator> {
        let options = CommunicatorOptions { capacity: group.capacity, syncs_after_failure: syncs };
        Communicator::new(self.plane(), group.member(slot), options)
    }

    /// Returns the communicator.
    pub fn comm(&self) -> &Communicator {
        self.communicator.as_ref().expect("the rank has no communicator")
    }

    /// Returns the data plane.
    pub fn plane(&self) -> &DataPlane {
        self.plane.as_ref().expect("the rank has ended")
    }

    /// Starts a collective operation whose memory is kept by `memories`.
    pub fn start_collective(&self, call: Collective, memories: &[&Arc<Memory>]) -> Operation {
        let memories: Vec<Arc<Memory>> = memories.iter().map(|memory| (*memory).clone()).collect();
        // SAFETY: `memories` owns the memory, which the test reads only afterwards.
        unsafe { self.comm().start(call, Box::new(memories)) }.expect("cannot start operation")
    }

    /// Returns the runtime.
    pub fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the rank has ended")
    }

    /// Ends the rank at once, as the end of its process would.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        std::mem::forget(self.communicator.take());
        std::mem::forget(self.plane.take());
    }

    /// Blocks the only thread of the rank from now on, as if its process were stopped. Calls on
    /// other threads take no messages meanwhile.
    pub fn stop(&self, span: Duration) {
        self.block(move || std::thread::sleep(span));
    }

    /// As [`stop`](Self::stop), until the result is dropped.
    pub fn stop_until_dropped(&self) -> Sender<Infallible> {
        let (stopped, released) = std::sync::mpsc::channel();
        self.block(move || {
            let _ = released.recv();
        });
        stopped
    }

    fn block(&self, block: impl FnOnce() + Send + 'static) {
        let driving = self.communicator.as_ref().and_then(Communicator::drive);
        let pauses = self.plane().plane.pauses.clone();
        let (begins, begun) = std::sync::mpsc::channel();
        self.runtime().spawn(async move {
            pauses.set_stopped(true);
            let _ = begins.send(());
            block();
            pauses.set_stopped(false);
            drop(driving);
        });
        begun.recv().expect("the rank has ended");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.communicator = None;
        self.plane = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
