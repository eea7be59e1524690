//! Names of things: objects, segments, clients, slots.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A 128-bit identifier as two 64-bit halves, printed as the existing system prints it: `first-second` in decimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Uuid {
    /// High half.
    pub first: u64,
    /// Low half.
    pub second: u64,
}

impl Uuid {
    /// An identifier from its halves.
    pub const fn new(first: u64, second: u64) -> Self {
        Self { first, second }
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.second)
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text was not `decimal-decimal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseUuidError;

impl fmt::Display for ParseUuidError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an id is two decimal numbers joined by '-'")
    }
}

impl std::error::Error for ParseUuidError {}

impl FromStr for Uuid {
    type Err = ParseUuidError;

    fn from_str(text: &str) -> Result<Self, ParseUuidError> {
        let (first, second) = text.split_once('-').ok_or(ParseUuidError)?;
        Ok(Self {
            first: first.parse().map_err(|_| ParseUuidError)?,
            second: second.parse().map_err(|_| ParseUuidError)?,
        })
    }
}

macro_rules! uuid_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }

        impl From<Uuid> for $name {
            fn from(id: Uuid) -> Self {
                Self(id)
            }
        }

        impl FromStr for $name {
            type Err = ParseUuidError;

            fn from_str(text: &str) -> Result<Self, ParseUuidError> {
                text.parse().map(Self)
            }
        }
    };
}

uuid_newtype! {
    /// A client of the store, for as long as its process lives.
    ClientId
}
uuid_newtype! {
    /// One mounted range of a client's memory.
    SegmentId
}

/// Index of an object's place in a shard, as eviction policies see it. Reused after the object is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    /// The index as `usize`, for tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number of a replica; 0 stands for none. Never reused while a master lives, so it serves as the replica's generation too.
///
/// The existing system counts from 1 in each process, and a value that is written over in place keeps its number. Numbers of
/// ours begin somewhere in the upper half, drawn anew by each master, and each is that of one value:
/// [`is_of_one_value`](Self::is_of_one_value) tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(pub u64);

impl ReplicaId {
    /// Where a master begins to count, made of a number that it drew.
    pub fn first(drawn: u64) -> Self {
        // The bit below stays 0: room for more numbers than a master can give out.
        Self(1 << 63 | drawn >> 2)
    }

    /// Whether no other value ever has this number, not even under the same key after a restart of the master.
    pub fn is_of_one_value(self) -> bool {
        self.0 >> 63 == 1
    }
}

/// Longest object key accepted, in bytes. The existing system has no limit; this one is beyond any key in use, and keeps a batch
/// of hundreds in one RPC frame.
pub const MAX_KEY_LEN: usize = 128 * 1024;

/// Name of an object: 1 to [`MAX_KEY_LEN`] bytes, any content (NUL and newlines included). Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey(Arc<[u8]>);

/// Why a byte string is no [`ObjectKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// No bytes at all.
    Empty,
    /// More than [`MAX_KEY_LEN`] bytes; the length is given.
    TooLong(usize),
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyError::Empty => f.write_str("an object key must not be empty"),
            KeyError::TooLong(len) => {
                write!(f, "an object key has at most {MAX_KEY_LEN} bytes, this one has {len}")
            }
        }
    }
}

impl std::error::Error for KeyError {}

impl ObjectKey {
    /// Checks the length and copies the bytes once.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, KeyError> {
        let bytes = bytes.as_ref();
        Self::check(bytes)?;
        Ok(Self(bytes.into()))
    }

    /// Whether `bytes` may be a key, without making one.
    pub fn check(bytes: &[u8]) -> Result<(), KeyError> {
        match bytes.len() {
            0 => Err(KeyError::Empty),
            len if len > MAX_KEY_LEN => Err(KeyError::TooLong(len)),
            _ => Ok(()),
        }
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::borrow::Borrow<[u8]> for ObjectKey {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_text_round_trip() {
        let id = Uuid::new(u64::MAX, 7);
        assert_eq!(id.to_string(), "18446744073709551615-7");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "1", "1-", "-1", "1-2-3", "a-b", "1--2", "18446744073709551616-0"] {
            assert_eq!(bad.parse::<Uuid>(), Err(ParseUuidError), "{bad}");
        }
    }

    #[test]
    fn key_limits() {
        assert_eq!(ObjectKey::new(b""), Err(KeyError::Empty));
        assert!(ObjectKey::new(vec![0; MAX_KEY_LEN]).is_ok());
        assert_eq!(ObjectKey::new(vec![0; MAX_KEY_LEN + 1]), Err(KeyError::TooLong(MAX_KEY_LEN + 1)));
        assert_eq!(ObjectKey::new(b"a\0\n\xff").map(|k| k.to_string()), Ok("a\\x00\\n\\xff".into()));
    }
}
