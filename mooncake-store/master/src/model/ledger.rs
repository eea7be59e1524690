//! Ledgers: changes in the segments of a client, kept until the client has acknowledged them.
//!
//! A client that knows the objects in its segments announces them to the next master.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId};
use mooncake_protocol::wire::{
    InventoryChange, InventoryPage, ItemLifetime, StoredReplica, TimedInventoryPage,
};

use super::group::Group;
use super::lifetime::Lifetime;
use super::value::Stamp;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Maximum number of changes that wait for a client. A client that falls behind by more has to
/// fetch the whole inventory.
const MAX_PENDING_CHANGES: usize = 1 << 19;

/// Maximum number of ledgers. The changes in the segments of further clients are not recorded.
const MAX_LEDGERS: usize = 1 << 16;

/// Maximum number of changes in one response.
const PAGE: usize = 4096;

/// Memory of a ledger without changes in bytes, with its entries in the tables.
const EMPTY: u64 = 256;

/// Memory of a change in a ledger in bytes, without what the change refers to.
const CHANGE: u64 = size_of::<LedgerChange>() as u64;

/// Memory that all ledgers share.
pub(crate) struct LedgerBudget {
    limit: u64,
    used: AtomicU64,
    /// Number of ledgers whose changes were dropped.
    dropped: AtomicU64,
    ledgers: Mutex<Vec<Weak<Ledger>>>,
}

/// Changes in the segments of one client that it has not acknowledged.
pub(crate) struct Ledger {
    budget: Arc<LedgerBudget>,
    state: Mutex<LedgerState>,
}

struct LedgerState {
    /// Number of the first waiting change, counted from 1.
    first: u64,
    /// Number of the last change that was sent, acknowledged or not.
    sent: u64,
    changes: VecDeque<LedgerChange>,
    /// Memory that the changes refer to, in bytes.
    referred: u64,
    /// Bytes of this ledger that count in the budget.
    counted: u64,
    /// True if changes were dropped.
    lost: bool,
    /// True if the client has expired. Nothing is recorded any more.
    closed: bool,
    /// Time of the last request of the client.
    last_request: Moment,
    /// True if this process of the client hands memory over to the next one by a call of its own.
    /// An earlier version unmounts it.
    knows_hand_over: bool,
}

struct LedgerChange {
    replica: ReplicaId,
    /// Replica that is readable now; `None` if the replica was removed.
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

impl LedgerState {
    /// Forgets all changes. The client has to fetch the whole inventory.
    fn lose(&mut self) {
        self.lost = true;
        self.first += self.changes.len() as u64;
        (self.changes, self.referred) = (VecDeque::new(), 0);
    }

    fn memory(&self) -> u64 {
        EMPTY + self.changes.capacity() as u64 * CHANGE + self.referred
    }
}

impl LedgerChange {
    /// Returns the memory that the change refers to, in bytes. Nothing else may keep it.
    fn referred(&self) -> u64 {
        let of_stored = |stored: &StoredChange| {
            let lifetime = stored.lifetime.as_ref().map_or(0, |_| size_of::<Lifetime>());
            let group = stored.group.as_ref().map_or(0, |group| group.name().len());
            stored.key.as_bytes().len() + lifetime + group
        };
        self.stored.as_ref().map_or(0, of_stored) as u64
    }
}

impl LedgerBudget {
    fn new(limit: u64) -> Arc<Self> {
        let (used, dropped) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { limit, used, dropped, ledgers: Mutex::default() })
    }

    /// Counts the memory of a ledger.
    fn settle(&self, state: &mut LedgerState) {
        let memory = state.memory();
        // A smaller number is added as its complement.
        self.used.fetch_add(memory.wrapping_sub(state.counted), Relaxed);
        state.counted = memory;
    }

    /// Drops the changes of those ledgers that have the most, until the others are within the
    /// limit.
    #[cold]
    fn drop_largest(&self) {
        let mut ledgers = self.ledgers.lock();
        while self.used.load(Relaxed) > self.limit {
            ledgers.retain(|ledger| ledger.strong_count() > 0);
            let sizes = ledgers.iter().filter_map(Weak::upgrade).map(|ledger| {
                let counted = ledger.state.lock().counted;
                (counted, ledger)
            });
            let Some((counted, largest)) = sizes.max_by_key(|(counted, _)| *counted) else { return };
            if counted <= EMPTY {
                return;
            }
            let mut state = largest.state.lock();
            state.lose();
            self.settle(&mut state);
            self.dropped.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.state.get_mut().counted, Relaxed);
    }
}

