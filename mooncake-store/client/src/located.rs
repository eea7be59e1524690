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
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{Replica, ReplicaList, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::LookUps;
use parking_lot::Mutex;

use crate::deadline::Deadline;
use crate::errors::display_key;
use crate::issuer::RequestStamp;
use crate::read_reports::LocatedRead;
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
    state: Mutex<LocationState>,
    /// Read of the object, which lasts as long as this value.
    _read: Option<Arc<dyn fmt::Debug + Send + Sync>>,
}

#[derive(Debug)]
struct LocationState {
    response: Arc<LocateResponse>,
    delivered: Delivered,
    /// Version on a disk that is known to hold the value of the response.
    on_disk: Option<DiskVersion>,
}

/// Value that the bytes returned so far belong to.
#[derive(Debug, PartialEq, Eq)]
enum Delivered {
    Nothing,
    /// The value that the response describes.
    Described,
    /// A value from a disk. The value may be later than the response.
    Version(DiskVersion),
}

/// Endpoint or file that holds a value on disk, and the version of the value there.
pub(crate) type DiskVersion = (String, u64);

/// Use of bytes that were read from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The bytes are returned to the caller.
    Deliver,
    /// The bytes count if the master still names the copy that they were read from.
    Confirm,
}

/// Response of the master about an object.
#[derive(Clone, Debug)]
pub(crate) struct LocateResponse {
    /// Look-ups that the engine had made before the master was asked. The memory in the response
    /// belongs to no process that was replaced before these look-ups.
    pub(crate) look_ups: LookUps,
    /// Readable replicas, the best last. Replicas in files and on disks come before replicas in
    /// memory.
    replicas: Vec<Replica>,
    pub(crate) lease: Moment,
    checksum: Option<u64>,
    /// Copy of the value in the cache of this client.
    pub(crate) cached_value: Option<Bytes>,
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

    /// Returns the end of the lease on the object, as far as it is known.
    #[cfg(feature = "local")]
    pub(crate) fn lease(&self) -> Moment {
        self.location.state.lock().response.lease
    }
}

impl LocateResponse {
    /// Returns the number of a replica, by which the master knows the object again.
    pub(crate) fn replica_id(&self) -> Option<ReplicaId> {
        self.replicas.first().map(|replica| replica.id)
    }

    /// Returns the number of replicas that can be tried.
    pub(crate) fn replica_count(&self) -> usize {
        self.replicas.len()
    }

    /// Returns whether the object can be read at this time. The loan of a disk needs no lease.
    pub(crate) fn is_open(&self, now: Moment) -> bool {
        now < self.lease || self.replicas.iter().all(|replica| replica.location.memory().is_none())
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
    fn is_same_value(&self, later: &LocateResponse) -> bool {
        is_same((&self.replicas, self.checksum), (&later.replicas, later.checksum))
            || (self.checksum.is_some() && self.checksum == later.checksum)
    }

    /// Returns whether a later response contains all replicas in memory of this response at the
    /// same locations.
    fn is_confirmed_by(&self, later: &LocateResponse) -> bool {
        let stays = |then: &Replica| {
            later.replicas.iter().any(|now| now.id == then.id && now.location == then.location)
        };
        let in_memory = |replica: &&Replica| replica.location.memory().is_some();
        self.is_same_value(later)
            && self.checksum == later.checksum
            && self.replicas.iter().filter(in_memory).all(stays)
    }
}

impl ObjectLocation {
    /// Returns the last response of the master that counts.
    pub(crate) fn response(&self) -> Arc<LocateResponse> {
        self.state.lock().response.clone()
    }

    /// Records that bytes read from a replica of `response` are returned to the caller, if that is
    /// allowed.
    ///
    /// # Errors
    /// Returns `LEASE_EXPIRED` in two cases: the bytes may no longer be those of the object, or
    /// they belong to another value than the parts that the caller has.
    pub(crate) fn deliver(&self, response: &LocateResponse, now: Moment) -> Result<()> {
        let mut state = self.state.lock();
        if !state.is_open(response, now) || matches!(state.delivered, Delivered::Version(_)) {
            return Err(Error::from(ErrorCode::LeaseExpired));
        }
        state.delivered = Delivered::Described;
        Ok(())
    }

