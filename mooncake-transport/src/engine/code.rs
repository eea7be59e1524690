//! The numbers that calls of the existing transfer engine return, which are not those of its store.

use std::fmt;

use mooncake_core::{Error, ErrorKind};

/// Why a call of the engine failed, by the existing engine's numbers.
///
/// As the [source](std::error::Error::source) of an [`Error`] it says which number is meant where the kind alone does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineCode {
    /// An argument is wrong.
    InvalidArgument = -1,
    /// More requests than the batch was made for.
    TooManyRequests = -2,
    /// The memory is not registered.
    AddressNotRegistered = -3,
    /// Not every request of the batch is over.
    BatchBusy = -4,
    /// No such device.
    DeviceNotFound = -6,
    /// The memory overlaps registered memory.
    AddressOverlapped = -7,
    /// A host has no address.
    Dns = -101,
    /// A socket failed.
    Socket = -102,
    /// Metadata is not what it should be.
    MalformedJson = -103,
    /// The peer refused.
    RejectHandshake = -104,
    /// The metadata directory failed.
    Metadata = -200,
    /// A connection of a wire failed.
    Endpoint = -201,
    /// A wire failed.
    Context = -202,
    /// A NUMA node failed.
    Numa = -300,
    /// A clock failed.
    Clock = -301,
    /// No memory.
    Memory = -302,
    /// Not built.
    NotImplemented = -303,
}

impl EngineCode {
    /// The number.
    pub fn number(self) -> i32 {
        self as i32
    }

    /// The number for an error: the one it carries, else what its kind comes to.
    pub fn of(error: &Error) -> Self {
        let carried = std::error::Error::source(error).and_then(|source| source.downcast_ref::<Self>());
        carried.copied().unwrap_or_else(|| match error.kind() {
            ErrorKind::Unavailable | ErrorKind::Timeout => Self::Socket,
            ErrorKind::NoSpace => Self::Memory,
            ErrorKind::Busy => Self::BatchBusy,
            ErrorKind::NotFound => Self::Metadata,
            ErrorKind::Unsupported => Self::NotImplemented,
            _ => Self::InvalidArgument,
        })
    }
}

impl fmt::Display for EngineCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} ({})", self.number())
    }
}

impl std::error::Error for EngineCode {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_carries_its_number_or_its_kind_has_one() {
        let error = Error::invalid("x");
        assert_eq!(EngineCode::of(&error).number(), -1);
        assert_eq!(EngineCode::of(&error.with_source(EngineCode::AddressOverlapped)).number(), -7);
        let io = Error::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        assert_eq!(EngineCode::of(&io), EngineCode::Socket);
    }
}
