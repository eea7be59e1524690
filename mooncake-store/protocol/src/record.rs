//! Records of a file: each with its length and a checksum before it, so that whoever reads it knows where what was written ends.

use crc_fast::{CrcAlgorithm, checksum};

use super::pack::{self, Pack, Unpack};

/// Length (4) and CRC-64/ECMA-182 (8) before each record.
const HEAD: usize = 12;

/// One more record.
pub fn append<T: Pack>(record: &T, out: &mut Vec<u8>) {
    let at = out.len();
    out.extend([0; HEAD]);
    pack::encode(record, out);
    let (len, sum) = (out.len() - at - HEAD, sum(&out[at + HEAD..]));
    // Nobody puts 4 GiB into one record; it would not be read again.
    out[at..at + 4].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    out[at + 4..at + HEAD].copy_from_slice(&sum.to_le_bytes());
}

/// The next record, if it is whole.
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
