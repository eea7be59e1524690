//! State of a communicator that its tasks share: settings, the processes of the slots, and the
//! messages that have arrived.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::arrivals::Exchanges;
use super::counted::Gauge;
use super::pairs::PointToPoint;
use crate::link::{Link, Plane};
use crate::message::{Endpoint, Envelope, Message, Payload, Progress, Tag};
use crate::operation::closed;
use crate::view::{MAX_RANKS, MemberState, Membership, Slot, View};

/// Largest number of messages that wait for the view that introduces their sender.
pub(super) const MAX_EARLY: usize = 4096;
/// Largest number of bytes of these messages. 64 senders may announce 1 MiB each.
pub(super) const MAX_EARLY_BYTES: usize = 64 << 20;
/// Largest number of unused offers of one participant. A participant is at most two operations
/// ahead.
pub(super) const MAX_OFFERS: usize = 64;

/// Settings of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorOptions {
    /// Largest number of slots.
    pub capacity: usize,
    /// True if an operation that saw a failure waits for the end of the reconciliation window
    /// before it is over.
    pub syncs_after_failure: bool,
}

/// Parts of a communicator that its tasks share.
pub(super) struct Shared {
    pub(crate) plane: Arc<Plane>,
    pub(crate) membership: Arc<dyn Membership>,
    pub(super) options: CommunicatorOptions,
    /// Number of the communicator in this process.
    pub(super) number: u32,
    pub(super) own: Slot,
    pub(super) views: watch::Receiver<Option<Arc<View>>>,
    pub(super) inbox: Mutex<Inbox>,
    /// Wakes the executor.
    pub(super) changed: Notify,
    pub(super) p2p: PointToPoint,
    pub(super) exchanges: Exchanges,
    pub(super) closing: AtomicBool,
    /// True from the moment when this rank joins its group again until the next mask.
    pub(super) rejoins: AtomicBool,
    /// True while calls are refused.
    pub(super) quiescing: AtomicBool,
    pub(super) gauge: Arc<Gauge>,
}

/// Process of a participant, and what has arrived from it.
#[derive(Default)]
pub(super) struct Participant {
    /// Incarnation, endpoint and link of the present process.
    pub(super) present: Option<(u64, Endpoint, Arc<Link>)>,
    pub(super) progress: Option<Progress>,
    pub(super) offers: Vec<Offer>,
    pub(super) ready: Vec<(Tag, bool)>,
}

pub(super) struct Offer {
    pub(super) tag: Tag,
    pub(super) part: u8,
    pub(super) payload: Payload,
}

pub(super) struct Inbox {
    /// Epoch of the view that the table below reflects.
    pub(super) epoch: Option<u64>,
    pub(super) members: [Participant; MAX_RANKS],
    /// Slots with which a connection has ended since the last round that this rank began.
    pub(super) lost: u64,
    /// Slots whose communicator is closed.
    pub(super) left: u64,
    /// Slots that have sent a collective message since the executor last looked.
    pub(super) recently_active: u64,
    /// Slots whose offers or readiness are kept.
    pub(super) pending_slots: u64,
    /// Communicators, with their links, that the view has removed and that do not know it perhaps.
    pub(super) removed: Vec<(u32, Arc<Link>)>,
    pub(super) early: VecDeque<(u64, u8, Message)>,
    pub(super) early_bytes: usize,
    /// Processes without a slot of which messages may be lost.
    pub(super) early_lost: VecDeque<u64>,
}

impl Inbox {
    /// Returns the slots whose communicator is closed in a process that goes on. They take no part
    /// any more, and nothing is wrong with the links to them.
    pub(super) fn departed(&self) -> u64 {
        if is_planted("pg-closed-communicator-is-a-failed-link") {
            return 0;
        }
        self.left & !self.lost
    }
}

pub(super) fn unavailable(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorCode::UnavailableInCurrentStatus, text)
}