    /// Records the same for bytes that an owner read from its disk. `version` is the version of the
    /// bytes, if the owner reports one. The owner keeps the bytes in its buffer for the time of the
    /// loan, so that the lease of the master does not count.
    ///
    /// # Errors
    /// Returns `LEASE_EXPIRED` if the bytes belong to another value than the parts that the caller
    /// has.
    pub(crate) fn deliver_from_disk(
        &self,
        response: &LocateResponse,
        version: Option<&DiskVersion>,
        now: Moment,
    ) -> Result<Verdict> {
        let mut state = self.state.lock();
        let needs_lease = is_planted("loans-need-the-lease-of-the-master");
        let verdict = match (&state.delivered, version) {
            _ if state.response.value != response.value || (needs_lease && now >= response.lease) => None,
            (Delivered::Version(delivered), version) => {
                (Some(delivered) == version).then_some(Verdict::Deliver)
            }
            (_, Some(version)) if state.on_disk.as_ref() == Some(version) => Some(Verdict::Deliver),
            (Delivered::Nothing, Some(version)) => {
                state.delivered = Delivered::Version(version.clone());
                Some(Verdict::Deliver)
            }
            _ => Some(Verdict::Confirm),
        };
        verdict.ok_or_else(|| Error::from(ErrorCode::LeaseExpired))
    }

    /// Records that bytes are returned to the caller after the master was asked again. The bytes
    /// count if `later` still names the copy that they were read from. A later value has another
    /// replica identifier, and reaches the disk only after it has reached the master.
    ///
    /// # Errors
    /// Returns the errors of [`deliver_from_disk`](Self::deliver_from_disk).
    pub(crate) fn confirm(
        &self,
        response: &LocateResponse,
        (copy, version): (&Replica, Option<DiskVersion>),
        later: &LocateResponse,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let is_confirmed = later.checksum == response.checksum
            && later.replicas.iter().any(|later| is_same_copy(copy, later));
        let same =
            state.response.value == response.value && !matches!(state.delivered, Delivered::Version(_));
        if !is_confirmed || !same {
            return Err(Error::from(ErrorCode::LeaseExpired));
        }
        state.response = Arc::new(LocateResponse { value: response.value, ..later.clone() });
        (state.delivered, state.on_disk) = (Delivered::Described, version.or(state.on_disk.take()));
        Ok(())
    }

    /// Returns whether nothing of the object has been read.
    pub(crate) fn is_untouched(&self) -> bool {
        self.state.lock().delivered == Delivered::Nothing
    }

    /// Stores a later response if it counts. Returns whether it counts.
    fn update(&self, mut later: LocateResponse) -> bool {
        let mut state = self.state.lock();
        let same = state.response.is_same_value(&later);
        if !same && state.delivered != Delivered::Nothing {
            return false;
        }
        later.value = state.response.value + u64::from(!same);
        if !same {
            state.on_disk = None;
        }
        state.response = Arc::new(later);
        true
    }

    /// Returns the response with the lease of `later`, if `later` confirms it.
    fn renew(&self, response: &LocateResponse, later: LocateResponse) -> Option<Arc<LocateResponse>> {
        if !response.is_confirmed_by(&later) {
            return None;
        }
        let (replicas, value) = (response.replicas.clone(), response.value);
        let renewed = Arc::new(LocateResponse { replicas, value, ..later });
        let mut state = self.state.lock();
        if state.response.value == value {
            state.response = renewed.clone();
        }
        Some(renewed)
    }
}

impl LocationState {
    /// Returns whether bytes read from a replica of `response` may still be returned to the caller.
    fn is_open(&self, response: &LocateResponse, now: Moment) -> bool {
        now < response.lease && self.response.value == response.value
    }
}

/// An object that is being read, and the response that the read uses.
pub(crate) type Reading = (Arc<ObjectLocation>, Arc<LocateResponse>);
/// A response, and the same response with a later lease.
pub(crate) type Renewed = (Arc<LocateResponse>, Arc<LocateResponse>);

/// Returns a number that identifies a shared object as long as the object lives.
pub(crate) fn identity<S>(shared: &Arc<S>) -> usize {
    Arc::as_ptr(shared).addr()
}

impl<T: Transport> Inner<T> {
    /// Converts the response about an object. `read` is the read that has located it, if the master
    /// knows its number.
    pub(crate) fn located(
        &self,
        key: &[u8],
        list: ReplicaList,
        stamp: RequestStamp,
        read: Option<Arc<LocatedRead<T>>>,
    ) -> Result<Located> {
        let (size, response) = self.to_response(key, list, stamp)?;
        let state = Mutex::new(LocationState {
            response: Arc::new(response),
            delivered: Delivered::Nothing,
            on_disk: None,
        });
        let _read = read.map(|read| read as Arc<dyn fmt::Debug + Send + Sync>);
        Ok(Located { location: Arc::new(ObjectLocation { key: key.to_vec(), size, state, _read }) })
    }

