//! Settings of the disk of a client.

use std::path::PathBuf;
use std::time::Duration;

use mooncake_core::evict::PolicyKind;
use mooncake_core::{Error, Result};
#[cfg(feature = "disk")]
pub use mooncake_disk::Faults as DiskFaults;

/// Faults that a test injects into a disk. They need a build with feature `disk`.
#[cfg(not(feature = "disk"))]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskFaults {}

/// Settings of a disk that stores objects for which memory has no space. The defaults are those of
/// Mooncake C++.
#[derive(Clone, Debug, PartialEq)]
pub struct OffloadConfig {
    /// Directory of the files. The client creates a missing directory. Of several clients with one
    /// directory, the first uses it, and each other one uses the first free of its subdirectories
    /// `worker-1`, `worker-2` and so on.
    pub path: PathBuf,
    /// Maximum number of bytes of this client in the directory (2 TiB), at most 90 % of the file
    /// system.
    pub capacity: u64,
    /// Maximum number of objects (10,000,000).
    pub max_objects: usize,
    /// Size of the buffer through which other clients read from the disk, in bytes (1280 MiB). The
    /// buffer grows for an object that is longer.
    pub buffer: u64,
    /// Time for which other clients may read an object in the buffer (5 s).
    pub lend: Duration,
    /// Longest time between two requests to the master for objects to write (10 s). A master that
    /// numbers its responses is asked with every heartbeat.
    pub interval: Duration,
    /// Watermarks of eviction, as fractions of the capacity (0.9 and 0.8). Above the first, objects
    /// are evicted down to the second. With `None`, objects are evicted only for the space of
    /// others.
    pub watermarks: Option<(f64, f64)>,
    /// Policy that selects the objects to evict (gittins).
    pub eviction: PolicyKind,
    /// Use of threads for the I/O even if the kernel supports io_uring.
    pub threads: bool,
    /// Longest time for which a write or removal waits for the disk (30 s). A read waits a third of
    /// this time. A read fails at once if the disk has completed nothing for a sixth of this time.
    pub patience: Duration,
    /// Faults of the disk in a test.
    pub faults: DiskFaults,
}

impl OffloadConfig {
    /// Returns the default settings for a disk in a directory.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            capacity: 2 << 40,
            max_objects: 10_000_000,
            buffer: 1280 << 20,
            lend: Duration::from_secs(5),
            interval: Duration::from_secs(10),
            watermarks: Some((0.9, 0.8)),
            eviction: PolicyKind::Gittins,
            threads: false,
            patience: Duration::from_secs(30),
            faults: DiskFaults::default(),
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` with the name of the first invalid setting.
    pub(crate) fn validate(&self) -> Result<()> {
        let wrong = |what: &str| Err(Error::invalid(format!("offload: {what}")));
        if self.path.as_os_str().is_empty() {
            return wrong("path is empty; give the directory for the objects");
        }
        if self.capacity < 1 << 20 || self.max_objects == 0 {
            return wrong("capacity must be 1 MiB or more, and max_objects more than 0");
        }
        if !(1 << 16..=1 << 40).contains(&self.buffer) {
            return wrong("buffer must be 64 KiB to 1 TiB");
        }
        if self.interval.is_zero() || self.lend.is_zero() || self.patience.is_zero() {
            return wrong("interval, lend and patience must be more than zero");
        }
        if self.watermarks.is_some_and(|(high, low)| !(0.0 < low && low <= high && high <= 1.0)) {
            return wrong("watermarks: 0 < low <= high <= 1 is needed");
        }
        Ok(())
    }
}
