//! Index of a segment that outlives its process. The file has a header, followed by changes, each
//! with a checksum. A killed process may leave a truncated last change. All changes before it are
//! valid.

use std::collections::BTreeMap;

use mooncake_core::ids::{ClientId, ReplicaId, SegmentId};

use mooncake_protocol::pack::wire_fields;
pub(crate) use mooncake_protocol::record::append;
use mooncake_protocol::record::next;
use mooncake_protocol::wire::{StoredLifetime, StoredReplica};

/// First bytes of an index in every version.
const NAME: &[u8; 7] = b"mkckept";
/// Version of the records that follow, as one digit after the name.
const VERSION: u8 = b'2';
/// Version before, which has no lifetimes.
const VERSION_1: u8 = b'1';
/// Number of objects in one record.
pub(crate) const ITEMS: usize = 16 << 10;

/// Owner of the segment, and identity of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// Length of the segment in bytes.
    pub(crate) len: u64,
    pub(crate) client: ClientId,
    pub(crate) segment: SegmentId,
    /// Addresses of the segment in the processes that had it, the latest last.
    pub(crate) addresses: Vec<u64>,
}

wire_fields!(structure Header {
    device: u64,
    inode: u64,
    len: u64,
    client: ClientId,
    segment: SegmentId,
    addresses: Vec<u64>,
});

/// An object that is known for certain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexedObject {
    /// Identifier of the replica at the master; 0 for an object that the present master has not
    /// reported yet.
    pub(crate) replica: ReplicaId,
    pub(crate) stored: StoredReplica,
    /// Lifetime, if the object ends by itself.
    pub(crate) lifetime: Option<StoredLifetime>,
    /// CRC-64 of the bytes of the object.
    pub(crate) sum: u64,
    /// True if the object was offered to the master. If the master accepted it and still has it,
    /// the master reports it.
    pub(crate) offered: bool,
}

wire_fields!(structure IndexedObject {
    replica: ReplicaId,
    stored: StoredReplica,
    lifetime: Option<StoredLifetime>,
    sum: u64,
    offered: bool,
});

/// [`IndexedObject`] in the first version.
#[derive(Clone, Debug, PartialEq, Eq)]
struct IndexedObjectV1 {
    replica: ReplicaId,
    stored: StoredReplica,
    sum: u64,
    offered: bool,
}

wire_fields!(structure IndexedObjectV1 {
    replica: ReplicaId,
    stored: StoredReplica,
    sum: u64,
    offered: bool,
});

/// Changes of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Epoch of the master that reported the changes.
    pub(crate) epoch: u64,
    /// Number of the last change that the master reported.
    pub(crate) last_change: u64,
    /// Offsets of objects that no longer exist.
    pub(crate) removed: Vec<u64>,
    /// Offsets of objects that were offered to the master.
    pub(crate) offered: Vec<u64>,
    /// Objects that are new.
    pub(crate) added: Vec<IndexedObject>,
    /// True if all keys begin with the names of tenants. `None` if they do not, and in an index of
    /// an earlier version.
    pub(crate) has_tenants: Option<bool>,
}

wire_fields!(structure Change {
    epoch: u64,
    last_change: u64,
    removed: Vec<u64>,
    offered: Vec<u64>,
    added: Vec<IndexedObject>,
    has_tenants: bool [since 1],
});

/// [`Change`] in the first version.
struct ChangeV1 {
    epoch: u64,
    last_change: u64,
    removed: Vec<u64>,
    offered: Vec<u64>,
    added: Vec<IndexedObjectV1>,
}

wire_fields!(structure ChangeV1 {
    epoch: u64,
    last_change: u64,
    removed: Vec<u64>,
    offered: Vec<u64>,
    added: Vec<IndexedObjectV1>,
});

impl From<ChangeV1> for Change {
    fn from(change: ChangeV1) -> Self {
        let added = |IndexedObjectV1 { replica, stored, sum, offered }| IndexedObject {
            replica,
            stored,
            lifetime: None,
            sum,
            offered,
        };
        let ChangeV1 { epoch, last_change, removed, offered, added: objects } = change;
        let added = objects.into_iter().map(added).collect();
        Self { epoch, last_change, removed, offered, added, has_tenants: None }
    }
}

/// Contents of an index that could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) header: Header,
    pub(crate) epoch: u64,
    pub(crate) last_change: u64,
    /// True if all keys begin with the names of tenants.
    pub(crate) has_tenants: Option<bool>,
    /// Objects by offset in the segment.
    pub(crate) objects: BTreeMap<u64, IndexedObject>,
}

/// Returns the beginning of a file.
pub(crate) fn begin(header: &Header) -> Vec<u8> {
    let mut out = NAME.to_vec();
    out.push(VERSION);
    append(header, &mut out);
    out
}

/// Contents of an index file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// An index of this version.
    Valid(Index),
    /// An index that this version cannot read: another version wrote it, or it is damaged. The text
    /// states the cause.
    Unreadable(String),
    /// No index.
    Foreign,
}

/// Parses an index file.
pub(crate) fn read(bytes: &[u8]) -> Contents {
    let Some((version, rest)) = bytes.strip_prefix(NAME).and_then(<[u8]>::split_first) else {
        return Contents::Foreign;
    };
    if ![VERSION_1, VERSION].contains(version) {
        let (file_version, newest) = (version.escape_ascii(), VERSION.escape_ascii());
        return Contents::Unreadable(format!(
            "the index has version {file_version}, this program reads versions up to {newest}"
        ));
    }
    let damaged = || Contents::Unreadable("the header of the index is damaged".into());
    read_records(rest, *version == VERSION_1).map_or_else(damaged, Contents::Valid)
}

