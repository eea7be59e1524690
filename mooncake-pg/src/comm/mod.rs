//! Communicators: the operations of one group on this rank.
//!
//! Collective operations of a communicator run one after the other, in the order of their calls.
//! Communicators, point-to-point operations and exchanges run beside each other.
//!
//! # Agreement on failures
//!
//! Every member that finishes an operation has combined the same set of members. Members agree on
//! that set by *rounds*. A round is (mask, number, absent): the mask of the view, the number of the
//! attempt since that mask, and the active slots that have failed in it. The members of a round
//! are the active slots that are not absent. Rounds only grow.
//!
//! - A member that enters a round sends its *progress* to all members: the round, and the number of
//!   its next operation. The progress is a promise: the member finishes no operation in an earlier
//!   round.
//! - A member begins an operation in a round when every member of the round has promised it.
//! - A member that has all data of an operation sends *ready*. It finishes the operation when every
//!   member of the round is ready. So nobody finishes an operation while a member lacks data.
//! - A member that sees a failure (a connection has ended, or a process does not respond within the
//!   collective timeout) enters the round with that slot absent. The others follow its progress.
//!   The operation then begins anew in this round, from the staged copy of the input.
//! - If a member has finished the operation before it enters the later round, its progress says so:
//!   the number of its next operation is higher, and the round in which it finished comes with it.
//!   A member that was ready in that round has the same result, and finishes as well. Any other
//!   member was absent from that round; the operation fails there, because it is left out.
//! - A rank that was left out counts the operation as over. While others still carry that operation
//!   out, the rank is absent there. From the next operation on, it takes part again if its slot is
//!   still active: after a round with absent slots, each operation begins a new round.
//! - A change of the mask is a round like any other: an unfinished operation begins anew among the
//!   members of the new view. A message of an earlier round is dropped. A message of a later mask
//!   waits for the view.
//! - A member that has just become active does not know the number of the next operation. It takes
//!   the highest one that the members announce in the round.
//!
//! Rounds cost messages only when something has changed: operations without failures follow each
//! other in one round.
//!
//! # Memory
//!
//! Data of up to [`INLINE_BYTES`](crate::call) travels in messages. Longer data is staged in memory
//! that is registered with the transfer engine, and the receiver reads it from there. Nobody writes
//! into the memory of another rank, so that a late transfer of a failed rank harms nothing. The
//! staged bytes stay until all members are ready, which nobody is who still reads. If an attempt is
//! given up, they may be freed earlier: the reader finds garbage, but never finishes that attempt.

mod collective;
mod exchange;
mod executor;
mod p2p;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};

use crate::call::{Buffer, Collective};
use crate::link::{DataPlane, Link, Plane, Recipient};
use crate::operation::{Operation, Pending, closed};
use crate::staging::{Keep, keep};
use crate::view::{MAX_RANKS, MemberState, Membership, Slot, View};
use crate::message::{Endpoint, Envelope, ExchangeTag, Message, Payload, Progress, Tag};

use executor::Executor;
use p2p::PointToPoint;

/// Largest number of collective operations that wait for their turn.
const MAX_QUEUED: usize = 4096;
/// Largest number of messages that wait for the view that introduces their sender.
const MAX_EARLY: usize = 4096;
/// Largest number of unused offers of one member. A member is at most two operations ahead.
const MAX_OFFERS: usize = 64;

/// Settings of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorOptions {
    /// Largest number of slots.
    pub capacity: usize,
    /// Whether an operation that saw a failure waits for the end of the reconciliation window
    /// before it is over.
    pub syncs_after_failure: bool,
}

/// Operations of one group on this rank. The drop closes the communicator.
pub struct Communicator {
    shared: Arc<Shared>,
    calls: mpsc::Sender<Call>,
}

/// Collective call that waits for its turn.
struct Call {
    collective: Collective,
    keep: Keep,
    pending: Pending,
    _counted: Counted,
}

/// Operation in the count of those in progress.
struct Counted(Arc<Shared>);

impl Counted {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.running.fetch_add(1, Ordering::SeqCst);
        Self(shared.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.drained.notify_waiters();
        }
    }
}