impl Ledger {
    fn new(budget: &Arc<LedgerBudget>, now: Moment) -> Arc<Self> {
        let mut state = LedgerState {
            first: 1,
            sent: 0,
            changes: VecDeque::new(),
            referred: 0,
            counted: 0,
            lost: false,
            closed: false,
            last_request: now,
            knows_hand_over: false,
        };
        budget.settle(&mut state);
        let ledger = Arc::new(Self { budget: budget.clone(), state: Mutex::new(state) });
        let mut ledgers = budget.ledgers.lock();
        if ledgers.len() == ledgers.capacity() {
            ledgers.retain(|ledger| ledger.strong_count() > 0);
        }
        ledgers.push(Arc::downgrade(&ledger));
        drop(ledgers);
        ledger
    }

    /// Records a replica that can be read.
    pub(crate) fn stored(&self, replica: ReplicaId, stored: StoredChange) {
        self.push(LedgerChange { replica, stored: Some(stored) });
    }

    /// Records that a replica was removed.
    pub(crate) fn removed(&self, replica: ReplicaId) {
        self.push(LedgerChange { replica, stored: None });
    }

    fn push(&self, change: LedgerChange) {
        self.push_within_client(change);
        if self.budget.used.load(Relaxed) > self.budget.limit {
            self.budget.drop_largest();
        }
    }

    fn push_within_client(&self, change: LedgerChange) {
        let mut waiting = self.state.lock();
        if waiting.lost || waiting.closed {
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
            let unsent = waiting.changes.pop_back();
            waiting.referred -= unsent.map_or(0, |change| change.referred());
        } else if waiting.changes.len() == MAX_PENDING_CHANGES {
            waiting.lose();
        } else {
            waiting.referred += change.referred();
            waiting.changes.push_back(change);
        }
        self.budget.settle(&mut waiting);
    }

    /// Records whether this process of the client hands memory over by a call of its own.
    pub(crate) fn set_hand_over(&self, is_known: bool) {
        self.state.lock().knows_hand_over = is_known;
    }

    /// Returns whether this process of the client hands memory over by a call of its own.
    pub(crate) fn knows_hand_over(&self) -> bool {
        self.state.lock().knows_hand_over
    }

    /// Forgets all changes, and records no more.
    fn close(&self) {
        let mut waiting = self.state.lock();
        waiting.lose();
        waiting.closed = true;
        self.budget.settle(&mut waiting);
    }

    /// Returns the changes after number `after` and forgets those up to it. `wall_ms` is the date
    /// of `now`.
    pub(crate) fn page(&self, after: u64, epoch: u64, now: Moment, wall_ms: u64) -> TimedInventoryPage {
        let mut waiting = self.state.lock();
        waiting.last_request = now;
        let acknowledged = after.saturating_sub(waiting.first - 1);
        let lost = std::mem::take(&mut waiting.lost)
            || after.saturating_add(1) < waiting.first
            || acknowledged > waiting.changes.len() as u64;
        if lost {
            waiting.lose();
            waiting.lost = false;
        } else {
            let known = waiting.changes.drain(..acknowledged as usize);
            let referred: u64 = known.map(|change| change.referred()).sum();
            waiting.referred -= referred;
            waiting.first += acknowledged;
            let (len, capacity) = (waiting.changes.len(), waiting.changes.capacity());
            if capacity > PAGE && len < capacity / 4 {
                waiting.changes.shrink_to(len.max(PAGE / 2) * 2);
            }
        }
        self.budget.settle(&mut waiting);
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
pub(crate) struct Ledgers {
    by_client: HashMap<ClientId, Arc<Ledger>>,
    budget: Arc<LedgerBudget>,
}

/// Use of the memory that all ledgers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LedgerStats {
    pub(crate) used: u64,
    pub(crate) limit: u64,
    pub(crate) dropped: u64,
}

impl Ledgers {
    /// Creates an empty table for ledgers of `limit` bytes in all.
    pub(crate) fn new(limit: u64) -> Self {
        Self { by_client: HashMap::new(), budget: LedgerBudget::new(limit) }
    }

    /// Returns the ledger of a client, which exists from the first call on; `None` if there are
    /// too many.
    pub(crate) fn open(&mut self, client: ClientId, now: Moment) -> Option<Arc<Ledger>> {
        if let Some(known) = self.by_client.get(&client) {
            return Some(known.clone());
        }
        if self.by_client.len() >= MAX_LEDGERS {
            return None;
        }
        let ledger = Ledger::new(&self.budget, now);
        self.by_client.insert(client, ledger.clone());
        Some(ledger)
    }

    /// Returns the ledger of a client that fetches the inventory.
    pub(crate) fn of(&self, client: ClientId) -> Option<Arc<Ledger>> {
        self.by_client.get(&client).cloned()
    }

    /// Forgets the ledger of a client that expired: changes in its retired segments are of no use.
    pub(crate) fn forget(&mut self, client: ClientId) {
        self.by_client.remove(&client).into_iter().for_each(|ledger| ledger.close());
    }