    /// Converts a replica list. Returns the length of the object and the response.
    fn to_response(
        &self,
        key: &[u8],
        list: ReplicaList,
        stamp: RequestStamp,
    ) -> Result<(u64, LocateResponse)> {
        let cached_value = self.cached_value(key, &list);
        // The lease began when the master responded. A lease counted from before the request ends
        // earlier, which is safe.
        let lease = stamp.at.after(list.lease);
        let mut replicas = list.replicas;
        replicas.retain(|replica| {
            let readable = replica.location.memory().is_some()
                || on_disk(replica).is_some()
                || (self.files.is_some() && in_file(replica).is_some());
            readable && replica.status == ReplicaStatus::Complete
        });
        let in_memory = replicas.iter().find(|replica| replica.location.memory().is_some());
        let Some(size) = in_memory.or(replicas.first()).map(|replica| replica.location.size()) else {
            return Err(Error::from(ErrorCode::InvalidReplica).context(display_key(key)));
        };
        replicas.retain(|replica| replica.location.size() == size);
        // Replicas on disks are sorted before replicas in memory.
        self.rank(&mut replicas, |replica| replica.location.memory());
        // Replicas in files are sorted before replicas on disks.
        replicas.sort_by_key(|replica| in_file(replica).is_none());
        let cached_value = cached_value.filter(|cached_value| cached_value.len() as u64 == size);
        let look_ups = stamp.look_ups;
        Ok((
            size,
            LocateResponse { look_ups, replicas, lease, checksum: list.checksum, cached_value, value: 0 },
        ))
    }

    /// Asks the master again for the locations of these objects. Returns for each object whether a
    /// new response counts, or an error if the object is gone.
    pub(crate) async fn refresh_locations(
        &self,
        locations: &[Arc<ObjectLocation>],
        deadline: &Deadline,
    ) -> HashMap<usize, Result<bool>> {
        let results = self.request_locations(locations, deadline).await;
        let updated = locations.iter().zip(results).map(|(location, response)| {
            let updated = match response {
                Ok((size, later)) => Ok(size == location.size && location.update(later)),
                Err(error) if error.kind() == ErrorKind::NotFound && location.is_untouched() => Err(error),
                // The previous response stays valid.
                Err(_) => Ok(false),
            };
            (identity(location), updated)
        });
        updated.collect()
    }

    /// Asks the master for later leases on objects that are being read. Returns the responses whose
    /// leases were extended.
    pub(crate) async fn renew(&self, reading: Vec<Reading>, deadline: Deadline) -> Vec<Renewed> {
        let locations: Vec<Arc<ObjectLocation>> =
            reading.iter().map(|(location, _)| location.clone()).collect();
        let later = self.request_locations(&locations, &deadline).await;
        let now = self.config.clock.now();
        let renewed = reading.into_iter().zip(later).filter_map(|((location, response), later)| {
            let (_, later) = later.ok()?;
            // The earlier lease has not expired yet, so the master granted the later one in time.
            let renewed = (now < response.lease).then(|| location.renew(&response, later))??;
            Some((response, renewed))
        });
        renewed.collect()
    }

