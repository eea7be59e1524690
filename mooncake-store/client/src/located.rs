//! Where objects lie that are read in parts, and what may take the place of that.
//!
//! Parts are put together by the caller, who may read one now and the next a second later. So what
//! a [`Located`] gives is all of one value. As long as it has given nothing, a later answer of the
//! master takes the place of the first, whatever value it speaks of; afterwards only an answer does
//! that speaks of the same one.
//!
//! The owner of a disk gives what lies there under a key, which may be of a later value than the
//! master's answer was. It says a number with it, so that parts are known to be of one value; only
//! where some of them came from elsewhere, or the owner says no number, the master is asked whether
//! it still speaks of that copy.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::replica::{Replica, ReplicaList, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::LookUps;
use parking_lot::Mutex;

use crate::deadline::Deadline;
use crate::errors::shown;
#[cfg(feature = "disk")]
use crate::replicas::in_file;
use crate::replicas::{is_same, is_same_copy, on_disk};
use crate::state::Inner;

/// Where an object lay when the master was asked, and until when that holds. Cheap to clone.
///
/// What is read of it is of one value: where none of its replicas can be read any more the master
/// is asked again, and an answer about another value counts only while nothing was read yet.
#[derive(Clone, Debug)]
pub struct Located {
    pub(crate) place: Arc<Place>,
}

#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) key: Vec<u8>,
    pub(crate) size: u64,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    answer: Arc<Answer>,
    given: Given,
    /// What lies on a disk and is the value that the answer speaks of.
    on_disk: Option<Version>,
}

/// Of what value bytes were given out.
#[derive(Debug, PartialEq, Eq)]
enum Given {
    Nothing,
    /// The one that the answer speaks of.
    Named,
    /// One from a disk. It may be a later one.
    Version(Version),
}

/// Who keeps a value on disk, and its number there.
pub(crate) type Version = (String, u64);

/// What may be done with bytes from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The caller has them.
    Given,
    /// They count if the master still speaks of the copy that they were read from.
    Ask,
}

/// The moment before the master was asked, and what the engine knew then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) at: Moment,
    pub(crate) known: LookUps,
}

/// What the master said of an object.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Processes that were found before the master was asked: the memory that it named is of none
    /// before these.
    pub(crate) known: LookUps,
    /// Those that can be read, the best last; before them those on disks.
    replicas: Vec<Replica>,
    pub(crate) lease: Moment,
    checksum: Option<u64>,
    /// The value, as this client has kept it.
    pub(crate) kept: Option<Bytes>,
    /// Answers about the same value have the same number.
    value: u64,
}

impl Located {
    /// Its key.
    pub fn key(&self) -> &[u8] {
        &self.place.key
    }

    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.place.size
    }
}

impl Answer {
    /// How many replicas there are to try.
    pub(crate) fn tries(&self) -> usize {
        self.replicas.len()
    }

    /// The replica to try when so many have not been.
    pub(crate) fn replica(&self, left: usize) -> Option<&Replica> {
        self.replicas.get(left.checked_sub(1)?)
    }

    /// What the bytes must come to.
    pub(crate) fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// Whether a later answer about an object of this length speaks of the same value: by its
    /// replicas, or by its checksum when all of them are others.
    fn is(&self, later: &Answer) -> bool {
        is_same((&self.replicas, self.checksum), (&later.replicas, later.checksum))
            || (self.checksum.is_some() && self.checksum == later.checksum)
    }

    /// Whether a later answer has all of these replicas where they are, as far as they are in
    /// memory.
    fn stands(&self, later: &Answer) -> bool {
        let stays = |then: &Replica| {
            later.replicas.iter().any(|now| now.id == then.id && now.location == then.location)
        };
        let in_memory = |replica: &&Replica| replica.location.memory().is_some();
        self.is(later) && self.checksum == later.checksum && self.replicas.iter().filter(in_memory).all(stays)
    }
}

impl Place {
    /// What the master said last, as far as it counts.
    pub(crate) fn answer(&self) -> Arc<Answer> {
        self.known.lock().answer.clone()
    }

    /// Bytes that were read from where that answer said are given to the caller, if they may be.
    ///
    /// # Errors
    /// `LEASE_EXPIRED`: nobody can tell any more whether they are the object's, or they are of
    /// another value than the caller has parts of.
    pub(crate) fn give(&self, answer: &Answer, now: Moment) -> Result<()> {
        let mut known = self.known.lock();
        if !known.is_open(answer, now) || matches!(known.given, Given::Version(_)) {
            return Err(Error::from(ErrorCode::LeaseExpired));
        }
        known.given = Given::Named;
        Ok(())
    }

