//! Records of the control connection of a shared client, which also open its data connections. A
//! record has 64 bytes, little-endian.
//!
//! Every version has the same head: magic number, version, kind. Thus two incompatible versions can
//! report the mismatch. The shared client sends records, and the daemon answers each with one
//! record, in order.

use mooncake_core::ids::Uuid;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::RECORD_LEN;

const MAGIC: u32 = u32::from_le_bytes(*b"MKLC");
/// Version of the protocol; both sides must have the same one.
pub const VERSION: u16 = 1;

/// Record of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Start of the control connection of a shared client. The response is
    /// [`Welcome`](Record::Welcome).
    Hello,
    /// Start of a data connection of a shared client. The response is [`Done`](Record::Done).
    Join {
        /// Identifier of the shared client, from [`Welcome`](Record::Welcome).
        guest: Uuid,
    },
    /// Offer of a memory block; its file descriptor is attached to the record.
    Share {
        /// Number of the memory block, unused so far by this shared client.
        memory: u32,
        /// Offset of the first byte in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// End of use of a memory block; later calls do not name the block.
    Unshare {
        /// Number of the memory block.
        memory: u32,
    },
    /// Periodic message that keeps the control connection open.
    Ping,
    /// Confirmation that the daemon has registered the shared client.
    Welcome {
        /// Identifier of the shared client.
        guest: Uuid,
        /// Maximum number of calls in progress at once.
        calls: u32,
        /// Milliseconds without a record after which the daemon removes the shared client.
        silence_ms: u32,
    },
    /// Response to every record except [`Hello`](Record::Hello).
    Done {
        /// Zero, or the number of an error code.
        code: i32,
        /// Reason for a refusal.
        cause: Cause,
        /// Limit that was reached; 0 if the reason is not a limit.
        limit: u64,
    },
}

/// Reason for which a daemon refuses a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Cause {
    /// No reason: the record was accepted.
    None = 0,
    /// Version mismatch; the head of the record has the version of the daemon.
    Version = 1,
    /// Maximum number of shared clients reached.
    Guests = 2,
    /// Maximum amount of memory of the shared client reached.
    Memory = 3,
    /// Maximum number of connections for calls of the shared client reached.
    Calls = 4,
    /// Unknown shared client, for example after a restart of the daemon.
    Unknown = 5,
    /// Malformed record, or unsuitable file.
    Nonsense = 6,
}

impl Cause {
    fn from_number(number: u32) -> Option<Self> {
        use Cause::*;
        [None, Version, Guests, Memory, Calls, Unknown, Nonsense].into_iter().find(|c| *c as u32 == number)
    }
}

impl Record {
    /// Response of success.
    pub const DONE: Self = Record::Done { code: 0, cause: Cause::None, limit: 0 };

    /// Returns the response that refuses a record.
    pub fn refused(code: ErrorCode, cause: Cause, limit: u64) -> Self {
        Record::Done { code: code.number(), cause, limit }
    }

    /// Encodes the record.
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

    /// Decodes a record.
    ///
    /// # Errors
    /// Returns `INVALID_VERSION`, with both versions in the text, for a record of another version.
    /// Returns `INVALID_PARAMS` for a malformed record.
    pub fn decode(bytes: &[u8; RECORD_LEN]) -> Result<Self> {
        let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if word(0) != MAGIC {
            return Err(Error::invalid(format!("a record that begins with {:#010x}", word(0))));
        }
        if short(4) != VERSION {
            let text = format!(
                "the other end speaks version {} of the local protocol, this one version \
                 {VERSION}; run mooncake_client and the programs that use it from one release",
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
        // Fields that a kind does not use must be zero.
        if record.encode() == *bytes {
            Ok(record)
        } else {
            Err(Error::invalid("a record with something in its unused bytes"))
        }
    }

    /// Checks that a response reports success.
    ///
    /// # Errors
    /// Returns the error of the daemon, with a text that names the reason and the remedy. Returns
    /// `INVALID_PARAMS` for any record but [`Done`](Record::Done).
    pub fn done(self) -> Result<()> {
        let Record::Done { code, cause, limit } = self else {
            return Err(Error::invalid(format!("{self:?} instead of a response")));
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