fn read_records(mut rest: &[u8], is_version_1: bool) -> Option<Index> {
    let next_change = |rest: &mut &[u8]| match is_version_1 {
        true => next::<ChangeV1>(rest).map(Change::from),
        false => next::<Change>(rest),
    };
    let header: Header = next(&mut rest)?;
    let mut found = Index { header, epoch: 0, last_change: 0, has_tenants: None, objects: BTreeMap::new() };
    while let Some(change) = next_change(&mut rest) {
        (found.epoch, found.last_change) = (change.epoch, change.last_change);
        found.has_tenants = change.has_tenants;
        for position in change.removed {
            found.objects.remove(&position);
        }
        for position in change.offered {
            found.objects.entry(position).and_modify(|object| object.offered = true);
        }
        found.objects.extend(change.added.into_iter().map(|object| (object.stored.offset, object)));
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::Uuid;
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        let (client, segment) = (ClientId(Uuid::new(1, 2)), SegmentId(Uuid::new(3, 4)));
        Header { device: 5, inode: 6, len: 4096, client, segment, addresses: vec![7 << 20] }
    }

    fn indexed(replica: u64, offset: u64) -> IndexedObject {
        let stored = StoredReplica {
            segment: header().segment,
            offset,
            len: 100,
            key: format!("key {replica}").into(),
            checksum: None,
            writer: header().client,
            group: "g".into(),
            hard_pin: false,
            soft_pin_ms: 0,
            epoch: 9,
            number: replica,
        };
        let lifetime = replica
            .is_multiple_of(2)
            .then_some(StoredLifetime { ends_ms: replica, ends_at_read: replica == 4 });
        IndexedObject { replica: ReplicaId(replica), stored, lifetime, sum: replica ^ 0xff, offered: false }
    }

    fn changes() -> Vec<Change> {
        let change = |last_change, removed: &[u64], added: &[IndexedObject]| Change {
            epoch: 9,
            last_change,
            removed: removed.into(),
            offered: vec![256],
            added: added.into(),
            has_tenants: Some(true),
        };
        vec![
            change(2, &[], &[indexed(1, 0), indexed(2, 128)]),
            change(4, &[0], &[indexed(3, 256)]),
            change(6, &[128], &[indexed(4, 128)]),
        ]
    }

    /// Returns the file and the end of each record.
    fn file() -> (Vec<u8>, Vec<usize>) {
        let mut bytes = begin(&header());
        let mut ends = vec![bytes.len()];
        for change in changes() {
            append(&change, &mut bytes);
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn valid(bytes: &[u8]) -> Option<Index> {
        match read(bytes) {
            Contents::Valid(found) => Some(found),
            Contents::Unreadable(_) | Contents::Foreign => None,
        }
    }

    #[test]
    fn written_index_is_read() {
        let found = valid(&file().0).unwrap();
        assert_eq!((found.header, found.epoch, found.last_change), (header(), 9, 6));
        assert_eq!(found.has_tenants, Some(true));
        let objects: Vec<_> = found.objects.into_values().collect();
        assert_eq!(objects, [indexed(4, 128), IndexedObject { offered: true, ..indexed(3, 256) }]);
    }

    #[test]
    fn index_of_version_1_is_read() {
        let mut bytes = begin(&header());
        bytes[NAME.len()] = VERSION_1;
        let IndexedObject { replica, stored, sum, .. } = indexed(3, 256);
        let first = IndexedObjectV1 { replica, stored, sum, offered: false };
        let change =
            ChangeV1 { epoch: 9, last_change: 1, removed: vec![], offered: vec![], added: vec![first] };
        append(&change, &mut bytes);
        let objects: Vec<_> = valid(&bytes).unwrap().objects.into_values().collect();
        assert_eq!(objects, [indexed(3, 256)]);
        // A record of the other version is not read.
        append(&changes()[0], &mut bytes);
        assert_eq!(valid(&bytes).unwrap().objects.len(), 1);
    }

    #[test]
    fn other_version_differs_from_foreign_file() {
        let (mut bytes, ends) = file();
        bytes[ends[0] - 1] ^= 1;
        assert!(matches!(read(&bytes), Contents::Unreadable(why) if why.contains("damaged")));
        bytes[NAME.len()] = b'3';
        assert!(matches!(read(&bytes), Contents::Unreadable(why) if why.contains("version 3")));
        assert_eq!(read(b"dear all"), Contents::Foreign);
        assert_eq!(read(NAME), Contents::Foreign);
    }

    #[test]
    fn truncated_index_ends_at_last_record() {
        let (bytes, ends) = file();
        for cut in 0..bytes.len() {
            let records = ends.iter().filter(|end| **end <= cut).count();
            let found = valid(&bytes[..cut]);
            assert_eq!(found.is_some(), records > 0, "{cut}");
            assert_eq!(found.map_or(0, |found| found.last_change), [0, 0, 2, 4][records], "{cut}");
        }
    }

    #[test]
    fn flipped_bit_ends_valid_records() {
        let (bytes, ends) = file();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            let records = ends.iter().filter(|end| **end <= at).count();
            assert_eq!(valid(&bytes).map_or(0, |found| found.last_change), [0, 0, 2, 4][records], "{at}");
        }
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_read_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&tail);
            let mut bytes = begin(&header());
            bytes.extend(&tail);
            prop_assert!(valid(&bytes).is_some_and(|found| found.objects.is_empty()));
        }
    }
}
