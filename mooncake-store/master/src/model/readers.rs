//! Readers that report the end of their reads.
//!
//! A reader numbers its reads in ascending order, and reports up to which number all of them have
//! ended. Space of a value that was removed is thus free as soon as its last reader has ended,
//! without waiting for the lease. A lease of a reader that reports nothing counts until its end.
//! Numbers of one reader never repeat, because each process of a client draws another identity.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use smallvec::SmallVec;

use super::value::Stamp;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, RwLock};

/// Maximum number of known readers. Reads of further ones count as not reported.
const MAX_READERS: usize = 1 << 16;
/// Maximum number of readers of one object whose reads are known. With more, the lease counts.
const MAX_CLAIMS: usize = 8;
/// Time after its last call at which a reader is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// Time after a removal under a lease during which readers report at short intervals.
const WANTED_FOR: Duration = Duration::from_secs(60);

/// Space of removed values that waits for readers.
pub(crate) trait AwaitedSpace: Send + Sync {
    /// Records that one of the readers has ended its read.
    fn end_read(&self, now: Moment);
}

/// Work that waits for the end of a read.
enum Awaited {
    Space(Arc<dyn AwaitedSpace>),
    /// Object that this read has ended.
    Object(ReadObject),
}

/// Object that ended with its first read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadObject {
    pub(crate) hash: u64,
    pub(crate) stamp: Stamp,
}

/// Reader that reports the end of its reads.
pub(crate) struct Reader {
    /// Number up to which all reads have ended. Changed under the lock of `waiting`.
    ended: AtomicU64,
    /// Time of the last call.
    seen: AtomicU64,
    /// Work by the number of its read, with the time after which it waits no more.
    waiting: Mutex<BTreeMap<u64, Vec<(Moment, Awaited)>>>,
}

impl Reader {
    fn has_ended(&self, number: u64) -> bool {
        self.ended.load(SeqCst) >= number
    }

    /// Lets work wait for the end of a read, until `until` at most. Returns false if the read has
    /// ended.
    fn wait(&self, number: u64, until: Moment, awaited: Awaited) -> bool {
        let mut waiting = self.waiting.lock();
        if self.has_ended(number) {
            return false;
        }
        waiting.entry(number).or_default().push((until, awaited));
        true
    }

    /// Lets the removal of an object wait for the end of the read that has ended it. Returns false
    /// if the read has ended.
    pub(crate) fn await_object(&self, number: u64, until: Moment, object: ReadObject) -> bool {
        self.wait(number, until, Awaited::Object(object))
    }

    fn end(&self, number: u64) -> Vec<(Moment, Awaited)> {
        let mut waiting = self.waiting.lock();
        if self.has_ended(number) {
            return Vec::new();
        }
        self.ended.store(number, SeqCst);
        let rest = number.checked_add(1).map_or_else(BTreeMap::new, |next| waiting.split_off(&next));
        let ended = std::mem::replace(&mut *waiting, rest);
        drop(waiting);
        ended.into_values().flatten().collect()
    }

    /// Drops work that waits no more.
    fn prune(&self, now: Moment) {
        let mut waiting = self.waiting.lock();
        while let Some(first) = waiting.first_entry() {
            if first.get().iter().any(|(until, _)| *until > now) {
                return;
            }
            first.remove();
        }
    }
}

/// Read of an object that its reader will report as ended.
#[derive(Clone)]
struct Claim {
    reader: Arc<Reader>,
    number: u64,
}

impl Claim {
    fn is_open(&self) -> bool {
        !self.reader.has_ended(self.number)
    }
}

/// Reads of the value of one object.
#[derive(Default)]
pub(crate) struct ObjectReads {
    /// End of the latest lease of a reader that reports nothing.
    unreported: Moment,
    claims: SmallVec<[Claim; 1]>,
}

impl ObjectReads {
    /// Records a read of a reader that reports nothing.
    pub(crate) fn add_unreported(&mut self, lease: Moment) {
        self.unreported = self.unreported.max(lease);
    }

