//! Checksums of shards: CRC-64/ECMA-182, as of values in the store.

use crc_fast::{CrcAlgorithm, Digest};
use mooncake_core::Result;
use mooncake_engine::TransportSet;
use mooncake_transport::{Slice, SliceMut};

/// Bytes of memory that are read at a time. They are copied first, because a transport may write to
/// the memory; a copy from a device has a high fixed cost.
const CHUNK: usize = 1 << 20;

/// Returns the checksum of memory to serve.
pub(crate) fn of_slice(slice: &Slice<TransportSet>) -> Result<u64> {
    of_chunks(slice.len(), |at, chunk| slice.copy_to(at, chunk))
}

/// Returns the checksum of memory that was read into.
pub(crate) fn of_slice_mut(slice: &SliceMut<TransportSet>) -> Result<u64> {
    of_chunks(slice.len(), |at, chunk| slice.copy_to(at, chunk))
}

fn of_chunks(len: usize, copy: impl Fn(usize, &mut [u8]) -> Result<()>) -> Result<u64> {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Ecma182);
    let mut buffer = vec![0; CHUNK.min(len)];
    let mut at = 0;
    while at < len {
        let count = buffer.len().min(len - at);
        let chunk = &mut buffer[..count];
        copy(at, chunk)?;
        digest.update(chunk);
        at += count;
    }
    Ok(digest.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_make_one_checksum() {
        let bytes: Vec<u8> = (0..3 * CHUNK + 5).map(|index| (index % 251) as u8).collect();
        let sum = of_chunks(bytes.len(), |at, chunk| {
            chunk.copy_from_slice(&bytes[at..at + chunk.len()]);
            Ok(())
        });
        let mut whole = Digest::new(CrcAlgorithm::Crc64Ecma182);
        whole.update(&bytes);
        assert_eq!(sum.unwrap(), whole.finalize());
    }
}
