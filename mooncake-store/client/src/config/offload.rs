//! What a client is told about its disk.

use std::path::PathBuf;
use std::time::Duration;

use mooncake_core::{Error, Result};

/// A disk of a client's, for objects that memory has no room for. The defaults are the existing
/// system's.
#[derive(Clone, Debug, PartialEq)]
pub struct OffloadConfig {
    /// Directory of its files; it is made if need be. One client at a time.
    pub path: PathBuf,
    /// Most bytes it takes there (2 TiB), and never more than 90 % of what the file system has.
    pub capacity: u64,
    /// Most objects (10,000,000).
    pub max_objects: usize,
    /// Memory through which others read from the disk, in bytes (1280 MiB).
    pub buffer: u64,
    /// How long what lies there may be read (5 s).
    pub lend: Duration,
    /// Most time between two questions to the master about what is to be written (10 s); a master
    /// of ours is asked with every ping.
    pub interval: Duration,
    /// Fill of the disk, as a part of its capacity, above which it is emptied down to the second
    /// after each of them (0.9 and 0.8). `None`: objects go only when others need their place.
    pub watermarks: Option<(f64, f64)>,
    /// I/O by threads even where the kernel has io_uring.
    pub threads: bool,
    /// Longest that anything waits for the disk (30 s): what is written, and removed. Readers wait
    /// a third of it, and are refused at once when the disk has answered nothing for a sixth.
    pub patience: Duration,
    /// Whether others may read from the disk (true). What nobody can read is written all the same.
    pub serve: bool,
    /// What goes wrong with it, in a test.
    #[cfg(all(feature = "disk", feature = "testkit"))]
    pub faults: Option<DiskFaults>,
}

/// A disk that misbehaves as a test tells it to (feature `testkit`).
#[cfg(all(feature = "disk", feature = "testkit"))]
#[derive(Clone, Debug)]
pub struct DiskFaults(pub std::sync::Arc<dyn mooncake_disk::IoFaults>);

#[cfg(all(feature = "disk", feature = "testkit"))]
impl PartialEq for DiskFaults {
    fn eq(&self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&self.0, &other.0)
    }
}

impl OffloadConfig {
    /// A disk in that directory.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            capacity: 2 << 40,
            max_objects: 10_000_000,
            buffer: 1280 << 20,
            lend: Duration::from_secs(5),
            interval: Duration::from_secs(10),
            watermarks: Some((0.9, 0.8)),
            threads: false,
            patience: Duration::from_secs(30),
            serve: true,
            #[cfg(all(feature = "disk", feature = "testkit"))]
            faults: None,
        }
    }

    /// Refuses nonsense by name (`INVALID_PARAMS`).
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
