//! Classification of errors, and keys as messages show them.

use mooncake_core::{Error, ErrorKind};

/// Returns whether an error means that no replica of an object can be read.
pub(crate) fn is_lost(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Expired | ErrorKind::Corrupt)
}

/// Formats a key for messages: escaped, and cut after 64 bytes.
pub(crate) fn shown(key: &[u8]) -> String {
    match key.get(..64) {
        Some(start) if key.len() > 64 => format!("\"{}\"..", start.escape_ascii()),
        _ => format!("\"{}\"", key.escape_ascii()),
    }
}
