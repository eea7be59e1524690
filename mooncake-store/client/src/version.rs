//! Versions of masters that this client supports.

use mooncake_core::{Error, ErrorCode, Result};

/// Versions of the protocol that this client supports.
pub const MASTER_VERSIONS: &[&str] = &["2.0.0"];

/// Checks that the version of the master is one of [`MASTER_VERSIONS`].
///
/// # Errors
/// Returns `INVALID_VERSION` with both versions otherwise.
pub fn check(master: &str) -> Result<()> {
    if MASTER_VERSIONS.contains(&master) {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::InvalidVersion,
        format!("the master is version {master:?}, this client speaks with {}", MASTER_VERSIONS.join(", ")),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::ErrorKind;

    #[test]
    fn both_versions_are_named() {
        check("2.0.0").unwrap();
        let error = check("1.9.3").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        assert!(error.message().contains("1.9.3") && error.message().contains("2.0.0"), "{error}");
    }
}
