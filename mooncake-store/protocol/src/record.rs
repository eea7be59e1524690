//! Records in a file. Each has its length and a checksum in front, so that a reader finds the end
//! of the valid part.

use crc_fast::{CrcAlgorithm, checksum};

use super::pack::{self, Pack, Unpack};

/// Length of a record's header: payload length (4 bytes) and CRC-64/ECMA-182 (8 bytes).
const HEAD: usize = 12;

/// Appends one record.
pub fn append<T: Pack>(record: &T, out: &mut Vec<u8>) {
    let at = out.len();
    out.extend([0; HEAD]);
    pack::encode(record, out);
    let (len, sum) = (out.len() - at - HEAD, sum(&out[at + HEAD..]));
    // A record of 4 GiB does not occur; a reader would reject it.
    out[at..at + 4].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    out[at + 4..at + HEAD].copy_from_slice(&sum.to_le_bytes());
}

/// Returns the next record if it is complete.
pub fn next<'a, T: Unpack<'a>>(rest: &mut &'a [u8]) -> Option<T> {
    let (head, body) = rest.split_at_checked(HEAD)?;
    let (len, said) = head.split_at(4);
    let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
    let (body, after) = body.split_at_checked(len)?;
    if sum(body) != u64::from_le_bytes(said.try_into().ok()?) {
        return None;
    }
    *rest = after;
    pack::decode(body).ok()
}

fn sum(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Ecma182, bytes)
}
