//! Locations of objects that are read in parts, and the later responses that may replace them.
//!
//! The caller assembles the parts, and may read two of them at different times. All bytes read
//! through a [`Located`] belong to one value. Before the first part is returned, a later response
//! of the master replaces the first, even if the response is about another value. Afterwards only a
//! response about the same value replaces it.
//!
//! The owner of a disk returns the value that it stores under a key now. This value may be later
//! than the response of the master. An owner that reports versions sends the version with the
//! bytes, so that the client knows which parts belong to one value. In two cases the client asks
//! the master whether it still names that copy: if other parts came from elsewhere, or if the owner
//! reports no version.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{Replica, ReplicaList, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::LookUps;
use parking_lot::Mutex;

use crate::deadline::Deadline;
use crate::errors::shown;
use crate::issuer::Asked;
use crate::replicas::{in_file, is_same, is_same_copy, on_disk};
use crate::state::Inner;

/// Location of an object, as the master gave it, with the end of its lease. Cheap to clone.
///
/// All bytes read through this location belong to one value. If no replica can be read any more,
/// the master is asked again. A response about another value counts only if nothing has been read
/// yet.
#[derive(Clone, Debug)]
pub struct Located {
    pub(crate) location: Arc<ObjectLocation>,
}

#[derive(Debug)]
pub(crate) struct ObjectLocation {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    answer: Arc<Answer>,
    given: Given,
    /// Version on a disk that is known to hold the value of the response.
    on_disk: Option<Version>,
}

/// Value that the bytes returned so far belong to.
#[derive(Debug, PartialEq, Eq)]
enum Given {
    Nothing,
    /// The value that the response describes.
    Named,
    /// A value from a disk. The value may be later than the response.
    Version(Version),
}

/// Endpoint or file that holds a value on disk, and the version of the value there.
pub(crate) type Version = (String, u64);

/// Use of bytes that were read from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The bytes are returned to the caller.
    Given,
    /// The bytes count if the master still names the copy that they were read from.
    Ask,
}

/// Response of the master about an object.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Look-ups that the engine had made before the master was asked. The memory in the response
    /// belongs to no process that was replaced before these look-ups.
    pub(crate) known: LookUps,
    /// Readable replicas, the best last. Replicas in files and on disks come before replicas in
    /// memory.
    replicas: Vec<Replica>,
    pub(crate) lease: Moment,
    checksum: Option<u64>,
    /// Copy of the value in the cache of this client.
    pub(crate) kept: Option<Bytes>,
    /// Number of the value. Responses about the same value have the same number.
    value: u64,
}

impl Located {
    /// Returns the key of the object.
    pub fn key(&self) -> &[u8] {
        &self.location.key
    }

    /// Returns the length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.location.size
    }
}

impl Answer {
    /// Returns the number of a replica, by which the master knows the object again.
    pub(crate) fn named(&self) -> Option<ReplicaId> {
        self.replicas.first().map(|replica| replica.id)
    }

    /// Returns the number of replicas that can be tried.
    pub(crate) fn tries(&self) -> usize {
        self.replicas.len()
    }

    /// Returns the replica to try next, if `left` replicas have not been tried.
    pub(crate) fn replica(&self, left: usize) -> Option<&Replica> {
        self.replicas.get(left.checked_sub(1)?)
    }

    /// Returns the expected checksum of the value.
    pub(crate) fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// Returns whether a later response about an object of the same length describes the same
    /// value. The responses are compared by their replicas, and by their checksums if all replicas
    /// differ.
    fn is(&self, later: &Answer) -> bool {
        is_same((&self.replicas, self.checksum), (&later.replicas, later.checksum))
            || (self.checksum.is_some() && self.checksum == later.checksum)
    }

    /// Returns whether a later response contains all replicas in memory of this response at the
    /// same locations.
    fn stands(&self, later: &Answer) -> bool {
        let stays = |then: &Replica| {
            later.replicas.iter().any(|now| now.id == then.id && now.location == then.location)
        };
        let in_memory = |replica: &&Replica| replica.location.memory().is_some();
        self.is(later) && self.checksum == later.checksum && self.replicas.iter().filter(in_memory).all(stays)
    }
}

impl ObjectLocation {
    /// Returns the last response of the master that counts.
    pub(crate) fn answer(&self) -> Arc<Answer> {
        self.known.lock().answer.clone()
    }

