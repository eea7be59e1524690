//! Classification of errors, and keys as messages show them.

use mooncake_core::{Error, ErrorCode, ErrorKind};

/// Returns whether an error means that no replica of an object can be read.
pub(crate) fn is_lost(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Expired | ErrorKind::Corrupt) && !is_busy(error)
}

/// Returns the error for an object that the master no longer has, after its replicas could not be
/// read for this reason.
pub(crate) fn last_replica_lost(reason: Error) -> Error {
    let text = format!("cannot read object: its last replica has left the cluster. failure={reason}");
    Error::new(ErrorCode::ObjectNotFound, text).with_source(reason)
}

/// Returns whether an error means that the owner of a replica serves as many readers as it can. The
/// replica is there, and can be read later.
pub(crate) fn is_busy(error: &Error) -> bool {
    error.code() == ErrorCode::NoAvailableHandle
}

/// Converts the error of a transfer whose owner refuses the address. The master named the address,
/// and the owner has moved or unmounted the memory since, so the call of the user is valid.
pub(crate) fn transfer_error(error: Error) -> Error {
    if error.kind() == ErrorKind::Invalid {
        let text = format!("cannot transfer: the owner no longer offers this memory. refusal={error}");
        return Error::new(ErrorCode::TransferFail, text).with_source(error);
    }
    error
}

/// Formats a key for messages: escaped, and cut after 64 bytes.
pub(crate) fn display_key(key: &[u8]) -> String {
    match key.get(..64) {
        Some(start) if key.len() > 64 => format!("\"{}\"..", start.escape_ascii()),
        _ => format!("\"{}\"", key.escape_ascii()),
    }
}
