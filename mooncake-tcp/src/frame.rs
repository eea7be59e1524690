//! Encoding and decoding of the frames on a connection. No I/O, and no memory except its own.
//!
//! A request is 24 bytes: `u64 size`, `u64 address`, `u8 opcode`, seven bytes without a meaning;
//! all little-endian. The high bit of the opcode requests acknowledged framing. Its low seven bits
//! are 1 for a write; all other values are a read. Acknowledged responses begin with eight bytes: a
//! code, then the letters that mark the protocol.

use std::fmt;

pub use mooncake_transport::config::Framing;

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

#[cfg(test)]
pub(crate) mod tests {
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

    prop_compose! {
        pub(crate) fn request()(write: bool, plain: bool, addr: u64, len in 0..20_000u64) -> Request {
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
        fn status_decoding_rejects_garbage(frame: [u8; 8]) {
            match Status::decode(frame) {
                Ok(status) => prop_assert_eq!(status.encode(), frame),
                Err(error) => prop_assert!(frame[4..] != *b"VTCM" && error.0 == frame),
            }
        }
    }
}