    /// The same for bytes that an owner has read from its disk for that answer; they are of that
    /// version, if it says so.
    ///
    /// # Errors
    /// As [`give`](Self::give).
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

    /// Bytes about which the master was asked afterwards are given to the caller, if it still
    /// speaks of the copy that they were read from: what takes its place has another number, and
    /// comes to the disk only after it has come to the master.
    ///
    /// # Errors
    /// As [`give`](Self::give).
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

    /// Takes in a later answer; whether it counts.
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

    /// The answer with a later lease, if the master still says so.
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
    /// Whether what was read by that answer may still be given out.
    fn is_open(&self, answer: &Answer, now: Moment) -> bool {
        now < answer.lease && self.answer.value == answer.value
    }
}

/// An object that is being read, and what of the master's answers it is read by.
pub(crate) type Reading = (Arc<Place>, Arc<Answer>);
/// An answer, and the same with a later lease.
pub(crate) type Renewed = (Arc<Answer>, Arc<Answer>);

/// What tells one that is shared from others, while it lives.
pub(crate) fn name<S>(shared: &Arc<S>) -> usize {
    Arc::as_ptr(shared).addr()
}

impl<T: Transport> Inner<T> {
    /// Notes that the master is asked now.
    pub(crate) fn asked(&self) -> Asked {
        Asked { at: self.config.clock.now(), known: self.engine.look_ups() }
    }

    pub(crate) fn located(&self, key: &[u8], list: ReplicaList, asked: Asked) -> Result<Located> {
        let (size, answer) = self.answer(key, list, asked)?;
        let known = Mutex::new(Known { answer: Arc::new(answer), given: Given::Nothing, on_disk: None });
        Ok(Located { place: Arc::new(Place { key: key.to_vec(), size, known }) })
    }

    /// The object's length, and the answer.
    fn answer(&self, key: &[u8], list: ReplicaList, asked: Asked) -> Result<(u64, Answer)> {
        let kept = self.kept(key, &list);
        // The lease began when the master answered; counting from before we asked is on the safe
        // side.
        let lease = asked.at.after(list.lease);
        let mut replicas = list.replicas;
        replicas.retain(|replica| {
            let readable = replica.location.memory().is_some() || on_disk(replica).is_some();
            #[cfg(feature = "disk")]
            let readable = readable || (self.files.is_some() && in_file(replica).is_some());
            readable && replica.status == ReplicaStatus::Complete
        });
        let in_memory = replicas.iter().find(|replica| replica.location.memory().is_some());
        let Some(size) = in_memory.or(replicas.first()).map(|replica| replica.location.size()) else {
            return Err(Error::from(ErrorCode::InvalidReplica).context(shown(key)));
        };
        replicas.retain(|replica| replica.location.size() == size);
        // Those on disks come to lie before all others.
        self.rank(&mut replicas, |replica| replica.location.memory());
        // And files before these.
        #[cfg(feature = "disk")]
        replicas.sort_by_key(|replica| in_file(replica).is_none());
        let kept = kept.filter(|kept| kept.len() as u64 == size);
        let known = asked.known;
        Ok((size, Answer { known, replicas, lease, checksum: list.checksum, kept, value: 0 }))
    }

    /// Asks the master again where these objects lie. What became of each: whether there is
    /// something new, or that it is gone.
    pub(crate) async fn ask_again(
        &self,
        places: &[Arc<Place>],
        deadline: &Deadline,
    ) -> HashMap<usize, Result<bool>> {
        let answers = self.ask(places, deadline).await;
        let learnt = places.iter().zip(answers).map(|(place, answer)| {
            let learnt = match answer {
                Ok((size, later)) => Ok(size == place.size && place.learn(later)),
                Err(error) if error.kind() == ErrorKind::NotFound && place.is_untouched() => Err(error),
                // What is known of it stands.
                Err(_) => Ok(false),
            };
            (name(place), learnt)
        });
        learnt.collect()
    }

    /// Asks the master for later leases on objects that are being read. Answers that hold for
    /// longer now.
    pub(crate) async fn renew(&self, reading: Vec<Reading>, deadline: Deadline) -> Vec<Renewed> {
        let places: Vec<Arc<Place>> = reading.iter().map(|(place, _)| place.clone()).collect();
        let later = self.ask(&places, &deadline).await;
        let now = self.config.clock.now();
        let renewed = reading.into_iter().zip(later).filter_map(|((place, answer), later)| {
            let (_, later) = later.ok()?;
            // The master had given the later one before the earlier one was over.
            let renewed = (now < answer.lease).then(|| place.renew(&answer, later))??;
            Some((answer, renewed))
        });
        renewed.collect()
    }