/// Parts of a communicator that its tasks share.
pub(crate) struct Shared {
    pub(crate) plane: Arc<Plane>,
    pub(crate) membership: Arc<dyn Membership>,
    options: CommunicatorOptions,
    /// Number of the communicator in this process.
    number: u32,
    own: Slot,
    views: watch::Receiver<Option<Arc<View>>>,
    inbox: Mutex<Inbox>,
    /// Wakes the executor.
    changed: Notify,
    pub(crate) p2p: PointToPoint,
    exchanges: exchange::Exchanges,
    closing: AtomicBool,
    /// True while calls are refused.
    quiescing: AtomicBool,
    running: AtomicUsize,
    drained: Notify,
}

/// Process of a member, and what has arrived from it.
#[derive(Default)]
struct Correspondent {
    /// Incarnation, endpoint and link of the present process.
    present: Option<(u64, Endpoint, Arc<Link>)>,
    progress: Option<Progress>,
    offers: Vec<Offer>,
    ready: Vec<(Tag, bool)>,
}

struct Offer {
    tag: Tag,
    part: u8,
    payload: Payload,
}

struct Inbox {
    /// Epoch of the view that the table below reflects.
    epoch: Option<u64>,
    members: [Correspondent; MAX_RANKS],
    /// Slots with which a connection has ended since the last round that this rank began.
    lost: u64,
    /// Slots whose communicator is closed.
    left: u64,
    /// Slots that have sent a collective message since the executor last looked.
    heard: u64,
    early: VecDeque<(u64, u8, Message)>,
}

impl Communicator {
    /// Creates the communicator of a group, publishes its endpoint and waits for calls.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a capacity of 0 or above [`MAX_RANKS`].
    pub fn new(
        plane: &DataPlane,
        membership: Arc<dyn Membership>,
        options: CommunicatorOptions,
    ) -> Result<Self> {
        if options.capacity == 0 || options.capacity > MAX_RANKS {
            let capacity = options.capacity;
            return Err(Error::invalid(format!(
                "cannot create communicator: invalid capacity. capacity={capacity} max={MAX_RANKS}"
            )));
        }
        let plane = plane.plane.clone();
        let number = plane.number();
        let shared = Arc::new(Shared {
            own: membership.slot(),
            views: membership.view(),
            membership,
            options,
            number,
            inbox: Mutex::new(Inbox {
                epoch: None,
                members: std::array::from_fn(|_| Correspondent::default()),
                lost: 0,
                left: 0,
                heard: 0,
                early: VecDeque::new(),
            }),
            changed: Notify::new(),
            p2p: PointToPoint::default(),
            exchanges: exchange::Exchanges::default(),
            closing: AtomicBool::new(false),
            quiescing: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            drained: Notify::new(),
            plane,
        });
        let recipient: Arc<dyn Recipient> = shared.clone();
        shared.plane.add(number, Arc::downgrade(&recipient));
        let (calls, queue) = mpsc::channel(MAX_QUEUED);
        shared.plane.runtime.spawn(Executor::new(shared.clone()).run(queue));
        shared.membership.publish_endpoint(shared.plane.endpoint(number).encode());
        Ok(Self { shared, calls })
    }

    /// Publishes the endpoint again, for a process that joins its group once more.
    pub fn publish_endpoint(&self) {
        self.shared.membership.publish_endpoint(self.shared.plane.endpoint(self.shared.number).encode());
    }

    /// Starts a collective operation. Every active rank makes the same calls in the same order.
    /// While there is no view, the operation has this rank as its only member.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for invalid arguments. `UNAVAILABLE_IN_CURRENT_STATUS` if this rank is not
    /// active, the communicator is closed or [quiescing](Self::set_quiescing), or too many
    /// operations wait. The guard is dropped then.
    ///
    /// # Safety
    /// Until `keep` is dropped, the buffers of the call stay allocated, no other code writes the
    /// inputs, and no other code touches the outputs.
    pub unsafe fn start(&self, collective: Collective, guard: Box<dyn Send>) -> Result<Operation> {
        let shared = &self.shared;
        shared.check_open()?;
        collective.check(shared.own, shared.options.capacity)?;
        if let Some(view) = &*shared.views.borrow()
            && !view.active().any(|slot| slot == shared.own)
        {
            return Err(not_active(shared.own));
        }
        let (operation, pending) = Operation::new();
        let call = Call { collective, keep: keep(guard), pending, _counted: Counted::new(shared) };
        match self.calls.try_send(call) {
            Ok(()) => Ok(operation),
            Err(mpsc::error::TrySendError::Full(_)) => Err(unavailable(format!(
                "cannot start collective: too many operations wait. max={MAX_QUEUED}"
            ))),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(closed()),
        }
    }

