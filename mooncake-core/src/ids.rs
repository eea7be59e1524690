//! Names and identifiers: objects, segments, clients, slots.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// 128-bit identifier in two 64-bit halves, printed as in Mooncake C++: `first-second` in decimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Uuid {
    /// High half.
    pub first: u64,
    /// Low half.
    pub second: u64,
}

impl Uuid {
    /// Creates an identifier from its halves.
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

/// Error for a text that is not `decimal-decimal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseUuidError;

impl fmt::Display for ParseUuidError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("invalid id: expected two decimal numbers joined by '-'")
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
    /// Identifier of a client of the store, for the life of its process.
    ClientId
}
uuid_newtype! {
    /// Identifier of one mounted range of a client's memory.
    SegmentId
}

/// Index of an object's slot in a shard, as eviction policies see it. Reused after the object is
/// gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    /// Returns the index as `usize`, for tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number of a replica; 0 stands for none. A master never reuses a number, so it serves as the
/// generation of the replica too.
///
/// Mooncake C++ counts from 1 in each process, and a value that is overwritten in place keeps its
/// number. The numbers of this project begin somewhere in the upper half, at a random number of
/// each master, and each belongs to one value: [`is_of_one_value`](Self::is_of_one_value) tells
/// them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(pub u64);

impl ReplicaId {
    /// Number of no replica: the owner of a disk reads an object that it was asked to write there.
    pub const OF_OFFLOAD: Self = Self(u64::MAX);

    /// Returns the first number of a master, made of a random number.
    pub fn first(drawn: u64) -> Self {
        // The bit below stays 0, which leaves more numbers than a master can use.
        Self(1 << 63 | drawn >> 2)
    }

    /// Returns whether no other value ever has this number, not even under the same key after a
    /// restart of the master.
    pub fn is_of_one_value(self) -> bool {
        self.0 >> 63 == 1
    }
}

/// Longest accepted object key, in bytes. Mooncake C++ has no limit. This limit exceeds any key in
/// use, and keeps a batch of hundreds in one RPC frame.
pub const MAX_KEY_LEN: usize = 128 * 1024;

/// Name of an object: 1 to [`MAX_KEY_LEN`] bytes of any content (NUL and newlines included). Cheap
/// to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey(Arc<[u8]>);

/// Reason for which a byte string is not an [`ObjectKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// Empty key.
    Empty,
    /// Key of more than [`MAX_KEY_LEN`] bytes. Holds the length.
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

    /// Checks that `bytes` can be a key, without creating one.
    pub fn check(bytes: &[u8]) -> Result<(), KeyError> {
        match bytes.len() {
            0 => Err(KeyError::Empty),
            len if len > MAX_KEY_LEN => Err(KeyError::TooLong(len)),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of the key.
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
