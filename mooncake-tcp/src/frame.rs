//! Encoding and decoding of the frames on a connection. No I/O, and no memory except its own.
//!
//! A request is 24 bytes: `u64 size`, `u64 address`, `u8 opcode`, seven bytes without a meaning;
//! all little-endian. The high bit of the opcode requests acknowledged framing. Its low seven bits
//! are 1 for a write; all other values are a read. Acknowledged responses begin with eight bytes: a
//! code, then the letters that mark the protocol.

use std::fmt;

pub use mooncake_transport::config::Framing;

use crate::hello::Hello;

/// Length of a request header in bytes.
pub const HEADER_LEN: usize = 24;
/// Length of a status frame in bytes.
pub const STATUS_LEN: usize = 8;

const WRITE: u8 = 1;
const READ: u8 = 0;
const KIND: u8 = 0x7f;
const ACKNOWLEDGED: u8 = 0x80;
const STATUS_MARK: u32 = 0x4d43_5456;

/// Direction of a transfer, seen from the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the memory of the target to the initiator.
    Read,
    /// From the memory of the initiator to the target.
    Write,
}

/// Content of a request header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Read or write.
    pub direction: Direction,
    /// Framing of the response.
    pub framing: Framing,
    /// Address in the target process.
    pub addr: u64,
    /// Bytes to transfer; not to be trusted.
    pub len: u64,
}

impl Request {
    /// Returns the header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let kind = match self.direction {
            Direction::Read => READ,
            Direction::Write => WRITE,
        };
        let mark = match self.framing {
            Framing::Plain => 0,
            Framing::Acknowledged => ACKNOWLEDGED,
        };
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&self.len.to_le_bytes());
        header[8..16].copy_from_slice(&self.addr.to_le_bytes());
        header[16] = kind | mark;
        header
    }

    /// Parses a header. Every 24 bytes are a request; the memory table decides whether it is
    /// served.
    pub fn decode(header: &[u8; HEADER_LEN]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let direction = if header[16] & KIND == WRITE { Direction::Write } else { Direction::Read };
        let framing = if header[16] & ACKNOWLEDGED == 0 { Framing::Plain } else { Framing::Acknowledged };
        Self { direction, framing, addr: word(8), len: word(0) }
    }
}

/// Content of a status frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Success; the bytes of a read follow.
    Ok,
    /// Refusal with a code. Code 1: the address range lies in no registered memory.
    Refused(u32),
}

/// Code of [`Status::Refused`] for an address range that is not registered.
pub const ADDRESS_REFUSED: u32 = 1;
/// Code of [`Status::Refused`] in this project for a failure of the device that holds the memory.
pub const DEVICE_FAILED: u32 = 2;

impl Status {
    /// Returns the frame.
    pub fn encode(self) -> [u8; STATUS_LEN] {
        let code = match self {
            Status::Ok => 0,
            Status::Refused(code) => code,
        };
        ((u64::from(STATUS_MARK) << 32) | u64::from(code)).to_le_bytes()
    }

    /// Parses eight bytes.
    ///
    /// # Errors
    ///
    /// Returns [`NotAStatus`] if the bytes are not a status frame.
    pub fn decode(frame: [u8; STATUS_LEN]) -> Result<Self, NotAStatus> {
        let word = u64::from_le_bytes(frame);
        if (word >> 32) as u32 != STATUS_MARK {
            return Err(NotAStatus(frame));
        }
        Ok(match word as u32 {
            0 => Status::Ok,
            code => Status::Refused(code),
        })
    }
}

/// Eight bytes that are not a status frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAStatus(pub [u8; STATUS_LEN]);

impl fmt::Display for NotAStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected a status frame, received {:02x?}", self.0)
    }
}

impl std::error::Error for NotAStatus {}

/// Buffer of received bytes that are not parsed yet: headers, and the first payload bytes that came
/// along with them.
///
/// Its size is fixed; a length field never makes it grow.
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

    fn bytes(hex: &str) -> Vec<u8> {
        let hex: String = hex.split_whitespace().collect();
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }

    /// Bytes captured between two engines of Mooncake C++.
    #[test]
    fn captured_headers() {
        let read = Request {
            direction: Direction::Read,
            framing: Framing::Acknowledged,
            addr: 0x7f66_cdef_e110,
            len: 8,
        };
        assert_eq!(read.encode().to_vec(), bytes("08000000 00000000 10e1efcd 667f0000 80 00000000000000"));
        let write = Request { direction: Direction::Write, addr: 0x7f66_cdef_e210, ..read };
        assert_eq!(write.encode().to_vec(), bytes("08000000 00000000 10e2efcd 667f0000 81 00000000000000"));
        assert_eq!(Status::Ok.encode().to_vec(), bytes("00000000 5654434d"));
        assert_eq!(Status::Refused(ADDRESS_REFUSED).encode().to_vec(), bytes("01000000 5654434d"));
    }

    #[test]
    fn everything_but_one_is_a_read() {
        for opcode in 0..=255u8 {
            let mut header = [0xaa; HEADER_LEN];
            header[16] = opcode;
            let request = Request::decode(&header);
            assert_eq!(request.direction == Direction::Write, opcode & 0x7f == 1, "{opcode:#x}");
            assert_eq!(request.framing == Framing::Acknowledged, opcode >= 0x80, "{opcode:#x}");
        }
    }

    #[test]
    fn a_full_inbox_has_room_again_after_a_partial_header() {
        let mut inbox = Inbox::new();
        let len = inbox.space().len();
        inbox.received(len);
        while inbox.next_request().is_some() {}
        assert!(!inbox.is_empty(), "8192 is not a multiple of 24");
        assert!(inbox.space().len() >= HEADER_LEN);
    }

    prop_compose! {
        fn request()(write: bool, plain: bool, addr: u64, len in 0..20_000u64) -> Request {
            Request {
                direction: if write { Direction::Write } else { Direction::Read },
                framing: if plain { Framing::Plain } else { Framing::Acknowledged },
                addr,
                len,
            }
        }
    }

    proptest! {
        #[test]
        fn header_survives(request in request(), padding: [u8; 7]) {
            let mut header = request.encode();
            header[17..].copy_from_slice(&padding);
            prop_assert_eq!(Request::decode(&header), request);
        }

        #[test]
        fn status_is_told_from_garbage(frame: [u8; 8]) {
            match Status::decode(frame) {
                Ok(status) => prop_assert_eq!(status.encode(), frame),
                Err(error) => prop_assert!(frame[4..] != *b"VTCM" && error.0 == frame),
            }
        }

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