    /// Sends a tensor to the process of a slot. Messages of one pair arrive in the order of their
    /// calls. The operation is over when the receiver has the bytes; without bytes, at once.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the communicator has no view yet, is closed or quiescing.
    /// `INVALID_PARAMS` for a slot without a process, and for the own slot.
    ///
    /// # Safety
    /// Until `keep` is dropped, the buffer stays allocated and no other code writes it.
    pub unsafe fn send(&self, tensor: Buffer, to: Slot, guard: Box<dyn Send>) -> Result<Operation> {
        self.shared.check_partner(to)?;
        Ok(self.shared.post_send(tensor, to, keep(guard)))
    }

    /// Receives a tensor from the process of a slot. A shorter message fills the start of the
    /// tensor, and a longer one is an error on both sides.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// Until `keep` is dropped, the buffer stays allocated and no other code touches it.
    pub unsafe fn receive(&self, tensor: Buffer, from: Slot, guard: Box<dyn Send>) -> Result<Operation> {
        self.shared.check_partner(from)?;
        Ok(self.shared.post_receive(tensor, Some(from), keep(guard)))
    }

    /// Receives a tensor from any other slot; [`Outcome::source`] tells from which.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the communicator has no view yet, is closed or quiescing.
    ///
    /// # Safety
    /// As [`receive`](Self::receive).
    pub unsafe fn receive_any(&self, tensor: Buffer, guard: Box<dyn Send>) -> Result<Operation> {
        self.shared.check_open()?;
        self.shared.check_global()?;
        Ok(self.shared.post_receive(tensor, None, keep(guard)))
    }

    /// Exchanges buffers of any length with other ranks, until all have arrived or `timeout` has
    /// passed. `outputs[slot]` goes to the slot, and `inputs[slot]` is filled by it; the lengths on
    /// both sides agree. [`Outcome::arrived`] has the slots whose data is there.
    ///
    /// The exchange touches no membership and reports no failed link. A rank whose connection has
    /// ended has not arrived, at once. Data of earlier rounds of the buffer is dropped.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` if the communicator has no view yet, is closed or quiescing.
    ///
    /// # Safety
    /// Until `keep` is dropped, the buffers stay allocated, no other code writes the outputs, and no
    /// other code touches the inputs.
    pub unsafe fn exchange(
        &self,
        tag: ExchangeTag,
        outputs: Vec<Option<Buffer>>,
        inputs: Vec<Option<Buffer>>,
        timeout: Option<Duration>,
        guard: Box<dyn Send>,
    ) -> Result<Operation> {
        self.shared.check_open()?;
        self.shared.check_global()?;
        Ok(self.shared.post_exchange(tag, outputs, inputs, timeout, keep(guard)))
    }

    /// Refuses new calls, or accepts them again.
    pub fn set_quiescing(&self, yes: bool) {
        self.shared.quiescing.store(yes, Ordering::SeqCst);
    }

    /// Waits until no operation is in progress, for at most `timeout`. Returns whether that is so.
    pub async fn drain(&self, timeout: Duration) -> bool {
        let idle = async {
            loop {
                let notified = self.shared.drained.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if self.shared.running.load(Ordering::SeqCst) == 0 {
                    return;
                }
                notified.await;
            }
        };
        tokio::time::timeout(timeout, idle).await.is_ok()
    }

    /// Ends all operations with an error and tells the other ranks, which count this rank as failed
    /// in operations that still need it.
    pub fn close(&self) {
        self.shared.close();
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shared.close();
    }
}

