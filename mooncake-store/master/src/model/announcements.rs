//! Values of earlier masters that clients announce: the order of these masters, and removals of
//! many objects at once.

use std::sync::Arc;
use std::time::Duration;

use regex::bytes::Regex;

use super::epochs::EpochOrder;
use super::returned_keys::ReturnedKeys;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, RwLock};

/// Maximum number of filters that are kept. With more, no value of an earlier master is admitted.
const MAX_FILTERS: usize = 64;

/// Keys with a prefix whose rest matches a pattern, if there is one.
#[derive(Debug)]
pub(crate) struct KeyFilter {
    prefix: Box<[u8]>,
    pattern: Option<Regex>,
}

impl KeyFilter {
    pub(crate) fn new(prefix: &[u8], pattern: Option<Regex>) -> Self {
        Self { prefix: prefix.into(), pattern }
    }

    pub(crate) fn matches(&self, key: &[u8]) -> bool {
        let rest = key.strip_prefix(&*self.prefix);
        rest.is_some_and(|rest| self.pattern.as_ref().is_none_or(|pattern| pattern.is_match(rest)))
    }

    /// Returns whether the filter matches every key that `other` matches, as far as is certain.
    fn covers(&self, other: &Self) -> bool {
        match (&self.pattern, &other.pattern) {
            (None, _) => other.prefix.starts_with(&self.prefix),
            (Some(one), Some(two)) => self.prefix == other.prefix && one.as_str() == two.as_str(),
            (Some(_), None) => false,
        }
    }
}

/// Removals of many objects.
#[derive(Default)]
struct FilteredRemovals {
    /// Removals in progress.
    running: Vec<Arc<KeyFilter>>,
    /// Removals since the start, while values of earlier masters may be announced.
    since_start: Vec<Arc<KeyFilter>>,
}

/// Knowledge about values of earlier masters, apart from that in the shards.
pub(crate) struct Announcements {
    pub(crate) order: RwLock<EpochOrder>,
    pub(crate) returned: ReturnedKeys,
    removals: RwLock<FilteredRemovals>,
    /// True once values of earlier masters are no longer announced.
    is_closed: AtomicBool,
    /// Nanoseconds in which this process was stopped. They do not count as time for announcements.
    stopped: AtomicU64,
    /// Serializes the end.
    closing: Mutex<()>,
}

impl Announcements {
    pub(crate) fn new(own_epoch: u64) -> Self {
        Self {
            order: RwLock::new(EpochOrder::new(own_epoch)),
            returned: ReturnedKeys::default(),
            removals: RwLock::default(),
            is_closed: AtomicBool::new(false),
            stopped: AtomicU64::new(0),
            closing: Mutex::new(()),
        }
    }

    /// Records a removal of many objects before it begins. An object that is announced from now on
    /// is not admitted; one that was announced before is visited.
    pub(crate) fn begin_removal(&self, filter: &Arc<KeyFilter>) {
        let mut removals = self.removals.write();
        removals.running.push(filter.clone());
        if !self.is_closed() && !removals.since_start.iter().any(|other| other.covers(filter)) {
            removals.since_start.retain(|other| !filter.covers(other));
            if removals.since_start.len() == MAX_FILTERS {
                removals.since_start = vec![Arc::new(KeyFilter::new(b"", None))];
            } else {
                removals.since_start.push(filter.clone());
            }
        }
    }

    /// Ends a removal of many objects.
    pub(crate) fn end_removal(&self, filter: &Arc<KeyFilter>) {
        let mut removals = self.removals.write();
        if let Some(at) = removals.running.iter().position(|running| Arc::ptr_eq(running, filter)) {
            removals.running.swap_remove(at);
        }
    }

    /// Returns whether a removal of many objects in progress includes a key.
    pub(crate) fn is_being_removed(&self, key: &[u8]) -> bool {
        self.removals.read().running.iter().any(|filter| filter.matches(key))
    }

    /// Returns whether a removal of many objects since the start included a key.
    pub(crate) fn was_removed(&self, key: &[u8]) -> bool {
        self.removals.read().since_start.iter().any(|filter| filter.matches(key))
    }

    /// Extends the time for announcements by a span in which this process was stopped.
    pub(crate) fn extend(&self, span: Duration) {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let add = |stopped: u64| Some(stopped.saturating_add(nanos));
        let _ = self.stopped.fetch_update(Relaxed, Relaxed, add);
    }

    /// Returns the span by which the time for announcements is extended.
    pub(crate) fn extension(&self) -> Duration {
        Duration::from_nanos(self.stopped.load(Relaxed))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    /// Ends announcements, after `free` has freed the records of the shards. Returns whether they
    /// had not ended before.
    pub(crate) fn close(&self, free: impl FnOnce()) -> bool {
        let _closing = self.closing.lock();
        if self.is_closed() {
            return false;
        }
        free();
        self.is_closed.store(true, Relaxed);
        self.removals.write().since_start = Vec::new();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::pattern::compile;

    fn filter(prefix: &str, pattern: Option<&str>) -> Arc<KeyFilter> {
        Arc::new(KeyFilter::new(prefix.as_bytes(), pattern.map(|pattern| compile(pattern).unwrap())))
    }

    #[test]
    fn a_removal_counts_until_announcements_end_and_while_it_runs() {
        let announcements = Announcements::new(1);
        let [some, tenant] = [filter("", Some("^a")), filter("t\0", None)];
        for removal in [&some, &tenant] {
            announcements.begin_removal(removal);
            announcements.end_removal(removal);
        }
        let removed = |key: &str| announcements.was_removed(key.as_bytes());
        assert!(removed("ab") && removed("t\0b") && !removed("b") && !removed("t"));
        assert!(!announcements.is_being_removed(b"ab"));
        announcements.is_closed.store(true, Relaxed);
        let late = filter("", Some("b"));
        announcements.begin_removal(&late);
        assert!(announcements.is_being_removed(b"b") && !removed("b"));
        announcements.end_removal(&late);
        assert!(!announcements.is_being_removed(b"b"));
    }

    #[test]
    fn filters_are_bounded_and_equal_ones_count_once() {
        let announcements = Announcements::new(1);
        let begin = |filter: Arc<KeyFilter>| {
            announcements.begin_removal(&filter);
            announcements.end_removal(&filter);
            announcements.removals.read().since_start.len()
        };
        assert_eq!([begin(filter("a", Some("x"))), begin(filter("a", Some("x")))], [1, 1]);
        assert_eq!([begin(filter("a", None)), begin(filter("a", Some("y")))], [1, 1], "the prefix covers it");
        for number in 1..MAX_FILTERS {
            assert_eq!(begin(filter("", Some(&format!("^{number}$")))), number + 1);
        }
        assert!(!announcements.was_removed(b"other"));
        assert_eq!(begin(filter("z", None)), 1);
        assert!(announcements.was_removed(b"other"), "too many: nothing of before counts");
    }
}
