//! Prefixes that C programs hold.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_char};

use mooncake_core::replica::{Replica, ReplicaList, ReplicaLocation};
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use super::types::{
    MOONCAKE_REPLICA_DFS, MOONCAKE_REPLICA_DISK, MOONCAKE_REPLICA_LOCAL_DISK, MOONCAKE_REPLICA_MEMORY,
    MOONCAKE_REPLICA_NOF_SSD, mooncake_object, mooncake_prefix, mooncake_replica,
};

/// Prefixes that were returned and not freed yet, by address.
static PREFIXES: Mutex<BTreeMap<usize, Prefix>> = Mutex::new(BTreeMap::new());

/// Prefix with all that it points to.
struct Prefix {
    // One prefix. A box would claim to be the only pointer to it.
    _root: Vec<mooncake_prefix>,
    _objects: Vec<mooncake_object>,
    _replicas: Vec<mooncake_replica>,
    _texts: Texts,
}

// SAFETY: the pointers lead to the fields of the same value, which nothing changes.
unsafe impl Send for Prefix {}

/// Strings of a prefix. Objects mostly share a few endpoints.
#[derive(Default)]
struct Texts(HashMap<String, CString>);

impl Texts {
    /// Returns the address of a copy. The bytes behind a zero byte are lost.
    fn add(&mut self, text: &str) -> *const c_char {
        if let Some(copy) = self.0.get(text) {
            return copy.as_ptr();
        }
        let copy = CString::new(text.split('\0').next().unwrap_or_default()).unwrap_or_default();
        self.0.entry(text.to_owned()).or_insert(copy).as_ptr()
    }
}

fn replica(source: &Replica, texts: &mut Texts) -> mooncake_replica {
    let (kind, endpoint, protocol, address) = match &source.location {
        ReplicaLocation::Memory(at) => (MOONCAKE_REPLICA_MEMORY, &at.endpoint, &*at.protocol, at.address),
        ReplicaLocation::NofSsd(at) => (MOONCAKE_REPLICA_NOF_SSD, &at.endpoint, &*at.protocol, at.address),
        ReplicaLocation::Disk { path, .. } => (MOONCAKE_REPLICA_DISK, path, "", 0),
        ReplicaLocation::LocalDisk { endpoint, .. } => (MOONCAKE_REPLICA_LOCAL_DISK, endpoint, "", 0),
        ReplicaLocation::Dfs { path, offset, .. } => (MOONCAKE_REPLICA_DFS, path, "", *offset),
    };
    mooncake_replica {
        kind,
        endpoint: texts.add(endpoint),
        protocol: texts.add(protocol),
        address,
        length: source.location.size(),
    }
}

/// Returns a prefix to the program, which keeps it until [`free`].
pub(super) fn into_raw(lists: &[ReplicaList]) -> *mut mooncake_prefix {
    let mut texts = Texts::default();
    let all_replicas = lists.iter().flat_map(|list| &list.replicas);
    let replicas: Vec<mooncake_replica> = all_replicas.map(|source| replica(source, &mut texts)).collect();
    let mut remaining = &replicas[..];
    let object = |list: &ReplicaList| {
        let (own_replicas, following) = remaining.split_at(list.replicas.len());
        remaining = following;
        mooncake_object {
            lease_ms: u64::try_from(list.lease.as_millis()).unwrap_or(u64::MAX),
            replicas: own_replicas.as_ptr(),
            replica_count: own_replicas.len(),
        }
    };
    let objects: Vec<mooncake_object> = lists.iter().map(object).collect();
    let mut root = vec![mooncake_prefix { objects: objects.as_ptr(), count: objects.len() }];
    let pointer = root.as_mut_ptr();
    let prefix = Prefix { _root: root, _objects: objects, _replicas: replicas, _texts: texts };
    PREFIXES.lock().insert(pointer.addr(), prefix);
    pointer
}

/// Frees a prefix.
pub(super) fn free(pointer: *mut mooncake_prefix) -> Result<()> {
    let prefix = PREFIXES.lock().remove(&pointer.addr());
    prefix.map(drop).ok_or_else(|| {
        Error::invalid(format!("cannot free prefix {pointer:p}: it was freed already, or never returned"))
    })
}
