//! Settings of prefetches from disks to memory.

use std::time::Duration;

/// Settings of prefetches from disks to memory. The defaults are those of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// Permission for existence checks to prefetch objects that they find
    /// ([`ExistOptions`](crate::ExistOptions)). False by default.
    pub on_exist: bool,
    /// Time for which this client brings nothing back from its disk after memory had no space
    /// (5 s). Zero: no pause.
    pub cooldown: Duration,
    /// Time in which an object is prefetched once at most (30 s). Zero: no limit.
    pub dedup: Duration,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        Self { on_exist: false, cooldown: Duration::from_secs(5), dedup: Duration::from_secs(30) }
    }
}
