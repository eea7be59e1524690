//! The seed of randomized tests.

/// Variable that names the seed of every randomized test of a run.
const VARIABLE: &str = "MOONCAKE_TEST_SEED";
/// Seed without the variable, so that each run of the tests draws the same numbers.
const FIXED: u64 = 20_261_129;

/// Returns the seed of a randomized test: the number in `MOONCAKE_TEST_SEED`, or a fixed one.
///
/// `cargo xtask nightly` sets the variable to a new number in each run. A failure prints the seed,
/// and the same value of the variable repeats the test.
///
/// # Panics
/// Panics if the variable is not a number below 2^63, so that a test may count upwards from it.
#[allow(clippy::disallowed_methods, reason = "a setting of the tests")]
#[allow(clippy::print_stderr, reason = "a failure shows the seed")]
pub fn test_seed() -> u64 {
    let seed = std::env::var(VARIABLE).map_or(FIXED, |text| {
        let number = text.parse().ok().filter(|number| *number < 1 << 63);
        number.unwrap_or_else(|| {
            panic!("cannot choose test seed: expected a number below 2^63. {VARIABLE}={text}")
        })
    });
    eprintln!("{VARIABLE}={seed}");
    seed
}
