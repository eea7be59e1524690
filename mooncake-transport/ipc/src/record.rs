//! Messages on the socket: records of 64 bytes, little-endian, some with one file descriptor each.
//! [`RegionListParser`] parses a response, and checks every field.
//!
//! The peer sends [`Record::ListRegions`]. The first response begins with [`Record::SlotTable`] and
//! [`Record::CopyCounters`]. Every response continues with [`Record::Head`], and as many
//! [`Record::Region`] as the head announces.

use std::os::fd::{BorrowedFd, OwnedFd};

use mooncake_core::{Error, Result};

use crate::shared_words::MAX_SLOTS;
use crate::socket::RecordSocket;

pub use crate::socket::RECORD_LEN;

const MAGIC: u32 = u32::from_le_bytes(*b"MKSH");
/// Version of the protocol, which must be equal on both sides. Otherwise another transport is used.
const VERSION: u16 = 1;

/// Message on the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Request for the open regions.
    ListRegions,
    /// Slot table of the owner, sent with its file.
    SlotTable,
    /// Counters of the peer's copies in progress, sent with their file.
    CopyCounters,
    /// Number of regions that follow, and the version of the list.
    Head {
        /// Number of regions that follow.
        regions: u32,
        /// Version of the slot table when the response was made.
        version: u32,
    },
    /// Region, sent with its file, or followed by records that describe its object.
    Region(RegionRecord),
}

/// Region of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRecord {
    /// Slot of the region in the slot table.
    pub slot: u32,
    /// Generation of the slot while the region is open, an odd number.
    pub generation: u32,
    /// First address in the owner's process.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the first byte in the file or other object.
    pub offset: u64,
}

impl RegionRecord {
    /// Returns the first address behind the region.
    pub fn end(&self) -> u64 {
        self.addr.saturating_add(self.len)
    }
}

impl Record {
    /// Sends the record, with a file descriptor if it takes one.
    pub(super) async fn send(self, socket: &RecordSocket, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        socket.send(&self.encode(), fd).await
    }

    /// Receives the next record, and the file descriptor that came with it.
    pub(super) async fn receive(socket: &RecordSocket) -> Result<(Self, Option<OwnedFd>)> {
        let (bytes, fd) = socket.receive().await?;
        Ok((Self::decode(&bytes)?, fd))
    }

    /// Encodes the record.
    pub fn encode(&self) -> [u8; RECORD_LEN] {
        let (kind, a, b, words) = match *self {
            Record::ListRegions => (1u16, 0, 0, [0; 3]),
            Record::SlotTable => (2, 0, 0, [0; 3]),
            Record::CopyCounters => (3, 0, 0, [0; 3]),
            Record::Head { regions, version } => (4, regions, version, [0; 3]),
            Record::Region(r) => (5, r.slot, r.generation, [r.addr, r.len, r.offset]),
        };
        let mut out = [0; RECORD_LEN];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&kind.to_le_bytes());
        out[8..12].copy_from_slice(&a.to_le_bytes());
        out[12..16].copy_from_slice(&b.to_le_bytes());
        for (i, word) in words.iter().enumerate() {
            out[16 + 8 * i..24 + 8 * i].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Parses a record. The error contains the faulty field.
    pub fn decode(bytes: &[u8; RECORD_LEN]) -> Result<Self> {
        let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if word(0) != MAGIC {
            return Err(Error::invalid(format!("a record that begins with {:#010x}", word(0))));
        }
        if short(4) != VERSION {
            return Err(Error::invalid(format!("a record of version {}, ours is {VERSION}", short(4))));
        }
        if bytes[40..].iter().any(|byte| *byte != 0) {
            return Err(Error::invalid("a record with something in its unused bytes"));
        }
        match short(6) {
            1 => Ok(Record::ListRegions),
            2 => Ok(Record::SlotTable),
            3 => Ok(Record::CopyCounters),
            4 => Ok(Record::Head { regions: word(8), version: word(12) }),
            5 => Ok(Record::Region(RegionRecord {
                slot: word(8),
                generation: word(12),
                addr: long(16),
                len: long(24),
                offset: long(32),
            })),
            other => Err(Error::invalid(format!("a record of kind {other}"))),
        }
    }
}

/// Regions of one response, as they arrive.
#[derive(Debug)]
pub struct RegionListParser {
    version: u32,
    expected: usize,
    regions: Vec<RegionRecord>,
}

impl RegionListParser {
    /// Begins with the head of a response. Returns `Invalid` if it announces more regions than
    /// possible.
    pub fn begin(head: Record) -> Result<Self> {
        let Record::Head { regions, version } = head else {
            return Err(Error::invalid(format!("malformed response: expected a head, received {head:?}")));
        };
        let expected = regions as usize;
        if expected > MAX_SLOTS {
            return Err(Error::invalid(format!(
                "malformed response: too many regions. regions={expected} max={MAX_SLOTS}"
            )));
        }
        Ok(Self { version, expected, regions: Vec::with_capacity(expected) })
    }

