//! Effort of randomized and exhaustive tests.

/// Variable that asks for all of it.
const VARIABLE: &str = "MOONCAKE_TEST_EFFORT";

/// Returns `full` if `MOONCAKE_TEST_EFFORT=full`, as `cargo xtask nightly` sets it, otherwise
/// `usual`: a number of rounds, of cases, or of steps between two cases.
#[allow(clippy::disallowed_methods, reason = "a setting of the tests")]
pub fn effort<T>(usual: T, full: T) -> T {
    if std::env::var_os(VARIABLE).is_some_and(|text| text == "full") { full } else { usual }
}