    /// Asks the master about these objects. Returns one result per object, or an empty vector if
    /// the master does not respond.
    pub(crate) async fn request_locations(
        &self,
        locations: &[Arc<ObjectLocation>],
        deadline: &Deadline,
    ) -> Vec<Result<(u64, LocateResponse)>> {
        let keys: Vec<&[u8]> = locations.iter().map(|location| &*location.key).collect();
        let last_replicas = locations.iter().map(|one| one.response().replica_id().unwrap_or(ReplicaId(0)));
        let last_replicas: Vec<ReplicaId> = last_replicas.collect();
        let stamp = self.request_stamp();
        let call = self.master.locate_again(&self.config.tenant, &keys, &last_replicas);
        match deadline.bound("replica list", call).await {
            Ok(results) => {
                let results = keys.iter().zip(results);
                results.map(|(key, result)| self.to_response(key, result?, stamp)).collect()
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

    fn response(ids: &[u64], address: u64, checksum: Option<u64>) -> LocateResponse {
        let memory = MemoryLocation {
            size: 9,
            address,
            protocol: "tcp".into(),
            endpoint: "a:1".into(),
            locality: None,
        };
        let replica = |&id: &u64| Replica {
            id: ReplicaId(id),
            location: ReplicaLocation::Memory(memory.clone()),
            status: ReplicaStatus::Complete,
        };
        let replicas = ids.iter().map(replica).collect();
        LocateResponse {
            look_ups: LookUps::default(),
            replicas,
            lease: Moment(10),
            checksum,
            cached_value: None,
            value: 0,
        }
    }

    /// Replica identifiers that never belong to another value, not even after a restart.
    const ONE: u64 = 1 << 63 | 1;
    const TWO: u64 = 1 << 63 | 2;

    fn location(first: LocateResponse) -> ObjectLocation {
        let state = LocationState { response: Arc::new(first), delivered: Delivered::Nothing, on_disk: None };
        ObjectLocation { key: b"k".to_vec(), size: 9, state: Mutex::new(state), _read: None }
    }

    #[test]
    fn parts_from_disks_are_of_one_version() {
        let expired = Err(ErrorCode::LeaseExpired);
        let [one, other] = [1, 2].map(|number| ("disk:1".to_string(), number));
        let first = response(&[ONE], 1, None);
        let deliver = |location: &ObjectLocation, version: Option<&DiskVersion>, now| {
            location.deliver_from_disk(&first, version, Moment(now)).map_err(|error| error.code())
        };
        let memory =
            |location: &ObjectLocation| location.deliver(&first, Moment(1)).map_err(|error| error.code());
        let disk = location(first.clone());
        // The lease of the master has ended at 10, and the loan has not.
        assert_eq!(
            [9, 10].map(|now| deliver(&disk, Some(&one), now)),
            [Ok(Verdict::Deliver), Ok(Verdict::Deliver)]
        );
        assert_eq!((deliver(&disk, Some(&other), 1), deliver(&disk, None, 1)), (expired, expired));
        assert_eq!(memory(&disk), Err(ErrorCode::LeaseExpired), "it may be of another value");
        // The master is asked if other parts came before, and if the owner reports no version.
        let mixed = location(first.clone());
        memory(&mixed).unwrap();
        assert_eq!(deliver(&mixed, Some(&one), 1), Ok(Verdict::Confirm));
        let copy = first.replicas[0].clone();
        let confirm = |location: &ObjectLocation, version, later: &LocateResponse| {
            let confirmed = location.confirm(&first, (&copy, version), later);
            confirmed.map_err(|error| error.code())
        };
        let (replaced, summed) = (response(&[TWO], 1, None), response(&[ONE], 1, Some(7)));
        for later in [replaced, summed] {
            assert_eq!(confirm(&mixed, Some(one.clone()), &later), Err(ErrorCode::LeaseExpired));
        }
        confirm(&mixed, Some(one.clone()), &first).unwrap();
        assert_eq!((deliver(&mixed, Some(&one), 1), memory(&mixed)), (Ok(Verdict::Deliver), Ok(())));
        assert_eq!(
            (deliver(&mixed, Some(&other), 1), deliver(&mixed, None, 1)),
            (Ok(Verdict::Confirm), Ok(Verdict::Confirm))
        );
        assert_eq!(deliver(&location(first.clone()), None, 1), Ok(Verdict::Confirm));
        assert!(confirm(&disk, None, &first).is_err(), "the caller has parts of what may be another value");
    }

    #[test]
    fn delivered_parts_are_of_one_value() {
        for (first, later, same) in [
            (response(&[ONE], 1, None), response(&[TWO, ONE], 2, None), true),
            (response(&[ONE], 1, None), response(&[TWO], 1, None), false),
            (response(&[ONE], 1, Some(7)), response(&[TWO], 2, Some(7)), true),
            (response(&[ONE], 1, Some(7)), response(&[ONE], 1, Some(8)), false),
            // A replica identifier of Mooncake C++ identifies a value only together with its
            // location.
            (response(&[1], 1, None), response(&[1], 1, None), true),
            (response(&[1], 1, None), response(&[1], 2, None), false),
        ] {
            assert_eq!(first.is_same_value(&later), same);
            let untouched = location(response(&[ONE], 1, None));
            assert!(untouched.update(response(&[TWO], 1, None)), "nothing was read: whatever it is");
            let location = location(first);
            let before = location.response();
            location.deliver(&before, Moment(9)).unwrap();
            assert_eq!(location.deliver(&before, Moment(10)).unwrap_err().code(), ErrorCode::LeaseExpired);
            assert_eq!(location.update(later), same);
        }
        // Bytes read through the previous response do not count if it described another value.
        let location = location(response(&[ONE], 1, None));
        let before = location.response();
        assert!(location.update(response(&[TWO], 1, None)));
        assert_eq!(location.deliver(&before, Moment(1)).unwrap_err().code(), ErrorCode::LeaseExpired);
        location.deliver(&location.response(), Moment(1)).unwrap();
    }
}
