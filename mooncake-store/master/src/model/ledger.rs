//! Ledgers: changes in the segments of a client, kept until the client has acknowledged them.
//!
//! A client that knows the objects in its segments announces them to the next master.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId};
use mooncake_protocol::wire::{
    InventoryChange, InventoryPage, ItemLifetime, StoredReplica, TimedInventoryPage,
};
use parking_lot::Mutex;

use super::group::Group;
use super::lifetime::Lifetime;
use super::value::Stamp;

/// Maximum number of changes that wait for a client. A client that falls behind by more has to
/// fetch the whole inventory.
const MAX_PENDING_CHANGES: usize = 1 << 19;

/// Maximum number of changes in one response.
const PAGE: usize = 4096;

/// Changes in the segments of one client that it has not acknowledged.
pub(crate) struct Ledger(Mutex<LedgerState>);

struct LedgerState {
    /// Number of the first waiting change, counted from 1.
    first: u64,
    /// Number of the last change that was sent, acknowledged or not.
    sent: u64,
    changes: VecDeque<LedgerChange>,
    /// True if changes were dropped.
    lost: bool,
    /// Time of the last request of the client.
    asked: Moment,
}

struct LedgerChange {
    replica: ReplicaId,
    /// Replica that is readable now; `None` if the replica is gone.
    stored: Option<StoredChange>,
}

/// Replica that became readable.
pub(crate) struct StoredChange {
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) key: ObjectKey,
    pub(crate) checksum: Option<u64>,
    pub(crate) writer: ClientId,
    pub(crate) group: Option<Arc<Group>>,
    pub(crate) hard_pin: bool,
    pub(crate) soft_pin: Moment,
    pub(crate) lifetime: Option<Box<Lifetime>>,
    pub(crate) stamp: Stamp,
}

impl Ledger {
    pub(crate) fn new(now: Moment) -> Self {
        Self(Mutex::new(LedgerState { first: 1, sent: 0, changes: VecDeque::new(), lost: false, asked: now }))
    }

    /// Records a replica that can be read.
    pub(crate) fn stored(&self, replica: ReplicaId, stored: StoredChange) {
        self.push(LedgerChange { replica, stored: Some(stored) });
    }

    /// Records that a replica is gone.
    pub(crate) fn gone(&self, replica: ReplicaId) {
        self.push(LedgerChange { replica, stored: None });
    }

    fn push(&self, change: LedgerChange) {
        let mut waiting = self.0.lock();
        if waiting.lost {
            return;
        }
        // A replica that came and went unsent need not be reported. A change that was sent must
        // be, acknowledged or not.
        let last = waiting.first - 1 + waiting.changes.len() as u64;
        if change.stored.is_none()
            && waiting.sent < last
            && waiting
                .changes
                .back()
                .is_some_and(|last| last.replica == change.replica && last.stored.is_some())
        {
            waiting.changes.pop_back();
            return;
        }
        if waiting.changes.len() == MAX_PENDING_CHANGES {
            waiting.lost = true;
            waiting.changes = VecDeque::new();
            return;
        }
        waiting.changes.push_back(change);
    }

    /// Returns the changes after number `after` and forgets those up to it. `wall_ms` is the date
    /// of `now`.
    pub(crate) fn page(&self, after: u64, epoch: u64, now: Moment, wall_ms: u64) -> TimedInventoryPage {
        let mut waiting = self.0.lock();
        waiting.asked = now;
        let acknowledged = after.saturating_sub(waiting.first - 1);
        let lost = std::mem::take(&mut waiting.lost)
            || after.saturating_add(1) < waiting.first
            || acknowledged > waiting.changes.len() as u64;
        if lost {
            waiting.first += waiting.changes.len() as u64;
            waiting.changes.clear();
        } else {
            waiting.changes.drain(..acknowledged as usize);
            waiting.first += acknowledged;
        }
        let sent: Vec<_> = waiting.changes.iter().take(PAGE).map(|change| change.to_message(now)).collect();
        let next = waiting.first - 1 + sent.len() as u64;
        waiting.sent = waiting.sent.max(next);
        let lifetime = |(index, change): (usize, &LedgerChange)| {
            let lifetime = change.stored.as_ref()?.lifetime.as_ref()?.to_stored(now, wall_ms);
            Some(ItemLifetime { index: index as u64, lifetime })
        };
        let lifetimes = waiting.changes.iter().take(PAGE).enumerate().filter_map(lifetime).collect();
        let whole = sent.len() == waiting.changes.len();
        TimedInventoryPage { page: InventoryPage { epoch, next, lost, whole, changes: sent }, lifetimes }
    }
}

impl LedgerChange {
    fn to_message(&self, now: Moment) -> InventoryChange {
        let stored = self.stored.as_ref().map(|stored| StoredReplica {
            segment: stored.segment,
            offset: stored.offset,
            len: stored.len,
            key: stored.key.as_bytes().to_vec(),
            checksum: stored.checksum,
            writer: stored.writer,
            group: stored.group.as_deref().map_or_else(String::new, |group| group.name().to_owned()),
            hard_pin: stored.hard_pin,
            soft_pin_ms: u64::try_from(stored.soft_pin.since(now).as_millis()).unwrap_or(u64::MAX),
            epoch: stored.stamp.epoch,
            number: stored.stamp.number,
        });
        InventoryChange { replica: self.replica, stored }
    }
}

/// Ledgers by client.
#[derive(Default)]
pub(crate) struct Ledgers(HashMap<ClientId, Arc<Ledger>>);

impl Ledgers {
    /// Returns the ledger of a client, which exists from the first call on.
    pub(crate) fn open(&mut self, client: ClientId, now: Moment) -> Arc<Ledger> {
        self.0.entry(client).or_insert_with(|| Arc::new(Ledger::new(now))).clone()
    }

    /// Returns the ledger of a client that fetches the inventory.
    pub(crate) fn of(&self, client: ClientId) -> Option<Arc<Ledger>> {
        self.0.get(&client).cloned()
    }

    /// Forgets the ledger of a client that expired: changes in its retired segments are of no use.
    pub(crate) fn forget(&mut self, client: ClientId) {
        self.0.remove(&client);
    }

    /// Keeps the ledgers of clients that are alive or have asked recently.
    pub(crate) fn prune(&mut self, lives: impl Fn(ClientId) -> bool, ttl: Duration, now: Moment) {
        self.0.retain(|client, ledger| lives(*client) || ledger.0.lock().asked.after(ttl) > now);
    }
}