fn unavailable(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorCode::UnavailableInCurrentStatus, text)
}

fn not_active(slot: Slot) -> Error {
    unavailable(format!("cannot start collective: this rank is not active. slot={slot}; call join_group"))
}

impl Shared {
    fn own_bit(&self) -> u64 {
        1 << self.own.0
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    fn check_open(&self) -> Result<()> {
        if self.is_closing() {
            return Err(closed());
        }
        if self.quiescing.load(Ordering::SeqCst) {
            return Err(unavailable("cannot start operation: the communicator is joining its group"));
        }
        Ok(())
    }

    fn check_global(&self) -> Result<()> {
        match *self.views.borrow() {
            Some(_) => Ok(()),
            None => Err(unavailable("cannot start operation: this communicator is local; call join_group")),
        }
    }

    fn check_partner(self: &Arc<Self>, slot: Slot) -> Result<()> {
        self.check_open()?;
        self.check_global()?;
        if slot == self.own {
            return Err(Error::invalid("cannot start operation: the partner is this rank"));
        }
        self.apply_view();
        let is_known = self.inbox.lock().members.get(usize::from(slot.0)).is_some_and(|m| m.present.is_some());
        if is_known {
            Ok(())
        } else {
            Err(Error::invalid(format!("cannot start operation: no process has the slot. slot={slot}")))
        }
    }

    fn close(self: &Arc<Self>) {
        if self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.plane.remove(self.number);
        let members: Vec<_> = {
            let inbox = self.inbox.lock();
            inbox.members.iter().filter_map(|member| member.present.clone()).collect()
        };
        for (_, endpoint, link) in members {
            let (communicator, slot) = (endpoint.communicator, self.own.0);
            link.send(&Envelope { communicator, slot, message: Message::Bye });
        }
        self.changed.notify_one();
        self.exchanges.close();
        self.fail_all_pairs();
    }

    /// Sends a message to the present process of a slot. Without one, nothing is sent.
    fn send_to(&self, slot: u8, message: Message) {
        let present = self.inbox.lock().members[usize::from(slot)].present.clone();
        if let Some((_, endpoint, link)) = present {
            link.send(&Envelope { communicator: endpoint.communicator, slot: self.own.0, message });
        }
    }

    /// Returns the link and the engine of the present process of a slot.
    fn correspondent(&self, slot: u8) -> Option<(Endpoint, Arc<Link>)> {
        let inbox = self.inbox.lock();
        inbox.members[usize::from(slot)].present.as_ref().map(|(_, endpoint, link)| (endpoint.clone(), link.clone()))
    }

    /// Brings the table of members up to the present view.
    fn apply_view(self: &Arc<Self>) {
        let Some(view) = self.views.borrow().clone() else { return };
        let (mut replaced, mut early) = (0u64, VecDeque::new());
        {
            let mut inbox = self.inbox.lock();
            if inbox.epoch.is_some_and(|epoch| epoch >= view.epoch) {
                return;
            }
            inbox.epoch = Some(view.epoch);
            for (slot, member) in view.members.iter().enumerate().take(MAX_RANKS) {
                if slot == usize::from(self.own.0) {
                    continue;
                }
                let endpoint = member.endpoint.clone().map(Endpoint::decode).and_then(|decoded| {
                    decoded.inspect_err(|error| tracing::warn!(slot, %error, "member ignored")).ok()
                });
                let endpoint = endpoint.filter(|_| member.state != MemberState::Left);
                let known = &inbox.members[slot].present;
                let known = known.as_ref().map(|(incarnation, endpoint, _)| (*incarnation, endpoint));
                if known == endpoint.as_ref().map(|endpoint| (member.incarnation, endpoint)) {
                    continue;
                }
                if known.is_some() {
                    replaced |= 1 << slot;
                }
                let present = endpoint.map(|endpoint| {
                    let link = self.plane.link(&endpoint);
                    (member.incarnation, endpoint, link)
                });
                inbox.members[slot] = Correspondent { present, ..Correspondent::default() };
                inbox.lost &= !(1 << slot);
                inbox.left &= !(1 << slot);
            }
            std::mem::swap(&mut inbox.early, &mut early);
        }
        for slot in crate::call::bits(replaced) {
            self.fail_pair(slot, "its process was replaced");
        }
        for (process, slot, message) in early {
            self.clone().deliver(process, slot, message);
        }
        self.changed.notify_one();
    }

    /// Marks a slot as lost: a transfer with it has failed.
    fn lose_slot(&self, slot: u8) {
        self.inbox.lock().lost |= 1 << slot;
        self.changed.notify_one();
    }

    /// Returns the slots whose present process, and communicator if given, are these.
    fn slots_of(&self, process: u64, communicator: Option<u32>) -> u64 {
        let inbox = self.inbox.lock();
        let is_it = |endpoint: &Endpoint| {
            endpoint.process == process && communicator.is_none_or(|number| number == endpoint.communicator)
        };
        let members = inbox.members.iter().enumerate();
        members
            .filter(|(_, member)| member.present.as_ref().is_some_and(|(_, endpoint, _)| is_it(endpoint)))
            .fold(0, |slots, (slot, _)| slots | 1 << slot)
    }

    fn lose_slots(self: &Arc<Self>, slots: u64, left: bool) {
        {
            let mut inbox = self.inbox.lock();
            inbox.lost |= slots;
            if left {
                inbox.left |= slots;
            }
        }
        for slot in crate::call::bits(slots) {
            self.exchanges.lose(slot);
            self.fail_pair(slot, if left { "it has closed its communicator" } else { "its connection has ended" });
        }
        self.changed.notify_one();
    }
}

impl Recipient for Shared {
    fn deliver(self: Arc<Self>, process: u64, slot: u8, message: Message) {
        if !self.knows(process, slot) {
            self.apply_view();
        }
        if !self.knows(process, slot) {
            // The view that introduces the sender has not arrived yet.
            let mut inbox = self.inbox.lock();
            if inbox.early.len() < MAX_EARLY {
                inbox.early.push_back((process, slot, message));
            }
            return;
        }
        match message {
            Message::Progress(progress) => self.keep_collective(slot, |member| {
                member.progress = Some(progress);
                true
            }),
            Message::Offer { tag, part, payload } => self.keep_collective(slot, |member| {
                member.offers.push(Offer { tag, part, payload });
                member.offers.len() <= MAX_OFFERS
            }),
            Message::Ready { tag, success } => self.keep_collective(slot, |member| {
                member.ready.push((tag, success));
                member.ready.len() <= MAX_OFFERS
            }),
            Message::Bye => self.lose_slots(1 << slot, true),
            Message::Send { id, payload } => self.take_sent(slot, id, payload),
            Message::Taken { id, success } => self.take_acknowledgement(slot, id, success),
            Message::Exchange { id, tag, payload } => self.take_exchange(slot, id, tag, payload),
        }
    }

