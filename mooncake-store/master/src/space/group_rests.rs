//! Groups whose eviction has begun, and function that runs long evictions.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::directory::Pass;
use crate::model::group::Group;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Runs a long part of a call such that other calls of the same thread do not wait for it.
pub type RunBlocking = fn(&mut dyn FnMut());

/// Rest of a group.
pub(crate) struct GroupRest {
    pub(super) group: Arc<Group>,
    pub(super) tenant: u32,
    pub(super) pass: Pass,
    /// Hashes of the objects that no step has looked at.
    pub(super) hashes: Vec<u64>,
}

/// Groups of which a part was evicted, or whose objects wait for one that left.
#[derive(Default)]
pub(crate) struct GroupRests {
    evicted: Mutex<VecDeque<GroupRest>>,
    /// Groups in which a waiting object is looked for.
    pub(super) idle: Mutex<VecDeque<(Arc<Group>, Vec<u64>)>>,
    /// Number of rests, of which others need no lock.
    count: AtomicUsize,
    /// Number of calls whose evictions run aside.
    pub(super) aside: AtomicUsize,
}

impl GroupRests {
    /// Adds a rest that goes before all others.
    pub(super) fn push_front(&self, rest: GroupRest) {
        let mut rests = self.evicted.lock();
        rests.push_front(rest);
        self.count.store(rests.len(), Relaxed);
    }

    /// Takes the first rest of a tenant, or of any.
    pub(super) fn take(&self, tenant: Option<u32>) -> Option<GroupRest> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        let mut rests = self.evicted.lock();
        let at = rests.iter().position(|rest| tenant.is_none_or(|tenant| rest.tenant == tenant))?;
        let rest = rests.remove(at);
        self.count.store(rests.len(), Relaxed);
        rest
    }
}
