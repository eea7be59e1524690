//! What lies in a segment that outlives its process, as it is written down: a header, then changes,
//! each with a checksum. A process that is killed leaves a last change that is cut off; what comes
//! before it counts.

use std::collections::BTreeMap;

use mooncake_core::ids::{ClientId, ReplicaId, SegmentId};

use mooncake_protocol::pack::wire_fields;
pub(crate) use mooncake_protocol::record::append;
use mooncake_protocol::record::next;
use mooncake_protocol::wire::StoredReplica;

/// First bytes of an index in every version.
const NAME: &[u8; 7] = b"mkckept";
/// Version of the records that follow, as one digit after the name.
const VERSION: u8 = b'1';
/// Objects in one record.
pub(crate) const ITEMS: usize = 16 << 10;

/// Whose segment it is, and which file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// Bytes of the segment.
    pub(crate) len: u64,
    pub(crate) client: ClientId,
    pub(crate) segment: SegmentId,
    /// Where it lay in the memory of processes, the last one last.
    pub(crate) places: Vec<u64>,
}

wire_fields!(structure Header { device: u64, inode: u64, len: u64, client: ClientId, segment: SegmentId, places: Vec<u64> });

/// An object that is known for sure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Came {
    /// As the master counts it; 0 for one that the master was not told of yet.
    pub(crate) replica: ReplicaId,
    pub(crate) stored: StoredReplica,
    /// CRC-64 of its bytes.
    pub(crate) sum: u64,
    /// The master was offered it: if it took it and it is there yet, the master tells so.
    pub(crate) offered: bool,
}

wire_fields!(structure Came { replica: ReplicaId, stored: StoredReplica, sum: u64, offered: bool });

/// What has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// The master that told it, and the number of the last thing it told.
    pub(crate) epoch: u64,
    pub(crate) heard: u64,
    /// Where something lay that does not any more.
    pub(crate) went: Vec<u64>,
    /// What the master was offered.
    pub(crate) offered: Vec<u64>,
    pub(crate) came: Vec<Came>,
}

wire_fields!(structure Change { epoch: u64, heard: u64, went: Vec<u64>, offered: Vec<u64>, came: Vec<Came> });

/// What a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) header: Header,
    pub(crate) epoch: u64,
    pub(crate) heard: u64,
    /// By place.
    pub(crate) objects: BTreeMap<u64, Came>,
}

/// The beginning of a file.
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
    Known(Found),
    /// An index that this version cannot read: another version wrote it, or it is damaged. The text
    /// says which.
    Unreadable(String),
    /// No index.
    Foreign,
}

/// Parses an index file.
pub(crate) fn read(bytes: &[u8]) -> Contents {
    let Some((version, rest)) = bytes.strip_prefix(NAME).and_then(<[u8]>::split_first) else {
        return Contents::Foreign;
    };
    if *version != VERSION {
        let (theirs, ours) = (version.escape_ascii(), VERSION.escape_ascii());
        return Contents::Unreadable(format!(
            "the index has version {theirs}, this program reads version {ours}"
        ));
    }
    let damaged = || Contents::Unreadable("the header of the index is damaged".into());
    read_records(rest).map_or_else(damaged, Contents::Known)
}

fn read_records(mut rest: &[u8]) -> Option<Found> {
    let header: Header = next(&mut rest)?;
    let mut found = Found { header, epoch: 0, heard: 0, objects: BTreeMap::new() };
    while let Some(change) = next::<Change>(&mut rest) {
        (found.epoch, found.heard) = (change.epoch, change.heard);
        for place in change.went {
            found.objects.remove(&place);
        }
        for place in change.offered {
            found.objects.entry(place).and_modify(|object| object.offered = true);
        }
        found.objects.extend(change.came.into_iter().map(|came| (came.stored.offset, came)));
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
        Header { device: 5, inode: 6, len: 4096, client, segment, places: vec![7 << 20] }
    }

    fn came(replica: u64, offset: u64) -> Came {
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
        Came { replica: ReplicaId(replica), stored, sum: replica ^ 0xff, offered: false }
    }

    fn changes() -> Vec<Change> {
        let change = |heard, went: &[u64], came: &[Came]| Change {
            epoch: 9,
            heard,
            went: went.into(),
            offered: vec![256],
            came: came.into(),
        };
        vec![
            change(2, &[], &[came(1, 0), came(2, 128)]),
            change(4, &[0], &[came(3, 256)]),
            change(6, &[128], &[came(4, 128)]),
        ]
    }

    /// The file, and where each record ends.
    fn file() -> (Vec<u8>, Vec<usize>) {
        let mut bytes = begin(&header());
        let mut ends = vec![bytes.len()];
        for change in changes() {
            append(&change, &mut bytes);
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn known(bytes: &[u8]) -> Option<Found> {
        match read(bytes) {
            Contents::Known(found) => Some(found),
            Contents::Unreadable(_) | Contents::Foreign => None,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let found = known(&file().0).unwrap();
        assert_eq!((found.header, found.epoch, found.heard), (header(), 9, 6));
        let objects: Vec<_> = found.objects.into_values().collect();
        assert_eq!(objects, [came(4, 128), Came { offered: true, ..came(3, 256) }]);
    }

    #[test]
    fn an_index_of_another_version_is_told_from_a_foreign_file() {
        let (mut bytes, ends) = file();
        bytes[ends[0] - 1] ^= 1;
        assert!(matches!(read(&bytes), Contents::Unreadable(why) if why.contains("damaged")));
        bytes[NAME.len()] = b'2';
        assert!(matches!(read(&bytes), Contents::Unreadable(why) if why.contains("version 2")));
        assert_eq!(read(b"dear all"), Contents::Foreign);
        assert_eq!(read(NAME), Contents::Foreign);
    }

    #[test]
    fn a_file_that_is_cut_off_is_what_it_was_before_the_last_change() {
        let (bytes, ends) = file();
        for cut in 0..bytes.len() {
            let whole = ends.iter().filter(|end| **end <= cut).count();
            let found = known(&bytes[..cut]);
            assert_eq!(found.is_some(), whole > 0, "{cut}");
            assert_eq!(found.map_or(0, |found| found.heard), [0, 0, 2, 4][whole], "{cut}");
        }
    }

    #[test]
    fn a_flipped_bit_ends_what_is_believed() {
        let (bytes, ends) = file();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            let whole = ends.iter().filter(|end| **end <= at).count();
            assert_eq!(known(&bytes).map_or(0, |found| found.heard), [0, 0, 2, 4][whole], "{at}");
        }
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_read_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&tail);
            let mut bytes = begin(&header());
            bytes.extend(&tail);
            prop_assert!(known(&bytes).is_some_and(|found| found.objects.is_empty()));
        }
    }
}
