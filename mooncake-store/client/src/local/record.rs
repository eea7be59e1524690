//! The control connection of a light client, and the opening of its data connections: records of 64
//! bytes, little-endian.
//!
//! The head (magic number, version, kind) is the same in every version, so that two that do not fit
//! can say so. The light client speaks, the owner answers each record with one of its own, in
//! order.

use mooncake_core::ids::Uuid;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::same_host::socket::RECORD_LEN;

const MAGIC: u32 = u32::from_le_bytes(*b"MKLC");
/// Both sides must be of one version.
pub const VERSION: u16 = 1;

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A light client is here. Answered with [`Welcome`](Record::Welcome).
    Hello,
    /// The connection is to carry calls of the light client of that number. Answered with
    /// [`Done`](Record::Done).
    Join {
        /// The number it was welcomed with.
        guest: Uuid,
    },
    /// Comes with the file of some memory.
    Share {
        /// Number of the memory, new among those of this light client.
        memory: u32,
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// That memory is not named any more.
    Unshare {
        /// Its number.
        memory: u32,
    },
    /// A sign of life, wanted every now and then.
    Ping,
    /// The owner knows the light client from here on.
    Welcome {
        /// Its number.
        guest: Uuid,
        /// Calls it may have under way at once.
        calls: u32,
        /// Milliseconds without a record after which it is forgotten.
        silence_ms: u32,
    },
    /// The answer to everything else.
    Done {
        /// Zero, or the number of an error.
        code: i32,
        /// What stood in the way.
        cause: Cause,
        /// The limit that was met, where it was one.
        limit: u64,
    },
}

/// Why an owner refuses something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Cause {
    /// It does not.
    None = 0,
    /// It speaks another version, which the head of the record has.
    Version = 1,
    /// It serves as many light clients as it may.
    Guests = 2,
    /// The light client has as much memory as it may.
    Memory = 3,
    /// It has as many calls under way as it may.
    Calls = 4,
    /// The owner does not know it (any more).
    Unknown = 5,
    /// The record or its file is not what it should be.
    Nonsense = 6,
}

impl Cause {
    fn from_number(number: u32) -> Option<Self> {
        use Cause::*;
        [None, Version, Guests, Memory, Calls, Unknown, Nonsense].into_iter().find(|c| *c as u32 == number)
    }
}

impl Record {
    /// The answer that nothing is wrong.
    pub const DONE: Self = Record::Done { code: 0, cause: Cause::None, limit: 0 };

    /// The answer that something is.
    pub fn refused(code: ErrorCode, cause: Cause, limit: u64) -> Self {
        Record::Done { code: code.number(), cause, limit }
    }