pub(super) fn not_active(slot: Slot) -> Error {
    unavailable(format!("cannot start collective: this rank is not active. slot={slot}; call join_group"))
}

impl Shared {
    pub(super) fn new(
        plane: Arc<Plane>,
        membership: Arc<dyn Membership>,
        options: CommunicatorOptions,
        number: u32,
    ) -> Self {
        Self {
            own: membership.slot(),
            views: membership.view(),
            membership,
            options,
            number,
            inbox: Mutex::new(Inbox {
                epoch: None,
                members: std::array::from_fn(|_| Participant::default()),
                lost: 0,
                left: 0,
                recently_active: 0,
                pending_slots: 0,
                removed: Vec::new(),
                early: VecDeque::new(),
                early_bytes: 0,
                early_lost: VecDeque::new(),
            }),
            changed: Notify::new(),
            p2p: PointToPoint::default(),
            exchanges: Exchanges::default(),
            closing: AtomicBool::new(false),
            rejoins: AtomicBool::new(false),
            quiescing: AtomicBool::new(false),
            gauge: Gauge::new(plane.driver.running()),
            plane,
        }
    }

    pub(super) fn own_bit(&self) -> u64 {
        1 << self.own.0
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.is_closing() {
            return Err(closed());
        }
        if self.quiescing.load(Ordering::SeqCst) {
            return Err(unavailable("cannot start operation: the communicator is joining its group"));
        }
        Ok(())
    }

    pub(super) fn check_global(&self) -> Result<()> {
        match *self.views.borrow() {
            Some(_) => Ok(()),
            None => Err(unavailable("cannot start operation: this communicator is local; call join_group")),
        }
    }

    /// Returns whether the communicator of a slot is closed.
    pub(super) fn has_left(&self, slot: u8) -> bool {
        !is_planted("pg-closed-communicator-is-waited-for") && self.inbox.lock().left >> slot & 1 != 0
    }

    /// Asks whether the process of a slot responds. If this process was stopped meanwhile, the
    /// response may have come too late, and counts as one.
    pub(super) async fn responds(&self, slot: u8) -> bool {
        let previous = self.plane.pauses.count();
        let is_alive = self.membership.is_alive(Slot(slot)).await;
        is_alive || self.plane.pauses.count() != previous && !is_planted("pg-stopped-rank-accuses-others")
    }

    /// Checks that a slot may be a partner. Returns whether its communicator is known and open.
    pub(super) fn check_partner(self: &Arc<Self>, slot: Slot) -> Result<bool> {
        self.check_open()?;
        self.check_global()?;
        if slot == self.own {
            return Err(Error::invalid("cannot start operation: the partner is this rank"));
        }
        self.apply_view();
        let at = usize::from(slot.0);
        let is_known = self.inbox.lock().members.get(at).is_some_and(|member| member.present.is_some());
        let is_open = is_known && !self.has_left(slot.0);
        let is_assigned =
            self.views.borrow().as_ref().is_some_and(|view| {
                view.members.get(at).is_some_and(|member| member.state != MemberState::None)
            });
        if is_known || is_assigned {
            Ok(is_open)
        } else {
            Err(Error::invalid(format!("cannot start operation: no process has the slot. slot={slot}")))
        }
    }

    /// Sends a message to the present process of a slot. Without one, nothing is sent.
    pub(super) fn send_to(&self, slot: u8, message: Message) {
        let present = {
            let inbox = self.inbox.lock();
            let present = inbox.members[usize::from(slot)].present.as_ref();
            present.map(|(_, endpoint, link)| (endpoint.communicator, link.clone()))
        };
        if let Some((communicator, link)) = present {
            link.send(&Envelope { communicator, slot: self.own.0, message });
        }
    }

    /// Returns the link and the engine of the present process of a slot.
    pub(super) fn present_peer(&self, slot: u8) -> Option<(Endpoint, Arc<Link>)> {
        let inbox = self.inbox.lock();
        inbox.members[usize::from(slot)]
            .present
            .as_ref()
            .map(|(_, endpoint, link)| (endpoint.clone(), link.clone()))
    }