    /// Returns the version of the list.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns whether more regions follow.
    pub fn is_incomplete(&self) -> bool {
        self.regions.len() < self.expected
    }

    /// Adds the next region, whose file has `file_len` bytes. Returns `Invalid` for another record,
    /// a region outside its file, an overlap, or a used slot.
    pub fn push(&mut self, record: Record, file_len: u64) -> Result<RegionRecord> {
        let Record::Region(region) = record else {
            return Err(Error::invalid(format!("{record:?} instead of a region")));
        };
        let RegionRecord { slot, generation, addr, len, offset } = region;
        if slot as usize >= MAX_SLOTS || generation % 2 == 0 {
            return Err(Error::invalid(format!("a region in slot {slot}, generation {generation}")));
        }
        if addr == 0 || len == 0 || addr.checked_add(len).is_none() {
            return Err(Error::invalid(format!("a region of {len} bytes at {addr:#x}")));
        }
        if offset.checked_add(len).is_none_or(|end| end > file_len) {
            return Err(Error::invalid(format!("{len} bytes from {offset} in a file of {file_len} bytes")));
        }
        let other = self.regions.iter().find(|o| o.slot == slot || (addr < o.end() && o.addr < region.end()));
        if let Some(other) = other {
            return Err(Error::invalid(format!("{region:?} is in the way of {other:?}")));
        }
        if !self.is_incomplete() {
            return Err(Error::invalid("more regions than were announced"));
        }
        self.regions.push(region);
        Ok(region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: RegionRecord =
        RegionRecord { slot: 3, generation: 7, addr: 0x1000, len: 4096, offset: 8192 };

    #[test]
    fn records_come_back() {
        for record in [
            Record::ListRegions,
            Record::SlotTable,
            Record::CopyCounters,
            Record::Head { regions: 2, version: u32::MAX },
            Record::Region(REGION),
        ] {
            assert_eq!(Record::decode(&record.encode()).unwrap(), record);
        }
    }

    #[test]
    fn malformed_record_error_states_cause() {
        let valid = Record::ListRegions.encode();
        for (at, word) in [(0, "begins"), (4, "version"), (6, "kind"), (63, "unused")] {
            let mut invalid = valid;
            invalid[at] ^= 0x40;
            assert!(Record::decode(&invalid).unwrap_err().message().contains(word), "{at}");
        }
    }

    #[test]
    fn listings_are_checked() {
        let head = |regions| Record::Head { regions, version: 1 };
        assert!(
            RegionListParser::begin(head(u32::MAX)).is_err()
                && RegionListParser::begin(Record::ListRegions).is_err()
        );
        let mut parser = RegionListParser::begin(head(2)).unwrap();
        for invalid in [
            RegionRecord { slot: u32::MAX, ..REGION },
            RegionRecord { generation: 6, ..REGION },
            RegionRecord { addr: 0, ..REGION },
            RegionRecord { len: 0, ..REGION },
            RegionRecord { addr: u64::MAX, ..REGION },
            RegionRecord { len: u64::MAX, ..REGION },
            RegionRecord { offset: 8193, ..REGION },
            RegionRecord { offset: u64::MAX, ..REGION },
        ] {
            assert!(parser.push(Record::Region(invalid), 12288).is_err(), "{invalid:?}");
        }
        assert!(parser.push(Record::CopyCounters, 12288).is_err());
        parser.push(Record::Region(REGION), 12288).unwrap();
        for invalid in [
            RegionRecord { addr: 0x9000, ..REGION },
            RegionRecord { slot: 4, addr: 0x1fff, ..REGION },
            RegionRecord { slot: 4, addr: 1, ..REGION },
        ] {
            assert!(parser.push(Record::Region(invalid), 12288).is_err(), "{invalid:?}");
        }
        assert!(parser.is_incomplete());
        parser.push(Record::Region(RegionRecord { slot: 4, addr: 0x2000, ..REGION }), 12288).unwrap();
        assert!(!parser.is_incomplete());
        let more = Record::Region(RegionRecord { slot: 5, addr: 0x8000, ..REGION });
        assert!(parser.push(more, 12288).is_err());
    }
}
