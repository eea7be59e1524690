//! Reads of values for which a shared client has too little memory that it may share. The bytes
//! come through a small shared buffer, in pieces, into memory of this process alone.

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_protocol::message::ReadRanges;
use mooncake_protocol::wire::ObjectRange;

use super::client::LocalInner;
use super::shared::{LocalBuf, Pool};
use crate::deadline::Deadline;

/// Shortest shared buffer that is tried, in bytes.
const MIN_PIECE_LEN: usize = 4 << 10;

impl LocalInner {
    /// Returns a shared buffer of `len` bytes at once, or `None` if the daemon accepts no more
    /// memory of this process.
    ///
    /// # Errors
    /// Returns errors other than a lack of memory.
    pub(super) async fn try_allocate(&self, len: usize, deadline: &Deadline) -> Result<Option<LocalBuf>> {
        match self.allocate_now(len, deadline).await {
            Ok(buffer) => Ok(Some(buffer)),
            Err(error) if error.kind() == ErrorKind::NoSpace && !is_planted("whole-values-only") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads a located object in pieces, which may take longer than a lease. The buffer that is
    /// returned is not shared.
    ///
    /// # Errors
    /// Returns the errors of the read, and a lack of memory that is not ended before the deadline.
    pub(super) async fn read_in_pieces(
        &self,
        object: u64,
        len: usize,
        deadline: &Deadline,
    ) -> Result<LocalBuf> {
        let mut value = LocalBuf::private(len)?;
        let mut buffer = self.allocate_piece(len, deadline).await?;
        let mut at = 0;
        while at < len {
            let part = buffer.len().min(len - at);
            let range = ObjectRange { object, offset: at as u64, into: buffer.shared_range(0, part) };
            let call = ReadRanges { ranges: vec![range].into(), relocates: true };
            let (mut read, held) = self.call_each(1, &call, buffer, deadline).await?;
            read.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))?;
            buffer = held;
            value[at..at + part].copy_from_slice(&buffer[..part]);
            at += part;
        }
        Ok(value)
    }

    /// Returns the longest shared buffer that is free, of at most `len` bytes. Waits for a part of
    /// the pool if there is none.
    async fn allocate_piece(&self, len: usize, deadline: &Deadline) -> Result<LocalBuf> {
        let mut len_to_try = len;
        loop {
            if let Some(buffer) = self.try_allocate(len_to_try, deadline).await? {
                return Ok(buffer);
            }
            if len_to_try <= MIN_PIECE_LEN {
                break;
            }
            len_to_try = (len_to_try / 2).max(MIN_PIECE_LEN);
        }
        let max = self.pool.as_ref().map_or(0, Pool::capacity);
        self.allocate(len_to_try.min(usize::try_from(max).unwrap_or(len_to_try)).max(1), deadline).await
    }
}
