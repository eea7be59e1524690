//! Bugs that test builds contain on request, so that a test can prove that it detects them.
//!
//! Each bug reverts one fix. `MOONCAKE_PLANTED_BUG=<name>` enables one bug for a whole process.
//! `cargo xtask edges` runs each test of its table with its bug enabled and expects a failure.
//! Builds without the feature `testkit` contain no bug.

/// Environment variable that names the enabled bug.
pub const VARIABLE: &str = "MOONCAKE_PLANTED_BUG";

/// Returns whether the bug called `name` is enabled in this process.
#[cfg(feature = "testkit")]
#[must_use]
pub fn is_planted(name: &str) -> bool {
    static PLANTED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    #[allow(clippy::disallowed_methods, reason = "test builds only, and read once")]
    let planted = PLANTED.get_or_init(|| std::env::var(VARIABLE).ok());
    planted.as_deref() == Some(name)
}

/// Returns `false`: this build contains no bugs on request.
#[cfg(not(feature = "testkit"))]
#[must_use]
#[inline(always)]
pub const fn is_planted(_name: &str) -> bool {
    false
}
