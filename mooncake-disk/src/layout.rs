//! Layout of the files on the disk. The module does no I/O, and accepts any bytes.
//!
//! A store is two files. `objects` holds records at multiples of [`BLOCK`]: a header with the key
//! and the checksums of the value, padded to blocks, then the value. `index` holds a header and
//! then one entry per put, appended. An entry refers to a record and counts only if the header of
//! the record agrees with it. Removing an object overwrites the first block of its record, so a
//! removed object stays removed whatever happens to the index.
//!
//! All numbers are little endian; all checksums are CRC32C.
//!
//! ```text
//! index header   magic 8 | version 4 | block 4 | store 16 | capacity 8 | zeros 20
//!                | checksum of all before 4
//! index entry    magic 4 | checksum of all behind 4 | seq 8 | offset 8 | value length 8
//!                | key length 4 | key
//! record header  magic 4 | checksum of all behind 4 | version 4 | key length 4 | store 16 | seq 8
//!                | value length 8 | key | checksum 4 per chunk | zeros
//! ```

use crc_fast::{CrcAlgorithm, checksum};

/// Version of the layout, in the index header and in each record.
pub const VERSION: u32 = 1;
/// Alignment of offsets in the file of objects.
pub const BLOCK: u64 = 4096;
/// Bytes of a value under one checksum, so that a part of it can be read and verified alone.
pub const CHUNK: usize = 64 << 10;
/// Longest key in bytes.
pub const MAX_KEY: usize = 1 << 20;
/// Longest value in bytes.
pub const MAX_VALUE: u64 = 1 << 40;
/// Length of an index header.
pub const INDEX_HEADER: usize = 64;

const INDEX_MAGIC: [u8; 8] = *b"mcdkindx";
const INDEX_ENTRY_MAGIC: [u8; 4] = *b"mcnt";
const RECORD_MAGIC: [u8; 4] = *b"mcob";
const INDEX_ENTRY_FIXED: usize = 36;
const RECORD_FIXED: usize = 48;

/// Returns the CRC32C of bytes.
pub fn sum(bytes: &[u8]) -> u32 {
    // The algorithm has 32 bits.
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Returns the checksums of the chunks of a value.
pub fn sums(value: &[u8]) -> Vec<u32> {
    value.chunks(CHUNK).map(sum).collect()
}

/// Returns the number of chunks of a value.
pub fn chunks(value_len: u64) -> u64 {
    value_len.div_ceil(CHUNK as u64)
}

/// Header of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexHeader {
    /// Version of everything behind the header.
    pub version: u32,
    /// Random number of the store. Records of another store do not count.
    pub store: u128,
    /// Bytes for objects at the time when the index was written.
    pub capacity: u64,
}

impl IndexHeader {
    /// Returns the encoded header.
    pub fn encode(&self) -> [u8; INDEX_HEADER] {
        let mut out = [0; INDEX_HEADER];
        out[..8].copy_from_slice(&INDEX_MAGIC);
        out[8..12].copy_from_slice(&self.version.to_le_bytes());
        out[12..16].copy_from_slice(&(BLOCK as u32).to_le_bytes());
        out[16..32].copy_from_slice(&self.store.to_le_bytes());
        out[32..40].copy_from_slice(&self.capacity.to_le_bytes());
        let sum = sum(&out[..INDEX_HEADER - 4]);
        out[INDEX_HEADER - 4..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Parses the header of any version. Returns `None` if the bytes are not a header, or damaged.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.first_chunk::<INDEX_HEADER>()?;
        let (body, tail) = bytes.split_at(INDEX_HEADER - 4);
        if bytes[..8] != INDEX_MAGIC || sum(body) != u32_at(tail, 0)? {
            return None;
        }
        let store = u128::from_le_bytes(*bytes.get(16..32)?.first_chunk()?);
        Some(Self { version: u32_at(bytes, 8)?, store, capacity: u64_at(bytes, 32)? })
    }
}

/// Entry of an index: key, record and length of one put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry<'a> {
    /// Sequence number of the put. The highest number of a key counts.
    pub seq: u64,
    /// Offset of the record in the file of objects.
    pub offset: u64,
    /// Length of the value in bytes.
    pub value_len: u64,
    /// Key of the object.
    pub key: &'a [u8],
}

