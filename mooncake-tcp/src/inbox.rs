//! Inbox of a connection: received bytes that are not parsed yet.

use std::fmt;

use crate::frame::{HEADER_LEN, Request};
use crate::hello::Hello;

/// Buffer of received bytes that are not parsed yet: headers, and the first payload bytes that came
/// along with them.
///
/// The size of the buffer is fixed; a length field never makes it grow.
pub struct Inbox {
    bytes: Box<[u8; Inbox::CAPACITY]>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// Capacity in bytes: enough for a header and one 4 KiB page of payload in a single read.
    pub const CAPACITY: usize = 8192;

    /// Creates an empty inbox.
    pub fn new() -> Self {
        Self { bytes: Box::new([0; Self::CAPACITY]), start: 0, end: 0 }
    }

    /// Returns whether no byte waits to be parsed.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns the buffer for the next received bytes. It is never empty once
    /// [`Inbox::next_request`] has returned `None`.
    pub fn space(&mut self) -> &mut [u8] {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && Self::CAPACITY - self.end < HEADER_LEN {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Records `len` bytes received into [`Inbox::space`].
    pub fn received(&mut self, len: usize) {
        self.end = (self.end + len).min(Self::CAPACITY);
    }

    /// Removes the first header if it is a hello. Returns `None` until the header is complete; a
    /// request stays in the inbox.
    pub fn hello(&mut self) -> Option<Option<Hello>> {
        let hello = Hello::decode(self.bytes[self.start..self.end].first_chunk::<HEADER_LEN>()?);
        if hello.is_some() {
            self.start += HEADER_LEN;
        }
        Some(hello)
    }

    /// Removes the next header if it is complete.
    pub fn next_request(&mut self) -> Option<Request> {
        let header = self.bytes[self.start..self.end].first_chunk::<HEADER_LEN>()?;
        let request = Request::decode(header);
        self.start += HEADER_LEN;
        Some(request)
    }

    /// Removes at most `limit` payload bytes.
    pub fn payload(&mut self, limit: u64) -> &[u8] {
        let len = (self.end - self.start).min(usize::try_from(limit).unwrap_or(usize::MAX));
        let from = self.start;
        self.start += len;
        &self.bytes[from..from + len]
    }
}

impl Default for Inbox {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("waiting", &(self.end - self.start)).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::Direction;
    use crate::frame::tests::request;

    #[test]
    fn inbox_has_space_after_partial_header() {
        let mut inbox = Inbox::new();
        let len = inbox.space().len();
        inbox.received(len);
        while inbox.next_request().is_some() {}
        assert!(!inbox.is_empty(), "8192 is not a multiple of 24");
        assert!(inbox.space().len() >= HEADER_LEN);
    }

    proptest! {
        /// The same requests and payloads come out, however the stream is cut.
        #[test]
        fn any_cut_gives_the_same_requests(
            requests in proptest::collection::vec(request(), 1..12),
            cuts in proptest::collection::vec(1..9000usize, 1..8),
        ) {
            let mut stream = Vec::new();
            for (i, request) in requests.iter().enumerate() {
                stream.extend_from_slice(&request.encode());
                if request.direction == Direction::Write {
                    stream.extend((0..request.len).map(|b| (b as usize + i) as u8));
                }
            }
            let mut inbox = Inbox::new();
            let (mut out, mut rest, mut cut) = (Vec::new(), &stream[..], cuts.iter().cycle());
            let mut left = 0;
            loop {
                let payload = inbox.payload(left);
                out.extend_from_slice(payload);
                left -= payload.len() as u64;
                if left == 0 && let Some(request) = inbox.next_request() {
                    out.extend_from_slice(&request.encode());
                    left = if request.direction == Direction::Write { request.len } else { 0 };
                    continue;
                }
                if rest.is_empty() {
                    break;
                }
                let space = inbox.space();
                let n = space.len().min(rest.len()).min(*cut.next().unwrap());
                prop_assert!(n > 0, "the inbox has free space");
                space[..n].copy_from_slice(&rest[..n]);
                inbox.received(n);
                rest = &rest[n..];
            }
            prop_assert_eq!(out, stream);
            prop_assert_eq!(left, 0);
        }
    }
}