    /// Keeps the ledgers of clients that are alive or have sent a request recently.
    pub(crate) fn prune(&mut self, lives: impl Fn(ClientId) -> bool, ttl: Duration, now: Moment) {
        let is_over = |client: &ClientId, ledger: &mut Arc<Ledger>| {
            !lives(*client) && ledger.state.lock().last_request.after(ttl) <= now
        };
        let over = self.by_client.extract_if(|client, ledger| is_over(client, ledger));
        over.for_each(|(_, ledger)| ledger.close());
    }

    /// Returns the use of the memory that all ledgers share.
    pub(crate) fn stats(&self) -> LedgerStats {
        let LedgerBudget { limit, used, dropped, .. } = &*self.budget;
        LedgerStats { used: used.load(Relaxed), limit: *limit, dropped: dropped.load(Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::Uuid;

    use super::*;

    fn change(number: u64) -> StoredChange {
        StoredChange {
            segment: SegmentId(Uuid::new(0, 1)),
            offset: number * 64,
            len: 64,
            key: ObjectKey::new(number.to_le_bytes()).unwrap(),
            checksum: None,
            writer: ClientId::default(),
            group: None,
            hard_pin: false,
            soft_pin: Moment(0),
            lifetime: None,
            stamp: Stamp { epoch: 1, number },
        }
    }

    fn client(number: u64) -> ClientId {
        ClientId(Uuid::new(5, number))
    }

    /// Returns the memory of all ledgers, computed again.
    fn audit(ledgers: &Ledgers) -> u64 {
        ledgers.by_client.values().map(|ledger| ledger.state.lock().memory()).sum()
    }

    #[test]
    fn the_client_that_falls_behind_most_loses_its_changes() {
        let mut ledgers = Ledgers::new(1 << 20);
        let (slow, quick) =
            (ledgers.open(client(1), Moment(0)).unwrap(), ledgers.open(client(2), Moment(0)).unwrap());
        let mut received = 0;
        for number in 0..100_000 {
            slow.stored(ReplicaId(number), change(number));
            quick.stored(ReplicaId(number), change(number));
            if number % 100 == 0 {
                let page = quick.page(received, 9, Moment(1), 0).page;
                assert!(!page.lost, "{number}");
                received = page.next;
            }
            let LedgerStats { used, limit, .. } = ledgers.stats();
            assert!(used <= limit && used == audit(&ledgers), "{used} of {limit}");
        }
        assert_eq!(ledgers.stats().dropped, 1);
        let page = slow.page(0, 9, Moment(1), 0).page;
        assert!(page.lost && page.whole && page.changes.is_empty());
        slow.stored(ReplicaId(7), change(7));
        let page = slow.page(page.next, 9, Moment(1), 0).page;
        assert_eq!((page.lost, page.changes.len()), (false, 1), "it is recorded again");
    }

    #[test]
    fn memory_of_ledgers_returns() {
        let mut ledgers = Ledgers::new(1 << 24);
        let [expired, idle, alive] = [1, 2, 3].map(|number| ledgers.open(client(number), Moment(0)).unwrap());
        for number in 0..20_000 {
            [&expired, &idle, &alive]
                .iter()
                .for_each(|ledger| ledger.stored(ReplicaId(number), change(number)));
        }
        ledgers.forget(client(1));
        ledgers.prune(|client| client != self::client(2), Duration::ZERO, Moment(1));
        expired.stored(ReplicaId(1), change(1));
        drop((expired, idle));
        assert_eq!((ledgers.by_client.len(), ledgers.stats().used), (1, audit(&ledgers)));
        let mut received = 0;
        loop {
            let page = alive.page(received, 9, Moment(1), 0).page;
            received = page.next;
            if page.changes.is_empty() {
                break;
            }
        }
        assert_eq!(ledgers.stats().used, audit(&ledgers));
        assert!(ledgers.stats().used < EMPTY + 2 * PAGE as u64 * CHANGE, "{:?}", ledgers.stats());
    }

    #[test]
    fn further_clients_have_no_ledger() {
        let mut ledgers = Ledgers::new(1 << 30);
        for number in 0..MAX_LEDGERS as u64 {
            assert!(ledgers.open(client(number), Moment(0)).is_some());
        }
        assert!(ledgers.open(client(MAX_LEDGERS as u64), Moment(0)).is_none());
        assert!(ledgers.open(client(0), Moment(0)).is_some());
        ledgers.prune(|_| false, Duration::ZERO, Moment(1));
        assert_eq!(ledgers.stats().used, 0);
        assert!(ledgers.open(client(MAX_LEDGERS as u64), Moment(0)).is_some());
    }
}