    /// Records a read that its reader will report as ended. `lease` is the end of the latest lease
    /// on the value.
    pub(crate) fn add(&mut self, reader: &Arc<Reader>, number: u64, lease: Moment) {
        self.claims.retain(|claim| claim.is_open());
        if let Some(known) = self.claims.iter_mut().find(|claim| Arc::ptr_eq(&claim.reader, reader)) {
            known.number = known.number.max(number);
            return;
        }
        if self.claims.len() == MAX_CLAIMS {
            self.claims.clear();
            self.unreported = self.unreported.max(lease);
        }
        if self.claims.is_empty() {
            self.claims.shrink_to_fit();
        }
        self.claims.push(Claim { reader: reader.clone(), number });
    }

    /// Returns the time until which a reader may read the value. `lease` is the end of the latest
    /// lease on it.
    pub(crate) fn until(&self, lease: Moment) -> Moment {
        if self.claims.iter().any(Claim::is_open) { lease } else { self.unreported }
    }

    /// Returns the end of the latest lease of a reader that reports nothing.
    pub(crate) fn unreported(&self) -> Moment {
        self.unreported
    }

    /// Returns whether reads of readers that report were recorded.
    pub(crate) fn has_claims(&self) -> bool {
        !self.claims.is_empty()
    }

    /// Lets space wait for the ends of the reads, until `until` at most. The space counts one read
    /// for each claim, and one for this call.
    pub(crate) fn await_ends(
        self,
        until: Moment,
        now: Moment,
        space: impl FnOnce(usize) -> Arc<dyn AwaitedSpace>,
    ) {
        let space = space(self.claims.len() + 1);
        for claim in self.claims {
            if !claim.reader.wait(claim.number, until, Awaited::Space(space.clone())) {
                space.end_read(now);
            }
        }
        space.end_read(now);
    }

    /// Returns a copy, for another replica of the same value.
    pub(crate) fn copied(&self) -> Self {
        Self { unreported: self.unreported, claims: self.claims.clone() }
    }
}

/// Readers by the identity that they drew.
#[derive(Default)]
pub(crate) struct Readers {
    readers: RwLock<HashMap<u64, Arc<Reader>>>,
    /// Time until which readers report at short intervals.
    wanted_until: AtomicU64,
}

impl Readers {
    /// Returns a reader, which is known from the first call on; `None` if there are too many.
    pub(crate) fn of(&self, identity: u64, now: Moment) -> Option<Arc<Reader>> {
        let known = self.readers.read().get(&identity).cloned();
        let reader = match known {
            Some(known) => known,
            None => {
                let mut readers = self.readers.write();
                if readers.len() >= MAX_READERS && !readers.contains_key(&identity) {
                    return None;
                }
                let new = || {
                    let waiting = Mutex::new(BTreeMap::new());
                    Arc::new(Reader { ended: AtomicU64::new(0), seen: AtomicU64::new(0), waiting })
                };
                readers.entry(identity).or_insert_with(new).clone()
            }
        };
        reader.seen.store(now.0, SeqCst);
        Some(reader)
    }

    /// Records that all reads of a reader up to a number have ended. Frees space that waited for
    /// them. Returns whether there was any, and the objects that have ended with such a read.
    pub(crate) fn end_reads(&self, reader: &Reader, number: u64, now: Moment) -> (bool, Vec<ReadObject>) {
        if reader.has_ended(number) {
            return (false, Vec::new());
        }
        let (mut has_freed, mut objects) = (false, Vec::new());
        for (_, awaited) in reader.end(number) {
            match awaited {
                Awaited::Space(space) => {
                    has_freed = true;
                    space.end_read(now);
                }
                Awaited::Object(object) => objects.push(object),
            }
        }
        (has_freed, objects)
    }

    /// Records that space was given back that readers may have read under their lease.
    pub(crate) fn want_reports(&self, now: Moment) {
        self.wanted_until.fetch_max(now.after(WANTED_FOR).0, SeqCst);
    }

    /// Returns whether reports free space.
    pub(crate) fn are_reports_wanted(&self, now: Moment) -> bool {
        now.0 < self.wanted_until.load(SeqCst)
    }