    /// Records that bytes read from a replica of `answer` are returned to the caller, if that is
    /// allowed.
    ///
    /// # Errors
    /// Returns `LEASE_EXPIRED` in two cases: the bytes may no longer be those of the object, or
    /// they belong to another value than the parts that the caller has.
    pub(crate) fn give(&self, answer: &Answer, now: Moment) -> Result<()> {
        let mut known = self.known.lock();
        if !known.is_open(answer, now) || matches!(known.given, Given::Version(_)) {
            return Err(Error::from(ErrorCode::LeaseExpired));
        }
        known.given = Given::Named;
        Ok(())
    }

    /// Records the same for bytes that an owner read from its disk. `version` is the version of the
    /// bytes, if the owner reports one.
    ///
    /// # Errors
    /// Returns the errors of [`give`](Self::give).
    pub(crate) fn give_from_disk(
        &self,
        answer: &Answer,
        version: Option<&Version>,
        now: Moment,
    ) -> Result<Verdict> {
        let mut known = self.known.lock();
        let verdict = match (&known.given, version) {
            _ if !known.is_open(answer, now) => None,
            (Given::Version(given), version) => (Some(given) == version).then_some(Verdict::Given),
            (_, Some(version)) if known.on_disk.as_ref() == Some(version) => Some(Verdict::Given),
            (Given::Nothing, Some(version)) => {
                known.given = Given::Version(version.clone());
                Some(Verdict::Given)
            }
            _ => Some(Verdict::Ask),
        };
        verdict.ok_or_else(|| Error::from(ErrorCode::LeaseExpired))
    }

    /// Records that bytes are returned to the caller after the master was asked again. The bytes
    /// count if `later` still names the copy that they were read from. A later value has another
    /// replica identifier, and reaches the disk only after it has reached the master.
    ///
    /// # Errors
    /// Returns the errors of [`give`](Self::give).
    pub(crate) fn confirm(
        &self,
        answer: &Answer,
        (copy, version): (&Replica, Option<Version>),
        later: &Answer,
        now: Moment,
    ) -> Result<()> {
        let mut known = self.known.lock();
        let stands =
            later.checksum == answer.checksum && later.replicas.iter().any(|later| is_same_copy(copy, later));
        let same = known.answer.value == answer.value && !matches!(known.given, Given::Version(_));
        if !stands || !same || now >= later.lease {
            return Err(Error::from(ErrorCode::LeaseExpired));
        }
        known.answer = Arc::new(Answer { value: answer.value, ..later.clone() });
        (known.given, known.on_disk) = (Given::Named, version.or(known.on_disk.take()));
        Ok(())
    }

    fn is_untouched(&self) -> bool {
        self.known.lock().given == Given::Nothing
    }

    /// Stores a later response if it counts. Returns whether it counts.
    fn learn(&self, mut later: Answer) -> bool {
        let mut known = self.known.lock();
        let same = known.answer.is(&later);
        if !same && known.given != Given::Nothing {
            return false;
        }
        later.value = known.answer.value + u64::from(!same);
        if !same {
            known.on_disk = None;
        }
        known.answer = Arc::new(later);
        true
    }

    /// Returns the response with the lease of `later`, if `later` confirms it.
    fn renew(&self, answer: &Answer, later: Answer) -> Option<Arc<Answer>> {
        if !answer.stands(&later) {
            return None;
        }
        let (replicas, value) = (answer.replicas.clone(), answer.value);
        let renewed = Arc::new(Answer { replicas, value, ..later });
        let mut known = self.known.lock();
        if known.answer.value == value {
            known.answer = renewed.clone();
        }
        Some(renewed)
    }
}

impl Known {
    /// Returns whether bytes read from a replica of `answer` may still be returned to the caller.
    fn is_open(&self, answer: &Answer, now: Moment) -> bool {
        now < answer.lease && self.answer.value == answer.value
    }
}

/// An object that is being read, and the response that the read uses.
pub(crate) type Reading = (Arc<ObjectLocation>, Arc<Answer>);
/// A response, and the same response with a later lease.
pub(crate) type Renewed = (Arc<Answer>, Arc<Answer>);

/// Returns a number that identifies a shared object as long as the object lives.
pub(crate) fn name<S>(shared: &Arc<S>) -> usize {
    Arc::as_ptr(shared).addr()
}

impl<T: Transport> Inner<T> {
    pub(crate) fn located(&self, key: &[u8], list: ReplicaList, asked: Asked) -> Result<Located> {
        let (size, answer) = self.answer(key, list, asked)?;
        let known = Mutex::new(Known { answer: Arc::new(answer), given: Given::Nothing, on_disk: None });
        Ok(Located { location: Arc::new(ObjectLocation { key: key.to_vec(), size, known }) })
    }