/// Result of [`IndexEntry::parse`].
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// Complete entry, and its length in bytes.
    Complete(IndexEntry<'a>, usize),
    /// Possible entry, if there are at least so many bytes.
    Incomplete(usize),
    /// No entry.
    Invalid,
}

impl<'a> IndexEntry<'a> {
    /// Returns the length in bytes.
    pub fn encoded_len(&self) -> usize {
        INDEX_ENTRY_FIXED + self.key.len()
    }

    /// Appends the encoded entry.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&INDEX_ENTRY_MAGIC);
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.value_len.to_le_bytes());
        // The cast is lossless, because keys have at most `MAX_KEY` bytes.
        out.extend_from_slice(&(self.key.len() as u32).to_le_bytes());
        out.extend_from_slice(self.key);
        let sum = sum(&out[start + 8..]);
        out[start + 4..start + 8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Parses the entry at the start of the bytes.
    pub fn parse(bytes: &'a [u8]) -> Parsed<'a> {
        if !bytes.starts_with(&INDEX_ENTRY_MAGIC[..bytes.len().min(4)]) {
            return Parsed::Invalid;
        }
        let Some(fixed) = bytes.first_chunk::<INDEX_ENTRY_FIXED>() else {
            return Parsed::Incomplete(INDEX_ENTRY_FIXED);
        };
        let field = |at| u64_at(fixed, at).unwrap_or(u64::MAX);
        let (seq, offset, value_len) = (field(8), field(16), field(24));
        let key_len = u32_at(fixed, 32).map_or(usize::MAX, |n| n as usize);
        if key_len > MAX_KEY || value_len > MAX_VALUE || !offset.is_multiple_of(BLOCK) {
            return Parsed::Invalid;
        }
        let len = INDEX_ENTRY_FIXED + key_len;
        let Some(encoded) = bytes.get(..len) else { return Parsed::Incomplete(len) };
        if u32_at(fixed, 4) != Some(sum(&encoded[8..])) {
            return Parsed::Invalid;
        }
        Parsed::Complete(IndexEntry { seq, offset, value_len, key: &encoded[INDEX_ENTRY_FIXED..] }, len)
    }
}

/// Header of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Number of the store.
    pub store: u128,
    /// Sequence number of the put, as in its index entry.
    pub seq: u64,
    /// Length of the value in bytes.
    pub value_len: u64,
    /// Key of the object.
    pub key: &'a [u8],
    /// Checksum of each chunk of the value.
    pub sums: Vec<u32>,
}

/// Returns the length of the header of a record, a multiple of [`BLOCK`].
pub fn header_len(key_len: usize, value_len: u64) -> u64 {
    (RECORD_FIXED as u64 + key_len as u64 + 4 * chunks(value_len)).next_multiple_of(BLOCK)
}

/// Returns the length of a record, a multiple of [`BLOCK`].
pub fn record_len(key_len: usize, value_len: u64) -> u64 {
    header_len(key_len, value_len) + value_len.next_multiple_of(BLOCK)
}

