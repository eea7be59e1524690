//! Error type of every crate. Its [`ErrorCode`] is the number that Mooncake C++ uses in its
//! protocol and in Python; its [`ErrorKind`] says what the caller can do next.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

pub use crate::code::ErrorCode;
use crate::engine_code::EngineCode;
pub use crate::kind::ErrorKind;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Cause of an error that callers in this workspace act on, where the code alone does not tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The caller cancelled the operation before it began.
    NotStarted,
    /// No route leads from the local address to the peer.
    RouteLookup,
    /// A connection was open and broke.
    ConnectionBroken,
    /// A request is longer than one message may be, or its response would be. Nothing was done; a
    /// call about fewer items works.
    TooLong,
    /// A response was longer than one message may be. The call itself was made.
    ResponseTooLong,
}

/// Error with its code, a message and the context in which it happened.
///
/// An error is one pointer wide, so that results stay small on the data path. Clones share the
/// message and the source.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    code: ErrorCode,
    message: Cow<'static, str>,
    context: Vec<Cow<'static, str>>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    reason: Option<Reason>,
    engine_code: Option<EngineCode>,
}

impl Error {
    /// Creates an error with a code and a message that says what was wrong and, where possible,
    /// what to do.
    pub fn new(code: ErrorCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner {
            code,
            message: message.into(),
            context: Vec::new(),
            source: None,
            reason: None,
            engine_code: None,
        }))
    }

    /// Creates an error with [`ErrorCode::InvalidParams`].
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorCode::InvalidParams, message)
    }

    /// Creates an error with [`ErrorCode::InternalError`].
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorCode::InternalError, message)
    }

    /// Attaches the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.inner_mut().source = Some(source.into().into());
        self
    }

    /// Sets the cause that callers act on.
    #[must_use]
    pub fn with_reason(mut self, reason: Reason) -> Self {
        self.inner_mut().reason = Some(reason);
        self
    }

    /// Sets the number that calls of the transfer engine return for this error.
    #[must_use]
    pub fn with_engine_code(mut self, code: EngineCode) -> Self {
        self.inner_mut().engine_code = Some(code);
        self
    }

    /// Adds the place where the error happened (innermost first). `Display` prints it in front of
    /// the message.
    #[must_use]
    pub fn context(mut self, context: impl Into<Cow<'static, str>>) -> Self {
        self.inner_mut().context.push(context.into());
        self
    }

    fn inner_mut(&mut self) -> &mut Inner {
        Arc::make_mut(&mut self.0)
    }

    /// Returns the error code of Mooncake C++.
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// Returns the class of the error, by what the caller can do next.
    pub fn kind(&self) -> ErrorKind {
        self.0.code.kind()
    }

    /// Returns the cause that callers act on.
    pub fn reason(&self) -> Option<Reason> {
        self.0.reason
    }

    /// Returns the number that calls of the transfer engine return: the one that was set, or that
    /// of the kind.
    pub fn engine_code(&self) -> EngineCode {
        self.0.engine_code.unwrap_or_else(|| self.kind().into())
    }

    /// Returns the message, without context and source.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl From<ErrorCode> for Error {
    fn from(code: ErrorCode) -> Self {
        Self::new(code, code.meaning())
    }
}

impl Error {
    /// Creates the error of an operation on a file that a setting names, with a code of files. (The
    /// conversion of an [`std::io::Error`] takes most of them for errors of a connection.)
    pub fn of_file(error: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let code = match error.kind() {
            Io::NotFound => ErrorCode::FileNotFound,
            Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge | Io::ReadOnlyFilesystem => {
                ErrorCode::FileWriteFail
            }
            _ => ErrorCode::FileOpenFail,
        };
        Self::new(code, error.to_string()).with_source(error)
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let code = match error.kind() {
            Io::TimedOut => ErrorCode::RpcTimeout,
            Io::OutOfMemory => ErrorCode::BufferOverflow,
            Io::InvalidInput => ErrorCode::InvalidParams,
            _ => ErrorCode::RpcFail,
        };
        Self::new(code, error.to_string()).with_source(error)
    }
}

impl From<crate::ids::KeyError> for Error {
    fn from(error: crate::ids::KeyError) -> Self {
        // The master of Mooncake C++ responds with -600 to an empty key.
        Self::new(ErrorCode::InvalidParams, error.to_string())
    }
}

impl From<crate::alloc::AllocError> for Error {
    fn from(error: crate::alloc::AllocError) -> Self {
        let code = match error {
            crate::alloc::AllocError::Invalid => ErrorCode::InvalidParams,
            _ => ErrorCode::NoAvailableHandle,
        };
        Self::new(code, error.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for context in self.0.context.iter().rev() {
            write!(f, "{context}: ")?;
        }
        write!(f, "{} ({} {})", self.0.message, self.0.code.name(), self.0.code.number())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        if let Some(source) = &self.0.source {
            write!(f, ", caused by: {source}")?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

/// Extension of results that adds context to an error on its way up.
pub trait ResultExt<T> {
    /// Adds a fixed or formatted context, computed only on failure.
    fn context<C: Into<Cow<'static, str>>>(self, context: impl FnOnce() -> C) -> Result<T>;
}

impl<T, E: Into<Error>> ResultExt<T> for Result<T, E> {
    fn context<C: Into<Cow<'static, str>>>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|e| e.into().context(context()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_goes_outside_in_and_ends_with_the_code() {
        let error = Error::new(ErrorCode::LeaseExpired, "the lease ran out")
            .context("replica 3")
            .context("get \"k\"");
        assert_eq!(error.to_string(), "get \"k\": replica 3: the lease ran out (LEASE_EXPIRED -707)");
        assert_eq!(error.kind(), ErrorKind::Expired);
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }

    #[test]
    fn a_clone_shares_the_source_and_takes_its_own_context() {
        let io = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let error = Error::from(io).with_reason(Reason::ConnectionBroken);
        let clone = error.clone().context("b");
        assert_eq!(clone.reason(), Some(Reason::ConnectionBroken));
        assert!(StdError::source(&clone).is_some());
        assert!(clone.to_string().starts_with("b: ") && !error.to_string().starts_with("b: "));
    }

    #[test]
    fn conversion_preserves_source() {
        let io = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "refused");
        let error = Error::from(io);
        assert_eq!(error.code(), ErrorCode::RpcFail);
        assert!(StdError::source(&error).is_some());
    }
}