    /// Converts a replica list. Returns the length of the object and the response.
    fn answer(&self, key: &[u8], list: ReplicaList, asked: Asked) -> Result<(u64, Answer)> {
        let kept = self.kept(key, &list);
        // The lease began when the master responded. A lease counted from before the request ends
        // earlier, which is safe.
        let lease = asked.at.after(list.lease);
        let mut replicas = list.replicas;
        replicas.retain(|replica| {
            let readable = replica.location.memory().is_some()
                || on_disk(replica).is_some()
                || (self.files.is_some() && in_file(replica).is_some());
            readable && replica.status == ReplicaStatus::Complete
        });
        let in_memory = replicas.iter().find(|replica| replica.location.memory().is_some());
        let Some(size) = in_memory.or(replicas.first()).map(|replica| replica.location.size()) else {
            return Err(Error::from(ErrorCode::InvalidReplica).context(shown(key)));
        };
        replicas.retain(|replica| replica.location.size() == size);
        // Replicas on disks are sorted before replicas in memory.
        self.rank(&mut replicas, |replica| replica.location.memory());
        // Replicas in files are sorted before replicas on disks.
        replicas.sort_by_key(|replica| in_file(replica).is_none());
        let kept = kept.filter(|kept| kept.len() as u64 == size);
        let known = asked.known;
        Ok((size, Answer { known, replicas, lease, checksum: list.checksum, kept, value: 0 }))
    }

    /// Asks the master again for the locations of these objects. Returns for each object whether a
    /// new response counts, or an error if the object is gone.
    pub(crate) async fn ask_again(
        &self,
        locations: &[Arc<ObjectLocation>],
        deadline: &Deadline,
    ) -> HashMap<usize, Result<bool>> {
        let answers = self.ask(locations, deadline).await;
        let learnt = locations.iter().zip(answers).map(|(location, answer)| {
            let learnt = match answer {
                Ok((size, later)) => Ok(size == location.size && location.learn(later)),
                Err(error) if error.kind() == ErrorKind::NotFound && location.is_untouched() => Err(error),
                // The previous response stays valid.
                Err(_) => Ok(false),
            };
            (name(location), learnt)
        });
        learnt.collect()
    }

    /// Asks the master for later leases on objects that are being read. Returns the responses whose
    /// leases were extended.
    pub(crate) async fn renew(&self, reading: Vec<Reading>, deadline: Deadline) -> Vec<Renewed> {
        let locations: Vec<Arc<ObjectLocation>> =
            reading.iter().map(|(location, _)| location.clone()).collect();
        let later = self.ask(&locations, &deadline).await;
        let now = self.config.clock.now();
        let renewed = reading.into_iter().zip(later).filter_map(|((location, answer), later)| {
            let (_, later) = later.ok()?;
            // The earlier lease has not expired yet, so the master granted the later one in time.
            let renewed = (now < answer.lease).then(|| location.renew(&answer, later))??;
            Some((answer, renewed))
        });
        renewed.collect()
    }

