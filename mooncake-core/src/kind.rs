//! Classes of errors.

/// Coarse class of an error, by what the caller can do next. Match on the kind, and log the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Missing: treat it as a miss.
    NotFound,
    /// Already present: for a cache, as good as done.
    AlreadyExists,
    /// Not enough space now: write less, or later.
    NoSpace,
    /// Held by another user (a lease, a task, a write in progress): try again later.
    Busy,
    /// Received after the lease expired, and therefore not trusted: ask again.
    Expired,
    /// Invalid call, which never succeeds as it is.
    Invalid,
    /// Server unreachable or shutting down: try another, or later.
    Unavailable,
    /// No response in time. The call may or may not have happened; every call of this project may
    /// be repeated.
    Timeout,
    /// Received bytes differ from the written ones.
    Corrupt,
    /// Incompatible versions of client and server.
    VersionMismatch,
    /// Not built, not enabled, or not possible here.
    Unsupported,
    /// Bug or broken machine: report it.
    Internal,
}