impl<'a> Record<'a> {
    /// Writes the header to the front of a buffer of at least [`header_len`] bytes.
    pub fn encode(&self, out: &mut [u8]) {
        let keys = RECORD_FIXED + self.key.len();
        out[..4].copy_from_slice(&RECORD_MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        // The cast is lossless, because keys have at most `MAX_KEY` bytes.
        out[12..16].copy_from_slice(&(self.key.len() as u32).to_le_bytes());
        out[16..32].copy_from_slice(&self.store.to_le_bytes());
        out[32..40].copy_from_slice(&self.seq.to_le_bytes());
        out[40..48].copy_from_slice(&self.value_len.to_le_bytes());
        out[RECORD_FIXED..keys].copy_from_slice(self.key);
        for (at, sum) in self.sums.iter().enumerate() {
            out[keys + 4 * at..keys + 4 * at + 4].copy_from_slice(&sum.to_le_bytes());
        }
        let end = keys + 4 * self.sums.len();
        let sum = sum(&out[8..end]);
        out[4..8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Parses the header of a record. Returns `None` if it has another version, is cut off or
    /// damaged.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let fixed = bytes.first_chunk::<RECORD_FIXED>()?;
        let (key_len, value_len) = (u32_at(fixed, 12)? as usize, u64_at(fixed, 40)?);
        let known = fixed[..4] == RECORD_MAGIC && u32_at(fixed, 8)? == VERSION;
        if !known || key_len > MAX_KEY || value_len > MAX_VALUE {
            return None;
        }
        let keys = RECORD_FIXED + key_len;
        let end = keys.checked_add(usize::try_from(4 * chunks(value_len)).ok()?)?;
        let encoded = bytes.get(..end)?;
        if u32_at(fixed, 4)? != sum(&encoded[8..]) {
            return None;
        }
        Some(Self {
            store: u128::from_le_bytes(*fixed.get(16..32)?.first_chunk()?),
            seq: u64_at(fixed, 32)?,
            value_len,
            key: &encoded[RECORD_FIXED..keys],
            sums: encoded[keys..].chunks_exact(4).filter_map(|sum| u32_at(sum, 0)).collect(),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_sums() {
        assert_eq!(sum(b"123456789"), 0xe306_9283, "the check value of CRC32C");
        assert_eq!(sums(&[0; CHUNK + 1]).len(), 2);
        assert_eq!((chunks(0), chunks(1), chunks(CHUNK as u64), chunks(CHUNK as u64 + 1)), (0, 1, 1, 2));
    }

    #[test]
    fn every_flip_and_every_cut_is_detected() {
        let header = IndexHeader { version: VERSION, store: 7 << 100, capacity: 1 << 30 }.encode();
        let mut index_entry = Vec::new();
        IndexEntry { seq: 3, offset: 8192, value_len: 100, key: b"a key" }.encode(&mut index_entry);
        let value = vec![5u8; CHUNK + 3];
        let record =
            Record { store: 1, seq: 3, value_len: value.len() as u64, key: b"a key", sums: sums(&value) };
        let mut head = vec![0; header_len(5, value.len() as u64) as usize];
        record.encode(&mut head);
        let used = RECORD_FIXED + 5 + 8;
        assert_eq!(Record::decode(&head[..used]), Some(record));
        for bit in 0..8 {
            for at in 0..INDEX_HEADER {
                let mut corrupted = header;
                corrupted[at] ^= 1 << bit;
                assert_eq!(IndexHeader::decode(&corrupted), None, "byte {at}");
            }
            for at in 0..index_entry.len() {
                let mut corrupted = index_entry.clone();
                corrupted[at] ^= 1 << bit;
                assert!(!matches!(IndexEntry::parse(&corrupted), Parsed::Complete(..)), "byte {at}");
            }
            for at in 0..used {
                let mut corrupted = head.clone();
                corrupted[at] ^= 1 << bit;
                assert_eq!(Record::decode(&corrupted), None, "byte {at}");
            }
        }
        for len in 0..index_entry.len() {
            assert!(matches!(IndexEntry::parse(&index_entry[..len]), Parsed::Incomplete(_)), "{len} bytes");
        }
        assert!((0..used).all(|len| Record::decode(&head[..len]).is_none()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn what_is_written_is_read(seq: u64, store: u128, blocks in 0u64..1 << 40, key in prop::collection::vec(any::<u8>(), 0..200),
                                   value in prop::collection::vec(any::<u8>(), 0..3000), front in prop::collection::vec(any::<u8>(), 0..9)) {
            let index_entry = IndexEntry { seq, offset: blocks * BLOCK, value_len: value.len() as u64, key: &key };
            let mut out = front.clone();
            index_entry.encode(&mut out);
            prop_assert_eq!(IndexEntry::parse(&out[front.len()..]), Parsed::Complete(index_entry.clone(), index_entry.encoded_len()));
            let record = Record { store, seq, value_len: value.len() as u64, key: &key, sums: sums(&value) };
            let mut out = vec![0; header_len(key.len(), value.len() as u64) as usize];
            record.encode(&mut out);
            prop_assert_eq!(Record::decode(&out), Some(record));
        }

        #[test]
        fn noise_is_never_an_entry_or_record(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(IndexHeader::decode(&bytes), None);
            prop_assert_eq!(Record::decode(&bytes), None);
            prop_assert!(!matches!(IndexEntry::parse(&bytes), Parsed::Complete(..)));
        }
    }
}
