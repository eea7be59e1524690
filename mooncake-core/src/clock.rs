//! Time and random numbers. Every other module takes them from here, so that a failing run can be
//! replayed.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Point on a monotonic clock, in nanoseconds since an origin that the clock chooses. Meaningful
/// only in comparison with other points of the same clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// Returns the moment `span` later, or the largest moment if the sum overflows.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Source of monotonic time, and of wall-clock time for display.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Returns the current time, never earlier than before. Leases and timeouts use this time.
    fn now(&self) -> Moment;

    /// Returns milliseconds since 1970 UTC. For logs, for fields that carry a date, and for times
    /// that outlive the process. Decisions within one process use [`now`](Self::now).
    fn wall_ms(&self) -> u64;
}

/// Clock shared by the parts of one node.
pub type SharedClock = Arc<dyn Clock>;

/// Clock of the machine. On Linux it also counts the time of a suspended machine, so that no lease
/// lasts longer because of a suspension.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: Duration,
}

impl SystemClock {
    /// Creates a clock whose origin is now.
    pub fn new() -> Self {
        Self { origin: uptime() }
    }

    /// Creates a shared clock whose origin is now.
    pub fn shared() -> SharedClock {
        Arc::new(Self::new())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        // Starts at one second, so that zero can stand for "long ago".
        Moment(1_000_000_000).after(uptime().saturating_sub(self.origin))
    }

    #[allow(clippy::disallowed_methods, reason = "the only place that reads time")]
    fn wall_ms(&self) -> u64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}

/// Returns the time since the machine was started, including suspended time.
#[cfg(all(target_os = "linux", not(miri)))]
#[allow(unsafe_code)]
fn uptime() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in the struct. Every Linux that Rust supports has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the time since the first call, on systems without a better clock.
#[cfg(not(all(target_os = "linux", not(miri))))]
#[allow(clippy::disallowed_methods, reason = "the only place that reads time")]
fn uptime() -> Duration {
    static FIRST: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    FIRST.get_or_init(std::time::Instant::now).elapsed()
}

/// Returns the processor time that the calling thread has used, kernel time included. Zero if
/// unknown.
#[cfg(all(target_os = "linux", not(miri)))]
#[allow(unsafe_code)]
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in the struct, or leaves it at zero.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the processor time that the calling thread has used, kernel time included. Zero if
/// unknown.
#[cfg(not(all(target_os = "linux", not(miri))))]
pub fn thread_time() -> Duration {
    Duration::ZERO
}

/// Clock that moves only on command. For tests.
#[derive(Debug)]
pub struct ManualClock {
    nanos: AtomicU64,
}

impl ManualClock {
    /// Creates a clock that stands at one second.
    pub fn new() -> Self {
        Self { nanos: AtomicU64::new(1_000_000_000) }
    }

    /// Moves the clock forward.
    pub fn advance(&self, span: Duration) {
        self.nanos.fetch_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX / 2), Ordering::SeqCst);
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Moment {
        Moment(self.nanos.load(Ordering::SeqCst))
    }

    fn wall_ms(&self) -> u64 {
        self.now().0 / 1_000_000
    }
}

/// Small, fast pseudorandom number generator (xoshiro256++). Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// Creates the generator of this seed. The same seed gives the same numbers on every machine.
    pub fn seeded(seed: u64) -> Self {
        // The authors of the generator advise splitmix64 to spread the seed.
        let mut x = seed;
        let state = std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Self { state }
    }

    /// Creates a generator seeded by the operating system.
    pub fn from_os() -> Self {
        use std::hash::{BuildHasher, Hasher};
        // The hasher keys of the standard library are the only source of OS randomness without a
        // dependency.
        let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self::seeded(hasher.finish())
    }

    /// Creates an independent generator, seeded by this one.
    #[must_use]
    pub fn split(&mut self) -> Self {
        Self::seeded(self.next_u64())
    }

    /// Returns any 64-bit number.
    pub fn next_u64(&mut self) -> u64 {
        let [s0, s1, s2, s3] = &mut self.state;
        let result = s0.wrapping_add(*s3).rotate_left(23).wrapping_add(*s0);
        let t = *s1 << 17;
        *s2 ^= *s0;
        *s3 ^= *s1;
        *s1 ^= *s2;
        *s0 ^= *s3;
        *s2 ^= t;
        *s3 = s3.rotate_left(45);
        result
    }

    /// Returns a number in `0..bound`, or 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // Multiply-shift: the bias is below 2^-32 for every bound used here.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number in `range`, or its start when the range is empty.
    pub fn range(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// Fills a buffer with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_saturate() {
        assert_eq!(Moment(5).since(Moment(9)), Duration::ZERO);
        assert_eq!(Moment(5).after(Duration::MAX), Moment(u64::MAX));
    }

    #[test]
    fn manual_clock_stands_still() {
        let clock = ManualClock::new();
        let before = clock.now();
        assert_eq!(clock.now(), before);
        clock.advance(Duration::from_secs(3));
        assert_eq!(clock.now().since(before), Duration::from_secs(3));
    }

    #[test]
    fn rng_repeats_and_stays_in_range() {
        let (mut a, mut b) = (Rng::seeded(7), Rng::seeded(7));
        for bound in [1, 2, 3, 1000, u64::MAX] {
            let x = a.below(bound);
            assert_eq!(x, b.below(bound));
            assert!(x < bound);
        }
        assert_eq!(a.below(0), 0);
        assert!((10..20).contains(&a.range(10..20)));
        assert_ne!(Rng::from_os().next_u64(), Rng::from_os().next_u64());
    }
}