    /// What the master says of these objects now; nothing when it does not answer.
    pub(crate) async fn ask(&self, places: &[Arc<Place>], deadline: &Deadline) -> Vec<Result<(u64, Answer)>> {
        let keys: Vec<&[u8]> = places.iter().map(|place| &*place.key).collect();
        let asked = self.asked();
        match deadline.bound("replica list", self.master.locate(&self.config.tenant, &keys)).await {
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
        let place = MemoryLocation { size: 9, address, protocol: "tcp".into(), endpoint: "a:1".into() };
        let replica = |&id: &u64| Replica {
            id: ReplicaId(id),
            location: ReplicaLocation::Memory(place.clone()),
            status: ReplicaStatus::Complete,
        };
        let replicas = ids.iter().map(replica).collect();
        Answer { known: LookUps::default(), replicas, lease: Moment(10), checksum, kept: None, value: 0 }
    }

    /// Of one value for all time.
    const ONE: u64 = 1 << 63 | 1;
    const TWO: u64 = 1 << 63 | 2;

    fn place(first: Answer) -> Place {
        let known = Known { answer: Arc::new(first), given: Given::Nothing, on_disk: None };
        Place { key: b"k".to_vec(), size: 9, known: Mutex::new(known) }
    }

    #[test]
    fn parts_from_disks_are_of_one_version() {
        let late = Err(ErrorCode::LeaseExpired);
        let [one, other] = [1, 2].map(|number| ("disk:1".to_string(), number));
        let first = answer(&[ONE], 1, None);
        let ask = |place: &Place, version: Option<&Version>, now| {
            place.give_from_disk(&first, version, Moment(now)).map_err(|error| error.code())
        };
        let memory = |place: &Place| place.give(&first, Moment(1)).map_err(|error| error.code());
        let disk = place(first.clone());
        assert_eq!(ask(&disk, Some(&one), 10), late);
        assert_eq!([(); 2].map(|()| ask(&disk, Some(&one), 9)), [Ok(Verdict::Given), Ok(Verdict::Given)]);
        assert_eq!((ask(&disk, Some(&other), 1), ask(&disk, None, 1)), (late, late));
        assert_eq!(memory(&disk), Err(ErrorCode::LeaseExpired), "it may be of another value");
        // What others came before is asked about, and so is what nobody knows the number of.
        let mixed = place(first.clone());
        memory(&mixed).unwrap();
        assert_eq!(ask(&mixed, Some(&one), 1), Ok(Verdict::Ask));
        let copy = first.replicas[0].clone();
        let confirm = |place: &Place, version, later: &Answer| {
            let confirmed = place.confirm(&first, (&copy, version), later, Moment(1));
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
        assert_eq!(ask(&place(first.clone()), None, 1), Ok(Verdict::Ask));
        assert!(confirm(&disk, None, &first).is_err(), "the caller has parts of what may be another value");
    }

    #[test]
    fn what_was_given_out_is_of_one_value() {
        for (first, later, same) in [
            (answer(&[ONE], 1, None), answer(&[TWO, ONE], 2, None), true),
            (answer(&[ONE], 1, None), answer(&[TWO], 1, None), false),
            (answer(&[ONE], 1, Some(7)), answer(&[TWO], 2, Some(7)), true),
            (answer(&[ONE], 1, Some(7)), answer(&[ONE], 1, Some(8)), false),
            // Numbers of the existing system are of one value only with their place.
            (answer(&[1], 1, None), answer(&[1], 1, None), true),
            (answer(&[1], 1, None), answer(&[1], 2, None), false),
        ] {
            assert_eq!(first.is(&later), same);
            let untouched = place(answer(&[ONE], 1, None));
            assert!(untouched.learn(answer(&[TWO], 1, None)), "nothing was read: whatever it is");
            let place = place(first);
            let before = place.answer();
            place.give(&before, Moment(9)).unwrap();
            assert_eq!(place.give(&before, Moment(10)).unwrap_err().code(), ErrorCode::LeaseExpired);
            assert_eq!(place.learn(later), same);
        }
        // Bytes that come in from the answer before the last do not count, if that was about
        // another value.
        let place = place(answer(&[ONE], 1, None));
        let before = place.answer();
        assert!(place.learn(answer(&[TWO], 1, None)));
        assert_eq!(place.give(&before, Moment(1)).unwrap_err().code(), ErrorCode::LeaseExpired);
        place.give(&place.answer(), Moment(1)).unwrap();
    }
}
