//! Which masters this client speaks with.

use mooncake_core::{Error, ErrorCode, Result};

/// Versions whose calls this client makes. More than one, once their shapes are in the table of
/// messages.
pub const MASTER_VERSIONS: &[&str] = &["2.0.0"];

/// `INVALID_VERSION`, naming both, unless the master's version is one of [`MASTER_VERSIONS`].
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