    /// Asks the master about these objects. Returns one result per object, or an empty vector if
    /// the master does not respond.
    pub(crate) async fn ask(
        &self,
        locations: &[Arc<ObjectLocation>],
        deadline: &Deadline,
    ) -> Vec<Result<(u64, Answer)>> {
        let keys: Vec<&[u8]> = locations.iter().map(|location| &*location.key).collect();
        let named = locations.iter().map(|one| one.answer().named().unwrap_or(ReplicaId(0)));
        let named: Vec<ReplicaId> = named.collect();
        let asked = self.asked();
        let call = self.master.locate_again(&self.config.tenant, &keys, &named);
        match deadline.bound("replica list", call).await {
            Ok(answers) => {
                let answers = keys.iter().zip(answers);
                answers.map(|(key, answer)| self.answer(key, answer?, asked)).collect()
            }
            Err(error) => {
                tracing::debug!("the master was not asked again: {error}");
                Vec::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::ReplicaId;
    use mooncake_core::replica::{MemoryLocation, ReplicaLocation};

    use super::*;

    fn answer(ids: &[u64], address: u64, checksum: Option<u64>) -> Answer {
        let memory = MemoryLocation { size: 9, address, protocol: "tcp".into(), endpoint: "a:1".into() };
        let replica = |&id: &u64| Replica {
            id: ReplicaId(id),
            location: ReplicaLocation::Memory(memory.clone()),
            status: ReplicaStatus::Complete,
        };
        let replicas = ids.iter().map(replica).collect();
        Answer { known: LookUps::default(), replicas, lease: Moment(10), checksum, kept: None, value: 0 }
    }

    /// Replica identifiers that never belong to another value, not even after a restart.
    const ONE: u64 = 1 << 63 | 1;
    const TWO: u64 = 1 << 63 | 2;

    fn location(first: Answer) -> ObjectLocation {
        let known = Known { answer: Arc::new(first), given: Given::Nothing, on_disk: None };
        ObjectLocation { key: b"k".to_vec(), size: 9, known: Mutex::new(known) }
    }

    #[test]
    fn parts_from_disks_are_of_one_version() {
        let late = Err(ErrorCode::LeaseExpired);
        let [one, other] = [1, 2].map(|number| ("disk:1".to_string(), number));
        let first = answer(&[ONE], 1, None);
        let ask = |location: &ObjectLocation, version: Option<&Version>, now| {
            location.give_from_disk(&first, version, Moment(now)).map_err(|error| error.code())
        };
        let memory =
            |location: &ObjectLocation| location.give(&first, Moment(1)).map_err(|error| error.code());
        let disk = location(first.clone());
        assert_eq!(ask(&disk, Some(&one), 10), late);
        assert_eq!([(); 2].map(|()| ask(&disk, Some(&one), 9)), [Ok(Verdict::Given), Ok(Verdict::Given)]);
        assert_eq!((ask(&disk, Some(&other), 1), ask(&disk, None, 1)), (late, late));
        assert_eq!(memory(&disk), Err(ErrorCode::LeaseExpired), "it may be of another value");
        // The master is asked if other parts came before, and if the owner reports no version.
        let mixed = location(first.clone());
        memory(&mixed).unwrap();
        assert_eq!(ask(&mixed, Some(&one), 1), Ok(Verdict::Ask));
        let copy = first.replicas[0].clone();
        let confirm = |location: &ObjectLocation, version, later: &Answer| {
            let confirmed = location.confirm(&first, (&copy, version), later, Moment(1));
            confirmed.map_err(|error| error.code())
        };
        let (gone, summed) = (answer(&[TWO], 1, None), answer(&[ONE], 1, Some(7)));
        for later in [gone, summed, Answer { lease: Moment(1), ..first.clone() }] {
            assert_eq!(confirm(&mixed, Some(one.clone()), &later), Err(ErrorCode::LeaseExpired));
        }
        confirm(&mixed, Some(one.clone()), &first).unwrap();
        assert_eq!((ask(&mixed, Some(&one), 1), memory(&mixed)), (Ok(Verdict::Given), Ok(())));
        assert_eq!(
            (ask(&mixed, Some(&other), 1), ask(&mixed, None, 1)),
            (Ok(Verdict::Ask), Ok(Verdict::Ask))
        );
        assert_eq!(ask(&location(first.clone()), None, 1), Ok(Verdict::Ask));
        assert!(confirm(&disk, None, &first).is_err(), "the caller has parts of what may be another value");
    }

    #[test]
    fn what_was_given_out_is_of_one_value() {
        for (first, later, same) in [
            (answer(&[ONE], 1, None), answer(&[TWO, ONE], 2, None), true),
            (answer(&[ONE], 1, None), answer(&[TWO], 1, None), false),
            (answer(&[ONE], 1, Some(7)), answer(&[TWO], 2, Some(7)), true),
            (answer(&[ONE], 1, Some(7)), answer(&[ONE], 1, Some(8)), false),
            // A replica identifier of Mooncake C++ identifies a value only together with its
            // location.
            (answer(&[1], 1, None), answer(&[1], 1, None), true),
            (answer(&[1], 1, None), answer(&[1], 2, None), false),
        ] {
            assert_eq!(first.is(&later), same);
            let untouched = location(answer(&[ONE], 1, None));
            assert!(untouched.learn(answer(&[TWO], 1, None)), "nothing was read: whatever it is");
            let location = location(first);
            let before = location.answer();
            location.give(&before, Moment(9)).unwrap();
            assert_eq!(location.give(&before, Moment(10)).unwrap_err().code(), ErrorCode::LeaseExpired);
            assert_eq!(location.learn(later), same);
        }
        // Bytes read through the previous response do not count if it described another value.
        let location = location(answer(&[ONE], 1, None));
        let before = location.answer();
        assert!(location.learn(answer(&[TWO], 1, None)));
        assert_eq!(location.give(&before, Moment(1)).unwrap_err().code(), ErrorCode::LeaseExpired);
        location.give(&location.answer(), Moment(1)).unwrap();
    }
}