    /// Drops work that waits no more, and readers without a recent call.
    pub(crate) fn prune(&self, now: Moment) {
        let is_old = |reader: &Arc<Reader>| Moment(reader.seen.load(SeqCst)).after(FORGOTTEN_AFTER) <= now;
        let readers: Vec<_> = self.readers.read().values().cloned().collect();
        readers.iter().for_each(|reader| reader.prune(now));
        if readers.iter().any(is_old) {
            self.readers.write().retain(|_, reader| !is_old(reader));
        }
    }
}

/// Returns whether a planted bug lets the end of any read count for all readers.
pub(crate) fn counts_any_end() -> bool {
    is_planted("any-reader-ends-all")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::atomic::AtomicUsize;

    struct Counted(AtomicUsize);

    impl AwaitedSpace for Counted {
        fn end_read(&self, _: Moment) {
            self.0.fetch_sub(1, SeqCst);
        }
    }

    const LEASE: Moment = Moment(100);

    #[test]
    fn a_value_is_read_until_its_readers_have_ended() {
        let readers = Readers::default();
        let [one, two] = [1, 2].map(|identity| readers.of(identity, Moment(0)).unwrap());
        let mut reads = ObjectReads::default();
        assert_eq!(reads.until(LEASE), Moment(0));
        reads.add(&one, 3, LEASE);
        reads.add(&two, 1, LEASE);
        reads.add(&one, 2, LEASE);
        readers.end_reads(&one, 2, Moment(1));
        readers.end_reads(&two, 1, Moment(1));
        assert_eq!(reads.until(LEASE), LEASE, "read 3 goes on");
        readers.end_reads(&one, 3, Moment(1));
        readers.end_reads(&one, 1, Moment(1));
        assert_eq!(reads.until(LEASE), Moment(0));
        reads.add_unreported(Moment(50));
        assert_eq!(reads.until(LEASE), Moment(50));
        reads.add(&two, 1, LEASE);
        assert_eq!(reads.until(LEASE), Moment(50), "a late request of a read that has ended");
    }

    #[test]
    fn space_waits_for_all_readers_and_a_repeated_end_counts_once() {
        let readers = Readers::default();
        let all = [1, 2, 3].map(|identity| readers.of(identity, Moment(0)).unwrap());
        let mut reads = ObjectReads::default();
        all.iter().for_each(|reader| reads.add(reader, 5, LEASE));
        readers.end_reads(&all[0], 5, Moment(1));
        let space = Arc::new(Counted(AtomicUsize::new(0)));
        reads.await_ends(LEASE, Moment(1), |count| {
            space.0.store(count, SeqCst);
            space.clone()
        });
        assert_eq!(space.0.load(SeqCst), 2);
        for _ in 0..2 {
            readers.end_reads(&all[1], 7, Moment(1));
            assert_eq!(space.0.load(SeqCst), 1);
        }
        assert_eq!(readers.end_reads(&all[2], 4, Moment(1)), (false, Vec::new()));
        assert_eq!(readers.end_reads(&all[2], u64::MAX, Moment(1)), (true, Vec::new()));
        assert_eq!(space.0.load(SeqCst), 0);
    }

    #[test]
    fn readers_and_reads_are_bounded() {
        let readers = Readers::default();
        let mut reads = ObjectReads::default();
        for identity in 0..MAX_READERS as u64 {
            let reader = readers.of(identity, Moment(0)).unwrap();
            reads.add(&reader, 1, LEASE);
            assert!(reads.claims.len() <= MAX_CLAIMS);
        }
        assert_eq!(reads.unreported(), LEASE, "too many: the lease counts");
        assert!(readers.of(1 << 40, Moment(0)).is_none());
        let first = readers.of(0, Moment(9)).unwrap();
        let object = ReadObject { hash: 1, stamp: Stamp { epoch: 1, number: 1 } };
        assert!(first.await_object(2, Moment(20), object));
        readers.prune(Moment(19));
        assert_eq!(first.waiting.lock().len(), 1);
        readers.prune(Moment(0).after(FORGOTTEN_AFTER));
        assert_eq!((readers.readers.read().len(), first.waiting.lock().len()), (1, 0));
    }
}