    /// The bytes of it.
    pub fn encode(&self) -> [u8; RECORD_LEN] {
        let (kind, words, longs) = match *self {
            Record::Hello => (1u16, [0; 2], [0; 2]),
            Record::Join { guest } => (2, [0; 2], [guest.first, guest.second]),
            Record::Share { memory, offset, len } => (3, [memory, 0], [offset, len]),
            Record::Unshare { memory } => (4, [memory, 0], [0; 2]),
            Record::Ping => (5, [0; 2], [0; 2]),
            Record::Welcome { guest, calls, silence_ms } => {
                (6, [calls, silence_ms], [guest.first, guest.second])
            }
            Record::Done { code, cause, limit } => (7, [code.cast_unsigned(), cause as u32], [limit, 0]),
        };
        let mut out = [0; RECORD_LEN];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&kind.to_le_bytes());
        for (i, word) in words.iter().enumerate() {
            out[8 + 4 * i..12 + 4 * i].copy_from_slice(&word.to_le_bytes());
        }
        for (i, long) in longs.iter().enumerate() {
            out[16 + 8 * i..24 + 8 * i].copy_from_slice(&long.to_le_bytes());
        }
        out
    }

    /// Reads one. `INVALID_VERSION`, naming both, for one of another version; `INVALID_PARAMS` for
    /// what is none.
    pub fn decode(bytes: &[u8; RECORD_LEN]) -> Result<Self> {
        let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if word(0) != MAGIC {
            return Err(Error::invalid(format!("a record that begins with {:#010x}", word(0))));
        }
        if short(4) != VERSION {
            let text = format!(
                "the other end speaks version {} of the local protocol, this one version {VERSION}; run mooncake_client and the \
                 programs that use it from one release",
                short(4)
            );
            return Err(Error::new(ErrorCode::InvalidVersion, text));
        }
        let (words, longs) = ([word(8), word(12)], [long(16), long(24)]);
        let uuid = Uuid::new(longs[0], longs[1]);
        let record = match short(6) {
            1 => Record::Hello,
            2 => Record::Join { guest: uuid },
            3 => Record::Share { memory: words[0], offset: longs[0], len: longs[1] },
            4 => Record::Unshare { memory: words[0] },
            5 => Record::Ping,
            6 => Record::Welcome { guest: uuid, calls: words[0], silence_ms: words[1] },
            7 => {
                let cause = Cause::from_number(words[1])
                    .ok_or_else(|| Error::invalid(format!("a refusal for cause {}", words[1])))?;
                Record::Done { code: words[0].cast_signed(), cause, limit: longs[0] }
            }
            other => return Err(Error::invalid(format!("a record of kind {other}"))),
        };
        // What a kind has no use for is zero.
        if record.encode() == *bytes {
            Ok(record)
        } else {
            Err(Error::invalid("a record with something in its unused bytes"))
        }
    }

    /// Whether an answer says that it was done; the error says what was in the way, and what to do.
    pub fn done(self) -> Result<()> {
        let Record::Done { code, cause, limit } = self else {
            return Err(Error::invalid(format!("{self:?} where an answer was expected")));
        };
        if code == 0 {
            return Ok(());
        }
        let text = match cause {
            Cause::Guests => format!("mooncake_client serves {limit} processes already (--max_clients)"),
            Cause::Memory => format!(
                "the memory this process shares with mooncake_client would come to more than {limit} bytes (--max_client_memory)"
            ),
            Cause::Calls => {
                format!("{limit} calls of this process are under way already (--max_client_requests)")
            }
            Cause::Unknown => "mooncake_client does not know this process (any more)".into(),
            Cause::None | Cause::Version | Cause::Nonsense => "mooncake_client refuses it".into(),
        };
        Err(Error::new(ErrorCode::from_number(code), text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back() {
        let guest = Uuid::new(1, u64::MAX);
        for record in [
            Record::Hello,
            Record::Join { guest },
            Record::Share { memory: 7, offset: 4096, len: u64::MAX },
            Record::Unshare { memory: u32::MAX },
            Record::Ping,
            Record::Welcome { guest, calls: 64, silence_ms: 10_000 },
            Record::DONE,
            Record::refused(ErrorCode::NoAvailableHandle, Cause::Memory, 1 << 40),
        ] {
            assert_eq!(Record::decode(&record.encode()).unwrap(), record);
        }
    }

    #[test]
    fn malformed_records_are_named() {
        let good = Record::Ping.encode();
        for (at, word) in [(0, "begins"), (4, "version"), (6, "kind"), (9, "unused"), (63, "unused")] {
            let mut bad = good;
            bad[at] ^= 0x40;
            assert!(Record::decode(&bad).unwrap_err().message().contains(word), "{at}");
        }
        let mut other = good;
        other[4] = 9;
        let error = Record::decode(&other).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidVersion);
        assert!(error.message().contains("version 9") && error.message().contains("version 1"), "{error}");
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (cause, word) in [
            (Cause::Guests, "--max_clients"),
            (Cause::Memory, "--max_client_memory"),
            (Cause::Calls, "--max_client_requests"),
            (Cause::Unknown, "know"),
        ] {
            let error = Record::refused(ErrorCode::NoAvailableHandle, cause, 5).done().unwrap_err();
            assert!(error.message().contains(word), "{error}");
        }
        Record::DONE.done().unwrap();
        assert!(Record::Ping.done().is_err());
    }
}