    /// Brings the table of participants up to the present view.
    pub(super) fn apply_view(self: &Arc<Self>) {
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
                let current = &inbox.members[slot].present;
                let current = current.as_ref().map(|(incarnation, endpoint, _)| (*incarnation, endpoint));
                if current == endpoint.as_ref().map(|endpoint| (member.incarnation, endpoint)) {
                    continue;
                }
                if current.is_some() {
                    replaced |= 1 << slot;
                }
                let present = endpoint.map(|endpoint| {
                    let link = self.plane.link(&endpoint);
                    (member.incarnation, endpoint, link)
                });
                let process = present.as_ref().map(|(_, endpoint, _)| endpoint.process);
                let is_lost = process.is_some_and(|process| inbox.early_lost.contains(&process));
                let next = Participant { present, ..Participant::default() };
                let previous = std::mem::replace(&mut inbox.members[slot], next);
                if let Some((_, endpoint, link)) = previous.present
                    && inbox.removed.len() < MAX_RANKS
                {
                    inbox.removed.push((endpoint.communicator, link));
                }
                inbox.lost = inbox.lost & !(1 << slot) | u64::from(is_lost) << slot;
                inbox.left &= !(1 << slot);
            }
            std::mem::swap(&mut inbox.early, &mut early);
            inbox.early_bytes = 0;
            inbox.early_lost.clear();
        }
        for slot in crate::call::bits(replaced) {
            self.fail_pair(slot, "its process was replaced");
        }
        for (process, slot, message) in early {
            self.take_message(process, slot, message);
        }
        self.changed.notify_one();
    }

    /// Marks a slot as lost: a transfer with it has failed.
    pub(super) fn lose_slot(&self, slot: u8) {
        self.inbox.lock().lost |= 1 << slot;
        self.changed.notify_one();
    }

    /// Returns the slots whose present process, and communicator if given, are these.
    pub(super) fn slots_of(&self, process: u64, communicator: Option<u32>) -> u64 {
        let inbox = self.inbox.lock();
        let matches = |endpoint: &Endpoint| {
            endpoint.process == process && communicator.is_none_or(|number| number == endpoint.communicator)
        };
        let members = inbox.members.iter().enumerate();
        members
            .filter(|(_, member)| member.present.as_ref().is_some_and(|(_, endpoint, _)| matches(endpoint)))
            .fold(0, |slots, (slot, _)| slots | 1 << slot)
    }

    pub(super) fn lose_slots(self: &Arc<Self>, slots: u64, left: bool) {
        {
            let mut inbox = self.inbox.lock();
            match left {
                true => inbox.left |= slots,
                false => inbox.lost |= slots,
            }
        }
        for slot in crate::call::bits(slots) {
            self.exchanges.lose(slot);
            self.fail_pair(
                slot,
                if left { "it has closed its communicator" } else { "its connection has ended" },
            );
        }
        self.changed.notify_one();
    }
}

impl Shared {
    pub(super) fn has_process(&self, process: u64, slot: u8) -> bool {
        let inbox = self.inbox.lock();
        let present = &inbox.members[usize::from(slot)].present;
        present.as_ref().is_some_and(|(_, endpoint, _)| endpoint.process == process)
    }

    /// Keeps a message of a collective operation and wakes the executor. A participant that sends
    /// more than the protocol allows counts as failed.
    pub(super) fn update_participant(&self, slot: u8, update: impl FnOnce(&mut Participant) -> bool) {
        {
            let mut inbox = self.inbox.lock();
            inbox.recently_active |= 1 << slot;
            inbox.pending_slots |= 1 << slot;
            let participant = &mut inbox.members[usize::from(slot)];
            if !update(participant) {
                tracing::warn!(slot, "participant sends too many messages");
                participant.offers.clear();
                participant.ready.clear();
                inbox.lost |= 1 << slot;
            }
        }
        self.changed.notify_one();
    }
}
