//! Checksums of values: CRC-64/ECMA-182, as in Mooncake C++.

use crc_fast::{CrcAlgorithm, Digest};
use mooncake_core::Result;
use mooncake_core::memory::Location;
use mooncake_transport::{Slice, SliceMut, Transport};

/// Bytes of registered memory that are read at a time. They are copied first, because a transport
/// may write to the memory.
const CHUNK: usize = 16 << 10;

/// Bytes of device memory that are read at a time. Each copy from a device has a high fixed cost.
const DEVICE_CHUNK: usize = 1 << 20;

fn chunk_of(location: Location) -> usize {
    if location.is_device() { DEVICE_CHUNK } else { CHUNK }
}

/// Checksum of the bytes seen so far.
pub(crate) struct Sum(Digest);

impl Sum {
    pub(crate) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Ecma182))
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn slice<T: Transport>(&mut self, slice: &Slice<T>) -> Result<()> {
        self.chunks(slice.len(), chunk_of(slice.location()), |at, chunk| slice.copy_to(at, chunk))
    }

    /// Adds the first `len` bytes of a slice.
    pub(crate) fn front<T: Transport>(&mut self, slice: &SliceMut<T>, len: usize) -> Result<()> {
        self.chunks(len, chunk_of(slice.location()), |at, chunk| slice.copy_to(at, chunk))
    }

    fn chunks(
        &mut self,
        len: usize,
        max_chunk: usize,
        copy: impl Fn(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let (mut stack, mut heap) = ([0; CHUNK], Vec::new());
        let chunk = if max_chunk.min(len) > CHUNK {
            heap.resize(max_chunk.min(len), 0);
            &mut heap[..]
        } else {
            &mut stack[..]
        };
        for at in (0..len).step_by(chunk.len()) {
            let chunk_len = chunk.len();
            let part = &mut chunk[..chunk_len.min(len - at)];
            copy(at, part)?;
            self.0.update(part);
        }
        Ok(())
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_mooncake_cpp() {
        let checksum_of = |bytes: &[u8]| {
            let mut sum = Sum::new();
            sum.bytes(bytes);
            sum.value()
        };
        // Recorded from a client of Mooncake C++ 0.3.13.post1.
        assert_eq!(checksum_of(b"123456789"), 0x6c40_df5f_0b49_7347);
        let long: Vec<u8> = (0..=255).cycle().take(64 * 256).collect();
        assert_eq!(checksum_of(&long), 0xc760_9420_94ba_30c1);
        let mut parts = Sum::new();
        long.chunks(1000).for_each(|part| parts.bytes(part));
        assert_eq!(parts.value(), checksum_of(&long));
    }
}
