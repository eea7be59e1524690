//! Classification of errors, and keys as messages show them.

use mooncake_core::{Error, ErrorKind};

/// Whether that means that nobody could give the bytes of an object: the cache has lost them, or as good as.
pub(crate) fn is_lost(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Expired | ErrorKind::Corrupt)
}

/// A key as messages show it: escaped, and cut where it is long.
pub(crate) fn shown(key: &[u8]) -> String {
    match key.get(..64) {
        Some(start) if key.len() > 64 => format!("\"{}\"..", start.escape_ascii()),
        _ => format!("\"{}\"", key.escape_ascii()),
    }
}
