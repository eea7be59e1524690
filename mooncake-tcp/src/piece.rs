//! Pieces: single requests, with their bytes to send and the place of their response.

use std::ptr::NonNull;

use mooncake_core::Result;
use mooncake_core::clock::Moment;
use mooncake_transport::Completion;

use crate::frame::{Direction, Framing, HEADER_LEN, Request, STATUS_LEN};
use crate::socket::IoList;

/// Transfer, or a stripe of one, in the queue of a connection.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) local: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) remote: u64,
    pub(crate) direction: Direction,
    pub(crate) framing: Framing,
    /// Deadline, or `NEVER`.
    pub(crate) deadline: Moment,
    /// Number of connections lost before the first byte of the response.
    pub(crate) attempts: u8,
    pub(crate) done: Completion,
}

// SAFETY: the operation owns the memory at `local` until `done` is completed (contract of
// `Op::new`), on any thread.
unsafe impl Send for Piece {}

/// Headers of one piece. They live outside the queue, so that the queue may grow while they are
/// being sent.
#[derive(Clone, Copy)]
pub(crate) struct Headers {
    request: [u8; HEADER_LEN],
    confirm: [u8; HEADER_LEN],
}

impl Headers {
    pub(crate) const NONE: Self = Self { request: [0; HEADER_LEN], confirm: [0; HEADER_LEN] };
}

impl Piece {
    /// Returns whether a read of the last byte follows a write. A plain write has no response of
    /// its own. Requests of a connection are served in order, so the response to that read shows
    /// that the write has been applied.
    fn confirms(&self) -> bool {
        self.direction == Direction::Write && self.framing == Framing::Plain
    }

    pub(crate) fn headers(&self) -> Headers {
        let request = Request {
            direction: self.direction,
            framing: self.framing,
            addr: self.remote,
            len: self.len as u64,
        };
        let last = self.remote.wrapping_add(self.len as u64 - 1);
        let confirm = Request { direction: Direction::Read, addr: last, len: 1, ..request };
        Headers { request: request.encode(), confirm: confirm.encode() }
    }

    /// Returns the total number of bytes to send.
    pub(crate) fn request_len(&self) -> usize {
        let body = if self.direction == Direction::Write { self.len } else { 0 };
        HEADER_LEN + body + if self.confirms() { HEADER_LEN } else { 0 }
    }

    /// Appends the bytes to send, without the first `skip` bytes and with at most `limit` bytes of
    /// memory. Returns false if the list is full.
    pub(crate) fn push_request<const N: usize>(
        &self,
        headers: &Headers,
        mut skip: usize,
        limit: usize,
        list: &mut IoList<N>,
    ) -> bool {
        if !push_rest(&headers.request, &mut skip, list) {
            return false;
        }
        if self.direction == Direction::Write {
            let from = skip.min(self.len);
            let part = (self.len - from).min(limit);
            if !list.push(self.local.as_ptr().wrapping_add(from), part) || part < self.len - from {
                return false;
            }
            skip -= from;
        }
        !self.confirms() || push_rest(&headers.confirm, &mut skip, list)
    }

    /// Returns the length of the status frame at the start of the response.
    pub(crate) fn status_len(&self) -> usize {
        if self.framing == Framing::Acknowledged { STATUS_LEN } else { 0 }
    }

    /// Returns the length of the response.
    pub(crate) fn response_len(&self) -> usize {
        let bytes = match self.direction {
            Direction::Read => self.len,
            Direction::Write => usize::from(self.confirms()),
        };
        self.status_len() + bytes
    }

    /// Appends the memory ranges of the response, without its first `skip` bytes. `status_buffer`
    /// receives the bytes that are not payload.
    pub(crate) fn push_response<const N: usize>(
        &self,
        skip: usize,
        status_buffer: &mut [u8; STATUS_LEN],
        list: &mut IoList<N>,
    ) -> bool {
        let status = self.status_len();
        let from = skip.min(status);
        let has_space = list.push(status_buffer[from..].as_mut_ptr(), status - from);
        let skip = skip - from;
        has_space
            && match self.direction {
                Direction::Read => list.push(self.local.as_ptr().wrapping_add(skip), self.len - skip),
                Direction::Write if self.confirms() && skip == 0 => list.push(status_buffer.as_mut_ptr(), 1),
                Direction::Write => true,
            }
    }

    /// Stores the first byte of the response.
    pub(crate) fn store_first_byte(&self, byte: u8, status_buffer: &mut [u8; STATUS_LEN]) {
        if self.status_len() > 0 || self.direction == Direction::Write {
            status_buffer[0] = byte;
        } else {
            // SAFETY: a read has at least one byte of memory, and owns it until it is completed.
            unsafe { self.local.write(byte) };
        }
    }

    pub(crate) fn finish(self, result: Result<()>) {
        self.done.finish(result);
    }
}

fn push_rest<const N: usize>(header: &[u8; HEADER_LEN], skip: &mut usize, list: &mut IoList<N>) -> bool {
    let from = (*skip).min(HEADER_LEN);
    *skip -= from;
    list.push(header[from..].as_ptr().cast_mut(), HEADER_LEN - from)
}
