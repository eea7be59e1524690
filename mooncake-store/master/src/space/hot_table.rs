//! Table of additional replicas of objects that are read often.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SlotId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::CopyToken;

use crate::directory::read_rates::ReadRates;
use crate::model::options::HotOptions;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Time for which an additional replica is kept. It begins again while the object is hot.
pub(crate) const RETENTION: Duration = Duration::from_secs(30);

/// Time without further decisions about a key after a decision.
pub(crate) const PAUSE: Duration = Duration::from_secs(30);

/// Time without a new replica after one was dropped.
pub(crate) const PAUSE_AFTER_DROP: Duration = Duration::from_secs(60);

/// Maximum number of keys that wait for a decision.
const MAX_CANDIDATES: usize = 1024;

/// Additional replica that was requested.
#[derive(Debug)]
pub(crate) struct ExtraReplica {
    pub(crate) key: ObjectKey,
    /// Version of the value at the request.
    pub(crate) epoch: u64,
    /// Client that is to make the replica.
    pub(crate) client: ClientId,
    pub(crate) until: Moment,
    /// Number and size of the replica once it exists.
    pub(crate) replica: Option<(ReplicaId, u64)>,
}

#[derive(Debug)]
pub(crate) struct HotTableState {
    pub(crate) candidates: Vec<ObjectKey>,
    /// Additional replicas by the ids of their tasks, which are the leases of their tokens.
    pub(crate) extras: HashMap<Uuid, ExtraReplica>,
    /// Time until which no decision is made about a key.
    pub(crate) pauses: HashMap<ObjectKey, Moment>,
    pub(crate) prune_at: Moment,
}

/// Hot objects. The lock is taken inside that of a shard.
#[derive(Debug)]
pub(crate) struct HotTable {
    pub(crate) options: HotOptions,
    pub(crate) table: Mutex<HotTableState>,
    pub(crate) due: AtomicU64,
    pub(crate) proposed: AtomicU64,
    made: AtomicU64,
    pub(crate) dropped: AtomicU64,
}

impl HotTable {
    pub(crate) fn new(options: HotOptions) -> Self {
        let table = HotTableState {
            candidates: Vec::new(),
            extras: HashMap::new(),
            pauses: HashMap::new(),
            prune_at: Moment(0),
        };
        Self {
            options,
            table: Mutex::new(table),
            due: AtomicU64::new(0),
            proposed: AtomicU64::new(0),
            made: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Counts a read of an object.
    pub(crate) fn count_read(&self, read_rates: &mut ReadRates, slot: SlotId, key: &ObjectKey, now: Moment) {
        if read_rates.count(slot, &self.options, now) {
            let mut table = self.table.lock();
            if table.candidates.len() < MAX_CANDIDATES {
                table.candidates.push(key.clone());
            }
        }
    }

    /// Checks whether a client may begin the copy with this token.
    pub(crate) fn check_copy(
        &self,
        key: &[u8],
        client: ClientId,
        token: CopyToken,
        now: Moment,
    ) -> Result<()> {
        let table = self.table.lock();
        let is_open = |extra: &&ExtraReplica| {
            extra.key.as_bytes() == key && extra.replica.is_none() && extra.until > now
        };
        match table.extras.get(&token.lease).filter(is_open).filter(|extra| extra.epoch == token.epoch) {
            Some(extra) if extra.client == client => Ok(()),
            Some(_) => Err(ErrorCode::IllegalClient.into()),
            None if table.extras.values().any(|extra| is_open(&extra)) => {
                Err(Error::new(ErrorCode::InvalidVersion, "copy token differs from the requested one"))
            }
            None => Err(copy_not_requested()),
        }
    }

    /// Records that the copy with this token is complete.
    pub(crate) fn record_made(&self, token: CopyToken, replica: (ReplicaId, u64), now: Moment) {
        if let Some(extra) = self.table.lock().extras.get_mut(&token.lease) {
            extra.replica = Some(replica);
            extra.until = now.after(RETENTION);
            self.made.fetch_add(1, Relaxed);
        }
    }

    /// Records that the copy with this token failed.
    pub(crate) fn record_failed(&self, key: &ObjectKey, token: CopyToken, now: Moment) {
        let mut table = self.table.lock();
        table.extras.remove(&token.lease);
        table.pauses.insert(key.clone(), now.after(PAUSE));
    }

    /// Forgets the copies that lost clients were to make.
    pub(crate) fn forget_copies_of(&self, lost: &HashSet<ClientId>, now: Moment) {
        let mut table = self.table.lock();
        let HotTableState { extras, pauses, .. } = &mut *table;
        let is_lost = |extra: &mut ExtraReplica| extra.replica.is_none() && lost.contains(&extra.client);
        for (_, extra) in extras.extract_if(|_, extra| is_lost(extra)) {
            pauses.insert(extra.key, now.after(PAUSE));
        }
    }

    /// Returns the numbers of proposed, made, dropped and existing replicas.
    pub(crate) fn counts(&self) -> [u64; 4] {
        let there = self.table.lock().extras.values().filter(|e| e.replica.is_some()).count();
        let [proposed, made, dropped] = [&self.proposed, &self.made, &self.dropped].map(|c| c.load(Relaxed));
        [proposed, made, dropped, there as u64]
    }
}

#[cold]
pub(crate) fn copy_not_requested() -> Error {
    let text = "this master does not request the copy, or no longer does";
    Error::new(ErrorCode::UnavailableInCurrentStatus, text)
}
