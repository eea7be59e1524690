//! Random writes of every kind into memory that is full of old bytes.
//!
//! Again and again, all free memory is filled with one marker byte, which no value contains: it
//! stands for a removed object of another tenant. No read returns that byte, and each object has
//! exactly the bytes that its own write has put. Transfers are held, fail, end early or land late.
//! Calls are dropped at any await. Segments leave, and others come.
//!
//! `MOONCAKE_OLD_MEMORY_OPERATIONS` sets the number of operations of the first test. Ten tests make
//! 10,000 operations together, from seeds of their own, and 100,000 by night.

mod expected;
mod operations;
mod stage;

use mooncake_core::testkit::{effort, test_seed};

use self::stage::Stage;

/// Number of operations in which each event occurs.
const ENOUGH: u64 = 10_000;
/// Number of operations of one cluster.
const PER_CLUSTER: u64 = 1_500;
/// Number of seeds from the first one of a test to that of the next one.
const SEEDS: u64 = 1 << 20;

/// Numbers of events of a run: a test without the rare ones shows nothing.
#[derive(Debug, Default)]
struct Seen {
    /// Reads of whole values, or of ranges, that returned bytes.
    read: u64,
    /// Reads that the owner of a disk has served.
    read_from_disk: u64,
    /// Reads of keys without an object.
    missed: u64,
    /// Puts and upserts that ended with a stored value.
    stored: u64,
    /// Puts and upserts that failed.
    failed: u64,
    /// Calls that were dropped before their end.
    dropped: u64,
    /// Sessions that ended with a readable object.
    committed: u64,
    /// Sessions whose end was refused.
    refused: u64,
    /// Sessions that were given back, or dropped without a word.
    abandoned: u64,
    /// Tasks to copy or move an object that were accepted.
    copies: u64,
    /// Objects that returned from a disk to memory.
    promoted: u64,
    /// Removals of objects.
    removed: u64,
    /// Segments that left for new ones.
    replaced: u64,
}

impl Seen {
    fn add(&mut self, other: &Self) {
        let Self { read, read_from_disk, missed, stored, failed, dropped, committed, .. } = other;
        self.read += read;
        self.read_from_disk += read_from_disk;
        self.missed += missed;
        self.stored += stored;
        self.failed += failed;
        self.dropped += dropped;
        self.committed += committed;
        self.refused += other.refused;
        self.abandoned += other.abandoned;
        self.copies += other.copies;
        self.promoted += other.promoted;
        self.removed += other.removed;
        self.replaced += other.replaced;
    }

    fn least(&self) -> u64 {
        let often = [self.read, self.missed, self.stored, self.failed, self.dropped, self.committed];
        let rare = [self.read_from_disk, self.refused, self.abandoned, self.copies, self.promoted];
        let last = [self.removed, self.replaced];
        often.into_iter().chain(rare).chain(last).min().unwrap_or_default()
    }
}

/// Returns the number of operations of one test.
fn usual() -> u64 {
    effort(1_000, 10_000)
}

/// Returns the number of operations that the environment names.
#[allow(clippy::disallowed_methods, reason = "a setting of the test")]
fn operations() -> u64 {
    let count = std::env::var("MOONCAKE_OLD_MEMORY_OPERATIONS").ok();
    count.map_or_else(usual, |text| text.parse().expect("a number of operations"))
}

#[tokio::test]
async fn no_read_returns_bytes_that_its_object_was_not_given() {
    run(test_seed(), operations()).await;
}

/// Declares tests of further seeds.
macro_rules! more {
    ($($test:ident = $number:literal;)*) => {$(
        #[tokio::test]
        async fn $test() {
            run(test_seed() + $number * SEEDS, usual()).await;
        }
    )*};
}

more! {
    seeds_of_the_second_test = 1;
    seeds_of_the_third_test = 2;
    seeds_of_the_fourth_test = 3;
    seeds_of_the_fifth_test = 4;
    seeds_of_the_sixth_test = 5;
    seeds_of_the_seventh_test = 6;
    seeds_of_the_eighth_test = 7;
    seeds_of_the_ninth_test = 8;
    seeds_of_the_tenth_test = 9;
}

/// Makes this number of operations, in clusters from this seed on.
#[allow(clippy::print_stdout, reason = "what a run has seen")]
async fn run(first: u64, operations: u64) {
    let mut left = operations;
    let mut all = Seen::default();
    for seed in first.. {
        let mut stage = Stage::new(seed).await;
        for step in 0..left.min(PER_CLUSTER) {
            if let Err(why) = stage.step().await {
                panic!("{why}\nrepeat with MOONCAKE_TEST_SEED={seed} (step {step})");
            }
        }
        if let Err(why) = stage.finish().await {
            panic!("{why}\nrepeat with MOONCAKE_TEST_SEED={seed} (at the end)");
        }
        all.add(&stage.seen);
        left = left.saturating_sub(PER_CLUSTER);
        if left == 0 {
            break;
        }
    }
    println!("{all:?}");
    assert!(all.read > 0 && all.stored > 0 && all.committed > 0, "nothing was compared: {all:?}");
    assert!(operations < ENOUGH || all.least() > 0, "every event must be seen: {all:?}");
}