    fn lose(self: Arc<Self>, process: u64) {
        let slots = self.slots_of(process, None);
        if slots != 0 {
            self.lose_slots(slots, false);
        }
    }

    fn forget(self: Arc<Self>, process: u64, communicator: u32) {
        let slots = self.slots_of(process, Some(communicator));
        if slots != 0 {
            self.lose_slots(slots, true);
        }
    }
}

impl Shared {
    fn knows(&self, process: u64, slot: u8) -> bool {
        let inbox = self.inbox.lock();
        let present = &inbox.members[usize::from(slot)].present;
        present.as_ref().is_some_and(|(_, endpoint, _)| endpoint.process == process)
    }

    /// Keeps a message of a collective operation and wakes the executor. A member that sends more
    /// than the protocol allows counts as failed.
    fn keep_collective(&self, slot: u8, keep: impl FnOnce(&mut Correspondent) -> bool) {
        {
            let mut inbox = self.inbox.lock();
            inbox.heard |= 1 << slot;
            let member = &mut inbox.members[usize::from(slot)];
            if !keep(member) {
                tracing::warn!(slot, "member sends too many messages");
                member.offers.clear();
                member.ready.clear();
                inbox.lost |= 1 << slot;
            }
        }
        self.changed.notify_one();
    }
}
