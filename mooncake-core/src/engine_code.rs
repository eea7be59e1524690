//! Numbers that calls of the transfer engine return in Mooncake C++. They differ from the store's.

use std::fmt;

use crate::kind::ErrorKind;

/// Result of a failed call of the transfer engine, with the numbers of Mooncake C++.
///
/// [`Error::with_engine_code`](crate::Error::with_engine_code) sets it where the kind of the error
/// does not imply it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineCode {
    /// An argument is wrong.
    InvalidArgument = -1,
    /// More requests than the batch was made for.
    TooManyRequests = -2,
    /// The memory is not registered.
    AddressNotRegistered = -3,
    /// A request of the batch is not finished.
    BatchBusy = -4,
    /// No such device.
    DeviceNotFound = -6,
    /// The memory overlaps registered memory.
    AddressOverlapped = -7,
    /// A host has no address.
    Dns = -101,
    /// A socket failed.
    Socket = -102,
    /// Metadata is malformed.
    MalformedJson = -103,
    /// The peer refused.
    RejectHandshake = -104,
    /// The metadata directory failed.
    Metadata = -200,
    /// A connection of a transport failed.
    Endpoint = -201,
    /// A transport failed.
    Context = -202,
    /// A NUMA node failed.
    Numa = -300,
    /// A clock failed.
    Clock = -301,
    /// No memory.
    Memory = -302,
    /// The build lacks the function.
    NotImplemented = -303,
}

impl EngineCode {
    /// Returns the number.
    pub fn number(self) -> i32 {
        self as i32
    }
}

impl From<ErrorKind> for EngineCode {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Unavailable | ErrorKind::Timeout => Self::Socket,
            ErrorKind::NoSpace => Self::Memory,
            ErrorKind::Busy => Self::BatchBusy,
            ErrorKind::NotFound => Self::Metadata,
            ErrorKind::Unsupported => Self::NotImplemented,
            _ => Self::InvalidArgument,
        }
    }
}

impl fmt::Display for EngineCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} ({})", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn an_error_has_its_own_number_or_that_of_its_kind() {
        let error = Error::invalid("x");
        assert_eq!(error.engine_code().number(), -1);
        assert_eq!(error.with_engine_code(EngineCode::AddressOverlapped).engine_code().number(), -7);
        let io = Error::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        assert_eq!(io.engine_code(), EngineCode::Socket);
    }
}
