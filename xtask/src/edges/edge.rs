//! Row of the table of rare interleavings.

/// Test, and the bugs that make it fail. The names of bugs are those of
/// `mooncake_core::fault_injection::is_planted`.
pub(super) struct Edge {
    /// Test program (`tests/<program>`), or `lib <crate_name>` for the unit tests of a crate.
    pub(super) program: &'static str,
    /// Path of the test in the program: modules and function.
    pub(super) test: &'static str,
    pub(super) bugs: &'static [&'static str],
}
